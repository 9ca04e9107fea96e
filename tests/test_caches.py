"""Rows of a cache: every tensor of every kind of cache follows, and what is not understood is refused."""

import pytest
import torch

from sysdpo_lab import caches, decoding
from tests.table_lm import ARCHITECTURES, adapted, prompts, random_model

CACHED = [kind for kind in ARCHITECTURES if kind != "bloom"]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
def test_cached_rows_equal_recomputed_ones_through_repeats_reorderings_and_dropped_rows(kind, padded):
    model, (ids, mask, _) = random_model(kind), prompts()
    ids, mask = (ids, mask) if padded else (ids[:, 5:], mask[:, 5:])
    moves = [[0, 0, 1, 1, 2, 2], None, [1, 0, 3, 3, 4, 5], None, [5, 0, 2], None, None]
    with decoding.evaluating(model):
        fast, slow = (decoding.Decoder(model, ids, mask, use_cache=use) for use in (True, False))
        assert fast.cached == (kind != "bloom" or not padded) and not slow.cached
        torch.testing.assert_close(fast.log_probs, slow.log_probs, atol=1e-4, rtol=0)
        for step, parents in enumerate(moves):
            rows = len(parents or fast.log_probs)
            tokens = (torch.arange(rows) * 5 + step) % 23
            for decoder in (fast, slow):
                assert decoder.advance(tokens, None if parents is None else torch.tensor(parents))
            torch.testing.assert_close(fast.log_probs, slow.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "falcon_h1"])
def test_a_hybrid_cache_reordered_in_its_attention_layers_only_would_be_seen(kind, monkeypatch):
    """The mutant leaves convolution and recurrent states where they were (transformers#46612)."""

    def only_attention(cache, index):
        for layer, key, tensor in list(caches.cache_tensors(cache)):
            if key in ("keys", "values"):
                setattr(layer, key, tensor[index])

    monkeypatch.setattr(caches, "select_cache_rows", only_attention)
    model, (ids, mask, _) = random_model(kind), prompts()
    with decoding.evaluating(model):
        wrong, right = (decoding.Decoder(model, ids, mask, use_cache=use) for use in (True, False))
        for decoder in (wrong, right):
            decoder.advance(torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))
    assert (wrong.log_probs - right.log_probs).abs().max() > 1e-2


def test_left_padding_changes_nothing():
    ids, mask, lists = prompts()
    for kind in CACHED:
        model = random_model(kind)
        with decoding.evaluating(model):
            batch = decoding.Decoder(model, ids, mask)
            batch.advance(torch.tensor([4, 5, 6]))
            for row, prompt in enumerate(lists):
                alone = model(input_ids=torch.tensor([[*prompt, 4 + row]])).logits[0, -1].log_softmax(-1)
                torch.testing.assert_close(batch.log_probs[row], alone, atol=1e-4, rtol=0, msg=f"{kind}, row {row}")


def test_no_deprecated_argument_reaches_transformers(monkeypatch):
    from transformers.utils import generic

    def complain(*message, **options):
        raise AssertionError(message)

    monkeypatch.setattr(generic.logger, "warning_once", complain, raising=False)
    model, (ids, mask, _) = random_model("llama"), prompts()
    with decoding.evaluating(model):
        decoding.Decoder(model, ids, mask).advance(torch.tensor([1, 2, 3]))


def test_one_tensor_held_twice_stays_one_tensor():
    shared = torch.arange(2.0)[:, None]
    cache = {"a": shared, "b": [shared]}
    caches.select_cache_rows(cache, torch.tensor([1, 1, 0]))
    assert cache["a"] is cache["b"][0] and cache["a"].flatten().tolist() == [1.0, 1.0, 0.0]


def test_an_empty_tensor_with_rows_follows_and_a_placeholder_stays():
    cache = {"compressed": torch.zeros(2, 0, 4), "placeholder": torch.tensor([]), "length": torch.tensor(3)}
    caches.select_cache_rows(cache, torch.tensor([0, 1, 1]))
    assert cache["compressed"].shape == (3, 0, 4) and cache["placeholder"].shape == (0,) and cache["length"].shape == ()


@pytest.mark.parametrize("cache", [None, [], {"n": 3}, [(torch.zeros(2, 1),)], [torch.zeros(2, 1), torch.zeros(8, 1)]])
def test_a_cache_whose_rows_are_not_known_is_refused(cache):
    with pytest.raises(caches.UnknownCacheError):
        caches.check_cache(cache, rows=2)


def test_a_cache_of_the_models_own_is_not_trusted_with_padding():
    class OwnCache:
        layers = ()

    from transformers import DynamicCache

    caches.check_padding(DynamicCache(config=random_model("qwen3_next").config))
    with pytest.raises(caches.UnknownCacheError, match="OwnCache"):
        caches.check_padding(OwnCache())


def test_a_model_whose_cache_is_refused_is_recomputed(monkeypatch):
    def refuse(cache, rows):
        raise caches.UnknownCacheError

    monkeypatch.setattr(caches, "check_cache", refuse)
    model, (ids, mask, _) = random_model("llama"), prompts()
    with decoding.evaluating(model):
        assert not decoding.Decoder(model, ids, mask).cached


def test_wrappers_are_looked_through():
    inner = random_model("llama")
    assert caches.unwrapped(torch.nn.DataParallel(inner)) is inner
    assert caches.unwrapped(adapted(inner)) is inner


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_a_recurrent_model_without_positions_decodes_cached_as_in_one_pass(kind):
    # given a mask that is longer than one step, Mamba multiplies the step's state by all of it
    import transformers

    config = transformers.AutoConfig.for_model(
        kind, vocab_size=23, hidden_size=32, state_size=4, num_hidden_layers=2, expand=2, conv_kernel=4,
        time_step_rank=4, use_mambapy=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[5, 10, 20, 3, 4, 15, 6]])
    with torch.no_grad():
        expected = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
        rows = caches.open_rows(model, ids[:, :3], torch.ones(1, 3, dtype=torch.long), True)
        for position in range(3, 7):
            logits = rows.step(ids[:, position])
            assert torch.allclose(torch.log_softmax(logits[0], -1), expected[position], atol=1e-4)
