"""Diverse beam search: transformers 4.56.2's hypotheses, a default that no pad id can touch, no wasted work."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from sysdpo_lab import caches, errors
from sysdpo_lab.decoding import Decoder, greedy_tokens
from sysdpo_lab.samplers import beam_search, diverse_beam_search
from tests.goldens.dbs import tiny_models
from tests.table_lm import ARCHITECTURES, TableLM, adapted, first_tokens, forced_log_prob, prompts, random_model

GOLDENS = Path(tiny_models.__file__).parent
OPTIONS = {"diversity_penalty": 20.0, "max_new_tokens": 8, "eos_token_id": 3, "pad_token_id": 0}


def search(model, **options):
    ids, mask, _ = prompts()
    return diverse_beam_search(model, ids, mask, **OPTIONS | options)


def hypotheses(found, row):
    """(tokens, score, log-prob) of one prompt, in the order returned."""
    parts = zip(found.token_ids[row], found.lengths[row], found.scores[row], found.log_probs[row])
    return [(first_tokens(ids, length), score.item(), own.item()) for ids, length, score, own in parts]


# --- parity -----------------------------------------------------------------------------------------------------------


def rebuilt(document, attention):
    models = {name: tiny_models.build(spec, attention) for name, spec in document["models"].items()}
    for name, spec in document["models"].items():
        assert tiny_models.digest(models[name]) == spec["sha256"], f"{name}: other weights than the goldens were made with"
    return models


def run(model, case, mode, pad=None):
    options = case["options"] | ({} if pad is None else {"pad_token_id": pad})
    return diverse_beam_search(
        model, torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"]), finished_groups=mode, **options
    )


def difference(found, case):
    """'' where every golden hypothesis is there, with its score and log-probability, else what is wrong first."""
    for row, golden in enumerate(case["rows"]):
        ours = hypotheses(found, row)
        expected = Counter(tuple(entry["tokens"]) for entry in golden)
        if Counter(tokens for tokens, _, _ in ours) != expected:
            return f"row {row}: {ours} instead of {golden}"
        pairs = zip(sorted(ours, key=lambda h: h[:2]), sorted((tuple(e["tokens"]), e["score"], e["log_prob"]) for e in golden))
        for (_, score, own), (tokens, golden_score, golden_own) in pairs:
            if abs(score - golden_score) > 2e-5 * max(1, abs(golden_score)):
                return f"row {row}: {tokens} scores {score}, expected {golden_score}"
            if abs(own - golden_own) > 1e-4 * max(1, abs(golden_own)):
                return f"row {row}: {tokens} has log-probability {own}, expected {golden_own}"
    return ""


@pytest.mark.parity
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["goldens_public.json", "goldens_own.json"])
def test_the_hypotheses_are_those_of_transformers_4_56_2(name, attention):
    document = json.loads((GOLDENS / name).read_text())
    assert document["made_with"]["transformers"] == "4.56.2"
    models, wrong = rebuilt(document, attention), {}
    for case in document["cases"]:
        found = run(models[case["model"]], case, case["mode"])
        fault = difference(found, case)
        if case["mode"] == "pad" and not fault:
            fault = "" if (found.scores.diff(dim=1) <= 0).all() else "not ordered by score"
        wrong |= {case["id"]: fault} if fault else {}
    assert not wrong, f"{len(wrong)} of {len(document['cases'])} cases differ: {dict(list(wrong.items())[:3])}"


def test_our_goldens_cover_what_is_easy_to_get_wrong():
    cases = json.loads((GOLDENS / "goldens_own.json").read_text())["cases"]
    seen = Counter()
    for case in cases:
        options = case["options"]
        eos = options["eos_token_id"] if isinstance(options["eos_token_id"], list) else [options["eos_token_id"]]
        inside = {i for ids, mask in zip(case["input_ids"], case["attention_mask"]) for i, m in zip(ids, mask) if m}
        seen["two eos"] += len(eos) > 1
        seen["never"] += options["early_stopping"] == "never"
        seen["one token"] += options["max_new_tokens"] == 1
        seen["long"] += options["max_new_tokens"] == 48
        seen["other length penalty"] += options["length_penalty"] not in (0.0, 1.0)
        seen["eos in prompt"] += bool(inside & set(eos))
        seen["pad in prompt"] += options["pad_token_id"] in inside
        seen["pad is eos"] += options["pad_token_id"] in eos
        seen["default mode"] += case["mode"] == "ignore" and case["finished_groups"] > 0
        seen["min"] += options["min_new_tokens"] > 0
        seen["three beams"] += options["beams_per_group"] == 3
        seen["six groups"] += options["num_groups"] == 6
        seen["padded"] += any(0 in mask for mask in case["attention_mask"])
    assert all(number >= 4 for number in seen.values()), seen


def test_the_default_never_depends_on_the_pad_id():
    document = json.loads((GOLDENS / "goldens_public.json").read_text())
    models = rebuilt(document, "eager")
    moved = 0
    for case in document["cases"][::4]:
        base = run(models[case["model"]], case, "ignore")
        eos = case["options"]["eos_token_id"]
        for pad in (0, 1, eos, 1_000_000):
            found = run(models[case["model"]], case, "ignore", pad)
            assert torch.equal(found.scores, base.scores) and torch.equal(found.lengths, base.lengths)
            assert [h[0] for h in hypotheses(found, 0)] == [h[0] for h in hypotheses(base, 0)]
            if pad != 1_000_000:
                moved += not torch.equal(run(models[case["model"]], case, "pad", pad).log_probs.sort().values,
                                         base.log_probs.sort().values)  # fmt: skip
    assert moved, "the parity mode never differs here: the cases show nothing"


# --- the algorithm ----------------------------------------------------------------------------------------------------


def coupled_greedy(model, prompt, groups, penalty, longest, eos):
    """One beam a group, written out: [(tokens, penalised sum)] by group; finished groups count for nothing."""
    tokens, totals = [[] for _ in range(groups)], [0.0] * groups
    ended = [False] * groups
    for _ in range(longest):
        chosen = Counter()
        for g in range(groups):
            if ended[g]:
                continue
            scores = [p - penalty * chosen[i] for i, p in enumerate(model.next_log_probs([*prompt, *tokens[g]]))]
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            ended[g] = order[0] == eos
            chosen[next(i for i in order if i != eos)] += 1  # ending is never penalised
            tokens[g].append(order[0])
            totals[g] += scores[order[0]]
    return [(tuple(t), total) for t, total in zip(tokens, totals)]


@pytest.mark.parametrize("penalty", [0.0, 0.4, 1.5, 20.0])
def test_one_beam_a_group_is_coupled_greedy_decoding(penalty):
    ends = Counter()
    for seed in range(12):
        model = TableLM(5, seed=seed)
        found = diverse_beam_search(
            model, torch.tensor([[1, 2], [4, 4]]), torch.ones(2, 2), num_groups=4, diversity_penalty=penalty,
            max_new_tokens=6, eos_token_id=0, pad_token_id=1, length_penalty=0.0,
        )  # fmt: skip
        for row, prompt in enumerate([[1, 2], [4, 4]]):
            expected = coupled_greedy(model, prompt, 4, penalty, 6, 0)
            assert [h[0] for h in hypotheses(found, row)] == [tokens for tokens, _ in expected]
            assert found.scores[row].tolist() == pytest.approx([total for _, total in expected], abs=1e-4)
            ends.update(tokens[-1] == 0 for tokens, _ in expected)
    assert min(ends[True], ends[False]) > 5


def test_ending_is_not_penalised_but_the_best_other_token_is():
    """Both groups end at once; the second pays only for token 1, which the first would have said."""
    model = TableLM(3)
    model.table.data[:] = torch.tensor([0.6, 0.3, 0.1]).log()
    found = diverse_beam_search(
        model, torch.tensor([[1]]), torch.ones(1, 1), num_groups=2, diversity_penalty=5.0, max_new_tokens=2,
        eos_token_id=0, pad_token_id=2, early_stopping="never",
    )  # fmt: skip
    assert [h[0] for h in hypotheses(found, 0)] == [(0,), (0,)]
    assert found.log_probs[0].exp().tolist() == pytest.approx([0.6, 0.6])
    again = diverse_beam_search(
        model, torch.tensor([[1]]), torch.ones(1, 1), num_groups=2, diversity_penalty=5.0, max_new_tokens=1,
        min_new_tokens=1, eos_token_id=0, pad_token_id=2,
    )  # fmt: skip
    assert [h[0] for h in hypotheses(again, 0)] == [(1,), (2,)]
    assert again.scores[0].tolist() == pytest.approx([math.log(0.3), math.log(0.1)])


def test_a_penalised_token_costs_score_but_not_log_probability():
    model = TableLM(3)
    model.table.data[:] = torch.tensor([0.01, 0.9, 0.09]).log()
    found = diverse_beam_search(
        model, torch.tensor([[1]]), torch.ones(1, 1), num_groups=2, diversity_penalty=1.0, max_new_tokens=1,
        eos_token_id=0, pad_token_id=2,
    )  # fmt: skip
    assert found.log_probs[0].tolist() == pytest.approx([math.log(0.9)] * 2)
    assert found.scores[0].tolist() == pytest.approx([math.log(0.9), math.log(0.9) - 1.0])


def test_a_large_penalty_makes_the_groups_differ_and_none_makes_them_equal():
    model = random_model("llama")
    far, near = search(model, num_groups=5, min_new_tokens=1), search(model, num_groups=5, diversity_penalty=0)
    for row in range(3):
        assert len({first_tokens(*pair) for pair in zip(far.token_ids[row], far.lengths[row])}) == 5
        assert len(set(far.token_ids[row, :, 0].tolist())) == 5
        assert len({h[0] for h in hypotheses(near, row)}) == 1
    assert far.groups.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_one_group_of_one_beam_is_greedy():
    model, (ids, mask, _) = random_model("llama"), prompts()
    found, greedy = search(model, num_groups=1), greedy_tokens(model, ids, mask, max_new_tokens=8, eos_token_id=3, pad_token_id=0)
    assert torch.equal(found.token_ids, greedy.token_ids)
    torch.testing.assert_close(found.log_probs, greedy.log_probs)


def test_groups_keep_their_own_best_and_stand_in_order():
    found = search(random_model("llama"), num_groups=3, beams_per_group=2)
    assert found.groups.tolist() == [[0, 0, 1, 1, 2, 2]] * 3
    assert (found.scores.reshape(3, 3, 2).diff(dim=2) <= 0).all()
    by_score = search(random_model("llama"), num_groups=3, beams_per_group=2, finished_groups="pad")
    assert (by_score.scores.diff(dim=1) <= 0).all() and by_score.groups.sort().values.tolist() == found.groups.tolist()


def test_no_hypothesis_ends_before_min_new_tokens():
    model = random_model("llama")
    eos = list(range(0, 23, 2))
    early = search(model, num_groups=3, beams_per_group=2, eos_token_id=eos)
    for least in (1, 4, 8):
        found = search(model, num_groups=3, beams_per_group=2, eos_token_id=eos, min_new_tokens=least)
        assert found.lengths.min() >= least > 0 and early.lengths.min() < 4
        before_end = torch.isin(found.token_ids[:, :, : least - 1 if least < 8 else 7], torch.tensor(eos))
        inside = torch.arange(before_end.shape[2]) < least
        assert not (before_end & inside).any()


def test_log_probs_are_a_plain_forwards_whatever_was_paid():
    model, lists = random_model("gpt2"), prompts()[2]
    for mode in ("ignore", "pad"):
        found = search(model, num_groups=3, beams_per_group=2, diversity_penalty=1.0, finished_groups=mode)
        for row, prompt in enumerate(lists):
            for tokens, score, own in hypotheses(found, row):
                assert abs(forced_log_prob(model, prompt, tokens) - own) < 1e-4
                assert score <= own / len(tokens) + 1e-5


def test_length_penalty_divides_by_a_power_of_the_length():
    model = random_model("llama")
    flat, square = (search(model, num_groups=2, length_penalty=p, early_stopping=True) for p in (0.0, 2.0))
    torch.testing.assert_close(square.scores, flat.scores / flat.lengths**2)


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_and_recomputed_searches_choose_the_same_tokens(kind, beams, monkeypatch):
    model = random_model(kind)
    options = {"num_groups": 2, "beams_per_group": beams, "diversity_penalty": 0.5, "max_new_tokens": 10}
    cached = search(model, **options)

    class Recomputing(Decoder):
        def __init__(self, *arguments):
            super().__init__(*arguments, use_cache=False)
            assert not self.cached

    monkeypatch.setattr(beam_search, "Decoder", Recomputing)
    plain = search(model, **options)
    assert torch.equal(cached.token_ids, plain.token_ids)
    torch.testing.assert_close(cached.log_probs, plain.log_probs, atol=1e-4, rtol=0)


def counted(model, monkeypatch, **options):
    """(shapes of the forwards, number of times that cached rows were moved)."""
    shapes, moves, select = [], [], caches.select_cache_rows
    model.register_forward_pre_hook(lambda m, a, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    monkeypatch.setattr(caches, "select_cache_rows", lambda cache, index: (moves.append(len(index)), select(cache, index)))
    search(model, **options)
    return shapes, moves


def test_each_prompt_is_read_once_and_single_beams_never_move(monkeypatch):
    shapes, moves = counted(random_model("llama"), monkeypatch, num_groups=4, min_new_tokens=8)
    assert shapes == [(3, 7)] + [(12, 1)] * 7
    assert moves == [12]  # the one repetition from 3 prompts to 12 rows


def test_beams_move_only_when_they_change_places(monkeypatch):
    shapes, moves = counted(random_model("llama"), monkeypatch, num_groups=2, beams_per_group=3, min_new_tokens=8)
    assert shapes == [(3, 7)] + [(18, 1)] * 7 and 1 < len(moves) <= 7
    still = TableLM(4)
    still.table.data[:] = 0.0
    unmoved = torch.arange(6)
    decoder = Decoder(still, torch.ones(6, 1).long(), torch.ones(6, 1))
    decoder._rows.select = None  # calling it would fail
    assert decoder.advance(unmoved % 4, unmoved, torch.zeros(6, dtype=torch.bool))


def test_done_groups_are_dropped_and_the_search_ends_with_the_last(monkeypatch):
    options = {"num_groups": 4, "eos_token_id": list(range(14)), "max_new_tokens": 60}
    shapes, _ = counted(random_model("llama"), monkeypatch, **options)
    rows = [rows for rows, _ in shapes[1:]]
    assert rows == sorted(rows, reverse=True) and rows[-1] < 12 and len(shapes) < 60


def test_the_model_and_the_random_state_are_left_as_they_were():
    model = adapted(random_model("llama", attention_dropout=0.5), dropout=0.5).train()
    before = torch.get_rng_state()
    loud = search(model, num_groups=3)
    assert torch.equal(before, torch.get_rng_state()) and all(module.training for module in model.modules())
    quiet = search(model.eval(), num_groups=3)
    assert torch.equal(loud.token_ids, quiet.token_ids) and torch.equal(loud.scores, quiet.scores)
    assert not loud.log_probs.requires_grad


def test_a_bfloat16_model_gives_float32_sums():
    found = search(random_model("llama").to(torch.bfloat16), num_groups=2, beams_per_group=2)
    assert found.log_probs.dtype == found.scores.dtype == torch.float32 and found.token_ids.dtype == torch.long
    assert not torch.equal(found.log_probs, found.log_probs.bfloat16().float())


# --- named errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "kind", "says"), [
    ({"finished_groups": "skip"}, errors.UnknownOptionError, "finished_groups='skip' .* 'ignore', 'pad'"),
    ({"early_stopping": "always"}, errors.UnknownOptionError, "early_stopping='always' .* False, True, 'never'"),
    ({"early_stopping": None}, errors.UnknownOptionError, "early_stopping=None"),
    ({"num_groups": 0}, errors.OptionRangeError, "num_groups=0"),
    ({"beams_per_group": 0}, errors.OptionRangeError, "beams_per_group=0"),
    ({"max_new_tokens": 0}, errors.OptionRangeError, "max_new_tokens=0"),
    ({"min_new_tokens": -1}, errors.OptionRangeError, "min_new_tokens=-1"),
    ({"min_new_tokens": 9}, errors.OptionRangeError, "min_new_tokens=9 .* max_new_tokens=8"),
    ({"diversity_penalty": -0.1}, errors.OptionRangeError, "diversity_penalty=-0.1 .* >= 0"),
    ({"diversity_penalty": math.inf}, errors.OptionRangeError, "diversity_penalty=inf"),
    ({"length_penalty": "long"}, errors.OptionRangeError, "length_penalty='long'"),
    ({"eos_token_id": [3, 23]}, errors.TokenIdError, "vocabulary"),
    ({"eos_token_id": list(range(23))}, errors.TokenIdError, "every one"),
    ({"pad_token_id": "0"}, errors.TokenIdError, "pad_token_id"),
    ({"pad_token_id": 23, "finished_groups": "pad"}, errors.TokenIdError, r"one of 0\.\.22"),
])  # fmt: skip
def test_bad_options_are_answered_by_name(changes, kind, says):
    with pytest.raises(kind, match=says):
        search(random_model("llama"), **{"num_groups": 2} | changes)


def test_bad_prompts_are_answered_by_name():
    model = random_model("llama")
    with pytest.raises(errors.PromptError, match="row 1"):
        diverse_beam_search(model, torch.ones(2, 2).long(), torch.tensor([[0, 1], [1, 0]]), num_groups=2, **OPTIONS)
    with pytest.raises(errors.PromptError, match="must agree"):
        diverse_beam_search(model, torch.ones(2, 2).long(), torch.ones(2, 3), num_groups=2, **OPTIONS)


@pytest.mark.parametrize(
    ("early", "power", "divisor"), [(False, 2.0, 9), ("never", 2.0, 100), ("never", 0.0, 1), ("never", -1.0, 1 / 3)]
)
def test_the_attainable_score_looks_ahead_only_for_never_and_a_positive_power(early, power, divisor):
    """Length 3 of at most 10: 3^2, 10^2, 1, and 3^-1, since with a power <= 0 growing longer cannot help."""
    rules = beam_search._Rules(2, 1.0, 10, 0, torch.tensor([0]), power, early)
    assert rules.attainable(torch.tensor([-6.0]), 3).item() == pytest.approx(-6.0 / divisor)
