"""A language model of eleven words: every sentence can be listed, so that each search and each sample has an exact answer.

It suggests what to do on a free day: an activity, how it goes on, a place, perhaps "today", a full stop. It is a table
p(next word | previous word), called like any causal language model, without a cache.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sysdpo_lab import errors

WORDS = (".", "walk", "swim", "eat", "along", "in", "near", "rivers", "lakes", "town", "today")
STOP = 0  # the full stop ends a sentence, and stands before the next one: the prompt is one full stop
LONGEST = 5  # tokens of a sentence, full stop included: after four words the model always stops
ACTIVITIES = ("walk", "swim", "eat")
NEXT = {
    ".": {"walk": 0.70, "swim": 0.18, "eat": 0.12},
    "walk": {"along": 0.60, "near": 0.30, "in": 0.10},
    "swim": {"in": 0.78, "near": 0.17, "along": 0.05},
    "eat": {"near": 0.50, "in": 0.42, "along": 0.08},
    "along": {"rivers": 0.75, "lakes": 0.20, "town": 0.05},
    "in": {"lakes": 0.50, "town": 0.32, "rivers": 0.18},
    "near": {"rivers": 0.45, "lakes": 0.35, "town": 0.20},
    "rivers": {".": 0.70, "today": 0.30},
    "lakes": {".": 0.65, "today": 0.35},
    "town": {".": 0.60, "today": 0.40},
    "today": {".": 1.0},
}
SLIP = 0.01  # probability of a word that the table above does not foresee
SHIFT = 3.0  # logits are log-probabilities only up to a constant, here one that grows with the previous word


def transition_table() -> Float[Tensor, "V V"]:
    """p(next | previous), rows sum to 1: `NEXT`, and with probability `SLIP` any word, the later in `WORDS` the rarer.

    >>> table = transition_table()
    >>> round(table[WORDS.index("walk"), WORDS.index("along")].item(), 4)
    0.5953
    """
    foreseen = torch.tensor([[NEXT[before].get(word, 0.0) for word in WORDS] for before in WORDS], dtype=torch.float64)
    rank = torch.arange(len(WORDS), 0, -1, dtype=torch.float64)
    rank[STOP] = 0.5  # an empty sentence is the least likely slip
    return (1 - SLIP) * foreseen + SLIP * rank / rank.sum()


class Beam(NamedTuple):
    """The beginning of a sentence, or a whole one.

    Attributes:
        words: token ids so far.
        log_prob: the model's own log-probability of them, nats.
        score: the same minus the penalties that were paid.
    """

    words: tuple[int, ...]
    log_prob: float
    score: float


class WordLM(nn.Module):
    """The model: forward(input_ids) -> .logits (B, P, V), as transformers' causal models have it; no cache, no padding.

    What counts is the last word, and how many words stand since the last full stop: after four the model stops.

    >>> WordLM()(torch.tensor([[STOP]])).logits.shape
    torch.Size([1, 1, 11])
    """

    def __init__(self):
        super().__init__()
        shift = torch.arange(len(WORDS), dtype=torch.float64) / SHIFT
        self.table = nn.Parameter(transition_table().log() + shift[:, None], requires_grad=False)

    def forward(self, input_ids: Int[Tensor, "B P"]) -> SimpleNamespace:
        """Logits of the next word after each position, float64."""
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        since_stop = place - torch.where(input_ids == STOP, place, -1).cummax(1).values
        logits = self.table[input_ids]
        stopping = torch.full_like(self.table[0], -torch.inf)
        stopping[STOP] = 0.0
        return SimpleNamespace(logits=torch.where(since_stop[..., None] >= LONGEST - 1, stopping, logits))


def prompts(rows: int = 1) -> tuple[Int[Tensor, "R 1"], Int[Tensor, "R 1"]]:
    """(input ids, attention mask) of so many rows, each the full stop before a new sentence."""
    ids = torch.full((rows, 1), STOP)
    return ids, torch.ones_like(ids)


@dataclass(frozen=True)
class Sentences:
    """Every sentence of the model with its exact probability, the likeliest first.

    Attributes:
        token_ids: a tuple for each sentence, full stop included.
        log_probs: nats, float64; the probabilities sum to 1.
    """

    token_ids: tuple[tuple[int, ...], ...]
    log_probs: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def place(self) -> dict[tuple[int, ...], int]:
        """{token ids: number of the sentence}."""
        return {ids: number for number, ids in enumerate(self.token_ids)}

    @cached_property
    def activity(self) -> Int[Tensor, " N"]:
        """Which of `ACTIVITIES` a sentence begins with; -1 for a slip that begins with none."""
        known = {WORDS.index(word): number for number, word in enumerate(ACTIVITIES)}
        return torch.tensor([known.get(ids[0], -1) for ids in self.token_ids])


def enumerate_sentences(model: WordLM) -> Sentences:
    """All 11111 sentences: up to four of the ten words, then the full stop.

    >>> law = enumerate_sentences(WordLM())
    >>> len(law), round(law.log_probs.exp().sum().item(), 12)
    (11111, 1.0)
    """
    found, log_probs = [], []
    for length in range(LONGEST):
        bodies = list(itertools.product(range(1, len(WORDS)), repeat=length))
        ids = torch.tensor([[*body, STOP] for body in bodies])
        found += [(*body, STOP) for body in bodies]
        log_probs.append(log_prob(model, ids))
    flat = torch.cat(log_probs)
    order = torch.argsort(flat, descending=True, stable=True)
    return Sentences(tuple(found[i] for i in order.tolist()), flat[order])


def log_prob(model: WordLM, token_ids: Int[Tensor, "N T"]) -> Float[Tensor, " N"]:
    """log p of sentences of one length, nats, summed over their tokens, in one forward.

    >>> ids = torch.tensor([[WORDS.index(word) for word in ("walk", "along", "rivers", ".")]])
    >>> round(log_prob(WordLM(), ids).exp().item(), 4)
    0.213
    """
    before = nn.functional.pad(token_ids, (1, 0), value=STOP)[:, :-1]
    log_p = model(before).logits.log_softmax(-1)
    return log_p.gather(2, token_ids[..., None])[..., 0].sum(1)


def text(token_ids: Iterable[int]) -> str:
    """The sentence as people write it, up to its first full stop.

    >>> text([1, 4, 7, 0]), text([2, 5]), text([0, 0])
    ('walk along rivers.', 'swim in', '.')
    """
    ids = [int(i) for i in token_ids]
    ended = STOP in ids
    words = ids[: ids.index(STOP)] if ended else ids
    return " ".join(WORDS[i] for i in words) + "." * ended


def encode(words: str) -> tuple[int, ...]:
    """The token ids of a sentence; the inverse of `text`.

    Raises:
        TokenIdError: a word that the model does not have.

    >>> encode("walk along rivers.")
    (1, 4, 7, 0)
    """
    parts = words.replace(".", " .").split()
    unknown = [word for word in parts if word not in WORDS]
    if unknown:
        raise errors.TokenIdError(f"{unknown}: the word model knows {' '.join(WORDS)} only")
    return tuple(WORDS.index(word) for word in parts)


def until_stop(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens through the first full stop; all of them where there is none.

    >>> until_stop([1, 4, 0, 0])
    (1, 4, 0)
    """
    ids = tuple(int(i) for i in token_ids)
    return ids[: ids.index(STOP) + 1] if STOP in ids else ids
