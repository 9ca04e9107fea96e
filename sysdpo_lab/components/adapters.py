"""Several components as peft adapters on one shared base model.

peft's own `set_adapter` and `disable_adapter` change `requires_grad` flags: the adapter that is switched off silently
stops training, and a frozen one starts. Here switching writes the active adapter's name into peft's layers and nothing
else, for the length of a block.
"""

import copy
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import nn

from sysdpo_lab import errors

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

AdapterSource = Union["LoraConfig", int, str, Path]
WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
REFERENCE = "__reference"
_SHARED = "_sysdpo_peft_model"
HALF = (torch.float16, torch.bfloat16)


# --- switching ------------------------------------------------------------------------------------------------------------


def adapter_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that peft put in: those with adapter weights, and wrappers of modules that are trained as a whole."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [m for m in module.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


@dataclass(frozen=True)
class AdapterState:
    """Which adapter each layer uses, so that it can be put back."""

    entries: tuple[tuple[nn.Module, Any, bool], ...]

    @classmethod
    def of(cls, module: nn.Module) -> "AdapterState":
        """The present state of all adapter layers inside `module`."""
        return cls(tuple((layer, layer._active_adapter, layer._disable_adapters) for layer in adapter_layers(module)))

    def write(self) -> None:
        for layer, active, disabled in self.entries:
            layer._active_adapter, layer._disable_adapters = active, disabled

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside the block the layers are as recorded; afterwards as they were before the block."""
        before = AdapterState(tuple((layer, layer._active_adapter, layer._disable_adapters) for layer, _, _ in self.entries))
        self.write()
        try:
            yield
        finally:
            before.write()


@contextmanager
def activated(model: nn.Module, name: str | None) -> Iterator[None]:
    """Inside the block `name` is the model's only active adapter (None: the bare base); restored also on error.

    No `requires_grad` flag is touched, so nothing starts or stops training.
    """
    layers = adapter_layers(model)
    merged = {adapter for layer in layers for adapter in getattr(layer, "merged_adapters", ())}
    if merged:
        raise errors.AdapterError(f"the adapters {sorted(merged)} are merged into the base; call unmerge_adapter() first")
    # a layer without an adapter of this name passes its input to the base layer
    chosen = AdapterState(tuple((layer, [name] if name else layer._active_adapter, name is None) for layer in layers))
    with chosen.restored():
        yield


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter, by their place in the model."""
    found: dict[str, nn.Parameter] = {}
    places = {id(parameter): place for place, parameter in model.named_parameters(remove_duplicate=False)}
    for layer in adapter_layers(model):
        for attribute in layer.adapter_layer_names:
            held = attrgetter(attribute)(layer)
            if name not in held:
                continue
            part = held[name]
            for parameter in part.parameters() if isinstance(part, nn.Module) else [part]:
                if isinstance(parameter, nn.Parameter):
                    found[places[id(parameter)]] = parameter
    return found


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the base, by the names that they have without adapters."""
    names = {name for layer in adapter_layers(model) for name in names_in(layer)}
    adapted = {id(p) for name in names for p in adapter_parameters(model, name).values()}
    return {
        plain_name(place): parameter
        for place, parameter in model.named_parameters()
        if id(parameter) not in adapted
    }


def plain_name(place: str) -> str:
    """A parameter's name before peft wrapped its layer.

    >>> plain_name("model.layers.0.q_proj.base_layer.weight")
    'model.layers.0.q_proj.weight'
    """
    return re.sub(r"\.(base_layer|original_module)(?=\.)", "", place)


def names_in(layer: nn.Module) -> set[str]:
    """The adapters that have weights in this layer."""
    return {name for attribute in layer.adapter_layer_names for name in attrgetter(attribute)(layer)}


# --- attaching ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attached:
    """An adapter on a shared base.

    Attributes:
        model: the PeftModel that all components of this base share.
        name: the adapter's name in it.
        neutral: at the start it adds exactly nothing, so the reference is the base with adapters off.
    """

    model: "PeftModel"
    name: str
    neutral: bool


def shared_peft_model(model: nn.Module) -> Union["PeftModel", None]:
    """The PeftModel around `model`: itself, or the one that an earlier component made of the same base."""
    from peft import PeftModel

    return model if isinstance(model, PeftModel) else model.__dict__.get(_SHARED)


def attach(model: nn.Module, adapter: AdapterSource, component: str, generator: torch.Generator | None = None) -> Attached:
    """Put a new adapter on `model` (or on the PeftModel that is around it already) and make it trainable.

    Args:
        model: a plain transformers model, or a PeftModel.
        adapter: a peft config; an int rank (LoRA with alpha = 2 x rank on all linear layers); a folder with a saved
            adapter to start from.
        component: gives the adapter its name.
        generator: for the random start; None takes a seed from the name.

    Raises:
        AdapterError: the adapter cannot share a base, or cannot be read.
    """
    config, folder = _config(model, adapter, component)
    _check_config(config, model, component)
    config.base_model_name_or_path = None  # else peft warns when a saved adapter's base has another name here
    peft_model = shared_peft_model(model)
    name = _free_name(component, peft_model)
    flags = {} if peft_model is None else {p: p.requires_grad for p in peft_model.parameters()}
    with _seeded(component, generator), _named_errors(component):
        peft_model = _add(model, peft_model, name, config)
    for parameter, flag in flags.items():
        parameter.requires_grad_(flag)
    if folder is not None:
        load_weights(peft_model, name, folder, component)
    for parameter in adapter_parameters(peft_model, name).values():
        parameter.requires_grad_(True)
    return Attached(peft_model, name, folder is None and is_neutral(peft_model, name))


def existing(model: nn.Module, adapter: AdapterSource | None) -> str | None:
    """The adapter on the model that is meant: the one of that name; with None a peft model's only active one."""
    from peft import PeftModel

    if isinstance(adapter, str):
        return adapter if adapter in getattr(model, "peft_config", ()) else None
    active = model.active_adapters if adapter is None and isinstance(model, PeftModel) else ()
    return active[0] if len(active) == 1 else None


def adopt(model: nn.Module, component: str, name: str | None = None) -> Attached:
    """One adapter of a peft model that was made elsewhere (None: its only active one), as a component's own."""
    chosen = existing(model, name)
    model = shared_peft_model(model)
    if chosen is None or model is None:
        raise errors.AdapterError(
            f"component {component!r}: other components have adapters on this model, so it cannot be trained as a whole; give "
            "this component an adapter too (adapter=8), or load the model a second time"
        )
    _check_config(model.peft_config[chosen], model.get_base_model(), component)
    model.get_base_model().__dict__[_SHARED] = model
    if name:  # peft turns gradients on for the active adapter only
        for parameter in adapter_parameters(model, name).values():
            parameter.requires_grad_(True)
    return Attached(model, chosen, is_neutral(model, chosen))


def _add(model: nn.Module, peft_model, name: str, config):
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft asks transformers whether checkpointing is on by a name that transformers has deprecated
        warnings.filterwarnings("ignore", category=FutureWarning)
        if peft_model is not None:
            peft_model.add_adapter(name, config)
            return peft_model
        peft_model = get_peft_model(model, config, adapter_name=name)
    model.__dict__[_SHARED] = peft_model  # not as a submodule; lives and dies with the base
    return peft_model


def _config(model: nn.Module, adapter: AdapterSource, component: str):
    """(peft config, folder of the weights or None)."""
    from peft import LoraConfig, PeftConfig

    if isinstance(adapter, PeftConfig):
        return copy.deepcopy(adapter), None
    if isinstance(adapter, int) and not isinstance(adapter, bool) and adapter > 0:
        conv = any(type(module).__name__ == "Conv1D" for module in model.modules())
        return LoraConfig(
            r=adapter, lora_alpha=2 * adapter, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=conv
        ), None
    if isinstance(adapter, (str, Path)):
        folder = _adapter_folder(adapter, component)
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = False
        return config, folder
    raise errors.AdapterError(
        f"component {component!r}: adapter must be a peft config, a rank > 0, or the folder of a saved adapter; found {adapter!r}"
    )


def _adapter_folder(adapter: str | Path, component: str) -> Path:
    folder = Path(adapter).expanduser()
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise errors.AdapterError(
                f"component {component!r}: {folder / file} does not exist; a saved adapter is a folder with {CONFIG} "
                f"and {WEIGHTS}"
            )
    return folder


def _check_config(config, model: nn.Module, component: str) -> None:
    """Refuse what would change the shared base, or cannot be switched off."""
    start = getattr(config, "init_lora_weights", True)
    half = any(p.dtype in HALF for p in model.parameters())
    faults = {
        "inserts virtual tokens (prompt learning); use LoRA": config.is_prompt_learning or config.is_adaption_prompt,
        "trains biases of the shared base; set bias='none'": getattr(config, "bias", "none") != "none",
        f"changes the base's weights at the start (init_lora_weights={start!r}); use True, False, 'gaussian' or 'orthogonal'":
            start not in (True, False, "gaussian", "orthogonal"),
        "works only on a part of the sequence (alora_invocation_tokens)": getattr(config, "alora_invocation_tokens", None),
        "has modules_to_save, which would be trained in half precision; load the base in float32":
            half and getattr(config, "modules_to_save", None),
        "has target_parameters, which can hold one adapter only; use target_modules":
            getattr(config, "target_parameters", None),
    }
    for fault, found in faults.items():
        if found:
            raise errors.AdapterError(f"component {component!r}: the adapter {fault}")


def _free_name(component: str, peft_model) -> str:
    """The component's name as a name that a torch ModuleDict and peft accept, and that is not taken."""
    name = re.sub(r"\W", "_", component)
    if hasattr(nn.ModuleDict(), name) or hasattr(nn.ParameterDict(), name) or name in "lora_ia3_" or name.endswith(REFERENCE):
        name = f"{name}_adapter"
    taken = () if peft_model is None else peft_model.peft_config
    number, free = 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


@contextmanager
def _seeded(component: str, generator: torch.Generator | None) -> Iterator[None]:
    """peft draws from the global generator; inside the block that has its own seed."""
    if generator is None:
        seed = zlib.crc32(component.encode())
    else:
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def _named_errors(component: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise errors.AdapterError(f"component {component!r}: peft cannot make this adapter: {error}") from error


def is_neutral(peft_model: nn.Module, name: str) -> bool:
    """Whether the adapter adds exactly nothing: in each layer one LoRA factor is 0, each saved module equals its original."""
    return all(_adds_nothing(layer, name) for layer in adapter_layers(peft_model) if name in names_in(layer))


def _adds_nothing(layer: nn.Module, name: str) -> bool:
    original = getattr(layer, "original_module", None)
    if original is not None:
        pairs = zip(original.parameters(), layer.modules_to_save[name].parameters())
        return all(torch.equal(old, new) for old, new in pairs)
    for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        if name in getattr(layer, first, ()):
            factors = [getattr(layer, attribute)[name] for attribute in (first, second)]
            return any(not bool(getattr(factor, "weight", factor).any()) for factor in factors)
    return False  # not LoRA: a frozen copy is always right


def frozen_copy(attached: Attached, component: str) -> str:
    """A second adapter with the same weights that is never trained; returns its name."""
    peft_model, name = attached.model, attached.name
    copy_name, number = name + REFERENCE, 2
    while copy_name in peft_model.peft_config:  # that of an earlier component with the same adapter
        copy_name, number = f"{name}_{number}{REFERENCE}", number + 1
    config = copy.deepcopy(peft_model.peft_config[name])
    flags = {p: p.requires_grad for p in peft_model.parameters()}
    with _seeded(component, None), _named_errors(component):
        _add(peft_model.get_base_model(), peft_model, copy_name, config)
    for parameter, flag in flags.items():
        parameter.requires_grad_(flag)
    pairs = zip(adapter_parameters(peft_model, name).values(), adapter_parameters(peft_model, copy_name).values())
    for source, target in pairs:
        target.requires_grad_(False)
        with torch.no_grad():
            target.copy_(source)
    return copy_name


# --- files ----------------------------------------------------------------------------------------------------------------


def load_weights(peft_model, name: str, folder: Path, component: str) -> None:
    """Fill adapter `name` from a saved one with the same layers.

    Raises:
        AdapterError: the file does not fit the adapter; the message names a tensor.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    _adapter_folder(folder, component)
    tensors = load_file(folder / WEIGHTS)
    with _named_errors(component):
        result = set_peft_model_state_dict(peft_model, tensors, adapter_name=name)
    own = set(adapter_parameters(peft_model, name))
    missing = [key for key in result.missing_keys if key in own]
    if missing or result.unexpected_keys:
        raise errors.AdapterError(
            f"component {component!r}: {folder / WEIGHTS} does not fit this model: "
            f"missing {missing[:3]}, unexpected {result.unexpected_keys[:3]}"
        )


def save_weights(network: nn.Module, name: str, folder: Path, base_source: str) -> None:
    """Write one adapter in peft's format; `PeftModel.from_pretrained(base, folder)` reads it.

    Args:
        network: the transformers model that holds the adapter's layers.
        base_source: what the adapter's config says about its base.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        state = get_peft_model_state_dict(network, adapter_name=name, save_embedding_layers=False)
    tensors = {f"{PREFIX}{key.removeprefix(PREFIX)}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
               for key, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(network.peft_config[name])
    config.inference_mode, config.base_model_name_or_path = True, base_source
    config.save_pretrained(str(folder))
