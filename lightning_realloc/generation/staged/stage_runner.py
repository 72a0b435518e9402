"""Forwards of one pipeline stage over the slots of one group of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_realloc.generation.cache.page_table import PageTables
from lightning_realloc.generation.cache.paged_cache import PagedCache, PageSizes
from lightning_realloc.generation.core.step import Emitted, ForwardStep
from lightning_realloc.generation.forward.attention import run_packed
from lightning_realloc.generation.forward.packed_step import PackedStep
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.staged.commands import (
    ChangeName,
    GroupCommand,
    PageAllocation,
    PageMeasurement,
    SlotChange,
    StageStep,
)
from lightning_realloc.runtime.parallel.stage_link import StageLink


class StageRunner(ModelRunner):
    """Runs one stage over slots 0, 1, 2 …: takes hidden states from the stage before, and sends them to the next one.

    Args:
        link: Connects the stages.
        group: Number of the group of samples.
    """

    def __init__(self, *arguments: Any, link: StageLink, group: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._link, self._group = link, group

    def follow(self, command: GroupCommand) -> None:
        """Carry out a command of the last stage."""
        if isinstance(command, StageStep):
            for change in command.changes:
                getattr(self, change.name)(*change.arguments)
            self.forward(command.prefills, command.rows)
        elif isinstance(command, PageAllocation):
            self._allocate_pages(self._paged, command.sizes)
        else:
            self._paged.forget_shapes()
            self.forward([], [])
            self._largest(self._paged.measure_page())

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Let a slot hold these pages of a bounded cache."""
        self._paged.tables.assign(slot, pages)

    @property
    def _paged(self) -> PagedCache:
        assert isinstance(self.cache, PagedCache), "only a bounded cache has pages"
        return self.cache

    def _largest(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the largest value over this stage and those before it."""
        return self._link.largest(super()._largest(numbers), self._device)

    def _run(
        self, ids: Tensor, positions: Tensor, step: PackedStep, kept: int | Tensor, extras: Mapping[str, Tensor]
    ) -> Tensor:
        num_tokens, routed = ids.shape[1], None
        received = self._link.receive_states(num_tokens)
        if self._records is not None:
            routed = self._records.routed_pass(self._link.receive_bytes(self._records.routers.no_record(ids)))
        with self._link.io.open(ids, received):
            logits = run_packed(self._model, ids, positions, step, kept=kept, extras=extras, routed=routed)
        self._link.send_states(num_tokens)
        if routed is not None:
            self._link.send_bytes(routed.record())
        return logits


class LastStageRunner(StageRunner):
    """Runs the last stage, and draws. Commands the other stages to run a step when it is submitted.

    Its own forward runs when the step is collected: the groups' steps arrive in the order in which they were submitted.
    """

    def __init__(self, *arguments: Any, link: StageLink, group: int, **options: Any) -> None:
        super().__init__(*arguments, link=link, group=group, **options)
        self._changes: list[SlotChange] = []
        """Changes of slots since the last step."""
        self._pages: list[list[int]] = []
        """Pages of each slot as the other stages have them."""
        self._under_way: ForwardStep | None = None

    def lay_out_pages(self, lengths: Sequence[int], *, num_slots: int, may_grow: bool = False) -> PageTables:
        self._link.command(PageMeasurement(self._group))
        return super().lay_out_pages(lengths, num_slots=num_slots, may_grow=may_grow)

    def _allocate_pages(self, cache: PagedCache, sizes: PageSizes) -> PageTables:
        self._link.command(PageAllocation(self._group, sizes))
        self._pages = [[] for _ in range(sizes.num_slots)]
        return super()._allocate_pages(cache, sizes)

    def submit(self, step: ForwardStep) -> None:
        self._record_pages()
        self._link.command(StageStep.of(self._group, self._changes, step))
        self._changes, self._under_way = [], step

    def collect(self) -> list[Emitted]:
        assert self._under_way is not None, "a step is submitted before it is collected"
        step, self._under_way = self._under_way, None
        super().submit(step)
        return super().collect()

    def describe(self) -> None:
        """Keys and values lie on all stages, and stay there."""

    def may_need(self, length: int) -> None:
        self._changes.append(SlotChange("may_need", (length,)))
        super().may_need(length)

    def make_room(self, length: int, num_slots: int = 0) -> None:
        if num_slots > self._num_slots:
            self._record("make_room", length, num_slots)
        super().make_room(length, num_slots)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self._record("copy", source, tuple(targets), length)
        super().copy(source, targets, length)

    def move(self, source: int, target: int, length: int) -> None:
        self._record("move", source, target, length)
        super().move(source, target, length)

    def swap(self, first: int, second: int, length: int) -> None:
        self._record("swap", first, second, length)
        super().swap(first, second, length)

    def end(self, *, has_failed: bool = False) -> None:
        self._under_way = None
        super().end(has_failed=has_failed)

    def _record(self, name: ChangeName, *arguments: Any) -> None:
        self._record_pages()
        self._changes.append(SlotChange(name, arguments))

    def _record_pages(self) -> None:
        """Record which slots hold other pages than the other stages know, before these read or write the slots."""
        if isinstance(self.cache, PagedCache):
            for slot, pages in enumerate(self.cache.tables.tables):
                if pages != self._pages[slot]:
                    self._pages[slot] = list(pages)
                    self._changes.append(SlotChange("set_pages", (slot, tuple(pages))))
