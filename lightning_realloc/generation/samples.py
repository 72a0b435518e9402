"""One response in the making, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lightning_realloc.errors import GenerationError

FinishReason = Literal["stop", "length"]


class Tokenizer(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished response."""

    sample_id: int
    prompt_index: int
    token_ids: tuple[int, ...]
    """Up to and including the token that ended it."""
    logprobs: tuple[float, ...]
    """One per token, of ``softmax(logits / temperature)`` over the whole vocabulary."""
    finish_reason: FinishReason
    """"stop": a stop token or string; "length": no room for more."""


@dataclass(slots=True)
class Sample:
    """A response in the making."""

    sample_id: int
    prompt_index: int
    prompt: Sequence[int]
    max_new_tokens: int
    key: int
    """Of its stream of uniform numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last_token: int = field(init=False)
    """The token that the next forward reads, last of the prompt or of the response."""
    position: int = field(init=False)
    """Where `last_token` stands in the sequence."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.last_token = self.prompt[-1]
        self.position = len(self.prompt) - 1

    def append(self, token: int, logprob: float) -> None:
        """Take the next token of the response."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.last_token = token
        self.position += 1

    def tokens(self, begin: int, end: int) -> list[int]:
        """Return the tokens at these positions of prompt and response."""
        length = len(self.prompt)
        if begin >= length:
            return self.token_ids[begin - length : end - length]
        return [*self.prompt[begin:end], *self.token_ids[: max(end - length, 0)]]

    def token_at(self, position: int) -> int:
        """Return the token at a position of prompt and response."""
        length = len(self.prompt)
        return self.prompt[position] if position < length else self.token_ids[position - length]

    def completion(self) -> Completion:
        """Return the finished response."""
        assert self.finish_reason is not None, f"sample {self.sample_id} is not finished"
        return Completion(
            self.sample_id, self.prompt_index, tuple(self.token_ids), tuple(self.logprobs), self.finish_reason
        )


class StopRule:
    """Decides after each token whether a response is over."""

    def __init__(
        self,
        *,
        token_ids: frozenset[int],
        strings: tuple[str, ...] = (),
        tokenizer: Tokenizer | None = None,
        min_new_tokens: int = 0,
    ) -> None:
        if strings and tokenizer is None:
            raise GenerationError(
                f"stop_strings={strings!r} need a tokenizer; pass GenerationEngine(model, tokenizer=...) "
                "or use stop_token_ids"
            )
        self.token_ids = token_ids
        self._min_new_tokens = min_new_tokens
        self._strings = strings
        self._tokenizer = tokenizer
        self._last_characters = frozenset(string[-1] for string in strings)
        # A character takes at most four byte-level tokens; as many again for tokens without text of their own.
        self._window = 8 * max((len(string) for string in strings), default=0)
        self._may_complete: dict[int, bool] = {}

    def update(self, sample: Sample) -> bool:
        """Set the sample's finish reason if its newest token ends it; return whether it is over."""
        if sample.last_token in self.token_ids or (self._strings and self._ends_a_string(sample)):
            sample.finish_reason = "stop"
        elif len(sample.token_ids) >= sample.max_new_tokens:
            sample.finish_reason = "length"
        return sample.finish_reason is not None

    def _ends_a_string(self, sample: Sample) -> bool:
        if len(sample.token_ids) < self._min_new_tokens or not self._may_complete_a_string(sample.last_token):
            return False
        # One token of context in front: some tokenizers drop a leading space.
        context = sample.token_ids[-self._window - 1 : -self._window] or [sample.prompt[-1]]
        text = self._decode([*context, *sample.token_ids[-self._window :]])
        begin = len(self._decode(context))
        return any(text.find(string, begin) >= 0 for string in self._strings)

    def _may_complete_a_string(self, token: int) -> bool:
        """Return whether a stop string can end in this token: so most tokens cost a look-up and no decoding."""
        known = self._may_complete.get(token)
        if known is None:
            text = self._decode([token])
            known = self._may_complete[token] = "\ufffd" in text or any(c in self._last_characters for c in text)
        return known

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
