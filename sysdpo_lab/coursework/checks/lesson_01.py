"""Lesson 01: terms of a trace, the probability of an answer, elimination, a system of one's own, log-ratios."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sysdpo_lab import CompoundSystem, exact
from sysdpo_lab.components import Categorical
from sysdpo_lab.coursework.checks.core import Check, Mistake, fail
from sysdpo_lab.coursework.checks.lesson_00 import draws, table


def collider(p_y1: Tensor, p_y2: Tensor, p_z: Tensor) -> CompoundSystem:
    """The lesson's system: x -> y1, x -> y2, (y1, y2) -> z."""
    (inputs, first), second, answers = p_y1.shape, p_y2.shape[1], p_z.shape[2]
    y1 = Categorical("y1", {"x": inputs}, first, p_y1)
    y2 = Categorical("y2", {"x": inputs}, second, p_y2)
    return CompoundSystem([y1, y2, Categorical("z", {"y1": first, "y2": second}, answers, p_z)], output="z")


def _collider_tables(generator: torch.Generator, inputs: int, size: int, answers: int) -> tuple[Tensor, ...]:
    return tuple(
        table(*shape, generator=generator) for shape in ((inputs, size), (inputs, size), (size, size, answers))
    )


# --- one term per component -------------------------------------------------------------------------------------------


def trace_terms(
    p_y1: Float[Tensor, "X Y1"],
    p_y2: Float[Tensor, "X Y2"],
    p_z: Float[Tensor, "Y1 Y2 Z"],
    trace: Mapping[str, Int[Tensor, " B"]],
) -> dict[str, Float[Tensor, " B"]]:
    """{component: log p_i(value | parents)} (E1), by the library."""
    return collider(p_y1, p_y2, p_z).log_prob_terms(trace)


def _traces() -> list[tuple]:
    g = draws(10)
    cases = []
    for inputs, size, answers in ((2, 2, 2), (3, 3, 3)):
        tables = _collider_tables(g, inputs, size, answers)
        sizes = {"x": inputs, "y1": size, "y2": size, "z": answers}
        cases.append((*tables, {name: torch.randint(n, (9,), generator=g) for name, n in sizes.items()}))
    return cases


def _terms(p1: Tensor, p2: Tensor, pz: Tensor, s: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"y1": p1[s["x"], s["y1"]].log(), "y2": p2[s["x"], s["y2"]].log(), "z": pz[s["y1"], s["y2"], s["z"]].log()}


def _changed(change):
    """A mistake that changes each of the three right terms."""
    return lambda *case: {name: change(term) for name, term in _terms(*case).items()}


check_trace_terms = Check(
    cases=_traces,
    right=trace_terms,
    mistakes=[
        Mistake("log forgotten", _changed(torch.exp), "these are probabilities; return their logs, in nats"),
        Mistake(
            "sign flipped", _changed(torch.neg), "these are surprises, -log p; return log p, which is never positive"
        ),
        Mistake(
            "parents in the wrong order",
            lambda p1, p2, pz, s: _terms(p1, p2, pz, s) | {"z": pz[s["y2"], s["y1"], s["z"]].log()},
            "the term of z reads its table with the parents in the wrong order: p_z[y1, y2, z]",
        ),
        Mistake(
            "y2 given y1",
            lambda p1, p2, pz, s: _terms(p1, p2, pz, s) | {"y2": p2[s["y1"] % len(p2), s["y2"]].log()},
            "y2's row is chosen by y1; its parent in the graph is x",
        ),
        Mistake(
            "summed over the batch", _changed(torch.sum), "each term is summed over the batch; keep one number a trace"
        ),
        Mistake(
            "averaged over the batch",
            _changed(torch.mean),
            "each term is a mean over the batch; keep one number a trace",
        ),
        Mistake(
            "base 2",
            _changed(lambda term: term / torch.tensor(2.0).log()),
            "these are bits; use the natural log (nats)",
        ),
        Mistake(
            "the total",
            lambda *case: sum(_terms(*case).values()),
            "this is the sum; return the terms by name, {'y1': ..., 'y2': ..., 'z': ...}: credit needs them apart",
        ),
    ],
)


# --- the probability of an answer -------------------------------------------------------------------------------------


def answer_given_input(
    p_y1: Float[Tensor, "X Y1"], p_y2: Float[Tensor, "X Y2"], p_z: Float[Tensor, "Y1 Y2 Z"]
) -> Float[Tensor, "X Z"]:
    """p(z | x) = sum over y1, y2 of p(y1 | x) p(y2 | x) p(z | y1, y2), by the library."""
    return exact.marginal(collider(p_y1, p_y2, p_z))


def _colliders() -> list[tuple]:
    g = draws(11)
    return [_collider_tables(g, *sizes) for sizes in ((2, 2, 2), (3, 2, 4), (3, 3, 3))]


check_answer_given_input = Check(
    cases=_colliders,
    right=answer_given_input,
    mistakes=[
        Mistake(
            "p(a|x) dropped",
            lambda p1, p2, pz: pz.sum((0, 1)).expand(len(p1), -1),
            "p(y1|x) and p(y2|x) are missing: the answer cannot depend on x without them",
        ),
        Mistake(
            "hidden values equally likely",
            lambda p1, p2, pz: pz.mean((0, 1)).expand(len(p1), -1),
            "the hidden values are all weighed the same; weigh them by p(y1|x) p(y2|x)",
        ),
        Mistake(
            "p(y2|x) dropped",
            lambda p1, p2, pz: torch.einsum("xa,abz->xz", p1, pz),
            "p(y2|x) is missing; the rows do not even sum to 1",
        ),
        Mistake(
            "p(y1|x) dropped",
            lambda p1, p2, pz: torch.einsum("xb,abz->xz", p2, pz),
            "p(y1|x) is missing; the rows do not even sum to 1",
        ),
        Mistake(
            "mean instead of sum",
            lambda p1, p2, pz: torch.einsum("xa,xb,abz->xz", p1, p2, pz) / (p1.shape[1] * p2.shape[1]),
            "a mean over the hidden values; their probabilities already weigh them, so add up",
        ),
        Mistake(
            "parents in the wrong order",
            lambda p1, p2, pz: torch.einsum("xa,xb,baz->xz", p1, p2, pz),
            "y1 and y2 are mixed up: p_z[y1, y2, z] has y1 first",
        ),
        Mistake(
            "different inputs for the two",
            lambda p1, p2, pz: torch.einsum("xa,wb,abz->xz", p1, p2, pz),
            "y1 and y2 must see the *same* x: use one letter, or one loop, for it",
        ),
        Mistake(
            "only the likeliest pair",
            lambda p1, p2, pz: pz[p1.argmax(1), p2.argmax(1)],
            "only the likeliest hidden values are used; the others lead to answers too",
        ),
        Mistake(
            "mean of logs",
            lambda p1, p2, pz: torch.einsum("xa,xb,abz->xz", p1, p2, pz.log()).exp(),
            "logs are averaged; average the probabilities (the log of a mean is not the mean of the logs)",
        ),
        Mistake(
            "joint",
            lambda p1, p2, pz: torch.einsum("xa,xb,abz->xabz", p1, p2, pz),
            "this is p(y1, y2, z | x); sum the hidden values out, to shape (X, Z)",
        ),
    ],
)


# --- elimination ------------------------------------------------------------------------------------------------------


def chain_answer(tables: Sequence[Float[Tensor, "N N"]]) -> Float[Tensor, "N N"]:
    """p(last | x) of a chain of components, by the library; cost grows with the number of tables, not of combinations."""
    names = ["x", *(f"y{i}" for i in range(1, len(tables))), "z"]
    components = [Categorical(names[i + 1], {names[i]: len(t)}, t.shape[1], t) for i, t in enumerate(tables)]
    return exact.marginal(CompoundSystem(components, output="z"))


def _chains() -> list[tuple]:
    g = draws(12)
    # 3 steps for the order of the product; 30 steps cannot be enumerated
    return [([table(n, n, generator=g) for _ in range(steps)],) for n, steps in ((3, 2), (3, 3), (3, 30))]


check_chain_answer = Check(
    cases=_chains,
    right=chain_answer,
    mistakes=[
        Mistake(
            "reversed",
            lambda tables: reduce(torch.matmul, reversed(tables)),
            "the chain runs backwards: the first table's rows are x, so it stands first in the product",
        ),
        Mistake(
            "element by element",
            lambda tables: reduce(torch.mul, tables),
            "the tables are multiplied element by element; the middle value must be summed out (a matrix product)",
        ),
        Mistake(
            "transposed",
            lambda tables: reduce(torch.matmul, [t.T for t in tables]),
            "rows and columns are swapped: tables[i][a, b] = p(b | a)",
        ),
        Mistake(
            "transposed result",
            lambda tables: reduce(torch.matmul, tables).T,
            "the result is turned round: rows are x, columns are the answer, and each row sums to 1",
        ),
        Mistake(
            "last only",
            lambda tables: tables[-1],
            "only the last table is used; start with the first and go through all",
        ),
        Mistake(
            "first two only",
            lambda tables: tables[0] @ tables[1],
            "only two tables are used; keep the product so far and go on with the next",
        ),
        Mistake(
            "one missing",
            lambda tables: reduce(torch.matmul, tables[1:]),
            "the first table is missing: the product starts one step too late",
        ),
        Mistake(
            "last missing",
            lambda tables: reduce(torch.matmul, tables[:-1]),
            "the last table is missing: the product ends one step too early",
        ),
    ],
)


# --- a system of one's own --------------------------------------------------------------------------------------------

QUERY = [[0.9, 0.1], [0.3, 0.7]]
DOCUMENT = [[0.8, 0.2], [0.4, 0.6]]
ANSWER = [[[0.7, 0.3], [0.1, 0.9]], [[0.6, 0.4], [0.2, 0.8]]]


def search_system() -> CompoundSystem:
    """x -> query -> document, (x, document) -> answer."""
    return _search()


def _search(answer_parents=("x", "document"), answer=ANSWER, document=DOCUMENT, output="answer") -> CompoundSystem:
    components = [
        Categorical("query", {"x": 2}, 2, QUERY),
        Categorical("document", {"query": 2}, 2, document),
        Categorical("answer", dict.fromkeys(answer_parents, 2), 2, answer),
    ]
    return CompoundSystem(components, inputs=("x",), output=output)


def _system_facts(system: CompoundSystem) -> dict:
    """What makes two systems the same: the graph, whatever the order of a list, and p(output | x)."""
    if not isinstance(system, CompoundSystem):
        fail(f"search_system() returned a {type(system).__name__}, expected a CompoundSystem")
    parents = {name: sorted(system.parents(name)) for name in sorted(system.order) if name not in system.inputs}
    return {
        "inputs": list(system.inputs),
        "output": system.output,
        "parents": parents,
        "p(output|x)": exact.marginal(system),
    }


check_search_system = Check(
    cases=lambda: [()],
    right=search_system,
    view=_system_facts,
    mistakes=[
        Mistake(
            "edge from x forgotten",
            lambda: _search(("document",), ANSWER[0]),
            "the answer does not read the question: an arrow from x to answer is missing",
        ),
        Mistake(
            "query instead of document",
            lambda: _search(("x", "query")),
            "the answer reads the query; what it reads is the document",
        ),
        Mistake(
            "parents in the wrong order",
            lambda: _search(("document", "x")),
            "the answer's parents stand in another order than its table's axes: x first, then document",
        ),
        Mistake(
            "rows swapped",
            lambda: _search(document=DOCUMENT[::-1]),
            "the document's rows are swapped: one row for each value of query, in order",
        ),
        Mistake(
            "wrong output",
            lambda: CompoundSystem(list(_search().components)[:2], inputs=("x",), output="document"),
            "the judged output is the answer, and the answer must be one of the components",
        ),
        Mistake(
            "every earlier value",
            lambda: _search(("x", "query", "document"), [[row, row] for row in ANSWER]),
            "the answer also has an arrow from query; it sees the question and the document only",
        ),
    ],
)


# --- log-ratios -------------------------------------------------------------------------------------------------------


def system_log_ratio(
    policy_terms: Mapping[str, Float[Tensor, " B"]], reference_terms: Mapping[str, Float[Tensor, " B"]]
) -> Float[Tensor, " B"]:
    """Sum over components of log p_i - log p_i,ref, one number per trace (E6)."""
    return sum(policy_terms.values()) - sum(reference_terms[name] for name in policy_terms)


def _two_sets_of_terms() -> list[tuple]:
    g = draws(13)
    cases = []
    for names in (("draft", "refine"), ("y1", "y2", "z")):
        one, other = (-3 * torch.rand(len(names), 4, generator=g, dtype=torch.float64) for _ in range(2))
        # the reference lists its components the other way round: match by name
        cases.append((dict(zip(names, one)), dict(list(zip(names, other))[::-1])))
    return cases


check_system_log_ratio = Check(
    cases=_two_sets_of_terms,
    right=system_log_ratio,
    mistakes=[
        Mistake(
            "output only",
            lambda p, r: p[list(p)[-1]] - r[list(p)[-1]],
            "only the last component is used; the hidden components changed too",
        ),
        Mistake(
            "mean over components",
            lambda p, r: (sum(p.values()) - sum(r.values())) / len(p),
            "a mean over the components; the probability of a trace is a product, so its log is a sum",
        ),
        Mistake(
            "reference forgotten",
            lambda p, r: sum(p.values()),
            "the reference is missing: this is log p of the policy, not its change",
        ),
        Mistake(
            "sign flipped",
            lambda p, r: sum(r.values()) - sum(p.values()),
            "the sign is flipped: positive where the policy makes the trace likelier than the reference does",
        ),
        Mistake(
            "ratio of logs",
            lambda p, r: sum(p.values()) / sum(r.values()),
            "the log of a ratio is a difference of logs, not their quotient",
        ),
        Mistake(
            "ratio, not its log",
            lambda p, r: (sum(p.values()) - sum(r.values())).exp(),
            "this is the ratio itself; return its log",
        ),
        Mistake(
            "summed over the batch",
            lambda p, r: (sum(p.values()) - sum(r.values())).sum(),
            "the traces are added up; keep one number per trace, shape (B,)",
        ),
        Mistake(
            "matched by position",
            lambda p, r: sum((a - b) * (i + 1) for i, (a, b) in enumerate(zip(p.values(), r.values()))),
            "terms of different components are paired: match them by name",
        ),
        Mistake(
            "a list of shares",
            lambda p, r: {name: p[name] - r[name] for name in p},
            "these are the components' shares; the system's log-ratio is their sum",
        ),
    ],
)
