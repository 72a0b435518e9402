"""Copy a role's weights from its home replica to another one: frozen weights once, trained weights every time.

With adapters over a frozen base, a base of gigabytes stays where it is and megabytes of adapters move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import reduce

from torch import Tensor, nn

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.runtime.transfer.executor import Reallocation, ReallocationReport

MakeReallocation = Callable[[ModelLayout, ModelLayout, Mapping[str, Tensor]], Reallocation]
"""(source layout, target layout, source tensors) -> `Reallocation`. Collective over all ranks."""


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """The reallocations from a home replica to another one."""

    frozen: Reallocation | None
    """For frozen parameters; None if there are none."""
    trained: Reallocation | None
    """For all other parameters; None if there are none."""

    @classmethod
    def prepare(
        cls,
        home: ModelLayout,
        tensors: Mapping[str, Tensor],
        target: ModelLayout,
        frozen: Set[str],
        connect: MakeReallocation,
    ) -> WeightCopy:
        """Plan both reallocations. Collective over all ranks, which pass the same ``frozen`` names."""
        parts = []
        for chosen in (frozen, {param.name for param in home.model.params} - frozen):
            spec = _part(home.model, chosen)
            held = {name: tensor for name, tensor in tensors.items() if name in chosen}
            here, there = ModelLayout(spec, home.layout), ModelLayout(spec, target.layout)
            parts.append(connect(here, there, held) if chosen else None)
        return cls(*parts)

    @property
    def _parts(self) -> tuple[Reallocation, ...]:
        return tuple(part for part in (self.frozen, self.trained) if part is not None)

    @property
    def target_tensors(self) -> dict[str, Tensor]:
        """Parameter name -> local tensor of the target replica on this rank; see `Reallocation`."""
        return {name: tensor for part in self._parts for name, tensor in part.target_tensors.items()}

    @property
    def shared_bytes(self) -> int:
        """This rank's share of the bytes in memory shared with other ranks."""
        return sum(part.shared_bytes for part in self._parts)

    def run(self, *, frozen: bool, trained: bool) -> ReallocationReport | None:
        """Copy frozen or trained weights or both; None if there are none. Collective over the ranks of both layouts."""
        due = (self.frozen if frozen else None, self.trained if trained else None)
        reports = [part.run() for part in due if part is not None]
        return reduce(_added, reports) if reports else None

    def release(self) -> None:
        """Release the target replica's memory; see `Reallocation.release`."""
        for part in self._parts:
            part.release()


def refuse_thawed(role: str, model: nn.Module, frozen: Set[str]) -> None:
    """Refuse to train a parameter that was frozen when its role was laid out: other replicas would keep old values.

    Raises:
        PlanError: naming the first such parameter.
    """
    thawed = [name for name, p in model.named_parameters() if p.requires_grad and name in frozen] if frozen else []
    if thawed:
        raise PlanError(
            f"{role} parameter {thawed[0]} was frozen when {role} was laid out and is trained now; replicas in other "
            f"layouts would keep its old values; leave requires_grad unchanged from configure_model on"
        )


def _part(spec: ModelSpec, names: Set[str]) -> ModelSpec:
    return replace(
        spec,
        params=tuple(param for param in spec.params if param.name in names),
        aliases=tuple((alias, owner) for alias, owner in spec.aliases if owner in names),
    )


def _added(one: ReallocationReport, other: ReallocationReport) -> ReallocationReport:
    return ReallocationReport(
        bytes_moved=one.bytes_moved + other.bytes_moved,
        bytes_minimum=one.bytes_minimum + other.bytes_minimum,
        bytes_written=one.bytes_written + other.bytes_written,
        seconds=one.seconds + other.seconds,
        transport=one.transport if one.transport == other.transport else f"{one.transport}, {other.transport}",
    )
