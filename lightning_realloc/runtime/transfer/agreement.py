"""Check that all ranks request the same reallocation with complete tensors, before anything is sent.

Gloo ends the process at a message of unexpected size, and a rank that raises alone leaves the others waiting. So ranks
share all problems first, and then every rank raises the same error.
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
from lightning_realloc.runtime.messages.objects import gather_objects

TransportName = Literal["auto", "push", "direct"]
"""How weights are sent: "push" through the shared memory of each node, "direct" from rank to rank, "auto" either."""
WeightVerification = Literal["sampled", "all", "off"]
"""Elements that are compared after weights moved: a few of each tensor, other ones each time, all, or none."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A reallocation as one rank requests it."""

    source: ModelLayout
    source_tensors: Mapping[str, Tensor]
    """This rank's local tensors under ``source``."""
    target: ModelLayout
    target_tensors: Mapping[str, Tensor] | None
    """This rank's local tensors under ``target``; None if they do not exist yet."""
    rank: int
    dtype: torch.dtype
    """Dtype of the target's tensors."""
    device: torch.device
    transport: TransportName
    max_staging_bytes: int
    """Most bytes that this rank sends or receives through staging memory in one round."""
    pack_below_bytes: int
    """Pieces smaller than this many bytes share messages."""
    cluster: ClusterSpec | None
    """Nodes of the ranks; None means one node."""
    verify_weights: WeightVerification
    """Elements that are compared after each run."""
    role: str
    """Name of the weights in errors."""

    def problems(self, world_size: int) -> Iterator[str]:
        """Yield the problems of this rank's request."""
        for side, layout in (("source", self.source.layout), ("target", self.target.layout)):
            if max(layout.ranks) >= world_size:
                yield f"{side} {layout} needs rank {max(layout.ranks)} but there are {world_size}; use fewer ranks"
        if self.transport not in get_args(TransportName):
            yield f"transport={self.transport!r} must be 'auto', 'push' or 'direct'"
        if self.verify_weights not in get_args(WeightVerification):
            yield f"verify_weights={self.verify_weights!r} must be 'sampled', 'all' or 'off'"
        if self.transport == "push" and self.device.type != "cpu":
            yield f"transport='push' needs CPU tensors, these are on {self.device}; use 'auto' or 'direct'"
        if self.transport == "push" and self.target_tensors is not None:
            yield "transport='push' owns the target's storage and cannot fill target_tensors; use 'auto' or 'direct'"
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
                yield f"{which}[{name!r}] is {tensor.dtype}, not dtype={dtype}; use the same dtype for both"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Properties of a reallocation that all ranks have in common."""

    wire_dtype: torch.dtype
    """Dtype of sent elements: the narrower one of source and target. Casting later gives the same bits."""
    has_given_target: bool
    """Whether the caller gave the target's tensors."""
    may_alias: bool
    """Whether a target tensor may be the source tensor itself: equal dtypes, and no given target tensors."""
    copied_names: frozenset[str]
    """Parameters that are not contiguous on some rank, and so are not aliased on any rank."""

    def aliased_names(self, request: Request, rank: int) -> frozenset[str]:
        """Return the parameters whose target tensor on ``rank`` is its source tensor."""
        if not self.may_alias:
            return frozenset()
        source, target = request.source, request.target
        return frozenset(
            name
            for name in target.names(rank)
            if name not in self.copied_names and source.shard(name, rank) == target.shard(name, rank)
        )


class _RequestSummary(NamedTuple):
    problem: str | None
    settings: tuple[object, ...]
    has_given_target: bool | None
    """None outside the target's ranks."""
    source_dtypes: frozenset[torch.dtype]
    copied_names: frozenset[str]


def agree_on_request(request: Request, world_size: int) -> Agreement:
    """Compare the requests of all ranks. Collective; raises PlanError on every rank if one is wrong or differs."""
    settings = (
        *(request.transport, request.dtype, request.device.type, request.verify_weights),
        *(request.max_staging_bytes, request.pack_below_bytes, world_size),
    )
    sources = request.source_tensors
    has_given_target = request.target_tensors is not None if request.rank in request.target.layout else None
    summaries = gather_objects(
        _RequestSummary(
            next(request.problems(world_size), None),
            settings,
            has_given_target,
            frozenset(tensor.dtype for tensor in sources.values()),
            frozenset(name for name, tensor in sources.items() if not tensor.is_contiguous()),
        )
    )
    _raise_problems([summary.problem for summary in summaries])
    _require_equal(
        "settings (transport, dtype, device, verify_weights, max_staging_bytes, pack_below_bytes, world_size)",
        [summary.settings for summary in summaries],
    )
    _require_equal("target_tensors given", [summary.has_given_target for summary in summaries])
    is_given = any(summary.has_given_target for summary in summaries)
    dtypes = frozenset[torch.dtype]().union(*(summary.source_dtypes for summary in summaries))
    return Agreement(
        wire_dtype=_wire_dtype(dtypes, request.dtype),
        has_given_target=is_given,
        may_alias=dtypes == {request.dtype} and not is_given,
        copied_names=frozenset[str]().union(*(summary.copied_names for summary in summaries)),
    )


def agree_on_plan(request: Request, element_bytes: int) -> ReallocationPlan:
    """Plan this rank's transfers and compare digests. Collective; raises PlanError on every rank if plans differ."""
    problem, digest = None, None
    try:
        plan = plan_reallocation(
            request.source, request.target, request.cluster, element_bytes=element_bytes, rank=request.rank
        )
        digest = plan.digest
    except PlanError as error:
        problem = str(error)
    answers = gather_objects((problem, digest))
    _raise_problems([problem for problem, _ in answers])
    _require_equal("plan digest", [digest[:12] for _, digest in answers])
    return plan


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
    """Raise PlanError unless all ranks gave the same value; None is ignored."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        sides = "; ".join(f"{value} on ranks {format_ranks(tuple(members))}" for value, members in ranks.items())
        raise PlanError(
            f"all ranks must request the same reallocation, but {what} differs: {sides}; "
            "pass the same layouts, model and options everywhere"
        )
