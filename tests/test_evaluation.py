"""Win rates with ties, bootstrap intervals over seeds and items, paired differences: by hand and against simulations."""

import math
from collections import Counter

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sysdpo_lab import errors, evaluation

FINITE = st.floats(allow_nan=False)
RATES = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4)


# --- wins -------------------------------------------------------------------------------------------------------------


@given(FINITE, FINITE)
def test_wins_of_both_orders_add_up_to_one_and_only_equal_scores_tie(first, second):
    assert evaluation.win(first, second) + evaluation.win(second, first) == 1.0
    assert (evaluation.win(first, second) == 0.5) == (first == second)
    assert evaluation.win(first, second) == (1.0 if first > second else 0.0 if first < second else 0.5)


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_equal_infinities_tie(infinite):
    assert evaluation.win(infinite, infinite) == 0.5


@pytest.mark.parametrize("scores", [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)])
def test_nan_wins_nothing_and_is_refused(scores):
    with pytest.raises(errors.NonFiniteError, match="nan"):
        evaluation.win(*scores)


# --- intervals by hand ------------------------------------------------------------------------------------------------


def shares(table, resamples=40_000) -> dict[float, float]:
    counts = Counter(evaluation.resampled_means(numpy.array(table, float), resamples).tolist())
    return {value: count / resamples for value, count in counts.items()}


def test_items_are_drawn_once_for_all_seeds():
    # item 1 is drawn 0, 1 or 2 times with probability 1/4, 1/2, 1/4; items drawn apart for each seed would give quarters
    assert shares([[0, 1], [0, 1]]) == pytest.approx({0.0: 0.25, 0.5: 0.5, 1.0: 0.25}, abs=0.01)


def test_seeds_are_drawn_too():
    assert shares([[0, 0], [1, 1]]) == pytest.approx({0.0: 0.25, 0.5: 0.5, 1.0: 0.25}, abs=0.01)


def test_seeds_and_items_are_drawn_independently():
    # mean = (draws of seed 1)/2 x (draws of item 1)/2, each factor 0, 1/2, 1 with probability 1/4, 1/2, 1/4
    expected = {0.0: 7 / 16, 0.25: 1 / 4, 0.5: 1 / 4, 1.0: 1 / 16}
    assert shares([[0, 0], [0, 1]]) == pytest.approx(expected, abs=0.01)


def test_the_limits_are_the_quantiles_of_the_resampled_means():
    assert evaluation.interval([[0, 1], [0, 1]]) == evaluation.Interval(0.5, 0.0, 1.0, 4)


def test_one_seed_of_many_items_gives_the_interval_of_a_mean():
    items = numpy.random.default_rng(1).normal(3.0, 2.0, 400)
    found = evaluation.interval([items.tolist()], resamples=8000)
    half = 1.96 * items.std() / 20  # sqrt(400)
    assert found.value == pytest.approx(items.mean(), abs=1e-12)
    assert (found.value - found.ci_low, found.ci_high - found.value) == pytest.approx((half, half), rel=0.08)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (2, 7)])
def test_equal_items_give_an_interval_of_width_zero(value, shape):
    table = numpy.full(shape, value).tolist()
    assert evaluation.interval(table) == evaluation.Interval(value, value, value, shape[0] * shape[1])


@given(RATES)
def test_the_interval_of_rates_stays_within_their_range(table):
    found = evaluation.interval(table, resamples=50)
    smallest, largest = numpy.min(table), numpy.max(table)
    assert smallest <= found.ci_low <= found.ci_high <= largest
    assert smallest <= found.value <= largest


def test_the_value_is_the_mean_over_seeds_of_the_mean_over_items():
    assert evaluation.interval([[0, 0, 3], [1, 1, 1]]).value == 1.0


def test_the_same_table_gives_the_same_interval_and_global_random_state_is_untouched():
    before = numpy.random.get_state()[1].tolist()
    table = numpy.random.default_rng(0).random((3, 20)).tolist()
    assert evaluation.interval(table) == evaluation.interval(table) != evaluation.interval(table, seed=1)
    assert numpy.random.get_state()[1].tolist() == before


# --- intervals against simulations --------------------------------------------------------------------------------------


def simulated(rng, seeds: int, items: int, seed_effect: float, item_effect: float, noise: float):
    effects = rng.normal(0, seed_effect, (seeds, 1)) + rng.normal(0, item_effect, (1, items))
    return effects + rng.normal(0, noise, (seeds, items))  # the true mean is 0


def coverage(method, repetitions=300, **sizes) -> float:
    rng = numpy.random.default_rng(7)
    found = [method(simulated(rng, **sizes)) for _ in range(repetitions)]
    return sum(low <= 0 <= high for low, high in found) / repetitions


def ours(table):
    found = evaluation.interval(table.tolist(), resamples=300)
    return found.ci_low, found.ci_high


def cells_apart(table):
    """The mistake: every cell counts as a draw of its own."""
    half = 1.96 * table.std() / math.sqrt(table.size)
    return table.mean() - half, table.mean() + half


def test_about_95_percent_of_the_intervals_hold_the_true_mean():
    sizes = dict(seeds=15, items=60, seed_effect=0.3, item_effect=1.0, noise=0.5)
    assert 0.90 <= coverage(ours, **sizes) <= 0.99
    assert coverage(cells_apart, **sizes) < 0.7  # the same data, counted as 900 items


def test_where_neither_seeds_nor_items_matter_the_interval_is_too_wide_as_documented():
    rng = numpy.random.default_rng(3)
    ratios = []
    for _ in range(40):
        table = simulated(rng, 10, 40, 0.0, 0.0, 1.0)
        low, high = ours(table)
        ratios.append((high - low) / (2 * 1.96 / 20))  # sqrt(400)
    assert numpy.mean(ratios) == pytest.approx(math.sqrt(3), rel=0.1)


# --- paired differences -------------------------------------------------------------------------------------------------


def test_a_paired_difference_is_much_tighter_than_the_two_intervals_on_correlated_items():
    rng = numpy.random.default_rng(0)
    start = rng.normal(0, 1, (1, 150)) + rng.normal(0, 0.05, (3, 150))
    better = start + 0.1 + rng.normal(0, 0.05, (3, 150))
    found = evaluation.paired_difference(better.tolist(), start.tolist())
    unpaired = evaluation.interval(better.tolist())
    assert found.value == pytest.approx((better - start).mean(), abs=1e-12)
    assert found.ci_low > 0  # the unpaired intervals overlap
    assert evaluation.interval(start.tolist()).ci_high > unpaired.ci_low
    assert found.ci_high - found.ci_low < 0.2 * (unpaired.ci_high - unpaired.ci_low)


def test_a_paired_difference_changes_its_sign_with_the_order():
    rng = numpy.random.default_rng(0)
    a, b = rng.random((2, 9)).tolist(), rng.random((2, 9)).tolist()
    one, other = evaluation.paired_difference(a, b), evaluation.paired_difference(b, a)
    assert one.value == pytest.approx(-other.value)
    assert one.ci_low == pytest.approx(-other.ci_high)


def test_paired_tables_of_different_shapes_are_refused():
    with pytest.raises(errors.BatchMismatchError, match=r"\(1, 2\) and \(1, 3\)"):
        evaluation.paired_difference([[0, 1]], [[0, 1, 2]])


# --- bad tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [[], [[]], [[1, 2], [1]]])
def test_seeds_need_the_same_items_at_least_one(table):
    with pytest.raises(errors.BatchMismatchError, match="same items"):
        evaluation.interval(table)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_by_seed_and_item(bad):
    with pytest.raises(errors.NonFiniteError, match="seed 1, item 2"):
        evaluation.interval([[0, 0, 0], [0, 0, bad]])


# --- the rows of summary.json -------------------------------------------------------------------------------------------


def records(systems=("prompted", "only:draft", "joint"), seeds=(4, 9), items=3):
    """wr = seed/10 + item, higher by 1 for each later system; the start has no "win"."""
    return [
        {"seed": seed, "system": system, "item": item, "score": seed / 10 + item + number}
        | ({"win": float(number)} if number else {})
        for number, system in enumerate(systems)
        for seed in seeds
        for item in range(items)
    ]


def test_rows_hold_each_systems_mean_and_leave_out_what_it_does_not_have():
    rows, _ = evaluation.summarise(records(), ("score", "win", "never"), (4, 9))
    found = {(row["system"], row["metric"]): row["value"] for row in rows}
    expected = {("prompted", "score"): 1.65, ("only:draft", "score"): 2.65, ("joint", "score"): 3.65}
    assert found == pytest.approx(expected | {("only:draft", "win"): 1.0, ("joint", "win"): 2.0})
    assert {row["n"] for row in rows} == {6}
    assert set(rows[0]) == {"system", "metric", "value", "ci_low", "ci_high", "n"}


def test_differences_are_with_the_start_and_of_joint_with_the_others_and_paired():
    _, differences = evaluation.summarise(records(), ("score", "win"), (4, 9))
    expected = {
        ("only:draft", "prompted", "score"): 1,
        ("joint", "prompted", "score"): 2,
        ("joint", "only:draft", "score"): 1,
        ("joint", "only:draft", "win"): 1,
    }
    for key in ("value", "ci_low", "ci_high"):  # the same difference on every item: width 0, though the items differ
        assert {(d["a"], d["b"], d["metric"]): d[key] for d in differences} == pytest.approx(expected)


def test_the_order_of_the_records_does_not_matter_within_a_system():
    plain = records()
    shuffled = sorted(plain, key=lambda r: (r["system"] != "prompted", -r["item"], r["seed"]))
    assert evaluation.summarise(plain, ("score",), (4, 9)) == evaluation.summarise(shuffled, ("score",), (4, 9))


def test_without_joint_there_are_only_differences_with_the_start():
    _, differences = evaluation.summarise(records(("before", "only:y", "only:z")), ("score",), (4, 9))
    assert [(d["a"], d["b"]) for d in differences] == [("only:y", "before"), ("only:z", "before")]


def test_pairs_of_ones_own_take_the_place_of_the_usual_differences():
    _, differences = evaluation.summarise(records(), ("score", "win"), (4, 9), [("only:draft", "joint")])
    assert [(d["a"], d["b"], d["metric"], d["value"]) for d in differences] == [
        ("only:draft", "joint", "score", pytest.approx(-1.0)),
        ("only:draft", "joint", "win", pytest.approx(-1.0)),
    ]
    assert evaluation.summarise(records(), ("score",), (4, 9), [])[1] == []


@pytest.mark.parametrize(("seed", "item"), [(9, 1), (4, 0)])
def test_a_record_without_the_metric_is_named(seed, item):
    broken = records()
    for record in broken:
        if (record["system"], record["seed"], record["item"]) == ("joint", seed, item):
            record["score"] = None
    with pytest.raises(errors.BatchMismatchError, match=f"score of 'joint' is missing for 1 of 6 .*seed {seed}, item {item}"):
        evaluation.summarise(broken, ("score",), (4, 9))


def test_a_system_with_fewer_items_or_seeds_is_refused():
    fewer = [r for r in records() if not (r["system"] == "joint" and r["item"] == 2)]
    with pytest.raises(errors.BatchMismatchError, match="'joint' is missing for 2 of 6"):
        evaluation.summarise(fewer, ("score",), (4, 9))
    one_seed = [r for r in records() if not (r["system"] == "joint" and r["seed"] == 9)]
    with pytest.raises(errors.BatchMismatchError, match="'joint' is missing for 3 of 6"):
        evaluation.summarise(one_seed, ("score",), (4, 9))


def test_a_nan_in_the_records_is_named_by_metric_and_system():
    broken = records()
    broken[-1]["score"] = math.nan
    with pytest.raises(errors.NonFiniteError, match="score of 'joint': seed 1, item 2"):
        evaluation.summarise(broken, ("score",), (4, 9))


def test_find_row_finds_a_row_or_lists_what_there_is():
    rows, _ = evaluation.summarise(records(), ("score",), (4, 9))
    assert evaluation.find_row({"rows": rows}, "joint", "score")["value"] == pytest.approx(3.65)
    with pytest.raises(errors.UnknownOptionError, match="'only:draft', 'score'"):
        evaluation.find_row({"rows": rows}, "separate", "score")
