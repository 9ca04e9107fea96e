"""Preference pairs (x, chosen, rejected): validated, collated into batches, read from and written to JSONL."""

import json
import numbers
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sysdpo_lab import atomic, errors
from sysdpo_lab.components.base import Batch, batch_length
from sysdpo_lab.components.completion import Completion

Trace = dict[str, Any]


# --- pairs in memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One comparison: for the same inputs, `chosen` was preferred to `rejected`.

    Args:
        inputs: one value for each input of the system.
        chosen, rejected: values of the system's output (only finals are in the data), or two whole traces
            {variable: value}, with or without the inputs.
        meta: anything else that came with the pair (scores, source, ...); training never reads it.
    """

    inputs: dict[str, Any]
    chosen: Any
    rejected: Any
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def is_trace(self) -> bool:
        """Whether the pair holds whole traces rather than finals."""
        return isinstance(self.chosen, Mapping)


@dataclass(frozen=True)
class PairBatch:
    """Several pairs, variable by variable.

    Args:
        inputs: {input: batch}.
        chosen, rejected: batches of outputs, or {variable: batch} with the inputs (whole traces).
        rows: index of each pair in the `Pairs` that it came from.
    """

    inputs: dict[str, Batch]
    chosen: Batch | dict[str, Batch]
    rejected: Batch | dict[str, Batch]
    rows: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_trace(self) -> bool:
        """Whether the batch holds whole traces rather than finals."""
        return isinstance(self.chosen, Mapping)


class Pairs(Sequence):
    """A validated sequence of pairs; an index gives a `Pair`, a slice gives `Pairs`.

    Args:
        rows: the pairs; all with the same inputs, and all finals or all whole traces over the same variables.
        source: where they came from, for error messages.
        may_be_empty: variables of a trace whose text may be empty (a tool's result, say).

    Raises:
        PairFormatError: mixed finals and traces, or rows with different variables.
        EmptyAnswerError, IdenticalPairError, NonFiniteError, InputMismatchError: named with the row.

    >>> pairs = Pairs([Pair({"x": 0}, 1, 2), Pair({"x": 1}, 0, 2)])
    >>> pairs.batch([1, 0]).chosen
    tensor([0, 1])
    """

    def __init__(self, rows: Iterable[Pair], source: str = "", may_be_empty: Sequence[str] = ()):
        self.source = source
        self._rows = [_checked(pair, row, source, may_be_empty) for row, pair in enumerate(rows)]
        _check_same_variables(self._rows, source)

    @classmethod
    def _trusted(cls, rows: list[Pair], source: str) -> "Pairs":
        pairs = cls.__new__(cls)
        pairs._rows, pairs.source = rows, source
        return pairs

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._trusted(self._rows[index], self.source)
        return self._rows[index]

    def __repr__(self) -> str:
        kind = "whole traces" if self.is_trace else "finals"
        return f"Pairs({len(self)} pairs of {kind}{', from ' + self.source if self.source else ''})"

    @property
    def is_trace(self) -> bool:
        """Whether the pairs hold whole traces rather than finals."""
        return bool(self._rows) and self._rows[0].is_trace

    def select(self, rows: Iterable[int] | Tensor) -> "Pairs":
        """The pairs with the given indices, in that order."""
        return self._trusted([self._rows[int(row)] for row in rows], self.source)

    def batch(self, rows: Iterable[int] | Tensor) -> PairBatch:
        """The pairs with the given indices, collated; the pairs themselves are not changed."""
        rows = [int(row) for row in rows]
        chosen_rows = [self._rows[row] for row in rows]
        inputs = _collate_dicts([pair.inputs for pair in chosen_rows])
        sides = ([pair.chosen for pair in chosen_rows], [pair.rejected for pair in chosen_rows])
        if self.is_trace:
            chosen, rejected = ({**inputs, **_collate_dicts(side)} for side in sides)
        else:
            chosen, rejected = map(collate, sides)
        return PairBatch(inputs, chosen, rejected, rows)

    @classmethod
    def from_finals(cls, inputs: Mapping[str, Batch], chosen: Batch, rejected: Batch, source: str = "") -> "Pairs":
        """Pairs of finals from batches.

        >>> Pairs.from_finals({"x": ["a", "b"]}, ["yes", "no"], ["no", "yes"])
        Pairs(2 pairs of finals)
        """
        _check_lengths({**inputs, "chosen": chosen, "rejected": rejected}, source)
        columns = zip(_split_dict(inputs, batch_length(chosen)), _split(chosen), _split(rejected))
        return cls((Pair(x, winner, loser) for x, winner, loser in columns), source)

    @classmethod
    def from_traces(
        cls,
        chosen: Mapping[str, Batch],
        rejected: Mapping[str, Batch],
        inputs: Sequence[str] = ("x",),
        source: str = "",
        may_be_empty: Sequence[str] = (),
    ) -> "Pairs":
        """Pairs of whole traces from batches; `inputs` names the variables that both traces of a pair must share.

        >>> Pairs.from_traces({"x": [0], "z": [1]}, {"x": [0], "z": [2]})
        Pairs(1 pairs of whole traces)
        """
        for side, trace in (("chosen", chosen), ("rejected", rejected)):
            _require(trace, inputs, f"{_at(source)}the {side} traces")
        named = {f"chosen {n}": batch for n, batch in chosen.items()} | {
            f"rejected {n}": b for n, b in rejected.items()
        }
        rows = _check_lengths(named, source)
        winners, losers = _split_dict(chosen, rows), _split_dict(rejected, rows)
        rows = [Pair({name: winner[name] for name in inputs}, winner, loser) for winner, loser in zip(winners, losers)]
        return cls(rows, source, may_be_empty)


def as_pairs(data: Any, inputs: Sequence[str] = ("x",), source: str = "") -> Pairs:
    """Whatever a user may hold preferences in, as `Pairs`.

    Args:
        data: `Pairs`; a list of `Pair`; a list of rows {"x": ..., "chosen": ..., "rejected": ..., more -> meta}; or one
            dict of batches with the same keys. With whole traces the inputs may stand inside the traces alone.
        inputs: names of the system's inputs.

    >>> as_pairs([{"x": 0, "chosen": 1, "rejected": 2, "score": 0.5}])[0].meta
    {'score': 0.5}
    """
    if isinstance(data, Pairs):
        return data
    if isinstance(data, Mapping):
        return _from_columns(data, inputs, source)
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise errors.PairFormatError(
            f"preferences must be Pairs, a list of rows or a dict of batches, found {type(data).__name__}; "
            "read a file with preferences.load"
        )
    rows = list(data)
    return Pairs((_as_pair(value, row, inputs, source) for row, value in enumerate(rows)), source)


def collate(values: Sequence[Any]) -> Batch:
    """Values of one variable as a batch: whole numbers as a LongTensor (B,), everything else as a list.

    >>> collate([1, torch.tensor(2)]), collate(["a", None])
    (tensor([1, 2]), ['a', None])
    """
    values = list(values)
    if values and all(map(_is_whole_number, values)):
        return torch.tensor([int(value) for value in values])
    integer = [isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point() for value in values]
    if values and all(integer) and len({value.shape for value in values}) == 1:
        return torch.stack([value.long() for value in values])
    return values


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_floating_point() and value.dtype is not torch.bool
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _collate_dicts(rows: list[Mapping[str, Any]]) -> dict[str, Batch]:
    return {name: collate([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _split(batch: Batch) -> list:
    if isinstance(batch, Tensor) and batch.dim() == 1 and not batch.is_floating_point():
        return batch.tolist()
    return list(batch)


def _split_dict(batches: Mapping[str, Batch], rows: int) -> list[dict[str, Any]]:
    columns = {name: _split(batch) for name, batch in batches.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(rows)]


def _from_columns(data: Mapping[str, Any], inputs: Sequence[str], source: str) -> Pairs:
    _require(data, ("chosen", "rejected"), f"{_at(source)}the dict of batches")
    chosen, rejected = data["chosen"], data["rejected"]
    if isinstance(chosen, Mapping) and isinstance(rejected, Mapping):
        given = {name: data[name] for name in inputs if name in data}
        return Pairs.from_traces({**given, **chosen}, {**given, **rejected}, inputs, source)
    _require(data, inputs, f"{_at(source)}the dict of batches")
    return Pairs.from_finals({name: data[name] for name in inputs}, chosen, rejected, source)


def _as_pair(value: Any, row: int, inputs: Sequence[str], source: str) -> Pair:
    where = f"{_at(source)}row {row}"
    if isinstance(value, Pair):
        return value
    if not isinstance(value, Mapping):
        raise errors.PairFormatError(
            f"{where}: expected a dict with 'chosen' and 'rejected', found {type(value).__name__}"
        )
    _require(value, ("chosen", "rejected"), where)
    within = value["chosen"] if isinstance(value["chosen"], Mapping) else {}
    given = {**{name: within[name] for name in inputs if name in within}, **value}
    _require(given, inputs, where)
    meta = {name: item for name, item in value.items() if name not in {*inputs, "chosen", "rejected"}}
    return Pair({name: given[name] for name in inputs}, value["chosen"], value["rejected"], meta)


# --- validation -----------------------------------------------------------------------------------------------------


def _at(source: str) -> str:
    return f"{source}, " if source else ""


def _require(mapping: Mapping, names: Iterable[str], where: str) -> None:
    missing = [name for name in names if name not in mapping]
    if missing:
        raise errors.PairFormatError(f"{where}: {missing[0]!r} is missing; found {sorted(map(str, mapping))}")


def _check_lengths(batches: Mapping[str, Batch], source: str) -> int:
    lengths = {name: batch_length(batch) for name, batch in batches.items()}
    if len(set(lengths.values())) > 1:
        raise errors.BatchMismatchError(f"{_at(source)}the batches have different numbers of rows: {lengths}")
    return next(iter(lengths.values()), 0)


def _checked(pair: Pair, row: int, source: str, may_be_empty: Sequence[str]) -> Pair:
    """The pair as given, or a named error saying which row is wrong."""
    where = f"{_at(source)}row {row}"
    if not isinstance(pair, Pair):
        raise errors.PairFormatError(f"{where}: expected a Pair, found {type(pair).__name__}; see preferences.as_pairs")
    if isinstance(pair.chosen, Mapping) != isinstance(pair.rejected, Mapping):
        raise errors.PairFormatError(f"{where}: one of chosen and rejected is a whole trace, the other is not")
    for name, value in pair.inputs.items():
        _check_finite(value, f"{where}, input {name!r}")
    for side in ("chosen", "rejected"):
        _check_answer(getattr(pair, side), f"{where}, {side}", may_be_empty)
    if pair.is_trace:
        _check_inputs_agree(pair, where)
    if _same(_own(pair.chosen, pair), _own(pair.rejected, pair)):
        raise errors.IdenticalPairError(
            f"{where}: chosen and rejected are identical, so the pair teaches nothing; leave it out"
        )
    return pair


def _own(value: Any, pair: Pair) -> Any:
    """A trace without its inputs; a final as it is."""
    return {name: v for name, v in value.items() if name not in pair.inputs} if pair.is_trace else value


def _check_answer(value: Any, where: str, may_be_empty: Sequence[str]) -> None:
    parts = value.items() if isinstance(value, Mapping) else [("", value)]
    if not isinstance(value, Mapping) and value is None:
        raise errors.EmptyAnswerError(f"{where}: no answer (None); leave the pair out")
    for name, part in parts:
        place = f"{where}, variable {name!r}" if name else where
        _check_finite(part, place)
        if _is_empty(part) and name not in may_be_empty:
            raise errors.EmptyAnswerError(
                f"{place}: empty answer; leave the pair out, or name the variable in may_be_empty"
            )


def _is_empty(value: Any) -> bool:
    """No text, or no token to score; a completion that is EOS alone has a log-probability and is not empty."""
    if isinstance(value, Completion):
        return not value.token_ids
    if isinstance(value, Tensor):
        return value.numel() == 0
    return isinstance(value, str) and not value.strip()


def _check_finite(value: Any, where: str) -> None:
    bad = isinstance(value, float) and value - value != 0
    if isinstance(value, Tensor) and value.is_floating_point():
        bad = not bool(torch.isfinite(value).all())
    if bad:
        raise errors.NonFiniteError(f"{where}: NaN or infinity; repair or leave out the pair")


def _check_inputs_agree(pair: Pair, where: str) -> None:
    for name, value in pair.inputs.items():
        for side in ("chosen", "rejected"):
            trace = getattr(pair, side)
            if name in trace and not _same(trace[name], value):
                raise errors.InputMismatchError(
                    f"{where}: input {name!r} of the {side} trace differs from the pair's; "
                    "a pair compares two traces of the same input"
                )


def _same(left: Any, right: Any) -> bool:
    """Equality through containers and tensors; texts are compared without the spaces around them."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        left, right = torch.as_tensor(left), torch.as_tensor(right)
        return left.shape == right.shape and bool((left == right).all())
    if isinstance(left, str) and isinstance(right, str):
        return left.strip() == right.strip()
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _variables(pair: Pair) -> tuple:
    sides = [sorted(_own(side, pair)) for side in (pair.chosen, pair.rejected)] if pair.is_trace else []
    return sorted(pair.inputs), sides


def _check_same_variables(rows: list[Pair], source: str) -> None:
    for row, pair in enumerate(rows):
        if _variables(pair) != _variables(rows[0]):
            raise errors.PairFormatError(
                f"{_at(source)}row {row}: inputs and variables {_variables(pair)}, but row 0 has {_variables(rows[0])}"
            )
        if pair.is_trace and len({*map(tuple, _variables(pair)[1])}) > 1:
            raise errors.PairFormatError(f"{_at(source)}row {row}: chosen and rejected hold different variables")


# --- JSONL ----------------------------------------------------------------------------------------------------------


@dataclass
class LoadReport:
    """What `load` did with each line of a file.

    Args:
        file: the file that was read.
        kept: number of pairs kept.
        dropped: (line number from 1, reason) of every line left out.
        lines: line number of each pair kept.
        schemas: how many of the kept pairs were in which schema.
        duplicates: how many lines repeated an earlier one.
    """

    file: str
    kept: int = 0
    dropped: list[tuple[int, str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    schemas: Counter = field(default_factory=Counter)
    duplicates: int = 0

    @property
    def schema(self) -> str:
        """The file's schema, or all of them joined by " + "."""
        return " + ".join(sorted(self.schemas)) or "none"

    def __str__(self) -> str:
        counts = f"kept {self.kept}, dropped {len(self.dropped)} ({self.duplicates} repeated)"
        head = f"{self.file}: {counts}, schema {self.schema}"
        shown = [f"  line {line}: {reason}" for line, reason in self.dropped[:10]]
        more = [f"  ... and {len(self.dropped) - 10} more lines"] if len(self.dropped) > 10 else []
        return "\n".join([head, *shown, *more])


class _RowError(Exception):
    """What is wrong with one line, and what to do; `load` adds file and line."""


def load(path: str | os.PathLike, on_error: str = "drop", duplicates: str = "drop") -> tuple[Pairs, LoadReport]:
    """Read preference pairs from JSONL, one JSON object a line, in TRL's or Intel/orca_dpo_pairs' schema.

    | schema | line | input "x" |
    |---|---|---|
    | trl-plain | prompt, chosen, rejected: texts | the prompt, a str |
    | trl-conversational | prompt: messages; chosen, rejected: one assistant message | the messages |
    | trl-implicit-prompt | chosen, rejected: conversations that differ in the last message | the shared messages |
    | intel-orca | system, question, chosen, rejected: texts | messages (system only where not empty) |

    A column `system` is the system message in every schema, and either answer may be a conversation's last message.
    Messages are a tuple of {"role": ..., "content": ...}, which `CausalLM` templates pass to a chat template. Chosen
    and rejected are texts. Other columns go to `meta`. The file is only read.

    Args:
        on_error: "drop" leaves bad lines out and reports them; "raise" stops at the first.
        duplicates: "drop" treats a line that repeats an earlier pair as bad; "keep" keeps it. Both count it.

    Returns:
        the pairs, and a report of every line that was dropped, and why.

    Raises:
        MissingFileError: there is no such file.
        PreferenceFileError: a bad line (on_error="raise"), or no line could be kept.
    """
    errors.check_option("on_error", on_error, ("drop", "raise"))
    errors.check_option("duplicates", duplicates, ("drop", "keep"))
    report, rows, seen = LoadReport(str(path)), [], {}
    for line, raw in _lines(Path(path)):
        try:
            schema, pair = _parse(raw)
            _note_repeat(pair, line, seen, report, duplicates)
        except _RowError as problem:
            if on_error == "raise":
                raise errors.PreferenceFileError(f"{path}, line {line}: {problem}") from None
            report.dropped.append((line, str(problem)))
            continue
        rows.append(pair)
        report.lines.append(line)
        report.schemas[schema] += 1
    report.kept = len(rows)
    if not rows:
        raise errors.PreferenceFileError(f"no usable pair: one JSON object a line is needed\n{report}")
    return Pairs._trusted(rows, str(path)), report


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, without a byte-order mark."""
    if not path.is_file():
        raise errors.MissingFileError(f"{path}: no such file; give the path of a JSONL file, one pair a line")
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if raw.strip():
                yield number, raw


def _note_repeat(pair: Pair, line: int, seen: dict[str, int], report: LoadReport, duplicates: str) -> None:
    key = json.dumps([pair.inputs["x"], str(pair.chosen), str(pair.rejected)])
    first = seen.setdefault(key, line)
    if first == line:
        return
    report.duplicates += 1
    if duplicates == "drop":
        raise _RowError(f"repeats line {first}; keep repeats with duplicates='keep'")


def _parse(raw: bytes) -> tuple[str, Pair]:
    row = _json_object(raw)
    for side in ("chosen", "rejected"):
        if side not in row:
            raise _RowError(
                f"{side!r} is missing, found the keys {sorted(row)}; rename the column or leave the line out"
            )
    schema, x, chosen, rejected = _read_schema(row)
    for side, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise _RowError(f"{side!r} is empty; an empty answer cannot be scored, leave the line out")
    used = {"prompt", "chosen", "rejected", "system"} | ({"question"} if schema == "intel-orca" else set())
    meta = {name: value for name, value in row.items() if name not in used}
    chosen, rejected = (_with_tokens(text, side, meta) for side, text in (("chosen", chosen), ("rejected", rejected)))
    if _same(chosen, rejected):
        raise _RowError("chosen and rejected are identical, so the pair teaches nothing; leave the line out")
    return schema, Pair({"x": x}, chosen, rejected, meta)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
        row = json.loads(text)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as problem:
        raise _RowError(f"not UTF-8 (byte {problem.start}); save the file as UTF-8") from None
    except UnicodeEncodeError:
        raise _RowError("half of a surrogate pair (\\ud800 to \\udfff) in a text; repair the escape") from None
    except (ValueError, RecursionError) as problem:
        raise _RowError(f"not JSON ({problem}); one JSON object a line is needed") from None
    if not isinstance(row, dict):
        raise _RowError(f"a JSON {type(row).__name__}, not an object; write one object a line")
    return row


def _read_schema(row: dict[str, Any]) -> tuple[str, Any, str, str]:
    """(schema, x, chosen, rejected) of one line."""
    if "prompt" not in row and "question" in row:
        x, sides = _messages_of(_system(row), _text(row, "question")), []
        for side in ("chosen", "rejected"):
            sides.append(_last(_messages(row, side), x, side) if isinstance(row[side], list) else _text(row, side))
        return "intel-orca", x, *sides
    schema, x, chosen, rejected = _read_trl(row)
    return schema, _with_system(_system(row), x), chosen, rejected


def _system(row: dict[str, Any]) -> str:
    return _text(row, "system") if row.get("system") is not None else ""


def _with_system(system: str, x: str | tuple) -> str | tuple:
    """A prompt under the system message that stands in a column of its own."""
    if not system.strip():
        return x
    if isinstance(x, str):
        return _messages_of(system, x)
    if x[0]["role"] != "system":
        return ({"role": "system", "content": system}, *x)
    if x[0]["content"].strip() != system.strip():
        raise _RowError("'system' is not the system message of the prompt; remove the wrong one")
    return x


def _read_trl(row: dict[str, Any]) -> tuple[str, Any, str, str]:
    if isinstance(row["chosen"], list) or isinstance(row["rejected"], list):
        return _read_conversations(row)
    if "prompt" not in row:
        raise _RowError(
            f"no 'prompt' (or 'question'), found the keys {sorted(row)}; add the prompt that both texts answer"
        )
    if isinstance(row["prompt"], list):
        return "trl-conversational", _messages(row, "prompt"), _text(row, "chosen"), _text(row, "rejected")
    prompt = _text(row, "prompt")
    if not prompt.strip():
        raise _RowError("'prompt' is empty; add the prompt that both texts answer")
    return "trl-plain", prompt, _text(row, "chosen"), _text(row, "rejected")


def _read_conversations(row: dict[str, Any]) -> tuple[str, Any, str, str]:
    """Chosen and rejected are lists of messages; the prompt is given, or it is what they share but for the last."""
    chosen, rejected = _messages(row, "chosen"), _messages(row, "rejected")
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        schema, shared = "trl-conversational", _messages(row, "prompt")
    elif isinstance(prompt, str) and len(chosen) == 1:
        schema, shared = "trl-conversational", _messages_of("", prompt)
    elif prompt is None or isinstance(prompt, str):
        schema, shared = "trl-implicit-prompt", chosen[:-1]
        _check_shared(shared, rejected, prompt)
    else:
        raise _RowError(f"'prompt' must be a text or a list of messages, found {type(prompt).__name__}")
    if not shared:
        raise _RowError("no prompt: chosen and rejected share no leading message; add 'prompt' or the shared messages")
    return schema, shared, _last(chosen, shared, "chosen"), _last(rejected, shared, "rejected")


def _check_shared(shared: tuple, rejected: tuple, prompt: str | None) -> None:
    """Both sides of an implicit prompt start with it; a prompt that also stands alone repeats its last message."""
    if rejected[: len(shared)] != shared:
        raise _RowError("chosen and rejected differ before their last message; give the prompt that both answer")
    if prompt is not None and shared and prompt.strip() != shared[-1]["content"].strip():
        raise _RowError("'prompt' is not the last message that chosen and rejected share; remove the wrong one")


def _last(conversation: tuple, shared: tuple, side: str) -> str:
    """The one assistant message that follows the shared messages (which a side may repeat, all or but the system's)."""
    starts = (shared, shared[1:] if shared[0]["role"] == "system" else shared)
    rest = next((conversation[len(start) :] for start in starts if conversation[: len(start)] == start), conversation)
    if len(rest) != 1:
        raise _RowError(
            f"{side!r} has {len(rest)} messages after the prompt that both sides share; one answer can be scored"
        )
    if rest[0]["role"] != "assistant":
        raise _RowError(f"{side!r} ends with role {rest[0]['role']!r}; the answer must be the assistant's")
    return rest[0]["content"]


def _messages(row: dict[str, Any], key: str) -> tuple[dict[str, str], ...]:
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        raise _RowError(f"{key!r} must be a list of messages like the other side, found {_found(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise _RowError(f"a message of {key!r} needs a text 'role' and a text 'content', found {_found(message)}")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _messages_of(system: str, question: str) -> tuple[dict[str, str], ...]:
    if not question.strip():
        raise _RowError("the question is empty; add the prompt that both texts answer")
    user = {"role": "user", "content": question}
    return ({"role": "system", "content": system}, user) if system.strip() else (user,)


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise _RowError(f"{key!r} must be a text, found {_found(row[key])}")
    return row[key]


def _found(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _with_tokens(text: str, side: str, meta: dict[str, Any]) -> str | Completion:
    """A sampled answer that `save` wrote keeps the token ids that were generated."""
    ids = meta.pop(f"{side}_token_ids", None)
    truncated = meta.pop(f"{side}_truncated", False)
    if ids is None:
        return text
    if not isinstance(ids, list) or not ids or not all(map(_is_whole_number, ids)):
        raise _RowError(f"'{side}_token_ids' must be a list of whole numbers, found {_found(ids)}; remove the column")
    return Completion(text, tuple(ids), bool(truncated))


def save(path: str | os.PathLike, pairs: Iterable[Pair]) -> None:
    """Write pairs of texts as JSONL in TRL's schema; `load` reads the same pairs back.

    The file appears whole or not at all. `meta` becomes further columns; a `Completion`'s token ids are kept.

    Raises:
        PairFormatError: a pair that JSONL cannot hold (whole traces, tables, images, another input than "x").
    """
    text = "".join(json.dumps(_to_row(pair, row), ensure_ascii=False) + "\n" for row, pair in enumerate(pairs))
    atomic.write_text(path, text)


def _to_row(pair: Pair, row: int) -> dict[str, Any]:
    texts = all(isinstance(side, (str, Completion)) for side in (pair.chosen, pair.rejected))
    x = pair.inputs.get("x")
    if not texts or set(pair.inputs) != {"x"} or not isinstance(x, (str, list, tuple)):
        raise errors.PairFormatError(
            f"row {row}: JSONL holds one input 'x' (text or messages) and two texts; save others with torch.save"
        )
    conversational = not isinstance(x, str)
    line = {"prompt": list(x) if conversational else x}
    for side in ("chosen", "rejected"):
        answer = str(getattr(pair, side))
        line[side] = [{"role": "assistant", "content": answer}] if conversational else answer
    for side in ("chosen", "rejected"):
        value = getattr(pair, side)
        if isinstance(value, Completion):
            line |= {f"{side}_token_ids": list(value.token_ids), f"{side}_truncated": value.truncated}
    clash = sorted({*line, "system"} & set(pair.meta))
    if clash:
        raise errors.PairFormatError(f"row {row}: meta holds {clash[0]!r}, which is a column of its own; rename it")
    return line | pair.meta
