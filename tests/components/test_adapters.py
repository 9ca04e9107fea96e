"""Several peft adapters on one base: switching, names, starts and files."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from sysdpo_lab import errors
from sysdpo_lab.components import adapters
from tests import tiny

IDS = torch.tensor([[5, 9, 17, 4, 40]])
DEPRECATED = "ignore:.*is_gradient_checkpointing:FutureWarning"  # peft 0.21 asks transformers 5.24 by its old name
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**changes):
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | changes)


def logits(model, name="off"):
    """Logits with whatever is active, or (name given) with that adapter."""
    with torch.no_grad():
        if name == "off":
            return model(IDS).logits
        with adapters.activated(model, name):
            return model(IDS).logits


def disturbed(attached, seed):
    """Weights as after some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.adapter_parameters(attached.model, attached.name).values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return attached


def pair(base, first=None, second=None):
    return (disturbed(adapters.attach(base, first or lora(), "draft"), 1),
            disturbed(adapters.attach(base, second or lora(), "refine"), 2))


# --- switching ------------------------------------------------------------------------------------------------------------


def test_components_with_the_same_base_share_one_peft_model():
    base = tiny.model()
    first, second = pair(base)
    assert first.model is second.model
    assert first.model.get_base_model() is base
    assert sorted(first.model.peft_config) == ["draft", "refine"]


def test_switching_touches_no_requires_grad_flag():
    base = tiny.model()
    first, second = pair(base)
    for parameter in adapters.adapter_parameters(base, "refine").values():
        parameter.requires_grad_(False)  # as system.freeze does
    flags = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    for name in ("draft", "refine", None, "draft"):
        with adapters.activated(base, name):
            assert {n: p.requires_grad for n, p in base.named_parameters()} == flags
    assert {n: p.requires_grad for n, p in base.named_parameters()} == flags
    first.model.set_adapter("refine")  # the fault that is avoided: peft's own switch
    assert {n: p.requires_grad for n, p in base.named_parameters()} != flags


@pytest.mark.parity
@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}])
def test_switching_equals_pefts_own(extra):
    base = tiny.model()
    plain = logits(base)
    first, second = pair(base, lora(**extra), lora(**extra))
    ours = {name: logits(base, name) for name in ("draft", "refine", None)}
    model = first.model
    for name in ("draft", "refine"):
        model.set_adapter(name)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, ours[name])
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(IDS).logits, ours[None])
    assert torch.equal(ours[None], plain)  # also with a trained copy of the head
    assert not torch.equal(ours["draft"], ours["refine"])


def test_switching_there_and_back_is_bit_equal_also_when_only_one_adapter_saves_the_head():
    base = tiny.model()
    pair(base, lora(modules_to_save=["lm_head"]), lora(target_modules=["o_proj"]))
    before = {name: logits(base, name) for name in ("draft", "refine", None)}
    for name in ("refine", "draft", None, "refine", None, "draft"):
        assert torch.equal(logits(base, name), before[name])


def test_state_comes_back_after_nesting_and_after_an_error():
    base = tiny.model()
    pair(base)
    start = logits(base)
    with pytest.raises(ZeroDivisionError):
        with adapters.activated(base, "refine"):
            inner = logits(base)
            with adapters.activated(base, None):
                assert not torch.equal(logits(base), inner)
            assert torch.equal(logits(base), inner)
            raise ZeroDivisionError
    assert torch.equal(logits(base), start)


def test_a_merged_adapter_is_refused():
    base = tiny.model()
    first, _ = pair(base)
    first.model.merge_adapter(["draft"])
    with pytest.raises(errors.AdapterError, match="merged"), adapters.activated(base, "refine"):
        pass


# --- attaching ------------------------------------------------------------------------------------------------------------


def test_only_adapters_train_and_a_new_one_leaves_the_flags_of_the_others():
    base = tiny.model()
    first = adapters.attach(base, 2, "draft")
    for parameter in adapters.adapter_parameters(base, "draft").values():
        parameter.requires_grad_(False)
    adapters.attach(base, 2, "refine")
    trained = {name for name, parameter in base.named_parameters() if parameter.requires_grad}
    assert trained == set(adapters.adapter_parameters(base, "refine"))
    assert not any("draft" in name for name in trained)
    assert first.neutral


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_rank_adapts_every_linear_layer_but_the_head(kind):
    base = tiny.model(kind)
    attached = adapters.attach(base, 3, "y")
    config = attached.model.peft_config[attached.name]
    assert (config.r, config.lora_alpha) == (3, 6)
    layers = [m for m in base.modules() if type(m).__name__ in ("Linear", "Conv1D") and hasattr(m, "lora_A")]
    assert len(layers) == (8 if kind == "gpt2" else 14)


def test_the_start_comes_from_the_generator_and_global_randomness_is_untouched():
    before = torch.get_rng_state()

    def start(**options):
        base = tiny.model()
        adapters.attach(base, 2, "y", **options)
        return list(adapters.adapter_parameters(base, "y").values())

    first, again = start(), start()
    other = start(generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["a", "lora", "my.draft", "keys", "type", "weight", "model", "q_proj", "y__reference", "é 1"])
def test_any_component_name_works(name):
    base = tiny.model()
    plain = logits(base)
    attached = adapters.attach(base, lora(), name)
    assert len(adapters.adapter_parameters(base, attached.name)) == 12
    disturbed(attached, 0)
    assert not torch.equal(logits(base, attached.name), plain)
    assert torch.equal(logits(base, None), plain)


def test_a_taken_name_gets_a_number_and_its_own_weights():
    base = tiny.model()
    first, second = adapters.attach(base, 2, "y"), adapters.attach(base, 2, "y")
    assert (first.name, second.name) == ("y", "y_2")
    own, others = (set(map(id, adapters.adapter_parameters(base, n).values())) for n in ("y", "y_2"))
    assert own and not own & others


def test_adapters_are_float32_on_a_bfloat16_base_and_one_small_step_changes_each():
    base = tiny.model(dtype=torch.bfloat16)
    attached = adapters.attach(base, 2, "y")
    parameters = adapters.adapter_parameters(base, attached.name)
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    disturbed(attached, 0)
    optimiser = torch.optim.AdamW(parameters.values(), lr=1e-5, weight_decay=0.0)
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    with adapters.activated(base, attached.name):
        base(IDS).logits.float().logsumexp(-1).sum().backward()
    optimiser.step()
    for name, parameter in parameters.items():
        assert not torch.equal(parameter, before[name]), name
        assert "lora_A" in name or parameter.ne(before[name]).float().mean() > 0.9
    rounded = {name: value.bfloat16() for name, value in before.items()}
    assert any(torch.equal(parameters[name].bfloat16(), rounded[name]) for name in parameters)  # bf16 would lose the step


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (lora(bias="all"), "bias"),
        (lora(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (lora(target_modules=["nowhere"]), "nowhere"),
        (lora(target_parameters=["mlp.down_proj.weight"]), "target_parameters"),
        (0, "rank > 0"),
        (True, "rank > 0"),
        ("/no/such/folder", "adapter_config.json"),
    ],
)
def test_an_adapter_that_cannot_share_a_base_is_refused_by_name(config, match):
    with pytest.raises(errors.AdapterError, match=match) as caught:
        adapters.attach(tiny.model(), config, "draft")
    assert "'draft'" in str(caught.value)


def test_a_prompt_learning_adapter_and_a_half_precision_head_are_refused():
    from peft import PromptTuningConfig

    with pytest.raises(errors.AdapterError, match="virtual tokens"):
        adapters.attach(tiny.model(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "y")
    with pytest.raises(errors.AdapterError, match="half precision"):
        adapters.attach(tiny.model(dtype=torch.bfloat16), lora(modules_to_save=["lm_head"]), "y")


# --- the frozen start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [(lora(), True), (lora(modules_to_save=["lm_head"]), True), (lora(init_lora_weights=False), False),
     (lora(target_modules=["q_proj", "embed_tokens"]), True)],
)
def test_neutral_says_whether_the_start_is_the_base(config, expected):
    base = tiny.model()
    plain = logits(base)
    attached = adapters.attach(base, config, "y")
    assert attached.neutral is expected
    assert torch.equal(logits(base, "y"), plain) is expected


def test_a_frozen_copy_is_the_same_function_and_stays():
    base = tiny.model()
    attached = disturbed(adapters.attach(base, lora(init_lora_weights=False), "y"), 3)
    name = adapters.frozen_copy(attached, "y")
    start = logits(base, "y")
    assert torch.equal(logits(base, name), start)
    assert not any(parameter.requires_grad for parameter in adapters.adapter_parameters(base, name).values())
    assert all(parameter.requires_grad for parameter in adapters.adapter_parameters(base, "y").values())
    disturbed(attached, 4)
    assert torch.equal(logits(base, name), start)
    assert not torch.equal(logits(base, "y"), start)


# --- files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(DEPRECATED, "ignore:.*base_model_name_or_path:UserWarning")
@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["lm_head"]}])
def test_a_saved_adapter_loads_with_plain_peft_and_holds_nothing_of_its_neighbours(tmp_path, extra):
    base = tiny.model()
    plain = copy.deepcopy(base)
    for number, name in enumerate(("draft", "draft_2", "raft")):
        attached = disturbed(adapters.attach(base, lora(**extra), name), number)
        adapters.frozen_copy(attached, name)
    adapters.save_weights(base, "draft", tmp_path / "draft", "some/base")
    tensors = load_file(tmp_path / "draft" / adapters.WEIGHTS)
    assert len(tensors) == 12 + len(extra)
    loaded = PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path / "draft"))
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    assert torch.equal(logits(loaded), logits(base, "draft"))
    again = adapters.attach(plain, tmp_path / "draft", "other")
    assert torch.equal(logits(plain, "other"), logits(base, "draft"))
    assert not again.neutral
    assert all(parameter.requires_grad for parameter in adapters.adapter_parameters(plain, "other").values())


def test_an_adapter_of_another_model_is_refused(tmp_path):
    attached = adapters.attach(tiny.model(), 2, "y")
    adapters.save_weights(attached.model.get_base_model(), "y", tmp_path, "")
    with pytest.raises(errors.AdapterError, match="'z'"):
        adapters.attach(tiny.model(hidden_size=8), tmp_path, "z")


@pytest.mark.filterwarnings(DEPRECATED)
def test_a_peft_model_made_elsewhere_is_adopted():
    base = tiny.model()
    made = get_peft_model(base, lora())
    attached = adapters.adopt(made, "y")
    assert attached.name == "default" and attached.neutral
    assert adapters.attach(base, 2, "z").model is made
    with pytest.raises(errors.AdapterError, match="adapter=8"):
        adapters.adopt(base, "whole")
