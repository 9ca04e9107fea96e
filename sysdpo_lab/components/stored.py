"""Networks, encoders and schedulers in folders: safetensors and JSON only, or the name of where they came from."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sysdpo_lab import atomic, errors, loading
from sysdpo_lab.components import adapters
from sysdpo_lab.components.conditioning import TextEncoder

OWN, WEIGHTS, LORA_FILE = "module.json", "model.safetensors", "pytorch_lora_weights.safetensors"


# --- modules ----------------------------------------------------------------------------------------------------------


def place(module: nn.Module, kind: str) -> dict:
    """Where a module that is not trained lies: its source when `loading` found it and it is unchanged, else a folder."""
    origin, mark = loading.origin_of(module), loading.fingerprint(module)
    if origin is None:
        return {"folder": f"../{kind}_{mark}"}
    return {
        "source": str(Path(origin.source).resolve()) if Path(origin.source).is_dir() else origin.source,
        "revision": origin.revision, "part": origin.part, "dtype": _dtype(module), "fingerprint": mark,
    }  # fmt: skip


def _dtype(module: nn.Module) -> str:
    found = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return str(found).removeprefix("torch.")


def save_at(module: nn.Module, where: dict, folder: Path) -> None:
    """Write the module, without adapters, to a folder beside `folder`, unless it is there or has a source."""
    if "folder" not in where or (folder / where["folder"]).is_dir():
        return
    target = folder / where["folder"]
    target.mkdir(parents=True)
    if _is_diffusers(module):
        _unadapted(module).save_pretrained(str(target), safe_serialization=True)
    elif hasattr(module, "save_pretrained"):
        with loading.quiet():
            module.save_pretrained(str(target), safe_serialization=True)
    else:
        _save_own(module, target)


def _is_diffusers(module: nn.Module) -> bool:
    from diffusers import ModelMixin

    return isinstance(module, ModelMixin)


def _unadapted(module: nn.Module) -> nn.Module:
    """A network with the same weights and the names that they had before peft wrapped its layers."""
    with torch.device("meta"):
        fresh = type(module).from_config(module.config)
    fresh.load_state_dict(loading.plain_state(module), strict=True, assign=True)
    return fresh


def _save_own(module: nn.Module, target: Path) -> None:
    from safetensors.torch import save_model

    from sysdpo_lab import saving

    path = saving.function_path(type(module))
    arguments = module.config() if callable(getattr(module, "config", None)) else {}
    needed = [p.name for p in inspect.signature(type(module)).parameters.values() if _is_needed(p)]
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise errors.SaveFormatError(
            f"{path} cannot be built again without {missing[0]!r}; give the class a method config() that returns its arguments"
        )
    save_model(module, str(target / WEIGHTS))
    atomic.write_json(target / OWN, {"class": path, "arguments": arguments})


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def load_at(where: dict, folder: Path, shared: dict, name: str) -> nn.Module:
    """Read what `save_at` wrote or named; a module that several components use is loaded once.

    Raises:
        SaveFormatError: the folder is missing, or the source holds other weights.  MissingModelError.
    """
    if "source" in where:
        key = (where["source"], where["revision"], where["part"], where["dtype"])
        if key not in shared:
            shared[key] = loading.load_part(
                where["source"], where["part"], dtype=where["dtype"], revision=where["revision"]
            )
        if loading.fingerprint(shared[key]) != where["fingerprint"]:
            raise errors.SaveFormatError(
                f"component {name!r}: {where['source']!r} ({where['part']}) no longer holds the weights that this system had"
            )
        return shared[key]
    path = (folder / where["folder"]).resolve()
    if not path.is_dir():
        raise errors.SaveFormatError(f"{path}: this folder of component {name!r} is missing")
    if str(path) not in shared:
        shared[str(path)] = _read(path)
    return shared[str(path)]


def _read(path: Path) -> nn.Module:
    if (path / OWN).is_file():
        return _read_own(path)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        name = config["_class_name"] if "_class_name" in config else config["architectures"][0]
    except (OSError, ValueError, KeyError) as error:
        raise errors.SaveFormatError(f"{path / 'config.json'}: this is no saved network: {error!r}") from None
    return loading.read_part(
        path, "diffusers" if "_class_name" in config else "transformers", name, _stored_dtype(path)
    )


def _stored_dtype(path: Path) -> torch.dtype:
    """The dtype of the files, whatever their configuration says."""
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            for key in tensors.keys():
                tensor = tensors.get_tensor(key)
                if tensor.is_floating_point():
                    return tensor.dtype
    return torch.float32


def _read_own(path: Path) -> nn.Module:
    from safetensors.torch import load_file, load_model

    from sysdpo_lab import saving

    content = json.loads((path / OWN).read_text(encoding="utf-8"))
    with torch.random.fork_rng(devices=[]):  # its random start, which is overwritten, must not move the global stream
        module = saving.function_at(content["class"])(**content["arguments"])
    dtypes = {tensor.dtype for tensor in load_file(str(path / WEIGHTS)).values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        module.to(dtypes.pop())
    load_model(module, str(path / WEIGHTS))
    return module.eval()


# --- encoders ---------------------------------------------------------------------------------------------------------


def encoder_place(encoder: Any) -> dict | None:
    """What `load_encoder` needs beside the folders."""
    from sysdpo_lab import saving

    if encoder is None:
        return None
    if isinstance(encoder, TextEncoder):
        options = {"max_length": encoder.max_length, "use_mask": encoder.use_mask}
        return {"kind": "text", "model": place(encoder.model, "text_encoder"), **options}
    if isinstance(encoder, nn.Module):
        return {"kind": "module", "model": place(encoder, "encoder")}
    return {"kind": "function", "path": saving.function_path(encoder)}


def save_encoder(encoder: Any, where: dict | None, folder: Path) -> None:
    """Write the encoder's model and tokenizer; a function only has its name."""
    if where is None or where["kind"] == "function":
        return
    save_at(encoder.model if where["kind"] == "text" else encoder, where["model"], folder)
    if where["kind"] == "text":
        encoder.tokenizer.save_pretrained(str(folder / "tokenizer"))


def load_encoder(where: dict | None, folder: Path, shared: dict, name: str) -> Any:
    """The inverse of `save_encoder`."""
    from sysdpo_lab import saving

    if where is None:
        return None
    if where["kind"] == "function":
        return saving.function_at(where["path"])
    model = load_at(where["model"], folder, shared, name)
    if where["kind"] == "module":
        return model
    return TextEncoder(model, loading.read_tokenizer(folder / "tokenizer"), where["max_length"], where["use_mask"])


# --- schedulers and adapters ------------------------------------------------------------------------------------------


def load_scheduler(folder: Path) -> Any:
    """A diffusers scheduler from its configuration.

    Raises:
        SaveFormatError: no configuration, or of a class that diffusers does not have.
    """
    import diffusers

    path = folder / "scheduler_config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = getattr(diffusers, content["_class_name"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise errors.SaveFormatError(f"{path}: this is no scheduler of diffusers: {error!r}") from None
    return kind.from_config(content)


def save_for_diffusers(network: nn.Module, name: str, folder: Path) -> None:
    """One LoRA adapter once more, as `pipeline.load_lora_weights(folder)` reads it; other kinds of adapter are left out."""
    from peft import LoraConfig, get_peft_model_state_dict
    from safetensors.torch import save_file

    config = copy.deepcopy(network.peft_config[name])
    if not isinstance(config, LoraConfig) or config.modules_to_save:
        return
    state = get_peft_model_state_dict(network, adapter_name=name)
    tensors = {
        f"unet.{key.removeprefix(adapters.PREFIX)}": tensor.detach().cpu().contiguous() for key, tensor in state.items()
    }
    settings = {f"unet.{key}": sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(settings, sort_keys=True, default=str)}
    save_file(tensors, folder / LORA_FILE, metadata=metadata)


def start_adapter(config: dict, folder: Path) -> Any:
    """What a component is built with: the start adapter's folder, a fresh adapter like the saved one, or None."""
    if not config["adapter"]:
        return None
    if config["start"] == "adapter":
        return folder / "reference"
    from peft import PeftConfig

    fresh = PeftConfig.from_pretrained(str(folder))
    fresh.inference_mode = False
    return fresh
