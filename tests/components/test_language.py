"""The language-model component: prompts, scores, draws, several components on one base, references, files."""

import copy
import json
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

from sysdpo_lab import CompoundSystem, errors, loading, losses, samplers
from sysdpo_lab.components import Categorical, CausalLM, Completion, adapters
from tests import tiny

KINDS = ("llama", "qwen2", "gpt2")
X = ["ab the cat", "a", "the abc: ab"]
ANSWERS = ["abc", "the a", "x: ab cab"]


def causal_lm(name="z", parents=("x",), model=None, tokenizer=None, template="{x}:", adapter=None, **options):
    options = {"max_new_tokens": 6, **options}
    return CausalLM(name, parents, model or tiny.model(), tokenizer or tiny.tokenizer(), template, adapter, **options)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def disturb(component, seed=0, scale=0.2):
    """Weights as after some training."""
    noise = generator(seed)
    with torch.no_grad():
        for parameter in component.trainable():
            parameter.add_(scale * torch.randn(parameter.shape, generator=noise).to(parameter.dtype))
    return component


def by_hand(model, prompt, completion):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
    return sum(torch.log_softmax(logits[len(prompt) + t - 1].double(), -1)[i].item() for t, i in enumerate(completion))


# --- prompts and completions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bos", "adds_eos"), [(True, False), (True, True), (False, False)])
def test_one_bos_for_tokenizers_that_add_one_none_for_the_others_and_no_eos(bos, adds_eos):
    z = causal_lm(tokenizer=tiny.tokenizer(bos=bos, adds_eos=adds_eos))
    for ids in z.prompt_ids({"x": X}):
        assert ids.count(0) == int(bos)
        assert ids[0] == 0 or not bos
        assert 1 not in ids and None not in ids


def test_a_bos_in_the_text_is_not_doubled():
    z = causal_lm(tokenizer=tiny.tokenizer(bos=True), template="<s>{x}")
    assert all(ids[0] == 0 and ids.count(0) == 1 for ids in z.prompt_ids({"x": X}))


@pytest.mark.parametrize("bos", [True, False])
def test_the_chat_template_wraps_a_text_as_one_user_message(bos):
    tokenizer = tiny.tokenizer(bos=bos, chat=True)
    z = causal_lm(tokenizer=tokenizer)
    expected = ("<s>" if bos else "") + "<|user|>a:<|end|><|assistant|>"
    assert z.prompt_ids({"x": ["a"]}) == [tuple(tokenizer(expected, add_special_tokens=False)["input_ids"])]


def test_messages_go_through_the_chat_template_as_they_are():
    tokenizer = tiny.tokenizer(chat=True)
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "a"}]
    expected = tuple(tokenizer("<|system|>be<|end|><|user|>a<|end|><|assistant|>", add_special_tokens=False)["input_ids"])
    assert causal_lm(tokenizer=tokenizer, template="{x}").prompt_ids({"x": [talk]}) == [expected]
    by_function = causal_lm(tokenizer=tokenizer, template=lambda x: [{"role": "system", "content": "be"}, *x[1:]])
    assert by_function.prompt_ids({"x": [talk]}) == [expected]


def test_messages_are_joined_plainly_without_a_chat_template():
    tokenizer = tiny.tokenizer()
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "a"}]
    found = causal_lm(tokenizer=tokenizer, template="{x}").prompt_ids({"x": [talk, talk[1:]]})
    assert [tokenizer.decode(ids) for ids in found] == ["System: be\n\nUser: a\n\nAssistant:", "a"]


def test_a_template_sees_texts_ints_and_none():
    seen = []

    def template(x, y, n):
        seen.append((x, y, n))
        return f"{x}{y}{n}"

    z = causal_lm(parents=("x", "y", "n"), template=template)
    z.prompt_ids({"x": ["q", "r"], "y": [Completion("ab", (5, 1)), None], "n": torch.tensor([3, 4])})
    assert seen == [("q", "ab", 3), ("r", None, 4)]
    assert type(seen[0][2]) is int
    formatted = causal_lm(parents=("x", "y"), template="{x}|{y}")
    assert formatted.tokenizer.decode(formatted.prompt_ids({"x": ["q"], "y": [None]})[0]) == "q|"


def test_a_template_function_may_take_one_dict():
    z = causal_lm(parents=("x",), template=lambda values, *, suffix="!": values["x"] + suffix)
    assert z.tokenizer.decode(z.prompt_ids({"x": ["q"]})[0]) == "q!"


@pytest.mark.parametrize("template", ["{y}", "{}", "{x} {draft}", "{x", 3, None])
def test_a_template_that_does_not_fit_is_refused_by_name(template):
    with pytest.raises(errors.TemplateError, match="'z'"):
        causal_lm(template=template)


def test_an_empty_or_strange_prompt_is_refused_with_its_row():
    with pytest.raises(errors.TemplateError, match="row 1.*empty"):
        causal_lm(template="{x}").prompt_ids({"x": ["a", ""]})
    with pytest.raises(errors.TemplateError, match="row 1"):
        causal_lm(template=lambda x: x if x == "a" else 3).prompt_ids({"x": ["a", "b"]})
    with pytest.raises(errors.TemplateError, match="cannot be filled"):
        causal_lm(template="{x[name]}").prompt_ids({"x": ["a"]})


def test_ids_are_joined_never_tokenised_over_the_boundary():
    tokenizer = tiny.tokenizer()
    z = causal_lm(tokenizer=tokenizer, template="{x}")
    merged = tokenizer("x: ab", add_special_tokens=False)["input_ids"]
    parts = [*z.prompt_ids({"x": ["x: a"]})[0], *z.encoder.completions(["b"])[0][:-1]]
    assert parts != merged  # the trap is real: "a" and "b" merge
    assert tokenizer.decode(parts) == tokenizer.decode(merged)
    found = z.log_prob(["b"], {"x": ["x: a"]}).item()
    assert found == pytest.approx(by_hand(z.model, parts[:-1], (parts[-1], tokenizer.eos_token_id)), abs=1e-5)


def test_what_is_scored_of_each_kind_of_value():
    z = causal_lm()
    ids = tuple(z.tokenizer("ab")["input_ids"])
    given = ["ab", "ab</s>", Completion("ab", (*ids, 1)), Completion("ab", (*ids, 1, 2, 2)), Completion("ab", ids, True), None]
    assert z.encoder.completions(given) == [(*ids, 1)] * 4 + [ids, None]


@pytest.mark.parametrize("value", ["", "</s>", Completion("", ())])
def test_an_empty_completion_is_refused_with_component_and_row(value):
    with pytest.raises(errors.EmptyCompletionError, match="'z', row 1"):
        causal_lm().log_prob(["ab", value], {"x": ["a", "b"]})


@pytest.mark.parametrize(("value", "match"), [("a</s>b", "before its end"), (3, "Completion, a str or None")])
def test_a_value_that_cannot_be_scored_is_refused_with_component_and_row(value, match):
    with pytest.raises(errors.CompletionError, match=f"'z', row 0.*{match}"):
        causal_lm().log_prob([value], {"x": ["a"]})


def test_a_text_and_its_completion_are_one_intermediate():
    y = causal_lm("y", ("x",), template="{x}?", adapter=2)
    system = CompoundSystem([y, causal_lm("z", ("x", "y"), y.model, template="{x} {y}:", adapter=2)])
    disturb(y), disturb(system["z"], 1)
    ids = (*y.tokenizer("ab")["input_ids"], 1)
    same = ["ab", Completion("ab", ids), Completion("ab", (*ids, 2, 2))]  # the last one still carries its padding
    assert len(set(y.identities(same))) == 1

    def loss(drafts):
        return losses.sampling_loss(system, {"x": ["a"]}, ["abc"], ["the"], {"y": [drafts]}, beta=0.5)

    once, thrice = loss(["ab", "c"]), loss([*same, "c"])
    assert thrice.margin.item() == pytest.approx(once.margin.item(), abs=1e-5)
    loss(same).loss.backward()
    assert not any(bool(p.grad.any()) for p in y.trainable() if p.grad is not None)


def test_stop_ids_are_those_of_tokenizer_and_generation_config():
    model = tiny.model()
    model.generation_config.eos_token_id = [1, 9]
    z = causal_lm(model=model, tokenizer=tiny.tokenizer(chat=True))
    assert z.encoder.stop_ids == (6, 1, 9)
    assert z.encoder.completion((40, 9, 41)).token_ids == (40, 9)
    assert not z.encoder.completion((40, 9)).truncated and z.encoder.completion((40, 41)).truncated


def test_stop_ids_that_a_small_model_inherits_from_its_family_are_left_out():
    model = tiny.model("gpt2", eos_token_id=50256, bos_token_id=50256)
    assert model.generation_config.eos_token_id == 50256
    z = causal_lm(model=model)
    assert z.encoder.stop_ids == (1,) and len(z.greedy({"x": X})) == 3


def test_a_tokenizer_without_eos_is_refused_where_one_is_needed():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    z = causal_lm(model=model, tokenizer=tokenizer)
    with pytest.raises(errors.TokenizerError, match="'z', row 0"):
        z.log_prob(["ab"], {"x": ["a"]})
    with pytest.raises(errors.TokenizerError, match="'z'"):
        z.greedy({"x": ["a"]})
    assert torch.isfinite(z.log_prob([Completion("a", (40, 41), True)], {"x": ["a"]}))


def test_a_missing_tokenizer_is_named():
    with pytest.raises(errors.TokenizerError, match="'z' needs a tokenizer"):
        CausalLM("z", ("x",), tiny.model(), None, "{x}")


# --- scores -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [False, True])
def test_log_prob_equals_a_plain_forward_in_float64(kind, chat):
    z = causal_lm(model=tiny.model(kind, dtype=torch.float64), tokenizer=tiny.tokenizer(bos=True, chat=chat))
    found = z.log_prob(ANSWERS, {"x": X})
    assert found.dtype == torch.float64
    expected = [by_hand(z.model, p, c) for p, c in zip(z.prompt_ids({"x": X}), z.encoder.completions(ANSWERS))]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_batch_mates_nor_padding_side_nor_pad_id_matter(kind):
    together = causal_lm(model=tiny.model(kind)).log_prob(ANSWERS, {"x": X})
    for side, pad in (("left", True), ("right", False)):
        z = causal_lm(model=tiny.model(kind), tokenizer=tiny.tokenizer(side=side, pad=pad), pad_to_multiple=8)
        torch.testing.assert_close(z.log_prob(ANSWERS, {"x": X}), together, atol=1e-5, rtol=0)
        alone = [z.log_prob([answer], {"x": [x]})[0] for answer, x in zip(ANSWERS, X)]
        torch.testing.assert_close(torch.stack(alone), together, atol=1e-5, rtol=0)


def test_a_row_without_a_call_scores_zero_and_an_impossible_call_minus_infinity():
    z = causal_lm(template=lambda x: x or None)
    found = z.log_prob(["ab", None, "ab"], {"x": ["a", "", ""]})
    assert found[0].item() == pytest.approx(z.log_prob(["ab"], {"x": ["a"]}).item(), abs=1e-5)
    assert found[1:].tolist() == [0.0, -torch.inf]
    assert z.log_prob([None, None], {"x": ["a", ""]}).tolist() == [0.0, 0.0]
    drawn = z.sample({"x": ["a", ""]}, num_samples=2, generator=generator())
    assert drawn[1] == [None, None] and None not in drawn[0]
    assert z.greedy({"x": [""]}) == [None]


def test_the_gradient_passes_beside_rows_without_a_call():
    z = causal_lm(adapter=2)
    z.log_prob(["ab", None], {"x": ["a", "b"]}).sum().backward()
    assert any(bool(parameter.grad.any()) for parameter in z.trainable())


def test_too_long_a_row_is_refused_with_component_row_lengths_and_limit():
    z = causal_lm(model=tiny.model(max_position_embeddings=12))
    with pytest.raises(errors.PromptTooLongError, match=r"'z', rows \[1\]: a prompt of 21 tokens .* 2 .*context of 12"):
        z.log_prob(["a", "a"], {"x": ["c", "c" * 20]})
    assert z.log_prob(["c" * 9], {"x": ["c"]}).shape == (1,)  # 2 + 9 + EOS: just fits
    with pytest.raises(errors.PromptTooLongError, match="max_new_tokens of 6"):
        z.greedy({"x": ["c" * 6]})


def test_ids_outside_the_vocabulary_and_wrong_numbers_of_rows_are_refused():
    z = causal_lm(model=tiny.model(vocab_size=100))
    with pytest.raises(errors.TokenIdError, match="'z', row 1: token id 266"):
        z.log_prob(["c", "c"], {"x": ["c", "c ab"]})
    with pytest.raises(errors.BatchMismatchError, match="2 values for 1 rows"):
        causal_lm().log_prob(["c", "c"], {"x": ["c"]})
    with pytest.raises(errors.MissingParentError, match="'x'"):
        causal_lm().log_prob(["c"], {})


def test_bfloat16_scores_are_float32_sums_of_the_models_own_logits():
    z = causal_lm(model=tiny.model(dtype=torch.bfloat16))
    found = z.log_prob(ANSWERS, {"x": X})
    assert found.dtype == torch.float32
    for row, (prompt, ids) in enumerate(zip(z.prompt_ids({"x": X}), z.encoder.completions(ANSWERS))):
        alone = z.log_prob([ANSWERS[row]], {"x": [X[row]]}).item()
        assert abs(alone - by_hand(z.model, prompt, ids)) < 1e-3 * len(ids)
        assert abs(found[row].item() - alone) < 0.05 * len(ids)  # batch mates round bf16 logits differently


def test_a_component_without_parents_scores_and_draws():
    z = causal_lm(parents=(), template="a:")
    assert z.log_prob(["ab", "c"], {}).shape == (2,)
    assert len(z.sample({}, num_samples=3, generator=generator())[0]) == 3


# --- draws ------------------------------------------------------------------------------------------------------------------


def test_sampling_and_scoring_use_the_same_ids():
    z = causal_lm(tokenizer=tiny.tokenizer(chat=True, bos=True), max_new_tokens=20)
    seen = []
    z.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    y = z.sample({"x": ["ab the"]}, generator=generator())
    z.log_prob(y, {"x": ["ab the"]})
    prompt = z.prompt_ids({"x": ["ab the"]})[0]
    assert tuple(seen[0][0].tolist()) == prompt
    assert tuple(seen[-1][0].tolist()) == (*prompt, *y[0].token_ids[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoders_log_probs_are_those_of_log_prob(kind):
    from sysdpo_lab.decoding import sample_tokens

    z, drawn = causal_lm(model=tiny.model(kind), max_new_tokens=12), []

    def search(*args, **options):
        drawn.append(sample_tokens(*args, **options))
        return drawn[-1]

    values = z._decode(search, {"x": X}, 4, {"num_samples": 4, "generator": generator()})
    for j in range(4):
        scores = z.log_prob([row[j] for row in values], {"x": X})
        torch.testing.assert_close(scores, drawn[0].log_probs[:, j], atol=1e-4, rtol=0)


def test_draws_keep_ids_say_truncated_and_depend_on_the_generator_alone():
    z = causal_lm(max_new_tokens=5, tokenizer=tiny.tokenizer(), model=tiny.model().train())
    state = torch.get_rng_state()
    first = z.sample({"x": X * 4}, num_samples=3, generator=generator(1))
    assert first == z.sample({"x": X * 4}, num_samples=3, generator=generator(1))
    assert first != z.sample({"x": X * 4}, num_samples=3, generator=generator(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert z.model.training
    for value in (value for row in first for value in row):
        assert value.truncated == (value.token_ids[-1] != 1) and len(value.token_ids) <= 5
        assert len(value.token_ids) == 5 or not value.truncated
        assert value.text == z.tokenizer.decode(value.token_ids, skip_special_tokens=True)


def test_samples_have_the_probabilities_that_log_prob_gives():
    model = tiny.model()
    with torch.no_grad():  # few likely tokens, so that whole completions repeat
        model.lm_head.weight[10:] = 0
        model.lm_head.weight[:10] *= 4
    z = causal_lm(model=model, max_new_tokens=2)
    drawn = z.sample({"x": ["ab"]}, num_samples=4000, generator=generator())[0]
    counts = {value: drawn.count(value) for value in set(drawn)}
    values = sorted(counts, key=counts.get)[-6:]
    expected = z.log_prob(values, {"x": ["ab"] * len(values)}).exp()
    for value, probability in zip(values, expected.tolist()):
        assert abs(counts[value] / 4000 - probability) < 4 * (probability * (1 - probability) / 4000) ** 0.5


def test_greedy_takes_the_largest_logit_each_step():
    z = causal_lm(max_new_tokens=4)
    prompt, ids = list(z.prompt_ids({"x": ["ab"]})[0]), []
    while len(ids) < 4 and ids[-1:] != [1]:
        with torch.no_grad():
            ids.append(int(z.model(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
    assert z.greedy({"x": ["ab"]})[0].token_ids == tuple(ids)


def test_diverse_gives_k_different_answers_and_the_first_is_greedy():
    z = causal_lm(max_new_tokens=4, diversity_penalty=50.0)
    found = z.diverse({"x": X}, 3)
    assert [len(row) for row in found] == [3, 3, 3]
    assert all(len(set(row)) == 3 for row in found)
    greedy = z.greedy({"x": X})
    for row, best in zip(found, greedy):
        assert row[0] == best or len(best.token_ids) == 1  # an empty draft is not allowed here
    assert all(len(row[0].token_ids) <= 2 for row in z.diverse({"x": X}, 2, max_new_tokens=2))
    same = z.diverse({"x": X}, 2, diversity_penalty=0.0)
    assert all(row[0] == row[1] for row in same)


def test_the_options_of_the_search_reach_it():
    z = causal_lm(max_new_tokens=6)
    options = {"length_penalty": 0.5, "early_stopping": True, "finished_groups": "pad", "diversity_penalty": 2.0}
    found = z.diverse({"x": X}, 2, **options, max_new_tokens=3)
    assert all(len(value.token_ids) <= 3 for row in found for value in row)
    with pytest.raises(errors.UnknownOptionError, match="early_stopping"):
        z.diverse({"x": X}, 2, early_stopping="soon")


def test_perturbed_top_k_returns_different_completions_with_their_own_log_probs():
    z = causal_lm(max_new_tokens=4)
    rows = ["ab", "ab", "c", "the"]  # two beams for each of two rows
    start = torch.tensor([[-1.0, -2.0], [-0.5, -0.5]], dtype=torch.float64)
    parents, values, log_probs, gumbels = z.perturbed_top_k({"x": rows}, start, start + 0.3, 3, generator())
    assert parents.shape == log_probs.shape == gumbels.shape == (2, 3)
    assert bool((gumbels.diff(dim=1) <= 0).all())
    for b in range(2):
        assert len({(int(parents[b, j]), values[b][j]) for j in range(3)}) == 3
        for j in range(3):
            own = z.log_prob([values[b][j]], {"x": [rows[2 * b + int(parents[b, j])]]}).item()
            assert log_probs[b, j].item() == pytest.approx(start[b, parents[b, j]].item() + own, abs=1e-4)


# --- several components on one base -------------------------------------------------------------------------------------------


def two_components(shared, dropout=0.0, **options):
    """draft and refine, on one base or on two equal ones, with the same trained weights in both cases."""
    base = tiny.model("qwen2", dtype=torch.float64)
    bases = (base, base) if shared else (base, copy.deepcopy(base))
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    y = causal_lm("y", ("x",), bases[0], template="{x}?", adapter=config, **options)
    z = causal_lm("z", ("x", "y"), bases[1], template="{x} {y}:", adapter=config, **options)
    disturb(y, 1)
    disturb(z, 2)
    return CompoundSystem([y, z], inputs=("x",), output="z")


PAIRS = {
    "inputs": {"x": ["ab", "the c"]},
    "chosen": ["abc", "the"],
    "rejected": ["c c", "a the abc"],
    "intermediates": {"y": [["ab", "the"], ["c", "abc a"]]},
}


def gradients(system):
    system.zero_grad()
    found = losses.sampling_loss(system, **PAIRS, beta=0.3)
    found.loss.backward()
    return found.loss.item(), [[p.grad.clone() for p in system[name].trainable()] for name in ("y", "z")]


def test_one_loss_over_two_adapters_gives_the_gradients_of_two_separate_models():
    loss, shared = gradients(two_components(True))
    expected, separate = gradients(two_components(False))
    assert loss == pytest.approx(expected, abs=1e-9)
    for ours, theirs in zip(shared, separate):
        assert any(bool(gradient.any()) for gradient in theirs)
        for left, right in zip(ours, theirs):
            torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_trainable_parameters_are_the_adapters_and_nothing_else():
    system = two_components(True)
    y, z = (set(map(id, system[name].trainable())) for name in "yz")
    assert y and z and not y & z
    named = dict(system["y"].network.named_parameters())
    assert {name for name, p in named.items() if id(p) in y | z} == {name for name in named if "lora_" in name}
    assert len(system.trainable_parameters()) == len(y | z)


def test_a_frozen_component_is_bit_equal_after_training_and_the_other_moves():
    system = two_components(True)
    system.freeze("y")
    before = {name: [p.clone() for p in system[name].trainable()] for name in "yz"}
    base = {name: p.clone() for name, p in adapters.base_parameters(system["y"].network).items()}
    optimiser = torch.optim.AdamW(system.trainable_parameters(), lr=1e-2)
    for _ in range(5):
        optimiser.zero_grad()
        losses.sampling_loss(system, **PAIRS, beta=0.3).loss.backward()
        optimiser.step()
        system.sample(PAIRS["inputs"], generator=generator())
    assert all(torch.equal(p, old) for p, old in zip(system["y"].trainable(), before["y"]))
    assert not any(p.requires_grad for p in system["y"].trainable())
    assert not any(torch.equal(p, old) for p, old in zip(system["z"].trainable(), before["z"]))
    assert all(torch.equal(p, base[name]) for name, p in adapters.base_parameters(system["y"].network).items())
    system.unfreeze("y")
    assert all(p.requires_grad for p in system["y"].trainable())


def test_checkpointing_recomputes_under_the_adapter_of_the_forward_pass():
    plain = two_components(True, dropout=0.5)
    plain.train()
    loss, expected = gradients(plain)
    system = two_components(True, dropout=0.5)
    system["y"].network.activation_checkpointing_enable()
    system.train()
    again, found = gradients(system)  # the loss scores y, z and, in between, the reference
    assert again == pytest.approx(loss, abs=1e-9)
    for left, right in zip(found, expected):
        assert any(bool(gradient.any()) for gradient in left)
        for ours, theirs in zip(left, right):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def test_recomputing_under_whatever_is_active_later_would_be_noticed(monkeypatch):
    _, expected = gradients(two_components(True))
    system = two_components(True)
    system["y"].network.activation_checkpointing_enable()
    monkeypatch.setattr(adapters.AdapterState, "of", classmethod(lambda cls, layer: cls(())))
    _, found = gradients(system)
    assert any((left - right).abs().max() > 1e-3 for left, right in zip(found[1], expected[1]))


def test_dropout_is_inactive_in_policy_and_reference_and_flags_come_back():
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)
    z = causal_lm(model=tiny.model(attention_dropout=0.5), adapter=config)
    z.train()
    first = z.log_prob(ANSWERS, {"x": X})
    with z.reference():
        start = z.log_prob(ANSWERS, {"x": X})
    assert torch.equal(first, start)  # a fresh adapter adds exactly nothing: step-0 loss is log 2
    assert torch.equal(z.log_prob(ANSWERS, {"x": X}), first)
    assert all(module.training for module in z.modules())
    disturb(z)
    assert torch.equal(z.log_prob(ANSWERS, {"x": X}), z.log_prob(ANSWERS, {"x": X}))
    assert z.greedy({"x": X}) == z.greedy({"x": X})


def test_the_loss_is_log_2_at_the_start_and_k_1_gives_the_draft_no_gradient():
    base = tiny.model(dtype=torch.float64)
    y = causal_lm("y", ("x",), base, template="{x}?", adapter=2)
    z = causal_lm("z", ("x", "y"), base, template="{x} {y}:", adapter=2)
    system = CompoundSystem([y, z], inputs=("x",), output="z")
    found = losses.sampling_loss(system, **PAIRS, beta=0.5)
    assert found.loss.item() == pytest.approx(0.6931471805599453, abs=1e-12)
    disturb(y, 3), disturb(z, 4)
    single = PAIRS | {"intermediates": {"y": [["ab"], ["c"]]}}
    losses.sampling_loss(system, **single, beta=0.5).loss.backward()
    assert all(p.grad is None or not bool(p.grad.any()) for p in y.trainable())
    assert any(bool(p.grad.any()) for p in z.trainable())


@pytest.mark.parametrize(
    "extra", [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
def test_an_adapter_on_the_head_is_used_trained_and_switched_off(extra):
    model = tiny.model(dtype=torch.float64)
    plain = causal_lm(model=copy.deepcopy(model)).log_prob(ANSWERS, {"x": X}).detach()
    z = disturb(causal_lm(model=model, adapter=LoraConfig(r=2, task_type="CAUSAL_LM", **extra)))
    scores = z.log_prob(ANSWERS, {"x": X})
    with adapters.activated(z.network, z.adapter_name):
        expected = [by_hand(z.network, p, c) for p, c in zip(z.prompt_ids({"x": X}), z.encoder.completions(ANSWERS))]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
    scores.sum().backward()
    head = [p for name, p in adapters.adapter_parameters(z.network, z.adapter_name).items() if "lm_head" in name]
    assert head and all(bool(p.grad.any()) for p in head)
    with z.reference():
        torch.testing.assert_close(z.log_prob(ANSWERS, {"x": X}), plain, atol=1e-12, rtol=0)


def test_a_deep_copy_of_a_system_is_independent():
    system = two_components(True)
    trace = {"x": X, "y": ANSWERS, "z": ANSWERS}
    expected = system.log_prob(trace).detach()
    other = copy.deepcopy(system)
    assert other["y"].model is other["z"].model and other["y"].model is not system["y"].model
    disturb(other["y"])
    torch.testing.assert_close(system.log_prob(trace), expected, atol=1e-12, rtol=0)
    assert (other.log_prob(trace) - expected).abs().min() > 1e-3


def test_two_bases_two_adapters_and_a_table_make_one_system():
    y = causal_lm("y", ("x",), tiny.model("llama", seed=1), template="{x}?", adapter=2)
    z = causal_lm("z", ("x", "y", "n"), tiny.model("gpt2"), template="{n} {x} {y}:", adapter=2)
    system = CompoundSystem([y, Categorical("n", {}, 3), z], inputs=("x",), output="z")
    trace = system.sample({"x": X}, generator=generator())
    assert torch.isfinite(system.log_prob(trace)).all()
    assert system.generate({"x": X})["z"] == system.generate({"x": X})["z"]


@pytest.mark.parametrize("sampler", [samplers.monte_carlo, samplers.diverse_beam, samplers.gumbel_top_k])
def test_every_sampler_draws_joint_assignments_of_a_collider(sampler):
    base = tiny.model(dtype=torch.float64)
    parts = [causal_lm(name, ("x",), base, template=f"{{x}} {name}", adapter=2, max_new_tokens=4) for name in ("y1", "y2")]
    z = causal_lm("z", ("x", "y1", "y2"), base, template="{x} {y1} {y2}:", adapter=2)
    system = CompoundSystem([*parts, z], inputs=("x",), output="z")
    found = sampler(system, {"x": X}, 2, generator=generator())
    assert found.distinct.tolist() == [2, 2, 2]
    for j in range(2):
        trace = {"x": X, **{name: [row[j] for row in found.values[name]] for name in ("y1", "y2")}}
        own = sum(system.log_prob_terms(trace, names=["y1", "y2"]).values()).detach()
        torch.testing.assert_close(found.log_probs[:, j], own, atol=1e-4, rtol=0)
    loss = losses.sampling_loss(system, {"x": X}, ANSWERS, ANSWERS[::-1][:2] + ["c"], found.values, beta=0.3)
    assert loss.loss.item() == pytest.approx(0.6931471805599453, abs=1e-9)


def test_tied_components_share_one_adapter():
    y = causal_lm("y", ("x",), template="{x}?", adapter=2)
    z = causal_lm("z", ("x", "y"), template="{x} {y}:", model=y.model, adapter=y)
    system = CompoundSystem([y, z], inputs=("x",), output="z")
    assert [id(p) for p in y.trainable()] == [id(p) for p in z.trainable()]
    with pytest.warns(errors.TiedFreezeWarning):
        system.freeze("z")
    assert system.is_frozen("y")


@pytest.mark.parametrize("kind", ["whole", "made elsewhere", "by name"])
def test_components_given_the_same_weights_are_tied_and_tied_again_after_loading(tmp_path, kind):
    model, adapter, start = tiny.model(), None, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    if kind != "whole":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(model, start, adapter_name="first")
            model.add_adapter("second", start)
        adapter = "second" if kind == "by name" else None
    y = causal_lm("y", ("x",), model, template="{x}?", adapter=adapter)
    system = CompoundSystem([y, causal_lm("z", ("x", "y"), model, template="{x} {y}:", adapter=adapter)])
    trace = {"x": X, "y": ANSWERS, "z": ANSWERS[::-1]}
    start = system.log_prob(trace).detach()
    disturb(y)
    system.save(tmp_path / "system")
    loaded = CompoundSystem.load(tmp_path / "system")
    for each in (system, loaded):
        assert len(each.trainable_parameters()) == len(y.trainable())
        with each.reference():
            torch.testing.assert_close(each.log_prob(trace), start, atol=1e-5, rtol=0)
    assert torch.equal(loaded.log_prob(trace), system.log_prob(trace))


def test_two_adapters_of_a_peft_model_are_two_components():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules="all-linear"), adapter_name="draft")
        model.add_adapter("refine", LoraConfig(r=2, target_modules="all-linear"))
    y, z = (causal_lm(name, ("x",), model, adapter=name) for name in ("draft", "refine"))
    assert all(p.requires_grad for component in (y, z) for p in component.trainable())  # peft had frozen the second
    assert not set(map(id, y.trainable())) & set(map(id, z.trainable())) and y.tied_to is z.tied_to is None
    before = z.log_prob(ANSWERS, {"x": X})
    disturb(y)
    assert torch.equal(z.log_prob(ANSWERS, {"x": X}), before)
    assert not torch.allclose(y.log_prob(ANSWERS, {"x": X}), before)


def test_a_deep_copy_of_a_trained_model_is_another_model():
    base = tiny.model()
    y = causal_lm("y", model=base)
    z = causal_lm("z", model=copy.deepcopy(base))
    assert z.tied_to is None and z.model is not y.model


@pytest.mark.parametrize("model", [None, 3, ["a"]])
def test_what_is_no_model_is_named(model):
    with pytest.raises(errors.MissingModelError, match="'z': model must be a transformers model"):
        CausalLM("z", ("x",), model, tiny.tokenizer())


def test_a_whole_model_and_an_adapter_cannot_share_a_base():
    base = tiny.model()
    whole = causal_lm("y", model=base)
    with pytest.raises(errors.AdapterError, match="'z': component 'y' trains all weights"):
        causal_lm("z", model=base, adapter=2)
    del whole
    causal_lm("z", model=base, adapter=2)
    with pytest.raises(errors.AdapterError, match="cannot be trained as a whole"):
        causal_lm("y", model=base)


# --- the reference ------------------------------------------------------------------------------------------------------------


def three_references(adapter):
    found = []
    for strategy in ("adapter", "copy", "cached"):
        z = causal_lm(model=tiny.model(), adapter=adapter, reference=strategy)
        if strategy == "cached":
            z.cache_reference(ANSWERS, {"x": X})
        start = z.log_prob(ANSWERS, {"x": X}).detach()
        found.append((disturb(z, 7), start))
    return found


@pytest.mark.parametrize("kind", ["fresh", "random", "saved"])
def test_the_three_references_agree_with_the_start_after_training(kind, tmp_path):
    adapter = 2
    if kind == "random":
        adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    if kind == "saved":
        disturb(causal_lm("before", adapter=2), 3).save(tmp_path)
        adapter = tmp_path
    base = causal_lm().log_prob(ANSWERS, {"x": X})
    for z, start in three_references(adapter):
        assert torch.allclose(start, base, atol=1e-5) is (kind == "fresh")
        trained = z.log_prob(ANSWERS, {"x": X})
        with z.reference():
            reference = z.log_prob(ANSWERS, {"x": X})
        torch.testing.assert_close(reference, start, atol=1e-5, rtol=0)
        assert not reference.requires_grad
        assert (trained - start).abs().min() > 1e-3
        assert torch.equal(z.log_prob(ANSWERS, {"x": X}), trained)


def test_auto_takes_the_adapter_or_a_copy_of_the_whole_model():
    assert causal_lm(adapter=2).strategy == "adapter"
    whole = causal_lm()
    assert whole.strategy == "copy"
    start = whole.log_prob(ANSWERS, {"x": X}).detach()
    disturb(whole)
    with whole.reference():
        torch.testing.assert_close(whole.log_prob(ANSWERS, {"x": X}), start, atol=1e-6, rtol=0)
    reference = set(map(id, whole.reference_model.parameters()))
    assert not reference & set(map(id, whole.trainable()))
    assert not any(p.requires_grad for p in whole.reference_model.parameters())


def test_the_adapter_reference_needs_no_second_model():
    z = causal_lm(adapter=2)
    assert z.reference_model is None and z.reference_adapter is None
    own = sum(p.numel() for p in z.trainable())
    assert sum(p.numel() for p in z.parameters()) == sum(p.numel() for p in tiny.model().parameters()) + own


def test_reference_blocks_nest_and_end_after_an_error():
    z = disturb(causal_lm(adapter=2))
    trained = z.log_prob(ANSWERS, {"x": X})
    with pytest.raises(errors.EmptyCompletionError):
        with z.reference():
            with z.reference():
                start = z.log_prob(ANSWERS, {"x": X})
            assert torch.equal(z.log_prob(ANSWERS, {"x": X}), start)
            z.log_prob([""], {"x": ["a"]})
    assert not z.is_reference
    assert torch.equal(z.log_prob(ANSWERS, {"x": X}), trained)
    with z.reference():
        drawn, best = z.sample({"x": X}, generator=generator()), z.greedy({"x": X})
    fresh = causal_lm()
    assert best == fresh.greedy({"x": X}) and drawn == fresh.sample({"x": X}, generator=generator())


def test_a_cached_reference_never_calls_the_model_and_says_what_is_missing():
    z = causal_lm(adapter=2, reference="cached")
    assert z.cache_reference([*ANSWERS, None], {"x": [*X, "a"]}) == 3
    calls = []
    z.network.register_forward_hook(lambda *_: calls.append(1))
    disturb(z)
    with z.reference():
        z.log_prob(ANSWERS, {"x": X})
        z.log_prob([None], {"x": ["a"]})
        assert calls == []
        with pytest.raises(errors.ReferenceNotCachedError, match=r"'z', rows \[1\].*fixed set"):
            z.log_prob(["abc", "new"], {"x": [X[0], X[1]]})
        with pytest.raises(errors.ReferenceNotCachedError, match="cannot generate"):
            z.greedy({"x": X})
        with pytest.raises(errors.ReferenceNotCachedError, match="outside reference"):
            z.cache_reference(["new"], {"x": ["a"]})
    with pytest.raises(errors.ReferenceNotCachedError, match="have changed"):
        z.cache_reference(["new"], {"x": ["a"]})
    with pytest.raises(errors.UnknownOptionError, match="'cached'"):
        causal_lm().cache_reference(["a"], {"x": ["a"]})


def test_a_cached_reference_gives_the_loss_of_an_uncached_one():
    def loss(reference):
        z = causal_lm(adapter=2, reference=reference)
        system = CompoundSystem([z], inputs=("x",), output="z")
        if reference == "cached":
            z.cache_reference(ANSWERS + ANSWERS[::-1], {"x": X + X})
        disturb(z)
        return losses.direct_loss(system, {"x": X, "z": ANSWERS}, {"x": X, "z": ANSWERS[::-1]}, beta=0.3).loss.item()

    assert loss("cached") == pytest.approx(loss("adapter"), abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"reference": "adpter"}, {"max_new_tokens": 0}, {"max_new_tokens": True}, {"pad_to_multiple": -1}, {"temperature": 0},
     {"temperature": float("nan")}, {"diversity_penalty": -1.0}, {"min_new_tokens": 7}, {"min_new_tokens": -1}],
)
def test_unknown_options_are_refused(options):
    with pytest.raises(errors.UnknownOptionError):
        causal_lm(**options)


def test_the_adapter_reference_needs_an_adapter():
    with pytest.raises(errors.AdapterError, match="reference='adapter' needs an adapter"):
        causal_lm(reference="adapter")


# --- files --------------------------------------------------------------------------------------------------------------------


def scores(component):
    policy = component.log_prob(ANSWERS, {"x": X}).detach()
    with component.reference():
        return policy, component.log_prob(ANSWERS, {"x": X})


@pytest.mark.parametrize("reference", ["auto", "copy", "cached"])
@pytest.mark.parametrize("kind", ["fresh", "random", "whole"])
def test_a_loaded_component_scores_as_the_saved_one_policy_and_reference(tmp_path, reference, kind):
    random = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    z = causal_lm(adapter={"fresh": 2, "random": random, "whole": None}[kind], reference=reference, pad_to_multiple=4,
                  max_new_tokens=9, temperature=0.5)
    if reference == "cached":
        z.cache_reference(ANSWERS, {"x": X})
    disturb(z)
    z.save(tmp_path / "z")
    again = CausalLM.load(tmp_path / "z")
    for left, right in zip(scores(z), scores(again)):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)
    assert again.config() == z.config() | {"base": again.config()["base"]}
    assert (again.max_new_tokens, again.temperature, again.pad_to_multiple) == (9, 0.5, 4)
    assert again.greedy({"x": X}) == z.greedy({"x": X})
    assert all(p.requires_grad for p in again.trainable())
    if reference == "cached":
        with pytest.raises(errors.ReferenceNotCachedError, match="have changed"):
            again.cache_reference(["new"], {"x": ["a"]})


def test_a_saved_system_holds_its_base_once_and_loads_it_once(tmp_path):
    system = two_components(True)
    trace = {"x": X, "y": ANSWERS, "z": ANSWERS[::-1]}
    expected = system.log_prob_terms(trace)
    system.freeze("y")
    system.save(tmp_path / "system")
    bases = list((tmp_path / "system").rglob("model.safetensors"))
    assert len(bases) == 1
    assert len(list((tmp_path / "system").rglob("adapter_model.safetensors"))) == 2
    assert str(tmp_path) not in "".join(p.read_text() for p in (tmp_path / "system").rglob("*.json"))
    loaded = CompoundSystem.load(tmp_path / "system")
    assert loaded["y"].model is loaded["z"].model
    assert loaded.is_frozen("y") and not loaded.is_frozen("z")
    for name, term in loaded.log_prob_terms(trace).items():
        torch.testing.assert_close(term, expected[name], atol=1e-9, rtol=0)
    with loaded.reference(), system.reference():
        torch.testing.assert_close(loaded.log_prob(trace), system.log_prob(trace), atol=1e-9, rtol=0)


def test_tied_components_are_tied_again_after_loading(tmp_path):
    y = causal_lm("y", ("x",), template="{x}?", adapter=2)
    z = causal_lm("z", ("x", "y"), template="{x} {y}:", model=y.model, adapter=y)
    CompoundSystem([z, y], inputs=("x",), output="z").save(tmp_path / "system")
    loaded = CompoundSystem.load(tmp_path / "system")
    assert [id(p) for p in loaded["y"].trainable()] == [id(p) for p in loaded["z"].trainable()]


def test_a_base_from_a_folder_is_named_not_copied(tmp_path):
    loading.save_plain(tiny.model(), tmp_path / "base")
    tiny.tokenizer().save_pretrained(str(tmp_path / "base"))
    z = disturb(CausalLM("z", ("x",), tmp_path / "base", template="{x}:", adapter=2))
    z.save(tmp_path / "z")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "z"]
    assert json.loads((tmp_path / "z" / "component.json").read_text())["base"]["source"] == str(tmp_path / "base")
    again = CausalLM.load(tmp_path / "z")
    torch.testing.assert_close(scores(again)[0], scores(z)[0], atol=1e-6, rtol=0)
    loading.save_plain(tiny.model(seed=9), tmp_path / "base")
    with pytest.raises(errors.SaveFormatError, match="'z': the base"):
        CausalLM.load(tmp_path / "z")
    with torch.no_grad():
        next(iter(adapters.base_parameters(z.network).values())).add_(0.1)
    z.save(tmp_path / "changed")
    assert len(list(tmp_path.glob("base_*"))) == 1  # no longer what the folder held: written out


def question(x):
    return f"{x}?"


def test_a_template_function_is_saved_by_its_importable_name(tmp_path):
    z = causal_lm(template=question, adapter=2)
    z.save(tmp_path / "z")
    assert CausalLM.load(tmp_path / "z").template is question
    with pytest.raises(errors.SaveFormatError, match="top of a module"):
        causal_lm(template=lambda x: x, adapter=2).save(tmp_path / "other")
