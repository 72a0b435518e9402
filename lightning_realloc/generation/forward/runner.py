"""One model and the slots its running samples live in: forwards of packed rows, and nothing about what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from lightning_realloc.generation.cache.kv_cache import KVCache, LayerShape, Places
from lightning_realloc.generation.forward.attention import PackedStep, segments_of
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.generation.forward.packed_rows import DecodeRow, PrefillChunk, run_packed


class ModelRunner:
    """Runs a model over slots 0, 1, 2 …, whose keys and values it keeps.

    Rolling back needs no call: positions behind a sample's last token are masked, and overwritten when it gets there.
    """

    def __init__(
        self, model: nn.Module, cache: KVCache, *, num_slots: int, longest: int, graphs: StepGraphs | None = None
    ) -> None:
        """Remember the model; ``longest`` bounds the positions that a slot will ever need."""
        self.cache = cache
        self._model = model
        self._device = next(model.parameters()).device
        self._num_slots = num_slots
        self._longest = longest
        self._graphs = graphs
        if graphs is not None:
            graphs.begin()

    @property
    def replays_steps(self) -> bool:
        """Whether steps that read no prompts are CUDA graphs, most of them."""
        return self._graphs is not None and self._graphs.is_active

    @property
    def was_usual(self) -> bool:
        """Whether the last forward took as long as its like will: not where a graph is still to be made, or was."""
        return self._graphs is None or self._graphs.was_usual

    def forward(self, prefills: Sequence[PrefillChunk], rows: Sequence[DecodeRow]) -> Tensor:
        """Return the logits (N, V) of the rows' tokens, those of row 0 first.

        Row i belongs to slot i. Without rows and prefills a dummy token is run, since a forward may be collective.
        """
        prefills = prefills if rows or prefills else [PrefillChunk((0,), ())]
        counts = [len(row.tokens) for row in rows]
        lengths = [len(prefill.tokens) for prefill in prefills]
        row_lengths = [row.position + count for row, count in zip(rows, counts, strict=True)]
        max_length = max(
            *row_lengths,
            *(prefill.begin + length for prefill, length in zip(prefills, lengths, strict=True)),
            1,
        )
        self.make_room(max_length, max(len(rows), *(max(p.slots, default=-1) + 1 for p in prefills), 0))
        if self._graphs is not None:
            replayed = self._graphs.forward([] if prefills else rows, max_length)
            if replayed is not None:
                return replayed
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
        own = places[0, num_prefill:]
        cached = self.cache.places(
            Places(segments, num_prefill, _slots_of(counts, self._device), own, len(rows), row_lengths, max_length)
        )
        step = PackedStep(cached, own, counts, row_lengths, max_length, segments, num_prefill)
        num_row_tokens = len(tokens) - num_prefill
        # Indices copy the rows; a slice behind prompts has gaps that cost `linear` a copy of the vocabulary's weights.
        # A number of 0 would mean all rows, so without rows the last one is kept and thrown away.
        kept = torch.arange(num_prefill, len(tokens), device=self._device) if num_prefill and num_row_tokens else None
        logits = run_packed(self._model, ids, places, step, kept=max(1, num_row_tokens) if kept is None else kept)
        return logits[len(logits) - num_row_tokens :]

    def may_need(self, longest: int) -> None:
        """Say that a slot may need so many positions, which was not known at the beginning."""
        self._longest = max(longest, self._longest)

    def make_room(self, length: int, num_slots: int = 0) -> None:
        """Have so many positions in every slot, and at least so many slots."""
        if num_slots > self._num_slots:
            self._num_slots = max(num_slots, self._num_slots * 3 // 2)
        spare = int(self.replays_steps)  # a position for what fills a graph up
        self.cache.make_room(self._num_slots, length + spare, longest=self._longest + spare)

    def write(self, slot: int, parts: Sequence[tuple[int, int, Tensor]], shapes: Sequence[LayerShape]) -> None:
        """Put keys and values (begin, end, content) that another rank computed into a slot; ``shapes`` of its cache."""
        self.make_room(max(end for _, end, _ in parts), slot + 1)
        self.cache.prepare(shapes, self._device)
        for begin, end, content in parts:
            self.cache.write(slot, begin, end, content)


def _slots_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the slot (N,) of every token of the rows."""
    slots = torch.arange(len(counts), device=device)
    if all(count == 1 for count in counts):
        return slots
    return slots.repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts))
