"""Named errors and warnings: each says which component, row or file, what was found and what to do."""

import numbers


class SysDPOError(Exception):
    """Base class of every error that this package raises on purpose."""


# --- graphs -----------------------------------------------------------------------------------------------------------


class GraphError(SysDPOError, ValueError):
    """The components do not form a compound system."""


class CycleError(GraphError):
    """Components feed one another in a circle; unroll the loop over time instead."""


class UnknownComponentError(GraphError, KeyError):
    """A name was used that no component and no input has."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class DuplicateComponentError(GraphError):
    """Two components, or a component and an input, share a name."""


class MissingParentError(GraphError):
    """A component lists a parent that is neither an input nor a component, or got no value for one."""


class UnreachableOutputError(GraphError):
    """No input reaches the output, so preferences on it would say nothing about x."""


# --- values -----------------------------------------------------------------------------------------------------------


class TableError(SysDPOError, ValueError):
    """A probability table has the wrong shape, a negative entry, or rows that do not sum to 1."""


class CardinalityError(TableError):
    """The number of values that a table expects differs from what the graph says."""


class ValueRangeError(SysDPOError, ValueError):
    """A value lies outside the range of its variable."""


class BatchMismatchError(SysDPOError, ValueError):
    """The variables of one trace do not have the same number of rows."""


class NonFiniteError(SysDPOError, ArithmeticError):
    """A NaN or an infinity where a finite number is needed."""


class NoMarginError(SysDPOError, ValueError):
    """No pair of the batch has a margin: every winner or loser is impossible."""


class InputMismatchError(SysDPOError, ValueError):
    """Chosen and rejected trace of one pair have different inputs."""


class NoiseRequiredError(SysDPOError, ValueError):
    """A component whose log-probability is a bound needs shared noise; call system.draw_noise first."""


class UnknownOptionError(SysDPOError, ValueError):
    """An option has a value, or a name, that does not exist; the message lists those that do."""


class UnsupportedSamplerError(SysDPOError, TypeError):
    """A sampler cannot be used on this kind of component."""


class CaseFormatError(SysDPOError, ValueError):
    """A discrete-compound-system file is broken; the message names file and key."""


class SaveFormatError(SysDPOError, ValueError):
    """A saved system's folder is incomplete or of another format."""


# --- warnings ---------------------------------------------------------------------------------------------------------


class SysDPOWarning(UserWarning):
    """Base class of this package's warnings."""


class TiedFreezeWarning(SysDPOWarning):
    """Freezing one of several components with shared parameters freezes all of them."""


class NoDiversityWarning(SysDPOWarning):
    """All intermediates of every row coincide (or k = 1): the hidden components get exactly no gradient."""


def check_option(name: str, value: object, allowed: tuple) -> None:
    """Raise UnknownOptionError unless `value` is one of `allowed`.

    >>> check_option("repeats", "drop", ("drop", "count"))
    >>> check_option("repeats", "dorp", ("drop", "count"))
    Traceback (most recent call last):
    ...
    sysdpo_lab.errors.UnknownOptionError: repeats='dorp' does not exist; choose one of 'drop', 'count'
    """
    if not any(value is option or (type(value) is type(option) and value == option) for option in allowed):
        raise UnknownOptionError(f"{name}={value!r} does not exist; choose one of {', '.join(map(repr, allowed))}")


def check_beta(beta: float) -> float:
    """beta as a positive finite number, or UnknownOptionError.

    >>> check_beta(1)
    1.0
    """
    if isinstance(beta, bool) or not isinstance(beta, numbers.Real) or not 0 < beta < float("inf"):
        raise UnknownOptionError(f"beta must be a positive finite number, found {beta!r}")
    return float(beta)


# --- files ------------------------------------------------------------------------------------------------------------


class DataFolderError(SysDPOError, FileNotFoundError):
    """The folder with the toy systems and stored results was not found."""


class MissingWeightsError(SysDPOError, FileNotFoundError):
    """A packaged small model is not installed."""


class WeightsHashError(SysDPOError, ValueError):
    """A weights file is not the one that is pinned by its SHA-256."""


# --- preference data and stored files -------------------------------------------------------------------------------


class PairFormatError(SysDPOError, ValueError):
    """A preference pair lacks a part, or has parts of the wrong kind."""


class EmptyAnswerError(PairFormatError):
    """A chosen or rejected answer has nothing in it that could be scored."""


class IdenticalPairError(PairFormatError):
    """Chosen and rejected are the same: the pair's loss is log 2 whatever the system does."""


class PreferenceFileError(SysDPOError, ValueError):
    """A line of a preference file, or all of them, cannot be used; the message names file and line."""


class MissingFileError(SysDPOError, FileNotFoundError):
    """A file that is needed is not there; the message says how to make it."""


class RecordFormatError(SysDPOError, ValueError):
    """A record of a generated world has an unknown slot or value."""


# --- figures ----------------------------------------------------------------------------------------------------------


class MissingAltTextError(SysDPOError, ValueError):
    """A figure without alt text; say what is to be seen in it."""


class EmptyHistoryError(SysDPOError, ValueError):
    """A training history without a single step."""


# --- decoding ---------------------------------------------------------------------------------------------------------


class PromptError(SysDPOError, ValueError):
    """Prompts or their attention mask have the wrong shape, are empty, or are not padded on the left."""


class TokenIdError(SysDPOError, ValueError):
    """An EOS or pad id is missing or lies outside the vocabulary."""


class OptionRangeError(UnknownOptionError):
    """A number given as an option is out of range; the message says what is allowed."""


class ContextLengthError(SysDPOError, ValueError):
    """Prompt and continuation together need more positions than the model has."""


class UnsupportedModelError(SysDPOError, TypeError):
    """A model cannot be decoded as it is."""


# --- notebooks --------------------------------------------------------------------------------------------------------


class NotebookExecutionError(SysDPOError, RuntimeError):
    """A cell failed while a notebook was built; the message names notebook and cell."""


# --- language models --------------------------------------------------------------------------------------------------


class TemplateError(SysDPOError, ValueError):
    """A prompt template does not fit the component's parents, or makes no prompt."""


class TokenizerError(SysDPOError, ValueError):
    """A tokenizer is missing, or lacks something that is needed (an EOS)."""


class EmptyCompletionError(SysDPOError, ValueError):
    """A completion has no text and no tokens, so there is nothing to score."""


class CompletionError(SysDPOError, ValueError):
    """A value of a language-model component is of the wrong kind, or has an end-of-sequence token in its middle."""


class PromptTooLongError(ContextLengthError):
    """Prompt and completion together do not fit into the model's context."""


class AdapterError(SysDPOError, ValueError):
    """An adapter cannot be put on this base, or cannot share it."""


class ReferenceNotCachedError(SysDPOError, LookupError):
    """The cached reference has no log-probability of this prompt and completion."""


class MissingModelError(SysDPOError, FileNotFoundError):
    """A model's files were found nowhere; the message says what to install or name."""


class ResumeError(SysDPOError, ValueError):
    """A run's folder is in use, or holds another run; the message says what differs."""


# --- diffusion models ---------------------------------------------------------------------------------------------------


class CaptionError(SysDPOError, ValueError):
    """A diffusion component cannot tell its captions from its parents' values."""


class EncoderError(SysDPOError, TypeError):
    """A diffusion component's encoder is missing, or returns something else than (N, length, width)."""


class ImageShapeError(SysDPOError, ValueError):
    """A value is no float tensor (n, C, H, W), or its size does not fit the network or the batch."""


class BothErrorsRiseWarning(SysDPOWarning):
    """Winners and losers are both denoised worse than at the start: the loss falls only because losers fall behind faster."""


# --- training ---------------------------------------------------------------------------------------------------------


class EmptyPairsError(PairFormatError):
    """There is no pair to train on or to measure."""


class PairKindError(PairFormatError):
    """An objective got finals where it needs whole traces, or the other way round."""


class ObjectiveError(SysDPOError, TypeError):
    """An objective did not return a PairLoss."""


class NothingToTrainError(SysDPOError, ValueError):
    """No parameter is trainable, or none of them has any influence on the loss."""


class NoUpdateError(SysDPOError, RuntimeError):
    """A step was made, the gradient was not zero, and still no weight changed."""


class DistributedError(SysDPOError, RuntimeError):
    """The loop was started in a way that it does not support (several processes, fp16 gradient scaling)."""


class CheckpointError(SysDPOError, ValueError):
    """A checkpoint or a history cannot be written or read; the message names the file."""


class ZeroGradientWarning(SysDPOWarning):
    """Every gradient of a step is exactly zero: nothing is learned."""


class HalfPrecisionWarning(SysDPOWarning):
    """Trainable weights in half precision round small updates away."""


class DamagedCheckpointWarning(SysDPOWarning):
    """A checkpoint is damaged and was left out; an older one is used."""


# --- exact systems ----------------------------------------------------------------------------------------------------


class StateSpaceError(SysDPOError, ValueError):
    """A discrete system has too many joint values to write down one by one."""


# --- coursework -------------------------------------------------------------------------------------------------------


class ExerciseFormatError(SysDPOError, ValueError):
    """A lesson's exercise has an unclosed marker, no points, no test, or a name twice; the message names the cell."""


class HandInError(SysDPOError, ValueError):
    """A file that was handed in cannot be graded: missing, no notebook, or of another lesson."""


# --- judges -----------------------------------------------------------------------------------------------------------


class MissingExtraError(SysDPOError, ImportError):
    """An optional package is needed for this and is not installed."""


class JudgeUnavailableError(SysDPOError, RuntimeError):
    """A judge's model cannot be reached, or refuses; the replies so far are kept."""


class JudgeBudgetError(SysDPOError, RuntimeError):
    """A judge would send more requests than its budget allows; the replies so far are kept."""


class ReplyStoreError(SysDPOError, OSError):
    """A store of replies cannot be read or written."""


class DamagedReplyWarning(SysDPOWarning):
    """A store of replies has unreadable lines; they are asked again."""
