"""Grade what was handed in: points and messages for each exercise, with the lesson's own tests.

    python -m sysdpo_lab.coursework.grade HANDIN.ipynb ... [--source notebooks/02_beta_perfect_alignment.ipynb] [--out grades]

HANDIN may be a folder: all notebooks in it. The lesson is found by the hand-in's name or its exercises; `--source` names it.
Only the cells of answers are taken from a hand-in; text, tests and points are the lesson's, whatever was changed, moved or
added. Each exercise runs in a process of its own, without the environment's secrets, for at most `--seconds`. Before
any hand-in, the lesson's own solutions are graded: they must get all points, and the tests must refuse empty and wrong answers.

OUT gets grades.csv and for each hand-in NAME.json and NAME.md (feedback), each as soon as it is done; a second
run grades only what is new or changed. This is no sandbox: `judge.py` says what is and what is not kept from an answer.

Exit status: 0 all graded, 1 some could not be read, 2 wrong use or a lesson that fails its own tests.
"""

import argparse
import csv
import hashlib
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from sysdpo_lab import atomic, errors, paths
from sysdpo_lab.coursework import build, exercises, feedback, handins, processes, slicing

NEEDS = "; what an answer needs must stand in its own cell or in an earlier answer's"


@dataclass(frozen=True)
class Settings:
    """How long (seconds for answer and test) and with how much memory an exercise may run; whether held answers run."""

    seconds: float = 120.0
    memory_mb: int = 4096
    accept_held: bool = False


@dataclass(frozen=True)
class Plan:
    """How an exercise is tested: with all cells of the lesson or those it seems to need, and what its test must refuse."""

    all_cells: bool
    decoys: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What one exercise got.

    Args:
        status: "right", "wrong", "not answered", "missing", "timeout", "crashed", "held", "tampered",
            "broken" (the lesson's own cells failed) or "by hand".
        points: what it got; `possible`, what it could get.
        message: for whoever handed it in.
        printed: the beginning of what the answer printed.
    """

    exercise: str
    status: str
    points: float
    possible: float
    message: str = ""
    seconds: float = 0.0
    printed: str = ""


class Lesson:
    """A lesson with its solutions and tests: the instructor's side of grading.

    Args:
        path: the built notebook, or its source.

    Raises:
        ExerciseFormatError: a marker or mark is wrong, or there is no exercise.
        HandInError: the file is missing or no notebook.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise errors.HandInError(f"{path}: there is no such lesson")
        self.name = path.stem
        self.notebook = build.read_source(path) if path.suffix == ".py" else handins.read_handin(path)
        self.exercises = exercises.exercises(self.notebook, path.name)
        if not self.exercises:
            raise errors.ExerciseFormatError(f"{path.name} has no exercises")
        self.sha256 = _hash(*(f"{cell.source}{exercises.marks(cell)}" for cell in self.notebook.cells))

    @cached_property
    def solutions(self) -> dict[str, str]:
        """{exercise: the source of its solution}."""
        return {exercise.name: self.notebook.cells[exercise.solution].source for exercise in self.exercises}


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "backslashreplace")).hexdigest()


# --- one exercise -----------------------------------------------------------------------------------------------------


def job(
    lesson: Lesson, exercise: exercises.Exercise, answers: Mapping[str, str], all_cells: bool, memory_mb: int
) -> dict:
    """What `judge.py` is told: the lesson's cells above the test, its test, and the answers of a hand-in.

    Args:
        answers: {exercise: source}; tests and text always come from the lesson.
        all_cells: not only those that the test and the answers seem to need.
    """
    owner = {other.solution: other for other in lesson.exercises}
    cells = []
    for position, cell in enumerate(lesson.notebook.cells[: exercise.test]):
        other = owner.get(position)
        if other and other.names and other is not exercise and other.name in answers:
            entry = {"source": answers[other.name], "answer": other.name, "functions": list(other.names)}
            cells.append(entry)
        elif cell.cell_type == "code" and not exercises.marks(cell):
            cells.append({"source": cell.source, "answer": None, "functions": []})
    test = lesson.notebook.cells[exercise.test].source
    if not all_cells:
        wanted = slicing.use_of(test).reads | slicing.use_of(answers[exercise.name]).reads
        uses = [_use(cell) for cell in cells]
        cells = [cells[position] for position in slicing.needed_cells(uses, wanted)]
    return {
        "cells": cells,
        "exercise": exercise.name,
        "answer": answers[exercise.name],
        "functions": list(exercise.names),
        "test": test,
        "memory_mb": memory_mb,
    }


def _use(cell: dict) -> slicing.Use:
    """An answer that does not parse defines its functions all the same, so that whoever uses them is told."""
    use = slicing.use_of(cell["source"])
    use.code |= set(cell["functions"])
    return use


def grade_exercise(
    lesson: Lesson, exercise: exercises.Exercise, answers: Mapping[str, str], plan: Plan, settings: Settings
) -> Result:
    """Points and message of one exercise; runs it only where there is something to run."""
    possible, begun = exercise.points, time.monotonic()
    if exercise.test is None:
        return Result(exercise.name, "by hand", 0, possible, "marked by a person")
    if exercise.name not in answers:
        return Result(exercise.name, "missing", 0, possible, "its answer's cell is not in the notebook")
    answer = answers[exercise.name]
    if handins.is_stub(answer, lesson.solutions[exercise.name]):
        return Result(exercise.name, "not answered", 0, possible, "not answered")
    held = [] if settings.accept_held else handins.held_words(answer)
    if held:
        text = f"held back for a person to look at: it uses {', '.join(held)}, which no exercise needs"
        return Result(exercise.name, "held", 0, possible, text)
    run = processes.run_job(job(lesson, exercise, answers, plan.all_cells, settings.memory_mb), settings.seconds)
    status, message = _verdict(run, plan)
    points = possible if status == "right" else 0
    seconds = round(time.monotonic() - begun, 2)
    return Result(exercise.name, status, points, possible, message, seconds, run.printed[:500])


def _verdict(run: processes.Run, plan: Plan) -> tuple[str, str]:
    if run.status == "sealed":
        accepted = [decoy for decoy in plan.decoys if decoy not in run.decoys]
        if accepted:
            return "tampered", "its test was changed while it ran: it then took a wrong answer for right"
        return "right", "right"
    hint = NEEDS if "NameError: name" in run.message else ""
    words = {"failed": "wrong", "unanswered": "not answered", "undecided": "held"}
    return words.get(run.status, run.status), run.message + hint


# --- a lesson's own solutions -----------------------------------------------------------------------------------------


def rehearse(lesson: Lesson, settings: Settings, each: Callable = map) -> dict[str, Plan]:
    """Grade the lesson's own solutions; {exercise: how its hand-ins are tested}.

    Args:
        each: `map`, or an executor's.

    Raises:
        ExerciseFormatError: a solution gets no points, or a test accepts an empty answer; names both and the reason.
    """
    tested = [exercise for exercise in lesson.exercises if exercise.test is not None]
    plans = dict(zip((e.name for e in tested), each(lambda exercise: _rehearse(lesson, exercise, settings), tested)))
    return {exercise.name: plans.get(exercise.name, Plan(False, ())) for exercise in lesson.exercises}


def _rehearse(lesson: Lesson, exercise: exercises.Exercise, settings: Settings) -> Plan:
    for all_cells in (False, True):
        asked = job(lesson, exercise, lesson.solutions, all_cells, settings.memory_mb)
        run = processes.run_job(asked, settings.seconds)
        if run.status == "sealed":
            break
    where = f"{lesson.name}, exercise {exercise.name}"
    if run.status != "sealed":
        raise errors.ExerciseFormatError(f"{where}: its own solution gets no points here: {run.message}")
    if "empty" not in run.decoys:
        raise errors.ExerciseFormatError(f"{where}: its test accepts an answer that only raises NotImplementedError")
    return Plan(all_cells, run.decoys)


# --- one hand-in ------------------------------------------------------------------------------------------------------


def grade_handin(path: Path, lesson: Lesson, plans: Mapping[str, Plan], settings: Settings) -> list[Result]:
    """The results of all exercises of a lesson for one file.

    Raises:
        HandInError: the file is no notebook, or has no cell of this lesson's exercises.
    """
    answers = handins.answers(handins.read_handin(path), lesson.notebook, lesson.exercises)
    if not answers and any(exercise.names for exercise in lesson.exercises):
        raise errors.HandInError(
            f"{path.name} has none of the answers' cells of {lesson.name}: is it of another lesson?"
        )
    return [grade_exercise(lesson, exercise, answers, plans[exercise.name], settings) for exercise in lesson.exercises]


def record(
    path: Path, label: str, lesson: Lesson | None, plans: Mapping[str, Plan], settings: Settings, error: str = ""
) -> dict:
    """What NAME.json holds; a file that cannot be graded has an `error` and no points."""
    results: list[Result] = []
    if lesson is not None:
        try:
            results = grade_handin(path, lesson, plans, settings)
        except errors.HandInError as problem:
            error = str(problem)
    automatic = [result for result in results if result.status != "by hand"]
    return {
        "name": label,
        "file": str(path),
        "lesson": lesson.name if lesson else None,
        "points": sum(result.points for result in automatic),
        "possible": sum(exercise.points for exercise in lesson.exercises if exercise.test is not None) if lesson else 0,
        "by_hand": sum(result.possible for result in results if result.status == "by hand"),
        "error": error,
        "exercises": [asdict(result) for result in results],
        "key": key(path, lesson, settings),
    }


def key(path: Path, lesson: Lesson | None, settings: Settings) -> str:
    """Says whether a stored result is still that of this file, this lesson, these settings and these checks."""
    checks = sorted(Path(__file__).parent.rglob("*.py"))
    content = paths.file_sha256(path) if path.is_file() else "missing"
    return _hash(
        content, lesson.sha256 if lesson else "", repr(settings), *(file.read_text("utf-8") for file in checks)
    )


# --- many hand-ins ----------------------------------------------------------------------------------------------------


def stored(out: Path) -> dict[str, dict]:
    """{name: record} of what lies in the output folder; files that are not ours are left alone."""
    found = {}
    for path in sorted(out.glob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if (
            isinstance(value, dict)
            and {"name", "file", "key", "exercises"} <= value.keys()
            and value["name"] == path.stem
        ):
            found[path.stem] = value
    return found


def write(out: Path, made: dict) -> None:
    """NAME.json, NAME.md and a new grades.csv, each in one step."""
    atomic.write_text(out / f"{made['name']}.md", feedback.page(made))
    atomic.write_json(out / f"{made['name']}.json", made)
    write_table(out)


def write_table(out: Path) -> None:
    """grades.csv of all that lies in the output folder: one row a hand-in, one column an exercise."""
    rows = [feedback.row(made) for made in stored(out).values()]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    atomic.write_text(out / "grades.csv", text.getvalue())


def grade(
    files: Sequence[Path],
    lesson_files: Sequence[Path],
    out: Path,
    settings: Settings | None = None,
    *,
    jobs: int = 1,
    again: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Grade files into `out`; finished ones are on disk when a later one fails.

    Args:
        files: what was handed in.
        lesson_files: built notebooks or sources; each hand-in belongs to one of them.
        jobs: how many hand-ins (or solutions) run side by side.
        again: also what lies in `out` with the same content, lesson, settings and checks.
        tell: is given a line for each hand-in.

    Returns:
        the records, in the order of `files`.

    Raises:
        ExerciseFormatError: a lesson is wrong, or fails its own tests.
    """
    settings, files = settings or Settings(), list(dict.fromkeys(Path(file).resolve() for file in files))
    before = stored(out)
    names = handins.labels(files, {name: made["file"] for name, made in before.items()})
    lessons = [Lesson(path) for path in lesson_files]
    chosen = {file: lesson_of(file, lessons) for file in files}
    kept = {
        file: before[names[file]]
        for file in files
        if not again and names[file] in before and before[names[file]]["key"] == key(file, chosen[file], settings)
    }
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            used = {id(lesson): lesson for file, lesson in chosen.items() if lesson and file not in kept}
            plans = {number: rehearse(lesson, settings, pool.map) for number, lesson in used.items()}

            def work(file: Path) -> dict:
                lesson = chosen[file]
                error = "" if lesson else f"{file.name} belongs to none of the lessons: name its lesson with --source"
                return record(file, names[file], lesson, plans.get(id(lesson), {}), settings, error)

            done = dict(kept)
            waiting = [file for file in files if file not in kept]
            for file, made in zip(waiting, pool.map(work, waiting)):
                write(out, made)
                done[file] = made
                tell(feedback.line(made))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    write_table(out)
    return [done[file] for file in files]


def lesson_of(path: Path, lessons: Sequence[Lesson]) -> Lesson | None:
    """The lesson that a hand-in belongs to: by its name, else by its exercises; the only one there is, in any case."""
    if len(lessons) == 1:
        return lessons[0]
    named = [lesson for lesson in lessons if lesson.name in path.stem]
    if named:
        return max(named, key=lambda lesson: len(lesson.name))
    try:
        notebook = handins.read_handin(path)
    except errors.HandInError:
        return None
    found = [(len(handins.answers(notebook, lesson.notebook, lesson.exercises)), lesson) for lesson in lessons]
    count, lesson = max(found, key=lambda pair: pair[0], default=(0, None))
    return lesson if count else None


# --- command line -----------------------------------------------------------------------------------------------------


def notebooks_in(path: Path) -> list[Path]:
    """A file itself; the notebooks of a folder, but for Jupyter's copies."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*.ipynb") if not any(part.startswith(".") for part in file.parts))


def lessons_with_exercises(folder: Path) -> list[Path]:
    """The built lessons that have exercises."""
    return [path for path in sorted(folder.glob("[0-9]*.ipynb")) if '"grade_id"' in path.read_text(encoding="utf-8")]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    first, _, rest = __doc__.partition("\n")
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m sysdpo_lab.coursework.grade", None, first, rest, formatter_class=style)
    parser.add_argument("handins", nargs="+", type=Path, metavar="HANDIN", help="a notebook, or a folder of notebooks")
    parser.add_argument(
        "--source", type=Path, help="the lesson with its solutions; without it the checkout's are tried"
    )
    parser.add_argument("--out", type=Path, default=Path("grades"), help="where results go (grades)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one exercise (120)")
    parser.add_argument(
        "--memory", type=int, default=4096, metavar="MB", help="for one exercise, where possible (4096)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="hand-ins side by side (1)")
    parser.add_argument("--again", action="store_true", help="also what was graded before and has not changed")
    parser.add_argument(
        "--accept-held", action="store_true", help="run answers that were held back, once you read them"
    )
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.jobs < 1 or options.memory < 1:
        parser.error("--seconds, --jobs and --memory must be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = options_of(arguments)
    checkout = paths.repository_folder()
    known = lessons_with_exercises(checkout / "notebooks") if checkout else []
    lessons = [options.source] if options.source else known
    files = [file for given in options.handins for file in notebooks_in(given)]
    settings = Settings(options.seconds, options.memory, options.accept_held)
    if not files:
        print("there is no notebook in what was named", file=sys.stderr)
        return 2
    try:
        made = grade(
            files, lessons, options.out, settings, jobs=options.jobs, again=options.again,
            tell=lambda line: print(line, flush=True),
        )  # fmt: skip
    except (errors.ExerciseFormatError, errors.HandInError) as error:
        print(error, file=sys.stderr)
        return 2
    print(feedback.table(made))
    print(f"{options.out / 'grades.csv'}, and feedback beside it")
    return int(any(entry["error"] for entry in made))


if __name__ == "__main__":
    sys.exit(main())
