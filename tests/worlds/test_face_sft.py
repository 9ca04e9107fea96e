"""The captions adapter for a pretrained model, on a tiny model of the same kind."""

import json

import pytest
import torch

from sysdpo_lab import errors, paths
from sysdpo_lab.components import CausalLM, adapters
from sysdpo_lab.worlds import face_lm, face_sft, tiny_lm
from sysdpo_lab.worlds.faces import language, requesting


@pytest.fixture(scope="module")
def tokenizer():
    """One that reads the words of the prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "Style", "Request", "Captions", ":", *face_lm.STYLES, *face_lm.vocabulary()]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def test_the_texts_are_prompts_of_training_requests_and_answers_in_the_grammar(tokenizer):
    for prompt, answer in face_sft.training_texts(60, torch.Generator().manual_seed(1)):
        style, request, _ = prompt.split("\n")
        assert style.removeprefix("Style: ") in face_lm.STYLES
        asked = requesting.parse_request(request.removeprefix("Request: "))
        assert requesting.split_of(asked) == "train"
        assert language.parse_answer(answer) is not None
        assert tokenizer.unk_token_id not in tokenizer(prompt + answer)["input_ids"]


def test_a_short_fine_tuning_trains_the_adapter_alone_and_it_loads_again(tokenizer, tmp_path):
    model = tiny_lm.build_model(len(tokenizer), 0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    attached, losses = face_sft.fine_tune(model, tokenizer, steps=12, batch=8, rank=8, learning_rate=2e-2)
    assert losses[-1] < losses[0] - 0.3
    kept = {adapters.plain_name(name): p for name, p in attached.model.get_base_model().named_parameters()}
    assert all(torch.equal(kept[name], value) for name, value in start.items())
    adapters.save_weights(attached.model.get_base_model(), attached.name, tmp_path / "adapter", "tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 8 and config["base_model_name_or_path"] == "tiny"
    again = CausalLM(
        "captions", ["x"], tiny_lm.build_model(len(tokenizer), 0), tokenizer, face_sft.TEMPLATES["plain"],
        adapter=tmp_path / "adapter", max_new_tokens=4,
    )  # fmt: skip
    prompt = face_sft.TEMPLATES["plain"].format(x=requesting.render(requesting.EXAMPLE))
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(again.model(input_ids=ids).logits, attached.model(input_ids=ids).logits, atol=1e-5)


def test_a_stopped_fine_tuning_goes_on_to_the_same_adapter(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(face_sft, "CHECKPOINT_EVERY", 2)

    def trained(**settings):
        model = tiny_lm.build_model(len(tokenizer), 0)
        return face_sft.fine_tune(model, tokenizer, steps=6, batch=2, rank=2, **settings)

    whole, losses = trained()
    texts, made = face_sft.training_texts, []
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def stops(n, generator):
            made.append(n)
            if len(made) > 5:
                raise KeyboardInterrupt
            return texts(n, generator)

        patched.setattr(face_sft, "training_texts", stops)
        trained(folder=tmp_path)
    again, continued = trained(folder=tmp_path)
    assert continued == losses
    first, second = (adapters.adapter_parameters(found.model, found.name) for found in (whole, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_measuring_counts_what_does_not_parse(tokenizer):
    model = tiny_lm.build_model(len(tokenizer), 0).eval()
    found = face_sft.measure(model, tokenizer, 2, torch.Generator().manual_seed(0))
    assert found == {"validity": 0, "caption_order": 0, "faithfulness": 0}


def test_the_command_line_refuses_no_steps():
    with pytest.raises(errors.OptionRangeError):
        face_sft.main(["--out", "x", "--steps", "0"])


def test_the_shipped_adapter_is_the_one_that_its_card_names_and_writes_valid_captions_by_it():
    folder = face_sft.adapter_folder()
    card, config = (folder / "CARD.md").read_text(), json.loads((folder / "adapter_config.json").read_text())
    assert paths.file_sha256(folder / "adapter_model.safetensors") in card and f"--steps {face_sft.STEPS} " in card
    assert (config["r"], config["base_model_name_or_path"]) == (face_sft.RANK, face_sft.SOURCE)
    validity = float(card.split("| validity | ")[1].split(" ")[0])
    assert validity >= 0.8
