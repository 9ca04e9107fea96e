"""The stand-ins of the paper profile: the architecture, the tokenizer's kind and the data's schema are the real ones'."""

import json

import torch
from transformers import AutoConfig, AutoTokenizer

from sysdpo_lab import preferences
from sysdpo_lab.worlds import qwen_stand_ins as stand_ins


def test_the_model_is_a_qwen2_with_an_own_head_and_the_global_random_state_stays(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    named = stand_ins.write(tmp_path, rows=4)
    assert torch.equal(before, torch.get_rng_state())
    config = AutoConfig.from_pretrained(named["model"])
    assert config.model_type == "qwen2" and not config.tie_word_embeddings
    assert {path.suffix for path in (tmp_path / "model").iterdir()} <= {".json", ".safetensors", ".jinja", ".txt"}
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != (
        tmp_path / "judge" / "model.safetensors"
    ).read_bytes()


def test_the_tokenizer_adds_no_bos_and_writes_chatml(tmp_path):
    stand_ins.save_model(tmp_path, 0)
    words = AutoTokenizer.from_pretrained(tmp_path)
    text = "Is the thing near Réunion?"
    ids = words(text)["input_ids"]
    assert words.decode(ids) == text and words.bos_token_id is None and len(ids) < len(text.encode())
    chat = words.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert words.eos_token == "<|im_end|>"
    own = words.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}], tokenize=False
    )
    assert "helpful" not in own


def test_the_pairs_are_different_questions_in_intels_schema_and_the_chosen_answer_is_right(tmp_path):
    stand_ins.write_pairs(tmp_path / "a" / "rows.jsonl", 50, torch.Generator().manual_seed(0))
    rows = [json.loads(line) for line in (tmp_path / "a" / "rows.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 50 and set(rows[0]) == {"system", "question", "chosen", "rejected"}
    signs = {"plus": "+", "minus": "-", "times": "*"}
    for row in rows:
        a, word, b = row["question"].removeprefix("What is ").removesuffix("?").split()
        assert row["chosen"].endswith(f" is {eval(f'{a}{signs[word]}{b}')}.") and row["rejected"] != row["chosen"]
    pairs, report = preferences.load(tmp_path / "a" / "rows.jsonl")
    assert len(pairs) == 50
