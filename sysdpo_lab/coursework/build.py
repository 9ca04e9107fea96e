"""Build the notebooks: execute notebooks/sources/*.py (py:percent) into notebooks/*.ipynb, the same bytes each time.

    python -m sysdpo_lab.coursework.build [--check | --student] [NAME ...]

NAME is a source's name or its beginning (`00`); without one all are built. `--check` executes nothing: it says which
stored notebook has other cells than its source, or cells that were never run. `--student` also writes the student versions,
student/NAME.ipynb, and executes only notebooks that no longer agree with their source.

So that two builds agree, a cell's id comes from its position, there are no timings, and neighbouring outputs on one
stream are joined. Widget state and views are left out: GitHub's viewer refuses a widgets block without state, and
JupyterLab shows "model not found" for a view without one; the still picture beside each widget stays.
"""

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sysdpo_lab import atomic, errors, paths
from sysdpo_lab.coursework import exercises, student

CELL_SECONDS = 600
ANSI = re.compile(r"\x1b\[[0-9;]*m")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LEFT_OUT = {"MPLBACKEND", "SYSDPO_PROFILE"}  # Agg hides the figures; another profile gives other numbers
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


# --- source -> notebook -----------------------------------------------------------------------------------------------


def read_source(source: Path) -> Any:
    """The notebook that a py:percent file stands for, not executed; tags and nbgrader's marks are kept.

    Args:
        source: a file with `# %%` cells.

    Returns:
        an nbformat notebook whose ids depend on the file's name and each cell's position only.
    """
    import jupytext

    notebook = jupytext.read(source)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = _plain_metadata()
    for position, cell in enumerate(notebook.cells):
        cell["id"] = hashlib.sha256(f"{source.stem}/{position}".encode()).hexdigest()[:12]
        cell.metadata = {key: cell.metadata[key] for key in ("tags", "nbgrader") if key in cell.metadata}
    return notebook


def execute(notebook: Any, name: str, folder: Path) -> Any:
    """Run all cells in a fresh kernel of this Python, in `folder`; returns the same notebook with outputs.

    Raises:
        NotebookExecutionError: a cell failed, ran out of time or killed the kernel; names notebook and cell.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, CellTimeoutError, DeadKernelError

    begun: list = []
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=lambda cell, cell_index: begun.append(cell),
    )
    try:
        client.execute(env=kernel_environment())
    except (CellControlSignal, CellTimeoutError, DeadKernelError) as error:
        message = ANSI.sub("", str(error)).strip()
        raise errors.NotebookExecutionError(f"{name}, {_where(notebook, begun)}\n{message}") from error
    notebook.metadata = _plain_metadata()
    return notebook


def kernel_environment() -> dict[str, str]:
    """What the kernel inherits: this process's environment without what would change the outputs."""
    return {key: value for key, value in os.environ.items() if key not in LEFT_OUT} | ENVIRONMENT


def tidy(notebook: Any) -> Any:
    """Drop from the outputs what differs between runs or cannot be shown later; put alt text where MyST reads it."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            output.get("data", {}).pop(WIDGET_VIEW, None)
        cell.outputs = _joined([output for output in cell.outputs if not _is_empty(output)])
        alts = [output.metadata["image/png"]["alt"] for output in cell.outputs if _has_alt(output)]
        if alts:
            cell.metadata["mystnb"] = {"image": {"alt": alts[0]}}
    return notebook


def build(source: Path, target: Path) -> Path:
    """Execute `source` and replace `target` in one step; a failing cell leaves the old notebook.

    Raises:
        ExerciseFormatError: an exercise's marker or mark is wrong; found before anything is run.
        NotebookExecutionError: a cell failed.
    """
    import nbformat

    notebook = read_source(source)
    exercises.exercises(notebook, source.name)
    notebook = tidy(execute(notebook, source.name, target.parent))
    nbformat.validate(notebook)
    return atomic.write_text(target, nbformat.writes(notebook) + "\n")


def build_student(source: Path, target: Path) -> Path:
    """Replace `target`, the student version of `source`, in one step; nothing is executed.

    Raises:
        ExerciseFormatError: an exercise's marker or mark is wrong.
    """
    return student.write_student_version(read_source(source), target, source.name)


def _plain_metadata() -> Any:
    from nbformat import from_dict

    return from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})


def _where(notebook: Any, begun: Sequence[Any]) -> str:
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if not begun:
        return "before the first cell"
    return f"code cell {1 + code.index(begun[-1])} of {len(code)}: {begun[-1].source.strip().splitlines()[0]}"


def _is_empty(output: Any) -> bool:
    """What a progress bar leaves behind when it is done: a reader has nothing of it, and a test run shows no bar."""
    return output.output_type == "display_data" and dict(output.data) == {"text/plain": ""}


def _has_alt(output: Any) -> bool:
    return "alt" in output.get("metadata", {}).get("image/png", {})


def _joined(outputs: Sequence[Any]) -> list:
    """Text that a kernel sent in several pieces as one piece: where it was cut depends on timing."""
    joined: list = []
    for output in outputs:
        if joined and output.output_type == "stream" == joined[-1].output_type and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


# --- notebook against source ------------------------------------------------------------------------------------------


def differences(source: Path, target: Path) -> list[str]:
    """What is wrong with the stored notebook: other cells than its source, or cells not run. Empty if nothing is."""
    import nbformat

    if not target.is_file():
        return [f"{target.name} is missing"]
    notebook = nbformat.read(target, 4)
    return [*_cell_differences(_cells(read_source(source)), _cells(notebook)), *_not_run(notebook)]


def _cells(notebook: Any) -> list[tuple]:
    return [
        (cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ())), cell.metadata.get("nbgrader", {}))
        for cell in notebook.cells
    ]


def _cell_differences(expected: list[tuple], found: list[tuple]) -> Iterable[str]:
    if len(expected) != len(found):
        yield f"{len(found)} cells, the source has {len(expected)}"
    for number, (wanted, here) in enumerate(zip(expected, found), start=1):
        for what, a, b in zip(("type", "text", "tags", "nbgrader marks"), wanted, here):
            if a != b:
                yield f"cell {number} differs in its {what}"


def _not_run(notebook: Any) -> Iterable[str]:
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"the cells were not run once each, from top to bottom: their counts are {counts}"
    if not any(cell.outputs for cell in code):
        yield "no cell has an output"


# --- command line -----------------------------------------------------------------------------------------------------


def pairs(folder: Path, names: Sequence[str] = ()) -> list[tuple[Path, Path]]:
    """(source, notebook) of each lesson in `folder`, in order.

    Args:
        folder: holds `sources`; the notebooks go beside it.
        names: names or beginnings of names; all without one.

    Raises:
        UnknownOptionError: no source begins like one of the names.
    """
    sources = sorted(path for path in (folder / "sources").glob("*.py") if "# %%" in path.read_text(encoding="utf-8"))
    wanted = [name.removesuffix(".py").removesuffix(".ipynb") for name in names]
    for name in wanted:
        if not any(source.stem.startswith(name) for source in sources):
            raise errors.UnknownOptionError(f"no lesson {name!r}; there are {', '.join(s.stem for s in sources)}")
    chosen = [source for source in sources if not wanted or source.stem.startswith(tuple(wanted))]
    return [(source, folder / f"{source.stem}.ipynb") for source in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 1 when a check or a cell fails."""
    parser = argparse.ArgumentParser(prog="python -m sysdpo_lab.coursework.build", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a lesson's name or its beginning; all without one")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare, execute nothing")
    what.add_argument("--student", action="store_true", help="also write the student versions, into student/")
    parser.add_argument("--folder", type=Path, help="another folder than the checkout's notebooks")
    options = parser.parse_args(arguments)
    checkout = paths.repository_folder()
    folder = options.folder or (checkout / "notebooks" if checkout else Path("notebooks"))
    try:
        found = pairs(folder, options.names)
        return sum(_one(source, target, options.check, options.student) for source, target in found) > 0
    except (errors.NotebookExecutionError, errors.UnknownOptionError, errors.ExerciseFormatError) as error:
        print(error, file=sys.stderr)
        return 1


def _one(source: Path, target: Path, check: bool, for_students: bool) -> bool:
    if for_students:
        made = build_student(source, target.parent / "student" / target.name)
        print(f"wrote student/{made.name}", flush=True)
        if not differences(source, target):
            return False
    if not check:
        print(f"built {build(source, target).name}", flush=True)
        return False
    found = differences(source, target)
    print(f"{target.name}: {'; '.join(found) or 'agrees with its source'}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
