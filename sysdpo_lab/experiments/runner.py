"""Run an experiment: seeds, resume, intervals, summary, figures and report, once for all of them."""

import importlib
import json
import resource
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sysdpo_lab import atomic, errors, evaluation, profiles

MODULES = {"toy": "toy", "two-llm": "two_llm", "three-llm": "three_llm", "samplers": "samplers", "beta": "beta", "faces": "faces"}
LANGUAGE = {"samplers": "llm_samplers", "beta": "llm_beta"}  # the same questions put to language models, above toy


@dataclass
class Context:
    """What an experiment's `run_seed` is given.

    Attributes:
        profile, settings: sizes and hyper-parameters.
        out: the run's folder.
        resume: take up what is there.
        say: prints a line for people (silent in tests).
        progress: show progress bars; None = on a terminal or in a notebook.
    """

    profile: profiles.Profile
    settings: dict[str, Any]
    out: Path
    resume: bool = False
    say: Callable[[str], None] = print
    progress: bool | None = None
    shared: dict[str, Any] = field(default_factory=dict)

    def cached_records(self, folder: Path, make: Callable[[], list[dict]]) -> list[dict]:
        """Records that an earlier, interrupted run finished, or new ones, written as soon as they exist."""
        path = folder / "records.jsonl"
        if self.resume and path.is_file():
            return read_records(path)
        found = make()
        write_records(path, found)
        return found

    def note(self, key: str, value: str) -> None:
        """A fact about the run for summary.json; kept in the folder, since a resumed run may not meet it again."""
        path = self.out / "notes.json"
        atomic.write_json(path, {**self.notes(), key: value})

    def notes(self) -> dict[str, str]:
        """All facts noted so far."""
        path = self.out / "notes.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_records(path: Path, records: Sequence[Mapping]) -> None:
    """One JSON object a line, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def read_records(path: Path) -> list[dict]:
    """The records that `write_records` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(
    experiment: str,
    profile: str,
    out: str | Path,
    seeds: Sequence[int] | None = None,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    say: Callable[[str], None] = print,
    progress: bool | None = None,
    command: str | None = None,
    shared: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run an experiment at a profile and write summary.json, records.jsonl, figures and report.html to `out`.

    Args:
        experiment, profile: see `python -m sysdpo_lab list`.
        out: folder; must be new, or the folder of the same run with resume=True.
        seeds: training seeds; default those of the profile.
        changes: settings that differ from the profile's.
        resume: go on with an interrupted run, to the same result.
        shared: what runs of equal data settings may take over from one another (base, pairs, the start's answers); filled.

    Returns:
        the content of summary.json.

    Raises:
        UnknownOptionError: unknown experiment, profile or setting.  ResumeError: `out` is in use, or of another run.
    """
    chosen = profiles.find(experiment, profile)
    settings = chosen.with_settings(changes or {})
    seeds = checked_seeds(chosen.seeds if seeds is None else seeds)
    module = experiment_of(experiment, profile)
    module.check(settings)  # before the folder is made: a mistyped setting leaves nothing behind
    out = Path(out)
    spent = open_folder(out, {"experiment": experiment, "profile": profile, "seeds": seeds, "settings": settings}, resume)
    context = Context(chosen, settings, out, resume, say, progress, {} if shared is None else shared)
    started = time.monotonic()
    records = []
    for seed in seeds:
        records += module.run_seed(context, seed)
        note_time(out, spent + time.monotonic() - started)
    summarise = getattr(module, "summarise", None)  # where items are not the same for every seed, an experiment has its own
    rows, differences = summarise(records, seeds) if summarise else evaluation.summarise(records, module.METRICS, seeds)
    summary = {
        "experiment": experiment,
        "profile": profile,
        "seeds": seeds,
        "rows": rows,
        "differences": differences,
        "settings": settings,
        "notes": context.notes(),
        "command": command or default_command(experiment, profile, seeds, changes),
        "seconds": round(spent + time.monotonic() - started, 1),
        "peak_memory_mb": peak_memory_mb(),
        "versions": _versions(),
    }
    write_records(out / "records.jsonl", records)
    _write_report(module, context, summary, records)
    atomic.write_json(out / "summary.json", summary)  # last: its presence says that the run is complete
    return summary


def experiment_of(name: str, profile: str = "toy") -> Any:
    """What runs an experiment at a profile: a module, or the object EXPERIMENT of one."""
    file = LANGUAGE[name] if name in LANGUAGE and profile != "toy" else MODULES[name]
    module = importlib.import_module(f"sysdpo_lab.experiments.{file}")
    return getattr(module, "EXPERIMENT", module)


def checked_seeds(seeds: Sequence[int]) -> list[int]:
    found = list(dict.fromkeys(seeds))
    if not found or any(type(seed) is not int or not 0 <= seed < 2**31 for seed in found):
        raise errors.UnknownOptionError(f"seeds must be whole numbers from 0 to 2**31 - 1, at least one; found {found}")
    return found


def default_command(experiment: str, profile: str, seeds: Sequence[int], changes: Mapping[str, Any] | None) -> str:
    """The command line that repeats a run.

    >>> default_command("toy", "toy", [0], {"steps": 5})
    'python -m sysdpo_lab run toy --profile toy --seeds 0 --out runs/toy-toy --set steps=5'
    """
    words = ["python", "-m", "sysdpo_lab", "run", experiment, "--profile", profile, "--seeds", ",".join(map(str, seeds))]
    words += ["--out", f"runs/{experiment}-{profile}"]
    if changes:
        words += ["--set", *(f"{key}={value}" for key, value in changes.items())]
    return shlex.join(words)


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 if sys.platform != "darwin" else 1024**2), 1)


def _versions() -> dict[str, str]:
    from sysdpo_lab.saving import versions

    return versions()


def open_folder(out: Path, plan: dict[str, Any], resume: bool) -> float:
    """Check that `out` is free, or holds the same plan to resume; returns the seconds spent on it before."""
    path = out / "run.json"
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise errors.ResumeError(f"{path}: not a JSON file ({error}); choose another --out") from None
        if not resume:
            raise errors.ResumeError(f"{out} already holds a run; pass --resume to go on with it, or choose another --out")
        differing = _differing(before, json.loads(json.dumps(plan)))
        if differing:
            raise errors.ResumeError(f"{path}: this run has other values; {'; '.join(differing)}; choose another --out")
        return float(before.get("seconds", 0.0))
    if out.exists() and not out.is_dir():
        raise errors.ResumeError(f"{out} is a file; choose another --out")
    if out.exists() and any(out.iterdir()):
        raise errors.ResumeError(f"{out} is not empty and holds no run; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.ResumeError(f"{out} cannot be made ({error.strerror}); choose another --out") from None
    atomic.write_json(path, {**plan, "seconds": 0.0})
    return 0.0


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two plans, settings one by one.

    >>> _differing({"profile": "tiny", "settings": {"k": 2, "lr": 0.1}}, {"profile": "tiny", "settings": {"k": 4, "lr": 0.1}})
    ['k: 2 there, 4 asked for']
    """
    pairs = [(key, before.get(key), now[key]) for key in now if key != "settings"]
    there, asked = before.get("settings", {}), now.get("settings", {})
    pairs += [(key, there.get(key), asked.get(key)) for key in {**there, **asked}]
    return [f"{key}: {old!r} there, {new!r} asked for" for key, old, new in pairs if old != new]


def note_time(out: Path, seconds: float) -> None:
    path = out / "run.json"
    atomic.write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "seconds": round(seconds, 1)})


def _write_report(module, context: Context, summary: dict, records: list[dict]) -> None:
    from sysdpo_lab import figures, report

    folder = context.out / "figures"
    folder.mkdir(exist_ok=True)
    pictures = []
    for name, (figure, alt) in module.figures(context, summary, records).items():
        png, _ = figures.save_figure(figure, folder / name)
        pictures.append((png, alt))
    report.write_report(
        context.out, summary, pictures, title=module.TITLE, prose=module.prose(context), samples=module.samples(context, records)
    )
