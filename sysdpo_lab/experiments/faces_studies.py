"""Studies of `run faces`: one setting varied, everything else as in a finished main run, whose stages are taken over.

    python -m sysdpo_lab.experiments.faces_studies weight --main runs/faces-tiny --out runs/faces-study-weight

What the varied setting cannot change (answers of the start, round 1, rows of the captions alone) is copied from the main
run, so a point costs one training of the pictures and one measurement. An interrupted study goes on where it stopped.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sysdpo_lab import atomic, errors, figures, profiles
from sysdpo_lab.experiments import faces_figures, runner

METRICS = ("order_consistency", "preference_score", "image_drift")
BEFORE_ROUND_2 = ("data-1", "round-1", "data-2", "rows/before", "rows/oracle")
SAME_CAPTIONS = (*BEFORE_ROUND_2, "only-captions", "rows/only-captions")


@dataclass(frozen=True)
class Study:
    """One setting, several values.

    Args:
        title, xlabel: for people.
        points: {label: settings that differ from the main run's}.
        rows: of each point.
        shared: folders of a seed that the setting cannot change; a point with the main run's own settings takes all.
    """

    title: str
    xlabel: str
    points: Mapping[str, Mapping[str, Any]]
    rows: str = "before,only:captions,joint"
    shared: tuple[str, ...] = SAME_CAPTIONS


def _steps(times: int, steps: int) -> dict[str, int]:
    return {"timesteps": times, "steps_2": steps}


STUDIES = {
    "noise": Study(
        "How much the pictures have to learn", "training captions of the base that name random degrees",
        {"0 %": {"base": "clean"}, "35 %": {}}, "before,only:captions,joint,oracle,oracle:joint", shared=(),
    ),
    "weight": Study(
        "beta x W, the weight of the pictures", "beta x W",
        {f"{0.1 * weight:g}": {"weight": float(weight)} for weight in (250, 2000)},
    ),
    "timesteps": Study(
        "Timesteps a picture, at the same number of network calls", "timesteps a picture (joint: steps)",
        {"1 (240)": {}, "4 (60)": _steps(4, 60)},
        "before,joint", BEFORE_ROUND_2,
    ),
    "pairs": Study(
        "Pairs whose sides have the same captions", "share of pairs with the same captions",
        {"0": {"same_captions": 0.0}, "0.35": {}}, "before,joint", BEFORE_ROUND_2,
    ),
    "anchors": Study(
        "Anchors on the winners, weight of the preference loss", "joint in round 2",
        {"with anchors": {}}, "before,only:captions,winners-only,preference-only,joint",
    ),
}  # fmt: skip


def _rest(rows: str) -> list[str]:
    """Folders of the stages and the records of rows."""
    names = [row.replace(":", "-") for row in rows.split(",")]
    return [*names, *(f"rows/{name}" for name in names)]


def inherit(main: Path, out: Path, folders: Sequence[str], seeds: Sequence[int]) -> None:
    """Copy what a point shares with the main run, unless it is there."""
    for seed in seeds:
        for folder in folders:
            source, target = main / f"seed-{seed}" / folder, out / f"seed-{seed}" / folder
            if source.is_dir() and not target.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic.folder(target) as new:
                    shutil.copytree(source, new, dirs_exist_ok=True)


def run_study(
    name: str, main: Path, out: Path, seeds: Sequence[int] | None = None, say: Callable[[str], None] = print,
    progress: bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run a study's points and write summary.json and a figure for each metric.

    Args:
        name: of `STUDIES`.
        main: folder of a `run faces`, whose settings and seeds hold wherever the study does not say otherwise.
        seeds: some of the main run's.

    Raises:
        UnknownOptionError: no such study, or a seed that the main run does not have.
    """
    errors.check_option("study", name, tuple(STUDIES))
    study, plan = STUDIES[name], json.loads((main / "run.json").read_text(encoding="utf-8"))
    seeds = plan["seeds"] if seeds is None else list(seeds)
    for seed in seeds:
        errors.check_option("seed", seed, tuple(plan["seeds"]))
    found = []
    for place, (label, changes) in enumerate(study.points.items()):
        say(f"{name}: {study.xlabel} {label}")
        settings = {**plan["settings"], "rows": study.rows, **changes}
        folder = out / f"point-{place}"
        if not (folder / "run.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            content = {
                "experiment": "faces",
                "profile": plan["profile"],
                "seeds": seeds,
                "settings": settings,
                "seconds": 0.0,
            }
            atomic.write_json(folder / "run.json", content)
        own = {key: plan["settings"][key] for key in changes}
        inherit(main, folder, study.shared if own != dict(changes) else (*SAME_CAPTIONS, *_rest(study.rows)), seeds)
        summary = _point(folder, plan["profile"], seeds, settings, say, progress)
        found.append({"x": label, "settings": changes, **summary})
    return _write(name, study, found, out)


def _point(folder: Path, profile: str, seeds, settings: Mapping, say, progress) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        differing = {k: v for k, v in settings.items() if v != profiles.find("faces", profile).settings[k]}
        runner.run("faces", profile, folder, seeds, differing, resume=True, say=say, progress=progress)
    summary = json.loads(path.read_text(encoding="utf-8"))
    return {key: summary[key] for key in ("rows", "differences", "seconds", "seeds", "versions")}


def _write(name: str, study: Study, points: list[dict], out: Path) -> dict[str, Any]:
    content = {
        "study": name, "title": study.title, "xlabel": study.xlabel, "points": points,
        "command": f"python -m sysdpo_lab.experiments.faces_studies {name} --main runs/faces-tiny --out runs/faces-study-{name}",
    }  # fmt: skip
    for metric in METRICS:
        figure = faces_figures.plot_study(points, metric, study.xlabel)
        figures.save_figure(figure, out / "figures" / metric)
    atomic.write_json(out / "summary.json", content)
    atomic.write_text(out / "CARD.md", card(content))
    return content


def card(content: Mapping[str, Any]) -> str:
    """What a study found, for people (Markdown)."""
    seeds = content["points"][0]["seeds"]
    lines = [f"# Study of run faces: {content['title']}", "", f"- Command: `{content['command']}`"]
    lines += [f"- Seeds: {', '.join(map(str, seeds))}; point-N/ of the run hold the runs themselves", ""]
    lines += ["Value, 95 % bootstrap interval over seeds, then items. Licence: Apache-2.0, like the code.", ""]
    lines += [f"| {content['xlabel']} | system | metric | value | interval |", "|---|---|---|---|---|"]
    for point in content["points"]:
        for row in point["rows"]:
            if row["metric"] in METRICS:
                interval = f"[{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
                lines.append(f"| {point['x']} | {row['system']} | {row['metric']} | {row['value']:.3f} | {interval} |")
    return "\n".join(lines) + "\n"


def store(out: Path, name: str, target: Path) -> None:
    """Copy a study's summary, card and figures to data/results/faces-study-NAME."""
    with atomic.folder(target / f"faces-study-{name}") as new:
        for file in ("summary.json", "CARD.md"):
            shutil.copyfile(out / file, new / file)
        (new / "figures").mkdir()
        for picture in sorted((out / "figures").glob("*.png")):
            shutil.copyfile(picture, new / "figures" / picture.name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: run one study, and copy what it found to data/results/ with --store."""
    from sysdpo_lab import paths

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--main", type=Path, required=True, help="folder of a finished run faces")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", help="for example 0,1; default: the main run's")
    parser.add_argument("--store", action="store_true", help="copy the result to data/results/")
    options = parser.parse_args(arguments)
    seeds = None if options.seeds is None else [int(word) for word in options.seeds.split(",")]
    content = run_study(options.study, options.main, options.out, seeds)
    print(card(content))
    if options.store:
        store(options.out, options.study, paths.data_folder() / "results")


if __name__ == "__main__":
    main()
