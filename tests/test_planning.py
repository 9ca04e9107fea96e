"""The planned numbers of tokens, by hand and against what a training step does."""

from collections import Counter

import pytest
import torch

from sysdpo_lab import planning, samplers, training
from sysdpo_lab.profiles import REGISTRY
from tests import training_cases


def test_tokens_of_a_step_by_hand():
    # k = 2: two drafts of 5 tokens; scored are 2 drafts and 2 x 2 finals, for policy and reference, in each of 3 pairs
    drafts, finals = 2 * (90 + 5), 4 * (90 + 5 + 5)
    assert planning.PROMPT_TOKENS == 90
    assert planning.tokens_per_step({"k": 2, "batch": 3, "max_new_tokens": 5}) == (3 * 2 * 5, 3 * 2 * (drafts + finals))


def test_a_step_scores_as_many_sequences_as_the_plan_counts(monkeypatch):
    system, batch, k = training_cases.letters_system(), training_cases.letters_finals().batch(range(3)), 2
    scored = Counter()
    for name in ("draft", "answer"):
        node = system[name]

        def counting(value, parents, name=name, log_prob=node.log_prob):
            scored[name] += len(value)
            return log_prob(value, parents)

        monkeypatch.setattr(node, "log_prob", counting)
    samplers.monte_carlo(system, batch.inputs, k, generator=torch.Generator().manual_seed(0))
    by_the_sampler = Counter(scored)
    scored.clear()
    training.sampling(0.1, samplers.monte_carlo, k)(system, batch, torch.Generator().manual_seed(0))
    assert scored - by_the_sampler == {"draft": 3 * 2 * k, "answer": 3 * 2 * 2 * k}  # policy and reference; both sides


def test_more_of_anything_costs_more():
    settings = dict(REGISTRY["two-llm", "tiny"].settings)
    base = planning.tokens_per_step(settings)
    for key in ("k", "batch", "max_new_tokens"):
        more = planning.tokens_per_step({**settings, key: 2 * settings[key]})
        assert more[0] == 2 * base[0] and base[1] < more[1] <= 2 * base[1], key


# --- language models at the paper's size ------------------------------------------------------------------------------


def on_meta(layers):
    """A Qwen2 of the planned sizes without numbers, an adapter of rank 16 on it."""
    import peft
    import transformers

    shape = planning.QWEN
    config = transformers.Qwen2Config(
        vocab_size=shape["vocabulary"], hidden_size=shape["width"], intermediate_size=shape["inner"],
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
        base = sum(p.numel() for p in model.parameters())
        return base, peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))


def kept_bytes(layers, rows, width):
    """Bytes that autograd keeps for the backward pass of `rows` texts of `width` tokens, weights not counted."""
    _, model = on_meta(layers)
    weights, kept = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that no later one gets its number
        return tensor

    ids = torch.zeros(rows, width, dtype=torch.long, device="meta")
    mask = torch.ones(rows, 1, width, width, dtype=torch.bool, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 under transformers 5.24
def test_planned_parameters_and_adapters_are_those_of_the_architecture():
    base, model = on_meta(24)
    assert base == planning.decoder_parameters()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == planning.lora_parameters(16)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_planned_activations_are_what_autograd_keeps_but_for_the_attention_matrix():
    # on "meta" attention keeps its matrix, whose size grows with the square of the width; a GPU's kernels do not
    short, long = (kept_bytes(2, 4, width) - kept_bytes(1, 4, width) for width in (256, 512))
    linear = 2 * short - long / 2  # short = a + b, long = 2a + 4b
    assert abs(linear / (4 * 256) / planning.KEPT - 1) < 0.01


def test_memory_of_a_step_by_hand():
    settings = {"k": 2, "batch": 1, "max_new_tokens": 256, "rank": 16, "accumulate": 8}
    found = planning.language_memory(settings, nodes=2)
    tokens = 2 * (250 + 256) + 4 * (250 + 512)
    assert abs(found["activations"] - tokens * planning.KEPT * 24 / 1e9) < 1e-9
    assert abs(found["logits"] - (2 + 4 + 6) * 256 * 151_936 * 4 / 1e9) < 1e-9
    assert abs(found["adapters"] - 16 * 2 * planning.lora_parameters(16) / 1e9) < 1e-9
    assert planning.language_memory({**settings, "checkpointing": True}, 2)["activations"] < found["activations"] / 10


@pytest.mark.parametrize("experiment", ["two-llm", "three-llm"])
def test_the_paper_profiles_fit_into_their_memory_and_time(experiment):
    profile, nodes = REGISTRY[experiment, "paper"], 2 + (experiment == "three-llm")
    assert sum(planning.language_memory(profile.settings, nodes).values()) < profile.memory_gb
    rows = len(profile.settings["rows"].split(",")) - 1
    hours = 3 * sum(planning.language_hours(profile.settings, rows, nodes).values())
    assert abs(60 * hours / profile.minutes - 1) < 0.05
    whole = {**profile.settings, "batch": 16, "accumulate": 1, "checkpointing": False}
    assert sum(planning.language_memory(whole, nodes).values()) > 141  # more than any GPU of today has


def test_micro_batches_cost_drafting_time_and_a_step_scores_the_same():
    settings = dict(REGISTRY["two-llm", "paper"].settings)
    halves = {**settings, "batch": settings["batch"] // 2, "accumulate": 2 * settings["accumulate"]}
    assert planning.tokens_per_step(halves) == planning.tokens_per_step(settings)
    one, other = (planning.language_hours(s, 4, 2) for s in (settings, halves))
    assert abs(other["drafting"] / one["drafting"] - 2) < 1e-9 and other["scoring"] == one["scoring"]
