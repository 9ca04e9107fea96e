"""Token log-probabilities against forwards that are written out here."""

import pytest
import torch

from sysdpo_lab import scoring
from tests import table_lm, tiny

KINDS = ("llama", "qwen2", "gpt2")
PROMPTS = [(5, 9, 17, 4), (30, 12), (8,)]
COMPLETIONS = [(40, 41, 1), (42, 43, 44, 45, 1), (46, 1)]


def by_hand(model, prompt, completion):
    """One row, no padding, no options: softmax and sum in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double()
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return sum(
        probabilities[len(prompt) + t - 1, token].log().item() for t, token in enumerate(completion)
    )


def score(model, prompts=PROMPTS, completions=COMPLETIONS, pad=0, **options):
    with torch.no_grad():
        return scoring.sequence_log_probs(model, prompts, completions, pad, **options)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_float64_model_equals_a_plain_forward(kind):
    model = tiny.model(kind, dtype=torch.float64)
    found = score(model)
    assert found.dtype == torch.float64
    expected = [by_hand(model, p, c) for p, c in zip(PROMPTS, COMPLETIONS)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_alone_equals_the_row_in_a_batch(kind, attention):
    model = tiny.model(kind, attn_implementation=attention)
    together = score(model)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS)):
        alone = score(model, [prompt], [completion])
        assert abs(alone.item() - together[row].item()) < 1e-5


RECURRENT = {
    "rwkv": {"hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16, "context_length": 128},
    "recurrent_gemma": {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "lru_width": 16,
                        "intermediate_size": 24, "attention_window_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_states_never_see_padding(kind, monkeypatch):
    monkeypatch.setitem(table_lm.ARCHITECTURES, kind, RECURRENT[kind])
    model = table_lm.random_model(kind, vocabulary=64)
    wanted = torch.tensor([table_lm.forced_log_prob(model, list(p), c) for p, c in zip(PROMPTS, COMPLETIONS)])
    for multiple in (None, 8):
        torch.testing.assert_close(score(model, pad_to_multiple=multiple), wanted, atol=1e-4, rtol=0)
    monkeypatch.setattr(type(model), "_is_stateful", False)
    assert (score(model) - wanted).abs().max() > 1e-2  # the trap is real


def test_pad_id_and_extra_pad_columns_change_nothing():
    model = tiny.model()
    plain = score(model)
    torch.testing.assert_close(score(model, pad=1), plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(score(model, pad=200), plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(score(model, pad_to_multiple=16), plain, atol=1e-5, rtol=0)


def test_only_completion_tokens_are_counted():
    packed = scoring.pack(PROMPTS, COMPLETIONS, pad=3)
    assert packed.counted.sum(-1).tolist() == [3, 5, 2]
    log_probs = torch.arange(15.0).reshape(3, 5)
    assert scoring.summed(log_probs, packed.counted).tolist() == [0 + 1 + 2, 5 + 6 + 7 + 8 + 9, 10 + 11]


def test_every_completion_starts_in_the_same_column_and_positions_ignore_padding():
    packed = scoring.pack([(5, 6), (7,)], [(8, 1), (9, 2)], pad=3)
    assert packed.input_ids.tolist() == [[5, 6, 8], [3, 7, 9]]
    assert packed.attention_mask.tolist() == [[1, 1, 1], [0, 1, 1]]
    assert packed.position_ids.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert packed.targets.tolist() == [[8, 1], [9, 2]]


def test_rounded_widths_are_multiples():
    packed = scoring.pack(PROMPTS, COMPLETIONS, pad=0, pad_to_multiple=8)
    assert packed.targets.shape[1] == 8
    assert packed.input_ids.shape[1] == 8 + 8 - 1


@pytest.mark.parametrize("kind", KINDS)
def test_only_completion_positions_reach_the_head(kind):
    model = tiny.model(kind)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    score(model)
    assert seen == [5]


def test_a_frozen_head_is_not_copied_once_a_row():
    model = tiny.model().requires_grad_(False)
    plain = score(model)
    with torch.no_grad(), torch.profiler.profile() as profile:
        scoring.completion_logits(model, scoring.pack(PROMPTS, COMPLETIONS, 0))
    names = [event.key for event in profile.key_averages()]
    assert "aten::mm" in names and "aten::bmm" not in names
    torch.testing.assert_close(plain, score(tiny.model()), atol=1e-6, rtol=0)
    assert not model.lm_head._forward_pre_hooks


def test_models_without_the_option_are_sliced(monkeypatch):
    model = tiny.model()
    full = score(model)
    monkeypatch.setattr(scoring, "accepts", lambda model, argument: argument != "logits_to_keep")
    torch.testing.assert_close(score(model), full, atol=1e-6, rtol=0)


def test_bfloat16_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits = (8 * torch.randn(4, 40, 300)).bfloat16()
    ids = torch.randint(0, 300, (4, 40))
    exact = torch.log_softmax(logits.double(), -1).gather(-1, ids[..., None])[..., 0].sum(-1)
    found = scoring.summed(scoring.token_log_probs(logits, ids), torch.ones(4, 40, dtype=torch.bool))
    assert found.dtype == torch.float32
    assert (found.double() - exact).abs().max() < 1e-3 * 40
    coarse = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0].sum(-1)
    assert (coarse.double() - exact).abs().max() > 0.1  # what the float32 sum avoids


def test_dropout_is_never_active_and_flags_come_back_also_on_error():
    model = tiny.model(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    assert torch.equal(score(model), score(model))
    assert [module.training for module in model.modules()] == flags
    with pytest.raises(IndexError):
        score(model, [(5, 6)], [(10**6, 1)])
    assert [module.training for module in model.modules()] == flags


def gradients(model):
    model.zero_grad()
    scoring.sequence_log_probs(model, PROMPTS, COMPLETIONS, 0).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_gives_the_same_gradients_without_dropout(kind):
    dropout = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5} if kind == "gpt2" else {"attention_dropout": 0.5}
    model = tiny.model(kind, **dropout).train()
    plain = gradients(model)
    model.activation_checkpointing_enable()
    calls = []
    first = next(module for module in model.modules() if type(module).__name__ in ("LlamaMLP", "Qwen2MLP", "GPT2MLP"))
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed = gradients(model)
    assert len(calls) == 2  # forward, and again in backward: checkpointing was on
    for left, right in zip(plain, recomputed):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)
    assert all("forward" not in module.__dict__ for module in model.modules())
