"""Student versions: nothing of a solution is left, nbgrader can read them, and a slip in a marker is named."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from sysdpo_lab import errors
from sysdpo_lab.coursework import build, exercises, student
from tests.coursework import lesson_cases
from tests.coursework.lesson_cases import LESSON, lesson_file, solution

ROOT = Path(__file__).parents[2]
SOURCES = [source for source, _ in build.pairs(ROOT / "notebooks") if "BEGIN SOLUTION" in source.read_text("utf-8")]
EACH = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(the lesson, its student version)."""
    notebook = lesson_cases.read(lesson_file(tmp_path_factory.mktemp("lesson")))
    return notebook, student.student_version(notebook, "00_small.py")


def sources(notebook) -> dict[str, str]:
    return {exercises.marks(cell)["grade_id"]: cell.source for cell in notebook.cells if exercises.marks(cell)}


# --- what a student gets ----------------------------------------------------------------------------------------------


def test_signature_and_docstring_stay_and_the_solution_becomes_a_stub(small):
    found = sources(small[1])
    assert found["double"] == 'def double(x):\n    """Twice x."""\n    raise NotImplementedError("your code here")'
    assert found["greet"] == 'def greet(name):\n    """A greeting."""\n    raise NotImplementedError("your code here")'


def test_hidden_tests_and_instructor_cells_go_and_the_rest_stays(small):
    lesson, made = small
    assert sources(made)["double-test"] == "checks.lesson_00.check_double(double)"
    assert not any("aloud" in cell.source for cell in made.cells)
    plain = [cell.source for cell in lesson.cells if not exercises.marks(cell) and "aloud" not in cell.source]
    assert [cell.source for cell in made.cells if not exercises.marks(cell) and cell.source != student.NOTE] == plain


def test_nothing_was_run_and_ids_and_marks_are_the_lessons(small):
    lesson, made = small
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    ids = {cell.id: exercises.marks(cell) for cell in lesson.cells}
    assert all(ids[cell.id] == exercises.marks(cell) for cell in made.cells if cell.id != "student-note")
    assert len({cell.id for cell in made.cells}) == len(made.cells)


def test_tests_are_locked_and_run_all_goes_on_behind_them(small):
    cells = {exercises.marks(cell)["grade_id"]: cell.metadata for cell in small[1].cells if exercises.marks(cell)}
    assert cells["double-test"].editable is False and cells["double-test"].deletable is False
    assert student.MAY_RAISE in cells["double-test"].tags
    assert "editable" not in cells["double"] and "tags" not in cells["double"]


def test_a_cell_above_an_exercise_may_use_its_name_for_something_else(tmp_path):
    text = LESSON.replace("unused = sum(range(10))", "double = 4\nprint(double)")
    made = student.student_version(lesson_cases.read(lesson_file(tmp_path, text)), "00_small.py")
    (cell,) = [cell for cell in made.cells if cell.source.startswith("double = 4")]
    assert "tags" not in cell.metadata


def test_a_lesson_without_exercises_is_just_cleared(tmp_path):
    made = student.student_version(lesson_cases.read(lesson_file(tmp_path, "# %% [markdown]\n# # T\n\n# %%\n1\n")), "x")
    assert [cell.source for cell in made.cells] == ["# T", "1"]


# --- the real lessons -------------------------------------------------------------------------------------------------


def substance(source: str) -> list[str]:
    return [line for line in exercises.removed_lines(source) if len(re.sub(r"\W", "", line)) > 3]


@EACH
def test_no_solution_no_hidden_test_and_no_marker_is_left(source):
    lesson = build.read_source(source)
    made = student.student_version(lesson, source.name)
    text = "\n".join(cell.source for cell in made.cells)
    secrets = [line for cell in lesson.cells if exercises.marks(cell) for line in substance(cell.source)]
    public = "\n".join(cell.source for cell in lesson.cells if not exercises.marks(cell))
    assert len(secrets) >= 4
    assert [line for line in secrets if line in text and line not in public] == []
    assert not re.search(r"(BEGIN|END) (SOLUTION|HIDDEN)", nbformat.writes(made))


@EACH
def test_the_same_bytes_each_time(source, tmp_path):
    first = build.build_student(source, tmp_path / "a.ipynb").read_bytes()
    assert build.build_student(source, tmp_path / "b.ipynb").read_bytes() == first
    assert not list(tmp_path.glob(".*"))


NEEDED = {"grade": bool, "grade_id": str, "locked": bool, "schema_version": int, "solution": bool, "task": bool}


@EACH
def test_marks_follow_nbgraders_schema_3_in_the_lesson_and_for_students(source, tmp_path):
    written = json.loads(build.build_student(source, tmp_path / "s.ipynb").read_text("utf-8"))
    for notebook in (build.read_source(source), written):
        marks = [cell["metadata"]["nbgrader"] for cell in notebook["cells"] if "nbgrader" in cell["metadata"]]
        assert len(marks) >= 8, "four exercises or more"
        for entry in marks:
            assert {key: type(entry[key]) for key in NEEDED} == NEEDED and entry["schema_version"] == 3
            assert set(entry) == {*NEEDED, "points"} if entry["grade"] else set(entry) == set(NEEDED)
            assert re.fullmatch(r"[\w-]+", entry["grade_id"]) and not entry["task"]
        assert len({entry["grade_id"] for entry in marks}) == len(marks)


@EACH
def test_each_exercise_has_a_card_two_hints_a_reason_and_hidden_tests(source):
    lesson = build.read_source(source)
    for exercise in exercises.exercises(lesson, source.name):
        card = lesson.cells[exercise.solution - 1].source
        assert card.count("<details>") == card.count("</details>") == 2
        assert re.search(r"\*\*Difficulty\*\* [1-5]/5 · \*\*importance\*\* [1-5]/5 · \*\*minutes\*\* \d+", card)
        assert "BEGIN HIDDEN TESTS" in lesson.cells[exercise.test].source
        assert lesson.cells[exercise.test + 1].source.startswith("*Why it matters.*")


def test_a_student_notebook_runs_from_top_to_bottom_with_nothing_but_empty_answers():
    made = student.student_version(build.read_source(ROOT / "notebooks/sources/01_compound_systems_as_graphs.py"), "01")
    client = NotebookClient(made, timeout=120, resources={"metadata": {"path": str(ROOT / "notebooks")}})
    client.execute(env=build.kernel_environment())  # an error in a cell without the tag would end it
    raised = {
        cell.id: out.ename for cell in made.cells for out in cell.get("outputs", ()) if out.output_type == "error"
    }
    tests = [cell.id for cell in made.cells if exercises.marks(cell).get("grade")]
    assert raised == dict.fromkeys(tests, "NotImplementedError") and len(tests) >= 4


# --- slips ------------------------------------------------------------------------------------------------------------

SLIPS = {
    "begun and never ended": ("    ### END SOLUTION\n", ""),
    "which was not begun": ("    ### BEGIN SOLUTION\n", ""),
    "begins SOLUTION within SOLUTION": ("    return SCALE", "    ### BEGIN SOLUTION\n    return SCALE"),
    "ends SOLUTION, which was not begun": ("    ### END SOLUTION\n", "    ### END SOLUTION\n    ### END SOLUTION\n"),
    "has a solution marker, but is no unlocked": ("SCALE = 2", "### BEGIN SOLUTION\nSCALE = 2\n### END SOLUTION"),
    "a solution marker, but is no": ("assert greet(", "### BEGIN SOLUTION\n### END SOLUTION\nassert greet("),
    "hidden-tests marker, but is no test": ("SCALE = 2", "### BEGIN HIDDEN TESTS\nSCALE = 2\n### END HIDDEN TESTS"),
    "is nearly a marker": ("    ### BEGIN SOLUTION\n", "    ## begin solution\n"),
    "'### BEGIN SOLUTION here', is nearly": ("    ### BEGIN SOLUTION\n", "    ### BEGIN SOLUTION here\n"),
    "its test cell is missing": ('"grade_id": "greet-test"', '"grade_id": "other-test"'),
    "used twice; cell 7 has it": ('"grade_id": "greet"', '"grade_id": "double"'),
    "may hold letters": ('"grade_id": "greet"', '"grade_id": "gr eet"'),
    "a solution cell is locked": (solution("greet"), solution("greet").replace('"locked": false', '"locked": true')),
    "points stand in a cell": (', "points": 0.5', ""),
    "points are -1": ('"points": 0.5', '"points": -1'),
    "points are 'two'": ('"points": 0.5', '"points": "two"'),
    "schema_version is 2": (solution("greet"), solution("greet").replace('n": 3', 'n": 2')),
    "lack task": (solution("greet"), solution("greet").replace(', "task": false', "")),
    "unknown keys: hint": (solution("greet"), solution("greet").replace('"task"', '"hint": 1, "task"')),
    "task cells are not used": (solution("greet"), solution("greet").replace('"task": false', '"task": true')),
    "defines no function": ("def greet(name):\n", "if True:\n"),
    "no valid Python": ("def greet(name):", "def greet(name:"),
    "without ### BEGIN SOLUTION": (
        '    ### BEGIN SOLUTION\n    words = ["hello", name]\n    return " ".join(words)\n    ### END SOLUTION\n',
        "    return 1\n",
    ),
}


@pytest.mark.parametrize("words", SLIPS)
def test_each_slip_is_named_with_file_and_cell(words, tmp_path):
    old, new = SLIPS[words]
    assert old in LESSON
    source = lesson_file(tmp_path, LESSON.replace(old, new, 1))
    with pytest.raises(errors.ExerciseFormatError, match=re.escape(words)) as caught:
        build.build_student(source, tmp_path / "student.ipynb")
    assert re.match(r"00_small\.py, cell \d+( \([\w -]+\))?: ", str(caught.value))
    assert not (tmp_path / "student.ipynb").exists()


def test_a_test_above_its_solution_and_a_test_without_one_are_named(tmp_path):
    cells = LESSON.split("# %% nbgrader=")
    swapped = [*cells[:3], cells[4], cells[3], *cells[5:]]
    for parts, words in (
        (swapped, "stands before the solution"),
        ([*cells[:3], *cells[4:]], "solution cell is missing"),
    ):
        source = lesson_file(tmp_path, "# %% nbgrader=".join(parts))
        with pytest.raises(errors.ExerciseFormatError, match=words):
            build.build_student(source, tmp_path / "student.ipynb")


def test_the_old_student_version_stays_when_the_lesson_has_a_slip(tmp_path):
    target = build.build_student(lesson_file(tmp_path), tmp_path / "student.ipynb")
    before = target.read_bytes()
    source = lesson_file(tmp_path, LESSON.replace("    ### END SOLUTION\n", ""))
    with pytest.raises(errors.ExerciseFormatError):
        build.build_student(source, target)
    assert target.read_bytes() == before


def test_text_that_a_person_marks_needs_no_test(tmp_path):
    marks = '"grade": true, "grade_id": "why", "locked": false, "points": 1, "schema_version": 3, "solution": true, "task": false'
    notebook = lesson_cases.read(
        lesson_file(tmp_path, LESSON + f"\n# %% [markdown] nbgrader={{{marks}}}\n# Say why.\n")
    )
    assert exercises.exercises(notebook, "x")[-1] == exercises.Exercise("why", len(notebook.cells) - 1, None, 1, ())
