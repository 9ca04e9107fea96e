"""What the worlds of language share: splits by content, pairs from candidates, stored pairs and their card."""

import hashlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sysdpo_lab import atomic, errors, paths, preferences
from sysdpo_lab.preferences import Pair, Pairs

SPLITS = ("train", "validation", "heldout")
SCORE_COLUMNS = ("score_chosen", "score_rejected", "score_gap")


# --- chance -------------------------------------------------------------------------------------------------------------


def choice(options: Sequence, generator: torch.Generator) -> Any:
    """One of the options, each equally likely."""
    return options[int(torch.randint(len(options), (1,), generator=generator))]


def happens(probability: float, generator: torch.Generator) -> bool:
    """True with the given probability."""
    return float(torch.rand((), generator=generator)) < probability


def weighted(weights: Mapping[Any, float], generator: torch.Generator) -> Any:
    """One of the keys, with probabilities proportional to their weights.

    >>> weighted({"often": 1.0, "never": 0.0}, torch.Generator().manual_seed(0))
    'often'
    """
    drawn = torch.multinomial(torch.tensor(list(weights.values())), 1, generator=generator)
    return list(weights)[int(drawn)]


# --- records ------------------------------------------------------------------------------------------------------------


def split_of_text(text: str) -> str:
    """The split that a text belongs to: by its hash, 70 % train, 10 % validation, 20 % held out."""
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10
    return "train" if bucket < 7 else "validation" if bucket == 7 else "heldout"


def different_records(
    draw: Callable[[torch.Generator], Hashable], split_of: Callable[[Any], str], generator: torch.Generator, n: int,
    split: str | None,
) -> list:  # fmt: skip
    """n different records from `draw`, of one split or of all (None).

    Raises:
        UnknownOptionError: no such split.
    """
    errors.check_option("split", split, (None, *SPLITS))
    found: dict[Hashable, None] = {}
    while len(found) < n:
        record = draw(generator)
        if split is None or split_of(record) == split:
            found.setdefault(record)
    return list(found)


# --- sentences and scores -----------------------------------------------------------------------------------------------


def is_one_sentence(text: str, least: int, most: int) -> bool:
    """Whether the text is one ended sentence of `least` to `most` words.

    >>> is_one_sentence("Mia has 7 pens.", 3, 8), is_one_sentence("Mia. 7 pens.", 3, 8), is_one_sentence("7.", 3, 8)
    (True, False, False)
    """
    text = text.strip()
    ends = re.findall(r"[.!?]+[\"')\]]*(?=\s|$)|\n", text)
    ended = re.search(r"[.!?][\"')\]]*$", text) is not None
    return ended and len(ends) == 1 and least <= len(text.split()) <= most


def compared(score_a: float, score_b: float) -> float:
    """1 when the first score is higher, 0 when it is lower, 1/2 on a tie."""
    return 0.5 if score_a == score_b else float(score_a > score_b)


def score_columns(high: float, low: float) -> dict[str, float]:
    """A pair's scores and their difference, as they stand in `meta`."""
    return {name: round(value, 6) for name, value in zip(SCORE_COLUMNS, (high, low, high - low))}


# --- preference pairs ---------------------------------------------------------------------------------------------------


def pairs_from_candidates(
    score: Callable[[str, Any], float], inputs: Sequence[str], candidates: Sequence[Sequence[Any]],
    generator: torch.Generator, min_gap: float = 0.0,
) -> tuple[Pairs, int]:  # fmt: skip
    """On-policy pairs: of each record's sampled answers, the judge's best against its worst.

    Args:
        score: (x, answer) -> the judge's score.
        inputs: texts x.
        candidates: for each of them, the sampled answers (texts or `Completion`s).
        generator: draws among answers of equal score.
        min_gap: least difference in score; a larger one gives fewer, clearer pairs.

    Returns:
        the pairs, and how many records gave none because their answers tie (or differ by less than `min_gap`).

    Raises:
        BatchMismatchError: candidates for another number of inputs.
    """
    if len(inputs) != len(candidates):
        raise errors.BatchMismatchError(f"{len(inputs)} inputs, but candidates for {len(candidates)}")
    rows = [best_and_worst(score, x, list(answers), generator, min_gap) for x, answers in zip(inputs, candidates)]
    kept = [row for row in rows if row is not None]
    return Pairs(kept, "sampled answers"), len(rows) - len(kept)


def best_and_worst(
    score: Callable[[str, Any], float], x: str, answers: list, generator: torch.Generator, min_gap: float = 0.0,
    kind: str = "sampled",
) -> Pair | None:  # fmt: skip
    """The judge's best answer against its worst; None where they tie or differ by less than `min_gap`."""
    # an answer without a token cannot be scored; it may still be EOS alone
    answers = [answer for answer in answers if getattr(answer, "token_ids", str(answer).strip())]
    scores = [score(x, answer) for answer in answers]
    if not scores or max(scores) - min(scores) <= 0 or max(scores) - min(scores) < min_gap:
        return None
    best = choice([a for a, found in zip(answers, scores) if found == max(scores)], generator)
    worst = choice([a for a, found in zip(answers, scores) if found == min(scores)], generator)
    return Pair({"x": x}, best, worst, score_columns(max(scores), min(scores)) | {"kind": kind})


def preference_pairs(
    name: str, records: Sequence[Any], render: Callable[[Any], str], candidates: Callable[[Any, str], list[str]],
    score: Callable[[str, Any], float], generator: torch.Generator,
) -> Pairs:  # fmt: skip
    """One pair a record: by turns a reference against a perturbed answer, and the best against the worst of diverse ones.

    Args:
        name: what messages call these pairs.
        candidates: (record, kind) -> at least two answers; kind is "perturbed" or "diverse". Asked again after a tie.
    """
    found = []
    for number, record in enumerate(records):
        kind, pair = ("perturbed", "diverse")[number % 2], None
        while pair is None:
            pair = best_and_worst(score, render(record), candidates(record, kind), generator, kind=kind)
        found.append(pair)
    return Pairs(found, name)


# --- stored data --------------------------------------------------------------------------------------------------------


def stored_pairs(name: str, split: str, folder: Path | str | None = None) -> Pairs:
    """The stored preference pairs of a split, from `data/NAME` or another folder.

    Raises:
        UnknownOptionError: no such split.
    """
    errors.check_option("split", split, SPLITS)
    folder = paths.data_folder() / name if folder is None else Path(folder)
    return preferences.load(folder / f"{split}.jsonl", on_error="raise")[0]


def write_data(
    folder: Path | str, seed: int, stored: Mapping[str, int],
    make: Callable[[int, torch.Generator, str], Pairs], card: str,
) -> None:  # fmt: skip
    """Write the stored pairs and their card; the same seed gives the same bytes.

    Args:
        stored: {split: number of pairs}.
        make: (n, generator, split) -> pairs.
        card: its text, with the places {seed} and {table}.
    """
    folder, generator = Path(folder), torch.Generator().manual_seed(seed)
    for split, n in stored.items():
        preferences.save(folder / f"{split}.jsonl", make(n, generator, split))
    rows = [f"| {split}.jsonl | {n} | {paths.file_sha256(folder / f'{split}.jsonl')} |" for split, n in stored.items()]
    atomic.write_text(folder / "CARD.md", card.format(seed=seed, table="\n".join(rows)))
