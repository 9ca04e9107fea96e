"""Draft -> refine on a line of answers: families of systems in which the credit table of E9 can be computed exactly.

x -> y -> z with x -> z. Each input has a target t; the judge's reward falls with the answer's distance from it. Three families:
a draft is an answer; the same systems with their drafts in a code of their own; a refiner that does not see x.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import errors, exact
from sysdpo_lab.components import Categorical
from sysdpo_lab.exact import Case
from sysdpo_lab.paths import data_folder
from sysdpo_lab.system import CompoundSystem

FAMILIES = ("own-code", "answer", "blind")
WORDS = {
    "own-code": "plan in its own code",
    "answer": "draft is an answer",
    "blind": "blind refiner, draft is an answer",
}
INPUTS, ANSWERS, BETA = 4, 6, 0.5
ERROR = 1.5  # standard deviation of what the drafter and the refiner take the target to be
DRAFT_WIDTH, ANSWER_WIDTH, OWN_OPINION, SLOPE = (0.8, 1.5), (0.7, 1.2), (0.1, 0.5), (0.5, 1.0)


@dataclass(frozen=True)
class Systems:
    """S systems of one family, as tables.

    Attributes:
        family: one of `FAMILIES`.
        p_y: the start's p(y|x).
        p_z: the start's p(z|x,y); p(z|y) of a blind refiner.
        reward: r(x,z).
        code: which answer draft number i stands for.
    """

    family: str
    p_y: Float[Tensor, "S X Y"]
    p_z: Float[Tensor, "S ... Y Z"]
    reward: Float[Tensor, "S X Z"]
    code: Int[Tensor, "S Y"]

    def __len__(self) -> int:
        return len(self.reward)

    def case(self, beta: float = BETA) -> Case:
        """All systems as one, the member its first input (`exact.stack`), with their judges: reward (S * X, Z).

        >>> case = draw("blind", 5, torch.Generator().manual_seed(0)).case()
        >>> case.system.inputs, case.system["z"].parents, tuple(case.reward.shape)
        (('member', 'x'), ('member', 'y'), (20, 6))
        """
        systems = [chain(y, z) for y, z in zip(self.p_y, self.p_z)]
        return Case(exact.stack(systems), beta, self.reward.flatten(0, 1), self.family)

    def recoded(self, codes: Int[Tensor, "S Y"]) -> "Systems":
        """The same systems with their drafts renumbered: what was draft codes[s, i] is now draft i.

        Both tables are permuted, so that nothing but the names of the drafts has changed (theory S2.6).

        >>> before = draw("answer", 1, torch.Generator().manual_seed(0))
        >>> after = before.recoded(torch.tensor([[5, 4, 3, 2, 1, 0]]))
        >>> bool((after.p_y == before.p_y.flip(-1)).all() and (after.p_z == before.p_z.flip(-2)).all())
        True
        """
        drafts = torch.arange(self.p_y.shape[-1]).expand_as(self.code)
        if codes.shape != self.code.shape or not torch.equal(codes.sort(-1).values, drafts):
            raise errors.ValueRangeError(
                f"codes of shape {tuple(codes.shape)} are no renumbering of the {drafts.shape[-1]} drafts of "
                f"{len(self)} systems: each row must hold 0 to {drafts.shape[-1] - 1} once"
            )
        p_y = torch.stack([table[:, code] for table, code in zip(self.p_y, codes)])
        p_z = torch.stack([table[..., code, :] for table, code in zip(self.p_z, codes)])
        return replace(self, p_y=p_y, p_z=p_z, code=self.code.gather(-1, codes))


def chain(p_y: Float[Tensor, "X Y"], p_z: Float[Tensor, "... Y Z"]) -> CompoundSystem:
    """x -> y -> z with these tables; z sees x if its table has an axis for it.

    >>> chain(torch.full((2, 3), 1 / 3), torch.full((3, 3), 1 / 3))["z"].parents
    ('y',)
    """
    inputs, drafts = p_y.shape
    parents = {"x": inputs, "y": drafts} if p_z.dim() == 3 else {"y": drafts}
    y = Categorical("y", {"x": inputs}, drafts, p_y)
    return CompoundSystem([y, Categorical("z", parents, p_z.shape[-1], p_z)], inputs=("x",), output="z")


def draw(
    family: str, systems: int, generator: torch.Generator, inputs: int = INPUTS, answers: int = ANSWERS
) -> Systems:
    """Draw many systems of a family at once; "answer" and "own-code" are the same systems up to the code of y.

    Drafter and refiner each hold an opinion of the target t ~ U(0, answers - 1): m, m2 = t + 1.5 N(0, 1), kept on the line.
    p(y|x) is a Gaussian around m; p(z|x,y) one around (1 - a) source(y) + a m2, where source(y) is the answer that y stands
    for: y itself, or a permutation of it ("own-code"). A blind refiner has a = 0 and one table for all inputs. The reward
    is -kappa |z - t|. Widths, a and kappa are drawn once a system, t, m and m2 once an input.

    Args:
        family: one of `FAMILIES`.
        systems: how many, S >= 1.
        generator: source of all randomness.
        inputs, answers: X and the number of answers, which is that of drafts too.

    Raises:
        UnknownOptionError: no such family, or no system.

    >>> g = torch.Generator
    >>> one, other = draw("answer", 3, g().manual_seed(0)), draw("own-code", 3, g().manual_seed(0))
    >>> bool((one.recoded(other.code).p_z == other.p_z).all())
    True
    """
    errors.check_option("family", family, FAMILIES)
    if isinstance(systems, bool) or not isinstance(systems, int) or systems < 1:
        raise errors.UnknownOptionError(f"systems must be a whole number >= 1, found {systems!r}")
    line = torch.arange(answers, dtype=torch.float64)
    target = _between(generator, (0, answers - 1), systems, inputs)
    drafter, refiner = (_opinion(target, answers, generator) for _ in range(2))
    ranges = (DRAFT_WIDTH, ANSWER_WIDTH, OWN_OPINION, SLOPE)
    draft_width, answer_width, own, slope = (_between(generator, bounds, systems, 1) for bounds in ranges)
    codes = torch.stack([torch.randperm(answers, generator=generator) for _ in range(systems)])
    p_y = _bell(line, drafter, draft_width)
    if family == "blind":
        p_z = _bell(line, line.expand(systems, -1), answer_width)
    else:
        centre = (1 - own)[..., None] * line + (own * refiner)[..., None]
        p_z = _bell(line, centre, answer_width[..., None])
    reward = -slope[..., None] * (line - target[..., None]).abs()
    drawn = Systems(family, p_y, p_z, reward, torch.arange(answers).repeat(systems, 1))
    return drawn.recoded(codes) if family == "own-code" else drawn


def _between(generator: torch.Generator, bounds: tuple[float, float], *shape: int) -> Tensor:
    low, high = bounds
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


def _opinion(target: Float[Tensor, "S X"], answers: int, generator: torch.Generator) -> Float[Tensor, "S X"]:
    noise = torch.randn(*target.shape, generator=generator, dtype=torch.float64)
    return (target + ERROR * noise).clamp(0, answers - 1)


def _bell(
    line: Float[Tensor, " N"], centre: Float[Tensor, "..."], width: Float[Tensor, "..."]
) -> Float[Tensor, "... N"]:
    """Gaussians on the points of the line, normalised over them; `width` broadcasts against `centre`."""
    return torch.softmax(-((line - centre[..., None]) ** 2) / (2 * width[..., None] ** 2), -1)


def lengths() -> Case:
    """The fixed toy: a draft is terse, balanced or long, the refiner expands by one level, the judge likes balanced answers.

    One input, beta 2; the components are called `draft` and `refine`.

    >>> lengths().reward.tolist()
    [[0.0, 1.5, -0.5]]
    """
    return exact.load_case(data_folder() / "systems" / "lengths.json")


def chosen_law(reward: Float[Tensor, "X Z"]) -> Float[Tensor, "X Z"]:
    """What the data set's chosen answers look like in these worlds: softmax(2 r), the opponent of WR-chosen.

    >>> chosen_law(torch.tensor([[0.0, 0.5]]).double()).round(decimals=4).tolist()
    [[0.2689, 0.7311]]
    """
    return torch.softmax(2 * reward, -1)


def wr_chosen(case: Case, decoding: str = "sampled") -> Float[Tensor, " X"]:
    """WR-chosen of each input, exactly: the system's answer against one drawn from `chosen_law`, by the judge's own preference.

    sum over i, j of p(i|x) chosen(j|x) pref(i > j | x), where pref of an answer against itself is 1/2: a tie.

    Args:
        decoding: see `exact.decoded`.

    >>> round(100 * wr_chosen(lengths()).item(), 1)
    27.2
    """
    answers = exact.decoded(case.system, decoding)
    return exact.win_rate(answers, chosen_law(case.reward), case.preference_logits)
