"""The paper profile of `run faces` on tiny random models of its classes, saved to folders: loaders, LoRA, CLIP judge, rows."""

import json
from itertools import product

import pytest
import torch

from sysdpo_lab import planning, profiles
from sysdpo_lab.experiments import faces_data, faces_paper, faces_rows, runner
from sysdpo_lab.worlds import clip_scorer, photos
from tests import tiny, tiny_diffusion
from tests.worlds.test_photos import tiny_clip

ROWS = "before,best-of-n,only:captions,only:images,one-round,joint"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Llama with a chat template, a random Stable Diffusion pipeline, a random CLIP."""
    place = tmp_path_factory.mktemp("paper")
    tiny.model("llama", 0, max_position_embeddings=1024).save_pretrained(place / "model")
    tiny.tokenizer(chat=True).save_pretrained(place / "model")
    tiny_diffusion.save_pipeline(place / "pipeline")
    tiny_clip().save_pretrained(place / "clip")
    tiny_diffusion.clip_tokenizer().save_pretrained(place / "clip")
    return place


def settings(folders, **more):
    return {
        "model": str(folders / "model"), "base": str(folders / "pipeline"),
        "scorer": "tests.worlds.test_photos:brightness", "dtype": "float32",
        "rank": 2, "max_new_tokens": 8, "ddim_steps": 2, "requests_1": 3, "requests_2": 3, "heldout": 2, "samples": 2,
        "steps_1": 2, "steps_2": 2, "batch": 2, "warmup": 0, "pairs": 6, "min_gap": 0.0, "checkpoint_every": 1, "eval_batch": 4,
        "lr_captions": 1e-2, "lr_images": 1e-2, **more,
    }  # fmt: skip


def everything():
    """{words: request} of all requests."""
    found = {}
    for family, attributes in photos.ATTRIBUTES.items():
        single = list(product(attributes, ("more", "less")))
        asks = [(a,) for a in single] + [(a, b) for a, b in product(single, single) if a[0] != b[0]]
        for ask, subject, number, wording in product(
            asks, photos.SUBJECTS[family], (3, 4), range(len(photos.WORDINGS))
        ):
            request = photos.Request(family, ask, subject, number, wording)
            found[photos.render(request)] = request
    return found


@pytest.fixture
def writes_captions(monkeypatch):
    """A random model writes no captions; here it answers with the oracle's, in a random order, as a real one might."""
    from sysdpo_lab.components import CausalLM
    from sysdpo_lab.components.completion import Completion

    by_words = everything()

    def sample(self, parent_values, num_samples=1, generator=None):
        found = []
        for x in parent_values["x"]:
            request = by_words[x]
            captions = photos.oracle_captions(request)
            order = torch.randperm(len(captions), generator=generator).tolist()
            text = photos.join_captions([captions[i] for i in order])
            found.append(Completion(text, (5, 6, 7, 8)))
        return found

    monkeypatch.setattr(CausalLM, "sample", sample)


def context_at(out, folders, **more):
    profile = profiles.find("faces", "paper")
    out.mkdir(parents=True, exist_ok=True)
    return runner.Context(
        profile, profile.with_settings(settings(folders, **more)), out, True, lambda line: None, False
    )


def test_every_row_runs_from_folders_with_adapters_alone_trained(folders, tmp_path, writes_captions):
    summary = runner.run(
        "faces", "paper", tmp_path / "run", (0,), settings(folders), say=lambda line: None, progress=False
    )
    assert list(dict.fromkeys(row["system"] for row in summary["rows"])) == ROWS.split(",")
    assert str(folders / "pipeline") in summary["notes"]["diffusion"] and (tmp_path / "run" / "report.html").is_file()
    values = {(row["system"], row["metric"]): row["value"] for row in summary["rows"]}
    assert values["before", "validity"] == 1.0 and values["before", "image_drift"] == 0.0
    assert values["joint", "image_drift"] != 0.0 and values["only:captions", "image_drift"] == 0.0
    assert (tmp_path / "run" / "figures" / "strips.png").is_file()
    state = faces_rows.load_state(tmp_path / "run" / "seed-0" / "joint" / faces_rows.WEIGHTS)
    assert set(state) == {"captions", "images"} and all("lora" in key for part in state.values() for key in part)


def test_pictures_are_stored_as_latents(folders, tmp_path, writes_captions):
    context = context_at(tmp_path, folders)
    answers = faces_rows.answers_of_round(context, 0, 1)
    assert len(answers) == 3 * 4 and all(
        a.images.shape[1:] == (4, 4, 4) and a.images.dtype == torch.float16 for a in answers
    )
    assert faces_data.as_pairs(answers, [(0, 1)])[0].chosen["images"].dtype == torch.float32
    seen = faces_rows.world_of(context).pictures(faces_data.unpacked(answers[0].images))
    assert seen.shape[1:] == (3, 8, 8) and 0 <= seen.min() and seen.max() <= 1


def test_adapters_of_a_stage_are_the_next_stages_reference(folders, tmp_path):
    context = context_at(tmp_path, folders)
    system = faces_paper.build_system(context)
    with torch.no_grad():
        for parameter in system.trainable_parameters():
            parameter.add_(0.05)
    weights = faces_rows.state_of(system, ("captions", "images"))
    again = faces_paper.build_system(context, weights)
    trace = {"x": ["the abc"], "captions": ["a man\na man"], "images": [tiny_diffusion.images(2, 0, (4, 4, 4))]}
    noise = system.draw_noise(trace, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = system.log_prob_terms(trace, noise), again.log_prob_terms(trace, noise)
        with again.reference():
            reference = again.log_prob_terms(trace, noise)
        with system.reference():
            start = system.log_prob_terms(trace, noise)
    for name in ("captions", "images"):
        assert torch.allclose(found[name], wanted[name]) and torch.allclose(reference[name], wanted[name])
        assert not torch.allclose(start[name], wanted[name])


def test_the_random_model_itself_can_be_asked_and_what_does_not_parse_counts(folders, tmp_path):
    context = context_at(tmp_path, folders, scorer=str(folders / "clip"))
    world, system = faces_rows.world_of(context), faces_paper.build_system(context)
    request = photos.requests(torch.Generator().manual_seed(0), 1)[0]
    trace = system.sample({"x": [world.render(request)]}, generator=torch.Generator().manual_seed(0))
    verdict = world.judge(request, str(trace["captions"][0]), trace["images"][0])
    assert (
        isinstance(world.scorer, clip_scorer.ClipScorer)
        and verdict.validity in (0.0, 1.0)
        and json.dumps(verdict.preference_score)
    )


def test_the_plan_counts_memory_and_network_calls_by_hand():
    options = profiles.find("faces", "paper").settings
    work = planning.faces_work(options)
    assert work["pictures"] == pytest.approx(3.3 * (1500 * 4 + 1500 * 2 * 2))
    assert work["network calls of a training step"] == pytest.approx(16 * 4 * 3.3)
    assert planning.faces_memory(16)["language model"] == pytest.approx(16.06)
