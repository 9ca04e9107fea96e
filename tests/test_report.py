"""The report holds every number, needs nothing outside itself, and shows text as text."""

import base64
import re
from html.parser import HTMLParser

import pytest

from sysdpo_lab import errors, figures, report

SUMMARY = {
    "experiment": "two-llm",
    "profile": "tiny",
    "seeds": [0, 1, 2],
    "rows": [
        {"system": "prompted", "metric": "wr_prompted", "value": 0.5, "ci_low": 0.5, "ci_high": 0.5, "n": 90},
        {"system": "joint", "metric": "wr_prompted", "value": 0.6123, "ci_low": 0.55, "ci_high": 0.67, "n": 90},
    ],
    "differences": [
        {"a": "joint", "b": "prompted", "metric": "task_score", "value": 0.1, "ci_low": 0.02, "ci_high": 0.18},
        {"a": "joint", "b": "separate", "metric": "task_score", "value": 0.01, "ci_low": -0.02, "ci_high": 0.04},
    ],
    "seconds": 73.25,
    "peak_memory_mb": 900.0,
    "versions": {"torch": "2.13.0"},
    "command": "python -m sysdpo_lab run two-llm --profile tiny",
}
SAMPLES = [{"input": "name: <b>Aroma</b>", "before": "Aroma & co", "after": 'Aroma "is"\ncheap.'}]
ROWS = SUMMARY["rows"]


class Reader(HTMLParser):
    """Tags with their attributes, and the text of each table row."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def png():
    return figures.figure_png(figures.plot_rows(ROWS, "wr_prompted"))


@pytest.fixture
def read(tmp_path, png):
    path = report.write_report(tmp_path, SUMMARY, [(png, 'a dot at "0.61"')], "Two models", "One.\n\nTwo <i>.", SAMPLES)
    return path.read_text(encoding="utf-8"), Reader(path.read_text(encoding="utf-8"))


def test_every_row_shows_its_value_interval_and_count(read):
    assert ["joint", "wr_prompted", "0.612 [0.550, 0.670]", "90"] in read[1].rows


def test_a_difference_says_whether_its_interval_excludes_zero(read):
    assert ["joint - prompted", "task_score", "0.100 [0.020, 0.180]", "yes"] in read[1].rows
    assert ["joint - separate", "task_score", "0.010 [-0.020, 0.040]", "no"] in read[1].rows


def test_command_seeds_and_versions_are_there(read):
    for row in (["command", SUMMARY["command"]], ["seeds", "0, 1, 2"], ["torch", "2.13.0"], ["seconds", "73.2"]):
        assert row in read[1].rows


def test_samples_are_shown_as_text_and_never_as_html(read):
    text, reader = read
    assert ["name: <b>Aroma</b>", "Aroma & co", 'Aroma "is"\ncheap.'] in reader.rows
    assert "<p>Two &lt;i&gt;.</p>" in text
    assert not {tag for tag, _ in reader.tags} & {"b", "i", "script"}


def test_figures_are_inside_the_file_with_alt_text(read, png):
    images = [attributes for tag, attributes in read[1].tags if tag == "img"]
    assert len(images) == 1 and images[0]["alt"] == 'a dot at "0.61"'
    assert base64.b64decode(images[0]["src"].removeprefix("data:image/png;base64,")) == png


def test_nothing_is_fetched_and_both_colour_schemes_are_defined(read):
    text, reader = read
    assert not re.search(r"https?://|url\(|@import", text)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe"}
    assert "prefers-color-scheme: dark" in text


def test_the_page_is_the_same_whether_a_figure_comes_as_file_or_bytes(tmp_path, png):
    file = tmp_path / "a.png"
    file.write_bytes(png)
    pages = [report.write_report(tmp_path, SUMMARY, [(source, "a")]).read_bytes() for source in (file, str(file), png)]
    assert len(set(pages)) == 1


def test_a_figure_without_alt_text_is_refused_and_no_report_is_left(tmp_path, png):
    with pytest.raises(errors.MissingAltTextError):
        report.write_report(tmp_path, SUMMARY, [(png, "")])
    assert not list(tmp_path.iterdir())


def test_empty_sections_are_left_out(tmp_path):
    text = report.write_report(tmp_path, {"experiment": "toy", "profile": "toy"}).read_text()
    assert "<h1>toy, profile toy</h1>" in text and "<h2>" not in text
