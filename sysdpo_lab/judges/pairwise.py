"""A language model as a judge of pairs: asked in both orders; where the two verdicts disagree it is a tie (E10)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sysdpo_lab import errors, preferences, progress
from sysdpo_lab.components.prompts import is_conversation, joined
from sysdpo_lab.judges.models import ChatModel, Messages
from sysdpo_lab.judges.replies import ReplyStore, key_of
from sysdpo_lab.judges.scores import same_length, text_of

INSTRUCTION = (
    "You compare two answers to the same request. Prefer the one that is more correct and more helpful; length, style and the "
    "order in which they are shown do not count. Reply with [[A]] if answer A is better, [[B]] if answer B is better, [[C]] if "
    "neither is. Reply with nothing else."
)
QUESTION = "Request:\n{x}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nYour verdict:"
VALUES = {"A": 1.0, "B": 0.0, "C": 0.5}


def read_verdict(reply: str) -> str | None:
    """ "A", "B" or "C" (tie) from a reply; None where it is malformed: no verdict, or two different ones.

    A verdict is a letter in double brackets; a reply that is one bare letter counts too.

    >>> read_verdict("[[A]]"), read_verdict("B."), read_verdict("both are good"), read_verdict("[[A]] or [[B]]")
    ('A', 'B', None, None)
    """
    found = set(re.findall(r"\[\[\s*([ABC])\s*\]\]", reply))
    if not found:
        bare = re.fullmatch(r"[\s*\"'(\[]*([ABC])[\s*\"').:\]]*", reply)
        found = {bare.group(1)} if bare else set()
    return found.pop() if len(found) == 1 else None


@dataclass
class Counts:
    """What a judge did.

    Attributes:
        compared: pairs.  asked: requests sent.  stored: replies taken from the store.
        malformed: replies without a verdict; each makes its pair a tie.
        disagreed: pairs whose two orders contradict each other, a tie too.
    """

    compared: int = 0
    asked: int = 0
    stored: int = 0
    malformed: int = 0
    disagreed: int = 0


def messages_for(x: Any, first: str, second: str) -> Messages:
    """The two chat messages of one question."""
    shown = joined(x) if is_conversation(x) else str(x)
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": QUESTION.format(x=shown, first=first, second=second)},
    ]


class PairwiseJudge:
    """Asks a chat model which of two answers is better, once in each order.

    The value is 1 where both orders prefer the first answer, 0 where both prefer the second, 1/2 otherwise: a model that
    always names the answer shown first gives exactly 1/2. Equal answers are a tie without asking.

    Args:
        model: an `OpenAIModel`, a `LocalModel`, or anything with `name` and `replies`.
        store: a file for the replies; asking the same again costs nothing, and an interrupted evaluation goes on.
        budget: most requests that this judge may send; None: no limit.
        messages: (x, first, second) -> chat messages, in place of the default wording.
    """

    def __init__(
        self,
        model: ChatModel,
        store: str | Path | ReplyStore | None = None,
        budget: int | None = None,
        messages: Callable[[Any, str, str], Messages] = messages_for,
    ):
        if budget is not None and (type(budget) is not int or budget < 0):
            raise errors.UnknownOptionError(
                f"budget must be None or a whole number of requests, 0 or more; found {budget!r}"
            )
        self.model, self.budget, self.messages = model, budget, messages
        self.store = store if isinstance(store, ReplyStore) else ReplyStore(store)
        self.counts = Counts()
        self.name = f"pairwise: {model.name}"

    def compare(
        self, inputs: Sequence[Any], first: Sequence[Any], second: Sequence[Any], show: bool | None = None
    ) -> list[float]:
        """1, 1/2 or 0 a pair (E10).

        Args:
            inputs: a text or a conversation a pair.
            first, second: texts or completions.
            show: a progress bar; None = on a terminal or in a notebook.

        Raises:
            BatchMismatchError: not one answer an input on both sides.
            JudgeBudgetError: the budget does not cover what is new; what it did cover was asked and is kept.
            JudgeUnavailableError: the model cannot be reached; the replies that came are kept.
        """
        same_length(inputs, first, second)
        pairs = [(x, text_of(a), text_of(b)) for x, a, b in zip(inputs, first, second)]
        questions = [q for x, a, b in pairs if a != b for q in (self.messages(x, a, b), self.messages(x, b, a))]
        replies = iter(self._replies(questions, show))
        return [0.5 if a == b else self._value(next(replies), next(replies)) for _, a, b in pairs]

    def _value(self, reply: str, swapped: str) -> float:
        """The value of a pair from the replies in both orders."""
        self.counts.compared += 1
        verdicts = read_verdict(reply), read_verdict(swapped)
        self.counts.malformed += sum(verdict is None for verdict in verdicts)
        if None in verdicts:
            return 0.5
        one, other = VALUES[verdicts[0]], 1.0 - VALUES[verdicts[1]]
        self.counts.disagreed += one != other
        return one if one == other else 0.5

    def _replies(self, questions: Sequence[Messages], show: bool | None) -> list[str]:
        keys = [key_of(self.model.name, question) for question in questions]
        new = {key: question for key, question in zip(keys, questions) if key not in self.store}
        self.counts.stored += len(keys) - len(new)
        left = len(new) if self.budget is None else max(0, self.budget - self.counts.asked)
        self._ask(dict(list(new.items())[:left]), show)
        if len(new) > left:
            raise errors.JudgeBudgetError(
                f"{self.name}: {len(new)} new questions, {left} left of the budget of {self.budget}; "
                f"the {left} replies are kept, raise the budget to go on from there"
            )
        return [self.store[key] for key in keys]

    def _ask(self, new: dict[str, Messages], show: bool | None) -> None:
        keys = list(new)
        with progress.bar(len(keys), "judging", enabled=show) as shown:
            for index, reply in self.model.replies(list(new.values())):
                self.counts.asked += 1
                self.store.add(keys[index], reply, self.model.name)
                shown.update()

    def report(self) -> dict[str, Any]:
        """The judge's name and its counts, for a run's summary."""
        return {"judge": self.name, **asdict(self.counts)}


def judged_pairs(
    judge, inputs: Sequence[Any], first: Sequence[Any], second: Sequence[Any]
) -> tuple[preferences.Pairs, int]:
    """Preference pairs (x, better, worse) from a judge's comparisons, and how many ties were left out."""
    values = judge.compare(inputs, first, second)
    found = [
        preferences.Pair({"x": x}, *((a, b) if value > 0.5 else (b, a)))
        for x, a, b, value in zip(inputs, first, second, values)
        if value != 0.5
    ]
    return preferences.Pairs(found), len(values) - len(found)
