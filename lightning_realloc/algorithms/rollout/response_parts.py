"""Columns for the parts of responses: how many tokens each part has, and which are learned."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.rollout_columns import PART_LENGTHS, model_mask
from lightning_realloc.algorithms.losses.functional import kept_tokens, whiten
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.environments.turns.turn_parser import MOST_TOKENS_BEFORE, PARTS, Part, TurnParser
from lightning_realloc.environments.turns.turn_parts import TurnParts
from lightning_realloc.errors import ConfigError

_LEARNED_MASK = "learned_mask"
"""Ragged bool: True for tokens of the parts that are learned. Without the column, all parts are."""


def checked_parts(learned_parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the value of the setting ``learned_parts``; ConfigError unless it names at least one part."""
    known = ", ".join(map(repr, PARTS))
    if isinstance(learned_parts, str) or not isinstance(learned_parts, Sequence) or not learned_parts:
        raise ConfigError(
            f"learned_parts={learned_parts!r} must list parts of responses, at least one of {known}, as in "
            f"('thinking', 'answer'); leave it out to learn all"
        )
    if unknown := [part for part in learned_parts if part not in PARTS]:
        raise ConfigError(f"learned_parts names {unknown[0]!r}, and the parts of responses are {known}")
    return tuple(learned_parts)


class PartColumns:
    """Adds the columns of parts to responses.

    Args:
        parts: Finds the parts.
        counted: Parts whose numbers of tokens are logged.
        learned: Parts that are learned.
    """

    def __init__(self, parts: TurnParts, *, counted: Sequence[Part], learned: Sequence[Part]) -> None:
        self._parts = parts
        self._counted = counted
        self._learned = learned

    def __call__(self, samples: Samples) -> Samples:
        """Return the samples with (B,) numbers of tokens by part and, if not all parts are learned, a mask."""
        mask, prompts = model_mask(samples), samples.ragged("prompt_ids")
        responses = samples.ragged("response_ids").to_lists()
        masks = [[True] * len(response) for response in responses] if mask is None else mask.to_lists()
        ends = [ids[-MOST_TOKENS_BEFORE:].tolist() for ids in prompts.split()]
        found = list(map(self._parts.of_response, ends, responses, masks))
        columns: dict[str, Column] = {
            PART_LENGTHS[part]: torch.tensor([row.count(part) for row in found], dtype=torch.int64)
            for part in self._counted
        }
        if len(set(self._learned)) < len(PARTS):
            learned = [[part in self._learned for part in row] for row in found]
            columns[_LEARNED_MASK] = Ragged.from_list(learned, dtype=torch.bool)
        return samples.with_columns(**columns)


def part_columns_of(
    tokenizer: PreTrainedTokenizerBase,
    parser: TurnParser,
    *,
    stop_token_ids: Collection[int],
    learned: Sequence[Part],
    has_tools: bool,
) -> PartColumns | None:
    """Make the columns of parts for a run; None if all are learned and nothing is worth counting.

    Thoughts are counted where the chat template or the vocabulary has their marks, calls where there are tools.

    Raises:
        ConfigError: if some parts are to be learned, and the format of turns does not tell them from the others.
    """
    learns_some = len(set(learned)) < len(PARTS)
    if learns_some and (parser.parts == ("answer",) or not set(learned) & set(parser.parts)):
        raise ConfigError(
            f"learned_parts={tuple(learned)} needs a format that tells these parts of a turn from others, and the "
            f"format here has {', '.join(parser.parts)} alone; set tokenizer.response_template to a response template "
            f"of transformers with such fields, or leave learned_parts out"
        )
    is_shown = {"thinking": parser.shows_thoughts, "calls": has_tools, "answer": True}
    if not any(is_shown[part] for part in learned):
        rank_zero_warn(
            f"learned_parts={tuple(learned)} may leave nothing to learn: thoughts need marks such as <think>, which "
            f"neither the chat template nor the vocabulary has, and calls need tools; look at the metrics "
            f"thinking_tokens and call_tokens, or name 'answer', too"
        )
    counted = [part for part in parser.parts if learns_some or is_shown[part]]
    if counted == ["answer"]:
        return None
    return PartColumns(TurnParts(tokenizer, parser, stop_token_ids=stop_token_ids), counted=counted, learned=learned)


def whiten_learned(values: Tensor, samples: Samples) -> Tensor:
    """Return (N,) values of the tokens that the model sampled with mean 0 and deviation 1 over the learned ones."""
    if _LEARNED_MASK not in samples:
        return whiten(values)
    return whiten(values, kept_tokens(samples.ragged(_LEARNED_MASK), model_mask(samples)).values.to(values.device))


def without_unlearned(columns: dict[str, Column], samples: Samples) -> dict[str, Column]:
    """Return the columns with NaN in ``advantages`` at tokens that are not learned, which leaves them out of losses."""
    if _LEARNED_MASK not in samples:
        return columns
    mask, advantages = samples.ragged(_LEARNED_MASK), columns["advantages"]
    if isinstance(advantages, Ragged):
        values = advantages.values
    else:
        assert isinstance(advantages, Tensor), "advantages are numbers"
        values = torch.repeat_interleave(advantages, mask.lengths.to(advantages.device))
    values = values.masked_fill(~mask.values.to(values.device), torch.nan)
    return {**columns, "advantages": Ragged(values, mask.lengths)}
