"""Asking a saved system: all intermediates are shown, trained or start, one by one or in a batch."""

import io

import pytest
import torch

from sysdpo_lab import CompoundSystem, asking, cli, errors
from sysdpo_lab.components import Categorical, CausalLM
from sysdpo_lab.worlds import restaurants, tiny_lm

FACTS = [
    "name: Old Mill | food: Thai | price: cheap",
    "name: Red Lion | food: Italian",
    "name: Wok Inn | area: riverside | price: high",
]


def two_llms() -> CompoundSystem:
    model, tokenizer = tiny_lm.load_tiny_lm()
    options = {"adapter": 2, "max_new_tokens": 30}
    draft = CausalLM("draft", ["x"], model, tokenizer, restaurants.TINY_DRAFT, **options)
    refine = CausalLM("refine", ["x", "draft"], model, tokenizer, restaurants.TINY_REFINE, **options)
    return CompoundSystem([draft, refine], inputs=("x",), output="refine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    system = two_llms()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in system.trainable_parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return system.save(tmp_path_factory.mktemp("saved") / "system")


def test_a_batch_gives_what_single_questions_give(folder):
    system = CompoundSystem.load(folder)
    together = asking.ask(system, FACTS, batch_size=3)
    assert together == [answer for question in FACTS for answer in asking.ask(system, [question])]
    assert [list(answer) for answer in together] == [["x", "draft", "refine"]] * 3
    trace = system.generate({"x": FACTS})
    assert [a["draft"] for a in together] == [d.text for d in trace["draft"]]


def test_the_start_answers_differently_from_the_trained_system(folder):
    system = CompoundSystem.load(folder)
    start = asking.ask(system, FACTS, start=True)
    assert start == asking.ask(two_llms(), FACTS) != asking.ask(system, FACTS)


def test_sampling_repeats_with_its_generator_and_leaves_the_global_one_alone(folder):
    system, before = CompoundSystem.load(folder), torch.get_rng_state()
    first, second, other = (
        asking.ask(system, FACTS, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first == second != other and torch.equal(before, torch.get_rng_state())


def test_questions_that_cannot_be_asked_are_named():
    table = Categorical("z", {"x": 2}, 2, [[0.9, 0.1], [0.2, 0.8]])
    system = CompoundSystem([table], inputs=("x",), output="z")
    with pytest.raises(errors.EmptyAnswerError, match="question 1: x is empty"):
        asking.ask(system, ["0", " "])
    with pytest.raises(errors.ValueRangeError, match="0 to 1"):
        asking.ask(system, ["why?"])
    with pytest.raises(errors.UnknownComponentError, match=r"question 0.*\['x'\]"):
        asking.ask(system, [{"y": 1}])
    assert asking.ask(system, []) == []


def test_the_command_shows_the_intermediates(folder, capsys):
    assert cli.main(["ask", str(folder), FACTS[0]]) == 0
    shown = capsys.readouterr().out
    (answer,) = asking.ask(CompoundSystem.load(folder), FACTS[:1])
    assert f"  draft: {answer['draft']}\n> refine: {answer['refine']}\n" in shown


def test_the_command_reads_questions_from_standard_input(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*FACTS[:2], "", ""])))
    assert cli.main(["ask", str(folder), "--start"]) == 0
    assert capsys.readouterr().out.count("> refine:") == 2


def test_a_folder_that_holds_no_system_is_a_named_error(tmp_path, capsys):
    assert cli.main(["ask", str(tmp_path), "hello"]) == 2
    assert "SaveFormatError" in capsys.readouterr().err
