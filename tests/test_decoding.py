"""Sampling and greedy decoding: the exact law, one reading of each prompt, nothing left behind."""

import math

import pytest
import torch

from sysdpo_lab import caches, decoding, errors
from sysdpo_lab.decoding import greedy_tokens, invert_cumulative, sample_tokens
from tests.table_lm import TableLM, adapted, first_tokens, forced_log_prob, prompts, random_model, sequences

EOS, PAD = 3, 0
OPTIONS = {"max_new_tokens": 8, "eos_token_id": EOS, "pad_token_id": PAD}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(model, seed=0, k=3, **options):
    ids, mask, _ = prompts()
    return sample_tokens(model, ids, mask, num_samples=k, generator=seeded(seed), **OPTIONS | options)


def watched(model):
    """Shapes of the input ids of every forward from now on."""
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sequences_are_drawn_with_the_models_own_probabilities(temperature):
    model, draws = TableLM(3, seed=1), 20_000
    tempered = TableLM(3, seed=1)
    tempered.table.data /= temperature
    law = sequences(tempered, [1, 2], {0}, 3)
    assert math.isclose(sum(map(math.exp, law.values())), 1.0)
    found = sample_tokens(
        model, torch.tensor([[1, 2]]), torch.ones(1, 2), num_samples=draws, max_new_tokens=3, eos_token_id=0,
        pad_token_id=9, temperature=temperature, generator=seeded(),
    )  # fmt: skip
    counts = dict.fromkeys(law, 0)
    for ids, length in zip(found.token_ids[0], found.lengths[0]):
        counts[first_tokens(ids, length)] += 1
    for tokens, log_p in law.items():
        p = math.exp(log_p)
        assert abs(counts[tokens] / draws - p) < 5 * math.sqrt(p * (1 - p) / draws), tokens


def test_log_probs_are_those_of_temperature_one_with_the_eos():
    model, law = TableLM(3, seed=1), sequences(TableLM(3, seed=1), [1, 2], {0}, 3)
    found = sample_tokens(
        model, torch.tensor([[1, 2]]), torch.ones(1, 2), num_samples=50, max_new_tokens=3, eos_token_id=0, pad_token_id=9,
        temperature=3.0, generator=seeded(),
    )  # fmt: skip
    for ids, length, log_prob in zip(found.token_ids[0], found.lengths[0], found.log_probs[0]):
        assert abs(log_prob.item() - law[first_tokens(ids, length)]) < 1e-5


def test_a_uniform_number_picks_its_stretch_and_never_an_impossible_token():
    log_probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).log().expand(6, 5)
    edge = 1 - 2**-53
    uniform = torch.tensor([0.0, 0.2999, 0.3001, 0.9999, edge, 1.0], dtype=torch.float64)
    assert invert_cumulative(log_probs, uniform).tolist() == [1, 1, 3, 3, 3, 3]


def test_rare_tokens_deep_in_a_large_vocabulary_keep_their_share():
    """A float32 cumulative sum would lose 20,000 tokens of probability 1e-9 each behind a token of almost 1."""
    log_probs = torch.full((1, 20_001), math.log(1e-9))
    log_probs[0, 0] = math.log1p(-2e-5)
    uniform = torch.tensor([1 - 1e-5], dtype=torch.float64)
    assert abs(invert_cumulative(log_probs, uniform).item() - 10_000) < 5


def test_greedy_is_transformers_greedy():
    ids, mask, _ = prompts()
    for kind in ("llama", "gpt2", "lfm2"):
        model = random_model(kind)
        for eos in (EOS, [5, 7]):
            found = greedy_tokens(model, ids, mask, max_new_tokens=10, eos_token_id=eos, pad_token_id=22)
            expected = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=10, eos_token_id=eos, pad_token_id=22
            )[:, 7:]
            assert found.token_ids[:, 0].tolist() == expected.tolist(), (kind, eos)


# --- form of the result -----------------------------------------------------------------------------------------------


def test_the_first_eos_is_kept_and_padding_follows():
    found = drawn(random_model("llama"), k=20, pad_token_id=-7, eos_token_id=[EOS, 4, 5, 6])
    assert found.ended.any() and not found.ended.all()
    for ids, length, ended in zip(*(part.flatten(0, 1) for part in (found.token_ids, found.lengths, found.ended))):
        tokens = ids.tolist()
        assert [t in (EOS, 4, 5, 6) for t in tokens[:length]] == [False] * (length - 1) + [bool(ended)]
        assert tokens[length:] == [-7] * (len(tokens) - length) and (ended or length == 8)


def test_the_width_is_that_of_the_longest_continuation():
    model = TableLM(3)
    model.table.data[:] = torch.tensor([0.0, 0.0, 50.0])
    model.table.data[2, 2] = torch.tensor([50.0, 0.0, 0.0])
    found = greedy_tokens(
        model, torch.tensor([[1]]), torch.ones(1, 1), max_new_tokens=9, eos_token_id=0, pad_token_id=1
    )
    assert found.token_ids.tolist() == [[[2, 2, 0]]] and found.lengths.tolist() == [[3]]


def test_log_probs_are_a_plain_forwards():
    model, lists = random_model("qwen2"), prompts()[2]
    found = drawn(model)
    for row, prompt in enumerate(lists):
        for ids, length, log_prob in zip(found.token_ids[row], found.lengths[row], found.log_probs[row]):
            assert abs(forced_log_prob(model, prompt, first_tokens(ids, length)) - log_prob.item()) < 1e-4


def test_sums_are_float32_for_a_bfloat16_model():
    found = drawn(random_model("llama").to(torch.bfloat16))
    assert found.log_probs.dtype == torch.float32
    assert not torch.equal(found.log_probs, found.log_probs.bfloat16().float())


# --- randomness -------------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_ids_and_the_global_state_is_untouched():
    model, before = random_model("llama"), torch.get_rng_state()
    first, again, other = drawn(model, 1), drawn(model, 1), drawn(model, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.token_ids, again.token_ids) and torch.equal(first.log_probs, again.log_probs)
    assert first.token_ids.shape != other.token_ids.shape or not torch.equal(first.token_ids, other.token_ids)


def test_the_pad_id_has_no_influence():
    model = random_model("llama")
    for pad in (0, EOS, 22, -100):
        found, base = drawn(model, pad_token_id=pad), drawn(model)
        assert torch.equal(found.log_probs, base.log_probs) and torch.equal(found.lengths, base.lengths)


def test_the_generator_advances_by_the_same_amount_whatever_is_drawn():
    ends = []
    for eos in (EOS, list(range(22))):
        generator = seeded()
        ids, mask, _ = prompts()
        sample_tokens(random_model("llama"), ids, mask, generator=generator, **OPTIONS | {"eos_token_id": eos})
        ends.append(generator.get_state())
    assert torch.equal(*ends)


# --- cost -------------------------------------------------------------------------------------------------------------


def test_each_prompt_is_read_once_and_each_step_reads_one_token():
    model = random_model("llama")
    shapes = watched(model)
    drawn(model, k=4, eos_token_id=[22])
    assert shapes[0] == (3, 7) and shapes[1] == (12, 1) and len(shapes) <= 8
    assert all(width == 1 for _, width in shapes[1:])


def test_one_sample_a_prompt_moves_no_cache(monkeypatch):
    moves, select = [], caches.select_cache_rows
    monkeypatch.setattr(caches, "select_cache_rows", lambda cache, index: (moves.append(len(index)), select(cache, index)))
    ids, mask, _ = prompts()
    model, counts = random_model("llama"), {}
    for eos in range(23):
        del moves[:]
        ended = greedy_tokens(model, ids, mask, **OPTIONS | {"eos_token_id": eos}).ended
        counts.setdefault(bool(ended.any()), []).append(len(moves))
    assert set(counts[False]) == {0} and max(counts[True]) > 0  # only a finished row makes the others move up


def test_finished_rows_leave_the_computation_and_it_ends_with_the_last():
    model = random_model("llama")
    shapes = watched(model)
    found = drawn(model, k=20, eos_token_id=list(range(0, 23, 2)), max_new_tokens=30)
    open_rows = [(found.lengths > step).sum().item() for step in range(1, found.token_ids.shape[2])]
    assert [rows for rows, _ in shapes[1:]] == open_rows and found.token_ids.shape[2] < 30
    assert open_rows[-1] < open_rows[0] < 60


def test_looking_less_often_changes_no_token(monkeypatch):
    model, base = random_model("llama"), drawn(random_model("llama"), k=20, eos_token_id=list(range(0, 23, 2)))
    start = decoding.Decoder.__init__

    def lazy(self, *arguments, **options):
        start(self, *arguments, **options)
        self._every = 3

    monkeypatch.setattr(decoding.Decoder, "__init__", lazy)
    shapes = watched(model)
    found = drawn(model, k=20, eos_token_id=list(range(0, 23, 2)))
    assert torch.equal(found.token_ids, base.token_ids)
    torch.testing.assert_close(found.log_probs, base.log_probs, atol=1e-4, rtol=0)
    assert shapes[2][0] == shapes[1][0] and shapes[3][0] < shapes[2][0]  # only every third step lets rows go


# --- the model is left as it was --------------------------------------------------------------------------------------


def test_dropout_is_off_while_decoding_and_every_flag_comes_back():
    model = adapted(random_model("llama", attention_dropout=0.5), dropout=0.5)
    quiet = drawn(model.eval())
    model.train()
    model.get_base_model().model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    loud = drawn(model)
    assert flags == [module.training for module in model.modules()] and True in flags and False in flags
    assert torch.equal(quiet.token_ids, loud.token_ids) and torch.equal(quiet.log_probs, loud.log_probs)
    assert not loud.log_probs.requires_grad


def test_flags_come_back_after_an_error():
    model = random_model("llama").train()
    with pytest.raises(errors.TokenIdError):
        drawn(model, eos_token_id=23)
    assert model.training and torch.is_grad_enabled()


def test_the_active_adapter_is_the_one_that_speaks():
    model = adapted(random_model("llama"))
    ids, mask, lists = prompts()
    found = greedy_tokens(model, ids, mask, **OPTIONS)
    with model.disable_adapter():
        base = greedy_tokens(model, ids, mask, **OPTIONS)
    assert not torch.equal(found.log_probs, base.log_probs)
    for row, prompt in enumerate(lists):
        tokens = first_tokens(found.token_ids[row, 0], found.lengths[row, 0])
        assert abs(forced_log_prob(model, prompt, tokens) - found.log_probs[row, 0].item()) < 1e-4


# --- named errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "kind", "says"), [
    ({"max_new_tokens": 0}, errors.OptionRangeError, "max_new_tokens=0"),
    ({"max_new_tokens": 2.0}, errors.OptionRangeError, "max_new_tokens=2.0"),
    ({"k": 0}, errors.OptionRangeError, "num_samples=0"),
    ({"k": True}, errors.OptionRangeError, "num_samples=True"),
    ({"temperature": 0}, errors.OptionRangeError, "temperature=0 .* > 0"),
    ({"temperature": math.nan}, errors.OptionRangeError, "temperature=nan"),
    ({"eos_token_id": 23}, errors.TokenIdError, r"ids 0\.\.22"),
    ({"eos_token_id": [3, -1]}, errors.TokenIdError, r"ids 0\.\.22"),
    ({"eos_token_id": None}, errors.TokenIdError, "at least one"),
    ({"eos_token_id": []}, errors.TokenIdError, "at least one"),
    ({"pad_token_id": None}, errors.TokenIdError, "pad_token_id=None"),
])  # fmt: skip
def test_bad_options_are_answered_by_name(changes, kind, says):
    with pytest.raises(kind, match=says):
        drawn(random_model("llama"), **changes)


@pytest.mark.parametrize(("ids", "mask", "says"), [
    (torch.ones(2, 3).long(), torch.ones(2, 2), "must agree"),
    (torch.ones(3).long(), torch.ones(3), "shape"),
    (torch.ones(0, 3).long(), torch.ones(0, 3), "shape"),
    (torch.ones(1, 2), torch.ones(1, 2), "integers"),
    (torch.ones(2, 3).long(), torch.tensor([[1, 1, 1], [1, 1, 0]]), "row 1.*not padded on the left"),
    (torch.ones(2, 3).long(), torch.tensor([[1, 0, 1], [1, 1, 1]]), "row 0.*not padded on the left"),
    (torch.ones(2, 3).long(), torch.tensor([[0, 0, 0], [1, 1, 1]]), "row 0"),
    (torch.ones(1, 3).long(), torch.tensor([[0, 1, 2]]), "row 0"),
])  # fmt: skip
def test_bad_prompts_are_answered_by_name(ids, mask, says):
    with pytest.raises(errors.PromptError, match=says):
        greedy_tokens(random_model("llama"), ids, mask, **OPTIONS)


def test_a_table_of_positions_that_is_too_short_is_named_before_anything_runs():
    model, (ids, mask, _) = random_model("gpt2", n_positions=14), prompts()
    shapes = watched(model)
    greedy_tokens(model, ids, mask, **OPTIONS)  # 7 + 8 - 1 positions: just enough
    del shapes[:]
    with pytest.raises(errors.ContextLengthError, match="row 0: 7 prompt tokens and max_new_tokens=9 need 15 .* 14"):
        greedy_tokens(model, ids, mask, **OPTIONS | {"max_new_tokens": 9})
    assert not shapes


def test_logits_that_are_not_numbers_are_an_error():
    model = random_model("llama")
    model.lm_head.weight.data[4] = math.nan
    with pytest.raises(errors.NonFiniteError, match="NaN"):
        drawn(model)


def test_prompt_learning_adapters_are_refused():
    import peft

    model = random_model("llama")
    model.peft_config = {"p": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}
    model.active_adapter = "p"
    with pytest.raises(errors.UnsupportedModelError, match="PromptTuningConfig"):
        drawn(model)
