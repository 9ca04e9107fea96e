"""Where a language-model judge's replies come from: an OpenAI-compatible endpoint, or a model in this process."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from sysdpo_lab import errors

Messages = Sequence[Mapping[str, str]]


class ChatModel(Protocol):
    """What a pairwise judge asks: a name that identifies model and settings, and replies as they come."""

    name: str

    def replies(self, conversations: Sequence[Messages]) -> Iterator[tuple[int, str]]:
        """(index of the conversation, its reply), in any order."""


class OpenAIModel:
    """Chat completions of any server that speaks OpenAI's protocol, through the official client, at temperature 0.

    Refused or failing requests (rate limits, 5xx, timeouts) are repeated by the client with growing pauses, up to
    `retries` times; `Retry-After` is obeyed.

    Args:
        model: the model's name at the server.
        base_url: for instance "http://localhost:8000/v1"; None is OpenAI's own.
        key_variable: environment variable that holds the key; a local server needs none. The key is never stored.
        retries: repeats of a failed request; larger waits longer before giving up.
        timeout: seconds for one request.
        workers: requests at the same time.
        max_tokens: longest reply.

    Raises:
        MissingExtraError: the package `openai` is not installed.
        JudgeUnavailableError: no key, no server, or a refusal that repeating does not cure.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        key_variable: str = "OPENAI_API_KEY",
        retries: int = 5,
        timeout: float = 60.0,
        workers: int = 4,
        max_tokens: int = 16,
    ):
        try:
            import openai
        except ImportError as error:
            raise errors.MissingExtraError(
                "an endpoint judge needs the package openai: pip install 'sysdpo-lab[judge]'"
            ) from error
        key = os.environ.get(key_variable)
        if key is None and base_url is None:
            raise errors.JudgeUnavailableError(
                f"no key: set {key_variable}, or name a server of your own with base_url"
            )
        self.model, self.workers, self.max_tokens = model, workers, max_tokens
        self.place = base_url or "https://api.openai.com/v1"
        self.name = f"{model} at {self.place}, temperature 0, max_tokens {max_tokens}"
        self._client = openai.OpenAI(base_url=base_url, api_key=key or "none", max_retries=retries, timeout=timeout)

    def replies(self, conversations: Sequence[Messages]) -> Iterator[tuple[int, str]]:
        """Replies as they come. On a failure those that came are yielded first; what was not begun is not asked."""
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {pool.submit(self._ask, messages): index for index, messages in enumerate(conversations)}
            failure = None
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                try:
                    yield futures[future], future.result()
                except errors.JudgeUnavailableError as error:
                    failure = failure or error
                    pool.shutdown(wait=False, cancel_futures=True)
            if failure:
                raise failure

    def _ask(self, messages: Messages) -> str:
        import openai

        try:
            answer = self._client.chat.completions.create(
                model=self.model, messages=list(map(dict, messages)), temperature=0.0, max_tokens=self.max_tokens
            )
        except openai.APIConnectionError as error:
            raise errors.JudgeUnavailableError(
                f"{self.place}: no answer ({error}); is the server running, is there a network?"
            ) from error
        except openai.APIStatusError as error:
            raise errors.JudgeUnavailableError(
                f"{self.place}: status {error.status_code} for model {self.model!r}; {_advice(error.status_code)}"
            ) from error
        content = answer.choices[0].message.content if answer.choices else None
        return content or ""


def _advice(status: int) -> str:
    """What to do about a status that repeating did not cure."""
    known = {
        401: "the key is missing or wrong",
        403: "the key may not use this model",
        404: "is the model's name right?",
    }
    known[429] = "the limit of requests is reached; go on later, the replies so far are kept"
    return known.get(status, "the server failed; go on later, the replies so far are kept")


class LocalModel:
    """A causal language model in this process as a judge, decoded greedily in batches.

    Args:
        model: a transformers model with its tokenizer, or a source for `loading.load_causal_lm`.
        name: identifies the model in the store of replies; default the source or the weights' fingerprint.
        max_tokens: longest reply.
        batch_size: conversations a forward pass.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        max_tokens: int = 16,
        batch_size: int = 8,
    ):
        from sysdpo_lab import loading
        from sysdpo_lab.components import CausalLM

        self._component = CausalLM("judge", ["messages"], model, tokenizer, "{messages}", max_new_tokens=max_tokens)
        if name is None:
            name = str(model) if isinstance(model, (str, Path)) else loading.fingerprint(model)
        self.name, self.batch_size = f"{name}, greedy, max_tokens {max_tokens}", batch_size

    def replies(self, conversations: Sequence[Messages]) -> Iterator[tuple[int, str]]:
        """Replies batch by batch."""
        for start in range(0, len(conversations), self.batch_size):
            batch = [list(messages) for messages in conversations[start : start + self.batch_size]]
            for row, reply in enumerate(self._component.greedy({"messages": batch})):
                yield start + row, reply.text
