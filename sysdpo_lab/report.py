"""One HTML file that holds a run: tables, figures, before/after samples, seeds and versions. No script, no network."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sysdpo_lab import atomic, errors

Figure = tuple[Path | str | bytes, str]  # (PNG file or its bytes, alt text, which is the caption too)
TABLES = {"rows", "differences", "versions", "experiment", "profile"}  # of a summary; other keys go to "How it was made"

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --page: #ffffff; --line: #d0d0d0; --head: #f2f2f2; --soft: #595959; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --page: #16181b; --line: #3d4147; --head: #23262b; --soft: #a8adb4; }
}
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--page); }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--head); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1.2rem 0; }
figure img { max-width: 100%; background: white; border: 1px solid var(--line); border-radius: 4px; }
figcaption, .note { color: var(--soft); font-size: 0.92rem; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; }
code { overflow-wrap: anywhere; }
"""


def write_report(
    folder: Path | str,
    summary: Mapping[str, Any],
    figures: Sequence[Figure] = (),
    title: str = "",
    prose: str = "",
    samples: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write FOLDER/report.html in one step.

    Args:
        folder: the run's folder; made when missing.
        summary: as in summary.json: "experiment", "profile", "seeds", "rows", "differences", "seconds",
            "peak_memory_mb", "versions"; any other key (such as "command") is shown as it is.
        figures: (PNG file or bytes, alt text) each; the alt text is the caption too.
        title: the heading; experiment and profile by default.
        prose: plain text, paragraphs parted by empty lines.
        samples: one mapping a sample, such as {"input": ..., "before": ..., "after": ...}; the keys become columns.

    Returns:
        the file's path.

    Raises:
        MissingAltTextError: a figure without alt text.

    >>> import tempfile
    >>> row = {"system": "joint", "metric": "gap", "value": 0.1, "ci_low": 0.0, "ci_high": 0.2, "n": 8}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_report(folder, {"experiment": "toy", "profile": "toy", "rows": [row]}).read_text()
    >>> "0.100 [0.000, 0.200]" in page
    True
    """
    title = title or f"{summary.get('experiment', 'run')}, profile {summary.get('profile', 'unknown')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(paragraph.strip())}</p>" for paragraph in prose.split("\n\n") if paragraph.strip()),
        *_results(summary.get("rows", ())),
        *_differences(summary.get("differences", ())),
        *_figures(figures),
        *_samples(samples),
        *_origin(summary),
    ]
    return atomic.write_text(Path(folder) / "report.html", page(title, parts))


def page(title: str, parts: Iterable[str]) -> str:
    """A whole HTML page around the parts (which are HTML already)."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n'


def interval(row: Mapping[str, Any]) -> str:
    """The value with its 95 % interval.

    >>> interval({"value": 0.61, "ci_low": 0.5, "ci_high": 0.7})
    '0.610 [0.500, 0.700]'
    """
    return f"{number(row['value'])} [{number(row['ci_low'])}, {number(row['ci_high'])}]"


def number(value: Any) -> str:
    """A number with three decimals, or "-" where there is none."""
    return "-" if value is None else f"{value:.3f}"


# --- sections ---------------------------------------------------------------------------------------------------------


def _results(rows: Iterable[Mapping]) -> list[str]:
    body = [[row["system"], row["metric"], interval(row), row["n"]] for row in rows]
    if not body:
        return []
    note = '<p class="note">Mean over seeds of the mean over items, with the 95 % bootstrap interval.</p>'
    return ["<h2>Results</h2>", table(("system", "metric", "value [95 % interval]", "n"), body, numbers={2, 3}), note]


def _differences(rows: Iterable[Mapping]) -> list[str]:
    body = [[f"{row['a']} - {row['b']}", row["metric"], interval(row), _clear(row)] for row in rows]
    if not body:
        return []
    head = ("difference", "metric", "value [95 % interval]", "0 outside the interval")
    return ["<h2>Paired differences</h2>", table(head, body, numbers={2})]


def _clear(row: Mapping) -> str:
    return "yes" if row["ci_low"] > 0 or row["ci_high"] < 0 else "no"


def _figures(figures: Iterable[Figure]) -> list[str]:
    parts = []
    for source, alt in figures:
        if not alt.strip():
            raise errors.MissingAltTextError(f"figure {source if not isinstance(source, bytes) else ''} needs alt text")
        png = source if isinstance(source, bytes) else Path(source).read_bytes()
        data = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        # the PNG header holds the width in dots; figures.py draws 1.5 of them for one dot of the page
        width = round(int.from_bytes(png[16:20], "big") / 1.5)
        image = f'<img src="{data}" alt="{escape(alt, quote=True)}" width="{width}">'
        parts.append(f"<figure>{image}<figcaption>{escape(alt)}</figcaption></figure>")
    return ["<h2>Figures</h2>", *parts] if parts else []


def _samples(samples: Sequence[Mapping]) -> list[str]:
    if not samples:
        return []
    head = list(dict.fromkeys(key for sample in samples for key in sample))
    body = [[sample.get(key, "") for key in head] for sample in samples]
    return ["<h2>Samples before and after</h2>", table(head, body)]


def _origin(summary: Mapping) -> list[str]:
    facts = [[key, _plain(value)] for key, value in summary.items() if key not in TABLES]
    versions = [[name, _plain(version)] for name, version in summary.get("versions", {}).items()]
    parts = ["<h2>How it was made</h2>", table(("what", "value"), facts)] if facts else []
    return [*parts, "<h2>Versions</h2>", table(("package", "version"), versions)] if versions else parts


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def table(head: Sequence[str], body: Iterable[Sequence[Any]], numbers: Iterable[int] = ()) -> str:
    """An HTML table of escaped text; the columns in `numbers` are aligned to the right."""
    numbers = set(numbers)

    def row(cells: Sequence[Any], tag: str) -> str:
        kinds = ("number" if column in numbers else "text" for column in range(len(cells)))
        return "".join(f'<{tag} class="{kind}">{escape(str(cell))}</{tag}>' for kind, cell in zip(kinds, cells))

    lines = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in body)
    return f'<div class="wide"><table><thead><tr>{row(head, "th")}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'
