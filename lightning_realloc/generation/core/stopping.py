"""Stop rules: the tokens and strings that end a turn."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Sized
from typing import Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.model_config import eos_ids_of, vocabulary_of
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.sampling import SamplingParams

_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens."""
        ...


class StopRule:
    """Decides after each token that the model chose whether its turn is over."""

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
        """Set the sample's finish reason if its newest token ends its turn; return whether it does."""
        if sample.last_token in self.token_ids or (self._strings and self._ends_a_string(sample)):
            sample.finish_reason = "stop"
        elif sample.is_full:
            sample.finish_reason = "length"
        return sample.finish_reason is not None

    def take(self, sample: Sample, tokens: Sequence[int], logprobs: Sequence[float]) -> int:
        """Give the sample tokens that the model chose, up to the one that ends its turn; return how many these are.

        Its finish reason is then set as by :meth:`update`.
        """
        if not self._strings:  # what ends it can be seen before
            count = min(len(tokens), sample.max_new_tokens - len(sample.token_ids))
            count = next((i + 1 for i in range(count) if tokens[i] in self.token_ids), count)
            sample.grow(tokens[:count], logprobs[:count])
            self.update(sample)
            return count
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            sample.append(token, logprob)
            if self.update(sample):
                return count
        return len(tokens)

    def already_ends(self, sample: Sample) -> bool:
        """As :meth:`update`, for a response that was begun in another call."""
        if not sample.turn_is_open:
            return self.update(sample)
        if sample.is_full:
            sample.finish_reason = "length"
        return sample.finish_reason is not None

    def _ends_a_string(self, sample: Sample) -> bool:
        if len(sample.token_ids) < self._min_new_tokens or not self._may_complete_a_string(sample.last_token):
            return False
        # Of this turn alone; with one token of context in front, since some tokenizers drop a leading space.
        first = max(sample.turn_begin, len(sample.token_ids) - self._window)
        context = [sample.token_ids[first - 1] if first else sample.prompt[-1]]
        text = self._decode([*context, *sample.token_ids[first:]])
        begin = len(self._decode(context))
        passed_over = self._num_passed_over(sample, first, context)
        return any(text.find(string, max(begin, passed_over + 1 - len(string))) >= 0 for string in self._strings)

    def _num_passed_over(self, sample: Sample, first: int, context: list[int]) -> int:
        """Return how many characters, from ``context`` and ``first`` on, a stop string must end behind.

        Without ``min_new_tokens`` none: an earlier end would have been the response's.
        """
        early = sample.token_ids[first : max(self._min_new_tokens - 1, 0)]
        # A character whose last bytes are missing does not count: the string may end in it.
        return len(self._decode([*context, *early]).rstrip("\ufffd")) if early else 0

    def _may_complete_a_string(self, token: int) -> bool:
        """Return whether a stop string can end in this token: so most tokens cost a look-up and no decoding."""
        known = self._may_complete.get(token)
        if known is None:
            # Twice, since some tokenizers drop a space in front of what they are given.
            text = self._decode([token, token])
            known = self._may_complete[token] = "\ufffd" in text or any(c in self._last_characters for c in text)
        return known

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def check_tokenizer(tokenizer: object) -> None:
    """Raise GenerationError for what is given as a tokenizer and cannot decode, such as its name."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise GenerationError(
            f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__}, which cannot decode; load it first: "
            "AutoTokenizer.from_pretrained(...)"
        )


def stop_rule_of(model: nn.Module, params: SamplingParams, tokenizer: Tokenizer | None) -> StopRule:
    """Return the rule that end-of-sequence tokens, the model's own and the tokenizer's, and ``params`` make together.

    Chat models are taught the tokenizer's, which the configuration of the model that they began as does not name.
    """
    vocabulary = vocabulary_of(model)
    unknown = [token for token in params.stop_token_ids if not 0 <= token < vocabulary]
    if unknown:
        raise GenerationError(
            f"stop_token_ids={unknown} can never occur: the model's vocabulary has {vocabulary} tokens; use ids of the "
            "model's own tokenizer, or leave them out"
        )
    own = frozenset[int]() if params.ignore_eos else eos_ids_of(model) | _eos_ids_of_text(tokenizer)
    stops = frozenset(params.stop_token_ids) | {token for token in own if token < vocabulary}
    if params.min_new_tokens and len(stops) == vocabulary:
        raise GenerationError(
            f"min_new_tokens={params.min_new_tokens} leaves nothing to draw, since all {vocabulary} tokens of the "
            "vocabulary end a response; lower it to 0, or name fewer stop_token_ids"
        )
    return StopRule(
        token_ids=stops,
        strings=params.stop_strings,
        tokenizer=tokenizer,
        min_new_tokens=params.min_new_tokens,
    )


def _eos_ids_of_text(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokenizer's end-of-sequence token, if it has one."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset({eos}) if isinstance(eos, int) else frozenset()


class StopStringCheck:
    """Refuses stop strings that can never occur, and warns of those that hardly ever do; of each of them once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Check by this tokenizer; without one there are no stop strings."""
        self._tokenizer = tokenizer
        self._possible: set[str] = set()

    def __call__(self, strings: Iterable[str]) -> None:
        """Check those that were not checked before.

        Raises:
            GenerationError: naming the characters that no token holds.
        """
        unchecked = set(strings) - self._possible
        if not unchecked or self._tokenizer is None:
            return
        check_possible(unchecked, self._tokenizer)
        if unlikely := respelled(unchecked, self._tokenizer):
            _log.warning(
                "stop_strings become others when the tokenizer encodes and decodes them, so that responses may never "
                "hold them: %s; spell them as it does, and leave out what it has no tokens for",
                ", ".join(f"{string!r} becomes {text!r}" for string, text in sorted(unlikely.items())),
            )
        self._possible |= unchecked


def check_possible(strings: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse stop strings with characters that no token holds, so that they would never end anything.

    White space is left out, since some tokenizers put it between tokens; and so are tokenizers that make characters of
    several tokens, which those that work on bytes do. They are recognised within their first few hundred tokens.

    Raises:
        GenerationError: naming the characters.
    """
    missing = {character for string in strings for character in string if not character.isspace()}
    for token in range(len(tokenizer) if isinstance(tokenizer, Sized) else 0):
        text = tokenizer.decode([token], skip_special_tokens=False)
        missing.difference_update(text)
        if not missing or "\ufffd" in text:
            return
    if missing and isinstance(tokenizer, Sized):
        impossible = [string for string in strings if missing.intersection(string)]
        raise GenerationError(
            f"stop_strings {impossible!r} can never occur: no token of the tokenizer holds {sorted(missing)}; spell "
            "them as the tokenizer does (its case, its quotes), or leave them out"
        )


def respelled(strings: Iterable[str], tokenizer: Tokenizer) -> dict[str, str]:
    """Return stop strings that hardly ever occur, and what becomes of each when it is encoded and decoded again.

    So it is where a tokenizer puts spaces between tokens, or knows lower case alone. Only what can encode is asked.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return {}
    spelled = {string: tokenizer.encode(string, add_special_tokens=False) for string in strings}
    texts = {string: tokenizer.decode(ids, skip_special_tokens=False) for string, ids in spelled.items()}
    return {string: text for string, text in texts.items() if string not in text}
