"""The value of a language-model component: a text together with the token ids that stand for it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Completion:
    """A generated answer. Two completions are the same when their token ids are (through the first EOS).

    Args:
        text: the decoded answer, without special tokens.
        token_ids: the ids that were generated, the closing EOS included; they, not the text, are what is scored.
        truncated: the answer was cut at max_new_tokens: no EOS, and none is scored.

    >>> Completion("a cat", (5, 6, 2)) == Completion("a  cat", (5, 6, 2))
    True
    >>> str(Completion("a cat", (5, 6, 2)))
    'a cat'
    """

    text: str = field(compare=False)
    token_ids: tuple[int, ...]
    truncated: bool = field(default=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "token_ids", tuple(int(i) for i in self.token_ids))

    def __str__(self) -> str:
        return self.text
