"""The systems behind the theory's numbers: fixed instances and random families by the same recipe, with own seeds."""

import copy

import torch

from sysdpo_lab import CompoundSystem, alignment, exact
from sysdpo_lab.components import Categorical

RING = (0.55, 0.2, 0.15, 0.1)
STOCHASTIC = [[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]]
KERNEL = [[0.5, 0.4, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]
GOOD = torch.tensor([[0.0, 1.0]], dtype=torch.float64)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def bradley_terry(reward):
    return reward[:, :, None] - reward[:, None, :]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def soft(generator, *shape):
    """A random table: softmax of N(0, 1)."""
    return torch.softmax(normal(generator, *shape), -1)


# --- systems ------------------------------------------------------------------------------------------------------------


def xor_collider():
    """Two fair drafts; z is good (1) with probability 0.9 if they agree, 0.1 if not."""
    agree, differ = [0.1, 0.9], [0.9, 0.1]
    z = Categorical("z", {"y1": 2, "y2": 2}, 2, [[agree, differ], [differ, agree]])
    return CompoundSystem([Categorical("y1", {"x": 1}, 2), Categorical("y2", {"x": 1}, 2), z])


def one_input_chain(y, z):
    """One input, y and z given y as listed (z sees x, which says nothing)."""
    drafts, outputs = len(y), len(z[0])
    return CompoundSystem(
        [Categorical("y", {"x": 1}, drafts, [y]), Categorical("z", {"x": 1, "y": drafts}, outputs, [z])]
    )


def blind_chain(inputs, drafts, outputs):
    """x -> y -> z without x -> z, uniform: the bottleneck."""
    return CompoundSystem([Categorical("y", {"x": inputs}, drafts), Categorical("z", {"y": drafts}, outputs)])


def random_chain(g, skip=True, inputs=3, values=3):
    parents = {"x": inputs, "y": values} if skip else {"y": values}
    z = Categorical("z", parents, values, soft(g, *parents.values(), values))
    return CompoundSystem([Categorical("y", {"x": inputs}, values, soft(g, inputs, values)), z])


def ring_chain(g, inputs=3):
    """Uniform marginal: y uniform over 4, z's rows the circulant of RING."""
    rows = torch.stack([f64(RING).roll(shift) for shift in range(4)])
    z = Categorical("z", {"x": inputs, "y": 4}, 4, rows.expand(inputs, 4, 4).clone())
    return CompoundSystem([Categorical("y", {"x": inputs}, 4), z])


def random_collider(g, inputs=3):
    drafts = [Categorical(name, {"x": inputs}, 3, soft(g, inputs, 3)) for name in ("y1", "y2")]
    z = Categorical("z", {"x": inputs, "y1": 3, "y2": 3}, 3, soft(g, inputs, 3, 3, 3))
    return CompoundSystem([*drafts, z])


def random_router(g, inputs=3):
    """Exclusive: x -> m, (x, m) -> y, (x, m, y) -> z."""
    m = Categorical("m", {"x": inputs}, 2, soft(g, inputs, 2))
    y = Categorical("y", {"x": inputs, "m": 2}, 3, soft(g, inputs, 2, 3))
    return CompoundSystem([m, y, Categorical("z", {"x": inputs, "m": 2, "y": 3}, 3, soft(g, inputs, 2, 3, 3))])


def random_mask(g, inputs=3):
    """A mask m calls module 1, module 2, or both; value 0 of a module says that it was not called."""
    modules = []
    for number in range(2):
        answers, table = soft(g, inputs, 3, 2), torch.zeros(inputs, 3, 3, dtype=torch.float64)
        for m in range(3):
            if m in (number, 2):
                table[:, m, 1:] = answers[:, m]
            else:
                table[:, m, 0] = 1
        modules.append(Categorical(f"y{number + 1}", {"x": inputs, "m": 3}, 3, table))
    m = Categorical("m", {"x": inputs}, 3, soft(g, inputs, 3))
    z = Categorical("z", {"x": inputs, "m": 3, "y1": 3, "y2": 3}, 3, soft(g, inputs, 3, 3, 3, 3))
    return CompoundSystem([m, *modules, z])


def loop(start, kernel, tied, steps=3, sees_x=True):
    """y0 and `steps` times the same kernel, unrolled; the output is the last."""
    inputs, values = f64(start).shape
    kernel = f64(kernel).expand(inputs, values, values).clone() if sees_x else f64(kernel)
    parts = [Categorical("y0", {"x": inputs}, values, start)]
    for step in range(1, steps + 1):
        parents = {"x": inputs, f"y{step - 1}": values} if sees_x else {f"y{step - 1}": values}
        tie = "y1" if tied and step > 1 else None
        parts.append(Categorical(f"y{step}", parents, values, kernel, tie=tie))
    return CompoundSystem(parts, output=f"y{steps}")


def fixed_loop(tied):
    return loop([[0.7, 0.2, 0.1]], KERNEL, tied)


def random_loop(g, tied, inputs=2, sees_x=True):
    return loop(soft(g, inputs, 3).tolist(), soft(g, 3, 3).tolist(), tied, sees_x=sees_x)


# --- what is measured ---------------------------------------------------------------------------------------------------


def adjusted_gap(system, logits, beta=0.5):
    return alignment.gap(exact.marginal(system).detach(), logits, beta, exact.marginal(system, reference=True))


def family(make, reward, number=20, seed=0):
    """`number` systems, stacked, and their judges: (stack, logits)."""
    g = seeded(seed)
    drawn = [(make(g), reward(g)) for _ in range(number)]
    return exact.stack([system for system, _ in drawn]), bradley_terry(torch.cat([r for _, r in drawn]))


def family_gaps(stacked, logits, number=20, beta=0.5):
    """The reference-adjusted gap of each member."""
    laws = (exact.marginal(stacked).detach(), logits, exact.marginal(stacked, reference=True).detach())
    parts = [exact.by_member(law, number) for law in laws]
    return f64([alignment.gap(p, judge, beta, start) for p, judge, start in zip(*parts)])


def trained_family(variant, make, reward, steps=500, number=20, seed=0, law=None):
    """Gaps of a random family after Adam from the reference (lr 0.1, beta 0.5), and the stack."""
    stacked, logits = family(make, reward, number, seed)
    options = {} if law is None else {"law": law}
    exact.train(stacked, getattr(exact, variant)(stacked, logits, 0.5, systems=number, **options), steps)
    return family_gaps(stacked, logits, number), stacked


def twin(system):
    return copy.deepcopy(system)
