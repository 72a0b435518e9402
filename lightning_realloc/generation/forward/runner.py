"""Run a model over the cache slots of the running samples, one packed row per forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.batch.model_input import joined_inputs
from lightning_realloc.generation.cache.kv_cache import KVCache, LayerShape, Places
from lightning_realloc.generation.cache.page_table import PageTables
from lightning_realloc.generation.cache.paged_cache import PagedCache, PageSizes
from lightning_realloc.generation.core.keyed_sampler import KeyedSampler
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.step import (
    DecodeRow,
    DrawRule,
    Emitted,
    ForwardStep,
    PrefillChunk,
    StepExecutor,
)
from lightning_realloc.generation.forward.attention import run_packed
from lightning_realloc.generation.forward.cuda_graphs import CapturedForwards
from lightning_realloc.generation.forward.expert_records import ExpertRecords
from lightning_realloc.generation.forward.packed_step import PackedStep, segments_of
from lightning_realloc.runtime.model.image_inputs import present_inputs
from lightning_realloc.runtime.parallel.tensor_parallel import tensor_parallel_group


class ModelRunner(StepExecutor):
    """Runs a model over slots 0, 1, 2 …, whose keys and values it keeps.

    The ranks of a tensor-parallel group have the same logits and random numbers, so each draws the same tokens.
    Rejected tokens need no rollback: positions after a sample's last token are masked, and overwritten later.

    Args:
        num_slots: Slots to begin with.
        longest: Most positions that a slot will ever need.
        most_slots: Most slots that will ever be needed; None: unknown.
        graphs: Replays steps that read no prompts, or tiles; None: nothing is replayed.
        records: Records the experts of tokens; None: they are not recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        *,
        num_slots: int,
        longest: int,
        most_slots: int | None = None,
        graphs: CapturedForwards[Any] | None = None,
        records: ExpertRecords | None = None,
    ) -> None:
        self.cache = cache
        self._model = model
        self._device = next(model.parameters()).device
        self._num_slots = num_slots
        self._longest = longest
        self._most_slots = most_slots
        self._records = records
        self._graphs: Any = graphs if graphs is not None and graphs.begin() else None
        self._rule: DrawRule | None = None
        self._submitted: tuple[ForwardStep, Tensor] | None = None

    @property
    def replays_steps(self) -> bool:
        return self._graphs is not None and bool(self._graphs.is_active)

    @property
    def capture_s(self) -> float:
        return 0.0 if self._graphs is None else float(self._graphs.capture_s)

    @property
    def was_usual(self) -> bool:
        return self._graphs is None or bool(self._graphs.was_usual)

    @property
    def cache_bytes(self) -> int:
        return self.cache.num_bytes

    def begin(self, params: SamplingParams, rule: DrawRule | None) -> None:
        self._rule = rule or KeyedSampler(params)

    def end(self, *, has_failed: bool = False) -> None:
        self._submitted = None
        if has_failed:
            self.cache.release()  # it may hold values that are not finite

    def submit(self, step: ForwardStep) -> None:
        self._submitted = step, self.forward(step.prefills, step.rows)

    def collect(self) -> list[Emitted]:
        assert self._submitted is not None, "a step is submitted before it is collected"
        (step, logits), self._submitted = self._submitted, None
        if not step.rows:
            return []
        assert self._rule is not None, "a generation begins before tokens are drawn"
        return self._rule.emit(logits, step.rows, step.forbidden)

    def lay_out_pages(self, lengths: Sequence[int], *, num_slots: int, may_grow: bool = False) -> PageTables:
        """Allocate a bounded cache by a dummy forward, which shows the layers' shapes; see `PagedCache.plan_pages`."""
        assert isinstance(self.cache, PagedCache), "pages are those of a bounded cache"
        self.forward([], [])
        sizes = self.cache.plan_pages(lengths, num_slots=num_slots, may_grow=may_grow, largest=self._largest)
        return self._allocate_pages(self.cache, sizes)

    def _allocate_pages(self, cache: PagedCache, sizes: PageSizes) -> PageTables:
        return cache.allocate(sizes)

    def _largest(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the largest value of each number over the ranks that schedule alike."""
        group = tensor_parallel_group(self._model)
        return numbers if group is None else group.largest(numbers, self._device)

    def forward(self, prefills: Sequence[PrefillChunk], rows: Sequence[DecodeRow]) -> Tensor:
        """Return the logits (N, V) of the rows' tokens, row by row; row i belongs to slot i.

        Without rows and prefills it runs a dummy token, because a forward may be collective.
        """
        prefills = prefills if rows or prefills else [PrefillChunk((0,), ())]
        segments, row_lengths = segments_of(prefills), [row.end for row in rows]
        max_length = max([1, *row_lengths, *(segment.end for segment in segments)])
        self.make_room(max_length, max(len(rows), *(max(p.slots, default=-1) + 1 for p in prefills), 0))
        if self._graphs is not None:
            replayed: Tensor | None = self._graphs.forward([] if prefills else rows, max_length)
            if replayed is not None:
                return replayed
        num_prefill = segments[-1].stop if segments else 0
        tokens = list(chain(*(prefill.tokens for prefill in prefills), *(row.tokens for row in rows)))
        positions = list(
            chain(*(range(part.begin, part.end) for part in segments), *(range(row.position, row.end) for row in rows))
        )
        ids, places = torch.tensor([[tokens], [positions]], device=self._device).unbind()
        own, counts = places[0, num_prefill:], [len(row.tokens) for row in rows]
        cached = self.cache.places(
            Places(segments, num_prefill, _slots_of(counts, self._device), own, len(rows), row_lengths, max_length)
        )
        step = PackedStep(cached, own, counts, row_lengths, max_length, segments, num_prefill)
        num_row_tokens = len(tokens) - num_prefill
        # Indices copy the rows. A slice after prompts has gaps, for which `linear` would copy the vocabulary's weights.
        # Keeping 0 tokens would mean all of them, so without rows the last token is kept and dropped.
        kept = torch.arange(num_prefill, len(tokens), device=self._device) if num_prefill and num_row_tokens else None
        kept_tokens = max(1, num_row_tokens) if kept is None else kept
        logits = self._run(ids, model_positions(places, prefills, rows), step, kept_tokens, self._extras(prefills))
        return logits[len(logits) - num_row_tokens :]

    def _run(
        self, ids: Tensor, positions: Tensor, step: PackedStep, kept: int | Tensor, extras: Mapping[str, Tensor]
    ) -> Tensor:
        """Run the model on a packed row, as `run_packed`."""
        routed = None if self._records is None else self._records.routed_pass()
        return run_packed(self._model, ids, positions, step, kept=kept, extras=extras, routed=routed)

    def _extras(self, prefills: Sequence[PrefillChunk]) -> dict[str, Tensor]:
        """Return the model's further inputs, those of all prompts concatenated."""
        joined = joined_inputs(prefill.extras for prefill in prefills)
        return present_inputs(self._model, {name: values.to(self._device) for name, values in joined.items()})

    def may_need(self, length: int) -> None:
        self._longest = max(length, self._longest)

    def make_room(self, length: int, num_slots: int = 0) -> None:
        if num_slots > self._num_slots:
            grown = self._num_slots * 3 // 2
            self._num_slots = max(num_slots, grown if self._most_slots is None else min(grown, self._most_slots))
        spare = int(self.replays_steps)  # a position for a graph's padding
        self.cache.make_room(self._num_slots, length + spare, longest=self._longest + spare)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self.cache.copy(source, targets, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)

    def swap(self, first: int, second: int, length: int) -> None:
        self.cache.swap(first, second, length)

    def read(self, slot: int, begin: int, end: int) -> Tensor:
        return self.cache.read(slot, begin, end)

    def read_experts(self, slot: int, counted_from: int, end: int) -> Tensor | None:
        return None if self._records is None else self._records.read(self.cache, slot, counted_from, end)

    def describe(self) -> list[LayerShape] | None:
        return self.cache.describe()

    def write(self, slot: int, parts: Sequence[tuple[int, int, Tensor]], shapes: Sequence[LayerShape]) -> None:
        self.make_room(max(end for _, end, _ in parts), slot + 1)
        self.cache.prepare(shapes, self._device)
        for begin, end, content in parts:
            self.cache.write(slot, begin, end, content)


def model_positions(places: Tensor, prefills: Sequence[PrefillChunk], rows: Sequence[DecodeRow]) -> Tensor:
    """Return the position ids of tokens at ``places`` (1, N) of their sequences: (1, N), or (3, 1, N) after images."""
    if not (any(row.shift for row in rows) or any(chunk.positions is not None for chunk in prefills)):
        return places
    positions = places.expand(3, -1).clone()
    begin = 0
    for chunk in prefills:
        if chunk.positions is not None:
            positions[:, begin : begin + len(chunk.tokens)] = chunk.positions.to(places.device, non_blocking=True)
        begin += len(chunk.tokens)
    shifts = [row.shift for row in rows for _ in row.tokens]
    positions[:, begin:] += torch.tensor(shifts, device=places.device)
    return positions[:, None]


def _slots_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the slot (N,) of each token of the rows."""
    slots = torch.arange(len(counts), device=device)
    if all(count == 1 for count in counts):
        return slots
    return slots.repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts))
