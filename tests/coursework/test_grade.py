"""Grading: right answers get their points whatever else was done to the notebook, and no trick gets any."""

import csv
import json
import time
from collections import namedtuple
from pathlib import Path

import nbformat
import pytest

from sysdpo_lab import errors
from sysdpo_lab.coursework import build, exercises, grade, handins, judge, processes, slicing, student
from sysdpo_lab.coursework.checks import core
from tests.coursework import lesson_cases
from tests.coursework.lesson_cases import LESSON, answered, lesson_file

ROOT = Path(__file__).parents[2]
RIGHT = {
    "double": "def double(x):\n    return x + x",
    "greet": 'def greet(name):\n    return f"hello {name}"',
    "quadruple": "def quadruple(x):\n    return double(2 * x)",
}
QUICK = grade.Settings(seconds=60)


class Class:
    """A folder with the small lesson and what was handed in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, lesson_file(folder)
        self.lesson = grade.Lesson(self.source)
        self.blank = student.student_version(self.lesson.notebook, "00_small.py")

    def hand_in(self, who: str, answers: dict[str, str], change=lambda notebook: None) -> Path:
        notebook = answered(self.blank, answers)
        change(notebook)
        path = self.folder / who / "00_small.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(notebook), encoding="utf-8")
        return path

    def run(self, *files: Path, out: str = "grades", settings=QUICK, **options) -> list[dict]:
        return grade.grade(files, [self.source], self.folder / out, settings, **options)

    def results(self, answers: dict[str, str], change=lambda notebook: None, settings=QUICK) -> dict[str, grade.Result]:
        """Of one hand-in, without the rehearsal."""
        path = self.hand_in("one", answers, change)
        plans = dict.fromkeys(self.lesson.solutions, grade.Plan(False, judge.DECOYS))
        return {result.exercise: result for result in grade.grade_handin(path, self.lesson, plans, settings)}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return Class(tmp_path_factory.mktemp("course"))


def status(results: dict[str, grade.Result]) -> dict[str, str]:
    return {name: result.status for name, result in results.items()}


def table(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "grades.csv").read_text(encoding="utf-8").splitlines()))


def points(results: dict[str, grade.Result]) -> float:
    return sum(result.points for result in results.values())


# --- points -----------------------------------------------------------------------------------------------------------


def test_each_hand_in_gets_its_points_and_the_files_say_so(course, capsys):
    solved = course.folder / "solved.ipynb"
    nbformat.write(course.lesson.notebook, solved)
    blank = course.hand_in("ann", {})
    partly = course.hand_in("=bob", {**RIGHT, "greet": "def greet(name):\n    return name"})
    broken = course.folder / "broken.ipynb"
    broken.write_text("{")
    command = [str(path) for path in (solved, blank, partly, broken)]
    command += ["--source", str(course.source), "--out", str(course.folder / "all"), "--jobs", "2"]
    assert grade.main(command) == 1  # one could not be read
    said = capsys.readouterr().out
    assert "solved: 5.5 of 5.5" in said and "ann__00_small: 0 of 5.5; double not answered; greet not answered" in said
    assert "_bob__00_small: 5 of 5.5; greet not right yet" in said
    assert "broken: broken.ipynb is no notebook: it is not JSON" in said
    out = course.folder / "all"
    rows = {row["name"]: row for row in table(out)}
    assert [row["points"] for row in rows.values()] == ["5", "0", "0", "5.5"]
    assert rows["solved"]["00_small/quadruple"] == "3" and "not JSON" in rows["broken"]["error"]
    page = (out / "_bob__00_small.md").read_text()
    assert "**5 of 5.5 points**" in page and "    greet by name" in page and "## double: 2 of 2, right" in page
    entry = json.loads((out / "ann__00_small.json").read_text())
    assert {result["status"] for result in entry["exercises"]} == {"not answered"}
    assert not list(out.glob(".*"))


def test_a_second_run_grades_only_what_changed(course):
    first, second = course.hand_in("carl", RIGHT), course.hand_in("dora", {})
    told: list[str] = []
    course.run(first, second, out="twice", tell=told.append)
    course.hand_in("dora", {"double": RIGHT["double"]})
    made = course.run(first, second, out="twice", tell=told.append)
    assert len(told) == 3 and told[2].startswith("dora__00_small: 2 of 5.5")
    assert [entry["points"] for entry in made] == [5.5, 2]
    assert len(course.run(first, out="twice", again=True, tell=told.append)) == 1 and len(told) == 4
    assert len(table(course.folder / "twice")) == 2


def test_finished_hand_ins_are_kept_when_a_later_one_breaks_the_run(course, monkeypatch):
    first, second = course.hand_in("emil", {"double": RIGHT["double"]}), course.hand_in("fay", RIGHT)
    real = grade.grade_handin

    def failing(path, *rest):
        if "fay" in str(path):
            raise KeyboardInterrupt
        return real(path, *rest)

    monkeypatch.setattr(grade, "grade_handin", failing)
    with pytest.raises(KeyboardInterrupt):
        course.run(first, second, out="broken")
    assert [row["points"] for row in table(course.folder / "broken")] == ["2"]


# --- what was done to the notebook ------------------------------------------------------------------------------------


def cell(notebook, name):
    return next(entry for entry in notebook.cells if exercises.marks(entry).get("grade_id") == name)


def drop(notebook, name):
    notebook.cells.remove(cell(notebook, name))


def rename(notebook):
    for entry in notebook.cells:
        entry.metadata.pop("nbgrader", None)


def copy_stub(notebook):
    stub = next(cell for cell in notebook.cells if exercises.marks(cell).get("grade_id") == "double")
    notebook.cells.append(
        nbformat.from_dict({**stub, "source": 'def double(x):\n    raise NotImplementedError("your code here")'})
    )


HARMLESS = {
    "tests edited": lambda n: cell(n, "double-test").update(source="assert False"),
    "tests deleted": lambda n: drop(n, "double-test"),
    "points changed": lambda n: cell(n, "greet-test").metadata.nbgrader.update(points=100),
    "marks lost": rename,
    "a copy of an empty cell": copy_stub,
    "cells in another order": lambda n: n.cells.reverse(),
    "an extra cell that fails": lambda n: n.cells.insert(2, nbformat.v4.new_code_cell("import sys; sys.exit(1)")),
    "the lesson's text emptied": lambda n: [entry.update(source="") for entry in n.cells if not exercises.marks(entry)],
    "a magic and outputs": lambda n: cell(n, "greet").update(source="%%time\n" + RIGHT["greet"] + "\n!ls"),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_changes_of_the_notebook_do_not_matter(what, course):
    results = course.results(RIGHT, HARMLESS[what])
    assert points(results) == 5.5, results


def test_a_test_that_was_made_easy_gives_nothing(course):
    results = course.results(
        {"double": "def double(x):\n    return 7"}, lambda n: cell(n, "double-test").update(source="1")
    )
    assert results["double"] == grade.Result(
        "double", "wrong", 0, 2, "double: this is not twice the number", results["double"].seconds, ""
    )


def test_a_missing_cell_is_said_and_costs_its_exercise_only(course):
    results = course.results(RIGHT, lambda n: drop(n, "double"))
    assert status(results) == {"double": "missing", "greet": "right", "quadruple": "wrong"}
    assert "NameError: name 'double' is not defined; what an answer needs" in results["quadruple"].message


def test_an_answer_that_needs_an_empty_one_says_which(course):
    results = course.results({"quadruple": RIGHT["quadruple"]})
    assert results["quadruple"].status == "not answered"
    assert results["quadruple"].message == "it uses double, which is not answered"


def test_helpers_and_imports_of_an_earlier_answer_may_be_used(course):
    answers = {"double": "import math\ndef help(x):\n    return math.floor(x)\n" + RIGHT["double"]}
    answers["quadruple"] = "def quadruple(x):\n    return help(4 * x) * math.isfinite(x)"
    assert status(course.results(answers)) == {"double": "right", "greet": "not answered", "quadruple": "right"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "no notebook"),
        ('{"a": 1}', "no notebook"),
        ('{"cells": [1], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "no notebook"),
        ("\xff\xfe", "not JSON"),
        ('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "of another lesson"),
    ],
    ids=["empty", "list", "dict", "cells", "bytes", "no cells"],
)
def test_what_is_no_hand_in_is_explained_and_the_others_are_graded(course, tmp_path, text, words):
    path = tmp_path / "x.ipynb"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(errors.HandInError, match=words):
        grade.grade_handin(path, course.lesson, {}, QUICK)


# --- what an answer does ----------------------------------------------------------------------------------------------

WRONG = "\ndef double(x):\n    return 7\n"
CHECK = "sysdpo_lab.coursework.checks.lesson_00"
TRICKS = {
    "defines its own checks": "class checks:\n    class lesson_00:\n        check_double = print" + WRONG,
    "replaces the check": "checks.lesson_00.check_double = print" + WRONG,
    "replaces it through an import": f"import {CHECK} as l\nl.Check.__call__ = print\nl.check_double = print" + WRONG,
    "asks the check": f"from {CHECK} import double",
    "asks the check when called": f"def double(x):\n    import {CHECK} as l\n    return l.double(x)",
    "asks a name of the lesson": "def double(x):\n    return checks.lesson_00.check_double.right(x)",
    "replaces a builtin": "__builtins__.all = lambda values: True" + WRONG,
    "replaces a builtin when called": (
        "def double(x):\n    import sys\n    getattr(sys, 'modu' + 'les')['builtins'].all = bool\n    return 0"
    ),
    "passes for anything": (
        "class Yes(int):\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Yes(7)"
    ),
    "leaves Python": "import os\ndef double(x):\n    os._exit(0)",
    "leaves Python at once": "import os\nos._exit(0)",
    "exits": "import sys\ndef double(x):\n    sys.exit(0)",
    "prints a verdict": "print('0' * 32, 'passed', '00')\nprint('0' * 32, 'sealed', '00', flush=True)" + WRONG,
    "writes a verdict everywhere": (
        "import os\nfor f in range(12):\n    try:\n        os.write(f, b'passed\\nsealed\\n' * 3000)\n    except OSError:\n"
        "        pass\nos._exit(0)" + WRONG
    ),
    "searches the stack": "import sys\ndef double(x):\n    return sys._getframe(1).f_globals['SCALE'] * x",
    "runs text": "exec('def double(x):\\n    return 2 * x')\ndef double(x):\n    return 2 * x",
    "reads a test from a parent": "import inspect\ndef double(x):\n    return 2 * x",
    "names it otherwise": "def doubled(x):\n    return 2 * x",
    "does not parse": "def double(x:\n    return 2 * x",
    "raises at once": "raise ValueError('a' * 10 ** 6)",
    "fails to fail": "class E(Exception):\n    def __str__(self):\n        raise KeyError\ndef double(x):\n    raise E",
    "is no function": "double = 4",
    "recurses": "def double(x):\n    return double(x) + double(x)",
}


@pytest.mark.parametrize("what", TRICKS)
def test_no_trick_gets_points_and_each_gets_a_message(what, course):
    result = course.results({"double": TRICKS[what]})["double"]
    if what == "passes for anything":
        # it equals all that it is compared with: no test of values can tell, a person can
        assert result.status == "right"
        return
    assert result.points == 0 and result.status in {"wrong", "crashed", "held", "tampered"}, result
    assert 0 < len(result.message) < 2500


def test_checks_called_in_an_answer_do_no_harm(course):
    source = "from sysdpo_lab.coursework import checks\n" + RIGHT["double"] + "\nchecks.lesson_00.check_double(double)"
    assert course.results({"double": source})["double"].status == "right"


def test_a_held_answer_runs_once_a_person_has_read_it(course):
    answers = {"double": "import inspect\n" + RIGHT["double"]}
    held = course.results(answers)["double"]
    assert held.status == "held" and "it uses inspect" in held.message and held.points == 0
    assert course.results(answers, settings=grade.Settings(20, accept_held=True))["double"].status == "right"


def test_what_a_held_answer_changes_behind_the_tests_back_is_found(course):
    search = "f = sys._getframe(1)\n    while 'self' not in f.f_locals:\n        f = f.f_back\n"
    source = f"import sys\ndef double(x):\n    {search}    f.f_locals['self'].right = lambda x: 7\n    return 7"
    result = course.results({"double": source}, settings=grade.Settings(20, accept_held=True))["double"]
    assert result.points == 0 and result.status in {"tampered", "wrong"}, result


def test_a_hang_costs_its_own_exercise_only_and_its_children_are_ended(course):
    psutil = pytest.importorskip("psutil")
    child = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nprint(p.pid)\n"
    loop = "while True:\n        try:\n            time.sleep(9)\n        except BaseException:\n            pass"
    answers = RIGHT | {"greet": f"{child}import time\ndef greet(name):\n    print(end='', flush=True)\n    {loop}"}
    begun = time.monotonic()
    results = course.results(answers, settings=grade.Settings(2, accept_held=True))
    assert status(results) == {"double": "right", "greet": "timeout", "quadruple": "right"}
    assert results["greet"].message == "stopped after 2 s: does it ever end?"
    assert time.monotonic() - begun < 15
    number = int(results["greet"].printed)
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_megabytes_of_output_neither_block_nor_fill_the_result(course):
    answers = {"double": "print('x' * 3_000_000)\n" + RIGHT["double"]}
    result = course.results(answers)["double"]
    assert result.status == "right" and result.printed == "x" * 500


def test_too_much_memory_is_refused(course):
    if judge._data_bytes() == 0:
        pytest.skip("this system does not say how much memory a process has")
    answers = {"double": "def double(x):\n    return len(bytearray(3 << 30)) and 2 * x"}
    result = course.results(answers, settings=grade.Settings(20, memory_mb=200))["double"]
    assert result.status == "wrong" and "MemoryError" in result.message


def test_no_secret_and_no_folder_of_the_grader_is_passed_on(course, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    answers = {
        "greet": "import os\ndef greet(name):\n    return [sorted(os.environ), os.getcwd(), os.environ['HOME'], input()]"
    }
    assert "EOFError" in course.results(answers)["greet"].message
    assert "MY_TOKEN" not in processes.environment(Path("t")) and processes.environment(Path("t"))["HOME"] == "t"


def test_wrong_use_is_told(course, tmp_path, capsys):
    assert grade.main([str(tmp_path)]) == 2
    assert "no notebook" in capsys.readouterr().err
    assert grade.main([str(course.hand_in("gil", {})), "--source", str(tmp_path / "x.ipynb")]) == 2
    assert "no such lesson" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        grade.main(["x.ipynb", "--jobs", "0"])


# --- a lesson that is wrong itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "    return SCALE * x",
            "    return SCALE + x",
            "exercise double: its own solution gets no points here: double: this",
        ),
        ("SCALE = 2\n", "SCALE = 1 / 0\n", "exercise double: its own solution gets no points here: ZeroDivisionError"),
        (
            'assert greet("ann") == "hello ann", "greet by name"',
            "assert callable(greet)",
            "greet: its test accepts an answer",
        ),
    ],
)
def test_a_lesson_that_fails_its_own_tests_is_refused_before_any_hand_in(tmp_path, capsys, old, new, words):
    source = lesson_file(tmp_path, LESSON.replace(old, new))
    handed = tmp_path / "x.ipynb"
    nbformat.write(lesson_cases.read(source), handed)
    assert grade.main([str(handed), "--source", str(source), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_cells_run_where_those_that_seem_needed_are_not_enough(tmp_path):
    text = LESSON.replace("SCALE = 2\n", "SCALE = [1]\n").replace("unused = sum", "list.append(SCALE, 1)\nunused = sum")
    lesson = grade.Lesson(lesson_file(tmp_path, text.replace("SCALE * x", "sum(SCALE) * x")))
    plans = grade.rehearse(lesson, QUICK)
    assert plans["double"].all_cells and not plans["greet"].all_cells


# --- the parts --------------------------------------------------------------------------------------------------------


def test_only_cells_that_an_exercise_needs_are_run(course):
    first = course.lesson.exercises[0]
    asked = grade.job(course.lesson, first, {"double": RIGHT["double"]}, False, 1)
    assert [entry["source"][:10] for entry in asked["cells"]] == ["import sys"]
    asked = grade.job(course.lesson, first, course.lesson.solutions, False, 1)
    assert [entry["source"][:10] for entry in asked["cells"]] == ["import sys", "SCALE = 2"]


@pytest.mark.parametrize(
    ("cells", "wanted", "chosen"),
    [
        (["a = 1", "b = 2"], {"b"}, [1]),
        (["a = 1", "b = a", "a = 3"], {"b"}, [0, 1]),
        (["a = []", "a.append(1)", "a[0] = 2", "a.index(2)"], {"a"}, [0, 1, 2]),
        (["a = 1", "a += 1"], {"a"}, [0, 1]),
        (["def f(a):\n    return a + b", "a = 1", "b = 2"], {"f"}, [0, 2]),
        (["x = [i for i in y]", "y = 1", "i = 2"], {"x"}, [0, 1]),
        (["from math import *", "a = pi"], {"a"}, [0, 1]),
        (["with open('f') as f:\n    text = f.read()", "g = lambda t: text + t"], {"g"}, [0, 1]),
        (["%matplotlib inline\na = 1", "not python", "!ls"], {"a"}, [0]),
        (["def set():\n    global a\n    a = 2", "set()", "a"], {"a"}, [0]),
    ],
)
def test_which_cells_are_needed(cells, wanted, chosen):
    assert slicing.needed_cells([slicing.use_of(entry) for entry in cells], wanted) == chosen


@pytest.mark.parametrize(
    ("source", "held"),
    [
        ("import torch\nmodel.modules()\ntorch.compile(f)", []),
        ("import sys\nsys.modules", ["sys.modules"]),
        ("from sys import modules, _getframe", ["_getframe", "modules"]),
        ("eval('1')", ["eval"]),
        ("f.__globals__", ["__globals__"]),
        ("import importlib.util", ["importlib.util"]),
        ("not python", []),
    ],
)
def test_what_is_held_back(source, held):
    assert handins.held_words(source) == held


def test_an_untouched_stub_is_known_by_its_code_not_its_layout(course):
    solution = course.lesson.solutions["double"]
    assert handins.is_stub(
        'def double(x):\n    """Twice x."""\n    # hm\n    raise NotImplementedError( "your code here" )', solution
    )
    assert not handins.is_stub(RIGHT["double"], solution)


def test_names_repeat_in_different_folders_and_runs(tmp_path):
    paths = [tmp_path / "a" / "x.ipynb", tmp_path / "b" / "x.ipynb", tmp_path / "b" / "y.ipynb"]
    assert list(handins.labels(paths, {}).values()) == ["a__x", "b__x", "y"]
    assert list(handins.labels(paths[2:], {"y": "/elsewhere/y.ipynb"}).values()) == ["b__y"]
    assert list(handins.labels(paths[2:], {"y": str(paths[2])}).values()) == ["y"]
    assert list(handins.labels(paths[:1], {"a__x": str(paths[0])}).values()) == ["a__x"], "a name once given stays"
    assert list(handins.labels([tmp_path / "=c.ipynb", tmp_path / "+C.ipynb"], {}).values())[0].endswith("__0")


def test_a_lines_word_must_be_right():
    word = "ab" * 16
    assert processes._read(f"{word} passed 00\n".encode(), word) == ("passed", "\0")
    for line in (b"passed", b"cd passed 00", f"{word} passed zz".encode(), b"\xff" * 30, b""):
        assert processes._read(line, word) == ("", "")


# --- real lessons -----------------------------------------------------------------------------------------------------

BUILT = [
    target
    for source, target in build.pairs(ROOT / "notebooks")
    if "grade_id" in source.read_text("utf-8") and target.is_file()
]


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_all_that_a_test_reads_is_defined_by_the_cells_that_are_run_for_it(path):
    lesson = grade.Lesson(path)
    for exercise in lesson.exercises:
        asked = grade.job(lesson, exercise, lesson.solutions, False, 1)
        uses = [slicing.use_of(cell["source"]) for cell in asked["cells"]]
        own, test = slicing.use_of(asked["answer"]), slicing.use_of(asked["test"])
        bound = set(__builtins__).union(
            own.code, own.data, test.code, test.data, *(use.code | use.data for use in uses)
        )
        assert own.reads | test.reads <= bound, (exercise.name, (own.reads | test.reads) - bound)


REAL = {
    "typical mistake": ("    return beta * (policy_chosen - policy_rejected)", "wrong"),
    "Check replaced": (
        "    return 0\nfrom sysdpo_lab.coursework.checks import core\ncore.Check.__call__ = print\ncore.difference = print",
        "wrong",
    ),
    "the right function": (
        "    from sysdpo_lab.coursework.checks.lesson_00 import margin as m\n    return m(1, 2, 3, 4, 5)",
        "wrong",
    ),
    "torch replaced when called": (
        "    torch.allclose = lambda *a, **k: True\n    return 0 * policy_chosen",
        "tampered",
    ),
}


def test_a_real_exercise_is_graded_and_its_tests_hold(tmp_path):
    lesson = grade.Lesson(ROOT / "notebooks/00_start_here.ipynb")
    (exercise,) = [exercise for exercise in lesson.exercises if exercise.name == "margin"]
    lesson.exercises = [exercise]
    plans = grade.rehearse(lesson, QUICK)
    assert plans["margin"] == grade.Plan(False, judge.DECOYS)
    head = "def margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):\n"
    found = {}
    with grade.ThreadPoolExecutor(2) as pool:
        work = {
            name: pool.submit(grade.grade_exercise, lesson, exercise, {"margin": head + body}, plans["margin"], QUICK)
            for name, (body, _) in REAL.items()
        }
        found = {name: future.result() for name, future in work.items()}
    assert {name: result.status for name, result in found.items()} == {
        name: wanted for name, (_, wanted) in REAL.items()
    }
    assert found["typical mistake"].message.startswith("margin: the reference is missing")
    assert "torch.allclose" in found["torch replaced when called"].message


def test_a_checks_module_may_hold_values_without_a_dict_of_their_own():
    Point = namedtuple("Point", "x")
    Point.__module__ = "sysdpo_lab.coursework.checks.lesson_99"
    check = core.Check.__new__(core.Check)
    assert list(judge._checks({Point.__module__: {"point": Point(1), "check": check}})) == [check]
