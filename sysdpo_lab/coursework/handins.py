"""Notebooks that were handed in: read them whatever state they are in, and find the answers in them."""

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sysdpo_lab import errors
from sysdpo_lab.coursework import exercises, slicing

LARGEST = 200 << 20  # bytes of a file that is still read
# an exercise needs none of these; an answer that searches Python's memory, or runs text as code, is looked at by a person
HELD_NAMES = {
    "__import__",
    "__builtins__",
    "__loader__",
    "__spec__",
    "breakpoint",
    "compile",
    "eval",
    "exec",
    "globals",
    "vars",
}
HELD_MODULES = {
    *(
        "atexit",
        "builtins",
        "code",
        "ctypes",
        "gc",
        "importlib",
        "inspect",
        "marshal",
        "multiprocessing",
        "pickle",
        "pkgutil",
    ),
    *("runpy", "signal", "socket", "subprocess", "threading", "traceback", "tracemalloc", "weakref"),
}
HELD_ATTRIBUTES = {
    *("__builtins__", "__closure__", "__code__", "__dict__", "__func__", "__globals__", "__self__", "__subclasses__"),
    *("__traceback__", "__wrapped__", "_current_frames", "_getframe", "exc_info", "f_back", "f_builtins", "f_globals"),
    *("f_locals", "gi_frame", "setprofile", "settrace", "tb_frame", "tb_next", "import_module", "set_trace"),
}


def read_handin(path: Path) -> Any:
    """The notebook in a file, in the current format.

    Raises:
        HandInError: missing, too large, or no notebook; says which.
    """
    if not path.is_file():
        raise errors.HandInError(f"{path.name}: there is no such file")
    if path.stat().st_size > LARGEST:
        raise errors.HandInError(
            f"{path.name} has {path.stat().st_size >> 20} MB: clear its outputs and hand it in again"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise errors.HandInError(f"{path.name} is no notebook: it is not JSON ({error})") from error
    try:
        return _notebook(value)
    except Exception as error:  # JSON that is no notebook can fail in any way
        raise errors.HandInError(f"{path.name} is JSON, but no notebook ({type(error).__name__}: {error})") from error


def _notebook(value: Any) -> Any:
    """Not by nbformat's reader: it warns about ids and metadata that do not matter here."""
    import nbformat

    if "worksheets" in value:
        value = nbformat.convert(nbformat.from_dict(value), 4)
    notebook = nbformat.from_dict({**value, "cells": list(value["cells"])})
    for cell in notebook.cells:
        cell.source = "".join(cell.source)
        cell.metadata = nbformat.from_dict(dict(cell.get("metadata", {})))
        cell.cell_type = str(cell.cell_type)
    return notebook


def answers(notebook: Any, lesson: Any, wanted: Sequence[exercises.Exercise]) -> dict[str, str]:
    """{exercise: the source of its answer}; an exercise without a cell is left out.

    A cell belongs to an exercise by its grade_id; where that is lost, by the functions that it defines. Of several copies
    the last one with something in it counts.

    Args:
        notebook: what was handed in.
        lesson: the lesson with its solutions.
        wanted: the lesson's exercises.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    known = {exercises.marks(cell).get("grade_id") for cell in lesson.cells} - {None}
    found = {}
    for exercise in wanted:
        named = [cell.source for cell in code if exercises.marks(cell).get("grade_id") == exercise.name]
        free = [cell.source for cell in code if exercises.marks(cell).get("grade_id") not in known]
        defining = [
            source for source in free if set(exercise.names) <= exercises.bound_names(slicing.plain_python(source))
        ]
        solution = lesson.cells[exercise.solution].source
        if exercise.names and (candidates := named or defining):
            filled = [source for source in candidates if not is_stub(source, solution)]
            found[exercise.name] = (filled or candidates)[-1]
    return found


def is_stub(answer: str, solution: str) -> bool:
    """Whether an answer is still what the student version has there, but for spaces, comments and docstrings."""
    try:
        return _bare(answer) == _bare(exercises.without_solution(solution))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _bare(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return ast.dump(tree)


def held_words(source: str) -> list[str]:
    """What in an answer a person should look at, as it stands there.

    >>> held_words("import sys\\ndef f(x):\\n    return sys._getframe(1).f_locals['right'](x)")
    ['_getframe', 'f_locals']
    >>> held_words("import torch\\ndef f(x):\\n    return torch.log(x)")
    []
    """
    try:
        tree = ast.parse(slicing.plain_python(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found |= {node.id} & HELD_NAMES
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & HELD_ATTRIBUTES
            # `model.modules()` is harmless
            found |= {"sys.modules"} if ast.unparse(node) == "sys.modules" else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in HELD_MODULES}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            found |= names & (HELD_ATTRIBUTES | HELD_NAMES | {"modules"})
            found |= {node.module} if (node.module or "").partition(".")[0] in HELD_MODULES else set()
    return sorted(found)


def labels(paths: Sequence[Path], taken: Mapping[str, str]) -> dict[Path, str]:
    """A name for each hand-in: the one it had before, else the file's with as many folders before it as make it unique.

    Args:
        paths: absolute.
        taken: {label: file} of what lies in the output folder already.

    >>> paths = [Path("/a/ann/00.ipynb"), Path("/a/bob/00.ipynb"), Path("/a/bob/01.ipynb")]
    >>> list(labels(paths, {"01": "/z/01.ipynb"}).values())
    ['ann__00', 'bob__00', 'bob__01']
    """
    before = {file: label for label, file in taken.items()}
    used = {label.casefold() for label in taken}  # some file systems take Ann and ann for the same
    found = {path: before[str(path)] for path in paths if str(path) in before}
    for path in paths:
        if path not in found:
            found[path] = _new_label(path, paths, used)
            used.add(found[path].casefold())
    return found


def _new_label(path: Path, paths: Sequence[Path], used: set[str]) -> str:
    for length in range(1, len(path.parts) + 1):
        label = _named(path, length)
        alone = sum(_named(other, length).casefold() == label.casefold() for other in paths) == 1
        if alone and label.casefold() not in used:
            return label
    numbered = (f"{_named(path, len(path.parts))}__{number}" for number in range(len(used) + 2))
    return next(label for label in numbered if label.casefold() not in used)


def _named(path: Path, length: int) -> str:
    parts = [*path.parent.parts[1:], path.stem][-length:]
    safe = ("".join(c if c.isalnum() or c in "-_. " else "_" for c in part).strip(". ") for part in parts)
    return "__".join(part or "_" for part in safe)
