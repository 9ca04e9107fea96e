"""A saved system comes back bit-equal; what cannot be saved or read is answered by name."""

import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from sysdpo_lab import CompoundSystem, errors, saving
from sysdpo_lab.components import Categorical, Component, Tool
from tests import random_systems as rs
from tests.random_systems import longs


def rich():
    """Ties, structural zeros, a Tool, two inputs, a root, moved logits, parts listed out of order."""
    kernel = rs.table(5, 2, 2, zeros=0.3)
    system = CompoundSystem(
        [
            Categorical("z", {"t": 2, "w": 3}, 3, rs.table(2, 2, 3, 3, zeros=0.3), rs.table(3, 2, 3, 3)),
            Tool("t", ["b", "r"], rs.larger, cardinality=2),
            Categorical("b", {"a": 2}, 2, tie="a"),
            Categorical("a", {"x": 2}, 2, kernel, rs.table(6, 2, 2)),
            Categorical("r", {}, 2, [0.25, 0.75]),
        ],
        inputs=("x", "w"),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in system.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return system


def bits(tensor):
    return tensor.detach().view(torch.int64)


def test_everything_comes_back_to_the_bit(tmp_path):
    system = rich()
    with pytest.warns(errors.TiedFreezeWarning):
        system.freeze("a")
    assert system.save(tmp_path / "s") == tmp_path / "s"
    loaded = CompoundSystem.load(tmp_path / "s")  # without a warning: the ties were announced before
    assert loaded.order == system.order and loaded.inputs == ("x", "w") and loaded.output == "z"
    assert [c.name for c in loaded.components] == [c.name for c in system.components]
    for name in ("a", "b", "r", "z"):
        assert torch.equal(bits(loaded[name].logits), bits(system[name].logits))
        assert torch.equal(bits(loaded[name].reference_logits), bits(system[name].reference_logits))
        assert loaded[name].parent_cardinalities == system[name].parent_cardinalities
    assert loaded["a"].logits is loaded["b"].logits and loaded["b"].tie == "a"
    assert loaded["t"].function is rs.larger and loaded["t"].cardinality == 2
    assert [loaded.is_frozen(n) for n in loaded.order] == [system.is_frozen(n) for n in system.order]
    assert loaded.is_frozen("a") and loaded.is_frozen("b") and not loaded.is_frozen("z")
    trace = system.sample({"x": longs(0, 1), "w": longs(2, 0)}, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded.log_prob(trace), system.log_prob(trace))
    with system.reference(), loaded.reference():
        assert torch.equal(loaded.log_prob(trace), system.log_prob(trace))
    assert sorted(loaded.unfreeze("b")) == ["a", "b"] and loaded["a"].logits.requires_grad


def test_saving_twice_replaces_the_folder_and_a_loaded_system_saves_the_same(tmp_path):
    rich().save(tmp_path / "s")
    first = {p.relative_to(tmp_path / "s"): p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
    CompoundSystem.load(tmp_path / "s").save(tmp_path / "s")
    again = {p.relative_to(tmp_path / "s"): p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
    assert first == again
    rs.chain().save(tmp_path / "s")
    assert not list((tmp_path / "s").glob("components/*_t")) and CompoundSystem.load(tmp_path / "s").order == ["y", "z"]


def test_the_folder_holds_graph_card_and_versions(tmp_path):
    rich().save(tmp_path / "s")
    spec = json.loads((tmp_path / "s" / "system.json").read_text())
    assert spec["format"] == "sysdpo-lab-system/1" and spec["versions"]["torch"].startswith("2.")
    card = (tmp_path / "s" / "README.md").read_text()
    assert "| b | Categorical | a | exact | 4 |" in card and "Inputs: x, w. Output: z." in card
    assert not [p for p in (tmp_path / "s").rglob("*") if p.suffix in (".bin", ".pt", ".pkl")]  # safetensors only


def test_names_that_are_no_file_names_are_safe(tmp_path):
    system = CompoundSystem(
        [Categorical("../y z", {"x": 2}, 2), Categorical("__y_z", {"../y z": 2}, 2)], output="__y_z"
    )
    system.save(tmp_path / "deep" / "s")
    assert CompoundSystem.load(tmp_path / "deep" / "s").order == ["../y z", "__y_z"]
    assert [p.name for p in tmp_path.iterdir()] == ["deep"] and [p.name for p in (tmp_path / "deep").iterdir()] == ["s"]


def test_another_process_reads_it(tmp_path):
    system = rich()
    system.save(tmp_path / "s")
    trace = {"x": longs(0), "w": longs(1), "a": longs(0), "r": longs(1), "b": longs(0), "t": longs(1), "z": longs(2)}
    code = (
        "import sys, torch; from sysdpo_lab import CompoundSystem; s = CompoundSystem.load(sys.argv[1]);"
        f"print(s.log_prob({{k: torch.tensor(v) for k, v in { ({k: v.tolist() for k, v in trace.items()})!r}.items()}}).item())"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) == system.log_prob(trace).item()


# --- what cannot be saved -------------------------------------------------------------------------------------------


def local_function():
    def inner(x):
        return x

    return inner


UNSAVABLE = {
    "lambda": lambda x: x,
    "local function": local_function(),
    "partial": functools.partial(rs.larger, 1),
    "bound method": rs.Shift(1).shift,
    "callable object": type("Call", (), {"__call__": lambda self, x: x})(),
}


@pytest.mark.parametrize("kind", UNSAVABLE)
def test_functions_that_cannot_be_imported_are_named_and_leave_the_old_folder(tmp_path, kind):
    rs.chain().save(tmp_path / "s")
    system = CompoundSystem([Tool("t", ["x"], UNSAVABLE[kind]), Categorical("z", {"t": 2, "x": 2}, 2)])
    with pytest.raises(errors.SaveFormatError, match="component 't'.*define it at the top of a module"):
        system.save(tmp_path / "s")
    assert CompoundSystem.load(tmp_path / "s").order == ["y", "z"]
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_only_an_earlier_save_or_an_empty_folder_is_replaced(tmp_path):
    for name in ("mine", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    (tmp_path / "mine" / "system.json").write_text('{"solar": "system"}')
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(errors.SaveFormatError, match="mine holds other files.*name a new folder"):
        rs.chain().save(tmp_path / "mine")
    with pytest.raises(errors.SaveFormatError, match="file is a file"):
        rs.chain().save(tmp_path / "file")
    assert (tmp_path / "mine" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "keep me"
    assert CompoundSystem.load(rs.chain().save(tmp_path / "empty")).order == ["y", "z"]


@pytest.mark.parametrize("function", [rs.larger, rs.upper, abs, max, str.upper, json.dumps])
def test_importable_functions_come_back_as_themselves(function):
    assert saving.function_at(saving.function_path(function)) == function


class Own(Component):
    """Of a kind that the package does not know."""


def test_an_unknown_kind_of_component_is_named(tmp_path):
    with pytest.raises(errors.SaveFormatError, match="'z': Own cannot be saved.*Categorical"):
        CompoundSystem([Own("z", ["x"])]).save(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


# --- broken folders -------------------------------------------------------------------------------------------------


def edit(folder, change):
    path = folder / "system.json"
    spec = json.loads(path.read_text())
    change(spec)
    path.write_text(json.dumps(spec))


def rename_function(folder, path):
    set_config(folder, 1, function=path)


def set_config(folder, number, **values):
    edit(folder, lambda spec: spec["components"][number]["config"].update(values))


def drop_cardinality(folder):
    edit(folder, lambda spec: spec["components"][0]["config"].pop("cardinality"))


def table_of(folder, name):
    return next(folder.glob(f"components/*_{name}")) / "table.safetensors"


def shrink(folder):
    saving.save_tensors(table_of(folder, "z"), {"logits": torch.zeros(2, 2), "reference": torch.zeros(2, 2)})


def lose_reference(folder):
    saving.save_tensors(table_of(folder, "z"), {"logits": saving.load_tensors(table_of(folder, "z"))["logits"]})


BROKEN = {
    "no folder": ("system.json: there is no such file", lambda f: f.rename(f.with_name("elsewhere"))),
    "no graph": ("system.json: there is no such file", lambda f: (f / "system.json").unlink()),
    "no JSON": ("system.json: not a JSON file", lambda f: (f / "system.json").write_text("{")),
    "a list": ("system.json: format is not", lambda f: (f / "system.json").write_text("[]")),
    "another format": ("system.json: format is not", lambda f: edit(f, lambda s: s.update(format="sysdpo-lab-system/9"))),
    "unknown kind": ("'z' is a 'Magic'", lambda f: edit(f, lambda s: s["components"][0].update(kind="Magic"))),
    "no components": ("system.json.*components", lambda f: edit(f, lambda s: s.pop("components"))),
    "no output": ("system.json.*output", lambda f: edit(f, lambda s: s.pop("output"))),
    "no config": ("system.json.*config", lambda f: edit(f, lambda s: s["components"][0].pop("config"))),
    "broken config": ("system.json.*cardinality", drop_cardinality),
    "bad cardinality": ("system.json.*'z'", lambda f: set_config(f, 0, cardinality="3")),
    "wrong output": ("system.json.*'nobody'", lambda f: edit(f, lambda s: s.update(output="nobody"))),
    "tied to nobody": ("system.json.*'nobody'", lambda f: set_config(f, 2, tie="nobody")),
    "frozen nobody": ("system.json.*'nobody'", lambda f: edit(f, lambda s: s.update(frozen=["nobody"]))),
    "component lost": ("components/00_z: the folder of component 'z' is missing",
        lambda f: shutil.rmtree(table_of(f, "z").parent)),
    "table lost": ("00_z/table.safetensors: there is no such file", lambda f: table_of(f, "z").unlink()),
    "table cut": ("table.safetensors: not a safetensors file", lambda f: os.truncate(table_of(f, "z"), 40)),
    "table empty": ("table.safetensors: not a safetensors file", lambda f: table_of(f, "z").write_bytes(b"")),
    "another shape": ("table.safetensors: 'logits' is missing or of another shape", shrink),
    "no reference": ("table.safetensors: 'reference' is missing", lose_reference),
    "function gone": ("'tests.random_systems:nowhere' cannot be imported",
        lambda f: rename_function(f, "tests.random_systems:nowhere")),
    "module gone": ("'no_such_module:f' cannot be imported",
        lambda f: rename_function(f, "no_such_module:f")),
    "outside the folder": ("system.json.*outside", lambda f: edit(f, lambda s: s["components"][0].update(folder="../other"))),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_answered_by_name(tmp_path, case):
    message, damage = BROKEN[case]
    (tmp_path / "other").mkdir()
    folder = rich().save(tmp_path / "s")
    damage(folder)
    with pytest.raises(errors.SaveFormatError, match=message):
        CompoundSystem.load(folder)
