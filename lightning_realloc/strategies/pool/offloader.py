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
from lightning_realloc.runtime.transfer.agreement import WeightVerification
from lightning_realloc.runtime.transfer.checksums import BoxFamily, Checksums, HeldBox
from lightning_realloc.runtime.transfer.weight_check import WeightSubject
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.tuning.memory.offload_schedule import OffloadSchedule


class Offloader:
    """Offloads parts of one rank's models and optimizers.

    After `bring_back`, all weights may be read until the next call begins. That call offloads the parts that it does
    not need.
    """

    def __init__(
        self, pool: ModelPool, schedule: OffloadSchedule, device: torch.device, verify_weights: WeightVerification
    ) -> None:
        self._pool, self._verify_weights = pool, verify_weights
        self._schedule = schedule
        self._parts: dict[str, Offload] = {}
        self._proofs: dict[str, _Proof] = {}
        """Part -> checksums before it was offloaded, until it has returned."""
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
                self._return(part)
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
        for part in self._parts:
            self._return(part)

    def close(self) -> None:
        """Fetch everything for good, and remove all hooks."""
        self.bring_back()
        self._parts = {}
        for hook in self._hooks:
            hook.remove()

    def _offload(self, part: str) -> None:
        role = part.removesuffix(OPTIMIZER_SUFFIX)
        home = self._pool.home(role)
        tensors: dict[str, Tensor] = {}
        if self._parts[part].is_offloaded:
            return
        self._return(part)
        if part == role:
            tensors = local_tensors(home.model)
        elif role in self._optimizers:
            tensors = _state_tensors(self._optimizers[role], home.model)
        if tensors:
            if self._verify_weights != "off":
                self._proofs[part] = _Proof(tensors, home.version, is_sampled=self._verify_weights == "sampled")
            self._parts[part].move_out(tensors.values(), version=home.version)

    def _return(self, part: str) -> None:
        """Make a part's tensors readable, as they were when it was offloaded.

        Raises:
            WeightMismatch: if they are not.
        """
        self._parts[part].finish_return()
        proof = self._proofs.pop(part, None)
        if proof is not None and (names := proof.changed()):
            home = self._pool.home(part.removesuffix(OPTIMIZER_SUFFIX))
            subject = WeightSubject(part, home.layout, home.layout, home.rank, "offload")
            raise subject.mismatch(proof.version, names)

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


class _Proof:
    """Checksums of tensors now, to find those that have changed later."""

    def __init__(self, tensors: Mapping[str, Tensor], version: int, *, is_sampled: bool) -> None:
        self.version = version
        """Version of the role's weights."""
        kinds: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                kinds.setdefault((tensor.shape, tensor.dtype), []).append(name)
        families = [BoxFamily(tuple(names), (HeldBox.whole(shape),)) for (shape, _), names in kinds.items()]
        self._names = [name for names in kinds.values() for name in names]
        self._checksums = Checksums(families, tensors, dtype=None, is_sampled=is_sampled)
        self._before = self._checksums.compute(version)

    def changed(self) -> list[str]:
        """Return the names of tensors with another content than at first."""
        differs = (self._checksums.compute(self.version) != self._before).tolist()
        return [name for name, is_wrong in zip(self._names, differs, strict=True) if is_wrong]


def _state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's tensors of an optimizer's state by name, without scalars such as the step count."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names.get(parameter, f'parameter {number}')} {key}": local_tensor(value)
        for number, (parameter, state) in enumerate(optimizer.state.items())
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim()
    }
