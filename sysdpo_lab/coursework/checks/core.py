"""How an answer is judged: same values as the right function, or the values of a mistake that people make.

>>> from statistics import fmean
>>> def total(values):
...     return sum(values)
>>> check_total = Check(
...     cases=lambda: [([1.0, 2.0],), ([3.0, 4.0, 5.0],)],
...     right=total,
...     mistakes=[
...         Mistake("mean instead of sum", fmean, "add the values up; do not average them"),
...         Mistake("first only", lambda values: values[0], "use all values, not only the first"),
...     ],
... )
>>> check_total(lambda values: sum(values))
total: correct (2 inputs)
>>> message(check_total, lambda values: sum(values) / len(values))
'total: add the values up; do not average them'
>>> message(check_total, lambda values: None)
'total(values) returned None: is a `return` missing?'
"""

import inspect
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from sysdpo_lab import errors

LONGEST = 160  # characters of a value that a message shows


class CheckFailed(errors.SysDPOError, AssertionError):
    """An exercise's answer is not right; the message says what is probably wrong with it."""


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give, and what to tell them.

    Args:
        name: what is wrong, in a few words ("reference forgotten"); for tests and marks.
        answer: gives the values of that mistake; may raise where it has none.
        message: what to look at; not the answer itself.
    """

    name: str
    answer: Callable
    message: str


class Check:
    """Judges a learner's function: silent about how it is written, strict about what comes out.

    Args:
        cases: gives the argument tuples; called anew for each run, so that nothing an answer does to its inputs matters.
        right: the library's function or an independent formula.
        mistakes: in the order in which they are tried.
        name: what the function is called in messages; `right`'s name without one.
        tolerance: relative and absolute.
        seconds: what one call may take; there for answers that go through every combination.
        view: applied to each result before it is compared.
        also: functions of the answer that raise CheckFailed; called last.
    """

    def __init__(
        self,
        cases: Callable[[], Iterable[tuple]],
        right: Callable,
        mistakes: Sequence[Mistake],
        name: str | None = None,
        tolerance: float = 1e-6,
        seconds: float = 20.0,
        view: Callable[[Any], Any] = lambda value: value,
        also: Sequence[Callable[[Callable], None]] = (),
    ) -> None:
        self.cases, self.right, self.mistakes = cases, right, tuple(mistakes)
        self.name, self.tolerance, self.seconds = name or right.__name__, tolerance, seconds
        self.view, self.also = view, tuple(also)
        self.call = f"{self.name}({', '.join(inspect.signature(right).parameters)})"

    def __call__(self, answer: Callable) -> None:
        """Print one line when the answer is right.

        Raises:
            CheckFailed: it is not; says what is probably wrong.
            NotImplementedError: nothing was written yet.
        """
        if not callable(answer):
            fail(f"{self.name} is {shown(answer)}, not a function: define {self.call}")
        used = list(self.cases())
        found, expected = [self._outcome(answer, case) for case in used], self._outcomes(self.right)
        if broken := [outcome for outcome in expected if isinstance(outcome, CheckFailed)]:
            raise RuntimeError(f"the check itself is broken: {broken[0]}") from broken[0]
        if not self._same(found, expected):
            self._explain(found, expected)
        self._check_inputs(used)
        for condition in self.also:
            self._guarded(condition, answer)
        print(f"{self.name}: correct ({len(found)} input{'s' * (len(found) != 1)})")

    def _check_inputs(self, used: Sequence[tuple]) -> None:
        """Refuse an answer that changed what it was given: right alone, it makes whatever is computed next wrong."""
        names = list(inspect.signature(self.right).parameters)
        for after, before in zip(used, self.cases()):
            for name, now, then in zip(names, after, before):
                try:
                    now, then = plain(now), plain(then)
                except (TypeError, ValueError, RuntimeError):  # a system, a function, a generator
                    continue
                if difference(then, then, 0.0) is None and difference(now, then, 0.0) is not None:
                    fail(f"{self.name} returns the right values but changes its argument {name}: work on a copy of it")

    def _outcomes(self, function: Callable) -> list:
        return [self._outcome(function, case) for case in self.cases()]

    def _outcome(self, function: Callable, case: tuple) -> Any:
        """What the function gives for one case, ready to compare; CheckFailed, not raised, where that cannot be used."""
        try:
            result = self._guarded(function, *case)
            return (
                CheckFailed(f"{self.call} returned None: is a `return` missing?")
                if result is None
                else self._seen(result)
            )
        except CheckFailed as trouble:
            if isinstance(trouble.__cause__, TimeUpError):
                raise
            return trouble

    def _seen(self, result: Any) -> Any:
        try:
            return plain(self.view(result))
        except CheckFailed:
            raise
        except Exception as error:
            what = f"{self.call} returned {shown(result)}, which cannot be used"
            raise CheckFailed(f"{what}: {type(error).__name__}: {first_line(error)}") from error

    def _guarded(self, function: Callable, *arguments: Any) -> Any:
        try:
            with time_limit(self.seconds):
                return function(*arguments)
        except (NotImplementedError, CheckFailed):
            raise
        except TimeUpError as error:
            slow = f"{self.call} took longer than {self.seconds:g} s"
            raise CheckFailed(f"{slow}: does it go through every combination, or never end?") from error
        except Exception as error:
            raise CheckFailed(f"{self.call} raised {type(error).__name__}: {first_line(error)}") from error

    def _same(self, found: list, wanted: list) -> bool:
        """Equal in all cases; two that fail alike in some of them are equal if there are others."""
        usable = not all(isinstance(outcome, CheckFailed) for outcome in found)
        return usable and all(self._alike(a, b) for a, b in zip(found, wanted))

    def _alike(self, found: Any, wanted: Any) -> bool:
        if isinstance(found, CheckFailed) and isinstance(wanted, CheckFailed):
            return type(found.__cause__) is type(wanted.__cause__)
        if isinstance(found, CheckFailed) or isinstance(wanted, CheckFailed):
            return False
        return difference(found, wanted, self.tolerance) is None

    def _explain(self, found: list, expected: list) -> NoReturn:
        for mistake in self.mistakes:
            if self._same(found, self._outcomes(mistake.answer)):
                fail(f"{self.name}: {mistake.message}")
        for here, wanted, case in zip(found, expected, self.cases()):
            if isinstance(here, CheckFailed):
                raise here
            if problem := difference(here, wanted, self.tolerance):
                fail(f"{self.name}: {problem}; the input was {described(self.right, case)}")
        raise AssertionError("unreachable: _explain is called when a value differs")


class TimeUpError(Exception):
    """A call took too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUpError in the block after so many seconds; no limit where there are no alarms (Windows, threads).

    >>> with time_limit(5):
    ...     pass
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> NoReturn:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fail(text: str) -> NoReturn:
    """Raise CheckFailed."""
    raise CheckFailed(text)


def message(check: Callable, answer: Any) -> str | None:
    """What `check` says about a wrong answer; None for a right one."""
    try:
        check(answer)
    except CheckFailed as error:
        return str(error)
    return None


# --- values -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Detached float64 tensors for whatever holds numbers, within lists, dicts and the like.

    Raises:
        TypeError: neither numbers nor text.

    >>> plain((1, {"a": [True, "x"]}))
    [tensor(1., dtype=torch.float64), {'a': [tensor(1., dtype=torch.float64), 'x']}]
    """
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, str):
        return value
    if isinstance(value, (set, frozenset)):
        return [plain(entry) for entry in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64)
    return torch.as_tensor(value, dtype=torch.float64)


def difference(found: Any, wanted: Any, tolerance: float, where: str = "") -> str | None:
    """How two `plain` values differ, in words; None when they agree. A list of numbers may stand for a tensor.

    >>> difference(plain([1, 2]), plain(torch.tensor([1.0, 2.5])), 1e-6)
    'returned [1, 2], expected [1, 2.5]'
    >>> difference(plain({"a": 1}), plain({"b": 1}), 1e-6)
    "returned the keys ['a'], expected ['b']"
    """
    at = f"in {where} " if where else ""
    if isinstance(wanted, Mapping):
        return _difference_of_mappings(found, wanted, tolerance, where)
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        entries = (difference(a, b, tolerance, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, wanted)))
        return next((entry for entry in entries if entry is not None), None)
    found, wanted = _stacked(found), _stacked(wanted)
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return _difference_of_tensors(found, wanted, tolerance, at)
    if type(found) is not type(wanted):
        return f"{at}returned {kind(found)} ({shown(found)}), expected {kind(wanted)}"
    if isinstance(wanted, list):
        return f"{at}returned {len(found)} entries, expected {len(wanted)}"
    return None if found == wanted else f"{at}returned {shown(found)}, expected {shown(wanted)}"


def _difference_of_mappings(found: Any, wanted: Mapping, tolerance: float, where: str) -> str | None:
    at = f"in {where} " if where else ""
    if not isinstance(found, Mapping):
        return f"{at}returned {kind(found)} ({shown(found)}), expected a dict with the keys {list(wanted)}"
    if found.keys() != wanted.keys():
        return f"{at}returned the keys {list(found)}, expected {list(wanted)}"
    entries = (difference(found[key], wanted[key], tolerance, f"{where}[{key!r}]") for key in wanted)
    return next((entry for entry in entries if entry is not None), None)


def _difference_of_tensors(found: Tensor, wanted: Tensor, tolerance: float, at: str) -> str | None:
    if found.shape != wanted.shape:
        return f"{at}returned {kind(found)}, expected {kind(wanted)}"
    if torch.allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    if bool((found.isnan() & ~wanted.isnan()).any()):
        return f"{at}returned NaN ({shown(found)}), expected {shown(wanted)}"
    return f"{at}returned {shown(found)}, expected {shown(wanted)}"


def _stacked(value: Any) -> Any:
    """A list of equally shaped tensors as one tensor, so that [0.1, 0.2] equals tensor([0.1, 0.2])."""
    if isinstance(value, list) and value:
        entries = [_stacked(entry) for entry in value]
        if all(isinstance(entry, Tensor) and entry.shape == entries[0].shape for entry in entries):
            return torch.stack(entries)
    return value


# --- words ------------------------------------------------------------------------------------------------------------


def kind(value: Any) -> str:
    """What sort of thing a value is, for a message.

    >>> kind(torch.zeros(2, 3)), kind(torch.tensor(1.0)), kind("a")
    ('shape (2, 3)', 'a single number', 'text')
    """
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}" if value.dim() else "a single number"
    names = {str: "text", list: "a list", dict: "a dict"}
    return names.get(type(value), f"a {type(value).__name__}")


def shown(value: Any) -> str:
    """A value as short text: numbers to six digits, long things cut.

    >>> shown(torch.tensor([1.0, 1 / 3])), shown(torch.tensor(2.0)), shown("x")
    ('[1, 0.333333]', '2', "'x'")
    """
    if isinstance(value, Tensor):
        text = _numbers(value.tolist())
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {shown(entry)}" for key, entry in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(shown(entry) for entry in value) + "]"
    else:
        text = _numbers(value) if isinstance(value, float) else repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_numbers(entry) for entry in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def described(function: Callable, case: tuple) -> str:
    """The arguments of a case by name.

    >>> described(lambda p, beta: 0, (torch.tensor([0.5]), 0.1))
    'p = [0.5], beta = 0.1'
    """
    names = list(inspect.signature(function).parameters)
    named = ", ".join(f"{name} = {shown(value)}" for name, value in zip(names, case))
    return named or "empty"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to what a reader takes in."""
    lines = str(error).strip().splitlines()
    return lines[0][:LONGEST] if lines else "(no message)"
