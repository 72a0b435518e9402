"""Do all ranks mean the same reallocation, and is what each of them handed in complete?

Asked before anything is sent: gloo answers a message of unexpected size by ending the process, and a rank that raises
alone leaves the others waiting. So every finding is shared first, and then every rank raises it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_realloc.errors import PlanError
from lightning_realloc.layout import ClusterSpec, ModelLayout, format_ranks
from lightning_realloc.realloc.plan import ReallocationPlan
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.realloc.publication import PublicationPlan, plan_publication
from lightning_realloc.runtime.messages.objects import gather_objects

TransportName = Literal["auto", "push", "direct"]
"""How weights travel: through shared memory of one host, from rank to rank, or as probing decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one rank asks for."""

    source: ModelLayout
    source_tensors: Mapping[str, Tensor]
    """This rank's local tensors under ``source``."""
    target: ModelLayout
    target_tensors: Mapping[str, Tensor] | None
    """This rank's local tensors under ``target`` when they exist already."""
    rank: int
    dtype: torch.dtype
    """The target's."""
    device: torch.device
    transport: TransportName
    max_staging_bytes: int
    pack_below_bytes: int
    cluster: ClusterSpec | None

    def find_problem(self, world_size: int) -> str | None:
        """Return what is wrong with this rank's request as it stands, None when nothing is."""
        return next(self._problems(world_size), None)

    def _problems(self, world_size: int) -> Iterator[str]:
        for side, layout in (("source", self.source.layout), ("target", self.target.layout)):
            if max(layout.ranks) >= world_size:
                yield f"{side} {layout} needs rank {max(layout.ranks)} but there are {world_size}; use fewer ranks"
        if self.transport not in get_args(TransportName):
            yield f"transport={self.transport!r} must be 'auto', 'push' or 'direct'"
        if self.transport == "push" and self.device.type != "cpu":
            yield f"transport='push' needs CPU tensors, these are on {self.device}; use 'auto' or 'direct'"
        if self.transport == "push" and self.target_tensors is not None:
            yield "transport='push' owns the target's storage, it cannot fill target_tensors; use 'auto' or 'direct'"
        yield from self._tensor_problems("source_tensors", self.source, self.source_tensors, None)
        if self.target_tensors is not None:
            yield from self._tensor_problems("target_tensors", self.target, self.target_tensors, self.dtype)

    def _tensor_problems(
        self, which: str, layout: ModelLayout, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
    ) -> Iterator[str]:
        names = layout.names(self.rank)
        for name in sorted(set(names) ^ tensors.keys()):
            fault = "lack" if name in names else "have, beyond the layout,"
            yield f"{which} {fault} {name!r}; give this rank's tensors of {layout.layout}, tied parameters once"
        for name in names:
            tensor = tensors[name]
            if tuple(tensor.shape) != layout.local_shape(name, self.rank):
                wanted = layout.local_shape(name, self.rank)
                yield f"{which}[{name!r}] is {tuple(tensor.shape)}, {layout.layout} has {wanted}; pass the local shard"
            if tensor.device.type != self.device.type:
                yield f"{which}[{name!r}] is on {tensor.device}, not on device={self.device}; move it or change device"
            if dtype is not None and tensor.dtype != dtype:
                yield f"{which}[{name!r}] is {tensor.dtype}, not dtype={dtype}; let both be the same"


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have in common."""

    wire_dtype: torch.dtype
    """What travels: the narrower of source and target, which gives the same bits as casting first."""
    target_is_given: bool
    """Whether the target's tensors exist already."""
    may_alias: bool
    """Whether a target tensor may be the source's own: same dtype everywhere, and the target's storage is ours."""
    copied_names: frozenset[str]
    """Parameters that are not contiguous on some rank and hence aliased on none."""

    def aliased(self, request: Request, rank: int) -> frozenset[str]:
        """Return the parameters whose target tensor on ``rank`` is its source tensor."""
        if not self.may_alias:
            return frozenset()
        source, target = request.source, request.target
        return frozenset(
            name
            for name in target.names(rank)
            if name not in self.copied_names and source.shard(name, rank) == target.shard(name, rank)
        )


class _Facts(NamedTuple):
    problem: str | None
    settings: tuple[object, ...]
    gives_target: bool | None
    source_dtypes: frozenset[torch.dtype]
    copied_names: frozenset[str]


def agree_on_request(request: Request, world_size: int) -> Agreement:
    """Compare the requests of all ranks. Collective; raises PlanError on every rank when one is wrong or differs."""
    settings = (
        request.transport, request.dtype, request.device.type, request.max_staging_bytes, request.pack_below_bytes,
        world_size,
    )  # fmt: skip
    sources = request.source_tensors
    gives_target = request.target_tensors is not None if request.rank in request.target.layout else None
    everyone = gather_objects(
        _Facts(
            request.find_problem(world_size),
            settings,
            gives_target,
            frozenset(tensor.dtype for tensor in sources.values()),
            frozenset(name for name, tensor in sources.items() if not tensor.is_contiguous()),
        )
    )
    _raise_problems([facts.problem for facts in everyone])
    _require_equal(
        "settings (transport, dtype, device, max_staging_bytes, pack_below_bytes, world_size)",
        [facts.settings for facts in everyone],
    )
    _require_equal("target_tensors given", [facts.gives_target for facts in everyone])
    target_is_given = any(facts.gives_target for facts in everyone)
    dtypes = frozenset[torch.dtype]().union(*(facts.source_dtypes for facts in everyone))
    return Agreement(
        wire_dtype=_wire_dtype(dtypes, request.dtype),
        target_is_given=target_is_given,
        may_alias=dtypes == {request.dtype} and not target_is_given,
        copied_names=frozenset[str]().union(*(facts.copied_names for facts in everyone)),
    )


def agree_on_plan(request: Request, element_bytes: int) -> tuple[ReallocationPlan, PublicationPlan]:
    """Plan this rank's share and compare digests. Collective; raises PlanError on every rank when plans differ."""
    problem, digest = None, None
    try:
        plan = plan_reallocation(
            request.source, request.target, request.cluster, element_bytes=element_bytes, rank=request.rank
        )
        publication = plan_publication(
            request.source, request.target, element_bytes=request.dtype.itemsize, rank=request.rank
        )
        digest = plan.digest
    except PlanError as error:
        problem = str(error)
    everyone = gather_objects((problem, digest))
    _raise_problems([problem for problem, _ in everyone])
    _require_equal("plan digest", [digest[:12] for _, digest in everyone])
    return plan, publication


def _wire_dtype(source_dtypes: frozenset[torch.dtype], target: torch.dtype) -> torch.dtype:
    if len(source_dtypes) == 1:
        (source,) = source_dtypes
        if source.itemsize < target.itemsize:
            return source
    return target


def _raise_problems(problems: Sequence[str | None]) -> None:
    found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
    if found:
        raise PlanError("; ".join(found))


def _require_equal(what: str, values: Sequence[object]) -> None:
    """Raise PlanError unless all ranks gave the same value; None is no opinion."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        sides = "; ".join(f"{value} on ranks {format_ranks(tuple(members))}" for value, members in ranks.items())
        raise PlanError(
            f"all ranks must ask for the same reallocation, but {what} differs: {sides}; "
            "pass the same layouts, model and options everywhere"
        )
