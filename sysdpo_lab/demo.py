"""`make demo`: lesson 00, then a short run of two real SmolLM2 adapters, offline, under ten minutes on two cores."""

import json
import shutil
import sys
import time
from pathlib import Path

from sysdpo_lab import errors, paths

LESSON = "00_start_here"
SHORT = {"pairs": 60, "heldout": 20, "steps": 20, "batch": 1, "warmup": 3}
SEEDS = (0,)
COMMAND = "python -m sysdpo_lab demo"


def run_lesson(target: Path) -> Path:
    """Execute lesson 00 afresh and keep the result; a failing cell is an error.

    Raises:
        DataFolderError: this installation has no notebooks beside it.
    """
    import os

    import nbformat
    from nbclient import NotebookClient

    checkout = paths.repository_folder()
    source = checkout and checkout / "notebooks" / f"{LESSON}.ipynb"
    if source is None or not source.is_file():
        raise errors.DataFolderError("lesson 00 was not found; run the demo from a clone of the repository")
    os.environ.pop("MPLBACKEND", None)  # Agg would leave the lesson without figures
    notebook = nbformat.read(source, 4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(source.parent)}}).execute()
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return target


def _is_complete_demo(folder: Path) -> bool:
    """Whether an earlier demo ended here; somebody's own run of the same name is not to be deleted."""
    path = folder / "summary.json"
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("command") == COMMAND


def run_demo(out: Path, lesson: bool = True, changes: dict | None = None) -> int:
    """The whole demo; prints the table before and after, with intervals, and where the report lies.

    An earlier demo in `out` is replaced when it is complete and continued when it is not.
    """
    from sysdpo_lab import cli
    from sysdpo_lab.experiments import runner

    started = time.monotonic()
    out = Path(out)
    if lesson:
        print("1 of 2: lesson 00, a small system aligned in a minute", flush=True)
        lesson_file = run_lesson(out / f"{LESSON}.ipynb")
        print(f"  executed: {lesson_file.resolve()}", flush=True)
    folder = out / "two-llm"
    if _is_complete_demo(folder):
        shutil.rmtree(folder)
    print(
        "2 of 2: two SmolLM2-135M adapters (draft, refine), SysDPO-Sampling with diverse beam search, k = 2\n"
        f"  a short run: {SHORT['steps']} steps, {SHORT['heldout']} held-out records, one seed; the full one is "
        "`make study-two-llm`, its results lie in data/results/",
        flush=True,
    )
    summary = runner.run(
        "two-llm", "small", folder, SEEDS, {**SHORT, **(changes or {})}, resume=(folder / "run.json").is_file(),
        progress=sys.stdout.isatty() or None, command=COMMAND,
    )  # fmt: skip
    cli.print_summary(summary, folder)
    print("One seed and few records: the intervals are wide, and this is a demonstration, not a result.")
    print(f"demo finished in {(time.monotonic() - started) / 60:.1f} minutes")
    return 0
