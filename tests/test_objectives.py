"""Each objective is the loss that it names, on intermediates drawn as the paper says."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from sysdpo_lab import CompoundSystem, errors, losses, samplers, training
from sysdpo_lab.components import Categorical, Tool
from sysdpo_lab.objectives import trained_separately
from sysdpo_lab.preferences import Pairs
from tests.training_cases import chain, finals, letters_finals, letters_system, letters_traces, same_type_chain, traces

BETA = 0.5


def moved(system: CompoundSystem, seed: int = 5) -> CompoundSystem:
    """The same system with a policy that has left the reference."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in system.parameters():
            parameter += torch.randn(parameter.shape, generator=g, dtype=parameter.dtype)
    return system


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- direct -----------------------------------------------------------------------------------------------------------------


def test_direct_is_the_direct_loss():
    system, pairs = moved(chain()), traces()
    batch = pairs.batch([3, 0, 7])
    wanted = losses.direct_loss(system, batch.chosen, batch.rejected, BETA)
    found = training.direct(BETA)(system, batch, seeded())
    assert found.loss.item() == wanted.loss.item() and torch.equal(found.margin, wanted.margin)


def test_direct_refuses_finals_and_sampling_refuses_traces():
    with pytest.raises(errors.PairKindError, match="whole traces"):
        training.train(chain(), finals(), training.direct(BETA), steps=1)
    with pytest.raises(errors.PairKindError, match="from_traces=True"):
        training.train(chain(), traces(), training.sampling(BETA, "monte_carlo", 2), steps=1)
    with pytest.raises(errors.PairKindError):
        training.margins(chain(), finals(), training.direct(BETA))


# --- sampling ---------------------------------------------------------------------------------------------------------------

SETS = {
    "monte_carlo": {},
    "diverse_beam": {},
    "gumbel_top_k": {},
    "monte_carlo with importance weights": {"weights": "importance"},
    "gumbel_top_k with inclusion weights": {"weights": "horvitz_thompson"},
}


@pytest.mark.parametrize("case", SETS)
@pytest.mark.parametrize("repeats", ["drop", "count"])
def test_sampling_is_the_sampling_loss_with_the_samplers_weights(case, repeats):
    system, batch, name, options = moved(chain()), finals().batch(range(6)), case.split()[0], SETS[case]
    drawn = getattr(samplers, name)(system, batch.inputs, 2, generator=seeded(3), **options)
    wanted = losses.sampling_loss(
        system, batch.inputs, batch.chosen, batch.rejected, drawn.values, BETA, repeats=repeats, log_weights=drawn.log_weights
    )
    found = training.sampling(BETA, name, 2, repeats=repeats, **options)(system, batch, seeded(3))
    assert torch.equal(found.margin, wanted.margin) and torch.equal(found.distinct, drawn.distinct)
    by_function = training.sampling(BETA, getattr(samplers, name), 2, repeats, **options)(system, batch, seeded(3))
    assert torch.equal(by_function.margin, wanted.margin)
    if options:  # a loss that ignored the weights would give another margin
        plain = losses.sampling_loss(system, batch.inputs, batch.chosen, batch.rejected, drawn.values, BETA, repeats=repeats)
        assert not torch.allclose(plain.margin, wanted.margin, equal_nan=True)


def test_sampling_over_all_intermediates_needs_no_k():
    system, batch = moved(chain()), finals().batch(range(4))
    found = training.sampling(BETA, "enumerate_all")(system, batch, None)
    assert found.distinct.tolist() == [3] * 4


def test_whole_traces_can_be_read_as_finals():
    system, batch = moved(chain()), traces().batch(range(5))
    only = Pairs.from_finals(batch.inputs, batch.chosen["z"], batch.rejected["z"]).batch(range(5))
    objective = training.sampling(BETA, "enumerate_all", from_traces=True)
    assert torch.equal(objective(system, batch, None).margin, objective(system, only, None).margin)


class Recorder:
    """A sampler that remembers what it was called with and in which state the system was."""

    def __init__(self):
        self.calls = []

    def __call__(self, system, inputs, k, generator=None, *, weights="none"):
        state = (torch.is_grad_enabled(), any(m.training for m in system.modules()), system[system.hidden[0]].is_reference)
        self.calls.append((list(inputs["x"]), state, [p.detach().clone() for p in system.parameters()]))
        return samplers.monte_carlo(system, inputs, k, generator=generator, weights=weights)


def test_intermediates_come_from_the_current_policy_in_evaluation_mode_without_gradients():
    system, sampler = letters_system(dropout=0.5), Recorder()
    system["draft"].eval()
    training.train(system, letters_finals(), training.sampling(BETA, sampler, 2), steps=2, lr=0.1, batch_size=7)
    assert [state for _, state, _ in sampler.calls] == [(False, False, False)] * 2
    first, second = (found for _, _, found in sampler.calls)
    assert not torch.equal(first[0], second[0])  # redrawn after the update, not from the start
    assert system["answer"].dropout.training and not system["draft"].dropout.training  # flags as they were


def test_one_set_serves_winner_loser_policy_and_reference():
    # y never explains the difference of the finals when there is only one: the margin then has z's terms alone
    system, batch = moved(chain()), finals().batch(range(6))
    found = training.sampling(BETA, "monte_carlo", 1)(system, batch, seeded(1))
    assert torch.equal(found.shares["y"], torch.zeros(6, dtype=torch.float64))
    y = samplers.monte_carlo(system, batch.inputs, 1, generator=seeded(1)).values["y"][:, 0]
    parents = {**batch.inputs, "y": y}
    ratios = []
    for value in (batch.chosen, batch.rejected):
        with system.reference():
            reference = system["z"].log_prob(value, parents)
        ratios.append(system["z"].log_prob(value, parents) - reference)
    assert torch.allclose(found.margin, BETA * (ratios[0] - ratios[1]), atol=1e-12)


def test_a_fixed_set_is_drawn_once_for_each_different_input_from_the_start():
    system, sampler = letters_system(), Recorder()
    pairs = Pairs.from_finals({"x": ["p", "q", "p", "r"]}, ["a", "b", "c", "d"], ["bb", "aa", "dd", "cc"])
    objective = training.sampling(BETA, sampler, 3, fixed=True)
    training.train(system, pairs, objective, steps=6, lr=0.5, batch_size=2)
    drawn = [x for inputs, _, _ in sampler.calls for x in inputs]
    assert sorted(drawn) == ["p", "q", "r"]
    assert all(reference for _, (_, _, reference), _ in sampler.calls)
    before = objective.state_dict()
    objective(system, pairs.batch([2, 0]), None)
    assert objective.state_dict() == before and len(before["sets"]) == 3


def test_a_fixed_set_survives_in_its_state():
    system, batch = moved(chain()), finals().batch(range(6))
    one = training.sampling(BETA, "gumbel_top_k", 2, fixed=True, weights="horvitz_thompson")
    wanted = one(system, batch, seeded(4))
    other = training.sampling(BETA, "gumbel_top_k", 2, fixed=True, weights="horvitz_thompson")
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(system, batch, seeded(99)).margin, wanted.margin)
    other.reset(system)
    assert not torch.equal(other(system, batch, seeded(99)).margin, wanted.margin)


def test_a_fixed_set_equals_the_sampler_on_the_reference():
    system, batch = moved(chain()), finals().batch([0])
    found = training.sampling(BETA, "monte_carlo", 3, fixed=True, weights="importance")(system, batch, seeded(2))
    with system.reference():
        drawn = samplers.monte_carlo(system, batch.inputs, 3, generator=seeded(2), weights="importance")
    wanted = losses.sampling_loss(
        system, batch.inputs, batch.chosen, batch.rejected, drawn.values, BETA, log_weights=drawn.log_weights
    )
    assert torch.equal(found.margin, wanted.margin)


def test_different_texts_are_counted_beside_different_token_ids():
    system, batch = letters_system(), letters_finals().batch(range(4))
    found = training.sampling(BETA, "monte_carlo", 5)(system, batch, seeded())
    assert found.extras["distinct_texts"].tolist() == found.distinct.tolist()  # texts are their own ids here
    assert "distinct_texts" not in training.sampling(BETA, "monte_carlo", 2)(chain(), finals().batch([0]), seeded()).extras


WRONG = {
    "a sampler": (lambda: training.sampling(BETA, "beam", 2), "diverse_beam"),
    "an object as sampler": (lambda: training.sampling(BETA, 3, 2), "monte_carlo"),
    "an option of monte_carlo": (lambda: training.sampling(BETA, "monte_carlo", 2, wieghts="none"), "weights"),
    "an option of diverse_beam": (lambda: training.sampling(BETA, "diverse_beam", 2, penalty=3.0), "diversity_penalty"),
    "an option of a function": (lambda: training.sampling(BETA, Recorder(), 2, temperature=1.0), "weights"),
    "repeats": (lambda: training.sampling(BETA, "monte_carlo", 2, repeats="dorp"), "'drop', 'count'"),
    "k": (lambda: training.sampling(BETA, "monte_carlo", 0), "k must be"),
    "no k": (lambda: training.sampling(BETA, "diverse_beam"), "k must be"),
    "beta": (lambda: training.direct(0.0), "beta"),
    "beta of separate": (lambda: training.separate(float("nan")), "beta"),
}


@pytest.mark.parametrize("make, says", WRONG.values(), ids=WRONG)
def test_an_option_that_does_not_exist_is_named_with_those_that_do(make, says):
    with pytest.raises(errors.UnknownOptionError, match=says):
        make()


def test_options_of_the_search_behind_diverse_beam_are_known():
    assert training.sampling(BETA, "diverse_beam", 2, diversity_penalty=5.0, max_new_tokens=8).options["max_new_tokens"] == 8


# --- separate ---------------------------------------------------------------------------------------------------------------


def own_dpo(component, chosen, rejected) -> torch.Tensor:
    """DPO of one component alone, written out."""
    with torch.no_grad(), component.reference():
        reference = component.log_prob(chosen[0], chosen[1]) - component.log_prob(rejected[0], rejected[1])
    gap = component.log_prob(chosen[0], chosen[1]) - component.log_prob(rejected[0], rejected[1]) - reference
    return -logsigmoid(BETA * gap).mean()


def gradients(system: CompoundSystem, loss: torch.Tensor) -> list[torch.Tensor]:
    return [g.clone() for g in torch.autograd.grad(loss, [system["y"].logits, system["z"].logits], retain_graph=True)]


def test_separate_on_whole_traces_is_one_dpo_loss_a_component():
    system, batch = moved(chain()), traces().batch(range(8))
    won, lost = batch.chosen, batch.rejected
    y = own_dpo(system["y"], *((side["y"], {"x": side["x"]}) for side in (won, lost)))
    z = own_dpo(system["z"], *((side["z"], {"x": side["x"], "y": side["y"]}) for side in (won, lost)))
    found = training.separate(BETA)(system, batch, seeded())
    assert found.loss.item() == pytest.approx((y + z).item(), abs=1e-12)
    for mine, wanted in zip(gradients(system, found.loss), gradients(system, y + z)):
        assert torch.allclose(mine, wanted, atol=1e-12)
    joint = training.direct(BETA)(system, batch, seeded())  # one sigmoid for both: another gradient, the same margin
    assert torch.allclose(found.margin, joint.margin)
    assert not torch.allclose(gradients(system, joint.loss)[0], gradients(system, found.loss)[0], atol=1e-3)


def test_separate_on_finals_trains_a_draft_of_the_finals_type_on_the_finals():
    system, batch = moved(same_type_chain()), finals().batch(range(8))
    objective = training.separate(BETA)
    found = objective(system, batch, seeded(7))
    with system.reference():
        drawn = samplers.monte_carlo(system, batch.inputs, 1, generator=seeded(7)).values["y"][:, 0]
    parents = {**batch.inputs, "y": drawn}
    y = own_dpo(system["y"], (batch.chosen, batch.inputs), (batch.rejected, batch.inputs))
    z = own_dpo(system["z"], (batch.chosen, parents), (batch.rejected, parents))
    assert found.loss.item() == pytest.approx((y + z).item(), abs=1e-12)
    assert (found.extras["separate"], found.extras["left_out"]) == ("y, z", "")
    assert objective(system, batch, seeded(8)).loss.item() == found.loss.item()  # drawn once a pair, then kept


def test_parents_are_drawn_from_the_frozen_start_not_from_the_policy():
    start, policy = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    y = Categorical("y", {"x": 1}, 3, policy, reference=start)
    system = CompoundSystem([y, Categorical("z", {"y": 3}, 2)])
    objective = training.separate(BETA)
    objective(system, Pairs.from_finals({"x": [0] * 6}, [1] * 6, [0] * 6).batch(range(6)), seeded())
    assert {value["y"] for value in objective.state_dict()["parents"].values()} == {0}


def test_a_component_of_another_type_stays_as_it_is_and_the_record_says_so():
    system = chain()
    before = system["y"].logits.detach().clone()
    history = training.train(system, finals(), training.separate(BETA), steps=3, lr=0.1, weight_decay=0.1)
    assert torch.equal(system["y"].logits, before)
    assert (history[0]["separate"], history[0]["left_out"]) == ("z", "y")
    assert history[0]["loss"] == pytest.approx(0.693147, abs=1e-6) and set(history[0]["shares"]) == {"z"}


def test_what_separate_trains_depends_on_data_types_and_freezing():
    nodes = [
        Categorical("a", {"x": 2}, 4), Categorical("b", {"x": 2}, 3), Categorical("c", {"a": 4, "b": 3}, 4),
        Tool("t", ["c"], lambda c: c, cardinality=4), Categorical("z", {"t": 4}, 4),
    ]  # fmt: skip
    system = CompoundSystem(nodes)
    assert trained_separately(system, whole_traces=True) == ["a", "b", "c", "z"]
    assert trained_separately(system, whole_traces=False) == ["a", "c", "z"]
    system.freeze("a")
    assert trained_separately(system, whole_traces=False) == ["c", "z"]


def test_separate_needs_traces_when_the_output_is_deterministic():
    system = CompoundSystem([Categorical("y", {"x": 2}, 2), Tool("z", ["y"], lambda y: 1 - y, cardinality=2)])
    with pytest.raises(errors.PairKindError, match="deterministic"):
        training.train(system, Pairs.from_finals({"x": [0]}, [0], [1]), training.separate(BETA), steps=1)
    whole = Pairs.from_traces({"x": [0], "y": [1], "z": [0]}, {"x": [0], "y": [0], "z": [1]})
    assert training.train(system, whole, training.separate(BETA), steps=2, lr=0.1)[-1]["accuracy"] == 1.0


def test_a_pair_that_one_component_cannot_score_is_dropped_from_all():
    y = Categorical("y", {"x": 1}, 3, [[0.5, 0.5, 0.0]])
    system = CompoundSystem([y, Categorical("z", {"y": 3}, 2)])
    pairs = Pairs.from_traces({"x": [0, 0], "y": [0, 2], "z": [1, 1]}, {"x": [0, 0], "y": [1, 1], "z": [0, 0]})
    found = training.separate(BETA)(system, pairs.batch([0, 1]), seeded())
    assert found.dropped == 1 and found.kept.tolist() == [True, False]
    with pytest.raises(errors.NoMarginError):
        training.separate(BETA)(system, pairs.batch([1]), seeded())


def test_objectives_say_what_they_are():
    assert training.separate(0.1).settings == {"name": "separate", "beta": 0.1}
    found = training.sampling(0.1, samplers.monte_carlo, 4, weights="importance").settings
    assert found == {
        "name": "sampling", "beta": 0.1, "sampler": "monte_carlo", "k": 4, "repeats": "drop", "fixed": False,
        "weights": "importance",
    }  # fmt: skip


def test_all_objectives_work_on_components_that_are_no_tables():
    for objective, pairs in (
        (training.direct(BETA), letters_traces()),
        (training.sampling(BETA, "monte_carlo", 2), letters_finals()),
        (training.separate(BETA), letters_finals()),
        (training.separate(BETA), letters_traces()),
    ):
        history = training.train(letters_system(), pairs, objective, steps=8, lr=0.1)
        assert history[-1]["loss"] < history[0]["loss"]
