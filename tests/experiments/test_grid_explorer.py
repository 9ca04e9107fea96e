"""The explorer: each menu changes the picture, choices that were not run say so, and bad starts are refused."""

import pytest

from sysdpo_lab import errors
from sysdpo_lab.experiments import grid_explorer

ROWS = [
    {"k": k, "sampler": sampler, "beta": beta, "system": "joint", "metric": metric, "value": k / 8 + beta / 4 + len(sampler) / 9,
     "ci_low": 0.1, "ci_high": 0.9, "n": 6}
    for k in (2, 4) for sampler in ("dbs", "mc") for beta in (0.1, 0.5) for metric in ("wr_prompted", "kl")
    if (k, sampler) != (4, "mc")
]  # fmt: skip


def explorer(**start):
    return grid_explorer.explorer(ROWS, "win rate against k", **start)


def test_the_menus_are_the_metrics_and_the_settings_that_vary():
    view = explorer()
    assert list(view.sliders) == ["kind", "metric", "across", "by", "k", "sampler", "beta"]
    assert list(view.sliders["by"].options) == ["(none)", "k", "sampler", "beta"]
    assert list(view.sliders["beta"].options) == [0.1, 0.5]


@pytest.mark.parametrize(
    ("menu", "value"),
    [("kind", "heat map"), ("metric", "kl"), ("across", "beta"), ("by", "(none)"), ("sampler", "mc"), ("beta", 0.5)],
)
def test_each_menu_changes_the_picture(menu, value):
    view = explorer(across="k", by="beta" if menu == "sampler" else "sampler")
    before = view.picture.value
    view.sliders[menu].value = value
    assert view.picture.value != before and view.picture.value[:4] == b"\x89PNG"


def test_a_setting_that_is_drawn_is_not_held():
    view = explorer(across="k", by="sampler")
    before = view.picture.value
    view.sliders["k"].value = 4
    assert view.picture.value == before


def axes_of(kind, across, by, **held):
    fixed = {"k": 2, "sampler": "dbs", "beta": 0.1, **held}
    return grid_explorer.draw(ROWS, kind, "kl", across, by, fixed).axes


def test_a_heat_map_needs_two_settings_else_lines_are_drawn():
    assert len(axes_of("heat map", "k", "sampler")[0].images) == 1
    for by in ("(none)", "k"):
        assert len(axes_of("heat map", "k", by)[0].images) == 0


def test_a_choice_without_a_number_says_so(monkeypatch):
    told = []
    monkeypatch.setattr(grid_explorer, "_said", lambda text: told.append(text) or grid_explorer.grid_figures.plot_lines(
        [row for row in ROWS if row["sampler"] == "dbs" and row["beta"] == 0.1], "kl", "k"))  # fmt: skip
    view = grid_explorer.explorer([row for row in ROWS if row["metric"] == "kl" or row["k"] == 2], "x", across="beta")
    assert told == []
    view.sliders["k"].value = 4
    assert told == ["k=4 does not exist; choose one of 2"]


def test_the_picture_of_a_refusal_shows_its_words():
    (ax,) = grid_explorer._said("the setting k was not run").axes
    assert "the setting k was not run" in ax.texts[0].get_text()


@pytest.mark.parametrize("start", [{"metric": "gap"}, {"across": "rank"}, {"k": 3}, {"kind": "bars"}])
def test_a_start_that_does_not_exist_is_refused(start):
    with pytest.raises(errors.UnknownOptionError, match=next(iter(start))):
        explorer(**start)


def test_a_table_in_which_nothing_varies_is_refused():
    with pytest.raises(errors.UnknownOptionError, match="nothing varies"):
        grid_explorer.explorer(ROWS[:1], "x")
    with pytest.raises(errors.MissingAltTextError):
        grid_explorer.explorer(ROWS, " ")
