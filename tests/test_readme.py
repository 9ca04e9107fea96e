"""README: its Python runs, and its command lines are ones that exist."""

import re
from pathlib import Path

import pytest

from sysdpo_lab import cli

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted({
    found.removeprefix("python -m sysdpo_lab ")
    for found in re.findall(r"`((?:python -m sysdpo_lab |run |plan |store )[a-z][^`]*)`", TEXT)
})  # fmt: skip


def test_the_ten_lines_align_a_system(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert "[:64]" in code and "steps=20" in code
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    names: dict = {}
    exec(code.replace("[:64]", "[:4]").replace("steps=20", "steps=1"), names)
    assert names["history"][0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert "refine" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_its_command_lines_can_be_typed(command):
    filled = command.replace("EXPERIMENT", "toy").replace("--profile P", "--profile toy")
    assert cli.parser().parse_args(filled.split()).command == filled.split()[0]


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 5 and any(command.startswith("run two-llm") for command in COMMANDS)
