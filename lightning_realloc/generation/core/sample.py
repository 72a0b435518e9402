"""A response in progress (`Sample`), the rule that ends it (`StopRule`), and the result (`Completion`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

from lightning_realloc.batch.model_input import AnswerInput, ModelInput, positions_between, prompt_digest
from lightning_realloc.errors import GenerationError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "environment", "max_turns", "length", "failure", "unfinished"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A response as `GenerationEngine.generate` returns it."""

    sample_id: int
    prompt_index: int
    """Index of the prompt in the call that started the response."""
    token_ids: tuple[int, ...]
    """Tokens of the response, including the one that ended it."""
    logprobs: tuple[float, ...]
    """One per token, of ``softmax(logits / temperature)`` over the whole vocabulary; 0 for an environment's tokens."""
    finish_reason: FinishReason
    """"stop": the model ended it, by a stop token or string. "environment": the environment ended it. "max_turns": it
    has as many turns as a conversation may. "length": no room for more tokens. "failure": the environment failed, see
    ``error``. "unfinished": the call's budget was spent."""
    model_mask: tuple[bool, ...]
    """One per token: True if the model chose it, False if the environment did."""
    versions: tuple[int, ...]
    """One per token: the version of the weights that generated it."""
    input: ModelInput
    """The prompt, and the model's further inputs."""
    error: str | None = None
    """Message of the environment's failure; None if there was none."""
    answers: tuple[AnswerInput, ...] = ()
    """Answers of the environment that show images."""
    experts: Tensor | None = field(default=None, compare=False, repr=False)
    """(N, layers * chosen) experts of the tokens that the model has read, all of prompt and response but
    the last one; those of the first layer come first. None unless the engine records them."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.input.token_ids


@dataclass(slots=True)
class Sample:
    """A response in progress."""

    sample_id: int
    prompt_number: int
    """Id of the prompt in this call on this rank; samples of one prompt share it."""
    input: ModelInput
    """The prompt, and the model's further inputs."""
    max_new_tokens: int
    """Most tokens of the response, including the environment's."""
    key: int
    """Key of the sample's random numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_mask: list[bool] = field(default_factory=list)
    earlier_versions: tuple[int, ...] = ()
    """Versions of the weights that generated the first tokens: an earlier call's, or those before an update."""
    last_token: int = field(init=False)
    """Token that the next forward reads: the last one of the prompt or the response."""
    position: int = field(init=False)
    """Position of ``last_token`` in the sequence."""
    num_read: int = field(default=0, init=False)
    """Number of first positions whose keys and values the slot holds."""
    turn: int = field(init=False)
    """Number of the model's current turn, starting at 1."""
    turn_begin: int = field(init=False)
    """Index into ``token_ids`` at which the turn begins."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_index: int = -1
    """Index of the prompt in the call that started the response; by default ``prompt_number``."""
    experts: Tensor | None = field(default=None, compare=False, repr=False)
    """Experts of the positions that were read at the end of the latest turn; see `Completion`."""
    max_turn_tokens: int | None = None
    """Most tokens of a turn of the model; None: as many as the response."""
    answers: list[AnswerInput] = field(default_factory=list)
    """Answers of the environment that show images."""

    def __post_init__(self) -> None:
        if self.prompt_index < 0:
            self.prompt_index = self.prompt_number
        self.last_token = self.token_ids[-1] if self.token_ids else self.prompt[-1]
        self.position = len(self.prompt) + len(self.token_ids) - 1
        self.turn = 1 + sum(before and not after for before, after in pairwise(self.model_mask))
        others = [index for index, chosen in enumerate(self.model_mask) if not chosen]
        self.turn_begin = others[-1] + 1 if others else 0

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.input.token_ids

    @property
    def turn_is_open(self) -> bool:
        """Whether the model has not yet chosen a token in this turn."""
        return self.turn_begin == len(self.token_ids)

    @property
    def room(self) -> int:
        """Most further tokens of the response."""
        return self.max_new_tokens - len(self.token_ids)

    @property
    def turn_room(self) -> int:
        """Most further tokens of the turn."""
        if self.max_turn_tokens is None:
            return self.room
        return min(self.room, self.max_turn_tokens - (len(self.token_ids) - self.turn_begin))

    @property
    def is_full(self) -> bool:
        """Whether the response has ``max_new_tokens``."""
        return len(self.token_ids) >= self.max_new_tokens

    @property
    def max_length(self) -> int:
        """Most positions of prompt and response together."""
        return len(self.prompt) + self.max_new_tokens

    def append(self, token: int, logprob: float) -> None:
        """Add a token that the model chose."""
        self.grow((token,), (logprob,))

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add one or more tokens that the model chose; the slot then holds all positions but the last."""
        self.token_ids += tokens
        self.logprobs += logprobs
        self.model_mask += [True] * len(tokens)
        self.last_token = tokens[-1]
        self.position += len(tokens)
        self.num_read = self.position

    def extend(self, answer: ModelInput) -> None:
        """Add an environment's answer and begin the model's next turn."""
        tokens = answer.token_ids
        if answer.extras:
            self.answers.append(AnswerInput(len(self.token_ids), answer))
        self.token_ids.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        self.model_mask.extend([False] * len(tokens))
        self.last_token = tokens[-1]
        self.position += len(tokens)
        self.turn += 1
        self.turn_begin = len(self.token_ids)

    def adopt(self, other: Sample) -> None:
        """Replace the response by the one that another rank generated for this sample."""
        self.token_ids, self.logprobs, self.model_mask = other.token_ids, other.logprobs, other.model_mask
        self.last_token, self.position, self.num_read = other.last_token, other.position, other.num_read
        self.turn, self.turn_begin = other.turn, other.turn_begin
        self.answers, self.experts = other.answers, other.experts
        self.finish_reason, self.error = other.finish_reason, other.error

    @property
    def inputs(self) -> list[tuple[int, ModelInput]]:
        """The prompt and the answers that show images, with the place of each one's first token in the sequence."""
        length = len(self.prompt)
        return [(0, self.input), *((length + each.begin, each.input) for each in self.answers)]

    def extras_between(self, begin: int, end: int) -> list[Mapping[str, Tensor]]:
        """Return the further inputs of the prompt and of each answer that begins at these places of the sequence."""
        return [part.extras for place, part in self.inputs if begin <= place < end and part.extras]

    def positions_between(self, begin: int, end: int) -> Tensor | None:
        """Return the model's positions (3, end - begin) of the tokens at these places; None: their places."""
        return positions_between(self.inputs, begin, end)

    @property
    def shift(self) -> int:
        """What the model's position of a token after the sequence is more than its place."""
        return self.input.shift + sum(each.input.shift for each in self.answers)

    def context_key(self, num_answers: int | None = None) -> int:
        """Return a key of the prompt and of the first answers that show images, as of `ModelInput`; None: of all."""
        answers = self.answers[:num_answers]
        if not answers:
            return self.input.prompt_key
        return prompt_digest([self.input.prompt_key, *(each.input.prompt_key for each in answers)], {})

    @property
    def sequence(self) -> list[int]:
        """Tokens of the prompt and the response so far."""
        return [*self.prompt, *self.token_ids]

    def tokens(self, begin: int, end: int) -> list[int]:
        """Return the tokens of the sequence, prompt and response, from ``begin`` to ``end``."""
        length = len(self.prompt)
        if begin >= length:
            return self.token_ids[begin - length : end - length]
        return [*self.prompt[begin:end], *self.token_ids[: max(end - length, 0)]]

    def token_at(self, position: int) -> int:
        """Return the token at a position of the sequence."""
        length = len(self.prompt)
        return self.prompt[position] if position < length else self.token_ids[position - length]

    def chosen(self, begin: int, most: int) -> list[int]:
        """Return up to ``most`` tokens of the response from ``begin`` on, ending before an environment's token."""
        mask = self.model_mask[begin : begin + most]
        return self.token_ids[begin : begin + (mask.index(False) if False in mask else most)]

    def weights_updated(self, before: int) -> None:
        """Record that all tokens so far are of the version ``before`` or an earlier one."""
        self.earlier_versions += (before,) * (len(self.token_ids) - len(self.earlier_versions))

    def completion(self, version: int) -> Completion:
        """Return the result; ``version`` is that of the weights that generated the latest tokens."""
        assert self.finish_reason is not None, f"sample {self.sample_id} is not finished"
        num_new = len(self.token_ids) - len(self.earlier_versions)
        return Completion(
            self.sample_id, self.prompt_index, tuple(self.token_ids), tuple(self.logprobs), self.finish_reason,
            tuple(self.model_mask), (*self.earlier_versions, *[version] * num_new), self.input, self.error,
            tuple(self.answers), self.experts,
        )  # fmt: skip


class Tokenizer(Protocol):
    """Tokenizer methods that stop strings need."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens."""
        ...


class StopRule:
    """Ends a turn at stop tokens, stop strings and the length limit.

    Args:
        strings: Stop strings; they need a ``tokenizer``.
        min_new_tokens: Number of first tokens in which no stop token may occur and no stop string ends the turn.
        never_drawn: Tokens that the model may not choose, such as those that stand for parts of an image.
    """

    def __init__(
        self,
        *,
        token_ids: frozenset[int],
        strings: tuple[str, ...] = (),
        tokenizer: Tokenizer | None = None,
        min_new_tokens: int = 0,
        never_drawn: frozenset[int] = frozenset(),
    ) -> None:
        if strings and tokenizer is None:
            raise GenerationError(
                f"stop_strings={strings!r} need a tokenizer; pass GenerationEngine(model, tokenizer=...) "
                "or use stop_token_ids"
            )
        self.token_ids = token_ids
        self._min_new_tokens = min_new_tokens
        self.never_drawn = sorted(never_drawn)
        self._strings = strings
        self._tokenizer = tokenizer
        self._last_characters = frozenset(string[-1] for string in strings)
        # A character takes at most four byte-level tokens; as many again may be tokens without text.
        self._window = 8 * max((len(string) for string in strings), default=0)
        self._may_complete: dict[int, bool] = {}

    def update(self, sample: Sample) -> bool:
        """Set the finish reason if the sample's last token ends its turn; return whether it does."""
        if sample.last_token in self.token_ids or (self._strings and self._ends_a_string(sample)):
            sample.finish_reason = "stop"
        elif sample.turn_room <= 0:
            sample.finish_reason = "length" if sample.is_full else "stop"
        return sample.finish_reason is not None

    def take(self, sample: Sample, tokens: Sequence[int], logprobs: Sequence[float]) -> int:
        """Add the model's tokens to the sample up to the one that ends its turn, and return their number."""
        if not self._strings:  # stop tokens can be found without decoding
            count = len(tokens)
            if count > 1:
                count = min(count, sample.turn_room)
                count = next((i + 1 for i in range(count) if tokens[i] in self.token_ids), count)
                tokens, logprobs = tokens[:count], logprobs[:count]
            sample.grow(tokens, logprobs)
            self.update(sample)
            return count
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            sample.append(token, logprob)
            if self.update(sample):
                return count
        return len(tokens)

    def already_ends(self, sample: Sample) -> bool:
        """Do the same as :meth:`update` for a response that an earlier call started."""
        if not sample.turn_is_open:
            return self.update(sample)
        if sample.is_full:
            sample.finish_reason = "length"
        return sample.finish_reason is not None

    def forbidden(
        self, running: Sequence[Sample], drafts: Sequence[Sequence[int]]
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return rows of the logits, and for each a token that is not allowed in it; None without any.

        Each sample has one row for its last token and one for each drafted token. Stop tokens are not allowed early.
        """
        if not (self.never_drawn or (self._min_new_tokens and self.token_ids)):
            return None
        stops, pairs, start = sorted(self.token_ids), list[tuple[int, int]](), 0
        for sample, draft in zip(running, drafts, strict=True):
            end = start + len(draft) + 1
            early = range(start, min(end, start + self._min_new_tokens - len(sample.token_ids)))
            pairs += [(row, token) for row in early for token in stops]
            pairs += [(row, token) for row in range(start, end) for token in self.never_drawn]
            start = end
        return ([row for row, _ in pairs], [token for _, token in pairs]) if pairs else None

    def _ends_a_string(self, sample: Sample) -> bool:
        if len(sample.token_ids) < self._min_new_tokens or not self._may_complete_a_string(sample.last_token):
            return False
        # Decode this turn only, after one token of context: some tokenizers drop a leading space.
        first = max(sample.turn_begin, len(sample.token_ids) - self._window)
        context = [sample.token_ids[first - 1] if first else sample.prompt[-1]]
        text = self._decode([*context, *sample.token_ids[first:]])
        begin = len(self._decode(context))
        # A stop string within the first `min_new_tokens` was ignored. A character with missing bytes does not count:
        # the string may end in it.
        early = sample.token_ids[first : max(self._min_new_tokens - 1, 0)]
        ignored = len(self._decode([*context, *early]).rstrip("\ufffd")) if early else 0
        return any(text.find(string, max(begin, ignored + 1 - len(string))) >= 0 for string in self._strings)

    def _may_complete_a_string(self, token: int) -> bool:
        """Return whether a stop string can end in this token; most tokens then need no decoding."""
        known = self._may_complete.get(token)
        if known is None:
            # Twice, because some tokenizers drop a leading space.
            text = self._decode([token, token])
            known = self._may_complete[token] = "\ufffd" in text or any(c in self._last_characters for c in text)
        return known

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
