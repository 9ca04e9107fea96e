"""What a run will cost, from its settings alone."""

from collections.abc import Mapping
from typing import Any

PROMPT_TOKENS = 90  # a restaurants prompt with its chat frame, rounded up


def tokens_per_step(settings: Mapping[str, Any]) -> tuple[int, int]:
    """(tokens generated, tokens scored) in one step of SysDPO-Sampling with draft and refine.

    Drafts: k a pair. Scores: each draft once, each final k times for winner and loser, all of it twice (policy and
    reference), prompts included.

    >>> tokens_per_step({"k": 2, "batch": 1, "max_new_tokens": 10})
    (20, 1280)
    """
    k, batch, new = settings["k"], settings["batch"], settings["max_new_tokens"]
    drafts = k * (PROMPT_TOKENS + new)
    finals = 2 * k * (PROMPT_TOKENS + 2 * new)
    return batch * k * new, batch * 2 * (drafts + finals)
