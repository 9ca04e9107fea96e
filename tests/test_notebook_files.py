"""What nbval does not look at in the stored notebooks, and proof that each of these checks can fail."""

import ast
import re
import socket
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from sysdpo_lab.coursework import build

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|root|Users|usr|opt|tmp|var|work|mnt|private|content)/|\b[A-Z]:\\\\?Users")
MAX_BYTES, MAX_LINES = 650_000, 30  # lesson 08 shows rows of pictures and seventeen figures


def problems(notebook) -> list[str]:
    """What would trouble a reader of the stored notebook, each with its cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    found = []
    # nbval compares nothing in a cell without a count, so that a cleared notebook would pass
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("not run from top to bottom")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("kernel")
    if "widgets" in notebook.metadata:
        found.append("widget state")
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not re.match(r"# \S", first.source):
        found.append("no title")
    for number, cell in enumerate(code, start=1):
        found += [f"{problem} in code cell {number}" for problem in (*source_problems(cell), *output_problems(cell))]
    return found


def source_problems(cell):
    lines = cell.source.rstrip().splitlines()
    if len(lines) > MAX_LINES:
        yield "too long"
    if any(line.rstrip().endswith(";") for line in lines):
        yield "semicolon"
    magics = [line for line in lines if line.startswith(("%", "!"))]
    if any(line.strip() != "%matplotlib inline" for line in magics):
        yield "magic"
    tree = ast.parse("\n".join(line for line in lines if line not in magics))
    # nbval runs cells without keeping a history
    if any(isinstance(node, ast.Name) and node.id in ("In", "Out") for node in ast.walk(tree)):
        yield "history"


def output_problems(cell):
    for output in cell.outputs:
        if output.output_type == "error":
            yield "error"
        if output.output_type == "stream" and output.name == "stderr":
            yield "stderr"
        data = output.get("data", {})
        if build.WIDGET_VIEW in data:
            yield "widget view"
        if "image/png" in data and not output.metadata.get("image/png", {}).get("alt", "").strip():
            yield "figure without alt text"
        texts = [output.get("text", ""), *(str(value) for kind, value in data.items() if not kind.startswith("image/"))]
        if any(ABSOLUTE.search(text) or socket.gethostname() in text.split() for text in texts):
            yield "path or host"


# --- the stored notebooks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_reads_well_without_being_run(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert problems(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_agrees_with_its_source(path):
    assert build.differences(path.parent / "sources" / f"{path.stem}.py", path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_small(path):
    assert path.stat().st_size < MAX_BYTES


def test_each_source_has_its_notebook():
    assert [target for _, target in build.pairs(ROOT / "notebooks")] == NOTEBOOKS


# --- the checks -------------------------------------------------------------------------------------------------------


def good_notebook():
    png = new_output("display_data", {"image/png": "aGk=", "text/plain": "[figure]"})
    png.metadata["image/png"] = {"alt": "a line"}
    cell = new_code_cell("%matplotlib inline\nprint(1 / 2)", execution_count=1)
    cell.outputs = [png, new_output("stream", name="stdout", text="0.5 nats/token, see data/results/\n")]
    metadata = {"kernelspec": dict(build.KERNEL)}
    return new_notebook(cells=[new_markdown_cell("# Title\n\nText"), cell], metadata=metadata)


def print_(notebook, text, name="stdout"):
    notebook.cells[1].outputs.append(new_output("stream", name=name, text=text))


def view(notebook):
    notebook.cells[1].outputs[0].data[build.WIDGET_VIEW] = {"model_id": "1"}


FAULTS = {
    "not run from top to bottom": lambda n: n.cells[1].update(execution_count=None),
    "kernel": lambda n: n.metadata.kernelspec.update(name="my-env"),
    "widget state": lambda n: n.metadata.update(widgets={}),
    "no title": lambda n: n.cells[0].update(source="## Title"),
    "too long in code cell 1": lambda n: n.cells[1].update(source="1\n" * 31),
    "semicolon in code cell 1": lambda n: n.cells[1].update(source="ax.plot(x);"),
    "magic in code cell 1": lambda n: n.cells[1].update(source="%time 1"),
    "history in code cell 1": lambda n: n.cells[1].update(source="Out[1]"),
    "error in code cell 1": lambda n: n.cells[1].outputs.append(new_output("error", ename="E", evalue="", traceback=[])),
    "stderr in code cell 1": lambda n: print_(n, "a warning", "stderr"),
    "widget view in code cell 1": view,
    "figure without alt text in code cell 1": lambda n: n.cells[1].outputs[0].metadata.clear(),
    "path or host in code cell 1": lambda n: print_(n, "saved to /home/ann/run"),
}


def test_a_good_notebook_has_no_problem():
    assert problems(good_notebook()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_notebook_is_found(fault):
    notebook = good_notebook()
    FAULTS[fault](notebook)
    assert problems(notebook) == [fault]


@pytest.mark.parametrize("text", ["/tmp/x", "File '/usr/lib/a.py'", "C:\\Users\\ann", socket.gethostname()])
def test_paths_and_host_names_are_found_in_many_forms(text):
    notebook = good_notebook()
    print_(notebook, text)
    assert problems(notebook) == ["path or host in code cell 1"]
