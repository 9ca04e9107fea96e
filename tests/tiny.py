"""Tiny random language models and tokenizers, built offline in milliseconds."""

import torch

SPECIAL = ("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
# each merge joins two earlier pieces; "Ġ" is the byte-level sign of a space, so "Ġ" + "ab" can cross a prompt's end
MERGES = (("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ġ", "ab"), ("t", "h"), ("th", "e"), ("Ġ", "the"), (":", "Ġ"))
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(bos: bool = False, chat: bool = False, pad: bool = True, adds_eos: bool = False, side: str = "right"):
    """A byte-level BPE tokenizer whose encoding depends on what stands next to a letter.

    Args:
        bos: it has "<s>" and puts it before each text (Llama's way); without: there is no BOS (Qwen's way).
        chat: it has a chat template, with the BOS in it when there is one; answers then end with "<|end|>".
        pad: it has a pad token.
        adds_eos: it also puts an EOS behind each text (a trap for prompts).
        side: its padding side.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    eos = "<|end|>" if chat else "</s>"
    single = f"{'<s> ' if bos else ''}$A{' ' + eos if adds_eos else ''}"
    if single != "$A":
        named = [(token, vocabulary[token]) for token in ("<s>", eos)]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    special = {"eos_token": eos, "additional_special_tokens": list(SPECIAL[3:])}
    special |= {"bos_token": "<s>"} if bos else {}
    special |= {"pad_token": "<pad>"} if pad else {}
    made = PreTrainedTokenizerFast(tokenizer_object=core, padding_side=side, **special)
    if chat:
        made.chat_template = ("{{ bos_token }}" if bos else "") + CHAT
    return made


VOCABULARY = len(SPECIAL) + 256 + len(MERGES)


def model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A random decoder with two layers and peaked next-token distributions; kind: "llama", "qwen2" or "gpt2".

    `changes` go to the configuration (vocab_size, max_position_embeddings, attention_dropout, ...). The global random
    state is left as it was.
    """
    import transformers

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    made = getattr(transformers, {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel"}[kind])(
        configuration(kind, **changes)
    )
    torch.set_rng_state(state)
    return made.to(dtype).eval()


def configuration(kind: str = "llama", **changes):
    """The configuration that `model` uses."""
    import transformers

    settings = {"vocab_size": VOCABULARY, "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    if kind == "gpt2":
        settings |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
        return transformers.GPT2Config(**settings | changes)
    settings |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings |= {"num_key_value_heads": 1, "max_position_embeddings": 128}
    return {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind](**settings | changes)
