"""Language models small enough to list every sequence, and tiny random ones of many architectures."""

import warnings
from types import SimpleNamespace

import torch
from torch import nn


class TableLM(nn.Module):
    """p(next | last two tokens) from a table: no cache, no mask, no positions; the law of every sequence is known."""

    def __init__(self, vocabulary: int = 3, seed: int = 0, scale: float = 1.0):
        super().__init__()
        draw = torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed))
        self.table = nn.Parameter(scale * draw)

    def forward(self, input_ids):
        before = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1]
        return SimpleNamespace(logits=self.table[before, input_ids])

    def next_log_probs(self, ids: list[int]) -> list[float]:
        first, second = [0, *ids][-2:]
        return self.table.detach().double()[first, second].log_softmax(-1).tolist()


def sequences(model: TableLM, prompt: list[int], eos: set[int], longest: int) -> dict[tuple[int, ...], float]:
    """{tokens: log-probability} of all sequences that end at their first EOS or at `longest` tokens."""
    law, open_ones = {}, {(): 0.0}
    for step in range(longest):
        grown = {}
        for tokens, log_prob in open_ones.items():
            for token, term in enumerate(model.next_log_probs([*prompt, *tokens])):
                ended = token in eos or step + 1 == longest
                (law if ended else grown)[(*tokens, token)] = log_prob + term
        open_ones = grown
    return law


def first_tokens(ids: torch.Tensor, length) -> tuple[int, ...]:
    return tuple(ids.tolist()[: int(length)])


def forced_log_prob(model, prompt: list[int], continuation) -> float:
    """log p(continuation | prompt) from one plain forward, without padding or cache."""
    ids = torch.tensor([[*prompt, *continuation]])
    with torch.no_grad():
        log_p = model(input_ids=ids).logits[0].float().log_softmax(-1)
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return log_p[places, ids[0, len(prompt) :]].sum().item()


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 128, "head_dim": 8}
WINDOW = {"sliding_window": 4}
ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
HEADS = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
ARCHITECTURES = {
    "llama": SIZES,
    "qwen2": SIZES,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "mistral": SIZES | WINDOW,
    "gemma3_text": SIZES | ALTERNATING,
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 24, "conv_L_cache": 3},
    "qwen3_next": SIZES | HEADS | EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": SIZES | MAMBA | {"mamba_d_ssm": 32},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
}


def random_model(kind: str, vocabulary: int = 23, seed: int = 0, **changes):
    """A tiny random model of an architecture with peaked distributions; the global random state is left as it was."""
    import transformers

    settings = ARCHITECTURES[kind] | {"vocab_size": vocabulary, "tie_word_embeddings": False} | changes
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.7 if "embed" in name or "wte" in name else 0.35)
    return model


def adapted(model, dropout: float = 0.0):
    """The model in a peft wrapper with an active LoRA adapter that changes its output."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.24 for an old name
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(model, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.5)
    return wrapped


def prompts(vocabulary: int = 23, seed: int = 0):
    """Three prompts of 7, 5 and 2 tokens, padded on the left with a real token id: (ids, mask, lists)."""
    ids = torch.randint(0, vocabulary, (3, 7), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, :5] = 0
    return ids, mask, [row[keep.bool()].tolist() for row, keep in zip(ids, mask)]
