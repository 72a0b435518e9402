"""Build stop rules from a model, its tokenizer and `SamplingParams`, and check stop strings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sized

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.model_config import eos_ids_of, vocabulary_of
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import StopRule, Tokenizer
from lightning_realloc.runtime.model.image_inputs import placeholder_ids

_log = logging.getLogger(__name__)


def check_tokenizer(tokenizer: object) -> None:
    """Raise GenerationError for a tokenizer that cannot decode, for example its name."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise GenerationError(
            f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__}, which cannot decode; load it first: "
            "AutoTokenizer.from_pretrained(...)"
        )


def stop_rule_of(model: nn.Module, params: SamplingParams, tokenizer: Tokenizer | None) -> StopRule:
    """Return the stop rule of ``params`` and the end-of-sequence tokens of model and tokenizer.

    Chat models end turns with the tokenizer's token, which their base model's configuration may not name.
    """
    vocabulary = vocabulary_of(model)
    unknown = [token for token in params.stop_token_ids if not 0 <= token < vocabulary]
    if unknown:
        raise GenerationError(
            f"stop_token_ids={unknown} can never occur: the model's vocabulary has {vocabulary} tokens; use ids of the "
            "model's own tokenizer, or leave them out"
        )
    own = frozenset[int]()
    if not params.ignore_eos:
        eos = getattr(tokenizer, "eos_token_id", None)
        own = eos_ids_of(model) | (frozenset({eos}) if isinstance(eos, int) else frozenset())
    stops = frozenset(params.stop_token_ids) | {token for token in own if token < vocabulary}
    placeholders = placeholder_ids(model)
    if params.min_new_tokens and len(stops) == vocabulary:
        raise GenerationError(
            f"min_new_tokens={params.min_new_tokens} leaves nothing to draw, since all {vocabulary} tokens of the "
            "vocabulary end a response; lower it to 0, or name fewer stop_token_ids"
        )
    return StopRule(
        token_ids=stops - placeholders,
        strings=params.stop_strings,
        tokenizer=tokenizer,
        min_new_tokens=params.min_new_tokens,
        never_drawn=placeholders,
    )


class StopStringCheck:
    """Checks stop strings once each: refuses impossible ones and warns about unlikely ones."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._checked: set[str] = set()

    def __call__(self, strings: Iterable[str]) -> None:
        """Check the strings that are new.

        Raises:
            GenerationError: for a string with characters that no token holds.
        """
        new = set(strings) - self._checked
        if not new or self._tokenizer is None:
            return
        check_possible(new, self._tokenizer)
        if unlikely := respelled(new, self._tokenizer):
            _log.warning(
                "stop_strings change when the tokenizer encodes and decodes them, so responses may never hold them: "
                "%s; spell them as it does, and leave out what it has no tokens for",
                ", ".join(f"{string!r} becomes {text!r}" for string, text in sorted(unlikely.items())),
            )
        self._checked |= new


def check_possible(strings: Iterable[str], tokenizer: Tokenizer) -> None:
    """Raise GenerationError for stop strings with characters that no token holds.

    White space is skipped: some tokenizers insert it between tokens. Byte-level tokenizers are skipped too: they build
    characters from several tokens. The first few hundred tokens show whether a tokenizer is one.
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
    """Return the stop strings that encoding and decoding changes, with their new spelling.

    Examples are tokenizers that put spaces between tokens, or know lower case only.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return {}
    spelled = {string: tokenizer.encode(string, add_special_tokens=False) for string in strings}
    texts = {string: tokenizer.decode(ids, skip_special_tokens=False) for string, ids in spelled.items()}
    return {string: text for string, text in texts.items() if string not in text}
