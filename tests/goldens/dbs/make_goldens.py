"""Write goldens_own.json: what group beam search of transformers 4.56.2 returns on kinds of cases that are easy to get wrong.

    python -m venv old && old/bin/pip install torch==2.13.0 transformers==4.56.2 numpy
    old/bin/python make_goldens.py goldens_own.json [number of cases]

Cases are drawn from a grid with a fixed seed; one in which two scores that decide something lie closer than 1e-4 is
rejected. Every hypothesis is taken from the scorer's heaps, with its group and with the EOS id that really ended it
(the printed sequences show the first EOS id instead). Mode "pad": the search as it is. Mode "ignore": the pad id is
made unreachable (its log-probability is set to -inf, in cases where it would not have been a candidate anyway).
"""

import json
import random
import sys

import tiny_models
import torch
import transformers
from transformers import LogitsProcessor
from transformers.generation import beam_search

GAP = 1e-4
SPECS = {
    "llama-21": {"arch": "llama", "vocab": 21, "kv_heads": 2, "seed": 101},
    "llama-50": {"arch": "llama", "vocab": 50, "kv_heads": 4, "seed": 102},
    "qwen2-17": {"arch": "qwen2", "vocab": 17, "kv_heads": 4, "seed": 103},
    "qwen2-40": {"arch": "qwen2", "vocab": 40, "kv_heads": 1, "seed": 104},
}
COMMON = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "init": 0.6, "loud": [2, 7, 11]}
SHAPES = [(2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (2, 3), (4, 2), (3, 3)]
BaseScorer = beam_search.BeamSearchScorer


class Rejected(Exception):
    """The case turns on a near tie."""


class Unreachable(LogitsProcessor):
    """Takes the pad id out; remembers what it would have scored."""

    def __init__(self, pad, penalty):
        self.pad, self.penalty, self.scores = pad, penalty, None

    def __call__(self, input_ids, scores):
        self.scores = scores[:, self.pad].clone()
        scores = scores.clone()
        scores[:, self.pad] = -torch.inf
        return scores


class RecordingScorer(BaseScorer):
    """Remembers which EOS id ended a hypothesis, and refuses near ties."""

    latest = None
    unreachable = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        RecordingScorer.latest = self
        self.ends, self.before = {}, {}

    def process(self, input_ids, next_scores, next_tokens, next_indices, group_index=0, eos_token_id=None, **kwargs):
        eos = set(eos_token_id.tolist())
        if group_index == 0:
            self.idle = self._done.clone()  # the groups that emit pad at this step
        heaps = range(group_index, len(self._beam_hyps), self.num_beam_groups)
        for row, heap in enumerate(heaps):
            if not self._done[heap]:
                self._check(row, group_index, next_scores[row])
                self._remember(row, heap, input_ids, next_scores[row], next_tokens[row], next_indices[row], eos)
        found = super().process(
            input_ids, next_scores, next_tokens, next_indices, group_index=group_index, eos_token_id=eos_token_id, **kwargs
        )
        self.before[group_index] = found["next_beam_scores"].clone()
        return found

    def _check(self, row, group, scores):
        kept = scores[scores > -1e8]
        if len(kept) > 1 and (kept[:-1] - kept[1:]).min() < GAP:
            raise Rejected
        if self.unreachable is not None:
            start = torch.tensor([0.0] + [-1e9] * (self.group_size - 1)).repeat(len(self._beam_hyps))
            before = self.before.get(group, start)[row * self.group_size : (row + 1) * self.group_size]
            idle = self.idle[row * self.num_beam_groups :][:group].sum() * self.group_size
            pads = self.unreachable.scores[row * self.group_size : (row + 1) * self.group_size] + before
            pads = pads + self.unreachable.penalty * idle  # the default mode takes nothing off for idle groups
            if pads.max() > scores.min() - GAP:
                raise Rejected

    def _remember(self, row, heap, input_ids, scores, tokens, indices, eos):
        for score, token, index in zip(scores, tokens.tolist(), indices.tolist()):
            if token in eos:
                ids = tuple(input_ids[row * self.group_size + index].tolist())
                self.ends[heap, ids, score.item()] = token


def search(model, case):
    """Per row, the hypotheses of all groups: group, tokens, score."""
    options = dict(case["options"])
    groups, beams = options.pop("num_groups"), options.pop("beams_per_group")
    ids, mask = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"])
    unreachable = Unreachable(options["pad_token_id"], options["diversity_penalty"]) if case["mode"] == "ignore" else None
    RecordingScorer.unreachable = unreachable
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        num_beams=groups * beams,
        num_beam_groups=groups,
        num_return_sequences=groups * beams,
        logits_processor=[unreachable] if unreachable else [],
        **options,
    )
    scorer, longest = RecordingScorer.latest, options["max_new_tokens"]
    rows = []
    for row in range(len(ids)):
        rows.append([])
        for group in range(groups):
            heap = row * groups + group
            for score, tokens, _ in scorer._beam_hyps[heap].beams:
                rows[-1].append(hypothesis(scorer, heap, group, score, tokens, ids.shape[1], longest, options))
    case["finished_groups"] = int(scorer._done.sum())
    return rows


def hypothesis(scorer, heap, group, score, tokens, prompt, longest, options):
    new = tokens[prompt:].tolist()
    ended = [
        token
        for (where, ids, total), token in scorer.ends.items()
        if where == heap and ids == tuple(tokens.tolist()) and total / (len(new) + 1) ** options["length_penalty"] == score
    ]
    if not ended and len(new) < longest:
        raise AssertionError("a short hypothesis without an EOS")
    return {"group": group, "tokens": new + ended[:1], "score": score}


def draw_case(rng, number):
    name = rng.choice(list(SPECS))
    vocabulary = SPECS[name]["vocab"]
    eos = rng.choice([[2], [7, 2], [2, 7], [11, 2, 7], [5, 11], [3]])
    pad = rng.choice([0, eos[0], eos[-1], 1, 4, 11, vocabulary - 1])
    groups, beams = rng.choice(SHAPES)
    longest = rng.choice([1, 1, 2, 5, 8, 12, 12, 48])
    mode = rng.choice(["pad", "pad", "pad", "ignore"])
    if mode == "ignore":
        pad = rng.choice([i for i in range(vocabulary) if i not in eos])
    words = [*range(vocabulary), *eos, pad]  # EOS and pad ids also occur inside prompts
    prompts = [[rng.choice(words) for _ in range(rng.randint(1, 9))] for _ in range(rng.choice([1, 2, 3]))]
    width = max(map(len, prompts))
    return {
        "id": f"own-{number:03d}",
        "model": name,
        "mode": mode,
        "input_ids": [[pad] * (width - len(p)) + p for p in prompts],
        "attention_mask": [[0] * (width - len(p)) + [1] * len(p) for p in prompts],
        "options": {
            "num_groups": groups,
            "beams_per_group": beams,
            "diversity_penalty": rng.choice([0.3, 0.5, 1.5, 2.0, 5.0, 20.0]),
            "max_new_tokens": longest,
            "min_new_tokens": rng.choice([0, 0, 0, 1, 3]) if longest > 3 else 0,
            "eos_token_id": eos if len(eos) > 1 else eos[0],
            "pad_token_id": pad,
            "length_penalty": rng.choice([0.0, 0.5, 1.0, 2.0, -0.5]),
            "early_stopping": rng.choice([False, True, "never", "never"]),
        },
    }


def main(path, number):
    assert transformers.__version__ == "4.56.2", transformers.__version__
    import transformers.generation.utils as generation

    torch.set_num_threads(1)
    generation.BeamSearchScorer = RecordingScorer
    transformers.logging.set_verbosity_error()
    specs = {name: {**COMMON, **spec} for name, spec in SPECS.items()}
    models = {name: tiny_models.build(spec) for name, spec in specs.items()}
    for name, spec in specs.items():
        spec["sha256"] = tiny_models.digest(models[name])
        with torch.no_grad():
            ids = torch.tensor([[(3 * i + 1) % spec["vocab"] for i in range(9)]])
            spec["probe_logits"] = [round(x, 5) for x in models[name](input_ids=ids).logits[0, -1].tolist()]
    rng, cases, drawn = random.Random(7), [], 0
    while len(cases) < number:
        drawn += 1
        case = draw_case(rng, len(cases))
        try:
            case["rows"] = search(models[case["model"]], case)
        except Rejected:
            continue
        for ids, mask, row in zip(case["input_ids"], case["attention_mask"], case["rows"]):
            prompt = [i for i, m in zip(ids, mask) if m]
            for entry in row:
                entry["log_prob"] = round(tiny_models.log_prob(models[case["model"]], prompt, entry["tokens"]), 6)
                entry["score"] = round(entry["score"], 6)
        cases.append(case)
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    document = {"format": "group-beam-search-goldens/1", "made_with": made_with, "smallest_gap": GAP, "models": specs}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    with open(path, "w") as file:
        file.write(json.dumps(document)[:-1] + ', "cases": [\n' + lines + "\n]}\n")
    print(f"{number} of {drawn} cases kept, {sum(case['finished_groups'] > 0 for case in cases)} with a group that ends early")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
