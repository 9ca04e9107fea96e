"""Results in words: a page for whoever handed in, a row for the grade book, a table for the terminal."""

from collections.abc import Sequence

WORDS = {
    "right": "right",
    "wrong": "not right yet",
    "not answered": "not answered",
    "missing": "cell missing",
    "timeout": "took too long",
    "crashed": "ended its process",
    "held": "held back",
    "tampered": "refused",
    "broken": "could not be run",
    "by hand": "marked by a person",
}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run a cell that begins so


def number(value: float) -> str:
    """Points without needless zeros.

    >>> number(2.0), number(0.5)
    ('2', '0.5')
    """
    return f"{value:g}"


def page(made: dict) -> str:
    """The feedback on one hand-in as Markdown; what comes from the hand-in stands indented, so that it is shown as text."""
    lines = [f"# Feedback: {made['name']}", ""]
    if made["error"]:
        return "\n".join([*lines, "This file could not be graded:", "", *_quoted(made["error"]), ""])
    lines += [f"Lesson {made['lesson']}: **{number(made['points'])} of {number(made['possible'])} points**", ""]
    if made["by_hand"]:
        lines += [f"Up to {number(made['by_hand'])} more points are given by a person.", ""]
    for entry in made["exercises"]:
        word = WORDS.get(entry["status"], entry["status"])
        lines += [f"## {entry['exercise']}: {number(entry['points'])} of {number(entry['possible'])}, {word}", ""]
        if entry["status"] not in ("right", "by hand"):
            lines += [*_quoted(entry["message"]), ""] if entry["message"] != word else []
            if entry["printed"].strip():
                lines += ["Printed:", "", *_quoted(entry["printed"]), ""]
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    """Lines of an indented block, without control characters."""
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return ["    " + line for line in shown.strip("\n").split("\n")]


def row(made: dict) -> dict[str, str]:
    """One line of grades.csv: a column for each exercise, named by lesson and exercise."""
    about = {"name": made["name"], "lesson": made["lesson"] or "", "points": number(made["points"])}
    about |= {"possible": number(made["possible"]), "error": made["error"], "file": made["file"]}
    about |= {f"{made['lesson']}/{entry['exercise']}": number(entry["points"]) for entry in made["exercises"]}
    return {column: _safe(value) if column in ("name", "error", "file") else value for column, value in about.items()}


def _safe(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA) else text


def line(made: dict) -> str:
    """One hand-in in one line.

    >>> line({"name": "ann", "error": "", "points": 3, "possible": 5.0, "exercises": [
    ...     {"exercise": "margin", "status": "right"}, {"exercise": "loss", "status": "timeout"}]})
    'ann: 3 of 5; loss took too long'
    """
    if made["error"]:
        return f"{made['name']}: {made['error']}"
    rest = [entry for entry in made["exercises"] if entry["status"] != "right"]
    said = [f"{entry['exercise']} {WORDS.get(entry['status'], entry['status'])}" for entry in rest]
    return "; ".join([f"{made['name']}: {number(made['points'])} of {number(made['possible'])}", *said])


def table(entries: Sequence[dict]) -> str:
    """Names and points in columns."""
    width = max((len(made["name"]) for made in entries), default=4)
    lines = [f"{'name':{width}}  points  lesson"]
    for made in entries:
        points = "-" if made["error"] else f"{number(made['points'])}/{number(made['possible'])}"
        lines.append(f"{made['name']:{width}}  {points:>6}  {made['lesson'] or made['error']}")
    return "\n".join(lines)
