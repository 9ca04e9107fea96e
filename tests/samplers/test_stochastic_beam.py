"""Stochastic beam search over tokens: exact sampling without replacement from the model's sequences."""

import itertools
import math
from collections import Counter

import pytest
import torch

from sysdpo_lab import errors
from sysdpo_lab.samplers.gumbel import log_inclusion
from sysdpo_lab.samplers.stochastic_beam import gumbel_with_maximum, log1mexp, stochastic_beam_tokens
from tests.table_lm import TableLM, adapted, first_tokens, forced_log_prob, prompts, random_model, sequences

DRAWS = 8000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def roots(rows, seed=7):
    """First nodes: log-probability 0 and an unconditioned Gumbel each."""
    noise = torch.empty(rows, 1, dtype=torch.float64).exponential_(generator=seeded(seed))
    return {"log_probs": torch.zeros(rows, 1), "gumbels": -noise.log()}


def beams(model, k, rows=DRAWS, prompt=(1, 2), longest=3, seed=0, **options):
    ids = torch.tensor([list(prompt)]).expand(rows, -1)
    given = roots(rows) | {"eos_token_id": 0, "pad_token_id": 0, "max_new_tokens": longest} | options
    return stochastic_beam_tokens(model, ids, torch.ones_like(ids), k=k, generator=seeded(seed), **given)


def drawn(found):
    """Per row the tuple of its k sequences."""
    return [
        tuple(first_tokens(*pair) for pair in zip(ids, lengths)) for ids, lengths in zip(found.token_ids, found.lengths)
    ]


def agrees(count, p, draws):
    return abs(count / draws - p) < 5 * math.sqrt(p * (1 - p) / draws)


# --- the conditional Gumbel -------------------------------------------------------------------------------------------


def test_the_maximum_is_the_target_and_its_place_has_probability_p():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    target = torch.linspace(-3, 3, DRAWS, dtype=torch.float64)
    found = gumbel_with_maximum(p.log().expand(DRAWS, 4), target, seeded())
    assert torch.equal(found.amax(-1), target) and (found[:, 3] == -torch.inf).all()
    for place, share in enumerate(p.tolist()[:3]):
        assert agrees((found.argmax(-1) == place).sum().item(), share, DRAWS)


def test_entries_below_the_maximum_are_truncated_gumbels():
    """P(G <= x | G <= T) = exp(-e^(phi - x)) / exp(-e^(phi - T)): its value at G is uniform (Kolmogorov-Smirnov)."""
    phi, target = torch.tensor([0.6, 0.4], dtype=torch.float64).log(), 0.7
    found = gumbel_with_maximum(phi.expand(DRAWS, 2), torch.full((DRAWS,), target), seeded())
    lower = found.argmin(-1)
    values, own = found.gather(1, lower[:, None])[:, 0], phi[lower]
    level = (torch.exp(own - target) - torch.exp(own - values)).exp().sort().values
    steps = torch.arange(1, DRAWS + 1) / DRAWS
    assert (level - steps).abs().max() < 2.0 / math.sqrt(DRAWS)


def test_unconditioned_maxima_give_back_independent_gumbels():
    """With T ~ Gumbel(log sum e^phi) the entries are plain Gumbel(phi_i), independent: means, variances, covariance."""
    phi, draws = torch.tensor([0.0, -1.5], dtype=torch.float64), 40_000
    top = torch.logsumexp(phi, 0) - torch.empty(draws, dtype=torch.float64).exponential_(generator=seeded(3)).log()
    found = gumbel_with_maximum(phi.expand(draws, 2), top, seeded())
    euler, variance = 0.5772156649, math.pi**2 / 6
    assert (found.mean(0) - phi - euler).abs().max() < 5 * math.sqrt(variance / draws)
    covariance = torch.cov(found.T)
    assert (covariance - variance * torch.eye(2, dtype=torch.float64)).abs().max() < 0.08


def test_very_unlikely_sequences_keep_their_precision():
    """The naive form -log(e^-T - e^-Z + e^-G) is infinite or NaN at log-probabilities of a long text."""
    phi = torch.tensor([[-800.0, -801.0, -850.0]], dtype=torch.float64)
    target = torch.tensor([-799.5], dtype=torch.float64)
    found = gumbel_with_maximum(phi, target, seeded())
    assert torch.isfinite(found).all() and found.max() == target and len(set(found[0].tolist())) == 3
    noise = phi - torch.empty(1, 3, dtype=torch.float64).exponential_(generator=seeded()).log()
    naive = -torch.log(torch.exp(-target) - torch.exp(-noise.max()) + torch.exp(-noise))
    assert not torch.isfinite(naive).all()


def test_impossible_rows_stay_impossible():
    phi = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf], [0.0, 0.0]])
    found = gumbel_with_maximum(phi, torch.tensor([1.0, 1.0, -torch.inf]), seeded())
    assert found.tolist() == [[1.0, -torch.inf], [-torch.inf] * 2, [-torch.inf] * 2] and found.dtype == torch.float64


def test_log1mexp_is_exact_at_both_ends():
    x = torch.tensor([-1e-12, -0.5, -0.7, -40.0], dtype=torch.float64)
    exact = [math.log(1e-12), math.log(1 - math.exp(-0.5)), math.log(1 - math.exp(-0.7)), -math.exp(-40.0)]
    assert log1mexp(x).tolist() == pytest.approx(exact, rel=1e-11)


# --- the law ----------------------------------------------------------------------------------------------------------


def test_one_sequence_is_drawn_with_its_probability():
    model = TableLM(3, seed=1)
    law, counts = sequences(model, [1, 2], {0}, 3), Counter(drawn(beams(model, k=1)))
    assert len(law) == 15
    for tokens, log_p in law.items():
        assert agrees(counts[(tokens,)], math.exp(log_p), DRAWS), tokens


def test_ordered_pairs_are_drawn_without_replacement():
    model = TableLM(3, seed=2)
    law = {t: math.exp(p) for t, p in sequences(model, [1, 2], {0}, 2).items()}
    counts = Counter(drawn(beams(model, k=2, longest=2)))
    for first, second in itertools.permutations(law, 2):
        assert agrees(counts[first, second], law[first] * law[second] / (1 - law[first]), DRAWS)


def test_horvitz_thompson_is_unbiased():
    """E sum_S f(y) p(y) / q(y), q = 1 - exp(-exp(log p - kappa)), is the sum over all sequences."""
    model, k = TableLM(3, seed=3), 3
    law = sequences(model, [1, 2], {0}, 3)

    def value(tokens):
        return len(tokens) + 2.0 * (tokens[0] == 1)

    exact = sum(math.exp(p) * value(tokens) for tokens, p in law.items())
    found = beams(model, k=k + 1)
    weights = (found.log_probs[:, :k] - log_inclusion(found.log_probs[:, :k], found.gumbels[:, k])).exp()
    values = torch.tensor([[value(tokens) for tokens in row[:k]] for row in drawn(found)], dtype=torch.float64)
    estimates = (weights * values).sum(-1)
    error = estimates.std().item() / math.sqrt(DRAWS)
    assert abs(estimates.mean().item() - exact) < 4 * error and error < 0.02 * exact
    biased = (found.log_probs[:, :k].exp() * values).sum(-1)  # the mutant without weights
    assert abs(biased.mean().item() - exact) > 10 * error


def test_as_many_beams_as_sequences_return_all_and_more_are_empty():
    model = TableLM(3, seed=1)
    law = sequences(model, [1, 2], {0}, 3)
    found = beams(model, k=len(law) + 4, rows=6)
    for row, tokens in enumerate(drawn(found)):
        assert set(tokens[: len(law)]) == set(law) and len(set(tokens[: len(law)])) == len(law)
        assert found.log_probs[row, : len(law)].tolist() == pytest.approx([law[t] for t in tokens[: len(law)]], abs=1e-5)
    assert (found.log_probs[:, len(law) :] == -torch.inf).all() and (found.gumbels[:, len(law) :] == -torch.inf).all()
    assert (found.lengths[:, len(law) :] == 0).all() and (found.token_ids[:, len(law) :] == 0).all()


def test_perturbed_scores_fall_and_start_at_the_roots():
    found = beams(TableLM(3, seed=1), k=5, rows=50)
    assert (found.gumbels.diff(dim=1) < 0).all()
    torch.testing.assert_close(found.gumbels[:, 0], roots(50)["gumbels"][:, 0], atol=1e-12, rtol=0)


def test_the_set_is_the_same_law_whatever_the_roots_perturbed_score():
    """Gumbel noise is translation-invariant: the order of the beams does not know the root's number."""
    found = [beams(TableLM(3, seed=1), k=3, rows=400, gumbels=torch.full((400, 1), g)) for g in (0.0, 5.0)]
    assert drawn(found[0]) == drawn(found[1])


# --- continuing a beam ------------------------------------------------------------------------------------------------


def test_two_nodes_a_row_continue_as_one_beam():
    """Nodes 1 and 2 with probabilities 0.7 and 0.3: the best pair (node, sequence) has the probability of the joint."""
    model, rows = TableLM(3, seed=4), 8000
    phi = torch.tensor([0.7, 0.3], dtype=torch.float64).log().expand(rows, 2)
    gumbels = gumbel_with_maximum(phi, roots(rows)["gumbels"][:, 0], seeded(5))
    ids = torch.tensor([[1], [2]]).repeat(rows, 1)
    found = stochastic_beam_tokens(
        model, ids, torch.ones_like(ids), k=2, log_probs=phi, gumbels=gumbels, max_new_tokens=2, eos_token_id=0,
        pad_token_id=0, generator=seeded(),
    )  # fmt: skip
    joint = {
        (node, tokens): math.log(share) + p
        for node, (start, share) in enumerate([(1, 0.7), (2, 0.3)])
        for tokens, p in sequences(model, [start], {0}, 2).items()
    }
    pairs = [tuple(zip(parents, tokens)) for parents, tokens in zip(found.parents.tolist(), drawn(found))]
    first = Counter(pair[0] for pair in pairs)
    for key, log_p in joint.items():
        assert agrees(first[key], math.exp(log_p), rows), key
    assert all(a != b for a, b in pairs)
    expected = [[joint[key] for key in pair] for pair in pairs[:100]]
    torch.testing.assert_close(found.log_probs[:100], torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def test_an_impossible_node_has_no_continuations():
    model = TableLM(3, seed=4)
    ids = torch.tensor([[1], [2]])
    found = stochastic_beam_tokens(
        model, ids, torch.ones_like(ids), k=40, log_probs=torch.tensor([[-torch.inf, -1.0]]),
        gumbels=torch.tensor([[-torch.inf, 0.3]]), max_new_tokens=2, eos_token_id=0, pad_token_id=0, generator=seeded(),
    )  # fmt: skip
    possible = found.gumbels[0] > -torch.inf
    assert possible.sum() == len(sequences(model, [2], {0}, 2)) and (found.parents[0][possible] == 1).all()
    assert (found.log_probs[0][~possible] == -torch.inf).all() and not torch.isnan(found.log_probs).any()


# --- real networks ----------------------------------------------------------------------------------------------------


def search(model, seed=0, **options):
    ids, mask, _ = prompts()
    given = roots(3) | {"k": 4, "max_new_tokens": 6, "eos_token_id": list(range(0, 23, 3)), "pad_token_id": -1}
    return stochastic_beam_tokens(model, ids, mask, generator=seeded(seed), **given | options)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "qwen3_next"])
def test_log_probs_are_a_plain_forwards_and_all_sequences_differ(kind):
    model, lists = random_model(kind), prompts()[2]
    found = search(model)
    for row, (prompt, tokens) in enumerate(zip(lists, drawn(found))):
        assert len(set(tokens)) == 4
        for sequence, log_prob in zip(tokens, found.log_probs[row].tolist()):
            assert abs(forced_log_prob(model, prompt, sequence) - log_prob) < 1e-4


def test_each_prompt_is_read_once_and_complete_sequences_cost_nothing():
    model, shapes = random_model("llama"), []
    model.register_forward_pre_hook(lambda m, a, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    found = search(model, max_new_tokens=20)
    assert shapes[0] == (3, 7) and all(width == 1 and rows <= 12 for rows, width in shapes[1:])
    assert len(shapes) == found.token_ids.shape[2] < 20 and shapes[-1][0] < 12


def test_the_same_seed_gives_the_same_beams_and_nothing_else_changes():
    model = adapted(random_model("llama"), dropout=0.5).train()
    before = torch.get_rng_state()
    first, again = search(model), search(model)
    assert torch.equal(before, torch.get_rng_state()) and all(module.training for module in model.modules())
    assert torch.equal(first.token_ids, again.token_ids) and torch.equal(first.gumbels, again.gumbels)
    assert drawn(first) != drawn(search(model, seed=1))


@pytest.mark.parametrize(("changes", "kind", "says"), [
    ({"k": 0}, errors.OptionRangeError, "k=0"),
    ({"max_new_tokens": 0}, errors.OptionRangeError, "max_new_tokens=0"),
    ({"log_probs": torch.zeros(3, 2)}, errors.BatchMismatchError, "3 prompts need"),
    ({"gumbels": torch.zeros(3)}, errors.BatchMismatchError, r"\(3, 1\) and \(3,\)"),
    ({"log_probs": torch.full((3, 1), math.nan)}, errors.NonFiniteError, "log_probs"),
    ({"gumbels": torch.full((3, 1), math.inf)}, errors.NonFiniteError, "gumbels"),
    ({"eos_token_id": 99}, errors.TokenIdError, "vocabulary"),
    ({"pad_token_id": None}, errors.TokenIdError, "pad_token_id"),
])  # fmt: skip
def test_bad_input_is_answered_by_name(changes, kind, says):
    with pytest.raises(kind, match=says):
        search(random_model("llama"), **changes)
