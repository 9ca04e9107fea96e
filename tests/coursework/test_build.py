"""Two builds give the same bytes; a failing cell is named; a stale notebook is found out."""

import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from sysdpo_lab import errors
from sysdpo_lab.coursework import build

ROOT = Path(__file__).parents[2]
LESSON = """# %% [markdown]
# # A small lesson

# %%
import os

from sysdpo_lab import figures
from sysdpo_lab.widgets import SliderFigure, slider


def draw(beta):
    figure, (ax,) = figures.new_figure(width=3, height=2)
    ax.plot([0, 1], [0, beta])
    return figure


# %% tags=["nbval-ignore-output"]
for number in range(200):
    print(number, flush=True)

# %%
figures.show(draw(2), alt="a line that rises to 2")

# %%
SliderFigure(draw, alt="a line that rises to beta", beta=slider(1, 0, 5))

# %%
print(os.environ.get("SYSDPO_PROFILE"), os.environ["HF_HUB_OFFLINE"])

# %%
"""


def write_source(folder, text, name="00_small"):
    (folder / "sources").mkdir(parents=True, exist_ok=True)
    source = folder / "sources" / f"{name}.py"
    source.write_text(text)
    return source, folder / f"{name}.ipynb"


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    """A built lesson, its source, and the bytes of a first build."""
    folder = tmp_path_factory.mktemp("notebooks")
    source, target = write_source(folder, LESSON)
    first = build.build(source, target).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "agg")
        patch.setenv("SYSDPO_PROFILE", "paper")
        build.build(source, target)
    return source, target, first


def outputs(target):
    return [output for cell in nbformat.read(target, 4).cells for output in cell.get("outputs", ())]


# --- building ---------------------------------------------------------------------------------------------------------


def test_two_builds_give_the_same_bytes_whatever_the_environment(lesson):
    _, target, first = lesson
    assert target.read_bytes() == first
    assert outputs(target)[-1].text == "None 1\n"


def test_a_built_notebook_is_valid_run_in_order_and_names_no_machine(lesson):
    _, target, _ = lesson
    notebook = nbformat.read(target, 4)
    nbformat.validate(notebook)
    assert [c.execution_count for c in notebook.cells if c.get("execution_count")] == [1, 2, 3, 4, 5]
    assert notebook.metadata == {"kernelspec": build.KERNEL, "language_info": {"name": "python"}}
    assert str(target.parent) not in target.read_text()
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_figures_and_sliders_are_kept_as_pictures_with_alt_text(lesson):
    _, target, _ = lesson
    pictures = [output for output in outputs(target) if "image/png" in output.get("data", {})]
    assert [output.metadata["image/png"]["alt"] for output in pictures] == [
        "a line that rises to 2",
        "a line that rises to beta",
    ]
    assert not any(build.WIDGET_VIEW in output.get("data", {}) for output in outputs(target))
    cells = nbformat.read(target, 4).cells
    assert [c.metadata.mystnb.image.alt for c in cells if "mystnb" in c.metadata][0] == "a line that rises to 2"


def test_what_was_printed_in_pieces_is_stored_as_one(lesson):
    _, target, _ = lesson
    streams = [output.text for output in outputs(target) if output.output_type == "stream"]
    assert streams[0] == "".join(f"{number}\n" for number in range(200))


def test_strict_nbval_passes_on_the_built_notebook(lesson):
    _, target, _ = lesson
    (target.parent / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    options = ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={ROOT / 'nbval-sanitize.cfg'}"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", target.parent, *options]
    done = subprocess.run([*command, target], cwd=target.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_streams_of_different_names_stay_apart():
    cell = new_code_cell("1")
    texts = [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")]
    cell.outputs = [new_output("stream", name=name, text=text) for name, text in texts]
    build.tidy(new_notebook(cells=[cell]))
    assert [(o.name, o.text) for o in cell.outputs] == [("stdout", "ab"), ("stderr", "c"), ("stdout", "d")]


# --- failing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [("1 / 0", "ZeroDivisionError"), ("import os; os._exit(1)", "died")],
    ids=["error", "dead kernel"],
)
def test_a_failing_cell_is_named_and_the_old_notebook_stays(tmp_path, capsys, line, words):
    _, target = write_source(tmp_path, f"# %%\nprint(1)\n\n# %%\n{line}\n\n# %%\nprint(2)\n", "03_broken")
    target.write_text("old")
    assert build.main(["--folder", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert f"03_broken.py, code cell 2 of 3: {line}" in message and words in message
    assert "\x1b[" not in message
    assert target.read_text() == "old"


def test_an_unknown_name_is_answered_with_those_that_exist(tmp_path, capsys):
    write_source(tmp_path, "# %%\n1\n")
    assert build.main(["07", "--folder", str(tmp_path)]) == 1
    assert "no lesson '07'; there are 00_small" in capsys.readouterr().err


# --- checking ---------------------------------------------------------------------------------------------------------


def test_a_fresh_notebook_agrees_with_its_source(lesson, capsys):
    source, target, _ = lesson
    assert build.differences(source, target) == []
    assert build.main(["--check", "00", "--folder", str(target.parent)]) == 0
    assert "agrees" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("range(200)", "range(100)", "cell 3 differs in its text"),
        ("# # A small", "# # Another", "cell 1 differs in its text"),
        (' tags=["nbval-ignore-output"]', "", "cell 3 differs in its tags"),
        ("# %% [markdown]\n", "# %%\n", "cell 1 differs in its type"),
        ("\n# %%\nprint(os", "\nprint(os", "7 cells, the source has 6"),
    ],
)
def test_each_kind_of_edit_of_the_source_is_found(lesson, tmp_path, old, new, found):
    _, target, _ = lesson
    source, _ = write_source(tmp_path, LESSON.replace(old, new))
    assert found in build.differences(source, target)


def test_a_notebook_that_was_cleared_or_is_missing_is_found(lesson, tmp_path, capsys):
    source, target, _ = lesson
    notebook = nbformat.read(target, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    cleared = tmp_path / "00_small.ipynb"
    nbformat.write(notebook, cleared)
    found = build.differences(source, cleared)
    assert any("not run" in line for line in found) and "no cell has an output" in found
    write_source(tmp_path, LESSON, "01_new")
    assert build.main(["--check", "01", "--folder", str(tmp_path)]) == 1
    assert "missing" in capsys.readouterr().out


def test_ids_come_from_the_position_so_that_an_edit_changes_one_cell(tmp_path):
    source, _ = write_source(tmp_path, "# %%\n1\n\n# %%\n2\n")
    before = [cell.id for cell in build.read_source(source).cells]
    source.write_text("# %%\n1\n\n# %%\n3\n\n# %%\n4\n")
    assert [cell.id for cell in build.read_source(source).cells][:2] == before


def test_marks_of_exercises_survive_for_a_student_version(tmp_path):
    mark = '{"grade": false, "grade_id": "loss", "locked": false, "schema_version": 3, "solution": true, "task": false}'
    source, _ = write_source(tmp_path, f'# %% tags=["a"] nbgrader={mark}\n1\n')
    cell = build.read_source(source).cells[0]
    assert cell.metadata.tags == ["a"] and cell.metadata.nbgrader.grade_id == "loss"


MARK = '{"grade": false, "grade_id": "loss", "locked": false, "schema_version": 3, "solution": true, "task": false}'
EXERCISE = f"""# %% [markdown]
# # Small

# %%
print("run")

# %% nbgrader={MARK}
def loss():
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION

# %% nbgrader={
    MARK.replace('"grade": false', '"grade": true, "points": 1')
    .replace('"loss"', '"loss-test"')
    .replace('"locked": false', '"locked": true')
    .replace('"solution": true', '"solution": false')
}
assert loss() == 1
"""


def test_one_command_writes_both_versions_and_executes_only_what_is_stale(tmp_path, capsys):
    source, target = write_source(tmp_path, EXERCISE)
    assert build.main(["--student", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "wrote student/00_small.ipynb\nbuilt 00_small.ipynb\n"
    before = target.stat().st_mtime_ns
    assert build.main(["--student", "00", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "wrote student/00_small.ipynb\n" and target.stat().st_mtime_ns == before
    made = nbformat.read(tmp_path / "student" / "00_small.ipynb", 4)
    assert "NotImplementedError" in made.cells[3].source and not any(cell.get("outputs") for cell in made.cells)
    assert "### BEGIN SOLUTION" in target.read_text(), "nbgrader makes its own student version from these marks"
    source.write_text(EXERCISE.replace('"points": 1', '"points": 2'))
    assert build.differences(source, target) == ["cell 4 differs in its nbgrader marks"]


@pytest.mark.parametrize("option", [[], ["--student"]], ids=["build", "student"])
def test_a_slip_in_a_marker_is_told_before_anything_is_run(tmp_path, capsys, option):
    _, target = write_source(tmp_path, EXERCISE.replace("    ### END SOLUTION\n", ""))
    assert build.main([*option, "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "00_small.py, cell 3 (loss): SOLUTION is begun and never ended\n"
    assert not target.exists() and not (tmp_path / "student").exists()


def test_jupyterlab_opens_a_notebook_that_is_newer_than_its_source():
    # jupytext answers 400 for a pair whose .ipynb is newer, which each built notebook is
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["jupytext"]
    assert "formats" not in settings


def test_helper_modules_beside_the_lessons_are_no_lessons(tmp_path):
    write_source(tmp_path, "x = 1\n", "helper")
    assert build.pairs(tmp_path) == []


def test_an_unbuilt_lesson_has_a_named_error(tmp_path):
    with pytest.raises(errors.UnknownOptionError):
        build.pairs(tmp_path, ["00"])
