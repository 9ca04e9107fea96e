"""Small systems and pairs for the tests of training, and two components of another kind than tables."""

from contextlib import contextmanager

import torch
from torch import nn

from sysdpo_lab import CompoundSystem
from sysdpo_lab.components import Categorical, Component
from sysdpo_lab.preferences import Pairs


def table(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), -1)


def chain(seed: int = 0, drafts: int = 3) -> CompoundSystem:
    """x -> y -> z with x -> z: two inputs, `drafts` drafts, four outputs."""
    g = torch.Generator().manual_seed(seed)
    y = Categorical("y", {"x": 2}, drafts, table(g, 2, drafts))
    return CompoundSystem([y, Categorical("z", {"x": 2, "y": drafts}, 4, table(g, 2, drafts, 4))])


def same_type_chain(seed: int = 0) -> CompoundSystem:
    """x -> y -> z where the draft y has as many values as the final z."""
    return chain(seed, drafts=4)


def finals(number: int = 11, seed: int = 1) -> Pairs:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(2, (number,), generator=g)
    chosen = torch.randint(4, (number,), generator=g)
    return Pairs.from_finals({"x": x}, chosen, (chosen + 1 + torch.randint(3, (number,), generator=g)) % 4)


def traces(number: int = 11, seed: int = 2, drafts: int = 3) -> Pairs:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(2, (number,), generator=g)
    z = torch.randint(4, (number,), generator=g)
    sides = [{"x": x, "y": torch.randint(drafts, (number,), generator=g), "z": (z + shift) % 4} for shift in (0, 1)]
    return Pairs.from_traces(*sides)


def weights(system: CompoundSystem) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in system.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


TIMES = ("seconds", "pairs_per_second", "trained", "not_trained")


def without_times(history) -> list[dict]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in history]


class Letters(Component):
    """Texts of any length: each letter a..d is drawn from one softmax, turned by the last parent's last letter; with dropout."""

    def __init__(self, name, parents, dropout: float = 0.0, dtype: torch.dtype = torch.float32):
        super().__init__(name, parents)
        self.logits = nn.Parameter(torch.linspace(-1, 1, 4).to(dtype))
        self.register_buffer("start", self.logits.detach().clone())
        self.dropout = nn.Dropout(dropout)

    def _tables(self, parent_values):
        weights = self.start if self.is_reference else self.dropout(self.logits)
        return [torch.log_softmax(weights.float(), -1).roll(ord(text[-1])) for text in parent_values[self.parents[-1]]]

    def log_prob(self, value, parent_values):
        rows = zip(value, self._tables(parent_values))
        return torch.stack([table[[ord(letter) - ord("a") for letter in text]].sum() for text, table in rows])

    def sample(self, parent_values, num_samples=1, generator=None):
        def text(table) -> str:
            return "".join("abcd"[i] for i in torch.multinomial(table.exp(), 3, True, generator=generator))

        rows = [[text(table) for _ in range(num_samples)] for table in self._tables(parent_values)]
        return [row[0] for row in rows] if num_samples == 1 else rows

    def greedy(self, parent_values):
        return ["d" for _ in range(self.check_parents(parent_values))]

    @contextmanager
    def reference(self):
        before, self._in_reference = self.is_reference, True
        try:
            yield
        finally:
            self._in_reference = before


def letters_system(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> CompoundSystem:
    """x -> draft -> answer, texts of several lengths."""
    nodes = [Letters("draft", ["x"], dropout, dtype), Letters("answer", ["x", "draft"], dropout, dtype)]
    return CompoundSystem(nodes, output="answer")


def letters_finals() -> Pairs:
    chosen = ["a", "abcd", "ddd", "b", "ccccccc", "ab", "dada"]
    rejected = ["bb", "c", "a", "dddddd", "ab", "cd", "b"]
    return Pairs.from_finals({"x": [f"task {i}" for i in range(7)]}, chosen, rejected)


def letters_traces() -> Pairs:
    pairs = letters_finals()
    x = [pair.inputs["x"] for pair in pairs]
    sides = []
    for answers in ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs]):
        sides.append({"x": x, "draft": [answer[::-1] + "a" for answer in answers], "answer": answers})
    return Pairs.from_traces(*sides)
