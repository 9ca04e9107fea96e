"""Judges that give each answer a number and compare the numbers: a world's exact score, a rule, a similarity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sysdpo_lab import errors, evaluation
from sysdpo_lab.sentences import SentenceEncoder

Score = Callable[[Sequence[Any], Sequence[str]], Sequence[float]]


def text_of(answer: Any) -> str:
    """An answer's text: of a completion, or a str as it is.

    >>> text_of("yes")
    'yes'
    """
    return answer if isinstance(answer, str) else answer.text


@dataclass(frozen=True)
class ScoreJudge:
    """Compares answers by a score each; both orders agree by construction.

    Args:
        name: for reports.
        scores: (inputs, answers) -> one number an answer, larger is better.
        tie: differences up to this count as a tie; larger makes more ties.
    """

    name: str
    scores: Score
    tie: float = 0.0

    def compare(self, inputs: Sequence[Any], first: Sequence[Any], second: Sequence[Any]) -> list[float]:
        """1 where the first answer is better, 0 where the second is, 1/2 for a tie (E10).

        Raises:
            BatchMismatchError: not one answer an input on both sides.  NonFiniteError: a score is NaN.
        """
        same_length(inputs, first, second)
        one, other = (self.scores(inputs, [text_of(answer) for answer in answers]) for answers in (first, second))
        return [0.5 if abs(a - b) <= self.tie else evaluation.win(a, b) for a, b in zip(one, other)]


def same_length(inputs: Sequence, first: Sequence, second: Sequence) -> None:
    """Raise unless there is one answer an input on both sides."""
    if not len(inputs) == len(first) == len(second):
        raise errors.BatchMismatchError(
            f"{len(inputs)} inputs, {len(first)} first and {len(second)} second answers; one of each a comparison is needed"
        )


def exact(score: Callable[[Any, str], float], name: str = "exact") -> ScoreJudge:
    """A world's own measure: `score(x, answer)`, larger is better.

    >>> exact(lambda x, answer: float(answer == x)).compare(["7", "7"], ["7", "8"], ["8", "9"])
    [1.0, 0.5]
    """
    return ScoreJudge(name, lambda inputs, answers: [float(score(x, answer)) for x, answer in zip(inputs, answers)])


def rule(rules: Mapping[str, Callable[[Any, str], bool]], name: str = "rule") -> ScoreJudge:
    """Share of the rules that an answer keeps: {"one line": lambda x, answer: "\\n" not in answer, ...}.

    >>> short = rule({"short": lambda x, answer: len(answer) < 5, "polite": lambda x, answer: "please" in answer})
    >>> short.compare(["x"], ["yes"], ["certainly not"])
    [1.0]

    Raises:
        UnknownOptionError: no rules.
    """
    if not rules:
        raise errors.UnknownOptionError("a rule judge needs at least one rule, {name: function of (x, answer)}")

    def scores(inputs: Sequence[Any], answers: Sequence[str]) -> list[float]:
        return [sum(bool(keeps(x, a)) for keeps in rules.values()) / len(rules) for x, a in zip(inputs, answers)]

    return ScoreJudge(name, scores)


def similarity(encoder: SentenceEncoder, reference: Callable[[Any], str], tie: float = 0.01) -> ScoreJudge:
    """Cosine of an answer's and its reference answer's sentence vectors; an empty answer has the lowest score, -1.

    It measures closeness of wording and topic: an answer that says "not" in the right place can score above a right one.

    Args:
        encoder: see `sentences.load_sentence_encoder`.
        reference: input -> reference answer.
        tie: cosines closer than this are a tie.
    """

    def scores(inputs: Sequence[Any], answers: Sequence[str]) -> list[float]:
        rows = [row for row, answer in enumerate(answers) if answer.strip()]
        found = [-1.0] * len(answers)
        if rows:
            mine = encoder.encode([answers[row] for row in rows])
            wanted = encoder.encode([reference(inputs[row]) for row in rows])
            for row, value in zip(rows, (mine * wanted).sum(-1).tolist()):
                found[row] = value
        return found

    return ScoreJudge("similarity", scores, tie)
