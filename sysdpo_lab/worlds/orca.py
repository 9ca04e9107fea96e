"""Intel/orca_dpo_pairs as a world: open questions, a better and a worse answer each, no exact judge.

The data come from the hub (`Intel/orca_dpo_pairs`, one JSONL file) or from a folder or file with the same schema. 193
instructions are held out, as many as in the SysDPO paper; which ones those were is not known to us, so the split here is by
a hash of the question.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sysdpo_lab import errors, preferences
from sysdpo_lab.components.prompts import is_conversation, joined
from sysdpo_lab.preferences import Pair, Pairs

HUB_ID, HUB_FILE = "Intel/orca_dpo_pairs", "orca_rlhf.jsonl"
STORED = {"train": 12_000, "validation": 193, "heldout": 193}
Messages = Sequence[Mapping[str, str]]


# --- prompts ------------------------------------------------------------------------------------------------------------


def _with_last(x: str | Messages, text: str) -> list[dict[str, str]]:
    """The conversation, its last message replaced by `text`; the system message stays."""
    kept = [dict(message) for message in x[:-1]] if is_conversation(x) else []
    return [*kept, {"role": "user", "content": text}]


def _question(x: str | Messages) -> str:
    return str(x[-1]["content"]) if is_conversation(x) else str(x)


def refine(x: str | Messages, draft: str) -> list[dict[str, str]]:
    """The refiner's prompt: the question, and the draft to improve on.

    >>> print(refine("Why is the sky blue?", "It is air.")[0]["content"])
    Why is the sky blue?
    <BLANKLINE>
    A first draft of the answer:
    It is air.
    <BLANKLINE>
    Write the final answer. Correct what is wrong in the draft and add what is missing.
    """
    text = f"{_question(x)}\n\nA first draft of the answer:\n{draft}\n\nWrite the final answer. "
    return _with_last(x, text + "Correct what is wrong in the draft and add what is missing.")


def merge(x: str | Messages, answer1: str, answer2: str) -> list[dict[str, str]]:
    """The merger's prompt: the question and two answers."""
    text = f"{_question(x)}\n\nOne answer:\n{answer1}\n\nAnother answer:\n{answer2}\n\nWrite the final answer. "
    return _with_last(x, text + "Keep what is right in either and leave out what is wrong.")


def second_answer(x: str | Messages, answer1: str) -> list[dict[str, str]]:
    """The prompt of an answerer that sees the first answer (the added edge of the collider)."""
    return _with_last(x, f"{_question(x)}\n\nAn answer by somebody else:\n{answer1}\n\nWrite your own answer.")


PROMPTS = {
    "chat": {
        "draft": "{x}", "refine": refine,
        "answer1": "{x}", "answer2": "{x}", "answer2-seeing": second_answer, "merge": merge,
    }
}  # fmt: skip


# --- data ---------------------------------------------------------------------------------------------------------------


class Orca:
    """The pairs of one source, split by a hash of the question.

    Args:
        source: a hub id, a folder that holds the JSONL file, or the file itself.
        revision: branch, tag or commit of a hub id; "" is the main branch.
        longest: characters of an answer; training pairs with a longer one are left out, since one such pair sets the width
            of its whole batch. Held-out pairs stay. 0: none is left out.

    Raises:
        MissingFileError: no such folder or file, or the hub cannot be reached; the message says what to do.
        PreferenceFileError: no line can be used.
    """

    PROMPTS, STORED, exact = PROMPTS, STORED, False

    def __init__(self, source: str = HUB_ID, revision: str = "", longest: int = 0):
        self.path = located(source, revision)
        pairs, self.report = preferences.load(self.path)
        ranked = sorted(range(len(pairs)), key=lambda row: _rank(pairs[row].inputs["x"]))
        held = min(STORED["heldout"], max(1, len(pairs) // 4))
        self._rows = {
            "heldout": ranked[:held],
            "validation": ranked[held : 2 * held],
            "train": sorted(row for row in ranked[2 * held :] if not longest or _length(pairs[row]) <= longest),
        }
        self._pairs = pairs

    def stored_pairs(self, split: str) -> Pairs:
        """The pairs of a split, in a fixed order."""
        errors.check_option("split", split, tuple(STORED))
        return Pairs([self._pairs[row] for row in self._rows[split]], f"{self.path}, {split}")

    def preference_pairs(self, n: int, generator: torch.Generator, split: str = "train") -> Pairs:
        """n pairs of a split, drawn without repeats; all of them, shuffled, where there are fewer."""
        rows = self._rows[split]
        drawn = torch.randperm(len(rows), generator=generator)[:n].tolist()
        return Pairs([self._pairs[rows[place]] for place in drawn], f"{self.path}, {split}")


def _length(pair: Pair) -> int:
    return max(len(str(pair.chosen)), len(str(pair.rejected)))


def _rank(x: str | Messages) -> str:
    text = joined(x) if is_conversation(x) else str(x)
    return hashlib.sha256(text.encode()).hexdigest()


def located(source: str, revision: str = "") -> Path:
    """The JSONL file of a source, downloaded once where the source is a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if len(found) != 1:
            raise errors.MissingFileError(f"{path}: expected one *.jsonl file, found {[p.name for p in found]}")
        return found[0]
    if path.is_file():
        return path
    if source != HUB_ID:
        raise errors.MissingFileError(f"{source}: no such file or folder; the hub's data set is {HUB_ID!r}")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, HUB_FILE, repo_type="dataset", revision=revision or None))
    except OSError as error:  # the hub's own errors are OSErrors too
        raise errors.MissingFileError(
            f"{source} could not be read from the hub ({str(error).strip().splitlines()[0]}); this profile needs a network, "
            f"or the file {HUB_FILE} in a folder: --set dataset=FOLDER"
        ) from error


def opened(settings: Mapping[str, Any]) -> Orca:
    """The world of a run."""
    return Orca(settings["dataset"] or HUB_ID, settings["dataset_revision"], settings.get("longest", 0))
