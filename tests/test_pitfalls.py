"""Faults that other trainers had, and the test here that would see each of them.

P01  test_one_bos_reaches_the_model
P02  test_without_a_bos_the_model_reads_the_parts_and_nothing_else
P03  test_ids_are_joined_never_tokenised_over_the_boundary
P04  test_every_way_to_draw_and_to_score_reads_the_same_prompt
P05  test_a_chat_template_that_returns_a_dict_gives_the_same_ids, test_the_dtype_is_what_is_asked_for_whatever_the_file_holds
P06  test_only_completion_tokens_are_counted, test_log_prob_equals_a_plain_forward_in_float64
P07  test_pad_id_and_extra_pad_columns_change_nothing
P08  test_too_long_a_row_is_refused_with_component_row_lengths_and_limit
P09  test_a_batch_is_as_wide_as_its_longest_row (nothing is ever truncated)
P10  test_neither_batch_mates_nor_padding_side_nor_pad_id_matter, test_the_pad_id_has_no_influence
P11  test_policy_and_reference_are_scored_in_the_same_batches, test_a_row_alone_equals_the_row_in_a_batch
P12  test_bfloat16_logits_are_summed_in_float32, test_bfloat16_scores_are_float32_sums_of_the_models_own_logits
P13  skipped: there is no fused loss
P14  skipped: there is no IPO; sums, never means: test_repeating_a_completion_doubles_its_log_prob
P15  test_a_mistyped_name_is_an_error_that_lists_the_right_ones
P16  test_the_logged_margin_is_beta_times_policy_minus_reference
P17  test_accumulation_over_language_models_is_the_big_batch, test_accumulated_gradients_are_those_of_the_big_batch
P18  test_every_loss_has_the_gradient_of_its_finite_differences
P19  test_a_number_that_is_not_finite_stops_before_the_weights_are_touched
P20  test_the_reference_is_used, test_a_cached_reference_number_shifts_the_margin_by_minus_beta
P21  test_identical_answers_of_language_models_cost_log_2_and_teach_nothing
P22  test_dropout_is_inactive_in_policy_and_reference_and_flags_come_back
P23  test_the_reference_stays_while_the_policy_moves, test_a_step_that_changes_nothing_is_an_error
P24  test_an_adapter_on_the_head_is_used_trained_and_switched_off
P25  test_switching_there_and_back_is_bit_equal_also_when_only_one_adapter_saves_the_head
P26  test_an_adapter_that_cannot_share_a_base_is_refused_by_name
P27  skipped: there is no fused head; an adapted head: test_an_adapter_on_the_head_is_used_trained_and_switched_off
P28  test_checkpointing_gives_the_same_gradients_without_dropout, test_checkpointing_trains_an_adapter_on_a_frozen_base
P29  test_cached_references_give_the_same_run_without_scoring_the_reference
P30  test_the_adapter_reference_needs_no_second_model, test_the_adapter_reference_allocates_no_weights
P31  test_ten_steps_are_some_steps_and_the_rest_after_a_resume
P32  test_ten_steps_are_some_steps_and_the_rest_after_a_resume (cut in the second epoch)
P33  test_two_adapters_on_one_base_train_jointly_and_resume_bit_for_bit, test_a_saved_system_holds_its_base_once_and_loads_it_once
P34  test_steps_over_language_models_leave_no_tensors_behind, test_memory_after_many_steps_is_that_after_a_few
P35  skipped: there is no offloading
P36  test_measuring_twice_gives_equal_numbers_and_disturbs_nothing
P37  skipped: no data cache is keyed by a function; what is cached: test_a_gguf_file_is_converted_once_and_gives_the_same_model
P38  test_winner_and_loser_policy_and_reference_share_timestep_and_noise
P39  test_residuals_of_half_precision_outputs_are_taken_in_float32
P40  test_latents_are_the_vaes_mean_times_its_scaling_factor, test_a_vae_that_overflows_is_named
P41  skipped: images are never cropped or flipped
P42  test_both_errors_rising_is_said_once, test_one_error_that_rises_alone_is_no_warning
P43  test_a_saved_adapter_is_read_by_plain_peft_and_by_diffusers, test_an_adapter_trains_alone_and_gets_gradients
P44  skipped: there is one loss
P45  test_at_the_start_the_loss_is_log_2_for_every_dtype_of_the_network
P46  test_groups_keep_their_own_best_and_stand_in_order, test_the_hypotheses_are_those_of_transformers_4_56_2
P47  test_a_penalised_token_costs_score_but_not_log_probability
P48  test_groups_keep_their_own_best_and_stand_in_order
P49  test_cached_and_recomputed_searches_choose_the_same_tokens,
     test_a_hybrid_cache_reordered_in_its_attention_layers_only_would_be_seen
P50  test_one_base_with_two_adapters_and_two_bases_train_to_the_same_weights
P51  test_winner_loser_policy_and_reference_read_the_same_drafts
P52  test_intermediates_come_from_the_current_policy_in_evaluation_mode_without_gradients
P53  test_one_loss_over_two_adapters_gives_the_gradients_of_two_separate_models,
     test_a_frozen_adapter_stays_while_it_draws_and_scores
P54  test_checkpointing_recomputes_under_the_adapter_of_the_forward_pass
P55  test_one_small_step_on_a_bfloat16_base_changes_every_lora_b
P56  test_drawing_and_training_leave_the_global_generator_alone
"""

import copy
import gc
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from sysdpo_lab import CompoundSystem, checkpoints, errors, losses, samplers, scoring, training
from sysdpo_lab.components import CausalLM
from tests import tiny, training_cases

LOG_2 = math.log(2)
X = ["ab the cat", "a", "the abc: ab"]
WON, LOST = ["abc", "the a b c", "x: ab cab"], ["the the the", "cab", "ab"]
DRAFTS = {"draft": [["ab", "the abc"], ["c", "abc a"], ["a a a", "b"]]}
FINALS = [{"x": x, "chosen": won, "rejected": lost} for x, won, lost in zip(X, WON, LOST)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def disturbed(component, seed, scale=0.2):
    """Weights as after some training."""
    noise = seeded(seed)
    with torch.no_grad():
        for parameter in component.trainable():
            parameter.add_(scale * torch.randn(parameter.shape, generator=noise).to(parameter.dtype))
    return component


def two_models(dtype=torch.float32, shared=True, moved=True, dropout=0.0, **options):
    """draft and refine: two adapters on one tiny base, or on two equal ones."""
    base = tiny.model(dtype=dtype)
    bases = (base, base if shared else copy.deepcopy(base))
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    parts = []
    for name, parents, template, model in zip(
        ("draft", "refine"), (("x",), ("x", "draft")), ("{x}?", "{x} {draft}:"), bases
    ):
        parts.append(CausalLM(name, parents, model, tiny.tokenizer(), template, lora, 5, **options))
    if moved:
        disturbed(parts[0], 1), disturbed(parts[1], 2)
    return CompoundSystem(parts, output="refine")


def whole_traces():
    sides = [{"draft": answers[::-1], "refine": answers} for answers in (WON, LOST)]
    return [{"x": x, **{side: {name: trace[name][row] for name in trace} for side, trace in zip(("chosen", "rejected"), sides)}}
            for row, x in enumerate(X)]


def traces(system=None):
    return [{"x": X, "draft": answers[::-1], "refine": answers} for answers in (WON, LOST)]


def direct(system, beta=0.3):
    return losses.direct_loss(system, *traces(), beta)


def sampling(system, beta=0.3, **options):
    return losses.sampling_loss(system, {"x": X}, WON, LOST, DRAFTS, beta, **options)


# --- the table above ----------------------------------------------------------------------------------------------------------


def table() -> dict[str, str]:
    return dict(re.findall(r"^(P\d\d)  (.+(?:\n     .+)*)$", __doc__, re.M))


def test_every_fault_has_a_test_that_exists_or_a_reason():
    here = Path(__file__).parent
    known = {name for file in here.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert sorted(table()) == [f"P{n:02d}" for n in range(1, 57)]
    for fault, line in table().items():
        named = re.findall(r"test_\w+", line)
        assert named or line.startswith("skipped: "), fault
        assert set(named) <= known, (fault, set(named) - known)


# --- what the model reads -------------------------------------------------------------------------------------------------------


@pytest.fixture
def readings(monkeypatch):
    """Watch a component's network: what each forward from an empty cache read, a row a tuple of ids without padding."""
    seen: list[list[tuple[int, ...]]] = []

    def note(module, args, kwargs):
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        if mask.shape == ids.shape:
            seen.append([tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, mask)])

    def watch(component):
        component.network.register_forward_pre_hook(note, with_kwargs=True)
        return seen

    return watch


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_one_bos_reaches_the_model(readings, chat, adds_eos):
    """P01: texts are encoded in two parts, and a tokenizer that puts a BOS before each would put two."""
    z = CausalLM("z", ("x",), tiny.model(), tiny.tokenizer(bos=True, chat=chat, adds_eos=adds_eos), "{x}:", max_new_tokens=4)
    seen = readings(z)
    z.log_prob(WON, {"x": X})
    z.greedy({"x": X})
    assert len(seen) >= 2
    for row in (row for rows in seen[:2] for row in rows):
        assert row[0] == 0 and row.count(0) == 1


def test_without_a_bos_the_model_reads_the_parts_and_nothing_else(readings):
    """P02: a tokenizer whose BOS is None."""
    words = tiny.tokenizer(bos=False)
    z = CausalLM("z", ("x",), tiny.model(), words, "{x}:")
    assert words.bos_token_id is None
    seen = readings(z)
    z.log_prob(WON, {"x": X})
    plain = [words(f"{x}:")["input_ids"] + words(answer)["input_ids"] for x, answer in zip(X, WON)]
    assert [list(row[: len(ids)]) for row, ids in zip(seen[0], plain)] == plain
    assert all(row[len(ids) :] in ((), (1,)) for row, ids in zip(seen[0], plain))  # of the closing EOS nothing is predicted


@pytest.mark.parametrize("chat", [False, True])
def test_every_way_to_draw_and_to_score_reads_the_same_prompt(readings, chat):
    """P04: sampling through a chat template and scoring without it, or the other way round."""
    z = CausalLM("z", ("x",), tiny.model(), tiny.tokenizer(bos=True, chat=chat), "Say {x}", max_new_tokens=3)
    prompts, seen, zeros = z.prompt_ids({"x": X}), readings(z), torch.zeros(3, 1, dtype=torch.float64)
    for draw in (
        lambda: z.sample({"x": X}, 2, seeded()), lambda: z.greedy({"x": X}), lambda: z.diverse({"x": X}, 2),
        lambda: z.perturbed_top_k({"x": X}, zeros, zeros, 2, seeded()),
    ):  # fmt: skip
        seen.clear()
        draw()
        assert seen[0] == prompts
    seen.clear()
    answers = z.greedy({"x": X})
    z.log_prob(answers, {"x": X})
    assert seen[-1] == [(*prompt, *answer.token_ids[:-1]) for prompt, answer in zip(prompts, answers)]


def test_a_chat_template_that_returns_a_dict_gives_the_same_ids(monkeypatch):
    """P05: apply_chat_template(tokenize=True) returns ids in one major version and a dict in the next."""
    words = tiny.tokenizer(chat=True)
    z = CausalLM("z", ("x",), tiny.model(), words, "{x}")
    expected, real = z.prompt_ids({"x": X}), words.apply_chat_template
    for wrapped in (lambda ids: {"input_ids": ids}, lambda ids: ids):
        def either(messages, tokenize=True, wrapped=wrapped, **options):
            text = real(messages, tokenize=False, **options)
            return wrapped(words(text, add_special_tokens=False)["input_ids"]) if tokenize else text

        monkeypatch.setattr(words, "apply_chat_template", either)
        assert z.prompt_ids({"x": X}) == expected and all(type(i) is int for ids in expected for i in ids)


def test_a_batch_is_as_wide_as_its_longest_row(monkeypatch):
    """P09: a batch padded to the longest possible length."""
    z, widths = CausalLM("z", ("x",), tiny.model(), tiny.tokenizer(), "{x}:"), []
    z.network.register_forward_pre_hook(lambda m, a, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    z.log_prob(WON, {"x": X})
    z.greedy({"x": X})
    prompts, answers = z.prompt_ids({"x": X}), z.encoder.completions(WON)
    assert widths[:2] == [max(map(len, prompts)) + max(map(len, answers)) - 1, max(map(len, prompts))]


# --- numbers --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [direct, sampling])
def test_policy_and_reference_are_scored_in_the_same_batches(loss, monkeypatch):
    """P11: bf16 logits change with the batch's shape, so a reference in other batches is not the start's."""
    system, seen, real = two_models(torch.bfloat16, moved=False), [], scoring.sequence_log_probs

    def spy(model, prompts, completions, *rest):
        seen.append((system["draft"].is_reference, prompts, completions))
        return real(model, prompts, completions, *rest)

    monkeypatch.setattr(scoring, "sequence_log_probs", spy)
    found = loss(system)
    policy, reference = ([call[1:] for call in seen if call[0] is side] for side in (False, True))
    assert policy == reference and len(policy) == 2
    assert found.margin.tolist() == [0.0, 0.0, 0.0] and found.loss.item() == pytest.approx(LOG_2, abs=1e-12)


def test_repeating_a_completion_doubles_its_log_prob():
    """P14, P13: log p is a sum; a mean over tokens would not change with the number of tokens."""
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token has probability 1 / V
    z = CausalLM("z", ("x",), model, tiny.tokenizer(), "{x}:")
    one, two = z.log_prob(["c" * 4, "c" * 9], {"x": ["a", "a"]}).tolist()  # 5 and 10 tokens with the EOS
    assert one == pytest.approx(-5 * math.log(tiny.VOCABULARY), rel=1e-5) and two == pytest.approx(2 * one, rel=1e-5)


NAMES = {
    "repeats": (lambda: sampling(two_models(), repeats="dorp"), "'drop', 'count'"),
    "repeats of an objective": (lambda: training.sampling(0.1, "monte_carlo", 2, repeats="both"), "'drop', 'count'"),
    "sampler": (lambda: training.sampling(0.1, "dbs", 2), "'diverse_beam'"),
    "option of a sampler": (lambda: training.sampling(0.1, "diverse_beam", 2, penalty=3.0), "diversity_penalty"),
    "option on tables": (
        lambda: samplers.diverse_beam(training_cases.chain(), {"x": torch.tensor([0])}, 2, diversity=3.0), "diversity_penalty",
    ),
    "weights": (lambda: samplers.monte_carlo(two_models(), {"x": X}, 2, weights="horvitz_thompson"), "'importance'"),
    "more weights": (lambda: samplers.gumbel_top_k(two_models(), {"x": X}, 2, weights="importance"), "'horvitz_thompson'"),
    "objective": (lambda: training.train(two_models(), FINALS, "sampling"), "training.sampling"),
    "objective not called": (lambda: training.train(two_models(), FINALS, training.direct), "training.direct"),
    "optimizer": (lambda: training.train(two_models(), FINALS, training.separate(1.0), optimizer="adamW"), "'adamw'"),
    "schedule": (lambda: training.train(two_models(), FINALS, training.separate(1.0), schedule="cosin"), "'cosine'"),
    "reference": (lambda: two_models(reference="adaptor"), "'adapter'"),
    "finished groups": (lambda: samplers.diverse_beam(two_models(), {"x": X}, 2, finished_groups="drop"), "'ignore', 'pad'"),
    "early stopping": (lambda: samplers.diverse_beam(two_models(), {"x": X}, 2, early_stopping="ever"), "'never'"),
}  # fmt: skip


@pytest.mark.parametrize("call, right", NAMES.values(), ids=NAMES)
def test_a_mistyped_name_is_an_error_that_lists_the_right_ones(call, right):
    """P15: a choice that does not exist and is ignored."""
    with pytest.raises(errors.UnknownOptionError, match=re.escape(right)):
        call()


def by_hand(system, trace):
    """Policy minus reference of a trace, from the components' own scores."""
    policy = system.log_prob(trace)
    with torch.no_grad(), system.reference():
        return (policy - system.log_prob(trace)).detach().double()


OBJECTIVES = {
    "direct": lambda: training.direct(0.3),
    "sampling": lambda: training.sampling(0.3, "diverse_beam", 2),
    "separate": lambda: training.separate(0.3),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_logged_margin_is_beta_times_policy_minus_reference(name):
    """P16: a term of the loss that overwrote what was logged."""
    pairs = whole_traces() if name == "direct" else FINALS
    record = training.train(two_models(), pairs, OBJECTIVES[name](), 1, 1e-3)[0]
    assert record["margin"] == pytest.approx(0.3 * record["log_ratio_gap"], abs=1e-9)
    assert sum(record["shares"].values()) == pytest.approx(record["log_ratio_gap"], abs=1e-6)
    assert abs(record["margin"]) > 1e-3
    if name == "direct":
        won, lost = (by_hand(two_models(), trace) for trace in traces())
        assert record["log_ratio_gap"] == pytest.approx((won - lost).mean().item(), abs=1e-4)


@pytest.mark.parametrize("name", ["direct", "sampling"])
def test_accumulation_over_language_models_is_the_big_batch(name):
    """P17: micro-batches of unequal token counts, averaged or summed."""

    def step(size, times):
        system = two_models(torch.float64)
        before = [p.detach().clone() for p in system.trainable_parameters()]
        pairs = whole_traces() if name == "direct" else FINALS
        training.train(
            system, pairs, OBJECTIVES[name](), 1, 1.0, optimizer="sgd", clip=None, batch_size=size, accumulate=times
        )
        return [old - new.detach() for old, new in zip(before, system.trainable_parameters())]

    wanted = step(3, 1)
    largest = max(g.abs().max() for g in wanted)
    assert largest > 0.1
    for found in (step(1, 3), step(2, 2)):
        assert max((a - b).abs().max() for a, b in zip(found, wanted)) < 1e-6 * largest.clamp(min=1)


def population(kind):
    """One loss of each kind on tables away from their start, as a function of the system."""
    x, won, lost = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]), torch.tensor([3, 0, 1])
    drafts = torch.tensor([[0, 1, 0], [2, 2, 2], [1, 2, 0]])
    weights = torch.tensor([[0.0, 0.5, -1.0], [0.2, 0.0, 0.1], [-0.3, -math.inf, 0.4]], dtype=torch.float64)
    sides = [{"x": x, "y": drafts[:, 0], "z": won}, {"x": x, "y": drafts[:, 1], "z": lost}]
    finals = training.preferences.Pairs.from_finals({"x": x}, won, lost).batch(range(3))
    whole = training.preferences.Pairs.from_traces(*sides).batch(range(3))
    separate = training.separate(0.7)
    return {
        "direct": lambda s: losses.direct_loss(s, *sides, 0.7),
        "sampling": lambda s: losses.sampling_loss(s, {"x": x}, won, lost, {"y": drafts}, 0.7),
        "count": lambda s: losses.sampling_loss(s, {"x": x}, won, lost, {"y": drafts}, 0.7, repeats="count"),
        "weighted": lambda s: losses.sampling_loss(s, {"x": x}, won, lost, {"y": drafts}, 0.7, log_weights=weights),
        "separate, finals": lambda s: separate(s, finals, seeded()),  # the parents are drawn once and kept
        "separate, traces": lambda s: separate(s, whole, seeded()),
    }[kind]


@pytest.mark.parametrize("kind", ["direct", "sampling", "count", "weighted", "separate, finals", "separate, traces"])
def test_every_loss_has_the_gradient_of_its_finite_differences(kind):
    """P18: a factor that should have been constant, or that should not."""
    system, loss = training_cases.same_type_chain(), population(kind)
    for component in system.components:
        disturbed(component, 3, 0.5)
    loss(system).loss.backward()
    for parameter in system.parameters():
        flat, gradient = parameter.detach().view(-1), parameter.grad.view(-1)
        assert gradient.abs().max() > 1e-3
        for place in range(len(flat)):
            ends = []
            for step in (1e-6, -1e-6):
                flat[place] += step
                ends.append(loss(system).loss.item())
                flat[place] -= step
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient[place].item(), abs=1e-7)


# --- the reference ------------------------------------------------------------------------------------------------------


def test_a_cached_reference_number_shifts_the_margin_by_minus_beta():
    """P20: reference log-probabilities that are accepted, and not used."""
    z = CausalLM("z", ("x",), tiny.model(), tiny.tokenizer(), "{x}:", 2, 5, reference="cached")
    system = CompoundSystem([z])
    z.cache_reference([*WON, *LOST], {"x": [*X, *X]})
    disturbed(z, 1)

    def margin():
        return losses.direct_loss(system, {"x": X, "z": WON}, {"x": X, "z": LOST}, 0.3).margin.detach()

    before = margin()
    z._cache[z.prompt_ids({"x": X[:1]})[0], z.encoder.completions(WON[:1])[0]] += 2.0
    torch.testing.assert_close(margin() - before, torch.tensor([-0.6, 0.0, 0.0], dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["direct", "sampling"])
def test_identical_answers_of_language_models_cost_log_2_and_teach_nothing(kind):
    """P21: winner and loser the same, away from the start."""
    system = two_models()
    if kind == "direct":
        found = losses.direct_loss(system, traces()[0], traces()[0], 0.3)
    else:
        found = losses.sampling_loss(system, {"x": X}, WON, WON, DRAFTS, 0.3)
    found.loss.backward()
    assert found.loss.item() == LOG_2 and found.margin.tolist() == [0.0, 0.0, 0.0]
    assert not any(bool(p.grad.any()) for p in system.trainable_parameters() if p.grad is not None)


@pytest.mark.parametrize("reference", ["adapter", "copy"])
@pytest.mark.parametrize("moved", [False, True], ids=["fresh", "trained before"])
def test_the_reference_stays_while_the_policy_moves(reference, moved):
    """P23: a reference that follows the policy; every margin stays 0 and nothing says so."""
    system = two_models(moved=False)
    if moved:
        base = tiny.model()
        lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        y = CausalLM("draft", ("x",), base, tiny.tokenizer(), "{x}?", lora, 5, reference=reference)
        z = CausalLM("refine", ("x", "draft"), base, tiny.tokenizer(), "{x} {draft}:", lora, 5, reference=reference)
        system = CompoundSystem([y, z], output="refine")
    start = [system.log_prob(trace).detach() for trace in traces()]
    history = training.train(system, FINALS, training.sampling(0.3, "diverse_beam", 2), 3, 0.01)
    for trace, before in zip(traces(), start):
        with system.reference():
            torch.testing.assert_close(system.log_prob(trace), before, atol=1e-5, rtol=0)
        assert (system.log_prob(trace) - before).abs().min() > 1e-3
    assert history[0]["loss"] == pytest.approx(LOG_2, abs=1e-6) and abs(history[-1]["margin"]) > 1e-3


def test_checkpointing_trains_an_adapter_on_a_frozen_base():
    """P28: with a frozen embedding no input of a checkpointed layer needs a gradient, and LoRA silently gets none."""

    def gradients(checkpointing):
        system = two_models(torch.float64)
        if checkpointing:
            system["draft"].network.activation_checkpointing_enable()
        system.train()
        assert not system["draft"].network.get_input_embeddings().weight.requires_grad
        sampling(system).loss.backward()
        return [p.grad for p in system.trainable_parameters()]

    for with_it, without in zip(gradients(True), gradients(False)):
        assert with_it.abs().max() > 0
        torch.testing.assert_close(with_it, without, atol=1e-9, rtol=0)


def live_weights() -> int:
    gc.collect()
    with warnings.catch_warnings():  # looking at other libraries' objects may warn
        warnings.simplefilter("ignore")
        return sum(thing.numel() for thing in gc.get_objects() if isinstance(thing, torch.nn.Parameter))


def test_the_adapter_reference_allocates_no_weights():
    """P30: a second copy of the frozen layers, at the latest when the reference is first used."""

    def grown(reference):
        before = live_weights()
        system = two_models(reference=reference)
        direct(system)
        return live_weights() - before - sum(p.numel() for p in system.trainable_parameters())

    size = sum(p.numel() for p in tiny.model().parameters())
    assert grown("adapter") == size and grown("copy") >= 3 * size


# --- training -----------------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():  # looking at other libraries' objects may warn
        warnings.simplefilter("ignore")
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_steps_over_language_models_leave_no_tensors_behind():
    """P34: a metric that keeps the graph alive."""
    counts = []
    training.train(
        two_models(), FINALS, training.sampling(0.3, "monte_carlo", 2), 8, 1e-3,
        on_step=lambda record: counts.append(live_tensors()) if record["step"] in (3, 8) else None,
    )  # fmt: skip
    assert counts[1] <= counts[0] + 2


def test_one_base_with_two_adapters_and_two_bases_train_to_the_same_weights():
    """P50: a loop that quietly knows one language model."""
    found = {}
    for shared in (True, False):
        system = two_models(torch.float64, shared=shared)
        before = [p.detach().clone() for p in system.trainable_parameters()]
        training.train(system, FINALS, training.sampling(0.3, "diverse_beam", 2), 3, 0.01)
        found[shared] = [p.detach() for p in system.trainable_parameters()]
        assert not any(torch.equal(old, new) for old, new in zip(before, found[shared]))
    assert len(found[True]) == len(found[False])
    assert max((a - b).abs().max() for a, b in zip(found[True], found[False])) < 1e-9


@pytest.mark.parametrize("sampler", ["monte_carlo", "diverse_beam", "gumbel_top_k"])
def test_winner_loser_policy_and_reference_read_the_same_drafts(sampler, monkeypatch):
    """P51: drafts drawn once for each side, or once more for the reference."""
    system, seen, real = two_models(), [], scoring.sequence_log_probs
    pairs = training.preferences.as_pairs(FINALS).batch(range(3))

    def spy(model, prompts, completions, *rest):
        if torch.is_grad_enabled() or system["draft"].is_reference:  # not the sampler's own scores
            seen.append((prompts, completions))
        return real(model, prompts, completions, *rest)

    monkeypatch.setattr(scoring, "sequence_log_probs", spy)
    training.sampling(0.3, sampler, 2)(system, pairs, seeded())
    drafts, drafts_ref, finals, finals_ref = seen
    assert drafts == drafts_ref and finals == finals_ref
    contexts, answers = finals
    assert len(contexts) == 12 and contexts[:6] == contexts[6:]  # 3 pairs x 2 drafts, winners first
    assert answers[:6:2] == answers[1:6:2] and answers[:6] != answers[6:]


def test_a_frozen_adapter_stays_while_it_draws_and_scores():
    """P53: activating an adapter turned its gradients on, and off for the others."""
    system = two_models()
    system.freeze("draft")
    before = {name: [p.detach().clone() for p in system[name].trainable()] for name in ("draft", "refine")}
    training.train(system, FINALS, training.sampling(0.3, "monte_carlo", 2), 5, 0.01)
    system.generate({"x": X})
    assert all(torch.equal(p, old) for p, old in zip(system["draft"].trainable(), before["draft"]))
    assert not any(torch.equal(p, old) for p, old in zip(system["refine"].trainable(), before["refine"]))
    assert [p.requires_grad for name in before for p in system[name].trainable()] == [False] * 28 + [True] * 28


def test_one_small_step_on_a_bfloat16_base_changes_every_lora_b(tmp_path):
    """P55: adapters or optimiser state in bf16 round small updates away."""
    system = two_models(torch.bfloat16)
    before = {n: p.detach().clone() for n, p in system.named_parameters() if "lora_B" in n}
    training.train(system, FINALS, training.sampling(0.3, "diverse_beam", 2), 1, 1e-5, out=tmp_path)
    after = dict(system.named_parameters())
    assert len(before) == 28 and not any(torch.equal(after[n], old) for n, old in before.items())
    kept = checkpoints.newest(tmp_path).tensors
    states = {name: t.dtype for name, t in kept.items() if name.startswith(("weights/", "optimizer/"))}
    assert len(states) > 100 and set(states.values()) == {torch.float32}


def test_drawing_and_training_leave_the_global_generator_alone():
    """P56: transformers' generate draws from the global generator."""
    system, results = two_models(dropout=0.3), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append([
            system.sample({"x": X}, generator=seeded(4)),
            *(sampler(system, {"x": X}, 2, generator=seeded(4)).values
              for sampler in (samplers.monte_carlo, samplers.diverse_beam, samplers.gumbel_top_k)),
            training.train(two_models(dropout=0.3), FINALS, OBJECTIVES["sampling"](), 2, 1e-3).column("loss"),
        ])
        system.sample({"x": X})
        assert torch.equal(torch.get_rng_state(), state)
    assert results[0] == results[1]
    assert system.sample({"x": X}, generator=seeded(5)) != results[0][0]
