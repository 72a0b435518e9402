"""Parts of responses: which tokens of the model are thoughts, calls of tools, or answer, by the text of its turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from lightning_realloc.environments.turns.turn_parser import MOST_TOKENS_BEFORE, Part, TurnParser

_INCOMPLETE = "\ufffd"
"""What tokenizers decode bytes to that are no character."""
_MOST_TOKENS_PER_CHARACTER = 8
"""Tokens after which bytes that are no character are no longer taken for the beginning of one. UTF-8 has four."""


class TurnParts:
    """Finds the part of each token that the model wrote.

    Args:
        tokenizer: The model's.
        parser: Parser of its turns.
        stop_token_ids: Tokens that end a turn; they belong to its last part.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, parser: TurnParser, *, stop_token_ids: Collection[int]
    ) -> None:
        self._texts = TokenTexts(tokenizer)
        self._parser = parser
        self._stops = stop_token_ids

    def of_response(
        self, prompt: Sequence[int], response: Sequence[int], model_mask: Sequence[int]
    ) -> list[Part | None]:
        """Return the part of each token of a response, to which a turn's text assigns its first character.

        Args:
            prompt: Tokens before the response, or the last `MOST_TOKENS_BEFORE` of them.
            response: Its tokens.
            model_mask: Whether the model wrote a token; the others are in no part.
        """
        parts: list[Part | None] = []
        for chosen, run in groupby(model_mask):
            begin, length = len(parts), sum(1 for _ in run)
            if not chosen:
                parts += [None] * length
                continue
            before = [*prompt[-MOST_TOKENS_BEFORE:], *response[max(0, begin - MOST_TOKENS_BEFORE) : begin]]
            parts += self._of_turn(response[begin : begin + length], before[-MOST_TOKENS_BEFORE:])
        return parts

    def _of_turn(self, own: Sequence[int], before: Sequence[int]) -> Iterator[Part]:
        end = len(own) - int(own[-1] in self._stops)
        text, starts = self._texts.decoded(own[:end])
        (prompt, _), (stop, _) = self._texts.decoded(before), self._texts.decoded(own[end:])
        places, parts = zip(*self._parser.part_starts(text, before=prompt, end=stop), strict=True)
        return (parts[bisect_right(places, start) - 1] for start in (*starts, *[len(text)] * (len(own) - end)))


class TokenTexts:
    """Decodes each token of a vocabulary once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        """Text of a token that others precede; the empty text for a token that may hold a part of a character."""

    def decoded(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of tokens, special ones included, and the character in it where each token begins.

        A token that begins within a character begins where the character does.
        """
        texts, starts, length = [], [], 0
        held: list[int] = []  # tokens whose bytes may be a part of a character
        held_text = ""
        for token in token_ids:
            text = self._text(token)
            is_settled = text or not held_text.endswith(_INCOMPLETE) or len(held) == _MOST_TOKENS_PER_CHARACTER
            if held and is_settled:
                texts.append(held_text)
                length += len(held_text)
                held, held_text = [], ""
            starts.append(length + len(held_text.rstrip(_INCOMPLETE)))
            if text:
                texts.append(text)
                length += len(text)
            else:
                held.append(token)
                held_text = self._decode(held)
        return "".join(texts) + held_text, starts

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            # Twice, since at the start of a text some tokenizers leave out a space.
            once, twice = self._decode([token]), self._decode([token, token])
            text = twice[len(once) :] if _INCOMPLETE not in twice else ""
            self._texts[token] = text
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
