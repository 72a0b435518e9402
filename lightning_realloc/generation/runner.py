"""One model and the slots its running samples live in: forwards of packed rows, and nothing about what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from lightning_realloc.generation.attention import STEP_ARGUMENT, PackedStep, StepArgument, check_attended, segments_of
from lightning_realloc.generation.kv_cache import KVCache, LayerShape


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens of a sequence whose keys and values are to be computed, and nothing else."""

    tokens: Sequence[int]
    slots: tuple[int, ...]
    """Every slot that is to hold them."""
    begin: int = 0
    """Position of the first of them; the slots hold what is before it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens that one slot's sample reads in this forward."""

    tokens: Sequence[int]
    """At least one."""
    position: int
    """Of the first of them."""


class ModelRunner:
    """Runs a model over slots 0, 1, 2 …, whose keys and values it keeps.

    Rolling back needs no call: positions behind a sample's last token are masked, and overwritten when it gets there.
    """

    def __init__(self, model: nn.Module, cache: KVCache, *, num_slots: int, longest: int) -> None:
        """Remember the model; ``longest`` bounds the positions that a slot will ever need."""
        self.cache = cache
        self._model = model
        self._device = next(model.parameters()).device
        self._num_slots = num_slots
        self._longest = longest

    def forward(self, prefills: Sequence[Prefill], rows: Sequence[Row]) -> Tensor:
        """Return the logits (N, V) of the rows' tokens, those of row 0 first.

        Row i belongs to slot i. Without rows and prefills a dummy token is run, since a forward may be collective.
        """
        prefills = prefills if rows or prefills else [Prefill((0,), ())]
        counts = [len(row.tokens) for row in rows]
        lengths = [len(prefill.tokens) for prefill in prefills]
        row_lengths = [row.position + count for row, count in zip(rows, counts, strict=True)]
        max_length = max(
            *row_lengths,
            *(prefill.begin + length for prefill, length in zip(prefills, lengths, strict=True)),
            1,
        )
        self.make_room(max_length, max(len(rows), *(max(p.slots, default=-1) + 1 for p in prefills), 0))
        segments = segments_of(
            lengths, [prefill.slots for prefill in prefills], [prefill.begin for prefill in prefills]
        )
        num_prefill = sum(lengths)
        tokens = list(chain(*(prefill.tokens for prefill in prefills), *(row.tokens for row in rows)))
        positions = list(
            chain(
                *(range(prefill.begin, prefill.begin + len(prefill.tokens)) for prefill in prefills),
                *(range(row.position, row.position + count) for row, count in zip(rows, counts, strict=True)),
            )
        )
        ids, places = torch.tensor([[tokens], [positions]], device=self._device).unbind()
        step = PackedStep(self.cache, segments, num_prefill, places[0, num_prefill:], counts, row_lengths, max_length)
        num_row_tokens = len(tokens) - num_prefill
        # Indices copy the rows; a slice behind prompts has gaps that cost `linear` a copy of the vocabulary's weights.
        # A number of 0 would mean all rows, so without rows the last one is kept and thrown away.
        kept = torch.arange(num_prefill, len(tokens), device=self._device) if num_prefill and num_row_tokens else None
        output = self._model(
            input_ids=ids, position_ids=places, use_cache=False,
            logits_to_keep=max(1, num_row_tokens) if kept is None else kept, **{STEP_ARGUMENT: StepArgument(step)},
        )  # fmt: skip
        check_attended(self._model, step)
        logits: Tensor = output.logits[0]
        return logits[len(logits) - num_row_tokens :]

    def may_need(self, longest: int) -> None:
        """Say that a slot may need so many positions, which was not known at the beginning."""
        self._longest = max(longest, self._longest)

    def make_room(self, length: int, num_slots: int = 0) -> None:
        """Have so many positions in every slot, and at least so many slots."""
        if num_slots > self._num_slots:
            self._num_slots = max(num_slots, self._num_slots * 3 // 2)
        self.cache.make_room(self._num_slots, length, longest=self._longest)

    def write(self, slot: int, parts: Sequence[tuple[int, int, Tensor]], shapes: Sequence[LayerShape]) -> None:
        """Put keys and values (begin, end, content) that another rank computed into a slot; ``shapes`` of its cache."""
        self.make_room(max(end for _, end, _ in parts), slot + 1)
        self.cache.prepare(shapes, self._device)
        for begin, end, content in parts:
            self.cache.write(slot, begin, end, content)
