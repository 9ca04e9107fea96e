"""How different the intermediates of a set are: distinct-n, self-BLEU, embedding distance, effective number.

All but the last look at texts alone; the effective number asks how many intermediates the *loss* sees.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.sentences import SentenceEncoder


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks, so that "Thai." and "thai ." are the same.

    >>> words("Cheap Thai food, here.")
    ['cheap', 'thai', 'food', ',', 'here', '.']
    """
    apart = "".join(f" {c} " if not (c.isalnum() or c in "'-_" or c.isspace()) else c for c in text)
    return apart.lower().split()


def _ngrams(tokens: Sequence[str], n: int) -> Counter:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Share of a set's n-grams that are different from each other (Li et al. 2016), 0 to 1; larger is more diverse.

    Short texts score higher by themselves: compare sets of like lengths only. A set without any n-gram has 0.

    >>> distinct_n(["a b c", "a b d"], 2)
    0.75
    """
    if n < 1:
        raise errors.UnknownOptionError(f"distinct-n needs n of 1 or more, found {n}")
    counts = sum((_ngrams(words(text), n) for text in texts), Counter())
    return len(counts) / counts.total() if counts else 0.0


def bleu(candidate: Sequence[str], references: Sequence[Sequence[str]], order: int = 4) -> float:
    """Sentence BLEU (Papineni et al. 2002): brevity penalty x geometric mean of clipped n-gram precisions, 0 to 1.

    Precisions of n > 1 are smoothed by adding 1 to numerator and denominator (Lin and Och 2004), so that one missing
    4-gram does not make it 0; texts shorter than n words use the orders that they have.

    >>> bleu("a b c d".split(), ["a b c d".split()])
    1.0
    """
    if not candidate or not references:
        return 0.0
    logs = []
    for n in range(1, min(order, len(candidate)) + 1):
        mine = _ngrams(candidate, n)
        most: Counter = Counter()
        for reference in references:
            most |= _ngrams(reference, n)
        smooth = int(n > 1)
        hits = sum((mine & most).values()) + smooth
        if hits == 0:
            return 0.0
        logs.append(math.log(hits / (mine.total() + smooth)))
    closest = min((abs(len(reference) - len(candidate)), len(reference)) for reference in references)[1]
    return math.exp(min(0.0, 1.0 - closest / len(candidate)) + sum(logs) / len(logs))


def self_bleu(texts: Sequence[str], order: int = 4) -> float:
    """Mean BLEU of each text against the others of its set (Zhu et al. 2018), 0 to 1; *smaller* is more diverse.

    Raises:
        UnknownOptionError: fewer than two texts have nothing to be compared with.

    >>> self_bleu(["a b", "a b"]), self_bleu(["a b", "c d"])
    (1.0, 0.0)
    """
    if len(texts) < 2:
        raise errors.UnknownOptionError(
            f"self-BLEU compares the texts of a set with each other; found {len(texts)} text"
        )
    tokens = [words(text) for text in texts]
    return sum(bleu(own, tokens[:row] + tokens[row + 1 :], order) for row, own in enumerate(tokens)) / len(tokens)


def embedding_distance(texts: Sequence[str], encoder: SentenceEncoder) -> float:
    """Mean of 1 - cosine over the pairs of a set, 0 to 2; larger is more diverse in meaning. 0 for a single text."""
    if len(texts) < 2:
        return 0.0
    vectors = encoder.encode(texts)
    i, j = torch.triu_indices(len(texts), len(texts), 1)
    return float((1.0 - (vectors[i] * vectors[j]).sum(-1)).mean())


def effective_number(log_joint: Float[Tensor, "B K"], dim: int = -1) -> Float[Tensor, " B"]:
    """How many intermediates carry the marginal: 1 / sum_a w_a^2, w = softmax of log p(a, z|x) over the set; 1 to k.

    At 1 one intermediate has all the weight and its component gets no gradient from the set (E7). -inf: not in the set.

    Raises:
        NonFiniteError: a row without any possible intermediate, or NaN.

    >>> effective_number(torch.zeros(1, 4)), effective_number(torch.tensor([[0.0, -torch.inf]]))
    (tensor([4.]), tensor([1.]))
    """
    weights = torch.softmax(log_joint, dim)
    if not torch.isfinite(weights).all():
        raise errors.NonFiniteError(
            "a set has no possible intermediate (all log-probabilities -inf), or a NaN among them"
        )
    return 1.0 / weights.square().sum(dim)


def near_duplicates(texts: Sequence[str], threshold: float = 0.5) -> list[int | None]:
    """For each text the first earlier one that it nearly repeats (symmetric BLEU at or above `threshold`), or None.

    >>> near_duplicates(["a cheap thai place", "a cheap thai place .", "go home"])
    [None, 0, None]
    """
    tokens = [words(text) for text in texts]
    found: list[int | None] = []
    for row, own in enumerate(tokens):
        like = [e for e in range(row) if (bleu(own, [tokens[e]]) + bleu(tokens[e], [own])) / 2 >= threshold]
        found.append(like[0] if like else None)
    return found
