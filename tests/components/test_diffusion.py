"""The diffusion component: captions, draws, the bound and its constants, noise, references, training, files."""

import copy
import itertools
import json
import math
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel

from sysdpo_lab import CompoundSystem, errors, loading, losses, training
from sysdpo_lab.components import Categorical, CausalLM, Completion, Diffusion, TextEncoder, adapters, elbo
from sysdpo_lab.components.layout import Noise
from sysdpo_lab.preferences import Pairs
from sysdpo_lab.summaries import ErrorWatch
from tests import tiny, tiny_diffusion
from tests.tiny_diffusion import Denoiser, component, images

CAPTIONS = [["a", "b"], ["c", "a"], ["b", "d"]]
LOG2 = math.log(2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def system_of(node):
    return CompoundSystem([node], inputs=node.parents, output=node.name)


def disturb(node, seed=0, scale=0.05):
    """Weights as after some training."""
    noise = generator(seed)
    with torch.no_grad():
        for parameter in node.trainable():
            parameter.add_(scale * torch.randn(parameter.shape, generator=noise).to(parameter.dtype))
    return node


def pair_of_sides(rows=3, n=2, dtype=torch.float32):
    y = CAPTIONS[:rows]
    return [{"y": y, "images": [images(n, 10 * side + row, dtype=dtype) for row in range(rows)]} for side in (0, 1)]


def scored(node, value=None, y=None, seed=7):
    """(policy, reference) log-probs under one noise."""
    value, y = value or [images(2, 0), images(2, 1)], y or CAPTIONS[:2]
    noise = node.draw_noise(value, generator(seed))
    policy = node.log_prob(value, {"y": y}, noise)
    with node.reference():
        return policy, node.log_prob(value, {"y": y}, noise)


# --- captions and values ----------------------------------------------------------------------------------------------


def test_a_parent_is_a_list_of_captions_or_one_caption():
    node = component()
    y = [["a", Completion("b", (5, 1))], "cd", Completion("e", (6, 1)), ("f",), [], None]
    assert node.captions_of({"y": y}) == [("a", "b"), ("cd",), ("e",), ("f",), (), None]


def test_an_answer_that_does_not_parse_draws_no_images_and_stays_in_the_batch():
    node = component(captions=tiny_diffusion.split)
    values = node.sample({"y": [Completion("a|bc", (5, 1)), "???", None]}, generator=generator())
    assert [None if v is None else tuple(v.shape) for v in values] == [(2, 3, 4, 4), (0, 3, 4, 4), None]
    assert node.log_prob(values, {"y": ["a|bc", "???", None]}, node.draw_noise(values, generator()))[1:].tolist() == [
        0,
        0,
    ]
    assert component(captions=lambda y: None).captions_of({"y": ["a"]}) == [()]


def test_a_value_with_another_number_of_images_than_captions_is_impossible():
    node = component(captions=tiny_diffusion.split)
    values = [images(3, 0), images(1, 0), images(1, 0), images(2, 0)]
    found = node.log_prob(values, {"y": ["a|b", "???", None, "a|b"]}, node.draw_noise(values, generator()))
    assert found[:3].tolist() == [-math.inf] * 3 and torch.isfinite(found[3])


def test_a_function_of_several_parents_is_called_in_their_order():
    node = component(parents=("x", "y"), captions=lambda x, y: [f"{x}{y}"] * x)
    assert node.captions_of({"x": torch.tensor([2, 1]), "y": ["a", None]}) == [("2a", "2a"), ("1None",)]
    with pytest.raises(errors.CaptionError, match="'images'.*'x', 'y'.*captions="):
        component(parents=("x", "y"))


@pytest.mark.parametrize("bad", [[["a", None]], [[["a"]]], [[{}]]])
def test_what_is_no_caption_is_refused_with_component_and_row(bad):
    with pytest.raises(errors.CaptionError, match="'images', row 0"):
        component().sample({"y": bad})


def test_other_errors_of_the_captions_function_are_raised_with_the_row():
    node = component(captions=lambda y: y.missing)
    with pytest.raises(AttributeError) as caught:
        node.sample({"y": ["a"]})
    assert "'images', row 0" in caught.value.__notes__[0]


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "eta"), [("DDIMScheduler", 0.0), ("DDIMScheduler", 1.0), ("DDPMScheduler", 0.0)])
@pytest.mark.parametrize("prediction", elbo.PREDICTIONS)
def test_the_same_generator_draws_the_same_images_and_only_it_is_used(kind, eta, prediction):
    node = component(scheduler=tiny_diffusion.scheduler(prediction, kind), eta=eta)
    state = torch.get_rng_state()
    first, again, other = (node.sample({"y": CAPTIONS}, generator=generator(seed)) for seed in (3, 3, 4))
    free = node.sample({"y": CAPTIONS})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, other)) and not torch.equal(first[0], free[0])
    assert not torch.equal(first[0][0], first[0][1])


@pytest.mark.parametrize("kind", ["DDIMScheduler", "DDPMScheduler"])
def test_a_row_draws_the_same_whatever_else_is_in_the_batch(kind):
    node = component(scheduler=tiny_diffusion.scheduler(kind=kind))
    small = component(scheduler=tiny_diffusion.scheduler(kind=kind), max_batch=1)
    whole = node.sample({"y": CAPTIONS}, generator=generator())
    torch.testing.assert_close(small.sample({"y": CAPTIONS}, generator=generator()), whole, atol=1e-5, rtol=1e-5)
    shorter = node.sample({"y": [[], CAPTIONS[1], []]}, generator=generator())
    torch.testing.assert_close(shorter[1], whole[1], atol=1e-5, rtol=1e-5)


def test_k_draws_a_row_are_grouped_and_different():
    node = component()
    found = node.sample({"y": CAPTIONS[:2]}, num_samples=3, generator=generator())
    assert [len(row) for row in found] == [3, 3] and found[0][0].shape == (2, 3, 4, 4)
    assert not torch.equal(found[0][0], found[0][1])


def test_greedy_is_fixed_and_starts_every_row_from_the_same_noise():
    node = component()
    y = [["a", "b"], ["a"], ["a", "b"]]
    found = node.greedy({"y": y})
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    assert torch.equal(node.greedy({"y": y})[2], found[2])
    assert not torch.equal(component(seed=1).greedy({"y": y})[0], found[0])


def test_draws_are_those_of_the_exact_model():
    """Images of N(2, 0.5^2), drawn with the best denoiser, have its mean and spread."""
    scheduler = tiny_diffusion.scheduler(steps=200, beta_end=0.05, kind="DDPMScheduler", variance_type="fixed_small")
    net = Denoiser(elbo.alphas_bar(scheduler), 2.0, 0.5)
    node = Diffusion("z", ("y",), net, scheduler, weight=1.0, image_shape=(1, 1, 8), steps=200, max_batch=500)
    drawn = node.sample({"y": [["a"] * 250]}, generator=generator())[0]
    assert drawn.mean().item() == pytest.approx(2, abs=0.05) and drawn.std().item() == pytest.approx(0.5, abs=0.05)


def test_guidance_is_the_formula_and_leaves_the_bound_alone():
    """out_u + g (out_c - out_u): with a network linear in its states that is the output for u + g (c - u)."""

    class Linear(torch.nn.Module):
        def forward(self, x_t, t, encoder_hidden_states):
            return 0.1 * x_t + encoder_hidden_states.mean((1, 2))[:, None, None, None]

    def node(encoder, scale):
        options = {"weight": 1.0, "steps": 4, "image_shape": (1, 2, 2), "guidance_scale": scale}
        return Diffusion("z", ("y",), Linear(), tiny_diffusion.scheduler(), encoder, **options)

    words = tiny_diffusion.Words()

    def guided(captions):
        empty = words([""])
        return empty + 2.5 * (words(captions) - empty)

    first, second = (n.sample({"y": ["ab"]}, generator=generator())[0] for n in (node(words, 2.5), node(guided, 1.0)))
    torch.testing.assert_close(first, second)
    plain, strong = (scored(node(words, g), [images(1, 0, (1, 2, 2))], ["ab"])[0] for g in (1.0, 2.5))
    assert torch.equal(plain, strong)
    assert not torch.equal(first, node(words, 1.0).sample({"y": ["ab"]}, generator=generator())[0])


def test_patches_and_value_range_are_undone_after_drawing():
    node = component(unet=tiny_diffusion.unet(channels=12), patch=2, value_range=(0, 1), prediction="sample")
    drawn = node.sample({"y": CAPTIONS}, generator=generator())[0]
    assert drawn.shape == (2, 3, 8, 8) and drawn.min() >= 0 and drawn.max() <= 1
    inside = images(2, 0, (3, 8, 8)).sigmoid()
    torch.testing.assert_close(node.space.to_images(node.space.to_x0(inside)), inside)
    x0 = node.space.to_x0(inside)
    assert x0.shape == (2, 12, 4, 4) and x0[0, 5, 1, 2].item() == pytest.approx(2 * inside[0, 1, 2, 5].item() - 1)
    with pytest.raises(errors.ImageShapeError, match="'images'.*7 x 8"):
        node.draw_noise([images(1, 0, (3, 7, 8))])


def test_the_scheduler_that_was_given_is_not_changed():
    scheduler = tiny_diffusion.scheduler()
    component(scheduler=scheduler).sample({"y": CAPTIONS}, generator=generator())
    assert scheduler.num_inference_steps is None


def test_an_unconditional_model_without_parents_can_be_drawn_and_scored():
    net = Denoiser(elbo.alphas_bar(tiny_diffusion.scheduler()), 0.0, 1.0)
    node = Diffusion("z", (), net, tiny_diffusion.scheduler(), weight=1.0, image_shape=(1, 1, 2), steps=3)
    assert node.greedy({})[0].shape == (1, 1, 1, 2)
    values = node.sample({}, num_samples=3, generator=generator())[0]
    assert node.log_prob(values, {}, node.draw_noise(values, generator())).shape == (3,)


# --- the bound --------------------------------------------------------------------------------------------------------


def by_hand(node, value, captions, noise):
    """One row's - sum W mean((eps - eps_hat)^2), image by image."""
    total = 0.0
    for image, caption, t, eps in zip(value, captions, *noise):
        abar = node.abar[t].float()
        x_t = elbo.noised(image.expand(len(t), -1, -1, -1), eps, abar)
        with torch.no_grad():
            out = node.network(x_t, t, encoder_hidden_states=node.encoder([caption]).expand(len(t), -1, -1)).sample
        square = (eps.double() - elbo.as_noise(node.prediction, out, x_t, abar).double()).square().mean((1, 2, 3))
        total -= node.weight * square.mean().item()
    return total


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("prediction", elbo.PREDICTIONS)
def test_log_prob_is_the_weighted_noise_error_of_every_image(prediction, times):
    node = component(prediction=prediction, timesteps=times)
    values = [images(2, 0), images(1, 1), images(0, 2)]
    y = [["a", "bc"], ["d"], []]
    noise = node.draw_noise(values, generator())
    found = node.log_prob(values, {"y": y}, noise)
    assert found.dtype == torch.float64
    for row in range(2):
        assert found[row].item() == pytest.approx(by_hand(node, values[row], y[row], noise[row]), rel=1e-3)
    errors_of_rows = node.denoising_errors(values, {"y": y}, noise)
    torch.testing.assert_close(errors_of_rows * torch.tensor([2, 1, 0]) * -node.weight, found)
    torch.testing.assert_close(node.last_errors["policy"][:2], errors_of_rows[:2].detach())


def test_the_three_predictions_of_one_model_have_the_same_noise_error():
    abar = elbo.alphas_bar(tiny_diffusion.scheduler())
    found = []
    for prediction, weighting in itertools.product(elbo.PREDICTIONS, ("constant", "elbo")):
        net = Denoiser(abar, 0.3, 0.8, prediction)
        node = Diffusion(
            "z", ("y",), net, tiny_diffusion.scheduler(prediction), weight=3.0 if weighting == "constant" else None
        )
        assert node.weighting == weighting
        found.append(scored(node, [images(2, 0, (1, 2, 2))], ["a"] and [["a", "b"]])[0].item())
    assert found[0] == pytest.approx(found[2], rel=1e-9) and found[0] == pytest.approx(found[4], rel=1e-9)
    assert found[1] == pytest.approx(found[3], rel=1e-9) and found[1] == pytest.approx(found[5], rel=1e-9)


def test_error_prediction_keeps_the_networks_own_error():
    values, y = [images(1, 0)], [["a"]]
    found = {error: component(prediction="sample", error=error) for error in ("noise", "prediction")}
    noise = found["noise"].draw_noise(values, generator())
    own, converted = (found[error].log_prob(values, {"y": y}, noise).item() for error in ("prediction", "noise"))
    t = noise[0].timesteps[0, 0]
    assert converted == pytest.approx(own * elbo.snr(found["noise"].abar)[t].item(), rel=1e-6) and converted != own


@pytest.mark.parametrize(("beta", "weight"), [(1.0, 2500.0), (0.1, 25000.0), (5000.0, 0.5)])
def test_both_public_conventions_of_diffusion_dpo(beta, weight):
    """5000 with the factor 1/2 (the authors' code) and 2500 without: -log sigmoid(-(beta_dpo / 2) (model_diff - ref_diff))."""
    node = disturb(component(weight=weight), scale=0.002)
    chosen, rejected = pair_of_sides(n=1)
    chosen["y"] = rejected["y"] = [["a"], ["b"], ["c"]]
    found = losses.direct_loss(system_of(node), chosen, rejected, beta, generator=generator(3))
    noise = node.draw_noise(chosen["images"], generator(3))

    def square(network, side, row):
        t, eps = noise[row]
        x_t = node.scheduler.add_noise(side["images"][row], eps[0], t[0])
        pred = network(x_t, t[0], encoder_hidden_states=node.encoder(side["y"][row])).sample
        return (pred - eps[0]).square().mean().item()

    per_row = []
    with torch.no_grad():
        for row in range(3):
            model_diff, ref_diff = (
                square(net, chosen, row) - square(net, rejected, row) for net in (node.network, node.reference_model)
            )
            per_row.append((model_diff, ref_diff))
    authors = [-torch.tensor(-0.5 * 5000 * (m - r), dtype=torch.float64).sigmoid().log().item() for m, r in per_row]
    without = [-torch.tensor(2500 * (r - m), dtype=torch.float64).sigmoid().log().item() for m, r in per_row]
    assert max(abs(m - r) for m, r in per_row) > 1e-4  # the margins are not all about 0
    assert found.loss.item() == pytest.approx(sum(authors) / 3, abs=2e-3)  # their residuals are float32 means
    assert found.loss.item() == pytest.approx(sum(without) / 3, abs=2e-3)


def test_the_constants_of_both_conventions_to_1e_6():
    """In float64, with the network's outputs handed to the formulas of both scripts."""
    scheduler = tiny_diffusion.scheduler()
    node = Diffusion("z", ("y",), Denoiser(elbo.alphas_bar(scheduler), 0.1, 0.9), scheduler, weight=2500.0)
    disturb(node, scale=0.01)
    sides = [{"y": ["a"] * 4, "z": [images(1, 4 * s + r, (1, 2, 3), torch.float64) for r in range(4)]} for s in (0, 1)]
    found = losses.direct_loss(system_of(node), *sides, 1.0, generator=generator(1))
    noise = node.draw_noise(sides[0]["z"], generator(1))

    def mse(net, side, row):
        t, eps = noise[row].timesteps[0], noise[row].eps[0].double()
        return (net(elbo.noised(side["z"][row], eps, node.abar[t]), t) - eps).square().mean()

    with torch.no_grad():
        diffs = [
            [mse(n, sides[0], r) - mse(n, sides[1], r) for r in range(4)] for n in (node.network, node.reference_model)
        ]
    model_diff, ref_diff = map(torch.stack, diffs)
    authors = -torch.nn.functional.logsigmoid(-0.5 * 5000 * (model_diff - ref_diff)).mean()
    diffusers_script = -torch.nn.functional.logsigmoid(2500 * (ref_diff - model_diff)).mean()
    assert abs(authors.item() - LOG2) > 1e-3
    assert found.loss.item() == pytest.approx(authors.item(), abs=1e-6)
    assert found.loss.item() == pytest.approx(diffusers_script.item(), abs=1e-6)


# --- an exact likelihood ----------------------------------------------------------------------------------------------

HERMITE = [
    (-math.sqrt(3), 1 / 6),
    (0.0, 2 / 3),
    (math.sqrt(3), 1 / 6),
]  # exact for the squares of what is linear in eps


def expected_log_prob(node, z, reference):
    """The expectation of `log_prob` over t (all of them) and eps (quadrature)."""
    steps, total = len(node.abar), 0.0
    for place, weight in HERMITE:
        noise = [Noise(torch.arange(steps)[None], torch.full((1, steps, *z.shape[1:]), place, dtype=torch.float64))]
        with node.reference() if reference else torch.no_grad():
            total += weight * node.log_prob([z], {"y": ["a"]}, noise).item()
    return total


def gaussian_node(steps, prediction="epsilon"):
    """Policy N(0.6, 1.2^2), reference N(-0.2, 0.8^2) on two numbers, both with their best denoisers."""
    scheduler = tiny_diffusion.scheduler(prediction, steps=steps, beta_start=0.02 / steps, beta_end=20 / steps)
    abar = elbo.alphas_bar(scheduler)
    node = Diffusion("z", ("y",), Denoiser(abar, -0.2, 0.8, prediction), scheduler, max_batch=5000)
    node.network.load_state_dict(Denoiser(abar, 0.6, 1.2).state_dict())
    return node


def bound_by_hand(abar, z, mean, spread):
    """E[log p(z | x_1)] - sum over t of E KL, one number, closed form; terms without parameters left out."""
    total = 0.0
    for t in range(len(abar)):
        alpha, variance = math.sqrt(abar[t]), 1 - abar[t]
        gain = alpha * spread**2 / (abar[t] * spread**2 + variance)
        bias = z - mean - gain * alpha * (z - mean)
        square = bias**2 + gain**2 * variance  # E (x0 - x0_hat)^2 over eps
        if t == 0:
            total -= square / (2 * (1 - abar[0]))
        else:
            total -= (abar[t - 1] / (1 - abar[t - 1]) - abar[t] / (1 - abar[t])) / 2 * square
    return total


@pytest.mark.parametrize("prediction", elbo.PREDICTIONS)
def test_the_expected_score_is_the_bound_in_closed_form(prediction):
    node = gaussian_node(50, prediction)
    abar, z = node.abar.tolist(), torch.tensor([0.7, -1.1], dtype=torch.float64).reshape(1, 1, 1, 2)
    for reference, law in ((False, (0.6, 1.2)), (True, (-0.2, 0.8))):
        expected = sum(bound_by_hand(abar, x, *law) for x in (0.7, -1.1))
        assert expected_log_prob(node, z, reference) == pytest.approx(expected, rel=1e-9)


def test_with_the_best_denoiser_the_bound_approaches_the_exact_log_ratio():
    """log N(z; 0.6, 1.2^2) - log N(z; -0.2, 0.8^2): the error falls like 1 / T."""
    z = torch.tensor([0.7, -1.1], dtype=torch.float64)
    policy, reference = torch.distributions.Normal(0.6, 1.2), torch.distributions.Normal(-0.2, 0.8)
    exact = (policy.log_prob(z) - reference.log_prob(z)).sum().item()
    gaps = []
    for steps in (50, 200, 800):
        node = gaussian_node(steps)
        ratio = expected_log_prob(node, z.reshape(1, 1, 1, 2), False) - expected_log_prob(
            node, z.reshape(1, 1, 1, 2), True
        )
        gaps.append(abs(ratio - exact))
    assert gaps[2] < 0.02 * abs(exact)
    assert gaps[1] < 0.4 * gaps[0] and gaps[2] < 0.4 * gaps[1]


def test_one_timestep_is_an_unbiased_estimate_and_more_are_less_noisy():
    node = gaussian_node(50)
    z = torch.tensor([0.7, -1.1], dtype=torch.float64).reshape(1, 1, 1, 2)
    exact = expected_log_prob(node, z, False) - expected_log_prob(node, z, True)
    spread = {}
    for name, times, stratified in (("one", 1, False), ("four", 4, False), ("strata", 4, True)):
        node.timesteps, node.stratified = times, stratified
        noise = node.draw_noise([z] * 4000, generator())
        with torch.no_grad():
            policy = node.log_prob([z] * 4000, {"y": ["a"] * 4000}, noise)
            with node.reference():
                ratios = policy - node.log_prob([z] * 4000, {"y": ["a"] * 4000}, noise)
        spread[name] = ratios.std().item()
        assert ratios.mean().item() == pytest.approx(exact, abs=4 * spread[name] / math.sqrt(4000))
    assert spread["four"] == pytest.approx(spread["one"] / 2, rel=0.15)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_winner_and_loser_policy_and_reference_share_timestep_and_noise():
    """P38."""
    seen = []
    node = component()
    system = system_of(node)
    plain = node._part_squares
    node._part_squares = lambda network, x0, eps, t, captions: (
        seen.append((eps, t)),
        plain(network, x0, eps, t, captions),
    )[1]
    losses.direct_loss(system, *pair_of_sides(), 0.1, generator=generator())
    (eps, t), (eps_ref, t_ref) = seen
    assert torch.equal(eps, eps_ref) and torch.equal(t, t_ref)
    assert torch.equal(eps[:6], eps[6:]) and torch.equal(t[:6], t[6:])  # 3 pairs with 2 images
    assert all(not torch.equal(eps[i], eps[j]) for i, j in itertools.combinations(range(6), 2))


def test_different_noise_is_drawn_for_different_pairs_and_steps_and_global_state_is_untouched():
    node, values, g = component(), [images(2, 0)] * 2, generator()
    state = torch.get_rng_state()
    first, second = node.draw_noise(values, g), node.draw_noise(values, g)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first[0].eps, first[1].eps) and not torch.equal(first[0].eps, second[0].eps)
    assert torch.equal(node.draw_noise(values, generator())[1].eps, first[1].eps)


def test_without_noise_the_score_is_refused_by_name():
    node = component()
    with pytest.raises(errors.NoiseRequiredError, match="'images' scores by a bound"):
        node.log_prob([images(1, 0)], {"y": ["a"]})
    with pytest.raises(errors.NoiseRequiredError, match="'images'.*draw_noise"):
        system_of(node).log_prob({"y": ["a"], "images": [images(1, 0)]})


def test_noise_of_another_batch_is_refused_with_the_row():
    node = component()
    noise = node.draw_noise([images(1, 0), images(2, 0)], generator())
    with pytest.raises(errors.NoiseRequiredError, match="row 1.*2 images"):
        node.log_prob([images(1, 0), images(2, 0)], {"y": ["a", ["a", "b"]]}, [noise[0], noise[0]])
    with pytest.raises(errors.BatchMismatchError, match="'images': 2 values, 2 rows of parents and 1 of noise"):
        node.log_prob([images(1, 0), images(2, 0)], {"y": ["a", ["a", "b"]]}, noise[:1])


def test_sides_with_different_numbers_of_images_are_dropped_and_counted():
    node = disturb(component(captions=tiny_diffusion.split))
    y = ["a|b", "a|b", "a|b"]
    chosen = {"x": [0, 1, 2], "y": y, "images": [images(2, row) for row in range(3)]}
    rejected = {"x": [0, 1, 2], "y": ["b|a", "a", "?"], "images": [images(2, 5), images(1, 5), images(0, 5)]}
    system = CompoundSystem([Categorical("x2", {}, 2), node], inputs=("y",), output="images")
    with pytest.raises(errors.InputMismatchError):
        losses.direct_loss(system, *({**s, "x2": torch.zeros(3).long()} for s in (chosen, rejected)), 0.1)
    writer = Writer()
    found = losses.direct_loss(
        CompoundSystem([writer, node], output="images"), chosen, rejected, 0.1, generator=generator()
    )
    assert found.dropped == 2 and found.kept.tolist() == [True, False, False]
    assert torch.isnan(found.extras["images_error_chosen"]).tolist() == [False, True, True]


class Writer(Categorical):
    """Answers "a|b", "b|a", ... with probabilities of a table: stands for a language model."""

    ANSWERS = ["a|b", "b|a", "a", "?"]

    def __init__(self):
        super().__init__("y", {"x": 3}, 4)

    def _ids(self, value):
        return torch.tensor([self.ANSWERS.index(v) for v in value])

    def log_prob(self, value, parent_values):
        return super().log_prob(self._ids(value), {"x": torch.as_tensor(parent_values["x"])})


# --- gradients, references --------------------------------------------------------------------------------------------


GRADIENTS = [{}, {"timesteps": 2, "prediction": "v_prediction"}, {"prediction": "sample", "weight": None}]


@pytest.mark.parametrize("options", GRADIENTS)
def test_the_gradient_is_that_of_finite_differences(options):
    node = disturb(component(unet=tiny_diffusion.unet(dtype=torch.float64), **options))
    sides, system = pair_of_sides(dtype=torch.float64), system_of(node)

    def loss():
        return losses.direct_loss(system, *sides, 1e-3 if node.weight is None else 0.1, generator=generator()).loss

    value = loss()
    value.backward()
    parameters = [p for p in node.trainable() if p.grad is not None and p.grad.abs().max() > 1e-6]
    for parameter in parameters[:: len(parameters) // 4]:
        entry = int(parameter.grad.abs().argmax())
        flat, step, found = parameter.data.view(-1), 1e-5, []
        for sign in (1, -1):
            flat[entry] += sign * step
            found.append(loss().item())
            flat[entry] -= sign * step
        assert parameter.grad.view(-1)[entry].item() == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-4)


def test_at_the_start_the_loss_is_log_2_for_every_dtype_of_the_network():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        node = component(unet=tiny_diffusion.unet(dtype=dtype), weight=2500.0)
        found = losses.direct_loss(system_of(node), *pair_of_sides(), 1.0, generator=generator())
        assert found.loss.item() == pytest.approx(LOG2, abs=1e-6) and found.accuracy == 0.5
        policy, _ = scored(node)
        assert policy.dtype == torch.float64


def test_identical_winner_and_loser_give_log_2_and_a_gradient_of_exactly_zero():
    node = disturb(component())
    side = pair_of_sides()[0]
    found = losses.direct_loss(system_of(node), side, copy.deepcopy(side), 0.5, generator=generator())
    found.loss.backward()
    assert found.loss.item() == pytest.approx(LOG2, abs=1e-12)
    assert all(p.grad is None or not p.grad.any() for p in node.trainable())


def test_batches_of_one_eight_times_are_a_batch_of_eight():
    sides = [
        {"x": torch.arange(8), "y": [["a"]] * 8, "images": [images(1, 8 * s + r) for r in range(8)]} for s in (0, 1)
    ]
    pairs = Pairs.from_traces(*sides, inputs=("x", "y"))
    ends = []
    for batch_size, accumulate in ((8, 1), (1, 8)):
        node = component(unet=tiny_diffusion.unet(dtype=torch.float64))
        system = CompoundSystem([node], inputs=("x", "y"), output="images")
        history = training.train(
            system, pairs, training.direct(0.1), steps=1, lr=1e-2, batch_size=batch_size, accumulate=accumulate,
            optimizer="sgd", clip=None, generator=generator(),
        )  # fmt: skip
        ends.append((history[0]["grad_norm_total"], [p.detach().clone() for p in node.trainable()]))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-9) and ends[0][0] > 1e-6
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adapter", [None, 2])
def test_the_reference_is_the_frozen_start_whatever_is_trained(adapter):
    node = component(adapter=adapter)
    _, start = scored(node)
    disturb(node)
    policy, reference = scored(node)
    assert torch.equal(reference, start) and not torch.equal(policy.detach(), start)
    flags = [p.requires_grad for p in node.parameters()]
    with pytest.raises(ZeroDivisionError), node.reference():
        with node.reference():
            pass
        assert node.is_reference
        raise ZeroDivisionError
    assert not node.is_reference and [p.requires_grad for p in node.parameters()] == flags
    assert torch.equal(scored(node)[0], policy)


def test_lora_dropout_is_active_neither_in_the_policy_nor_in_the_reference():
    """P22."""
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.5, target_modules=["to_q", "to_v"])
    node = component(adapter=config, weight=2500.0)
    node.train()
    found = losses.direct_loss(system_of(node), *pair_of_sides(), 1.0, generator=generator())
    assert found.loss.item() == pytest.approx(LOG2, abs=1e-6)
    disturb(node)
    (policy, reference), (again, reference_again) = scored(node), scored(node)
    assert torch.equal(policy, again) and torch.equal(reference, reference_again)
    assert node.network.training  # the flag came back


def test_the_reference_has_no_trained_copy_of_a_saved_module():
    """P24: adapters off, although conv_out was trained as a whole."""
    node = component(adapter=LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["conv_out"]))
    _, start = scored(node)
    disturb(node)
    policy, reference = scored(node)
    assert torch.equal(reference, start) and not torch.equal(policy.detach(), start)


def test_an_adapter_trains_alone_and_gets_gradients():
    node = component(adapter=2)
    losses.direct_loss(system_of(node), *pair_of_sides(), 0.1, generator=generator()).loss.backward()
    names = {name for name, p in node.named_parameters() if p.grad is not None and p.grad.any()}
    assert names and all("lora_B" in name for name in names)  # lora_A's gradient is 0 while lora_B is
    assert sum(p.numel() for p in node.trainable()) < 0.1 * sum(p.numel() for p in node.network.parameters())
    assert all(not p.requires_grad for p in node.encoder.parameters())


def test_freezing_stops_a_component_and_tied_ones_share_one_network():
    net = tiny_diffusion.unet()
    first, second = component("one", ("y",), unet=net), component("two", ("y",), unet=net)
    assert second.tied_to == "one" and second.reference_model is first.reference_model
    system = CompoundSystem([first, second], inputs=("y",), output="two")
    assert len(system.trainable_parameters()) == len(list(net.parameters()))
    with pytest.warns(errors.TiedFreezeWarning):
        assert system.freeze("one") == ["one", "two"]
    assert system.trainable_parameters() == []
    system.unfreeze("two")
    assert len(system.trainable_parameters()) == len(list(net.parameters()))


def test_two_adapters_on_one_network_are_independent():
    net = tiny_diffusion.unet()
    first, second = component("one", unet=net, adapter=2), component("two", unet=net, adapter=2)
    before = scored(second)[0].detach()
    disturb(first)
    assert torch.equal(scored(second)[0].detach(), before) and first.model is second.model
    assert not torch.equal(scored(first)[0].detach(), before)
    shared = component("three", unet=net, adapter=second)
    assert shared.tied_to == "two" and {id(p) for p in shared.trainable()} == {id(p) for p in second.trainable()}


def test_a_second_component_cannot_put_an_adapter_on_a_network_that_is_trained_whole():
    net = tiny_diffusion.unet()
    first = component("one", unet=net)
    with pytest.raises(errors.AdapterError, match="'two'.*'one' trains all weights"):
        component("two", unet=net, adapter=2)
    assert first.network is net
    with pytest.raises(errors.AdapterError, match="needs an adapter"):
        component(reference="adapter")


def test_a_network_that_needs_no_gradients_is_trained_all_the_same():
    node = component(unet=tiny_diffusion.unet().requires_grad_(False))
    assert len(system_of(node).trainable_parameters()) == len(list(node.network.parameters()))


# --- encoders ---------------------------------------------------------------------------------------------------------


def test_captions_are_encoded_once_alone_and_anew_when_the_weights_change():
    node = component()
    scored(node)
    assert node.encoder.calls == 3  # "a", "b", "c", of two rows, for policy and reference together
    scored(node)
    assert node.encoder.calls == 3
    before = scored(node)[0]
    with torch.no_grad():
        node.encoder.vectors.mul_(2)
    assert not torch.equal(scored(node)[0], before) and node.encoder.calls == 6


def test_dropout_of_an_encoder_is_never_active():
    class Dropping(tiny_diffusion.Words):
        def forward(self, captions):
            return torch.nn.functional.dropout(super().forward(captions), 0.5, self.training)

    node = Diffusion("z", ("y",), tiny_diffusion.unet(), tiny_diffusion.scheduler(), Dropping(), 1.0)
    node.train()
    assert torch.equal(node.cache(["ab"]).values, tiny_diffusion.Words()(["ab"])) and node.encoder.training


def test_the_cache_forgets_the_caption_that_was_not_used_for_longest():
    node = component()
    node.cache.limit = 2
    states = node.cache(["a", "b", "c", "a"])
    assert states.values.shape[0] == 4 and torch.equal(states.values[0], states.values[3])
    assert len(node.cache.kept) == 2
    node.cache(["b"]), node.cache(["d"])
    assert list(node.cache.kept) == ["b", "d"]


def test_states_of_different_lengths_are_padded_and_hidden():
    def letters(captions):
        return torch.stack([tiny_diffusion.Words()([letter])[0, 0] for letter in captions[0]])[None]

    net, scheduler = tiny_diffusion.unet(), tiny_diffusion.scheduler()
    node = Diffusion("images", ("y",), net, scheduler, letters, weight=20.0)
    values, y = [images(1, 0), images(1, 1)], ["a", "abc"]
    noise = node.draw_noise(values, generator())
    together = node.log_prob(values, {"y": y}, noise)
    alone = [node.log_prob(values[i : i + 1], {"y": y[i : i + 1]}, noise[i : i + 1]).item() for i in (0, 1)]
    assert together.tolist() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("use_mask", [False, True])
def test_a_clip_text_model_reads_with_or_without_its_padding(tmp_path, use_mask):
    parts = loading.load_diffusion(tiny_diffusion.save_pipeline(tmp_path / "p"))
    encoder = TextEncoder(parts.text_encoder, parts.tokenizer, use_mask=use_mask)
    states = encoder(["a cat", ""])
    assert encoder.max_length == 6 and states.values.shape == (2, 6, 8)
    assert states.mask is None if not use_mask else states.mask.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    ids = torch.tensor([[0, 2, 7, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]]) if use_mask else None
    torch.testing.assert_close(states.values[:1], parts.text_encoder(ids, attention_mask=mask).last_hidden_state)


def test_a_tokenizer_without_a_limit_is_refused():
    with pytest.raises(errors.TokenizerError, match="max_length"):
        TextEncoder(torch.nn.Linear(1, 1), tiny.tokenizer())
    with pytest.raises(errors.TokenizerError, match="found None"):
        TextEncoder(torch.nn.Linear(1, 1), None)


def test_bad_encoders_are_refused_by_name():
    net, scheduler = tiny_diffusion.unet(), tiny_diffusion.scheduler()
    with pytest.raises(errors.EncoderError, match="'z'.*pass encoder="):
        Diffusion("z", ("y",), net, scheduler, weight=1.0)
    with pytest.raises(errors.EncoderError, match="'z'.*callable"):
        Diffusion("z", ("y",), net, scheduler, 3, 1.0)
    node = Diffusion("z", ("y",), net, scheduler, lambda captions: torch.zeros(3, 8), 1.0)
    with pytest.raises(errors.EncoderError, match=r"\(3, 8\)"):
        node.greedy({"y": ["a"]})


# --- bad values -------------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "no weight": (errors.UnknownOptionError, "'constant' needs a weight", {"weight": None, "weighting": "constant"}),
    "a weight too many": (errors.UnknownOptionError, "'elbo' has its own", {"weighting": "elbo"}),
    "nats of a prediction": (errors.UnknownOptionError, "error='noise'", {"weight": None, "error": "prediction"}),
    "unknown weighting": (errors.UnknownOptionError, "weighting='flat'", {"weighting": "flat"}),
    "unknown error": (errors.UnknownOptionError, "error='eps'", {"error": "eps"}),
    "negative weight": (errors.OptionRangeError, "weight=-1", {"weight": -1}),
    "no timestep": (errors.OptionRangeError, "timesteps=0", {"timesteps": 0}),
    "half a step": (errors.OptionRangeError, "steps=2.5", {"steps": 2.5}),
    "patch": (errors.OptionRangeError, "patch=0", {"patch": 0}),
    "range": (errors.OptionRangeError, "value_range", {"value_range": (1, 1)}),
    "reference": (errors.UnknownOptionError, "reference='cached'", {"reference": "cached"}),
    "prediction": (
        errors.UnknownOptionError,
        "prediction='flow'",
        {"scheduler": tiny_diffusion.scheduler, "prediction": "flow"},
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_answered_by_name(case):
    kind, message, change = BAD_OPTIONS[case]
    options = {"weight": 20.0, **change}
    options.pop("scheduler", None)
    with pytest.raises(kind, match=message):
        Diffusion(
            "images", ("y",), tiny_diffusion.unet(), tiny_diffusion.scheduler(), tiny_diffusion.Words(), **options
        )


@pytest.mark.parametrize("value", [torch.zeros(3, 4, 4), "a", torch.zeros(1, 3, 4, 4, dtype=torch.long)])
def test_what_is_no_sequence_of_images_is_refused_with_the_row(value):
    with pytest.raises(errors.ImageShapeError, match="'images', row 1"):
        component().draw_noise([images(1, 0), value])


def test_nan_images_and_nan_networks_are_named():
    """P19."""
    node = component()
    noise = node.draw_noise([images(1, 0)], generator())
    with pytest.raises(errors.NonFiniteError, match="'images', row 0: an image holds NaN"):
        node.log_prob([images(1, 0) * math.nan], {"y": ["a"]}, noise)
    with torch.no_grad():
        node.network.conv_out.bias[0] = math.inf
    with pytest.raises(errors.NonFiniteError, match="'images', row 0: the network .float32. gave NaN.*timestep"):
        node.log_prob([images(1, 0)], {"y": ["a"]}, noise)


def test_networks_with_other_inputs_than_outputs_and_strange_schedulers_are_refused():
    with pytest.raises(errors.UnsupportedModelError, match="load_diffusion"):
        Diffusion("z", ("y",), tiny_diffusion.unet(), object(), tiny_diffusion.Words(), 1.0)
    net = tiny_diffusion.unet()
    net.register_to_config(in_channels=9)
    with pytest.raises(errors.UnsupportedModelError, match="reads 9 channels and returns 3"):
        Diffusion("z", ("y",), net, tiny_diffusion.scheduler(), tiny_diffusion.Words(), 1.0)


def test_an_image_size_that_nobody_says_is_asked_for():
    net = Denoiser(elbo.alphas_bar(tiny_diffusion.scheduler()), 0.0, 1.0)
    with pytest.raises(errors.ImageShapeError, match="image_shape="):
        Diffusion("z", ("y",), net, tiny_diffusion.scheduler(), weight=1.0).greedy({"y": ["a"]})


# --- latents ----------------------------------------------------------------------------------------------------------


def latent_component(folder, **options):
    parts = loading.load_diffusion(tiny_diffusion.save_pipeline(folder))
    encoder = (parts.text_encoder, parts.tokenizer)
    return Diffusion("images", ("y",), parts.unet, parts.scheduler, encoder, 20.0, vae=parts.vae, steps=2, **options)


def test_latents_are_the_vaes_mean_times_its_scaling_factor(tmp_path):
    """P40."""
    node = latent_component(tmp_path / "p")
    pictures = images(2, 0, (3, 8, 8))
    with torch.no_grad():
        mean = node.space.vae.encode(pictures).latent_dist.mean
        torch.testing.assert_close(node.space.to_x0(pictures), 0.25 * mean)
        torch.testing.assert_close(node.space.to_images(0.25 * mean), node.space.vae.decode(mean).sample)
    drawn = node.sample({"y": [["a cat", "a"]]}, generator=generator())[0]
    assert drawn.shape == (2, 3, 8, 8)
    assert node.draw_noise([drawn])[0].eps.shape == (2, 1, 4, 4, 4)
    assert all(not p.requires_grad for p in node.space.vae.parameters())
    policy, reference = scored(node, [drawn], [["a cat", "a"]])
    assert policy.requires_grad and torch.equal(policy.detach(), reference)


def test_the_vae_reads_a_batch_once_for_policy_and_reference(tmp_path):
    node, calls = latent_component(tmp_path / "p"), []
    plain = node.space.vae.encode
    node.space.vae.encode = lambda x: (calls.append(len(x)), plain(x))[1]
    value = [images(2, 0, (3, 8, 8))]
    first = scored(node, value, [["a", "a"]])[0]
    assert calls == [2]
    value[0].mul_(2)  # the same memory, other images
    assert not torch.equal(scored(node, value, [["a", "a"]])[0], first) and calls == [2, 2]


def test_a_vae_that_overflows_is_named(tmp_path):
    node = latent_component(tmp_path / "p")
    with torch.no_grad():
        node.space.vae.quant_conv.bias[0] = math.nan
        node.space.vae.post_quant_conv.bias[0] = math.inf
    with pytest.raises(errors.NonFiniteError, match="'images': the VAE gave NaN or infinity while encoding in float32"):
        node.log_prob([images(1, 0, (3, 8, 8))], {"y": ["a"]}, node.draw_noise([images(1, 0, (3, 8, 8))], generator()))
    with pytest.raises(errors.NonFiniteError, match="the VAE gave NaN or infinity while decoding"):
        node.greedy({"y": ["a"]})


# --- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DDIMScheduler", "PNDMScheduler"])
def test_a_pipeline_in_a_folder_gives_its_five_parts(tmp_path, kind):
    folder = tiny_diffusion.save_pipeline(tmp_path / "p", kind, "v_prediction")
    parts = loading.load_diffusion(folder)
    names = ["UNet2DConditionModel", kind, "AutoencoderKL", "CLIPTextModel", "CLIPTokenizer"]
    assert [type(part).__name__ for part in parts] == names
    assert not parts.unet.training and parts.unet.dtype == torch.float32
    assert loading.load_diffusion(folder, dtype="bfloat16").vae.dtype == torch.bfloat16
    node = Diffusion(
        "images",
        ("y",),
        parts.unet,
        parts.scheduler,
        (parts.text_encoder, parts.tokenizer),
        20.0,
        vae=parts.vae,
        steps=4,
    )
    assert node.prediction == "v_prediction" and node.greedy({"y": ["a cat"]})[0].shape == (1, 3, 8, 8)


@pytest.mark.parity
def test_draws_are_those_of_stable_diffusions_own_pipeline(tmp_path):
    from diffusers import StableDiffusionPipeline

    folder = tiny_diffusion.save_pipeline(tmp_path / "p")
    node = latent_component(tmp_path / "q", guidance_scale=3.0, value_range=(0, 1))
    pipeline = StableDiffusionPipeline.from_pretrained(str(folder), safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    seed = int(torch.randint(2**62, (1,), generator=generator(node.seed)))
    start = torch.randn(4, 4, 4, generator=generator(seed))[None]
    theirs = pipeline("a cat", num_inference_steps=2, guidance_scale=3.0, latents=start, output_type="pt").images
    torch.testing.assert_close(node.greedy({"y": ["a cat"]})[0], theirs, atol=1e-5, rtol=1e-4)


def test_a_missing_pipeline_or_part_is_named(tmp_path):
    with pytest.raises(errors.MissingModelError, match="no model_index.json"):
        loading.load_diffusion(tmp_path)
    with pytest.raises(errors.MissingModelError, match="'nobody/nothing'.*hub id"):
        loading.load_diffusion("nobody/nothing")
    folder = tiny_diffusion.save_pipeline(tmp_path / "p")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(errors.MissingModelError, match="part 'vae'"):
        loading.load_diffusion(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "vae": [None, None]}))
    assert loading.load_diffusion(folder).vae is None
    (folder / "model_index.json").write_text(json.dumps({**index, "unet": ["somewhere", "Net"]}))
    with pytest.raises(errors.UnsupportedModelError, match="unet: somewhere.Net"):
        loading.load_diffusion(folder)
    (folder / "model_index.json").write_text(json.dumps({**index, "unet": [None, None]}))
    with pytest.raises(errors.MissingModelError, match="lists no 'unet'"):
        loading.load_diffusion(folder)
    with pytest.raises(errors.MissingModelError, match="no 'unet'"):
        loading.load_part(folder, "unet")


# --- files ------------------------------------------------------------------------------------------------------------


def assert_equal_after_loading(system, folder, y=("a", "bc")):
    """Saved and loaded: policy, reference and draws bit-equal; only safetensors."""
    name = system.output
    system.save(folder)
    loaded = CompoundSystem.load(folder)
    trace = {"y": list(y), name: [images(1, row, system[name]._drawn_shape()) for row in range(len(y))]}
    noise = system.draw_noise(trace, generator())
    assert torch.equal(loaded.log_prob(trace, noise), system.log_prob(trace, noise))
    with system.reference(), loaded.reference():
        assert torch.equal(loaded.log_prob(trace, noise), system.log_prob(trace, noise))
    drawn, again = (s.sample({"y": list(y)}, generator=generator())[name] for s in (system, loaded))
    assert all(torch.equal(a, b) for a, b in zip(drawn, again))
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".md", ".txt"}
    return loaded


OPTIONS = {
    "whole network": {},
    "adapter": {"adapter": 2},
    "options": {"timesteps": 2, "stratified": True, "captions": tiny_diffusion.split, "guidance_scale": 2.0, "steps": 2,
                "value_range": (0, 1), "unconditional": "h", "seed": 5, "prediction": "sample", "error": "prediction"},
    "elbo": {"weight": None},
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_a_saved_system_comes_back_to_the_bit(tmp_path, case):
    node = disturb(component(**OPTIONS[case]))
    loaded = assert_equal_after_loading(system_of(node), tmp_path / "s")[node.name]
    assert loaded.config() == node.config() and loaded.captions is node.captions


def test_an_adapter_that_started_from_a_saved_one_keeps_its_start(tmp_path):
    """P33."""
    first = disturb(component(adapter=2))
    system_of(first).save(tmp_path / "one")
    node = disturb(component(adapter=tmp_path / "one" / "components" / "00_images"), seed=3)
    policy, reference = scored(node)
    assert torch.equal(reference, scored(first)[0].detach()) and not torch.equal(policy.detach(), reference)
    assert_equal_after_loading(system_of(node), tmp_path / "two")


def test_a_saved_adapter_is_read_by_plain_peft_and_by_diffusers(tmp_path):
    """P33, P43: load, off is the base to the bit, on is the trained network."""
    node = disturb(component(adapter=2))
    system_of(node).save(tmp_path / "s")
    folder = tmp_path / "s" / "components" / "00_images"
    x, states = images(2, 0), tiny_diffusion.Words()(["a", "b"])

    def output(network):
        with torch.no_grad():
            return network(x, torch.tensor([3, 30]), encoder_hidden_states=states).sample

    base = output(tiny_diffusion.unet())
    with adapters.activated(node.network, node.adapter_name):
        trained = output(node.network)
    assert not torch.allclose(base, trained, atol=1e-4)
    with_peft = PeftModel.from_pretrained(tiny_diffusion.unet(), str(folder)).eval()
    torch.testing.assert_close(output(with_peft), trained)
    with with_peft.disable_adapter():
        assert torch.equal(output(with_peft), base)
    plain = tiny_diffusion.unet()
    plain.load_lora_adapter(
        str(folder), prefix="unet", weight_name="pytorch_lora_weights.safetensors", use_safetensors=True
    )
    torch.testing.assert_close(output(plain.eval()), trained)
    plain.disable_lora()
    assert torch.equal(output(plain), base)


def test_a_pipeline_is_noted_by_its_source_and_its_adapter_loads_into_it(tmp_path):
    from diffusers import StableDiffusionPipeline

    node = disturb(latent_component(tmp_path / "p", adapter=2))
    assert_equal_after_loading(system_of(node), tmp_path / "s", y=("a cat", "a"))
    weights = [path.name for path in (tmp_path / "s").rglob("*.safetensors")]
    assert sorted(weights) == ["adapter_model.safetensors", "pytorch_lora_weights.safetensors"]  # no network is copied
    pipeline = StableDiffusionPipeline.from_pretrained(str(tmp_path / "p"), safety_checker=None)
    pipeline.load_lora_weights(str(tmp_path / "s" / "components" / "00_images"))
    latents, states = images(1, 0, (4, 4, 4)), node.encoder(["a cat"]).values
    with torch.no_grad(), adapters.activated(node.network, node.adapter_name):
        ours = node.network(latents, 7, encoder_hidden_states=states).sample
        torch.testing.assert_close(pipeline.unet(latents, 7, encoder_hidden_states=states).sample, ours)
    other = loading.load_diffusion(tmp_path / "p").unet
    with torch.no_grad():
        other.conv_in.weight.add_(1)
    other.save_pretrained(str(tmp_path / "p" / "unet"))
    with pytest.raises(errors.SaveFormatError, match="'images'.*no longer holds the weights"):
        CompoundSystem.load(tmp_path / "s")


def test_components_that_share_a_network_share_it_after_loading(tmp_path):
    net = tiny_diffusion.unet()
    nodes = [component("one", unet=net, adapter=2), component("two", unet=net, adapter=2)]
    nodes.append(component("three", unet=net, adapter=nodes[1]))
    system = CompoundSystem(list(map(disturb, nodes)), inputs=("y",), output="two")
    system.save(tmp_path / "s")
    loaded = CompoundSystem.load(tmp_path / "s")
    assert loaded["one"].network is loaded["two"].network and loaded["three"].tied_to == "two"
    assert loaded["three"].trainable()[0] is loaded["two"].trainable()[0]
    for name in ("one", "two", "three"):
        assert torch.equal(scored(loaded[name])[0], scored(system[name])[0])


def test_one_component_can_be_loaded_alone_and_a_missing_folder_is_named(tmp_path):
    node = disturb(component())
    node.save(tmp_path / "c" / "images")
    assert torch.equal(scored(Diffusion.load(tmp_path / "c" / "images"))[0], scored(node)[0])
    with pytest.raises(errors.SaveFormatError, match="component.json"):
        Diffusion.load(tmp_path)
    (tmp_path / "c" / "images" / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(errors.SaveFormatError, match="scheduler_config.json"):
        Diffusion.load(tmp_path / "c" / "images")


def test_what_cannot_be_built_again_is_refused_when_saving(tmp_path):
    with pytest.raises(errors.SaveFormatError, match="cannot be imported"):
        system_of(component(captions=lambda y: [y])).save(tmp_path / "s")
    node = Diffusion(
        "images", ("y",), tiny_diffusion.unet(), tiny_diffusion.scheduler(), lambda c: torch.zeros(1, 3, 8), 1.0
    )
    with pytest.raises(errors.SaveFormatError, match="cannot be imported"):
        system_of(node).save(tmp_path / "s")
    net = Denoiser(elbo.alphas_bar(tiny_diffusion.scheduler()), 0.0, 1.0)
    with pytest.raises(errors.SaveFormatError, match="Denoiser cannot be built again without 'abar'"):
        system_of(Diffusion("images", ("y",), net, tiny_diffusion.scheduler(), weight=1.0)).save(tmp_path / "s")


# --- training ---------------------------------------------------------------------------------------------------------


def faces_system(adapter=2):
    """A language model that writes captions and a diffusion model that draws them."""
    writer = CausalLM("captions", ("x",), tiny.model(), tiny.tokenizer(), "{x}:", adapter=adapter, max_new_tokens=6)
    drawer = component("images", ("captions",), captions=tiny_diffusion.split, adapter=adapter, weight=200.0)
    return CompoundSystem([writer, drawer], output="images")


def faces_pairs(rows=6):
    sides = []
    for side, texts in enumerate((["a|b", "b|c", "a|c"], ["b|a", "c|b", "a|a"])):
        answers = [texts[row % 3] for row in range(rows)]
        sides.append({
            "x": [f"task {row}" for row in range(rows)], "captions": answers,
            "images": [images(2, 100 * side + row) for row in range(rows)],
        })  # fmt: skip
    return Pairs.from_traces(*sides)


def test_a_language_model_and_a_diffusion_model_are_trained_together():
    system, pairs = faces_system(), faces_pairs()
    start = [p.detach().clone() for p in system.trainable_parameters()]
    history = training.train(system, pairs, training.direct(0.1), steps=3, lr=1e-3, batch_size=3, generator=generator())
    assert history[0]["loss"] == pytest.approx(LOG2, abs=1e-6) and history[-1]["loss"] < LOG2
    assert set(history[0]["shares"]) == {"captions", "images"} and history[0]["dropped"] == 0
    assert all(history[0]["grad_norm"][name] > 0 for name in ("captions", "images"))
    last = history[-1]
    for side in ("chosen", "rejected"):
        assert last[f"images_error_{side}"] > 0 and last[f"images_error_{side}_start"] > 0
    assert last["images_error_chosen"] != last["images_error_chosen_start"]
    assert history[0]["images_error_chosen"] == history[0]["images_error_chosen_start"]
    assert any(not torch.equal(a, b) for a, b in zip(start, system.trainable_parameters()))
    trace = system.sample({"x": ["task"]}, generator=generator())
    assert trace["images"][0].shape[1:] == (3, 4, 4)


@pytest.mark.parametrize("adapter", [2, None])
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path, adapter):
    ends = []
    for parts in ((4,), (2, 4)):
        for number, steps in enumerate(parts):
            system = faces_system(adapter)
            training.train(
                system, faces_pairs(), training.direct(0.1), steps=4, lr=1e-3, batch_size=2, generator=generator(),
                out=tmp_path / f"{len(parts)}", resume=number > 0, stop_after=None if steps == 4 else steps,
            )  # fmt: skip
        ends.append([p.detach() for p in system.trainable_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_a_frozen_diffusion_model_keeps_every_bit_and_still_counts():
    system = faces_system()
    system.freeze("images")
    before = [p.detach().clone() for p in system["images"].parameters()]
    history = training.train(
        system, faces_pairs(), training.direct(0.1), steps=3, lr=1e-3, batch_size=3, generator=generator()
    )
    assert all(torch.equal(a, b) for a, b in zip(before, system["images"].parameters()))
    assert history[-1]["shares"]["images"] == 0 and list(history[-1]["grad_norm"]) == ["captions"]


def test_separate_trains_both_parts_on_their_own_gaps():
    system = faces_system()
    history = training.train(
        system, faces_pairs(), training.separate(0.1), steps=1, lr=1e-3, batch_size=6, generator=generator()
    )
    assert history[0]["loss"] == pytest.approx(2 * LOG2, abs=1e-6) and history[0]["images_error_chosen"] > 0


def test_both_errors_rising_is_said_once():
    """P42: 32 pairs whose winners and losers are denoised worse than at the start."""
    node = component(weight=20.0)
    sides = [{"y": [["a"]] * 40, "images": [images(1, 40 * s + r) for r in range(40)]} for s in (0, 1)]
    pairs = Pairs.from_traces(*sides, inputs=("y",))
    with torch.no_grad():
        node.network.conv_out.bias.add_(0.5)
    with pytest.warns(errors.BothErrorsRiseWarning, match="component 'images'.*winners .by .*losers") as caught:
        training.train(
            system_of(node), pairs, training.direct(0.01), steps=10, lr=1e-6, batch_size=8, generator=generator()
        )
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.train(system_of(component()), pairs, training.direct(0.01), steps=6, lr=1e-6, batch_size=8)


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"), [(1.2, 0.9, False), (0.9, 1.2, False), (1.005, 1.005, False), (1.2, 1.1, True)]
)
def test_one_error_that_rises_alone_is_no_warning(chosen, rejected, expected):
    numbers = {
        "z_error_chosen": chosen,
        "z_error_rejected": rejected,
        "z_error_chosen_start": 1,
        "z_error_rejected_start": 1,
    }
    batch = {name: torch.tensor([number, math.nan, number], dtype=torch.float64) for name, number in numbers.items()}
    found, watch = losses.PairLoss(*[torch.zeros(3)] * 3, extras=batch), ErrorWatch(patience=4)
    assert watch.risen(found) == {}  # two of four pairs so far; those that were left out do not count
    risen = watch.risen(found)
    assert (risen == {}) is not expected
    assert not expected or risen["z"] == pytest.approx((0.2, 0.1))


def test_only_direct_and_separate_take_a_bound():
    system = faces_system()
    pairs = Pairs.from_finals({"x": ["t"]}, [images(2, 0)], [images(2, 1)])
    with pytest.raises(errors.UnsupportedSamplerError, match="'images' scores by a bound"):
        training.train(system, pairs, training.sampling(0.1, "monte_carlo", 2), steps=1)
