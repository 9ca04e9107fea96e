"""What an exercise is in a notebook: its cells, their marks and markers, and every way in which they can be wrong.

The marks are nbgrader's (schema 3), the markers its `### BEGIN SOLUTION` and `### BEGIN HIDDEN TESTS`, so that nbgrader
reads the same files.
"""

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sysdpo_lab import errors

STUB = 'raise NotImplementedError("your code here")'
KINDS = ("SOLUTION", "HIDDEN TESTS")
TEST = "-test"  # what the name of a test cell ends with
FLAGS = ("grade", "locked", "solution", "task")
KEYS = {*FLAGS, "grade_id", "schema_version"}
OPTIONAL = {"points", "checksum", "cell_type"}
GRADE_ID = re.compile(r"[A-Za-z0-9_-]+")
MARKER = re.compile(r"[ \t]*### (BEGIN|END) (SOLUTION|HIDDEN TESTS)[ \t]*")
# a marker with a slip in it would leave the solution in the student version
NEARLY = re.compile(r"#+[ \t]*(BEGIN|END)[ \t_-]*(SOLUTION|HIDDEN|MARK)", re.IGNORECASE)


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson.

    Args:
        name: the grade_id of its solution cell.
        solution, test: positions of its two cells in the notebook; `test` is None for an answer that a person marks.
        points: what a right answer is worth.
        names: the functions that its solution defines.
    """

    name: str
    solution: int
    test: int | None
    points: float
    names: tuple[str, ...]


def marks(cell: Any) -> dict:
    """nbgrader's marks of a cell; empty for an ordinary one."""
    found = cell.metadata.get("nbgrader", {})
    return dict(found) if isinstance(found, dict) else {}


def exercises(notebook: Any, file: str) -> list[Exercise]:
    """The exercises of a lesson, in order.

    Args:
        notebook: a lesson with its solutions (built, or read from its source).
        file: its name, for messages.

    Raises:
        ExerciseFormatError: a marker or a mark is wrong; names file, cell and what to do.
    """
    for number, cell in enumerate(notebook.cells, start=1):
        for problem in (*_mark_problems(cell), *_marker_problems(cell)):
            _refuse(file, number, cell, problem)
    found = {}
    for number, cell in enumerate(notebook.cells, start=1):
        if name := marks(cell).get("grade_id"):
            if name in found:
                _refuse(file, number, cell, f"grade_id {name!r} is used twice; cell {found[name] + 1} has it too")
            found[name] = number - 1
    return [
        _exercise(notebook, file, name, found) for name in found if marks(notebook.cells[found[name]])["solution"]
    ] + (_lonely_tests(notebook, file, found))


def _exercise(notebook: Any, file: str, name: str, found: dict[str, int]) -> Exercise:
    position = found[name]
    cell = notebook.cells[position]
    if marks(cell)["grade"]:
        return Exercise(name, position, None, marks(cell)["points"], ())
    test = found.get(name + TEST)
    if test is None or not marks(notebook.cells[test])["grade"]:
        _refuse(file, position + 1, cell, f"its test cell is missing: a cell with grade_id {name + TEST!r} and points")
    if test < position:
        _refuse(file, test + 1, notebook.cells[test], "the test stands before the solution that it tests")
    names = bound_names(cell.source)
    if not names:
        _refuse(file, position + 1, cell, "the solution defines no function; an exercise asks for one")
    return Exercise(name, position, test, marks(notebook.cells[test])["points"], tuple(sorted(names)))


def _lonely_tests(notebook: Any, file: str, found: dict[str, int]) -> list[Exercise]:
    for name, position in found.items():
        about = marks(notebook.cells[position])
        if about["grade"] and not about["solution"] and name.removesuffix(TEST) not in set(found) - {name}:
            wanted = name.removesuffix(TEST) if name.endswith(TEST) else f"NAME, and the test NAME{TEST}"
            _refuse(file, position + 1, notebook.cells[position], f"its solution cell is missing: grade_id {wanted}")
    return []


def _refuse(file: str, number: int, cell: Any, problem: str) -> None:
    name = marks(cell).get("grade_id")
    where = f"{file}, cell {number}" + (f" ({name})" if name else "")
    raise errors.ExerciseFormatError(f"{where}: {problem}")


# --- marks ------------------------------------------------------------------------------------------------------------


def _mark_problems(cell: Any) -> Iterator[str]:
    """What nbgrader's schema 3 would refuse, and what this course does not use."""
    if "nbgrader" not in cell.metadata:
        return
    about = marks(cell)
    if missing := sorted(KEYS - set(about)):
        yield f"its nbgrader marks lack {', '.join(missing)}"
        return
    if unknown := sorted(set(about) - KEYS - OPTIONAL):
        yield f"its nbgrader marks have unknown keys: {', '.join(unknown)}"
    if about["schema_version"] != 3:
        yield f"schema_version is {about['schema_version']!r}, expected 3"
    yield from (
        f"{flag} is {about[flag]!r}, expected true or false" for flag in FLAGS if about[flag] not in (True, False)
    )
    if not isinstance(about["grade_id"], str) or not GRADE_ID.fullmatch(about["grade_id"]):
        yield f"grade_id {about['grade_id']!r} may hold letters, digits, - and _ only"
    yield from _role_problems(cell, about)


def _role_problems(cell: Any, about: dict) -> Iterator[str]:
    if about["task"]:
        yield "nbgrader's task cells are not used here; set task to false"
    if about["grade"] != ("points" in about):
        yield "points stand in a cell that is graded, and in no other"
    elif about["grade"] and not _is_points(about["points"]):
        yield f"points are {about['points']!r}, expected a number, 0 or more"
    if about["solution"] and about["locked"]:
        yield "a solution cell is locked; nobody could write into it"
    if about["grade"] and not about["solution"] and not about["locked"]:
        yield "a test cell is not locked"
    if about["grade"] and not about["solution"] and cell.cell_type != "code":
        yield "a test cell must be a code cell"


def _is_points(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value and math.isfinite(value)


# --- markers ----------------------------------------------------------------------------------------------------------


def _marker_problems(cell: Any) -> Iterator[str]:
    if cell.cell_type != "code":
        return
    about, lines = marks(cell), cell.source.splitlines()
    kinds = {found[2] for line in lines if (found := MARKER.fullmatch(line))}
    if "SOLUTION" in kinds and (not about.get("solution") or about.get("locked")):
        yield "it has a solution marker, but is no unlocked solution cell"
    if "HIDDEN TESTS" in kinds and (about.get("solution") or not about.get("grade")):
        yield "it has a hidden-tests marker, but is no test cell"
    if about.get("solution") and "SOLUTION" not in kinds:
        yield "a solution cell without ### BEGIN SOLUTION: all of it would be given away"
    problems = [*_balance_problems(lines)]
    yield from problems
    if about.get("solution") and not problems and not _parses(without_solution(cell.source)):
        yield f"with {STUB!r} in place of the solution it is no valid Python"


def _balance_problems(lines: Sequence[str]) -> Iterator[str]:
    open_kind = None
    for number, line in enumerate(lines, start=1):
        found = MARKER.fullmatch(line)
        if not found:
            if NEARLY.search(line):
                yield f"line {number}, {line.strip()!r}, is nearly a marker; markers stand alone: ### BEGIN SOLUTION"
        elif found[1] == "BEGIN":
            if open_kind:
                yield f"line {number} begins {found[2]} within {open_kind}"
            open_kind = found[2]
        elif found[2] != open_kind:
            yield f"line {number} ends {found[2]}, which was not begun"
        else:
            open_kind = None
    if open_kind:
        yield f"{open_kind} is begun and never ended"


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def without_solution(source: str) -> str:
    """The cell as a learner gets it: a stub for each solution.

    >>> print(without_solution("def f(x):\\n    ### BEGIN SOLUTION\\n    return x\\n    ### END SOLUTION"))
    def f(x):
        raise NotImplementedError("your code here")
    """
    return _without(source, "SOLUTION", STUB)


def without_hidden_tests(source: str) -> str:
    """The test as a learner gets it.

    >>> without_hidden_tests("check(f)\\n### BEGIN HIDDEN TESTS\\nassert f(0) == 1\\n### END HIDDEN TESTS")
    'check(f)'
    """
    return _without(source, "HIDDEN TESTS", None)


def _without(source: str, kind: str, stub: str | None) -> str:
    kept, inside = [], False
    for line in source.splitlines():
        found = MARKER.fullmatch(line)
        if found and found[2] == kind:
            inside = found[1] == "BEGIN"
            if inside and stub:
                kept.append(line[: len(line) - len(line.lstrip())] + stub)
        elif not inside:
            kept.append(line)
    return "\n".join(kept).rstrip()


def removed_lines(source: str) -> list[str]:
    """The lines between markers, without spaces around them: what no student file may show."""
    kept, inside = [], False
    for line in source.splitlines():
        if found := MARKER.fullmatch(line):
            inside = found[1] == "BEGIN"
        elif inside and line.strip():
            kept.append(line.strip())
    return kept


# --- names ------------------------------------------------------------------------------------------------------------


def bound_names(source: str) -> set[str]:
    """The functions and classes that a cell defines at its top level; empty where it is no valid Python.

    >>> sorted(bound_names("import math\\ndef f(): pass\\nclass A: pass\\nx = 1"))
    ['A', 'f']
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
