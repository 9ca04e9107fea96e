"""`run faces`: preference data of whole sequences, two rounds, rows that share their stages; on a small untrained painter."""

import copy
import dataclasses
import json
import shutil

import pytest
import torch

from sysdpo_lab import anchoring, errors, losses, profiles
from sysdpo_lab.components import CausalLM
from sysdpo_lab.components.completion import Completion
from sysdpo_lab.experiments import faces as experiment
from sysdpo_lab.experiments import faces_data, faces_figures, faces_rows, faces_studies, runner
from sysdpo_lab.experiments.faces_data import Answer
from sysdpo_lab.worlds import face_diffusion, face_lm, face_models, faces
from sysdpo_lab.worlds.faces import Verdict

SMALL = {
    "requests_1": 6, "requests_2": 6, "heldout": 4, "samples": 2, "steps_1": 2, "steps_2": 2, "steps_longer": 3, "batch": 4,
    "min_gap": 0.01, "split": "validation", "ddim_steps": 2, "pairs": 24, "checkpoint_every": 1,
}  # fmt: skip
DEFAULTS = dict(profiles.REGISTRY["faces", "tiny"].settings)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def bases():
    """The shipped caption writer and an untrained painter of the same kind, a tenth of its size."""
    base = face_diffusion.build(channels=(16, 16))
    for module in (base.unet, base.encoder):
        module.eval().requires_grad_(False)
    return face_models.load_face_lm(), base


@pytest.fixture
def small(bases, monkeypatch):
    monkeypatch.setattr(faces_rows, "load_bases", lambda context: bases)


def context_at(out, **changes):
    profile = profiles.find("faces", "tiny")
    out.mkdir(parents=True, exist_ok=True)
    quiet = {"say": lambda line: None, "progress": False}
    return runner.Context(profile, profile.with_settings({**SMALL, **changes}), out, resume=True, **quiet)


def answer(score, captions="a very old face on a red background", x="x", pictures=1, valid=1.0, truncated=False):
    verdict = Verdict(score, 0.0, 0.0, 1.0, valid, 1.0)
    images = torch.zeros(pictures, 3, 24, 24, dtype=torch.uint8)
    return Answer(x, "plain", Completion(captions, (1, 2), truncated), images, verdict, score)


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_pairs_are_of_one_request_with_the_better_answer_first_and_ties_left_out():
    answers = [answer(0.1), answer(0.9, "b"), answer(0.2), answer(0.9, x="other")]
    found = faces_data.candidates(answers, min_gap=0.3)
    assert (found.same, found.different, found.ties) == ([], [(1, 0), (1, 2)], 1)
    assert faces_data.candidates(answers, min_gap=0.05).same == [(2, 0)]


def test_equal_scores_are_a_tie_even_without_a_gap():
    assert faces_data.candidates([answer(0.5), answer(0.5, "b")], min_gap=0.0).ties == 1


def test_what_does_not_parse_or_was_cut_stands_in_no_pair():
    answers = [answer(0.9), answer(-1.0, "b", valid=0.0), answer(-1.0, "c", truncated=True)]
    found = faces_data.candidates(answers, min_gap=0.3)
    assert (found.same, found.different, found.ties) == ([], [], 0)


@pytest.mark.parametrize(("number", "share", "expected"), [(10, 0.5, (5, 5)), (100, 0.5, (8, 8)), (10, 0.0, (0, 10))])
def test_the_share_of_pairs_with_the_same_captions_is_kept(number, share, expected):
    found = faces_data.Candidates([(i, 0) for i in range(8)], [(0, i) for i in range(1, 41)], 0)
    chosen = faces_data.choose(found, number, share, seeded())
    alike = sum(pair in found.same for pair in chosen)
    assert (alike, len(chosen) - alike) == expected and len(set(chosen)) == len(chosen)


def test_pairs_are_the_same_again_from_the_same_seed():
    found = faces_data.Candidates([(i, 0) for i in range(8)], [(0, i) for i in range(1, 41)], 0)
    first, again, other = (faces_data.choose(found, 12, 0.25, seeded(seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_the_score_is_the_preference_score_less_the_share_of_wrong_colours():
    assert faces_data.score(Verdict(0.25, 1, 1, 1, 1, colour=0.0), penalty=0.5) == -0.25


def test_without_any_pair_the_message_says_what_to_do():
    with pytest.raises(errors.EmptyPairsError, match="lower min_gap"):
        faces_data.as_pairs([answer(0.5)], [])


def test_answers_come_back_from_their_files_bit_for_bit(tmp_path):
    answers = [answer(0.5, pictures=3), answer(-1.0, "nothing", pictures=0, valid=0.0), answer(0.25, "c", pictures=4)]
    answers[0].images.random_(0, 256, generator=seeded())
    faces_data.save_answers(tmp_path, answers)
    for before, after in zip(answers, faces_data.load_answers(tmp_path), strict=True):
        assert torch.equal(before.images, after.images)
        assert (before.captions, before.verdict, before.score) == (after.captions, after.verdict, after.score)


def test_the_card_counts_what_there_is():
    answers = [answer(0.9), answer(0.1), answer(0.5, "b")]
    found = faces_data.candidates(answers, 0.3)
    numbers = faces_data.statistics(answers, found, [(0, 1), (0, 2)])
    assert numbers["pairs with the same captions"] == 1 and numbers["mean score gap"] == pytest.approx(0.6)
    assert sum(numbers["histogram"]) == 3
    card = faces_data.card(numbers, "Data", {"min_gap": 0.3})
    assert "- pairs: 2\n" in card and "| plain | 3 | 1.000 |" in card and "+0.75 to +1.00       1" in card


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_answers_are_drawn_under_each_style_and_the_plain_prompt_comes_back(small, tmp_path):
    system = faces_rows.build_system(context_at(tmp_path))
    asked = faces.requests(seeded(1), 3, "train")
    options = (asked, face_lm.TEMPLATES, ("plain", "bold"), 2, 0.5)
    answers = faces_data.draw_answers(system, *options, seeded())
    assert [a.style for a in answers] == ["plain", "plain", "bold", "bold"] * 3
    assert [a.x for a in answers[::4]] == [faces.render(request) for request in asked]
    assert system["captions"].template == face_lm.TEMPLATES["plain"]
    assert all(
        a.captions is b.captions and not torch.equal(a.images, b.images) for a, b in zip(answers[::2], answers[1::2])
    )
    again = faces_data.draw_answers(system, *options, seeded())
    assert all(a.captions == b.captions and torch.equal(a.images, b.images) for a, b in zip(answers, again))


def test_a_style_changes_what_is_drawn_but_not_what_is_scored(small, tmp_path):
    system = faces_rows.build_system(context_at(tmp_path))
    x = ["three faces on a red background, each older than the last"] * 32
    with faces_data.prompted(system["captions"], face_lm.TEMPLATES["careful"]):
        careful = system["captions"].sample({"x": x}, generator=seeded())
    plain = system["captions"].sample({"x": x}, generator=seeded())
    request = faces.parse_request(x[0])
    orders = [sum(faces.caption_order(request, text) for text in texts) for texts in (careful, plain)]
    assert orders[0] > orders[1]  # the shipped writer heeds the style
    trace = {"x": x[:1], "captions": careful[:1]}
    scored = system.log_prob_terms(trace, names=["captions"])["captions"]
    with faces_data.prompted(system["captions"], face_lm.TEMPLATES["careful"]):
        own = system.log_prob_terms(trace, names=["captions"])["captions"]
    assert own.item() != scored.item()


# --- stages -----------------------------------------------------------------------------------------------------------


def test_rows_stages_and_views_agree():
    assert set(faces_rows.DEFAULT.split(",")) <= set(faces_rows.ROWS)
    for view in faces_rows.VIEWS.values():
        assert {view.captions, view.images} <= {None, faces_rows.ORACLE, *faces_rows.STAGES}
        assert view.images is None or "images" in faces_rows.STAGES[view.images].trained
    joint, captions = faces_rows.STAGES["joint"], faces_rows.STAGES["only:captions"]
    assert (joint.start, joint.data, joint.steps) == (captions.start, captions.data, captions.steps)


def test_captions_that_do_not_parse_paint_nothing():
    assert faces_rows.picture_captions("A very old face on a red background.") == [
        "a very old face on a red background"
    ]
    assert faces_rows.picture_captions("a very old face on a red background; a cat") is None


def test_each_stage_gets_the_objective_that_it_names():
    chosen = {name: faces_rows.objective_of(stage, DEFAULTS) for name, stage in faces_rows.STAGES.items()}
    assert chosen["preference-only"].name == "direct" and chosen["separate"].settings["name"] == "anchored separate"
    assert chosen["winners-only"].settings["preference"] == 0.0 and chosen["joint"].settings["preference"] == 1.0
    assert isinstance(chosen["joint"], anchoring._Anchored)
    assert (
        faces_rows.objective_of(
            faces_rows.STAGES["joint"], {**DEFAULTS, "anchor_captions": 0.0, "anchor_images": 0.0}
        ).name
        == "direct"
    )


def test_round_2_starts_from_round_1_which_is_its_reference(small, tmp_path):
    context = context_at(tmp_path)
    first = faces_rows.stage_weights(context, 0, "round-1")
    shipped = faces_rows.state_of(faces_rows.build_system(context), ["captions"])["captions"]
    assert any(not torch.equal(first["captions"][key], shipped[key]) for key in shipped) and "images" not in first
    system = faces_rows.build_system(context, first)
    pairs = faces_rows.pairs_of(context, 0, faces_rows.STAGES["joint"])
    batch = pairs.batch(range(4))
    found = losses.direct_loss(system, batch.chosen, batch.rejected, 0.1, generator=seeded())
    assert found.margin.abs().max().item() < 1e-9
    assert torch.equal(
        faces_rows.state_of(system, ["captions"])["captions"]["model.norm.weight"],
        first["captions"]["model.norm.weight"],
    )


def test_a_stage_trains_its_components_only_and_all_rounds_read_their_files_again(small, tmp_path):
    context = context_at(tmp_path)
    weights = faces_rows.stage_weights(context, 0, "only:captions")
    assert set(weights) == {"captions"}
    path = faces_rows.stage_folder(context, 0, "only:captions") / faces_rows.WEIGHTS
    before = path.stat().st_mtime_ns
    again = faces_rows.stage_weights(context, 0, "only:captions")
    assert path.stat().st_mtime_ns == before and all(
        torch.equal(weights["captions"][k], v) for k, v in again["captions"].items()
    )
    assert not (path.parent / "checkpoints").exists()
    assert (tmp_path / "seed-0" / "data-2" / "CARD.md").is_file()


# --- a run ------------------------------------------------------------------------------------------------------------


def run(out, resume=False, **changes):
    settings = {**SMALL, "rows": "before,best-of-n,only:captions,joint,swap:captions,oracle", **changes}
    return runner.run("faces", "tiny", out, [0], settings, resume=resume, say=lambda line: None, progress=False)


@pytest.fixture(scope="module")
def finished(bases, tmp_path_factory):
    """A whole small run, and its summary."""
    out = tmp_path_factory.mktemp("run") / "faces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faces_rows, "load_bases", lambda context: bases)
        return out, run(out)


def rows(summary):
    return {(row["system"], row["metric"]): row["value"] for row in summary["rows"]}


def test_a_run_measures_every_row_with_every_metric(finished):
    out, summary = finished
    found = rows(summary)
    for system in summary["settings"]["rows"].split(","):
        assert {metric for name, metric in found if name == system} >= set(experiment.METRICS)
        assert -1 <= found[system, "preference_score"] <= 1
    assert found["oracle", "caption_order"] == found["oracle", "faithfulness"] == 1.0
    assert found["best-of-n", "preference_score"] >= found["before", "preference_score"]
    assert {(d["a"], d["b"]) for d in summary["differences"]} >= {("joint", "before"), ("joint", "only:captions")}


def test_the_start_has_no_image_drift_and_swaps_share_what_they_say(finished):
    out, summary = finished
    found = rows(summary)
    for system in ("before", "only:captions", "swap:captions"):
        assert found[system, "image_drift"] == 0.0
    assert found["joint", "image_drift"] != 0.0
    records = runner.read_records(out / "records.jsonl")
    texts = {(r["system"], r["item"]): r["captions"] for r in records}
    assert all(texts["joint", item] == texts["swap:captions", item] for item in range(SMALL["heldout"]))


def test_metrics_by_number_of_pictures_average_to_the_whole():
    base = {"seed": 0, "system": "before", **dict.fromkeys(experiment.METRICS, 0.5)}
    records = [
        {**base, "item": i, "number": n, "order_consistency": v}
        for i, (n, v) in enumerate([(3, 1.0), (4, 0.0), (3, 0.5)])
    ]
    found = {row["metric"]: row["value"] for row in experiment.summarise(records, [0])[0]}
    assert (found["order_consistency_3"], found["order_consistency_4"]) == (0.75, 0.0)
    assert found["order_consistency"] == pytest.approx(0.5)


def test_a_run_writes_figures_cards_and_samples(finished):
    out, _ = finished
    assert {path.stem for path in (out / "figures").glob("*.png")} == {
        "graph", "order_consistency", "preference_score", "strips", "training", "shares", "errors",
    }  # fmt: skip
    assert "histogram" not in (out / "seed-0" / "data-1" / "CARD-captions.md").read_text()
    assert "Samples before and after" in (out / "report.html").read_text()


def test_an_interrupted_run_goes_on_to_the_same_result(finished, small, tmp_path):
    out, summary = finished
    again = tmp_path / "again"
    shutil.copytree(out, again)
    for lost in ("rows/joint", "rows/swap-captions", "joint"):  # as if it was killed before joint was trained
        shutil.rmtree(again / "seed-0" / lost)
    (again / "summary.json").unlink()
    resumed = run(again, resume=True)
    assert resumed["rows"] == summary["rows"] and resumed["differences"] == summary["differences"]


def test_another_seed_is_another_run_and_the_same_requests(small, tmp_path):
    assert experiment.asked({**DEFAULTS, **SMALL}) == experiment.asked({**DEFAULTS, **SMALL})
    contexts = [context_at(tmp_path / name) for name in "ab"]
    first, other = (faces_rows.answers_of_round(context, seed, 1) for context, seed in zip(contexts, (0, 1)))
    assert [a.x for a in first] != [a.x for a in other]


# --- settings and figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": "joint"}, {"rows": "before,before"}, {"rows": "before,only:pictures"}, {"split": "train"}, {"styles_1": "rude"},
        {"same_captions": 1.0}, {"base": "/nowhere"}, {"steps_2": 0}, {"beta": 0.0}, {"anchor_images": -1.0}, {"error": "x"},
    ],
)  # fmt: skip
def test_settings_that_no_run_can_have_are_refused(changes):
    with pytest.raises(errors.UnknownOptionError):
        experiment.check({**DEFAULTS, **changes})


def test_the_settings_of_the_profile_are_fine():
    experiment.check(DEFAULTS)
    assert experiment.rows_of({"rows": "all"})[0] == "before" and len(experiment.rows_of({"rows": "default"})) == 10


def test_a_strip_has_white_between_its_pictures():
    strip = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    assert faces_figures.joined(strip)[0, :, 0].tolist() == [0] * 4 + [255] * 2 + [0] * 4


def test_a_study_draws_every_system_at_every_point():
    point = {"system": "joint", "metric": "order_consistency", "value": 0.5, "ci_low": 0.4, "ci_high": 0.6, "n": 4}
    points = [{"x": x, "rows": [point, {**point, "system": "before"}]} for x in ("0 %", "35 %")]
    figure = faces_figures.plot_study(points, "order_consistency", "wrong captions")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["joint", "before"]
    assert json.dumps([tick.get_text() for tick in figure.axes[0].get_xticklabels()]) == '["0 %", "35 %"]'


# --- studies ----------------------------------------------------------------------------------------------------------


def test_a_study_takes_over_what_its_setting_cannot_change(finished, small, tmp_path, monkeypatch):
    main, summary = finished
    study = faces_studies.Study("Weights", "beta x W", {"200": {}, "20": {"weight": 200.0}})
    monkeypatch.setitem(faces_studies.STUDIES, "weight", study)
    said = []
    content = faces_studies.run_study("weight", main, tmp_path / "study", say=said.append, progress=False)
    same, other = ({(r["system"], r["metric"]): r["value"] for r in point["rows"]} for point in content["points"])
    for system in ("before", "only:captions", "joint"):
        assert same[system, "preference_score"] == rows(summary)[system, "preference_score"]
    assert (
        other["only:captions", "image_drift"] == 0.0 and other["joint", "image_drift"] != same["joint", "image_drift"]
    )
    assert [line for line in said if "training" in line] == ["seed 0, training joint"]  # of the other point; nothing else
    assert "| 20 | joint | order_consistency |" in (tmp_path / "study" / "CARD.md").read_text()
    faces_studies.store(tmp_path / "study", "weight", tmp_path / "results")
    kept = sorted(path.name for path in (tmp_path / "results" / "faces-study-weight").iterdir())
    assert kept == ["CARD.md", "figures", "summary.json"]


def test_every_study_changes_settings_that_exist():
    for study in faces_studies.STUDIES.values():
        for changes in study.points.values():
            experiment.check({**DEFAULTS, **changes, "rows": study.rows})


def test_a_study_of_a_seed_that_the_main_run_does_not_have_is_refused(finished, tmp_path):
    with pytest.raises(errors.UnknownOptionError, match="seed"):
        faces_studies.run_study("weight", finished[0], tmp_path, seeds=[7], progress=False)


# --- a pretrained caption writer (the small profile) --------------------------------------------------------------------


@pytest.fixture
def pretrained(bases, tmp_path):
    """The caption writer saved as a model of its own, with an adapter that was trained a little; settings of a small run."""
    from sysdpo_lab.components import adapters
    from sysdpo_lab.worlds import face_sft

    model, tokenizer = bases[0]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    network = copy.deepcopy(model)
    attached, _ = face_sft.fine_tune(network, tokenizer, steps=3, batch=2, rank=2)
    adapters.save_weights(attached.model.get_base_model(), attached.name, tmp_path / "adapter", "tiny")
    return {"model": str(tmp_path / "model"), "adapter": str(tmp_path / "adapter")}


def small_context(out, bases, monkeypatch, **changes):
    monkeypatch.setattr("sysdpo_lab.worlds.face_models.load_face_diffusion", lambda **options: bases[1])
    out.mkdir(parents=True, exist_ok=True)
    profile = profiles.find("faces", "small")
    settings = profile.with_settings({**SMALL, **changes})
    return runner.Context(profile, settings, out, resume=True, say=lambda line: None, progress=False)


def test_at_small_the_stored_adapter_is_the_start_and_the_reference(bases, pretrained, monkeypatch, tmp_path):
    context = small_context(tmp_path / "run", bases, monkeypatch, **pretrained)
    system = faces_rows.build_system(context)
    trace = {"x": ["three faces"], "captions": [Completion("a very old face", (5, 6, 7), False)]}
    policy = system["captions"].log_prob(trace["captions"], trace)
    with system.reference():
        assert torch.equal(policy, system["captions"].log_prob(trace["captions"], trace))
    bare = CausalLM("captions", ["x"], *bases[0], "Style: plain\nRequest: {x}\nCaptions:", max_new_tokens=4)
    assert not torch.allclose(policy, bare.log_prob(trace["captions"], trace))
    assert {p.requires_grad for p in system["captions"].trainable()} == {True}
    assert sum(p.numel() for p in system["captions"].trainable()) < sum(p.numel() for p in bases[0][0].parameters())


def test_at_small_a_trained_state_comes_back_and_is_the_next_rounds_reference(bases, pretrained, monkeypatch, tmp_path):
    context = small_context(tmp_path / "run", bases, monkeypatch, **pretrained)
    system = faces_rows.build_system(context)
    with torch.no_grad():
        for parameter in system["captions"].trainable():
            parameter.add_(0.05)
    faces_rows.save_state(tmp_path / "state.safetensors", faces_rows.state_of(system, ["captions"]))
    again = faces_rows.build_system(context, faces_rows.load_state(tmp_path / "state.safetensors"))
    trace = {"x": ["three faces"], "captions": [Completion("a very old face", (5, 6, 7), False)]}
    value = system["captions"].log_prob(trace["captions"], trace)
    assert torch.allclose(again["captions"].log_prob(trace["captions"], trace), value, atol=1e-5)
    with again.reference():
        assert torch.allclose(again["captions"].log_prob(trace["captions"], trace), value, atol=1e-5)


def test_a_small_run_trains_both_components_and_says_who_writes(bases, pretrained, monkeypatch, tmp_path):
    context = small_context(tmp_path / "run", bases, monkeypatch, rows="before,joint", same_captions=0.0, **pretrained)
    assert "SmolLM2" in experiment.prose(context)
    texts = ["; ".join([f"a {word} old face on a red background"] * 3) for word in ("very", "barely")]
    drawn = [answer(score, text, pictures=3) for score, text in zip((0.1, 0.9), texts)]
    drawn[1] = dataclasses.replace(drawn[1], captions=Completion(texts[1], (5, 6, 7), False))
    monkeypatch.setattr(faces_data.Answer, "usable", property(lambda answer: len(answer.images) > 0))
    monkeypatch.setattr(experiment, "save_strips", lambda *arguments: None)
    monkeypatch.setattr(faces_data, "draw_answers", lambda *arguments: drawn)
    records = experiment.run_seed(context, 0)
    assert {record["system"] for record in records} == {"before", "joint"}
    state = faces_rows.load_state(tmp_path / "run" / "seed-0" / "joint" / faces_rows.WEIGHTS)
    assert set(state) == {"captions", "images"} and all("lora" in name for name in state["captions"])


def test_a_missing_captions_adapter_says_how_to_train_one(bases, pretrained, monkeypatch, tmp_path):
    context = small_context(
        tmp_path / "run", bases, monkeypatch, model=pretrained["model"], adapter=str(tmp_path / "none")
    )
    with pytest.raises(errors.MissingModelError, match="python -m sysdpo_lab.worlds.face_sft --out"):
        faces_rows.build_system(context)
