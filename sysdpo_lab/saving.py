"""One folder for a whole system: the graph, tables, adapters in peft's own format, a card and the versions."""

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sysdpo_lab import atomic, errors

if TYPE_CHECKING:
    from sysdpo_lab.components.base import Component
    from sysdpo_lab.system import CompoundSystem

FORMAT = "sysdpo-lab-system/1"
KINDS = {
    "Categorical": "sysdpo_lab.components.categorical",
    "Tool": "sysdpo_lab.components.tool",
    "CausalLM": "sysdpo_lab.components.language",
    "Diffusion": "sysdpo_lab.components.diffusion",
}


def versions() -> dict[str, str]:
    """Installed versions of what a saved system or a result depends on.

    >>> "torch" in versions()
    True
    """
    import platform

    found = {"python": platform.python_version()}
    for package in ("sysdpo-lab", "torch", "transformers", "peft", "accelerate", "diffusers", "numpy"):
        try:
            found[package] = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def save_system(system: "CompoundSystem", folder: str | Path) -> Path:
    """Write `system` to `folder` (made or replaced as a whole: a killed save leaves the old folder).

    The folder holds system.json (the graph), one sub-folder a component, README.md (the card). Tables are safetensors;
    adapters are in peft's own format.

    Raises:
        SaveFormatError: a component cannot be written (a Tool whose function has no importable name, for example), or the
            folder holds something else than an earlier save.
    """
    folder = Path(folder)
    _check_replaceable(folder)
    with atomic.folder(folder) as work:
        nodes = []
        for component in system.components:
            kind = type(component).__name__
            if kind not in KINDS:
                raise errors.SaveFormatError(f"component {component.name!r}: {kind} cannot be saved; known are {sorted(KINDS)}")
            place = f"components/{len(nodes):02d}_{_safe(component.name)}"
            (work / place).mkdir(parents=True)
            component.save(work / place)
            nodes.append({"name": component.name, "kind": kind, "folder": place, "config": component.config()})
        spec = {
            "format": FORMAT,
            "inputs": list(system.inputs),
            "output": system.output,
            "components": nodes,
            "frozen": sorted(system._frozen),
            "versions": versions(),
        }
        atomic.write_json(work / "system.json", spec)
        atomic.write_text(work / "README.md", card(system))
    return folder


def _check_replaceable(folder: Path) -> None:
    """Only an earlier save, or an empty folder, may be replaced: whatever else lies there is somebody's work."""
    if folder.is_dir():
        if not any(folder.iterdir()) or _is_save(folder / "system.json"):
            return
        raise errors.SaveFormatError(f"{folder} holds other files, which saving would remove; name a new folder")
    if folder.exists():
        raise errors.SaveFormatError(f"{folder} is a file; name a new folder")


def _is_save(path: Path) -> bool:
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(spec, dict) and str(spec.get("format", "")).startswith("sysdpo-lab-system/")


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def card(system: "CompoundSystem") -> str:
    """A short description of a saved system, for people."""
    lines = [
        "# A compound system saved by sysdpo_lab",
        "",
        f"Inputs: {', '.join(system.inputs)}. Output: {system.output}.",
        "",
        "| component | class | parents | kind | trainable parameters |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in system.order:
        component = system[name]
        number = sum(p.numel() for p in component.trainable())
        parents = ", ".join(component.parents)
        lines.append(f"| {name} | {type(component).__name__} | {parents} | {component.kind} | {number} |")
    lines += ["", 'Load it with `CompoundSystem.load("this folder")`.', "", "Made with:", ""]
    lines += [f"- {package} {version}" for package, version in versions().items()]
    return "\n".join(lines) + "\n"


def load_system(folder: str | Path) -> "CompoundSystem":
    """Read a folder written by `save_system`; a base model shared by several components is loaded once.

    The modules that hold its Tools' functions are imported, so load only folders that you trust.

    Raises:
        SaveFormatError: a file is missing or of another format; the message names it.
    """
    folder = Path(folder)
    spec = _read_spec(folder)
    try:
        return _built(spec, folder)
    except errors.SaveFormatError:
        raise
    except (errors.GraphError, errors.TableError, KeyError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise errors.SaveFormatError(f"{folder / 'system.json'}: the system cannot be rebuilt: {kind}: {error}") from error


def _built(spec: dict[str, Any], folder: Path) -> "CompoundSystem":
    from sysdpo_lab.system import CompoundSystem

    shared: dict[Any, Any] = {}
    components: list[Component] = []
    for node in spec["components"]:
        if node["kind"] not in KINDS:
            raise errors.SaveFormatError(
                f"{folder / 'system.json'}: {node['name']!r} is a {node['kind']!r}; known are {sorted(KINDS)}"
            )
        kind = getattr(importlib.import_module(KINDS[node["kind"]]), node["kind"])
        place = folder / node["folder"]
        if not place.resolve().is_relative_to(folder.resolve()):
            raise errors.SaveFormatError(f"{folder / 'system.json'}: the folder of {node['name']!r} lies outside: {place}")
        if not place.is_dir():
            raise errors.SaveFormatError(f"{place}: the folder of component {node['name']!r} is missing")
        components.append(kind.from_config(node["config"], place, shared))
    system = CompoundSystem(components, inputs=spec["inputs"], output=spec["output"])
    done: set[str] = set()
    for name in spec.get("frozen", ()):
        if name not in done:
            done |= set(_freeze_quietly(system, name))
    return system


def _freeze_quietly(system: "CompoundSystem", name: str) -> list[str]:
    import warnings

    with warnings.catch_warnings():  # the ties were announced when they were frozen first
        warnings.simplefilter("ignore", errors.TiedFreezeWarning)
        return system.freeze(name)


def _read_spec(folder: Path) -> dict[str, Any]:
    path = folder / "system.json"
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.SaveFormatError(f"{path}: there is no such file; is {folder} the folder of a saved system?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise errors.SaveFormatError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(spec, dict) or spec.get("format") != FORMAT:
        raise errors.SaveFormatError(f"{path}: format is not {FORMAT!r}")
    return spec


# --- the pieces that tables and tools write ---------------------------------------------------------------------------


def save_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Tensors as safetensors."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Any]:
    """Tensors from safetensors, or a named error."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise errors.SaveFormatError(f"{path}: there is no such file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise errors.SaveFormatError(f"{path}: not a safetensors file: {error}") from None


def function_path(function: Any) -> str:
    """'module:qualname' of an importable function.

    Raises:
        SaveFormatError: a lambda or a local function, which another process cannot import.

    >>> function_path(function_path)
    'sysdpo_lab.saving:function_path'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    module = module or getattr(getattr(function, "__objclass__", None), "__module__", None)  # str.upper and its like
    path = f"{module}:{name}"
    # a bound method or a partial has a path too, but what lies there is another function
    if not module or not name or module == "__main__" or "<" in name or function_at(path) != function:
        raise errors.SaveFormatError(
            f"the function {name or repr(function)} of {module!r} cannot be imported elsewhere; "
            "define it at the top of a module"
        )
    return path


def function_at(path: str) -> Any:
    """The function that `function_path` named."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise errors.SaveFormatError(f"the function {path!r} cannot be imported: {error}") from None
    return found
