"""Runs one exercise of one hand-in, in a process of its own: `python judge.py`, the job on stdin, the verdict on stdout.

The answer and its test share a process, since a test may want gradients, systems and generators from the answer. What keeps
an answer from marking itself:

- it runs in a namespace of its own; only the functions that the exercise asks for are handed to the test;
- `sysdpo_lab.coursework` is a dummy to it: the checks, and the right functions in them, cannot be imported or changed;
- functions and classes of torch, numpy, the library and Python that it replaced are put back, and cost it the points;
- after a pass the test must still refuse answers that are wrong on purpose (decoys);
- what it prints goes elsewhere, and a verdict counts only with a word that the answer is not given.

This is no sandbox: code that searches Python's own memory could still cheat. The grader holds such answers back (`WATCHED`
in grade.py) for a person to look at.

Only the standard library is imported here, and nothing of the package: the process starts fast, and the lesson decides what
is loaded.
"""

import ast
import json
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

COURSEWORK = "sysdpo_lab.coursework"
GUARDED = {
    "builtins",
    "functools",
    "itertools",
    "json",
    "math",
    "numpy",
    "operator",
    "statistics",
    "sysdpo_lab",
    "torch",
}
LONGEST = 2000  # characters of a message
DECOYS = ("empty", "nothing", "shifted")


# --- the way out ------------------------------------------------------------------------------------------------------


def messenger(channel: int, word: str) -> Callable[..., None]:
    """Sends lines `WORD EVENT HEX`; uses nothing that an answer could have replaced by then."""
    write, encode, to_hex = os.write, str.encode, bytes.hex

    def say(event: str, text: str = "") -> None:
        line = encode(f"{word} {event} {to_hex(encode(text, 'utf-8', 'backslashreplace')[:LONGEST])}\n")
        while line:
            line = line[write(channel, line) :]

    return say


class Dummy(types.ModuleType):
    """Stands in for the checks while an answer runs: any call gives None, so that calling a check there does no harm."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Dummy(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> None:
        return None


def is_coursework(value: Any) -> bool:
    """Whether a value of the lesson is the checks, one of them, or comes from them."""
    origins = (getattr(value, "__name__", ""), getattr(value, "__module__", ""), type(value).__module__)
    return any(isinstance(origin, str) and origin.startswith(COURSEWORK) for origin in origins)


def hide_coursework() -> dict[str, types.ModuleType]:
    """Whoever imports the checks from now on gets a dummy; those who have them keep them. Returns what was hidden."""
    hidden = {name: sys.modules[name] for name in list(sys.modules) if f"{name}.".startswith(COURSEWORK + ".")}
    sys.modules.update({name: Dummy(name) for name in hidden})
    if COURSEWORK in hidden:
        sys.modules["sysdpo_lab"].coursework = sys.modules[COURSEWORK]
    return hidden


# --- what an answer must not replace ----------------------------------------------------------------------------------


class Guard:
    """Remembers which functions, classes and modules stand where, finds out what was replaced, and puts it back."""

    def __init__(self, hidden: dict[str, types.ModuleType]) -> None:
        loaded = {**sys.modules, **hidden}
        found = {name: module for name, module in loaded.items() if isinstance(module, types.ModuleType)}
        guarded = {name: vars(module) for name, module in found.items() if name.partition(".")[0] in GUARDED}
        ours = {name: space for name, space in guarded.items() if name.partition(".")[0] == "sysdpo_lab"}
        self.modules = {
            name: (space, {key: value for key, value in space.items() if _is_kept(value)})
            for name, space in guarded.items()
        }
        self.classes = {cls: dict(vars(cls)) for cls in _classes(ours)}
        self.codes = [(function, function.__code__, function.__defaults__) for function in _functions(ours)]
        self.checks = [(vars(value), dict(vars(value))) for value in _checks(ours)]
        self.builtins = set(vars(sys.modules["builtins"]))
        self.put = type.__setattr__, type.__delattr__

    def restore(self) -> list[str]:
        """Put everything back; returns the names of what was not in its place."""
        found = []
        for owner, (space, kept) in self.modules.items():
            for key, value in kept.items():
                if space.get(key) is not value:
                    space[key] = value
                    found.append(f"{owner}.{key}")
            if owner != "builtins":
                # a new name in a module that is also a builtin's would come before it
                for key in [key for key in space.keys() & self.builtins if key not in kept and _is_kept(space[key])]:
                    found.append(f"{owner}.{key}")
                    del space[key]
        return found + self._restore_classes() + self._restore_insides()

    def _restore_classes(self) -> list[str]:
        found, (put, drop) = [], self.put
        for cls, kept in self.classes.items():
            now = dict(vars(cls))
            for key, value in kept.items():
                if now.get(key) is not value and _is_kept(value):
                    put(cls, key, value)
                    found.append(f"{cls.__name__}.{key}")
            for key in [key for key, value in now.items() if key not in kept and _is_kept(value)]:
                drop(cls, key)
                found.append(f"{cls.__name__}.{key}")
        return found

    def _restore_insides(self) -> list[str]:
        found = []
        for function, code, defaults in self.codes:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                function.__code__, function.__defaults__ = code, defaults
                found.append(function.__name__)
        for space, kept in self.checks:
            if any(space.get(key) is not value for key, value in kept.items()):
                space.update(kept)
                found.append("a check")
        return found


def _is_kept(value: Any) -> bool:
    # by type: isinstance would ask the value, and some of torch's warn when they are asked
    kinds = (types.ModuleType, property, staticmethod, classmethod)
    return callable(value) or issubclass(type(value), kinds)


def _classes(ours: dict[str, dict]) -> Iterator[type]:
    for name, space in ours.items():
        yield from (value for value in space.values() if isinstance(value, type) and value.__module__ == name)
    torch = sys.modules.get("torch")
    if torch is not None:
        yield from (torch.Tensor, torch.nn.Module)


def _functions(ours: dict[str, dict]) -> Iterator[types.FunctionType]:
    classes = [vars(cls).values() for cls in _classes(ours) if cls.__module__ in ours]
    for values in (*(space.values() for space in ours.values()), *classes):
        yield from (value for value in values if isinstance(value, types.FunctionType) and value.__module__ in ours)


def _checks(ours: dict[str, dict]) -> Iterator[Any]:
    for name, space in ours.items():
        if name.startswith(COURSEWORK):
            mine = (value for value in space.values() if type(value).__module__.startswith(COURSEWORK))
            yield from (
                value for value in mine if hasattr(value, "__dict__")
            )  # a named tuple has none, and cannot change


# --- running cells ----------------------------------------------------------------------------------------------------


def compiled(source: str, file: str) -> types.CodeType:
    """The cell's code; magics, which only Jupyter understands, are left out where they are in the way."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        return compile(source, file, "exec")
    except SyntaxError:
        plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
        return compile(plain, file, "exec")


class Room:
    """The two namespaces: `lesson` for the lesson's cells and the test, `answer` for what was handed in."""

    def __init__(self) -> None:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.lesson: dict = {"__name__": "__main__"}
        self.answer: dict = vars(main)
        self.own: set[str] = set()

    def run_lesson(self, source: str, file: str) -> None:
        exec(compiled(source, file), self.lesson)

    def run_answer(self, source: str, name: str, functions: list[str]) -> None:
        """Run an answer's cell, and hand over the functions that its exercise asks for and nothing else."""
        self.show_lesson()
        before = dict(self.answer)
        try:
            exec(compiled(source, f"<answer {name}>"), self.answer)
        finally:
            self.own |= {key for key, value in self.answer.items() if key not in before or before[key] is not value}
            self.lesson.update({key: self.answer[key] for key in functions if key in self.own})

    def show_lesson(self) -> None:
        shown = ((key, value) for key, value in self.lesson.items() if key not in self.own)
        dummy = Dummy(COURSEWORK)
        self.answer.update({key: dummy if is_coursework(value) else value for key, value in shown})


def load_what_is_named(source: str, space: dict) -> None:
    """Look up `checks.lesson_00.check_margin` and the like: some modules load their parts when they are asked for."""
    for node in ast.walk(ast.parse(source)):
        chain = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        value = space.get(node.id) if isinstance(node, ast.Name) else None
        for name in reversed(chain):
            if isinstance(value, types.ModuleType):
                value = getattr(value, name, None)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdict(error: BaseException, exercise: str) -> tuple[str, str]:
    """(status, message) of what an answer or its test raised."""
    if isinstance(error, NotImplementedError):
        other = raised_in(error) or exercise
        return "unanswered", "not answered" if other == exercise else f"it uses {other}, which is not answered"
    if isinstance(error, AssertionError):
        return "failed", text_of(error) or "a test failed that gives no reason"
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return "failed", f"it left Python ({type(error).__name__}); an answer returns its result"
    if isinstance(error, SyntaxError):
        return "failed", f"{type(error).__name__} in line {error.lineno}: {error.msg}"
    return "failed", f"raised {type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """The error's message, cut; an answer's own class may fail at that too."""
    try:
        return str(error)[:LONGEST]
    except BaseException:
        return "(no message)"


def raised_in(error: BaseException) -> str | None:
    """The exercise whose answer an error comes from."""
    found, step = None, error.__traceback__
    while step:
        file = step.tb_frame.f_code.co_filename
        found = file[len("<answer ") : -1] if file.startswith("<answer ") else found
        step = step.tb_next
    return found


# --- decoys -----------------------------------------------------------------------------------------------------------


def decoy(kind: str, function: Callable, changed: list) -> Callable:
    """A wrong answer: one that is empty, one that returns None, one that returns other values than the real one."""

    def empty(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    def nothing(*arguments: Any, **options: Any) -> Any:
        return None

    def shifted(*arguments: Any, **options: Any) -> Any:
        return other_than(function(*arguments, **options), changed)

    return {"empty": empty, "nothing": nothing, "shifted": shifted}[kind]


def other_than(value: Any, changed: list) -> Any:
    """Other numbers and texts in the same shape; `changed` grows when something could be changed.

    >>> other_than({"a": (1.0, "x"), "b": [True, None]}, [])
    {'a': (2.7, 'x!'), 'b': [False, None]}
    """
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([other_than(entry, changed) for entry in value])
    if isinstance(value, dict):
        return {key: other_than(entry, changed) for key, entry in value.items()}
    if isinstance(value, bool | int | float | str) or (hasattr(value, "is_floating_point") and value.numel()):
        changed.append(1)
        return _other(value)
    return value


def _other(value: Any) -> Any:
    if isinstance(value, str):
        return value + "!"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else 1.7 * value + 1
    if value.is_floating_point():
        return 1.7 * value + 1
    return ~value if str(value.dtype) == "torch.bool" else value + 1


def decoys_refused(room: Room, job: dict, guard: Guard, test: types.CodeType) -> list[str]:
    """Which of the wrong answers the test refuses after the real one has passed."""
    answers, found = {name: room.lesson[name] for name in job["functions"]}, []
    for kind in DECOYS:
        changed: list = []
        room.lesson.update({name: decoy(kind, function, changed) for name, function in answers.items()})
        try:
            exec(test, room.lesson)
        except BaseException:
            if kind != "shifted" or changed:
                found.append(kind)
        guard.restore()
    return found


# --- the process ------------------------------------------------------------------------------------------------------


def limit_memory(megabytes: int) -> None:
    """No more than so much beyond what the lesson uses, no core files, no huge files; where the system can do that."""
    try:
        import resource
    except ImportError:
        return
    wanted = [("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 100 << 20), ("RLIMIT_DATA", _data_bytes() + (megabytes << 20))]
    for name, amount in wanted:
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        try:
            resource.setrlimit(kind, (amount, amount))
        except (OSError, ValueError):
            continue  # macOS refuses some of them


def _data_bytes() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0


def judge(job: dict, say: Callable[..., None]) -> None:
    """Lesson, answer, test, decoys; one message after each.

    Args:
        job: `cells` (dicts of source, answer: the name of the earlier exercise that it answers, or None, and functions),
            `exercise`, `answer`, `functions`, `test`, `memory_mb`.
        say: tells the grader.
    """
    room, cells = Room(), job["cells"]
    trusted = next((number for number, cell in enumerate(cells) if cell["answer"]), len(cells))
    try:
        for number, cell in enumerate(cells[:trusted]):
            room.run_lesson(cell["source"], f"<lesson cell {number + 1}>")
        load_what_is_named(job["test"], room.lesson)
        test = compiled(job["test"], "<test>")
    except BaseException as error:
        return say("broken", f"{type(error).__name__}: {text_of(error)}")
    guard = Guard(hide_coursework())
    limit_memory(job["memory_mb"])
    say("ready")
    try:
        run_earlier(room, cells[trusted:], guard)
        run_answer(room, job)
        replaced = guard.restore()
        exec(test, room.lesson)
    except BaseException as error:
        guard.restore()
        return say(*verdict(error, job["exercise"]))
    if replaced := replaced + guard.restore():
        return say("tampered", f"it replaces {', '.join(replaced[:5])}")
    say("passed")
    say("sealed", " ".join(decoys_refused(room, job, guard, test)))


def run_earlier(room: Room, cells: list[dict], guard: Guard) -> None:
    """The earlier answers that this exercise uses, and the lesson's cells between them."""
    for cell in cells:
        if cell["answer"] is None:
            room.run_lesson(cell["source"], "<lesson cell>")
            continue
        try:
            room.run_answer(cell["source"], cell["answer"], cell["functions"])
        except BaseException:
            pass  # its own exercise says so; this one may do without
        guard.restore()


def run_answer(room: Room, job: dict) -> None:
    """The answer's own cell."""
    room.run_answer(job["answer"], job["exercise"], job["functions"])
    missing = [name for name in job["functions"] if name not in room.own]
    if missing:
        raise AssertionError(f"the cell does not define {', '.join(missing)}")
    room.show_lesson()


def main() -> None:
    """Read the job, judge, leave without giving an answer's exit handlers a chance."""
    leave, channel = os._exit, os.dup(1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    say = messenger(channel, job.pop("word"))
    try:
        judge(job, say)
    finally:
        leave(0)


if __name__ == "__main__":
    main()
