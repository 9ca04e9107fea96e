"""The student version of a lesson: stubs for solutions, no hidden tests, nothing run, the same text otherwise."""

from pathlib import Path
from typing import Any

from sysdpo_lab import atomic
from sysdpo_lab.coursework import exercises, slicing

INSTRUCTOR = "instructor"  # cells with this tag are left out
MAY_RAISE = "raises-exception"  # Jupyter's "run all" goes on behind such a cell
NOTE = """*This is the student version. Write your answers into the cells that say `your code here`, and run the cell below each
to check it. Keep all that an answer needs in its own cell or in an earlier answer's: cells that you add are yours to try things
out, and are not graded.*"""


def student_version(notebook: Any, file: str) -> Any:
    """The lesson for those who solve it.

    Args:
        notebook: the lesson with its solutions; not changed.
        file: its name, for messages.

    Returns:
        a notebook without solutions, hidden tests, outputs and cells tagged `instructor`; ids and marks are the lesson's.

    Raises:
        ExerciseFormatError: a marker or a mark is wrong.
    """
    from nbformat import from_dict

    found = exercises.exercises(notebook, file)
    made, answers = from_dict(notebook), set()
    made.cells = []
    for position, cell in enumerate(notebook.cells):
        answers |= {name for exercise in found if exercise.solution == position for name in exercise.names}
        if INSTRUCTOR not in cell.metadata.get("tags", ()):
            made.cells.append(_cell(cell, answers))
    if found:
        made.cells.insert(1, _note())
    made.metadata = from_dict({key: notebook.metadata[key] for key in ("kernelspec", "language_info")})
    return made


def write_student_version(notebook: Any, target: Path, file: str) -> Path:
    """Replace `target` by the student version in one step."""
    import nbformat

    made = student_version(notebook, file)
    nbformat.validate(made)
    return atomic.write_text(target, nbformat.writes(made) + "\n")


def _cell(cell: Any, answers: set[str]) -> Any:
    from nbformat import from_dict

    about = exercises.marks(cell)
    made = from_dict({"cell_type": cell.cell_type, "id": cell.id, "metadata": {}, "source": cell.source})
    made.metadata = {key: cell.metadata[key] for key in ("tags", "nbgrader") if key in cell.metadata}
    if about.get("locked"):
        made.metadata |= {"editable": False, "deletable": False}
    elif about:
        made.metadata["deletable"] = False
    if cell.cell_type == "code":
        made.source = exercises.without_hidden_tests(exercises.without_solution(cell.source))
        made.outputs, made.execution_count = [], None
        if not about.get("solution") and answers & slicing.use_of(made.source).reads:
            made.metadata["tags"] = [*dict.fromkeys([*made.metadata.get("tags", []), MAY_RAISE])]
    made.metadata = from_dict(made.metadata)
    return made


def _note() -> Any:
    from nbformat import from_dict

    return from_dict({"cell_type": "markdown", "id": "student-note", "metadata": {}, "source": NOTE})
