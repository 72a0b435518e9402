"""Offload weights and optimizer state between the calls that need them, and fetch them during the call before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.dataflow.execution_plan import OPTIMIZER_SUFFIX
from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.measure.offload import Offload, make_copier
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.parallel.shards import local_tensor, local_tensors
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.tuning.memory.offload_schedule import OffloadSchedule


class Offloader:
    """Offloads parts of one rank's models and optimizers.

    After `bring_back`, all weights may be read until the next call begins. That call offloads the parts that it does
    not need.
    """

    def __init__(self, pool: ModelPool, schedule: OffloadSchedule, device: torch.device) -> None:
        self._pool = pool
        self._schedule = schedule
        self._parts: dict[str, Offload] = {}
        self._hooks: list[Any] = []
        self._optimizers: Mapping[str, torch.optim.Optimizer] = {}
        if schedule.parts:
            shared = make_copier(device)
            self._parts = {part: Offload(shared) for part in schedule.parts if part not in pool.released}
        for role in pool.roles:
            if role in self._parts:
                self._guard(role, pool.home(role).model)

    def begin(self, call: str, optimizers: Mapping[str, torch.optim.Optimizer], record: FlightRecord) -> None:
        """Wait for the parts that a call needs, start to fetch those of the next call, and offload the rest."""
        if not self._parts:
            return
        self._optimizers = optimizers
        needed, ahead = (
            kept & self._parts.keys() for kept in (self._schedule.needed(call), self._schedule.prefetched(call))
        )
        with self._recorded(f"offloading for {call}", record):
            for part in self._parts:
                if part not in needed | ahead:
                    self._offload(part)
            for part in needed:
                self._parts[part].finish_return()
            for part in ahead:
                self._parts[part].start_return()

    def end(self, call: str, record: FlightRecord) -> None:
        """Offload the parts that the call needed."""
        if needed := self._schedule.needed(call) & self._parts.keys():
            with self._recorded(f"offloading after {call}", record):
                for part in needed:
                    self._offload(part)

    @contextmanager
    def _recorded(self, name: str, record: FlightRecord) -> Iterator[None]:
        """Record an activity, and count its seconds among those that moved weights."""
        begin = time.perf_counter()
        with record.during(name, kind="offload"):
            yield
        self._pool.seconds_moving += time.perf_counter() - begin

    def bring_back(self) -> None:
        """Fetch everything to the device until the next call begins."""
        for part in self._parts.values():
            part.finish_return()

    def close(self) -> None:
        """Fetch everything for good, and remove all hooks."""
        self.bring_back()
        self._parts = {}
        for hook in self._hooks:
            hook.remove()

    def _offload(self, part: str) -> None:
        role = part.removesuffix(OPTIMIZER_SUFFIX)
        home = self._pool.home(role)
        tensors: list[Tensor] = []
        if part == role:
            tensors = [*local_tensors(home.model).values()]
        elif role in self._optimizers:
            tensors = _state_tensors(self._optimizers[role])
        if tensors:
            self._parts[part].move_out(tensors, version=home.version)

    def _guard(self, role: str, model: nn.Module) -> None:
        """Raise ReallocError for a forward pass or a state_dict of a model that is offloaded: torch would crash."""

        def refuse(*_: object, **__: object) -> None:
            if role in self._parts and self._parts[role].is_offloaded:
                raise ReallocError(
                    f"the weights of {role!r} are offloaded between its calls, as the plan says; call "
                    f"trainer.strategy.bring_back() before you read them"
                )

        self._hooks.append(model.register_forward_pre_hook(refuse, prepend=True))
        self._hooks.append(model.register_state_dict_pre_hook(refuse))


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return this rank's tensors of an optimizer's state, without scalars such as the step count."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [local_tensor(value) for value in values if isinstance(value, Tensor) and value.dim()]
