"""One response in the making, and what it is once it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

FinishReason = Literal["stop", "length", "environment", "unfinished"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A response, finished or stopped on the way."""

    sample_id: int
    prompt_index: int
    """Of its prompt, in the call that began it."""
    token_ids: tuple[int, ...]
    """Up to and including the token that ended it."""
    logprobs: tuple[float, ...]
    """One per token, of ``softmax(logits / temperature)`` over the whole vocabulary; 0 where the model did not choose
    it."""
    finish_reason: FinishReason
    """"stop": a stop token or string; "length": no room for more; "environment": the environment failed, see ``error``;
    "unfinished": the call's budget was spent."""
    model_mask: tuple[bool, ...]
    """One per token: True where the model chose it, False where the environment did."""
    versions: tuple[int, ...]
    """One per token: the weights' version when it came."""
    prompt: tuple[int, ...]
    """What it responds to."""
    error: str | None = None


@dataclass(slots=True)
class Sample:
    """A response in the making."""

    sample_id: int
    prompt_number: int
    """What samples of one prompt have in common on this rank, and no others."""
    prompt: Sequence[int]
    max_new_tokens: int
    """Most tokens of the response, whoever chose them."""
    key: int
    """Of its stream of uniform numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_mask: list[bool] = field(default_factory=list)
    earlier_versions: tuple[int, ...] = ()
    """Those of the tokens that were there from the beginning."""
    last_token: int = field(init=False)
    """The token that the next forward reads, last of the prompt or of the response."""
    position: int = field(init=False)
    """Where `last_token` stands in the sequence."""
    num_read: int = field(default=0, init=False)
    """Positions from the sequence's beginning whose keys and values its slot holds."""
    turn: int = field(init=False)
    """Number of the model's turn, from 1."""
    turn_begin: int = field(init=False)
    """Where in `token_ids` it begins."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_index: int = -1
    """Of its prompt, in the call that began it; by default its number."""

    def __post_init__(self) -> None:
        if self.prompt_index < 0:
            self.prompt_index = self.prompt_number
        self.last_token = self.token_ids[-1] if self.token_ids else self.prompt[-1]
        self.position = len(self.prompt) + len(self.token_ids) - 1
        self.turn = 1 + sum(before and not after for before, after in pairwise(self.model_mask))
        others = [index for index, chosen in enumerate(self.model_mask) if not chosen]
        self.turn_begin = others[-1] + 1 if others else 0

    @property
    def turn_is_open(self) -> bool:
        """Whether the model has yet to choose a token in its turn."""
        return self.turn_begin == len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether the response has as many tokens as it may have."""
        return len(self.token_ids) >= self.max_new_tokens

    def append(self, token: int, logprob: float) -> None:
        """Take the next token of the response, the model's choice after reading all that is before it."""
        self.grow((token,), (logprob,))

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """As `append`, of one or more tokens."""
        self.token_ids += tokens
        self.logprobs += logprobs
        self.model_mask += [True] * len(tokens)
        self.last_token = tokens[-1]
        self.position += len(tokens)
        self.num_read = self.position

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that the model did not choose; its next turn begins behind them."""
        self.token_ids.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        self.model_mask.extend([False] * len(tokens))
        self.last_token = tokens[-1]
        self.position += len(tokens)
        self.turn += 1
        self.turn_begin = len(self.token_ids)

    def adopt(self, other: Sample) -> None:
        """Take the response that another rank brought this sample to."""
        self.token_ids, self.logprobs, self.model_mask = other.token_ids, other.logprobs, other.model_mask
        self.last_token, self.position, self.num_read = other.last_token, other.position, other.num_read
        self.turn, self.turn_begin = other.turn, other.turn_begin
        self.finish_reason, self.error = other.finish_reason, other.error

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

    def chosen(self, begin: int, most: int) -> list[int]:
        """Return ``most`` tokens of the response from a place on, as far as the model chose one after the other."""
        mask = self.model_mask[begin : begin + most]
        return self.token_ids[begin : begin + (mask.index(False) if False in mask else most)]

    def completion(self, version: int) -> Completion:
        """Return the response as it is; ``version`` is that of the weights it was taken further with."""
        assert self.finish_reason is not None, f"sample {self.sample_id} is not finished"
        num_new = len(self.token_ids) - len(self.earlier_versions)
        return Completion(
            self.sample_id, self.prompt_index, tuple(self.token_ids), tuple(self.logprobs), self.finish_reason,
            tuple(self.model_mask), (*self.earlier_versions, *[version] * num_new), tuple(self.prompt), self.error,
        )  # fmt: skip
