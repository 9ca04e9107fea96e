"""Lesson 06: diverse beam search in five steps, Gumbel top-k, importance weights, what repeats do to a set."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab.coursework.checks.core import Check, Mistake
from sysdpo_lab.coursework.checks.lesson_00 import draws, table
from sysdpo_lab.worlds.word_lm import STOP, Beam, WordLM

EMPTY = Beam((), 0.0, 0.0)

# --- step 1: the model ------------------------------------------------------------------------------------------------


def next_log_probs(model: WordLM, words: Sequence[int]) -> Float[Tensor, " V"]:
    """log p(next word | words), nats."""
    return _logits(model, words)[-1].log_softmax(-1)


def _logits(model: WordLM, words: Sequence[int]) -> Float[Tensor, "P V"]:
    return model(torch.tensor([[STOP, *words]])).logits[0]


def _without_start(model: WordLM, words: Sequence[int]) -> Tensor:
    return model(torch.tensor([[*words]])).logits[0, -1].log_softmax(-1)


check_next_log_probs = Check(
    cases=lambda: [(WordLM(), words) for words in ((), (1,), (2, 5), (1, 4, 7), (3, 6, 9, 10))],
    right=next_log_probs,
    mistakes=[
        Mistake(
            "raw logits",
            lambda model, words: _logits(model, words)[-1],
            "these are logits; they are log-probabilities only after a log-softmax over the words",
        ),
        Mistake(
            "probabilities",
            lambda model, words: _logits(model, words)[-1].softmax(-1),
            "these are probabilities; return their logarithms",
        ),
        Mistake(
            "first position",
            lambda model, words: _logits(model, words)[0].log_softmax(-1),
            "this is the first word of a sentence, whatever came before: take the logits after the last word",
        ),
        Mistake(
            "softmax over positions",
            lambda model, words: _logits(model, words).log_softmax(0)[-1],
            "the softmax goes over the positions; it must go over the words",
        ),
        Mistake(
            "start forgotten",
            _without_start,
            "the full stop that stands before a sentence is missing, so that nothing can be said about the first word",
        ),
    ],
)

# --- step 2: the penalty ----------------------------------------------------------------------------------------------


def penalised(log_probs: Float[Tensor, "*m V"], taken: Sequence[int], penalty: float) -> Float[Tensor, "*m V"]:
    """log_probs - penalty x how often each word is in `taken` (Hamming term of Vijayakumar et al. 2016)."""
    return log_probs - penalty * _counts(taken, log_probs.shape[-1])


def _counts(taken: Sequence[int], size: int) -> Float[Tensor, " V"]:
    return torch.bincount(torch.tensor(list(taken), dtype=torch.long), minlength=size).double()


def _words_and_taken() -> list[tuple]:
    g = draws(60)
    cases = (((2,), 0.5), ((1, 1, 4), 2.0), ((), 3.0), ((0, 3, 3, 3, 1), 20.0))
    rows = [(table(5, generator=g).log(), taken, penalty) for taken, penalty in cases]
    return [*rows, (table(2, 5, generator=g).log(), (4, 4, 0), 1.5)]


check_penalised = Check(
    cases=_words_and_taken,
    right=penalised,
    mistakes=[
        Mistake(
            "added",
            lambda p, taken, penalty: p + penalty * _counts(taken, p.shape[-1]),
            "the penalty is added: taken words become likelier, and all groups flock together",
        ),
        Mistake(
            "counted once",
            lambda p, taken, penalty: p - penalty * (_counts(taken, p.shape[-1]) > 0),
            "a word that several groups took pays for each of them, not once",
        ),
        Mistake(
            "forbidden",
            lambda p, taken, penalty: p.masked_fill(_counts(taken, p.shape[-1]) > 0, -torch.inf),
            "taken words are forbidden; they only cost `penalty` for each time they were taken",
        ),
        Mistake(
            "factor",
            lambda p, taken, penalty: p * (1 + penalty * _counts(taken, p.shape[-1])),
            "the penalty multiplies the log-probability; it is subtracted, the same for likely and unlikely words",
        ),
        Mistake(
            "everybody pays",
            lambda p, taken, penalty: p - penalty * len(taken),
            "all words pay; only the taken ones do",
        ),
        Mistake(
            "the others pay",
            lambda p, taken, penalty: p - penalty * (_counts(taken, p.shape[-1]) == 0),
            "the words that nobody took pay; it is the other way round",
        ),
    ],
)

# --- step 3: longer beams ---------------------------------------------------------------------------------------------

Grow = Callable[[Beam, int, float, float], Beam]


def _grown(beam: Beam, word: int, own: float, with_penalty: float) -> Beam:
    return Beam((*beam.words, word), beam.log_prob + own, beam.score + with_penalty)


def extend(
    beams: Sequence[Beam], log_probs: Float[Tensor, "m V"], scores: Float[Tensor, "m V"], width: int
) -> list[Beam]:
    """The 2 x width best extensions of a group's beams by one word, best score first."""
    return _best(_extensions(beams, log_probs, scores), 2 * width)


def _extensions(beams, log_probs, scores, grow: Grow = _grown) -> list[list[Beam]]:
    """Every beam with every word, a list a beam."""
    return [
        [grow(beam, word, o, s) for word, (o, s) in enumerate(zip(own.tolist(), with_penalty.tolist()))]
        for beam, own, with_penalty in zip(beams, log_probs, scores)
    ]


def _best(groups: list[list[Beam]], number: int, key: Callable[[Beam], float] = lambda beam: beam.score) -> list[Beam]:
    return sorted((beam for group in groups for beam in group), key=key, reverse=True)[:number]


def _open_beams() -> list[tuple]:
    g = draws(61)
    cases = []
    for width, beams in (
        (1, [Beam((1,), -0.4, -2.4)]),
        (2, [Beam((2, 5), -2.0, -2.5), Beam((1, 4), -0.9, -3.0)]),
        (3, [Beam((2, 5), -2.0, -2.0), Beam((1, 4), -1.9, -2.3), Beam((1, 6), -1.4, -3.4)]),
        (2, [EMPTY]),
    ):
        own = table(len(beams), 7, generator=g).log()
        cases.append((beams, own, penalised(own, (3, 3, 5), 1.0), width))
    return cases


def _extend_by(grow: Grow) -> Callable:
    return lambda beams, own, scores, width: _best(_extensions(beams, own, scores, grow), 2 * width)


check_extend = Check(
    cases=_open_beams,
    right=extend,
    mistakes=[
        Mistake(
            "penalised log-prob",
            _extend_by(lambda b, w, own, score: Beam((*b.words, w), b.log_prob + score, b.score + score)),
            "log_prob got the penalised number; it must stay the model's own log-probability, only score pays",
        ),
        Mistake(
            "penalties refunded",
            _extend_by(lambda b, w, own, score: Beam((*b.words, w), b.log_prob + own, b.log_prob + score)),
            "the new score starts from log_prob, so that penalties paid in earlier steps are given back; add to score",
        ),
        Mistake(
            "penalties not charged",
            _extend_by(lambda b, w, own, score: Beam((*b.words, w), b.log_prob + own, b.score + own)),
            "the score grew by the model's own log-probability; the penalised one belongs there",
        ),
        Mistake(
            "past forgotten",
            _extend_by(lambda b, w, own, score: Beam((*b.words, w), own, score)),
            "log_prob and score hold the last word only; add what the beam had",
        ),
        Mistake(
            "ranked by log-prob",
            lambda b, own, s, width: _best(_extensions(b, own, s), 2 * width, lambda beam: beam.log_prob),
            "the order is that of log_prob; the search follows the penalised score",
        ),
        Mistake(
            "width only",
            lambda b, own, s, width: _best(_extensions(b, own, s), width),
            "only width extensions; return twice as many, since some of them may have ended",
        ),
        Mistake(
            "two of each beam",
            lambda b, own, s, width: _best([_best([row], 2) for row in _extensions(b, own, s)], 2 * width),
            "two extensions of every beam; take the best of all beams together",
        ),
        Mistake(
            "worst first",
            lambda b, own, s, width: _best(_extensions(b, own, s), 2 * width)[::-1],
            "the right ones, worst first; return the best first",
        ),
    ],
)

# --- step 4: what has ended -------------------------------------------------------------------------------------------


def sort_out(extensions: Sequence[Beam], width: int) -> tuple[list[Beam], list[Beam]]:
    """(ended, going): sentences among the first `width`, and the first `width` that are not at their full stop."""
    return _ended(extensions[:width]), _going(extensions)[:width]


def _ended(beams: Sequence[Beam]) -> list[Beam]:
    return [beam for beam in beams if beam.words[-1] == STOP]


def _going(beams: Sequence[Beam]) -> list[Beam]:
    return [beam for beam in beams if beam.words[-1] != STOP]


def _sorted_extensions() -> list[tuple]:
    cases = []
    for width, lasts in ((1, (0, 4)), (1, (4, 0)), (2, (3, 0, 0, 5)), (2, (1, 2, 0, 3)), (3, (0, 1, 0, 2, 3, 0))):
        beams = [Beam((2, 10 - i, word), -1.0 - i, -1.5 - i) for i, word in enumerate(lasts)]
        cases.append((beams, width))
    return cases


check_sort_out = Check(
    cases=_sorted_extensions,
    right=sort_out,
    mistakes=[
        Mistake(
            "full stop not handled",
            lambda beams, width: ([], list(beams[:width])),
            "a sentence that has reached its full stop goes on; it has ended",
        ),
        Mistake(
            "full stop stored and kept",
            lambda beams, width: (_ended(beams[:width]), list(beams[:width])),
            "sentences that have ended are stored, but they also go on",
        ),
        Mistake(
            "ended ones take a place",
            lambda beams, width: (_ended(beams[:width]), _going(beams[:width])),
            "too few go on: those that ended take no place away, so fill up from the second half",
        ),
        Mistake(
            "any rank ends",
            lambda beams, width: (_ended(beams), _going(beams)[:width]),
            "a full stop counts only among the first `width` extensions; below that the group had something better to say",
        ),
        Mistake(
            "all go on",
            lambda beams, width: (_ended(beams[:width]), _going(beams)),
            "too many go on: a group has `width` beams",
        ),
        Mistake(
            "swapped",
            lambda beams, width: sort_out(beams, width)[::-1],
            "first what has ended, then what goes on",
        ),
    ],
)

# --- step 5: the whole search -----------------------------------------------------------------------------------------


class _Rules(NamedTuple):
    """The parts of the search that people get wrong; the defaults are right."""

    grow: Grow = _grown
    charge: Callable = penalised
    split: Callable = sort_out
    fines: Callable = lambda now, before, ever: now  # which words cost: of this step, of the last one, of all steps
    own_beams: bool = False  # a group's second beam pays for its first
    stops_count: bool = False  # a group that ends says that it took the full stop
    one_pool: bool = False  # finished sentences of all groups in one list
    stopped_count: bool = False  # a finished group goes on choosing
    finish_first: bool = False  # a group ends with its first `width` sentences, better ones in sight or not


class _Group:
    """One group: its open beams, its best sentences so far, whether it has finished."""

    def __init__(self):
        self.open, self.ended, self.done = [EMPTY], [], False


def diverse_search(model: WordLM, groups: int, width: int, penalty: float, longest: int) -> list[list[Beam]]:
    """Diverse beam search: for each group its `width` best sentences, best score first; a score is a penalised sum."""
    return _search(model, groups, width, penalty, longest, _Rules())


def _search(model, groups: int, width: int, penalty: float, longest: int, rules: _Rules) -> list[list[Beam]]:
    found = [_Group() for _ in range(groups)]
    before, ever = [], []
    for _ in range(longest):
        now = []
        for group in found:
            if group.done and not rules.stopped_count:
                continue
            now += _turn(model, group, width, penalty, rules, rules.fines(now, before, ever + now))
        before, ever = now, ever + now
    for group in found:
        if not group.done:
            group.ended = _best([group.ended, [b for b in group.open if b.score > -torch.inf]], width)
    return _pooled(found, width) if rules.one_pool else [group.ended for group in found]


def _turn(model, group: _Group, width: int, penalty: float, rules: _Rules, taken: Sequence[int]) -> list[int]:
    """One group chooses; the words it took."""
    own = torch.stack([next_log_probs(model, beam.words) for beam in group.open])
    scores = rules.charge(own, taken, penalty)
    if rules.own_beams and len(own) > 1:
        first = int(scores[0].argmax())
        scores = torch.cat([scores[:1], rules.charge(scores[1:], [first], penalty)])
    extensions = _best(_extensions(group.open, own, scores, rules.grow), 2 * width)
    ended, group.open = rules.split(extensions, width)
    if not group.done:
        group.ended = _best([group.ended, [beam for beam in ended if beam.score > -torch.inf]], width)
    full = len(group.ended) == width
    group.done |= full and (rules.finish_first or group.ended[-1].score >= extensions[0].score)
    leaders = extensions[:width] if rules.stops_count else group.open
    return [beam.words[-1] for beam in leaders]


def _pooled(found: list[_Group], width: int) -> list[list[Beam]]:
    """The best sentences of all groups together, dealt out in order."""
    pool = _best([group.ended for group in found], width * len(found))
    return [pool[i * width : (i + 1) * width] for i in range(len(found))]


def _never_ending(extensions: Sequence[Beam], width: int) -> tuple[list[Beam], list[Beam]]:
    return [], list(extensions[:width])


def _twisted(**changes) -> Callable:
    rules = _Rules(**changes)
    return lambda model, groups, width, penalty, longest: _search(model, groups, width, penalty, longest, rules)


def _report_scores(*case) -> list[list[Beam]]:
    return [[beam._replace(log_prob=beam.score) for beam in group] for group in diverse_search(*case)]


def _babble(seed: int) -> WordLM:
    """A model of the same words with a random table: its sentences end at very different lengths."""
    model = WordLM()
    model.table.data = 1.5 * torch.randn(model.table.shape, generator=draws(seed), dtype=torch.float64)
    return model


def _searches() -> list[tuple]:
    sizes = ((3, 1, 2.0, 5), (4, 1, 20.0, 5), (2, 2, 1.0, 5), (3, 2, 0.6, 5), (3, 2, 1.5, 3), (1, 4, 0.0, 5))
    return [(WordLM(), *size) for size in sizes] + [(_babble(67), 4, 1, 1.0, 5), (_babble(68), 3, 2, 0.8, 5)]


check_diverse_search = Check(
    cases=_searches,
    right=diverse_search,
    seconds=60.0,
    mistakes=[
        Mistake(
            "penalty added",
            _twisted(charge=lambda p, taken, penalty: penalised(p, taken, -penalty)),
            "the penalty is added: later groups are drawn to what earlier ones took",
        ),
        Mistake(
            "previous step",
            _twisted(fines=lambda now, before, ever: before),
            "the penalty counts the words of the step before; it counts what earlier groups took in this same step",
        ),
        Mistake(
            "all steps",
            _twisted(fines=lambda now, before, ever: ever),
            "the penalty counts the words of all steps so far; it counts this step only",
        ),
        Mistake(
            "score reported as log-prob",
            _report_scores,
            "log_prob holds the penalised score; it must be the model's own log-probability, or all later sums are wrong",
        ),
        Mistake(
            "one pool",
            _twisted(one_pool=True),
            "the sentences of all groups lie in one list; every group keeps its own, or the groups stop being groups",
        ),
        Mistake(
            "full stop not handled",
            _twisted(split=_never_ending),
            "sentences go on behind their full stop",
        ),
        Mistake(
            "full stop penalised",
            _twisted(stops_count=True),
            "a group that ends counts as having taken the full stop, so that others are fined for ending; what counts is the "
            "words of the beams that go on",
        ),
        Mistake(
            "finished groups count",
            _twisted(stopped_count=True),
            "groups that have finished still choose words and drive others away; they must fall silent",
        ),
        Mistake(
            "own beams penalised",
            _twisted(own_beams=True),
            "the beams of one group are fined for each other; only earlier groups count",
        ),
        Mistake(
            "finished too early",
            _twisted(finish_first=True),
            "a group stops with its first `width` sentences although an open beam still scores better",
        ),
    ],
)

# --- Gumbel top-k -----------------------------------------------------------------------------------------------------


def gumbel_top_k(log_p: Float[Tensor, " Y"], uniform: Float[Tensor, " Y"], k: int) -> Int[Tensor, " K"]:
    """The k drafts with the largest log p - log(-log u), largest first (Kool, van Hoof and Welling 2019)."""
    return _top(log_p - (-uniform.log()).log(), k)


def _top(values: Tensor, k: int) -> Tensor:
    return values.topk(k).indices


def _noise() -> list[tuple]:
    g = draws(66)
    return [
        (table(y, generator=g).log(), torch.rand(y, generator=g, dtype=torch.float64), k)
        for y, k in ((4, 1), (6, 3), (8, 8))
    ]


check_gumbel_top_k = Check(
    cases=_noise,
    right=gumbel_top_k,
    mistakes=[
        Mistake(
            "no noise",
            lambda log_p, u, k: _top(log_p, k),
            "the noise is not used: this is top-k, the same set each time",
        ),
        Mistake(
            "noise has the wrong sign",
            lambda log_p, u, k: _top(log_p + (-u.log()).log(), k),
            "the noise has the wrong sign: a Gumbel number is -log(-log u)",
        ),
        Mistake(
            "one logarithm",
            lambda log_p, u, k: _top(log_p - u.log(), k),
            "-log u is exponential noise; a Gumbel number needs a second logarithm",
        ),
        Mistake(
            "noise on probabilities",
            lambda log_p, u, k: _top(log_p.exp() - (-u.log()).log(), k),
            "the noise is added to probabilities; add it to log-probabilities",
        ),
        Mistake(
            "uniform noise",
            lambda log_p, u, k: _top(log_p + u, k),
            "the uniform numbers themselves are added; turn them into Gumbel numbers first",
        ),
        Mistake(
            "smallest",
            lambda log_p, u, k: _top((-u.log()).log() - log_p, k),
            "these are the k smallest; take the largest",
        ),
        Mistake(
            "in order of drafts",
            lambda log_p, u, k: _top(log_p - (-u.log()).log(), k).sort().values,
            "the right drafts, sorted by number; the largest perturbed one comes first, since the order says who was drawn first",
        ),
    ],
)

# --- importance weights -----------------------------------------------------------------------------------------------


def importance_weights(drawn: Int[Tensor, " K"], p: Float[Tensor, " Y"]) -> Float[Tensor, " Y"]:
    """m_y / (k p(y)) for a draft that was drawn m_y times in k draws; 0 for one that was not."""
    return _times(drawn, p) / (len(drawn) * p)


def _times(drawn: Tensor, p: Tensor) -> Float[Tensor, " Y"]:
    return _counts(drawn.tolist(), len(p))


def _draws_of_drafts() -> list[tuple]:
    g = draws(67)
    return [(torch.tensor(drawn), table(4, generator=g)) for drawn in ([1], [2, 2], [0, 3, 0, 1, 0], [3, 3, 1])]


def _inclusion(drawn: Tensor, p: Tensor) -> Float[Tensor, " Y"]:
    return 1 - (1 - p) ** len(drawn)


check_importance_weights = Check(
    cases=_draws_of_drafts,
    right=importance_weights,
    mistakes=[
        Mistake(
            "k forgotten",
            lambda drawn, p: _times(drawn, p) / p,
            "the number of draws is missing: with more draws the weights must not grow",
        ),
        Mistake(
            "repeats not counted",
            lambda drawn, p: (_times(drawn, p) > 0) / (len(drawn) * p),
            "a draft that was drawn twice weighs twice as much",
        ),
        Mistake(
            "p forgotten",
            lambda drawn, p: _times(drawn, p) / len(drawn),
            "the probability is missing: likely drafts come up more often, so each of their draws must weigh less",
        ),
        Mistake(
            "multiplied by p",
            lambda drawn, p: _times(drawn, p) * p / len(drawn),
            "the probability multiplies; it divides",
        ),
        Mistake(
            "one over inclusion",
            lambda drawn, p: (_times(drawn, p) > 0) / _inclusion(drawn, p),
            "1 / probability of being in the set is unbiased too, but these are the weights m / (k p)",
        ),
        Mistake(
            "log returned",
            lambda drawn, p: importance_weights(drawn, p).log(),
            "these are logarithms; return the weights",
        ),
    ],
)

# --- repeats ----------------------------------------------------------------------------------------------------------


def expected_set_probability(p: Float[Tensor, " Y"], p_z: Float[Tensor, " Y"], k: int, repeats: str) -> float:
    """E P_A(z) over Monte-Carlo sets of k draws: sum_y E[weight_y] p(y) p(z|y); repeats "drop" or "count"."""
    weight = k * p if repeats == "count" else 1 - (1 - p) ** k
    return (weight * p * p_z).sum().item()


def _laws() -> list[tuple]:
    g = draws(68)
    sizes = ((3, 2), (5, 3), (4, 1))
    return [
        (table(y, generator=g), torch.rand(y, generator=g, dtype=torch.float64), k, repeats)
        for y, k in sizes
        for repeats in ("drop", "count")
    ]


def _with_weights(drop: Callable, count: Callable) -> Callable:
    def answer(p, p_z, k, repeats):
        return ((count if repeats == "count" else drop)(p, k) * p * p_z).sum().item()

    return answer


def _in_set(p, k):
    return 1 - (1 - p) ** k


check_expected_set_probability = Check(
    cases=_laws,
    right=expected_set_probability,
    mistakes=[
        Mistake(
            "swapped",
            _with_weights(lambda p, k: k * p, _in_set),
            'the two cases are swapped: "drop" means that a draft drawn twice counts once',
        ),
        Mistake(
            "always dropped",
            _with_weights(_in_set, _in_set),
            'repeats are dropped in both cases; with "count" a draft drawn m times weighs m',
        ),
        Mistake(
            "always counted",
            _with_weights(lambda p, k: k * p, lambda p, k: k * p),
            'repeats are counted in both cases; with "drop" what matters is whether a draft was drawn at all',
        ),
        Mistake(
            "all k draws hit",
            _with_weights(lambda p, k: 1 - p**k, lambda p, k: k * p),
            "1 - p^k is the probability that some draw misses the draft; you need that some draw hits it",
        ),
        Mistake(
            "weight of the draft forgotten",
            lambda p, p_z, k, repeats: ((k * p if repeats == "count" else _in_set(p, k)) * p_z).sum().item(),
            "p(y) is missing: P_A adds up p(y) p(z|y) of the drafts in the set; how often they are in it comes on top",
        ),
        Mistake(
            "divided by k",
            _with_weights(lambda p, k: _in_set(p, k) / k, lambda p, k: p),
            "the sum is divided by k; P_A is a sum over the set, not a mean",
        ),
    ],
)
