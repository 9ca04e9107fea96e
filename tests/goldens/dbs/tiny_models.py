"""Tiny random causal language models that every transformers version rebuilds with the very same weights.

Each weight comes from numpy's frozen RandomState stream, seeded by (model seed, parameter name), so that neither the order
of the parameters nor transformers' initialisation matters. Used by the tests and, under transformers 4.56.2, by
make_goldens.py. A specification is one entry of "models" in a goldens file.
"""

import hashlib
import zlib

import numpy
import torch


def config_of(spec):
    from transformers import LlamaConfig, Qwen2Config

    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[spec["arch"]]
    return kind(
        vocab_size=spec["vocab"],
        hidden_size=spec["hidden"],
        intermediate_size=spec["intermediate"],
        num_hidden_layers=spec["layers"],
        num_attention_heads=spec["heads"],
        num_key_value_heads=spec["kv_heads"],
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def weight(spec, name, shape):
    """Ones for norms; Gaussian noise otherwise, with the output rows of the `loud` tokens (used as EOS) doubled."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    stream = numpy.random.RandomState(zlib.crc32(f"{spec['seed']}:{name}".encode()))
    drawn = (spec["init"] * stream.standard_normal(tuple(shape))).astype(numpy.float32)
    if name == "lm_head.weight":
        drawn[spec["loud"]] *= 2
    return torch.from_numpy(drawn)


def build(spec, attention="eager"):
    """The model of a specification, float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(spec), attn_implementation=attention).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight(spec, name, parameter.shape))
    return model


def digest(model):
    """SHA-256 over names, shapes and float32 bytes of all parameters."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(f"{name}{tuple(parameter.shape)}".encode())
        total.update(parameter.detach().float().contiguous().numpy().tobytes())
    return total.hexdigest()


@torch.no_grad()
def log_prob(model, prompt, continuation):
    """log p(continuation | prompt), nats, summed, from one plain forward without padding or cache."""
    ids = torch.tensor([[*prompt, *continuation]])
    log_p = torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return log_p[places, ids[0, len(prompt) :]].sum().item()
