"""Each profile names its model, cost and settings; a setting can be changed only to a value of its kind."""


import pytest

from sysdpo_lab import errors, profiles
from sysdpo_lab.experiments import runner
from sysdpo_lab.profiles import REGISTRY

EACH = pytest.mark.parametrize("profile", REGISTRY.values(), ids=lambda p: f"{p.experiment}-{p.name}")
TINY = REGISTRY["two-llm", "tiny"]


@EACH
def test_a_profile_says_what_it_costs_and_what_to_expect(profile):
    assert REGISTRY[profile.experiment, profile.name] is profile
    assert profile.name in profiles.PROFILES
    assert profile.minutes > 0 and profile.memory_gb > 0
    assert len(set(profile.seeds)) == len(profile.seeds) >= 3
    assert profile.model and profile.revision and profile.expected
    assert profile.network is False or profile.name == "paper"


@EACH
def test_its_own_settings_pass_the_experiments_check(profile):
    runner.experiment_of(profile.experiment, profile.name).check(profile.with_settings({}))


@EACH
def test_every_setting_has_a_kind_that_the_command_line_can_write(profile):
    for key, value in profile.settings.items():
        assert type(value) in (int, float, str, bool), key
        assert profile.with_settings({key: str(value)})[key] == value


def test_unknown_names_list_the_choices():
    with pytest.raises(errors.UnknownOptionError, match="experiment='toys'.*'toy', 'two-llm'"):
        profiles.find("toys", "toy")
    with pytest.raises(errors.UnknownOptionError, match="profile of two-llm='toy'.*'tiny', 'small'"):
        profiles.find("two-llm", "toy")
    with pytest.raises(errors.UnknownOptionError, match="setting='step'.*'steps'"):
        TINY.with_settings({"step": 3})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("k", "4", 4), ("lr", "1e-5", 1e-5), ("lr", "1", 1.0), ("sampler", "monte_carlo", "monte_carlo"), ("rows", "", "")],
)
def test_words_become_the_settings_kind(key, text, value):
    found = TINY.with_settings({key: text})[key]
    assert found == value and type(found) is type(TINY.settings[key])


@pytest.mark.parametrize(
    ("key", "value"),
    [("k", "two"), ("k", "2.0"), ("k", 2.0), ("k", True), ("lr", "fast"), ("lr", "nan"), ("lr", "inf"),
     ("lr", float("inf")), ("sampler", 3), ("rows", ["prompted"]), ("k", None)],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(key, value):
    with pytest.raises(errors.UnknownOptionError, match=f"--set {key}: expected a .* such as"):
        TINY.with_settings({key: value})


def test_truth_values_are_read_as_words():
    profile = profiles.Profile("e", "toy", "m", "r", (0,), 1, 1, False, "x", {"flag": False})
    assert [profile.with_settings({"flag": text})["flag"] for text in ("true", "False", "1", "0")] == [True, False, True, False]
    with pytest.raises(errors.UnknownOptionError, match="bool"):
        profile.with_settings({"flag": "yes"})


def test_changes_leave_the_profile_as_it_is():
    before = dict(TINY.settings)
    assert TINY.with_settings({"k": "7"}) == {**before, "k": 7}
    assert dict(TINY.settings) == before
