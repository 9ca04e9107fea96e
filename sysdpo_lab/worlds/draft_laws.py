"""Five laws of sixteen drafts: small worlds in which every estimator of the Sampling loss can be computed exactly.

One input, a draft y out of 16, an answer z out of 4: x -> y -> z with x -> z. The laws differ in how peaked the drafts are,
in whether drafts share a meaning, and in where the good answer hides. Many systems are drawn at once, as tables with a
first axis over systems; `Systems.case` hands them to the rest of the library.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components import Categorical
from sysdpo_lab.exact import Case
from sysdpo_lab.system import CompoundSystem

LAWS = ("zipf", "zipf2", "meanings", "tail", "head")
WORDS = {
    "zipf": "1/rank",
    "zipf2": "1/rank squared",
    "meanings": "meanings x paraphrases",
    "tail": "best z behind unlikely y",
    "head": "best z behind likely y",
}
DRAFTS, OUTPUTS, BETA = 16, 4, 0.5
MEANINGS, PARAPHRASES = (0.7, 0.2, 0.07, 0.03), (0.4, 0.3, 0.2, 0.1)
TAIL_REWARD = (2.0, 0.5, 0.0, -0.5)
POOR, GOOD = (0.02, 0.3267, 0.3267, 0.3266), (0.85, 0.05, 0.05, 0.05)


@dataclass(frozen=True)
class Systems:
    """S systems of one law, as tables (nats).

    Attributes:
        law: one of `LAWS`.
        log_y: log p_ref(y), most likely draft first (for "meanings": meaning slowest, paraphrase fastest).
        log_z: log p_ref(z | y).
        reward: r(z) of the judge.
        meaning: which meaning a draft has; a meaning of its own except in "meanings".
    """

    law: str
    log_y: Float[Tensor, "S Y"]
    log_z: Float[Tensor, "S Y Z"]
    reward: Float[Tensor, "S Z"]
    meaning: Int[Tensor, " Y"]

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def preference_logits(self) -> Float[Tensor, "S Z Z"]:
        """[s, i, j] = logit pref(i > j) = r(i) - r(j) (E2)."""
        return self.reward[:, :, None] - self.reward[:, None, :]

    def case(self, beta: float = BETA) -> Case:
        """The systems as one library system with an input value for each: no two of them share a number.

        >>> draw("zipf", 3, torch.Generator().manual_seed(0)).case().system["z"].parents
        ('x', 'y')
        """
        count = len(self)
        y = Categorical("y", {"x": count}, DRAFTS, self.log_y.exp())
        z = Categorical("z", {"x": count, "y": DRAFTS}, OUTPUTS, self.log_z.exp())
        return Case(CompoundSystem([y, z], inputs=("x",), output="z"), beta, self.reward, self.law)


def draft_law(law: str) -> Float[Tensor, " Y"]:
    """p_ref(y) of a law, the same for all its systems.

    >>> [round(p, 3) for p in draft_law("meanings")[:5].tolist()]
    [0.28, 0.21, 0.14, 0.07, 0.08]
    """
    errors.check_option("law", law, LAWS)
    if law == "meanings":
        meanings, paraphrases = (torch.tensor(values, dtype=torch.float64) for values in (MEANINGS, PARAPHRASES))
        return torch.outer(meanings, paraphrases).flatten()
    ranks = torch.arange(1, DRAFTS + 1, dtype=torch.float64)
    weights = ranks ** (-2.0 if law == "zipf2" else -1.0)
    return weights / weights.sum()


def meaning_of(law: str) -> Int[Tensor, " Y"]:
    """Which meaning each draft has.

    >>> meaning_of("meanings").tolist()
    [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    """
    errors.check_option("law", law, LAWS)
    return torch.arange(DRAFTS) // (len(PARAPHRASES) if law == "meanings" else 1)


def draw(law: str, systems: int, generator: torch.Generator) -> Systems:
    """Draw many systems of a law at once.

    The judge is r ~ N(0, 1) and the answers' logits given a draft are N(0, 1); drafts with one meaning share theirs up to
    0.1 N(0, 1). Under "tail" the reward is fixed and the best answer is likely only behind the eight least likely drafts,
    under "head" only behind the eight most likely ones.

    Args:
        law: one of `LAWS`.
        systems: how many, S >= 1.
        generator: source of all randomness.

    Raises:
        UnknownOptionError: no such law, or fewer than one system.

    >>> drawn = draw("tail", 2, torch.Generator().manual_seed(0))
    >>> drawn.log_z.shape, drawn.reward[0].tolist()
    (torch.Size([2, 16, 4]), [2.0, 0.5, 0.0, -0.5])
    """
    errors.check_option("law", law, LAWS)
    if isinstance(systems, bool) or not isinstance(systems, int) or systems < 1:
        raise errors.UnknownOptionError(f"systems must be a whole number >= 1, found {systems!r}")
    log_y = draft_law(law).log().expand(systems, -1).clone()
    meaning = meaning_of(law)
    if law in ("tail", "head"):
        reward = torch.tensor(TAIL_REWARD, dtype=torch.float64).expand(systems, -1).clone()
        logits = _hidden_answer(systems, generator, likely=law == "head")
    else:
        reward = _normal(generator, systems, OUTPUTS)
        logits = _answers(systems, meaning, generator)
    return Systems(law, log_y, torch.log_softmax(logits, -1), reward, meaning)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _answers(systems: int, meaning: Int[Tensor, " Y"], generator: torch.Generator) -> Float[Tensor, "S Y Z"]:
    """Logits of z: one N(0, 1) vector a meaning, and 0.1 N(0, 1) a draft where drafts share meanings."""
    count = int(meaning.max()) + 1
    shared = _normal(generator, systems, count, OUTPUTS)[:, meaning]
    return shared if count == DRAFTS else shared + 0.1 * _normal(generator, systems, DRAFTS, OUTPUTS)


def _hidden_answer(systems: int, generator: torch.Generator, likely: bool) -> Float[Tensor, "S Y Z"]:
    """Logits of z when the best answer (the first) is likely behind one half of the drafts only."""
    q = torch.log_softmax(0.5 * _normal(generator, systems, DRAFTS, OUTPUTS), -1)
    poor, good = (torch.tensor(row, dtype=torch.float64).log().expand(DRAFTS // 2, -1) for row in (POOR, GOOD))
    return q + torch.cat([good, poor] if likely else [poor, good])
