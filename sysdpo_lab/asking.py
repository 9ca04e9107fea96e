"""Ask a trained system one's own question: the answer, with every intermediate that led to it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from sysdpo_lab import errors
from sysdpo_lab.components.base import take_rows
from sysdpo_lab.system import CompoundSystem

Question = str | int | Mapping[str, Any]


def ask(
    system: CompoundSystem,
    questions: Sequence[Question],
    *,
    start: bool = False,
    generator: torch.Generator | None = None,
    batch_size: int = 8,
) -> list[dict[str, Any]]:
    """Run a system on questions: one {variable: value} a question, inputs first, then in the order of the graph.

    Args:
        system: for instance `CompoundSystem.load(folder)`.
        questions: a text each (a whole number where the input is a table's), or {input: value} for several inputs.
        start: True asks the frozen start instead of the trained policy.
        generator: samples every component with it; None decodes greedily.
        batch_size: questions at once; greedy answers do not depend on it (to rounding of the model).

    Raises:
        EmptyAnswerError: a question without any character.
        UnknownComponentError: an input is missing or unknown.

    >>> from sysdpo_lab.components import Categorical
    >>> table = Categorical("z", {"x": 2}, 2, [[0.9, 0.1], [0.2, 0.8]])
    >>> ask(CompoundSystem([table], inputs=("x",), output="z"), ["0", 1])
    [{'x': 0, 'z': 0}, {'x': 1, 'z': 1}]
    """
    rows = [_inputs(system, question, row) for row, question in enumerate(questions)]
    found: list[dict[str, Any]] = []
    with system.reference() if start else nullcontext():
        for first in range(0, len(rows), batch_size):
            found += _answers(system, rows[first : first + batch_size], generator)
    return found


def _answers(system: CompoundSystem, rows: list[dict], generator: torch.Generator | None) -> list[dict[str, Any]]:
    batch = {name: _column(system, name, [row[name] for row in rows]) for name in system.inputs}
    trace = system.generate(batch) if generator is None else system.sample(batch, generator=generator)
    names = [*system.inputs, *system.order]
    return [{name: _shown(take_rows(trace[name], [row])[0]) for name in names} for row in range(len(rows))]


def _inputs(system: CompoundSystem, question: Question, row: int) -> dict[str, Any]:
    given = dict(question) if isinstance(question, Mapping) else {system.inputs[0]: question}
    if set(given) != set(system.inputs):
        raise errors.UnknownComponentError(
            f"question {row}: the system's inputs are {list(system.inputs)}, found {sorted(given)}; name each of them"
        )
    for name, value in given.items():
        if isinstance(value, str) and not value.strip():
            raise errors.EmptyAnswerError(f"question {row}: {name} is empty")
    return given


def _column(system: CompoundSystem, name: str, values: list) -> Any:
    """Whole numbers become a tensor where a table reads the input; everything else stays as it is."""
    if name in system.cardinalities:
        try:
            return torch.tensor([int(value) for value in values])
        except (TypeError, ValueError):
            size = system.cardinalities[name]
            raise errors.ValueRangeError(f"{name} takes whole numbers from 0 to {size - 1}, found {values}") from None
    return values


def _shown(value: Any) -> Any:
    if hasattr(value, "text"):
        return value.text
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def lines(answer: Mapping[str, Any], output: str) -> Iterator[str]:
    """An answer for people: inputs and intermediates indented, the output last and marked.

    >>> print("\\n".join(lines({"x": "hi", "draft": "hey", "z": "hello"}, "z")))
      x: hi
      draft: hey
    > z: hello
    """
    for name, value in answer.items():
        if name != output:
            yield f"  {name}: {'(not called)' if value is None else value}"
    yield f"> {output}: {answer[output]}"
