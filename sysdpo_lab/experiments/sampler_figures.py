"""Figures and sentences from a summary of `run samplers`, stored or fresh; the lesson on diversity draws the same ones."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sysdpo_lab import errors, figures
from sysdpo_lab.worlds.draft_laws import LAWS, WORDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "dbs": "DBS (top-k)",
    "mc": "MC, repeats removed",
    "mc-count": "MC, repeats counted",
    "mc-importance": "MC, importance weights",
    "gumbel": "Gumbel top-k",
    "gumbel-ht": "Gumbel, Horvitz-Thompson",
}
LABELS = {
    "loss_error": "loss error (nats)",
    "bias": "bias of the loss (nats)",
    "variance": "variance of the loss",
    "cosine_single": "cosine, one set",
    "cosine_mean": "cosine, mean of sets",
    "wr_greedy": "win rate, greedy",
    "wr_sampled": "win rate, sampled",
}
SIZES = (1, 2, 4, 5, 8, 16)
BARS = ("dbs-2", "dbs-4", "mc-2", "mc-3", "mc-4", "mc-5")
DECODINGS = ("wr_greedy", "wr_sampled")
Summary = Mapping  # with "rows" and "differences", as in summary.json


# --- reading a summary --------------------------------------------------------------------------------------------------


def cells(summary: Summary) -> dict[tuple[str, str], Mapping]:
    """The rows of a summary by (system, metric).

    >>> cells({"rows": [{"system": "mc-2[zipf]", "metric": "bias", "value": 0.5}]})["mc-2[zipf]", "bias"]["value"]
    0.5
    """
    return {(row["system"], row["metric"]): row for row in summary["rows"]}


def differences(summary: Summary) -> dict[tuple[str, str, str], Mapping]:
    """The paired differences of a summary by (a, b, metric)."""
    return {(row["a"], row["b"], row["metric"]): row for row in summary["differences"]}


def settings_of(summary: Summary) -> list[str]:
    """Where training was run, in the order of the rows: "zipf,long" and the like.

    >>> settings_of({"rows": [{"system": "dbs-2[a,long]", "metric": "wr_greedy"}, {"system": "dbs-2[a]", "metric": "bias"}]})
    ['a,long']
    """
    trained = (row["system"] for row in summary["rows"] if row["metric"] in DECODINGS)
    return list(dict.fromkeys(system[system.index("[") + 1 : -1] for system in trained if "," in system))


def in_words(setting: str) -> str:
    """A training setting for people.

    >>> in_words("zipf,long,shared"), in_words("tail,long,psi1")
    ('1/rank, long, shared refiner', 'best z behind unlikely y, long, psi1 alone')
    """
    law, mode, *variant = setting.split(",")
    more = {"shared": "shared refiner", "psi1": "psi1 alone"}
    return ", ".join([WORDS[law], mode, *(more[word] for word in variant)])


# --- figures ------------------------------------------------------------------------------------------------------------


def plot_estimators(
    summary: Summary,
    metrics: Sequence[str] = ("bias", "variance", "cosine_single", "cosine_mean"),
    laws: Sequence[str] = LAWS,
    estimators: Sequence[str] = tuple(NAMES),
) -> "Figure":
    """Each metric against k: a column a law, a row a metric, a line an estimator, with 95 % intervals.

    Args:
        summary: of a run of `samplers`.
        metrics: keys of `LABELS`.
        laws: a column each.
        estimators: keys of `NAMES`.
    """
    for metric in metrics:
        errors.check_option("metric", metric, tuple(LABELS))
    found = cells(summary)
    figure, axes = figures.new_figure(
        len(laws), rows=len(metrics), width=1 + 2.3 * len(laws), height=0.7 + 1.9 * len(metrics)
    )
    styles = dict(zip(NAMES, figures.line_styles(len(NAMES))))
    for number, ax in enumerate(axes):
        metric, law = metrics[number // len(laws)], laws[number % len(laws)]
        for estimator in estimators:
            rows = {k: found.get((f"{estimator}-{k}[{law}]", metric)) for k in SIZES}
            _line(ax, {k: row for k, row in rows.items() if row}, dict(styles[estimator], label=NAMES[estimator]))
        _dress(ax, metric, first=number % len(laws) == 0, top=WORDS[law] if number < len(laws) else "")
        if number // len(laws) == len(metrics) - 1:
            ax.set_xlabel("k")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _line(ax, rows: Mapping[int, Mapping], style: dict) -> None:
    ks, values = list(rows), [row["value"] for row in rows.values()]
    ax.plot(ks, values, **style)
    ax.fill_between(
        ks, [row["ci_low"] for row in rows.values()], [row["ci_high"] for row in rows.values()],
        color=style["color"], alpha=0.2, linewidth=0,
    )  # fmt: skip


def _dress(ax, metric: str, first: bool, top: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    ax.set_ylim(bottom=0, top=1.05 if metric.startswith("cosine") else None)
    ax.ticklabel_format(axis="y", style="plain")
    if first:
        ax.set_ylabel(LABELS[metric])
    if top:
        ax.set_title(top, fontsize=10)


def plot_win_rates(
    summary: Summary, settings: Sequence[str], bars: Sequence[str] = BARS, metrics: Sequence[str] = DECODINGS
) -> "Figure":
    """Win rates against the reference (percent): a column a training setting, greedy above, sampled below.

    Args:
        summary: of a run of `samplers`.
        settings: such as "zipf,long"; see `settings_of`.
        bars: arms such as "dbs-2"; DBS is plain, the others are hatched.
        metrics: a row of panels each.
    """
    found = cells(summary)
    figure, axes = figures.new_figure(
        len(settings), rows=len(metrics), width=1 + 2.3 * len(settings), height=0.4 + 2.5 * len(metrics)
    )
    palette = [style["color"] for style in figures.line_styles(2)]
    for number, ax in enumerate(axes):
        metric, setting = metrics[number // len(settings)], settings[number % len(settings)]
        rows = [found[f"{arm}[{setting}]", metric] for arm in bars]
        for place, (arm, row) in enumerate(zip(bars, rows)):
            _bar(ax, place, row, palette[not arm.startswith("dbs")], "" if arm.startswith("dbs") else "//")
        ax.set_xticks(range(len(bars)), [arm.upper() for arm in bars], rotation=60, fontsize=8)
        low, high = min(100 * row["ci_low"] for row in rows), max(100 * row["ci_high"] for row in rows)
        ax.set_ylim(50.0 if low >= 50 else low - 1, max(high + 1, 55.0))
        ax.grid(False, axis="x")
        if number < len(settings):
            law, *rest = in_words(setting).split(", ")
            ax.set_title(f"{law}\n{', '.join(rest)}", fontsize=9)
        if number % len(settings) == 0:
            ax.set_ylabel(f"{LABELS[metric]} (%)")
    return figure


def _bar(ax, place: int, row: Mapping, color, hatch: str) -> None:
    low, value, high = (100 * row[key] for key in ("ci_low", "value", "ci_high"))
    ax.bar(place, value, color=color, hatch=hatch, edgecolor="white", width=0.8)
    ax.errorbar(place, value, [[value - low], [high - value]], color="black", linewidth=1.2, capsize=2)


def plot_order(summary: Summary, settings: Sequence[str], first: str = "dbs-2", second: str = "mc-2") -> "Figure":
    """Paired difference of win rates, first minus second (points), in every training setting: greedy and sampled.

    Right of 0 the first arm wins; where a line crosses 0 the run does not say.

    Args:
        summary: of a run of `samplers`.
        settings: such as "zipf,long"; the first stands on top.
        first, second: arms whose difference the summary holds.
    """
    found = differences(summary)
    figure, (ax,) = figures.new_figure(width=7.6, height=1.3 + 0.36 * len(settings))
    for shift, metric, style in zip((0.14, -0.14), DECODINGS, figures.line_styles(2)):
        for place, setting in enumerate(reversed(settings)):
            row = found[f"{first}[{setting}]", f"{second}[{setting}]", metric]
            low, value, high = (100 * row[key] for key in ("ci_low", "value", "ci_high"))
            ax.plot([low, high], [place + shift] * 2, color=style["color"], linewidth=2, solid_capstyle="butt")
            label = LABELS[metric] if place == 0 else None
            ax.plot(value, place + shift, color=style["color"], marker=style["marker"], linestyle="", label=label)
    ax.axvline(0, color="0.4", linestyle=":", linewidth=1)
    ax.set(yticks=range(len(settings)), yticklabels=[in_words(setting) for setting in reversed(settings)])
    ax.set_xlabel(f"{first.upper()} minus {second.upper()}, points of win rate (95 % interval)")
    ax.legend(frameon=False, loc="best")
    ax.grid(False, axis="y")
    return figure


def report_figures(summary: Summary, laws: Sequence[str]) -> dict[str, tuple["Figure", str]]:
    """The pictures of the report with their alt texts."""
    settings = settings_of(summary)
    plain = [setting for setting in settings if setting.count(",") == 1]
    pictures = {
        "estimators": (
            plot_estimators(summary, laws=laws),
            "Bias and variance of the loss and cosines of the gradient against k, a column a law, a line an estimator: DBS "
            "has no variance and the largest bias at small k; random sets trade bias for variance; weights help the mean",
        )
    }
    for mode in ("long", "short"):
        runs = [setting for setting in plain if setting.endswith(mode)]
        alt = f"Win rates of DBS and MC after {mode} training, greedy decoding above and sampled decoding below, one column a law"
        pictures[f"win_rates_{mode}"] = (plot_win_rates(summary, runs), alt)
    alt = "DBS-2 minus MC-2 in points of win rate, for each law and training, greedy and sampled; the order depends on both"
    pictures["order"] = (plot_order(summary, settings), alt)
    return pictures


# --- sentences ----------------------------------------------------------------------------------------------------------


def findings(summary: Summary, laws: Sequence[str] = LAWS) -> list[str]:
    """What a run found, as paragraphs; every number comes from the summary."""
    return [
        "Everything is summed exactly on tables: one input, 16 drafts, 4 answers. Estimators: at a policy near the reference, "
        "the loss and the gradient with a few drafts against those with all of them. Training: Adam from the reference, the set "
        "drawn anew from the current policy at each step; win rates are the judge's own preferences over the reference, decoded "
        "in the same way. DBS on a table is top-k, the best paraphrase of each meaning first. Row names: sampler-k[law] and "
        "sampler-k[law,training]; mc drops repeats, mc-count counts them, gumbel-ht has Horvitz-Thompson weights.",
        _estimators_in_words(summary, laws),
        _order_in_words(summary),
        _flatness_in_words(summary),
    ]


def _estimators_in_words(summary: Summary, laws: Sequence[str]) -> str:
    found, law = cells(summary), laws[0]
    wins, total = gumbel_wins(summary)

    def cosines(row: str) -> str:
        return " / ".join(f"{found[f'{row}[{law}]', name]['value']:.2f}" for name in ("cosine_single", "cosine_mean"))

    repeated = ", ".join(f"{found[f'mc-2[{name}]', 'one_draft']['value']:.0%} ({WORDS[name]})" for name in laws)
    shared = found.get(("mc-2[meanings]", "one_meaning"))
    meaning = f"; {shared['value']:.0%} of them hold one meaning where drafts share meanings" if shared else ""
    return (
        f"Estimators, law {WORDS[law]}, cosine to the exact gradient, one set / mean of sets: DBS-2 {cosines('dbs-2')}, "
        f"MC-2 {cosines('mc-2')}, MC-5 {cosines('mc-5')}, Gumbel-2 {cosines('gumbel-2')}, Gumbel-5 {cosines('gumbel-5')}. "
        f"Counting repeats does not become exact with k: its limit has cosine {cosines('mc-count-limit')}. Gumbel top-k is "
        f"ahead of both kinds of MC in {wins} of {total} comparisons (loss error and both cosines, k = 2 to 8). Share of MC-2 "
        f"sets with one distinct draft, from which psi1 learns nothing: {repeated}{meaning}."
    )


def gumbel_wins(summary: Summary) -> tuple[int, int]:
    """In how many comparisons Gumbel top-k beats Monte Carlo at the same k on loss error and cosines, and of how many."""
    ours = [
        row for row in summary["differences"]
        if row["a"].startswith("gumbel-") and row["metric"] in ("loss_error", "cosine_single", "cosine_mean")
    ]  # fmt: skip
    better = [row for row in ours if (row["value"] < 0 if row["metric"] == "loss_error" else row["value"] > 0)]
    return len(better), len(ours)


def orders(
    summary: Summary, metric: str, first: str = "dbs-2", second: str = "mc-2", settings: Iterable[str] | None = None
) -> dict[str, list[str]]:
    """Training settings by what the paired interval of first minus second says: "above", "below" or "open".

    >>> row = {"a": "dbs-2[tail,long]", "b": "mc-2[tail,long]", "metric": "wr_greedy", "ci_low": -0.1, "ci_high": -0.05}
    >>> orders({"rows": [], "differences": [row]}, "wr_greedy", settings=["tail,long"])
    {'above': [], 'open': [], 'below': ['tail,long']}
    """
    found, result = differences(summary), {"above": [], "open": [], "below": []}
    for setting in settings_of(summary) if settings is None else settings:
        row = found[f"{first}[{setting}]", f"{second}[{setting}]", metric]
        result["above" if row["ci_low"] > 0 else "below" if row["ci_high"] < 0 else "open"].append(setting)
    return result


def _order_in_words(summary: Summary) -> str:
    greedy, sampled = (orders(summary, metric) for metric in DECODINGS)
    total = sum(map(len, greedy.values()))
    free = [setting for setting in settings_of(summary) if not setting.endswith("psi1")]
    others = [len(orders(summary, "wr_greedy", second=f"mc-{k}", settings=free)["above"]) for k in (3, 4, 5)]
    return (
        "The paper reports for its language models that DBS is above MC at the same k and that the result is flat in k; it "
        f"decodes greedily. Here, DBS-2 minus MC-2 over {total} trainings. Greedy: above 0 in {len(greedy['above'])}, below in "
        f"{len(greedy['below'])}{_listed(summary, greedy['below'], 'wr_greedy')}, undecided in {len(greedy['open'])}; against "
        f"MC-3, MC-4 and MC-5 above 0 in {others[0]}, {others[1]} and {others[2]} of {len(free)}. Sampled: above 0 in "
        f"{len(sampled['above'])}{_listed(summary, sampled['above'], 'wr_sampled')}, below in {len(sampled['below'])}, undecided "
        f"in {len(sampled['open'])}. Greedy decoding reads only the mode of y, which top-k trains at every step; sampling also "
        "reads the drafts that top-k never trains. So the order is a fact about sampler, decoding and where the reward "
        "lies together, not about the sampler alone."
    )


def _listed(summary: Summary, settings: Sequence[str], metric: str) -> str:
    """(setting value [interval]; ...) in points, or nothing."""
    found = differences(summary)
    parts = []
    for setting in settings:
        row = found[f"dbs-2[{setting}]", f"mc-2[{setting}]", metric]
        low, value, high = (100 * row[key] for key in ("ci_low", "value", "ci_high"))
        parts.append(f"{in_words(setting)}: {value:+.1f} [{low:.1f}, {high:.1f}]")
    return f" ({'; '.join(parts)})" if parts else ""


def _flatness_in_words(summary: Summary) -> str:
    settings = [setting for setting in settings_of(summary) if not setting.endswith("psi1")]
    hidden = [setting for setting in settings if setting.startswith("tail")]
    usual = [setting for setting in settings if setting not in hidden]
    parts = [
        f"{words}: {_change(summary, 'dbs-4', 'dbs-2', some)} from DBS-2 to DBS-4, {_change(summary, 'mc-5', 'mc-2', some)} from "
        "MC-2 to MC-5"
        for words, some in (
            ("most laws", usual),
            (f"where the {WORDS['tail'].replace('behind', 'hides behind')}", hidden),
        )
        if some
    ]
    return (
        f"Flat in k? Change of the greedy win rate in points, over all trainings. {'; '.join(parts)}. Draws add up over steps, "
        "so that a small k costs MC little once training is long. Toys agree with language models in order at most, not in size."
    )


def _change(summary: Summary, a: str, b: str, settings: Sequence[str]) -> str:
    """Smallest to largest difference of greedy win rates, points."""
    found = differences(summary)
    values = [100 * found[f"{a}[{setting}]", f"{b}[{setting}]", "wr_greedy"]["value"] for setting in settings]
    return f"{min(values):+.1f} to {max(values):+.1f}"
