"""From parents' values to prompt ids, and from texts to completion ids: one way, for sampling and for scoring."""

import inspect
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sysdpo_lab import errors
from sysdpo_lab.components.completion import Completion

Ids = tuple[int, ...]
Template = str | Callable[..., Any]


# --- templates ------------------------------------------------------------------------------------------------------------


def placeholders(template: str) -> list[str]:
    """The variables that a format string names.

    >>> placeholders("Question: {x}\\nDraft: {y}")
    ['x', 'y']
    """
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    return [field.partition(".")[0].partition("[")[0] for field in fields]


def check_template(name: str, parents: Sequence[str], template: Template) -> None:
    """Raise TemplateError unless the template is a format string over the parents, or callable."""
    if callable(template):
        return
    if not isinstance(template, str):
        raise errors.TemplateError(f"component {name!r}: the template must be a format string or a function, found {template!r}")
    try:
        named = placeholders(template)
    except ValueError as error:
        raise errors.TemplateError(f"component {name!r}: the template {template!r} is no format string: {error}") from None
    unknown = [field for field in named if field not in parents]
    if unknown:
        raise errors.TemplateError(
            f"component {name!r}: the template names {{{unknown[0]}}}, which is not one of its parents {tuple(parents)}; "
            "write {{ and }} for braces that stand for themselves"
        )


def is_conversation(value: Any) -> bool:
    """Whether a value is a non-empty list of chat messages.

    >>> is_conversation([{"role": "user", "content": "hi"}]), is_conversation(["hi"])
    (True, False)
    """
    return isinstance(value, (list, tuple)) and bool(value) and all(
        isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value
    )


def plain_value(value: Any) -> Any:
    """What a template sees: a completion's text, a table's value as int, everything else as it is."""
    if isinstance(value, Completion):
        return value.text
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def joined(messages: Sequence[Mapping[str, Any]], answer: bool = False) -> str:
    """Chat messages as plain text, for a tokenizer without a chat template: one message is its content alone.

    >>> joined([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], answer=True)
    'System: Be brief.\\n\\nUser: Hi\\n\\nAssistant:'
    """
    if len(messages) == 1:
        return str(messages[0]["content"])
    lines = [f"{str(message['role']).capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*lines, "Assistant:"] if answer else lines)


def fill(name: str, template: Template, values: Mapping[str, Any]) -> Any:
    """The template applied to one row: a str, a list of messages, or None (a function says: not called in this row).

    In a format string None becomes the empty text, and a conversation its plain text; the template "{x}" alone hands a
    conversation on as it is.
    """
    values = {parent: plain_value(value) for parent, value in values.items()}
    if callable(template):
        return template(**values) if _takes(template, values) else template(values)
    alone = next((parent for parent in values if template == "{" + parent + "}"), None)
    if alone is not None and is_conversation(values[alone]):
        return list(values[alone])
    shown = {p: "" if v is None else joined(v) if is_conversation(v) else v for p, v in values.items()}
    try:
        return template.format(**shown)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise errors.TemplateError(f"component {name!r}: the template {template!r} cannot be filled: {error!r}") from error


def _takes(function: Callable, values: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**values)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


# --- ids ------------------------------------------------------------------------------------------------------------------


class Encoder:
    """Texts to token ids and back, for one component.

    Prompts and completions are encoded separately and their ids joined, so no token reaches over the boundary.

    Args:
        name: the component's, for messages.
        tokenizer: a transformers tokenizer.
        stop_ids: the ids that end a completion; the first one is put behind a text.

    Raises:
        TokenizerError: there is no tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any, stop_ids: Sequence[int]):
        if not hasattr(tokenizer, "decode"):
            raise errors.TokenizerError(
                f"component {name!r} needs a tokenizer, found {tokenizer!r}; pass tokenizer=..., or the model as a folder or id"
            )
        self.name, self.tokenizer, self.stop_ids = name, tokenizer, tuple(stop_ids)
        self.bos = self._bos()

    def _bos(self) -> int | None:
        """The BOS id when this tokenizer puts one before a text."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        first = self.tokenizer("a")["input_ids"][:1]
        return bos if bos is not None and list(first) == [bos] else None

    @property
    def pad(self) -> int:
        """The tokenizer's pad id, else an id that ends a completion, else 0: no result depends on it."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else next(iter(self.stop_ids), 0)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, no special tokens added."""
        if not texts:
            return []
        return [tuple(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]

    def prompts(self, filled: Iterable[Any]) -> list[Ids]:
        """Ids of prompts: str or messages. One BOS at the front when the tokenizer has that habit, never an EOS behind.

        Raises:
            TemplateError: no token at all.
        """
        rows = [self._with_bos(ids) for ids in self.encode([self.rendered(row, value) for row, value in enumerate(filled)])]
        empty = next((row for row, ids in enumerate(rows) if not ids), None)
        if empty is not None:
            raise errors.TemplateError(f"component {self.name!r}, row {empty}: the prompt is empty")
        return rows

    def _with_bos(self, ids: Ids) -> Ids:
        if self.bos is None:
            return ids
        while ids[:1] == (self.bos,):
            ids = ids[1:]
        return (self.bos, *ids)

    def rendered(self, row: int, filled: Any) -> str:
        """The prompt's text: through the chat template when the tokenizer has one, where a str is one user message."""
        if not isinstance(filled, str) and not is_conversation(filled):
            raise errors.TemplateError(
                f"component {self.name!r}, row {row}: the template made {filled!r}; a str or a list of messages is needed"
            )
        if not getattr(self.tokenizer, "chat_template", None):
            return filled if isinstance(filled, str) else joined(filled, answer=True)
        messages = [{"role": "user", "content": filled}] if isinstance(filled, str) else [dict(m) for m in filled]
        # text first, then ids: with tokenize=True the return type differs between releases of transformers
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    # -- completions --------------------------------------------------------------------------------------------------
    def completions(self, values: Sequence[Any]) -> list[Ids | None]:
        """Ids of a component's values: those of a `Completion` through its first EOS; a str encoded, then EOS; None stays.

        Raises:
            EmptyCompletionError, CompletionError, TokenizerError: naming component and row.
        """
        texts = [row for row, value in enumerate(values) if isinstance(value, str)]
        encoded = dict(zip(texts, self.encode([values[row] for row in texts])))
        return [self._completion(row, value, encoded.get(row)) for row, value in enumerate(values)]

    def _completion(self, row: int, value: Any, encoded: Ids | None) -> Ids | None:
        if value is None:
            return None
        if isinstance(value, Completion):
            ids = self.through_stop(value.token_ids)
        elif isinstance(value, str):
            ids = self._closed(row, value, encoded or ())
        else:
            raise errors.CompletionError(
                f"component {self.name!r}, row {row}: a value must be a Completion, a str or None, found {type(value).__name__}"
            )
        if not ids:
            raise errors.EmptyCompletionError(
                f"component {self.name!r}, row {row}: the completion is empty, there is nothing to score; drop the row"
            )
        return ids

    def _closed(self, row: int, text: str, ids: Ids) -> Ids:
        if not self.stop_ids:
            raise errors.TokenizerError(
                f"component {self.name!r}, row {row}: neither tokenizer nor model names an end-of-sequence token, so a text "
                "cannot be closed; set tokenizer.eos_token, or pass a Completion"
            )
        while ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        if any(i in self.stop_ids for i in ids):
            raise errors.CompletionError(
                f"component {self.name!r}, row {row}: the text holds an end-of-sequence token before its end: {text[:60]!r}"
            )
        return (*ids, self.stop_ids[0]) if ids else ()

    def through_stop(self, ids: Sequence[int]) -> Ids:
        """The ids up to and including the first that ends a completion."""
        for place, token in enumerate(ids):
            if token in self.stop_ids:
                return tuple(ids[: place + 1])
        return tuple(ids)

    def completion(self, ids: Sequence[int]) -> Completion:
        """What was generated: text without special tokens; truncated when no EOS closes it."""
        ids = self.through_stop(ids)
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Completion(text, ids, truncated=not ids or ids[-1] not in self.stop_ids)


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's EOS first, then those of the model's generation config.

    A small model of a large family inherits its family's ids; those outside its vocabulary cannot be generated.
    """
    generation, vocabulary = getattr(model, "generation_config", None), model.get_input_embeddings().weight.shape[0]
    listed = getattr(generation, "eos_token_id", None)
    own = [i for i in (listed if isinstance(listed, (list, tuple)) else [listed]) if i is not None and i < vocabulary]
    first = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys(int(i) for i in [first, *own] if i is not None))
