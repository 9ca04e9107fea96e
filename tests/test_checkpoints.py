"""Checkpoints hold what they were given, survive damage and kills, and never replace a good one by a bad one."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sysdpo_lab import atomic, checkpoints, errors
from sysdpo_lab.checkpoints import Checkpoint
from sysdpo_lab.components import Completion

VALUES = {
    "plain": [1, 2.5, "text", None, True],
    "infinite": [float("-inf"), float("inf")],
    "completion": Completion("a cat", (5, 6, 2), True),
    "tensor": torch.tensor([[1, 2], [3, 4]]),
    "nested": {"sets": {"abc": [Completion("b", (1,)), torch.tensor(0.5, dtype=torch.float64)]}},
}


def simple(step: int) -> Checkpoint:
    return Checkpoint(step, {"weights/y": torch.full((3,), float(step), dtype=torch.float64)}, {"epoch": step})


def test_every_kind_of_value_comes_back_as_it_was(tmp_path):
    tensors = {"half": torch.randn(4).bfloat16(), "state": torch.Generator().manual_seed(1).get_state()}
    found = checkpoints.load(checkpoints.save(tmp_path, Checkpoint(7, tensors, VALUES)))
    assert found.step == 7
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    assert found.state["plain"] == VALUES["plain"] and found.state["infinite"] == VALUES["infinite"]
    assert found.state["completion"] == VALUES["completion"]
    assert (found.state["completion"].text, found.state["completion"].truncated) == ("a cat", True)
    assert torch.equal(found.state["tensor"], VALUES["tensor"])
    nested = found.state["nested"]["sets"]["abc"]
    assert nested[0].token_ids == (1,) and nested[1].dtype == torch.float64 and nested[1].item() == 0.5


def test_nan_stays_nan_and_is_not_written_as_json_that_others_cannot_read(tmp_path):
    folder = checkpoints.save(tmp_path, Checkpoint(1, {"a": torch.zeros(1)}, {"x": float("nan")}))
    text = (folder / checkpoints.STATE).read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert checkpoints.load(folder).state["x"] != checkpoints.load(folder).state["x"]


def test_tensors_that_share_memory_are_stored_apart(tmp_path):
    base = torch.arange(4.0)
    found = checkpoints.load(checkpoints.save(tmp_path, Checkpoint(1, {"a": base, "b": base, "c": base[1:3]})))
    assert torch.equal(found.tensors["a"], base) and torch.equal(found.tensors["c"], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("value", [object(), {1: 2}, {"$tensor": "x"}, {1, 2}])
def test_a_value_that_cannot_be_stored_is_named_and_leaves_nothing(tmp_path, value):
    with pytest.raises(errors.CheckpointError, match="state: a checkpoint"):
        checkpoints.save(tmp_path, Checkpoint(1, {}, {"bad": value}))
    assert checkpoints.folders(tmp_path) == []


def test_the_newest_two_are_kept_in_order_of_steps_not_of_names(tmp_path):
    for step in (9, 10, 999_999, 1_000_000):
        checkpoints.save(tmp_path, simple(step))
    assert [path.name for path in checkpoints.folders(tmp_path)] == ["step-1000000", "step-999999"]
    assert checkpoints.newest(tmp_path).step == 1_000_000
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1000000", "step-999999"]


def test_writing_a_step_again_replaces_it(tmp_path):
    checkpoints.save(tmp_path, simple(3))
    again = Checkpoint(3, {"weights/y": torch.zeros(1)}, {"epoch": 8})
    checkpoints.save(tmp_path, again)
    assert checkpoints.newest(tmp_path).state == {"epoch": 8}


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "a flipped bit in the tensors": lambda folder: flip_a_byte(folder / checkpoints.TENSORS),
    "tensors cut off": lambda folder: os.truncate(folder / checkpoints.TENSORS, 20),
    "no tensors": lambda folder: (folder / checkpoints.TENSORS).unlink(),
    "no state": lambda folder: (folder / checkpoints.STATE).unlink(),
    "state cut off": lambda folder: os.truncate(folder / checkpoints.STATE, 10),
    "state is a list": lambda folder: (folder / checkpoints.STATE).write_text("[]"),
    "another format": lambda folder: (folder / checkpoints.STATE).write_text('{"format": "other/1"}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, damage):
    for step in (1, 2):
        checkpoints.save(tmp_path, simple(step))
    damage(checkpoints.folder_of(tmp_path, 2))
    with pytest.warns(errors.DamagedCheckpointWarning, match="step-000002"):
        assert checkpoints.newest(tmp_path).step == 1


def test_when_all_are_damaged_nothing_is_guessed(tmp_path):
    checkpoints.save(tmp_path, simple(1))
    DAMAGE["no state"](checkpoints.folder_of(tmp_path, 1))
    with pytest.warns(errors.DamagedCheckpointWarning), pytest.raises(errors.CheckpointError, match="all 1 checkpoints"):
        checkpoints.newest(tmp_path)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert checkpoints.newest(tmp_path / "nowhere") is None


def test_an_error_while_writing_leaves_the_old_ones(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, simple(1))
    monkeypatch.setattr(checkpoints, "_sha256", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(tmp_path, simple(2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_cleaning_removes_what_a_kill_left_and_nothing_else(tmp_path):
    checkpoints.save(tmp_path, simple(1))
    (tmp_path / "checkpoints" / ".step-000002.abcd.tmp").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    checkpoints.clean(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["notes", "step-000001"]


def test_cleaning_puts_back_a_checkpoint_that_was_being_replaced(tmp_path):
    folder = checkpoints.save(tmp_path, simple(1))
    folder.rename(atomic._old(folder))
    checkpoints.clean(tmp_path)
    assert checkpoints.newest(tmp_path).step == 1


KILLED = """
import os, shutil, signal, sys, torch
import safetensors.torch as st
from sysdpo_lab import atomic, checkpoints
from sysdpo_lab.checkpoints import Checkpoint

rmtree = shutil.rmtree
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def die_at_the_oldest(path, **options): die() if "step-000001" in str(path) else rmtree(path, **options)

def child(out, moment):
    for step in (1, 2):
        checkpoints.save(out, Checkpoint(step, {"a": torch.full((3,), float(step))}, {"epoch": step}))
    if moment == "before the tensors": st.save_file = die
    if moment == "before the rename": atomic._swap_in = die
    if moment == "after the rename": checkpoints._remove = die
    if moment == "while the old one goes": shutil.rmtree = die_at_the_oldest
    checkpoints.save(out, Checkpoint(3, {"a": torch.full((3,), 3.0)}, {"epoch": 3}))
    os._exit(0)

for out, moment in zip(sys.argv[1::2], sys.argv[2::2]):
    number = os.fork() or child(out, moment)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == -signal.SIGKILL, moment
"""
LEFT = {"before the tensors": 2, "before the rename": 2, "after the rename": 3, "while the old one goes": 3}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One forked process for each moment, killed there by signal 9."""
    outs = {moment: tmp_path_factory.mktemp("killed") for moment in LEFT}
    arguments = [text for moment, out in outs.items() for text in (str(out), moment)]
    subprocess.run([sys.executable, "-c", KILLED, *arguments], check=True, timeout=120)
    return outs


@pytest.mark.parametrize("moment", LEFT)
def test_a_kill_during_a_write_leaves_a_whole_checkpoint(killed, moment):
    out = killed[moment]
    found = checkpoints.newest(out)
    assert found.step == LEFT[moment] and found.tensors["a"].tolist() == [float(found.step)] * 3
    checkpoints.clean(out)
    checkpoints.save(out, simple(4))
    assert [path.name for path in checkpoints.folders(out)] == ["step-000004", f"step-{LEFT[moment]:06d}"]
    assert len(list((out / "checkpoints").iterdir())) == 2
