"""Stored runs under data/results/: summary, item records, training histories and figures, with command, seeds, versions."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sysdpo_lab import atomic, errors, paths

KEPT = ("summary.json", "records.jsonl")  # the first whatever its size
LARGEST = 4_000_000  # bytes of item records that are worth keeping: the command makes them again


def store(run: str | Path, name: str, folder: str | Path | None = None) -> Path:
    """Copy what lessons and readers need of a complete run to data/results/NAME.

    Adapters and checkpoints stay behind, and so do item records of more than `LARGEST` bytes; the card says so.

    Args:
        run: the folder that `run` wrote to.
        name: the new folder's name; an older result of that name is replaced as a whole.
        folder: where results lie; default data/results.

    Raises:
        ResumeError: the run is not complete.
    """
    run = Path(run)
    if not (run / "summary.json").is_file():
        raise errors.ResumeError(f"{run} holds no complete run (no summary.json); finish it with --resume first")
    target = (Path(folder) if folder else paths.data_folder() / "results") / name
    left_out = [file for file in KEPT[1:] if (run / file).stat().st_size > LARGEST]
    with atomic.folder(target) as work:
        for file in KEPT:
            if file not in left_out:
                shutil.copyfile(run / file, work / file)
        for history in sorted(run.glob("seed-*/*/history.jsonl")):
            place = work / "histories" / f"{history.parent.parent.name}-{history.parent.name}.jsonl"
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(history, place)
        for picture in sorted(run.glob("figures/*.png")):
            (work / "figures").mkdir(exist_ok=True)
            shutil.copyfile(picture, work / "figures" / picture.name)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        atomic.write_text(work / "CARD.md", card(summary, left_out))
    return target


def load(name: str, folder: str | Path | None = None) -> dict[str, Any]:
    """The summary of a stored run.

    Raises:
        MissingFileError: there is no such result; the message lists those that there are.
    """
    place = Path(folder) if folder else paths.data_folder() / "results"
    path = place / name / "summary.json"
    if not path.is_file():
        known = sorted(p.parent.name for p in place.glob("*/summary.json"))
        raise errors.MissingFileError(f"{path}: no stored result {name!r}; there are {known}")
    return json.loads(path.read_text(encoding="utf-8"))


def card(summary: dict[str, Any], left_out: Sequence[str] = ()) -> str:
    """What a stored result is and how it was made, for people; `left_out` names files that were too large to keep."""
    lines = [
        f"# {summary['experiment']} at {summary['profile']}",
        "",
        f"- Command: `{summary['command']}`",
        f"- Seeds: {', '.join(map(str, summary['seeds']))}",
        f"- Cost: {summary['seconds']:.0f} s, peak memory {summary['peak_memory_mb']:.0f} MB",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in summary['versions'].items())}",
        *(f"- {key}: {value}" for key, value in summary.get("notes", {}).items()),
        *(f"- Left out for its size: `{file}`; the command makes it again." for file in left_out),
        "- Licence: Apache-2.0, like the code.",
        "",
        "Value, 95 % bootstrap interval over seeds, then items; n = seeds x items.",
        "",
        "| system | metric | value | interval | n |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in summary["rows"]:
        interval = f"[{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
        lines.append(f"| {row['system']} | {row['metric']} | {row['value']:.3f} | {interval} | {row['n']} |")
    return "\n".join(lines) + "\n"
