"""Results tables: what comes back from CSV, which columns vary, and what is refused."""

import pytest

from sysdpo_lab import errors
from sysdpo_lab.experiments import grid_table

ROWS = [
    {"k": k, "sampler": sampler, "system": "joint", "metric": metric, "value": k / 4, "ci_low": 0.0, "ci_high": 1.5, "n": 6}
    for k in (4, 2)
    for sampler in ("mc", "dbs")
    for metric in ("kl", "wr_prompted")
]  # fmt: skip


def test_a_table_comes_back_as_it_was(tmp_path):
    path = grid_table.write(tmp_path / "table.csv", ROWS)
    assert grid_table.read(path) == ROWS
    assert path.read_text().splitlines()[0] == "k,sampler,system,metric,value,ci_low,ci_high,n"


def test_a_setting_that_a_row_lacks_is_left_out_of_it(tmp_path):
    rows = [{"system": "prompted", "metric": "kl", "value": 0.0}, {"beta": 0.1, "system": "joint", "metric": "kl", "value": 1.0}]
    assert grid_table.read(grid_table.write(tmp_path / "t.csv", rows)) == rows


def test_texts_with_commas_and_quotes_survive(tmp_path):
    rows = [{"rows": 'prompted,"joint"', "metric": "kl", "value": 1.5}]
    assert grid_table.read(grid_table.write(tmp_path / "t.csv", rows)) == rows


def test_floats_keep_every_digit(tmp_path):
    rows = [{"metric": "kl", "value": 0.1 + 0.2}, {"metric": "kl", "value": -1e-17}]
    assert grid_table.read(grid_table.write(tmp_path / "t.csv", rows)) == rows


def test_axes_are_what_varies_numbers_rising_and_words_in_order():
    assert grid_table.axes(ROWS) == {"k": [2, 4], "sampler": ["mc", "dbs"]}
    assert grid_table.axes([{**row, "k": 2} for row in ROWS if row["k"] == 2]) == {"sampler": ["mc", "dbs"]}


def test_systems_are_an_axis_only_where_one_cell_has_several():
    several = [{**row, "system": system} for row in ROWS for system in ("only:draft", "joint")]
    assert grid_table.axes(several)["system"] == ["only:draft", "joint"]
    named = [{**row, "system": f"joint[{row['sampler']}]"} for row in ROWS]
    assert "system" not in grid_table.axes(named)


def test_select_keeps_one_metric_and_the_fixed_values():
    assert [row["value"] for row in grid_table.select(ROWS, "kl", sampler="dbs")] == [1.0, 0.5]
    with pytest.raises(errors.UnknownOptionError, match="metric='gap'.*'kl', 'wr_prompted'"):
        grid_table.select(ROWS, "gap")
    with pytest.raises(errors.UnknownOptionError, match="k=3.*2, 4"):
        grid_table.select(ROWS, "kl", k=3)


def test_places_must_be_unique():
    kl = grid_table.select(ROWS, "kl")
    assert set(grid_table.by_places(kl, "k", "sampler")) == {(k, s) for k in (2, 4) for s in ("mc", "dbs")}
    with pytest.raises(errors.UnknownOptionError, match="several rows at {'k': 4}: sampler varies too; fix it"):
        grid_table.by_places(kl, "k")
    with pytest.raises(errors.UnknownOptionError, match="setting='beta'"):
        grid_table.by_places(kl, "beta")


def test_item_values_are_a_list_a_seed_items_in_order():
    items = [{"seed": s, "item": i, "system": "joint", "k": 2, "kl": 10 * s + i} for s in (1, 0) for i in (2, 0, 1)]
    assert grid_table.item_values(items, "kl", k=2, system="joint") == [[0, 1, 2], [10, 11, 12]]
    with pytest.raises(errors.UnknownOptionError, match="name one cell and one system"):
        grid_table.item_values([*items, {**items[0], "k": 4}], "kl", system="joint")
    for where in ({"k": 3}, {"system": "separate"}):
        with pytest.raises(errors.UnknownOptionError, match="0 values of 'kl'"):
            grid_table.item_values(items, "kl", **where)


def test_a_missing_table_says_how_one_is_made(tmp_path):
    with pytest.raises(errors.MissingFileError, match="python -m sysdpo_lab grid"):
        grid_table.read(tmp_path / "table.csv")
