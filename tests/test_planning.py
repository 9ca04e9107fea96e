"""The planned numbers of tokens, by hand and against what a training step does."""

from collections import Counter

import torch

from sysdpo_lab import planning, samplers, training
from sysdpo_lab.profiles import REGISTRY
from tests import training_cases


def test_tokens_of_a_step_by_hand():
    # k = 2: two drafts of 5 tokens; scored are 2 drafts and 2 x 2 finals, for policy and reference, in each of 3 pairs
    drafts, finals = 2 * (90 + 5), 4 * (90 + 5 + 5)
    assert planning.PROMPT_TOKENS == 90
    assert planning.tokens_per_step({"k": 2, "batch": 3, "max_new_tokens": 5}) == (3 * 2 * 5, 3 * 2 * (drafts + finals))


def test_a_step_scores_as_many_sequences_as_the_plan_counts(monkeypatch):
    system, batch, k = training_cases.letters_system(), training_cases.letters_finals().batch(range(3)), 2
    scored = Counter()
    for name in ("draft", "answer"):
        node = system[name]

        def counting(value, parents, name=name, log_prob=node.log_prob):
            scored[name] += len(value)
            return log_prob(value, parents)

        monkeypatch.setattr(node, "log_prob", counting)
    samplers.monte_carlo(system, batch.inputs, k, generator=torch.Generator().manual_seed(0))
    by_the_sampler = Counter(scored)
    scored.clear()
    training.sampling(0.1, samplers.monte_carlo, k)(system, batch, torch.Generator().manual_seed(0))
    assert scored - by_the_sampler == {"draft": 3 * 2 * k, "answer": 3 * 2 * 2 * k}  # policy and reference; both sides


def test_more_of_anything_costs_more():
    settings = dict(REGISTRY["two-llm", "tiny"].settings)
    base = planning.tokens_per_step(settings)
    for key in ("k", "batch", "max_new_tokens"):
        more = planning.tokens_per_step({**settings, key: 2 * settings[key]})
        assert more[0] == 2 * base[0] and base[1] < more[1] <= 2 * base[1], key
