"""Two systems with every number known to 1e-15: all of them agree to 1e-9."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from sysdpo_lab import alignment, exact, losses, samplers

FILES = sorted((Path(__file__).parent / "goldens" / "vectors").glob("*.json"))
CLOSE = {"rtol": 0, "atol": 1e-9}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def vectors(request):
    return json.loads(request.param.read_text()), exact.load_case(request.param)


def close(found, expected):
    found = torch.as_tensor(found, dtype=torch.float64).detach()
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **CLOSE)


def check_gradients(spec, case, loss, expected):
    for component in spec["components"]:
        case.system[component["name"]].logits.grad = None
    loss.backward()
    for component in spec["components"]:
        gradient = case.system[component["name"]].logits.grad
        shape = torch.tensor(component["policy"]).shape
        close(torch.zeros(shape) if gradient is None else gradient, expected[component["name"]])


def traces(spec, pairs):
    names = [component["name"] for component in spec["components"]]
    x = {"x": torch.tensor([pair["x"] for pair in pairs])}
    return [
        x | {name: torch.tensor([pair[side][name] for pair in pairs]) for name in names} for side in ("winner", "loser")
    ]


def test_both_files_are_here():
    assert [path.stem for path in FILES] == ["chain", "collider"]


def test_marginals(vectors):
    spec, case = vectors
    close(exact.marginal(case.system), spec["p_z"]["policy"])
    close(exact.marginal(case.system, reference=True), spec["p_z"]["reference"])


def test_tables_keep_their_values_and_the_order_of_their_axes(vectors):
    spec, case = vectors
    for component in spec["components"]:
        assert list(case.system.parents(component["name"])) == component["parents"]
        close(exact.probability_table(case.system, component["name"]), component["policy"])
        close(exact.probability_table(case.system, component["name"], reference=True), component["reference"])


def test_direct_losses_margins_gradients(vectors):
    spec, case = vectors
    block = spec["direct"]
    chosen, rejected = traces(spec, block["pairs"])
    out = losses.direct_loss(case.system, chosen, rejected, case.beta)
    close(out.loss, block["mean_loss"])
    close(out.margin, [pair["margin"] for pair in block["pairs"]])
    torch.testing.assert_close(sum(out.shares.values()), out.log_ratio_gap, **CLOSE)
    close(case.system.log_prob(chosen), [pair["log_p_winner"] for pair in block["pairs"]])
    with case.system.reference():
        close(case.system.log_prob(chosen), [pair["log_p_ref_winner"] for pair in block["pairs"]])
    check_gradients(spec, case, out.loss, block["grad"])


def test_sampling_losses_margins_gradients(vectors):
    spec, case = vectors
    hidden = [c["name"] for c in spec["components"] if c["name"] != spec["terminal"]]
    assert len(spec["sampling"]) >= 2
    for block in spec["sampling"]:
        pairs = block["pairs"]
        x, chosen, rejected = (torch.tensor([pair[key] for pair in pairs]) for key in ("x", "winner", "loser"))
        sets = [block["A"][str(pair["x"])] for pair in pairs]
        intermediates = {name: torch.tensor([[entry[name] for entry in s] for s in sets]) for name in hidden}
        out = losses.sampling_loss(case.system, {"x": x}, chosen, rejected, intermediates, case.beta, repeats="count")
        close(out.loss, block["mean_loss"])
        close(out.margin, [pair["margin"] for pair in pairs])
        torch.testing.assert_close(sum(out.shares.values()), out.log_ratio_gap, **CLOSE)
        check_gradients(spec, case, out.loss, block["grad"])


def test_gaps_and_optimum(vectors):
    spec, case = vectors
    p, p_ref = exact.marginal(case.system), exact.marginal(case.system, reference=True)
    close(case.reward, spec["reward"]["table"])
    close(torch.sigmoid(case.preference_logits), spec["pref"]["table"])
    for name, system in (("policy", p), ("reference", p_ref)):
        close(alignment.gap(system, case.preference_logits, case.beta), spec["gaps"][name]["gap_logit"])
        adjusted = alignment.gap(system, case.preference_logits, case.beta, p_reference=p_ref)
        close(adjusted, spec["gaps"][name]["gap_logit_ref_adjusted"])
        close(alignment.probability_gap(system, case.preference_logits, case.beta), spec["gaps"][name]["gap_prob"])
    optimum = exact.tilted_marginal(case.system, case.reward, case.beta)
    close(optimum, spec["optimum"]["p_z"])
    close(alignment.gap(optimum, case.preference_logits, case.beta), spec["optimum"]["gap_logit"])
    close(alignment.probability_gap(optimum, case.preference_logits, case.beta), spec["optimum"]["gap_prob"])
    assert alignment.gap(optimum, case.preference_logits, case.beta, p_reference=p_ref) < 1e-9


def test_population_loss_of_sampling(vectors):
    """All ordered pairs of different outputs, each winner weighted by its preference, all intermediates."""
    spec, case = vectors
    inputs, outputs = case.reward.shape
    rows = [(x, i, j) for x in range(inputs) for i, j in itertools.permutations(range(outputs), 2)]
    x, winner, loser = torch.tensor(rows).T
    candidates = samplers.enumerate_all(case.system, {"x": x})
    out = losses.sampling_loss(case.system, {"x": x}, winner, loser, candidates.values, case.beta)
    preference = torch.sigmoid(case.preference_logits[x, winner, loser])
    # every unordered pair stands twice, so weighting each order by its preference gives half the loss
    loss = -2 * (preference * torch.nn.functional.logsigmoid(out.margin)).mean()
    close(loss, spec["population"]["sampling_loss"])
    check_gradients(spec, case, loss, spec["population"]["sampling_grad"])


@pytest.mark.parametrize("law", ["ref", "uniform"])
def test_population_loss_of_direct(vectors, law):
    """Two independent traces a pair, conditioned on different outputs."""
    spec, case = vectors
    names = [component["name"] for component in spec["components"]]
    sizes = [component["card"] for component in spec["components"]]
    grid = torch.tensor(list(itertools.product(*map(range, sizes))))
    total, z = 0.0, names.index(spec["terminal"])
    for x in range(case.reward.shape[0]):
        trace = {"x": torch.full((len(grid),), x), **{name: grid[:, i] for i, name in enumerate(names)}}
        with case.system.reference():
            nu = case.system.log_prob(trace).exp() if law == "ref" else torch.ones(len(grid)).double()
        first, second = torch.tensor(list(itertools.permutations(range(len(grid)), 2))).T
        apart = grid[first, z] != grid[second, z]
        first, second = first[apart], second[apart]
        sides = [{name: value[index] for name, value in trace.items()} for index in (first, second)]
        out = losses.direct_loss(case.system, *sides, case.beta)
        preference = torch.sigmoid(case.preference_logits[x, grid[first, z], grid[second, z]])
        weight = (nu[first] * nu[second]).detach()
        total += -2 * (weight * preference * torch.nn.functional.logsigmoid(out.margin)).sum() / weight.sum()
    loss = total / case.reward.shape[0]
    close(loss, spec["population"][f"direct_loss_nu_{law}"])
    if law == "ref":
        check_gradients(spec, case, loss, spec["population"]["direct_grad_nu_ref"])


@pytest.mark.parametrize(("variant", "law", "key"), [
    ("sampling", "uniform", "sampling_loss"),
    ("direct", "reference", "direct_loss_nu_ref"),
    ("direct", "uniform", "direct_loss_nu_uniform"),
])  # fmt: skip
def test_population_objectives(vectors, variant, law, key):
    spec, case = vectors
    objective = getattr(exact, variant)(case.system, case.preference_logits, case.beta, law)
    close(objective(), spec["population"][key])
    if law != "uniform" or variant == "sampling":
        gradients = "sampling_grad" if variant == "sampling" else "direct_grad_nu_ref"
        check_gradients(spec, case, objective(), spec["population"][gradients])
    if variant == "sampling":
        close(objective.pairs.floor, spec["population"]["sampling_entropy_bound"])


def test_the_optimum_of_direct_does_not_factorise_along_the_graph(vectors):
    spec, case = vectors
    joint = exact.tilted_joint(case.system, case.reward, case.beta)
    close(exact.factorisation_defect(case.system, joint), spec["optimum"]["factorisation_defect_max_abs_prob"])
    verdict = exact.holds_direct(case.system, case.reward, case.beta)
    assert bool(verdict) is spec["optimum"]["direct_optimum_factorises_along_the_DAG"] is False
    assert verdict.edges == ((("x", "z"),) if case.name == "chain" else (("y1", "y2"),))


@pytest.mark.parametrize(("law", "key"), [("reference", "nu_ref"), ("uniform", "nu_uniform")])
def test_the_best_direct_solution_within_the_graph(vectors, law, key):
    spec, case = vectors
    expected = spec["optimum"]["best_direct_within_the_DAG (numerical, multi-start L-BFGS)"][key]
    objective = exact.direct(case.system, case.preference_logits, case.beta, law)
    exact.minimise(case.system, objective, 6, torch.Generator().manual_seed(0), steps=300)
    close(objective(), expected["loss"])
    close(objective.excess, expected["excess_loss"])
    p, p_ref = exact.marginal(case.system).detach(), exact.marginal(case.system, reference=True)
    for found, name in (
        (p, "p_z"),
        (alignment.gap(p, case.preference_logits, case.beta), "gap_logit"),
        (alignment.gap(p, case.preference_logits, case.beta, p_reference=p_ref), "gap_logit_ref_adjusted"),
    ):  # a minimum is known to the square root of its loss's precision
        found, wanted = (torch.as_tensor(v, dtype=torch.float64) for v in (found, expected[name]))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
