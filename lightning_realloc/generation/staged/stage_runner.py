"""Forwards of one pipeline stage over the slots of one group of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_realloc.generation.core.step import Emitted, ForwardStep
from lightning_realloc.generation.forward.attention import run_packed
from lightning_realloc.generation.forward.packed_step import PackedStep
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.staged.commands import SlotChange, StageStep
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

    def follow(self, command: StageStep) -> None:
        """Change slots and run the forward of a command."""
        for change in command.changes:
            getattr(self, change.name)(*change.arguments)
        self.forward(command.prefills, command.rows)

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
        self._under_way: ForwardStep | None = None

    def submit(self, step: ForwardStep) -> None:
        self._link.command(StageStep.of(self._group, self._changes, step))
        self._changes, self._under_way = [], step

    def collect(self) -> list[Emitted]:
        assert self._under_way is not None, "a step is submitted before it is collected"
        step, self._under_way = self._under_way, None
        super().submit(step)
        return super().collect()

    def make_room(self, length: int, num_slots: int = 0) -> None:
        if num_slots > self._num_slots:
            self._changes.append(SlotChange("make_room", (length, num_slots)))
        super().make_room(length, num_slots)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self._changes.append(SlotChange("copy", (source, tuple(targets), length)))
        super().copy(source, targets, length)

    def move(self, source: int, target: int, length: int) -> None:
        self._changes.append(SlotChange("move", (source, target, length)))
        super().move(source, target, length)

    def swap(self, first: int, second: int, length: int) -> None:
        self._changes.append(SlotChange("swap", (first, second, length)))
        super().swap(first, second, length)

    def end(self, *, has_failed: bool = False) -> None:
        self._under_way = None
        super().end(has_failed=has_failed)
