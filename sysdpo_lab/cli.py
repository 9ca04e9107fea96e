"""The command line: list, run, grid, plan, ask, doctor, store, demo."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sysdpo_lab import errors, profiles

COMPARED = (
    "gap", "wr_prompted", "wr_greedy", "wr_chosen", "task_score", "validity", "words", "order_consistency", "preference_score",
)  # fmt: skip
MOST_ROWS = 80  # of a table that are printed


def parser() -> argparse.ArgumentParser:
    """All sub-commands and their options."""
    top = argparse.ArgumentParser(prog="python -m sysdpo_lab", description="Align a whole compound AI system (SysDPO).")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="experiments x profiles: time, memory, network")
    commands.add_parser("doctor", help="each dependency OK/FAIL, device, versions")
    run = commands.add_parser("run", help="run an experiment; writes summary.json, figures and report.html")
    run.add_argument("experiment")
    run.add_argument("--profile", default=None, help="toy, tiny, small or paper; default: the experiment's smallest")
    run.add_argument(
        "--out", type=Path, default=None, help="a new folder, or that of the run to --resume; default: under runs/"
    )
    run.add_argument("--seeds", type=_seeds, default=None, help="for example 0,1,2; default: the profile's")
    run.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings that differ")
    run.add_argument("--resume", action="store_true", help="go on with an interrupted run, to the same result")
    grid = commands.add_parser("grid", help="run every combination of some settings; writes table.csv, items.csv, figures")
    grid.add_argument("experiment")
    grid.add_argument("--profile", required=True)
    grid.add_argument("--axis", action="append", default=[], metavar="NAME=V1,V2", help="a setting and its values; repeatable")
    grid.add_argument("--out", type=Path, required=True)
    grid.add_argument("--seeds", type=_seeds, default=None)
    grid.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="the same in every cell")
    grid.add_argument("--resume", action="store_true", help="keep complete cells, go on with the interrupted one")
    plan = commands.add_parser("plan", help="memory, tokens and hours of a run; downloads nothing")
    plan.add_argument("experiment")
    plan.add_argument("--profile", required=True)
    ask = commands.add_parser("ask", help="ask a saved system your own questions; its intermediates are shown")
    ask.add_argument("folder", type=Path, help="what system.save wrote, for instance RUN/seed-0/joint/system")
    ask.add_argument("questions", nargs="*", help="without any: one question a line from standard input")
    ask.add_argument("--start", action="store_true", help="ask the frozen start instead")
    ask.add_argument("--sample", type=int, default=None, metavar="SEED", help="sample every component; default: greedy")
    store = commands.add_parser("store", help="keep a complete run or grid under data/results/NAME")
    store.add_argument("run", type=Path, help="the folder that `run --out` or `grid --out` wrote")
    store.add_argument("name")
    demo = commands.add_parser("demo", help="lesson 00 and a short two-LLM run of SmolLM2, offline, under 10 minutes")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"))
    return top


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"seeds must be whole numbers with commas between, found {text!r}") from None


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """`key=value` words as a dictionary.

    >>> settings_of(["k=4", "sampler=monte_carlo"])
    {'k': '4', 'sampler': 'monte_carlo'}
    """
    for word in words:
        if "=" not in word:
            raise errors.UnknownOptionError(f"--set takes KEY=VALUE, found {word!r}")
    return dict(word.split("=", 1) for word in words)


def print_list() -> None:
    """The table of experiments and profiles."""
    print(f"{'experiment':11} {'profile':8} {'minutes':>7} {'memory':>7} {'network':8} model")
    for profile in profiles.REGISTRY.values():
        network = "download" if profile.network else "offline"
        print(
            f"{profile.experiment:11} {profile.name:8} {profile.minutes:7g} {profile.memory_gb:5g} G {network:8} {profile.model}"
        )
        print(f"{'':21}{len(profile.seeds)} seeds; expected: {profile.expected}")
    print("minutes: the full run on two CPU cores; of profile paper an estimate for one GPU with 80 GB.")
    print("`run EXPERIMENT --profile P --out DIR` starts one.")


def print_plan(experiment: str, name: str) -> None:
    """What a run will cost, without loading anything."""
    profile = profiles.find(experiment, name)
    print(f"{experiment} at {name}: {profile.model} (revision {profile.revision})")
    seeds = ", ".join(map(str, profile.seeds))
    print(f"seeds {seeds}; about {profile.minutes:g} minutes on {profile.machine}, {profile.memory_gb:g} GB")
    print("downloads: " + ("yes" if profile.network else "none"))
    settings = profile.settings
    if "scorer" in settings:
        from sysdpo_lab import planning

        memory = planning.faces_memory(settings["rank"])
        print(f"memory before activations: {sum(memory.values()):.1f} GB")
        for name, value in [*memory.items(), *planning.faces_work(settings).items()]:
            print(f"  {name}: {value:,.1f}")
    elif "max_new_tokens" in settings:
        print_tokens(experiment, profile)
    for key, value in settings.items():
        print(f"  {key} = {value}")


def print_tokens(experiment: str, profile: profiles.Profile) -> None:
    """Tokens of a training step of language models; at the paper's size memory and hours too."""
    from sysdpo_lab import planning

    settings, nodes = profile.settings, 3 if experiment == "three-llm" else 2
    prompt = planning.ORCA_PROMPT if profile.network else planning.PROMPT_TOKENS
    tokens = planning.tokens_per_step(settings, nodes - 1, prompt)
    print("tokens a training step (generated, scored): {:,}, {:,}".format(*tokens))
    if profile.network:
        rows = len(settings["rows"].split(",")) - 1
        for what, found in (
            ("GB of a training step", planning.language_memory(settings, nodes)),
            ("hours a seed, estimated", planning.language_hours(settings, rows, nodes)),
        ):
            parts = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"{what}: {sum(found.values()):.1f} ({parts})")


def print_summary(summary: dict, out: Path) -> None:
    """The table of a run, and where its report lies."""
    print(f"\n{summary['experiment']} at {summary['profile']}, seeds {summary['seeds']} (value [95 % interval])")
    for row in summary["rows"][:MOST_ROWS]:
        low, high = row["ci_low"], row["ci_high"]
        print(f"  {row['system']:12} {row['metric']:16} {row['value']:8.3f}  [{low:.3f}, {high:.3f}]  n = {row['n']}")
    shown = [row for row in summary["differences"] if row["metric"] in COMPARED]
    for row in shown[:MOST_ROWS]:
        low, high = row["ci_low"], row["ci_high"]
        print(f"  {row['a']} - {row['b']}, {row['metric']}: {row['value']:+.3f} [{low:+.3f}, {high:+.3f}]")
    left = max(0, len(summary["rows"]) - MOST_ROWS) + max(0, len(shown) - MOST_ROWS)
    if left:
        print(f"  ... and {left} lines more in {(out / 'summary.json').resolve()}")
    print(f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_mb']:.0f} MB")
    print(f"report: {(out / 'report.html').resolve()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; a named error is printed in one line and gives exit status 2, Ctrl-C gives 130."""
    options = parser().parse_args(arguments)
    try:
        return dispatch(options)
    except errors.SysDPOError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted{_how_to_go_on(options)}", file=sys.stderr)
        return 130


def _how_to_go_on(options: argparse.Namespace) -> str:
    if options.command in ("run", "grid"):
        return "; the same command with --resume goes on"
    return "; the same command goes on" if options.command == "demo" else ""


def print_answers(options: argparse.Namespace) -> None:
    """Load a system and answer each question with all intermediates."""
    import torch

    from sysdpo_lab import asking
    from sysdpo_lab.system import CompoundSystem

    questions = options.questions or [line.strip() for line in sys.stdin if line.strip()]
    system = CompoundSystem.load(options.folder)
    generator = None if options.sample is None else torch.Generator().manual_seed(options.sample)
    for answer in asking.ask(system, questions, start=options.start, generator=generator):
        print("\n".join(asking.lines(answer, system.output)) + "\n")


def run_grid(options: argparse.Namespace) -> None:
    """Run a grid; says where its tables lie."""
    from sysdpo_lab.experiments import grid

    axes = dict(grid.axis(word) for word in options.axis)
    if len(axes) < len(options.axis):
        raise errors.UnknownOptionError(f"--axis names a setting twice: {options.axis}")
    changes = settings_of(options.set)
    rows = grid.run(options.experiment, options.profile, options.out, axes, options.seeds, changes, options.resume)
    print(f"{len(rows)} rows: {(options.out / 'table.csv').resolve()}")


def stored(folder: Path, name: str) -> Path:
    """Keep a complete run, or grid, under data/results."""
    from sysdpo_lab import results
    from sysdpo_lab.experiments import grid

    return (grid if grid.is_grid(folder) else results).store(folder, name)


def dispatch(options: argparse.Namespace) -> int:
    """The chosen sub-command."""
    if options.command == "list":
        print_list()
    elif options.command == "plan":
        print_plan(options.experiment, options.profile)
    elif options.command == "doctor":
        from sysdpo_lab import doctor

        return doctor.run_doctor(sys.stdout)
    elif options.command == "ask":
        print_answers(options)
    elif options.command == "store":
        print(f"stored in {stored(options.run, options.name)}")
    elif options.command == "grid":
        run_grid(options)
    elif options.command == "demo":
        from sysdpo_lab import demo

        return demo.run_demo(options.out)
    else:
        from sysdpo_lab.experiments import runner

        changes = settings_of(options.set)
        name = options.profile or profiles.smallest(options.experiment)
        out = options.out or Path("runs") / f"{options.experiment}-{name}"
        summary = runner.run(options.experiment, name, out, options.seeds, changes, options.resume)
        print_summary(summary, out)
    return 0
