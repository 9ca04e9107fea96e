"""Every joint value of the hidden components: the sum that the other samplers approximate."""

import itertools
import math
from collections.abc import Mapping

import torch

from sysdpo_lab import errors
from sysdpo_lab.components.base import Batch, group_rows, repeat_rows
from sysdpo_lab.samplers.candidates import Candidates, candidates, check_size


def enumerate_all(
    system, inputs: Mapping[str, Batch], k: int | None = None, generator=None, *, limit: int = 100_000
) -> Candidates:
    """All joint assignments of the hidden components, in row-major order; with them P_A(z | x) is p(z | x) exactly.

    Args:
        system: every hidden component must be a table, or deterministic.
        inputs: {input: B rows}.
        k: None, or the number of joint assignments (checked).
        generator: ignored; nothing is random.
        limit: largest number of joint assignments.

    Raises:
        UnsupportedSamplerError: a hidden component has no finite table (a language model), or there are more than `limit`.

    >>> from sysdpo_lab import CompoundSystem
    >>> from sysdpo_lab.components import Categorical
    >>> system = CompoundSystem([Categorical("y", {"x": 1}, 3), Categorical("z", {"y": 3}, 2)])
    >>> enumerate_all(system, {"x": torch.tensor([0])}).values["y"]
    tensor([[0, 1, 2]])
    """
    free = [name for name in system.hidden if system[name].kind != "deterministic"]
    for name in free:
        if getattr(system[name], "log_table", None) is None:
            raise errors.UnsupportedSamplerError(
                f"component {name!r} ({type(system[name]).__name__}) has too many values to enumerate; "
                "use monte_carlo, diverse_beam or gumbel_top_k"
            )
    sizes = [system[name].cardinality for name in free]
    number = math.prod(sizes)
    if number > limit:
        raise errors.UnsupportedSamplerError(f"{number} joint assignments of {free} are more than limit={limit}")
    if k is not None and check_size(k) != number:
        raise errors.UnknownOptionError(f"k={k}, but {free} have {number} joint assignments; leave k out")
    rows = system._inputs(inputs)[1]
    grid = torch.tensor(list(itertools.product(*map(range, sizes))), dtype=torch.long).reshape(number, len(free))
    trace = {name: repeat_rows(inputs[name], number) for name in system.inputs}
    trace |= {name: grid[:, i].repeat(rows) for i, name in enumerate(free)}
    for name in system.hidden:
        if name not in trace:
            trace[name] = system.computed(name, trace, rows * number)
    values = {name: group_rows(trace[name], number) for name in system.hidden}
    return candidates(system, inputs, values, number)
