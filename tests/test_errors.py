"""Every error and warning of the package has a name of its own, a base class, and a sentence that says what it means."""

import inspect
import pickle

import pytest

from sysdpo_lab import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_each_class_is_an_error_or_warning_of_ours_and_explains_itself(kind):
    assert issubclass(kind, (errors.SysDPOError, errors.SysDPOWarning)) and kind.__doc__ and kind.__doc__.endswith(".")
    assert kind.__name__.endswith("Warning" if issubclass(kind, errors.SysDPOWarning) else "Error")


@pytest.mark.parametrize("kind", [c for c in CLASSES if not issubclass(c, Warning)], ids=lambda c: c.__name__)
def test_messages_survive_printing_and_pickling(kind):
    error = kind("component 'y', row 3: found 7")
    assert str(error) == "component 'y', row 3: found 7"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(("kind", "builtin"), [
    (errors.CycleError, ValueError), (errors.UnknownComponentError, KeyError), (errors.CardinalityError, errors.TableError),
    (errors.NonFiniteError, ArithmeticError),
    (errors.UnsupportedSamplerError, TypeError), (errors.TiedFreezeWarning, UserWarning),
])  # fmt: skip
def test_errors_are_also_what_a_caller_would_expect(kind, builtin):
    assert issubclass(kind, builtin)


def test_options_are_compared_with_their_type():
    errors.check_option("n", 1, (1, 2))
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(errors.UnknownOptionError, match=r"n=.* does not exist; choose one of 1, 2"):
            errors.check_option("n", wrong, (1, 2))
