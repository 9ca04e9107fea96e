"""What is installed here, whether it fits, and what the machine has: one line each."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from sysdpo_lab import errors, paths

DISTRIBUTION = "sysdpo-lab"


@dataclass(frozen=True)
class Finding:
    """One line of the report. OK: as it should be; missing: optional and not here; FAIL: must be repaired."""

    status: Literal["OK", "missing", "FAIL"]
    text: str

    def __str__(self) -> str:
        return f"{self.status:8}{self.text}"


def run_doctor(stream: TextIO | None = None) -> int:
    """Print one line for Python, each dependency, the device, the memory and the packaged models.

    Args:
        stream: where to print; standard output by default.

    Returns:
        1 if something required is missing or something installed does not fit, else 0: the exit code.

    >>> import io
    >>> run_doctor(stream := io.StringIO()) in (0, 1), "torch" in stream.getvalue()
    (True, True)
    """
    stream = stream or sys.stdout
    failed = 0
    for finding in findings():
        print(finding, file=stream, flush=True)
        failed += finding.status == "FAIL"
    print(f"{failed} to repair" if failed else "all that is required is here", file=stream)
    return int(failed > 0)


def findings() -> Iterator[Finding]:
    """All findings, in the order in which they are printed."""
    if importlib.util.find_spec("packaging") is None:
        yield Finding("FAIL", "packaging is not installed, so no version can be checked: pip install packaging")
        return
    requires_python, lines = asked_for()
    yield python_finding(platform.python_version(), requires_python)
    yield from dependency_findings(lines)
    yield device_finding()
    yield memory_finding()
    for weights in (paths.SMOLLM2, paths.MINILM):
        yield weights_finding(weights)


def asked_for() -> tuple[str, list[str]]:
    """(range of Python, requirement lines), from the checkout's pyproject.toml or else the installed metadata."""
    checkout = paths.repository_folder()
    if checkout:
        return pyproject_requirements(checkout / "pyproject.toml")
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    return metadata["Requires-Python"], importlib.metadata.requires(DISTRIBUTION) or []


def pyproject_requirements(path: Path) -> tuple[str, list[str]]:
    """(range of Python, requirement lines with an extra's name as a marker), as installed metadata has them."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).items()
    return project["requires-python"], [
        *project["dependencies"],
        *(f'{line}; extra == "{extra}"' for extra, lines in extras for line in lines),
    ]


def python_finding(version: str, asked: str) -> Finding:
    """Whether this Python is in the range.

    >>> print(python_finding("3.10.2", ">=3.11,<3.15").status)
    FAIL
    """
    from packaging.specifiers import SpecifierSet

    fits = SpecifierSet(asked).contains(version, prereleases=True)
    machine = f"{platform.system()} {platform.machine()}"
    return Finding("OK" if fits else "FAIL", f"Python {version} (asked: {asked}), {machine}")


def dependency_findings(lines: Iterable[str]) -> Iterator[Finding]:
    """One finding for each required or optional distribution; the core ones are imported too."""
    from packaging.requirements import Requirement

    seen = set()
    for line in lines:
        requirement = Requirement(line)
        name = requirement.name.lower()
        if name != DISTRIBUTION and name not in seen:
            seen.add(name)
            extra = re.search(r'extra == "([\w-]+)"', line)
            yield dependency_finding(requirement, extra[1] if extra else None)


def dependency_finding(requirement, extra: str | None) -> Finding:
    """Whether one distribution is here, in the range asked for, and (if it is a core one) can be imported."""
    name, asked = requirement.name, str(requirement.specifier)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if extra:
            return Finding("missing", f"{name} (asked: {asked}), optional: pip install 'sysdpo-lab[{extra}]'")
        return Finding("FAIL", f"{name} is not installed (asked: {asked}): make setup, or pip install -e .")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("FAIL", f"{name} {version} is outside the range asked for: {asked}")
    if extra is None and (problem := import_problem(name)):
        return Finding("FAIL", f"{name} {version}: {problem}")
    return Finding("OK", f"{name} {version} (asked: {asked})")


def import_problem(distribution: str) -> str | None:
    """What goes wrong when the distribution's module of the same name is imported; None if nothing.

    >>> import_problem("no-such-thing")
    "cannot be imported: No module named 'no_such_thing'"
    """
    try:
        importlib.import_module(distribution.replace("-", "_"))
    except Exception as error:  # whatever a broken installation raises belongs into the report
        return f"cannot be imported: {error}"
    return None


def device_finding() -> Finding:
    """CPU cores that this process may use, and the accelerators that torch sees."""
    try:
        import torch
    except Exception as error:
        return Finding("FAIL", f"device: torch cannot be imported: {error}")
    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("Apple GPU (mps)")
    return Finding("OK", f"device: {cpu_cores()} CPU cores; {', '.join(found) or 'no GPU'}")


def cpu_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_finding() -> Finding:
    """Memory that this process may use; the real-model runs on CPU need about 3 GB."""
    total = memory_gib()
    return Finding("OK", f"memory: {total:.1f} GiB" if total else "memory: not known on this system")


def memory_gib() -> float | None:
    """The smaller of the machine's memory and the container's limit, in GiB; None where neither can be read."""
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        sizes.append(int(text))
    return min(sizes) / 2**30


def weights_finding(weights: paths.PackagedWeights) -> Finding:
    """Whether a packaged small model is here, with the weights file that its hash names."""
    try:
        path = weights.verified_path()
    except errors.MissingWeightsError as error:
        return Finding("missing", f"{error} (optional: real models without a network)")
    except errors.WeightsHashError as error:
        return Finding("FAIL", str(error))
    return Finding("OK", f"{weights.title}: {path.name}, {path.stat().st_size / 1e6:.0f} MB, SHA-256 verified")
