"""What holds for the repository as a whole: licence, size, imports, and nothing of one machine in it."""

import ast
import hashlib
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sysdpo_lab

ROOT = Path(__file__).parents[1]
LICENCE_WORDS = "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
HEAVY = ("transformers", "diffusers", "peft", "accelerate", "ipywidgets", "matplotlib", "seaborn", "pandas")
MODULES = sorted(module.name for module in pkgutil.walk_packages(sysdpo_lab.__path__, "sysdpo_lab."))
# in pieces, so that this file does not find itself
FORBIDDEN = re.compile("|".join(["/wo" "rk/", r"\.\./sha" "red", "/ro" "ot/", "/tmp/bash_" "jobs", "/opt/" "pypi"]))
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".json", ".jsonl", ".ipynb", ".html", ".svg", ""}


def tracked_files() -> list[Path]:
    """The files that git has, or would take: what it ignores is left out. Without git, what lies in the known folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        tops = ("sysdpo_lab", "tests", "notebooks", "data")
        return [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


FILES = tracked_files()
LAYERS = (  # a module imports from its own line and from those above
    "errors",
    "atomic paths",
    "components loading scoring caches decoding fingerprints progress",
    "system saving",
    "losses samplers",
    "exact alignment",
    "history checkpoints preferences",
    "objectives optimisation summaries options anchoring",
    "training",
    "evaluation figures widgets report profiles results judges sentences diversity",
    "worlds",
    "experiments",
    "asking planning doctor demo cli __main__ coursework",
)
RANK = {top: rank for rank, line in enumerate(LAYERS) for top in line.split()}


# --- files ------------------------------------------------------------------------------------------------------------


def test_no_two_test_files_share_a_name_since_their_folders_are_not_packages():
    names = [path.name for path in FILES if path.name.startswith("test_") and path.suffix == ".py"]
    assert sorted(set(names)) == sorted(names)


def test_the_licence_is_the_apache_licence_word_for_word():
    words = " ".join((ROOT / "LICENSE").read_text().split())
    assert words.startswith("Apache License Version 2.0, January 2004 http://www.apache.org/licenses/")
    assert words.endswith("limitations under the License.")
    # of the text that apache.org publishes, in one line
    assert hashlib.sha256(words.encode()).hexdigest() == LICENCE_WORDS
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_no_file_names_the_machine_that_it_was_made_on():
    texts = [path for path in FILES if path.suffix in TEXT]
    assert len(texts) > 20
    found = [str(path.relative_to(ROOT)) for path in texts if FORBIDDEN.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_data_together_stays_under_40_mb():
    assert sum(path.stat().st_size for path in FILES if path.is_relative_to(ROOT / "data")) < 40e6


def test_each_folder_of_weights_has_a_card():
    # a data set or a checkpoint without origin, command, hash and licence cannot be trusted or repeated
    folders = {path.parent for path in FILES if path.suffix == ".safetensors" and path.is_relative_to(ROOT / "data")}
    lacking = [
        str(folder.relative_to(ROOT))
        for folder in folders
        if not any((above / "CARD.md").is_file() for above in [folder, *folder.parents] if above.is_relative_to(ROOT))
    ]
    assert lacking == []


def test_no_pickled_weights_are_stored():
    assert [path.name for path in FILES if path.suffix in {".pt", ".pth", ".bin", ".pkl", ".ckpt"}] == []


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_each_module_can_be_imported(name):
    if not name.endswith("__main__"):
        importlib.import_module(name)


def test_the_package_is_light_to_import():
    code = (
        "import sys, sysdpo_lab, sysdpo_lab.components\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", MODULES)
def test_no_module_postpones_its_annotations(name):
    # run-time checks of shapes need the annotations themselves, not strings
    assert "from __future__ import annotations" not in module_path(name).read_text(encoding="utf-8")


def module_path(name: str) -> Path:
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported_tops(name: str) -> set[str]:
    """Which parts of the package a module imports when it is itself imported (not inside functions)."""
    found = set()
    for node in ast.parse(module_path(name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    tops = {full.split(".")[1] for full in found if full.startswith("sysdpo_lab.")}
    return {"system" if top == "CompoundSystem" else top for top in tops}  # the one class that the package itself offers


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_upward_only(name):
    own = name.split(".")[1]
    assert own in RANK, f"{own} is new: give it a place in LAYERS"
    assert [top for top in imported_tops(name) if RANK[top] > RANK[own]] == []


def longest_functions(path: Path) -> list[tuple[int, str]]:
    """(lines, name) of the functions of a file, docstrings not counted."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            found.append((node.end_lineno - body[0].lineno + 1, f"{path.name}:{node.name}"))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("name", MODULES)
def test_no_function_is_longer_than_60_lines(name):
    assert [entry for entry in longest_functions(module_path(name)) if entry[0] > 60] == []
