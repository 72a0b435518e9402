"""How does a copy of a role get its weights, time and again? What training leaves as it is comes once, the rest anew.

Adapters over a frozen base are the case that pays: a base of gigabytes stays where it is, and megabytes move.
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
"""Makes the way of some parameters from one layout to another; the tensors are the source's. Collective."""


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """The ways of one role's parameters from its home to a copy: of the frozen ones, and of the trained ones."""

    frozen: Reallocation | None
    """None where training changes all of them, or all of them change at once."""
    trained: Reallocation | None
    """None where it changes none."""

    @classmethod
    def of(
        cls,
        home: ModelLayout,
        tensors: Mapping[str, Tensor],
        target: ModelLayout,
        frozen: Set[str],
        connect: MakeReallocation,
    ) -> WeightCopy:
        """Prepare both. Collective over all ranks, which name the same ``frozen`` parameters."""
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
        """Parameter name -> local tensor of the copy on this rank; see `Reallocation`."""
        return {name: tensor for part in self._parts for name, tensor in part.target_tensors.items()}

    @property
    def shared_bytes(self) -> int:
        """This rank's part of what lies in segments shared with other ranks."""
        return sum(part.shared_bytes for part in self._parts)

    def run(self, *, frozen: bool, trained: bool) -> ReallocationReport | None:
        """Bring what is asked for, None where there is none of that. Collective over the ranks of both layouts."""
        due = (self.frozen if frozen else None, self.trained if trained else None)
        reports = [part.run() for part in due if part is not None]
        return reduce(_added, reports) if reports else None

    def release(self) -> None:
        """Give the copy's memory back; see `Reallocation.release`."""
        for part in self._parts:
            part.release()


def refuse_thawed(role: str, model: nn.Module, frozen: Set[str]) -> None:
    """Refuse to train what was frozen when a role was laid out: copies of it would keep its old values.

    Raises:
        PlanError: naming the first such parameter.
    """
    thawed = [name for name, p in model.named_parameters() if p.requires_grad and name in frozen] if frozen else []
    if thawed:
        raise PlanError(
            f"{role} parameter {thawed[0]} was frozen when {role} was laid out, and is trained now, which copies in "
            f"other layouts would not hear of; leave requires_grad as it is from configure_model on"
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
