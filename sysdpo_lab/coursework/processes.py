"""Starts `judge.py` for one exercise, waits no longer than allowed, and ends all that it started."""

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

JUDGE = Path(__file__).with_name("judge.py")
SETUP_SECONDS = 600  # for the lesson's own cells
MOST_LINES = 1000  # a verdict takes three
KEPT = 4000  # bytes of what an answer prints
# the rest of the environment, with its tokens and keys, stays here
PASSED_ON = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "SYSDPO_CACHE",
    "SYSDPO_DATA",
    "SYSTEMROOT",
    "VIRTUAL_ENV",
)
QUIET = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:backslashreplace",
}  # fmt: skip
FINAL = ("failed", "unanswered", "tampered", "broken", "sealed")


@dataclass
class Run:
    """What came of one process: a status and a message, which decoys its test refused, and what it printed."""

    status: str
    message: str = ""
    decoys: tuple[str, ...] = ()
    printed: str = ""


def run_job(job: dict, seconds: float) -> Run:
    """Judge one exercise in a process group and a temporary folder of its own.

    Args:
        job: what `judge.judge` takes.
        seconds: for answer and test, and once more for the decoys after a pass.

    Returns:
        status "sealed" (right), "failed", "unanswered", "tampered", "timeout", "crashed", "undecided" (passed, but then
        ended before the decoys were judged) or "broken" (the lesson's own cells fail).
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True) as folder:
        process = _start(Path(folder))
        watch = _Watch(process)
        try:
            watch.send(json.dumps({**job, "word": word}))
            run = _follow(watch, word, seconds)
        finally:
            watch.end()
    run.printed = watch.printed()
    return run


def environment(folder: Path) -> dict[str, str]:
    """The variables that the process sees; its home and temporary folder are `folder`."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    places = dict.fromkeys(
        ("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP", "MPLCONFIGDIR", "XDG_CACHE_HOME"), str(folder)
    )
    return {**kept, **QUIET, **places, "PYTHONPATH": str(JUDGE.parents[2])}


def _start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", str(JUDGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment(folder),
        start_new_session=True,
    )


def _follow(watch: "_Watch", word: str, seconds: float) -> Run:
    """Read events until a final one, the end of the process, or the end of its time."""
    phase, deadline = "start", time.monotonic() + SETUP_SECONDS
    while True:
        left = deadline - time.monotonic()
        try:
            line = watch.lines.get(timeout=max(0.0, left))
        except queue.Empty:
            left = 0.0
        if left <= 0:  # also when lines without the right word never stop coming
            return _late(phase, seconds)
        if line is None:
            return _ended(phase, watch.exit_status())
        event, text = _read(line, word)
        if event in FINAL:
            return Run(event, "", tuple(text.split())) if event == "sealed" else Run(event, text)
        if event:
            phase, deadline = event, time.monotonic() + seconds


def _read(line: bytes, word: str) -> tuple[str, str]:
    """(event, text) of a line with the right word; nothing for any other line."""
    parts = line.decode("ascii", "replace").rstrip("\n").split(" ")
    if len(parts) != 3 or not secrets.compare_digest(parts[0].encode(), word.encode()):
        return "", ""
    try:
        return parts[1], bytes.fromhex(parts[2]).decode("utf-8", "replace")
    except ValueError:
        return "", ""


def _late(phase: str, seconds: float) -> Run:
    if phase == "start":
        return Run("broken", f"the lesson's own cells took longer than {SETUP_SECONDS} s")
    if phase == "passed":
        return Run("undecided", f"right at first, then it did not end within {seconds:g} s")
    return Run("timeout", f"stopped after {seconds:g} s: does it ever end?")


def _ended(phase: str, status: int | None) -> Run:
    how = "was closed from within" if status is None else f"ended with exit status {status}"
    if status is not None and status < 0:
        name = signal.Signals(-status).name if -status in {s.value for s in signal.Signals} else f"signal {-status}"
        how = f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if phase == "start":
        return Run("broken", f"the process {how} while it ran the lesson's own cells")
    if phase == "passed":
        return Run("undecided", f"right at first, then its process {how}")
    return Run("crashed", f"its process {how} before there was a result")


@dataclass
class _Watch:
    """Threads that keep a process's pipes empty, so that it can neither block nor fill the memory."""

    process: subprocess.Popen
    lines: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    log: bytearray = field(default_factory=bytearray)
    threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for work, stream in ((self._read_lines, self.process.stdout), (self._read_log, self.process.stderr)):
            self.threads.append(threading.Thread(target=self._read, args=(work, stream), daemon=True))
            self.threads[-1].start()

    def _read(self, work: Callable[[IO[bytes]], None], stream: IO[bytes]) -> None:
        with stream:
            work(stream)

    def _read_lines(self, stream: IO[bytes]) -> None:
        left = MOST_LINES
        while line := stream.readline(20_000):
            left -= 1
            if left > 0:
                self.lines.put(line)
        self.lines.put(None)

    def _read_log(self, stream: IO[bytes]) -> None:
        while piece := stream.read1(65536):
            self.log += piece[: max(0, KEPT - len(self.log))]

    def send(self, text: str) -> None:
        try:
            self.process.stdin.write(text.encode())
            self.process.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it ended already; what follows says so

    def exit_status(self) -> int | None:
        try:
            return self.process.wait(2)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill the process and whatever it started in its group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
        except (ProcessLookupError, PermissionError):
            pass
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join(2)  # a child that left the group may hold a pipe open; its thread then ends with it

    def printed(self) -> str:
        return self.log.decode("utf-8", "replace")
