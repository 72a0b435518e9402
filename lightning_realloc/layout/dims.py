"""Degrees of parallelism, and the ranks that fill them.

``ParallelDims`` holds the degrees; ``Layout`` adds the ordered ranks. ``cuts`` and ``model`` divide parameters.
CONTRIBUTING.md lists the places that a further axis concerns.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

from lightning_realloc.errors import LayoutError


class Coordinate(NamedTuple):
    """Position of a rank along every axis."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    cp: int = 0
    tp: int = 0


class Share(NamedTuple):
    """One of the equal shares into which the ranks along some axes divide something."""

    num_shares: int
    """The product of the axes' degrees."""
    position: int
    """Position among the shares; the last axis varies fastest."""


AXES = Coordinate._fields
"""The mesh axes, outermost first. Neighbours along the last axis are adjacent ranks."""

_degrees_of: Callable[[ParallelDims], tuple[int, ...]] = operator.attrgetter(*AXES)
_DEGREE = re.compile(r"([a-z]+)([0-9]+)")


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Degree of parallelism along every axis, in the order of ``AXES``.

    ``ep`` and ``vpp`` are no factors of ``size``: for experts alone, ``ep`` divides the ranks of ``dp`` and ``fsdp``
    anew, and ``vpp`` divides the blocks of a stage.

    >>> ParallelDims.parse("dp2.tp4").size
    8
    """

    pp: int = 1
    """Number of pipeline stages."""
    vpp: int = 1
    """Number of contiguous runs of blocks that each pipeline stage holds: stage i the runs i, i + pp, i + 2 pp, …"""
    dp: int = 1
    """Number of data-parallel replicas."""
    fsdp: int = 1
    """Number of ranks that divide samples, and shard weights: chunks of dim 0 of local tensors, gathered for use."""
    cp: int = 1
    """Number of context-parallel ranks that divide the tokens of each row, and shard weights as ``fsdp`` does."""
    tp: int = 1
    """Number of tensor-parallel ranks that share the weights of each layer."""
    ep: int = 1
    """Number of expert-parallel ranks that divide the experts of each layer: neighbours along fsdp, then along dp."""

    def __post_init__(self) -> None:
        for axis in self.__dataclass_fields__:
            degree = getattr(self, axis)
            if not is_count(degree):
                raise LayoutError(f"{axis}={degree!r} must be a whole number of at least 1; leave it out for 1")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                f"vpp={self.vpp} is the number of runs of blocks of each pipeline stage, and pp=1 has one stage; "
                "use a larger pp, or leave vpp out"
            )
        if self.ep > 1 and self.ep not in self.expert_degrees:
            raise LayoutError(
                f"ep={self.ep} must divide fsdp={self.fsdp}, or be a multiple of it that divides dp*fsdp="
                f"{self.dp * self.fsdp}; {name_expert_degrees(self.expert_degrees)}, or use an fsdp that ep divides, "
                f"as in fsdp{self.ep}.ep{self.ep}"
            )

    @property
    def size(self) -> int:
        """Number of ranks: the product of the degrees."""
        return math.prod(self.degrees)

    @property
    def num_runs(self) -> int:
        """Number of runs into which pipeline stages divide the blocks."""
        return self.pp * self.vpp

    @property
    def num_shards(self) -> int:
        """Number of shards of weights that FSDP gathers for use; those of experts are fewer under ``ep``."""
        return self.fsdp * self.cp

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees in the order of ``AXES``."""
        return _degrees_of(self)

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        """The degrees ep that the other degrees allow."""
        inside = (n for n in range(1, self.fsdp) if self.fsdp % n == 0)
        return (*inside, *(self.fsdp * n for n in range(1, self.dp + 1) if self.dp % n == 0))

    @classmethod
    def parse(cls, text: str) -> ParallelDims:
        """Read ``"fsdp2.tp2"``; omitted axes have degree 1. Raises LayoutError for anything else."""
        axes, degrees = list(cls.__dataclass_fields__), dict[str, int]()
        hint = f'write degrees as in "fsdp2.tp2", axes in the order {", ".join(axes)}'
        for part in text.strip().split("."):
            match = _DEGREE.fullmatch(part.strip())
            if match is None or match[1] not in axes:
                raise LayoutError(
                    f"unknown layout {text!r}: {part!r} is not one of {', '.join(axes)} and a degree; {hint}"
                )
            if match[1] in degrees:
                raise LayoutError(f"layout {text!r} names the axis {match[1]} twice; {hint}")
            degrees[match[1]] = int(match[2])
        dims = cls(**degrees)  # first, so that the order below is that of a layout which exists
        ordered = sorted(degrees, key=axes.index)
        if list(degrees) != ordered:
            wanted = ".".join(f"{axis}{degrees[axis]}" for axis in ordered)
            raise LayoutError(
                f"layout {text!r} must list its axes outermost first ({', '.join(axes)}); write {wanted!r}"
            )
        return dims

    def __str__(self) -> str:
        degrees = ((axis, getattr(self, axis)) for axis in self.__dataclass_fields__)
        return ".".join(f"{axis}{n}" for axis, n in degrees if n > 1) or "dp1"


@lru_cache(maxsize=256)
def _positions(ranks: tuple[int, ...]) -> Mapping[int, int]:
    """Return rank -> its index. A search makes thousands of layouts of the same thousands of ranks, which share it."""
    return {rank: index for index, rank in enumerate(ranks)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism and the ordered ranks that fill them. The last axis varies fastest.

    >>> layout = Layout.parse("fsdp2.tp2@4-7")
    >>> layout.coordinate(6)
    Coordinate(pp=0, dp=0, fsdp=1, cp=0, tp=0)
    >>> layout.group(6, "tp")
    (6, 7)
    """

    stage_axes: ClassVar[tuple[str, ...]] = ("pp",)
    """Axes along which ranks hold other parameters, and work on the same samples one after the other."""
    batch_axes: ClassVar[tuple[str, ...]] = ("dp", "fsdp")
    """Axes over which samples are divided."""
    token_axes: ClassVar[tuple[str, ...]] = ("cp",)
    """Axes along which ranks have the same samples, and each runs layers on other tokens of every row."""
    replica_axes: ClassVar[tuple[str, ...]] = ("dp",)
    """Axes along which ranks hold the same weights, and gradients of other samples, which FSDP averages."""
    shard_axes: ClassVar[tuple[str, ...]] = ("fsdp", "cp")
    """Axes along which FSDP shards weights, and gathers them for use."""
    tensor_axes: ClassVar[tuple[str, ...]] = ("tp",)
    """Axes along which ranks share the weights of each layer, and the samples."""
    expert_axes: ClassVar[tuple[str, ...]] = ("ep",)
    """Axes along which ranks hold other experts, and exchange the tokens that are routed to these."""
    expert_shard_axes: ClassVar[tuple[str, ...]] = ("expert_fsdp", "cp")
    """Axes along which FSDP shards experts: ranks of ``fsdp`` that ``ep`` leaves, and ``cp``."""
    expert_replica_axes: ClassVar[tuple[str, ...]] = ("expert_dp",)
    """Axes along which ranks hold the same shards of experts: ranks of ``dp`` that ``ep`` leaves."""
    weight_axes: ClassVar[tuple[str, ...]] = ("copy", "cp", "tp")
    """Axes along which ranks of a stage hold one copy of all weights: ``copy`` is the larger of ``fsdp`` and ``ep``."""
    dims: ParallelDims
    ranks: tuple[int, ...]
    """Rank at each coordinate, in row-major order over ``AXES``."""
    _position: Mapping[int, int] = field(init=False, repr=False, compare=False)
    """Rank -> its index in ``ranks``."""
    _spans: dict[str, tuple[int, int]] = field(init=False, repr=False, compare=False)
    """Axis -> degree, and distance of neighbours in ``ranks``. An entry may divide the ranks of other axes anew."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "_position", _positions(self.ranks))
        strides = (math.prod(self.dims.degrees[number + 1 :]) for number in range(len(AXES)))
        spans = dict(zip(AXES, zip(self.dims.degrees, strides, strict=True), strict=True))
        object.__setattr__(self, "_spans", spans | _expert_spans(self.dims))
        if min(self.ranks, default=0) < 0:
            raise LayoutError(
                f"ranks must be 0 or more, got {min(self.ranks)} in {self.dims}@{format_ranks(self.ranks)}"
            )
        if len(self._position) != len(self.ranks):
            repeated = sorted({rank for rank in self.ranks if self.ranks.count(rank) > 1})
            raise LayoutError(
                f"ranks {repeated} appear more than once in {self.dims}@{format_ranks(self.ranks)}; list each once"
            )
        if self.dims.size != len(self.ranks):
            raise LayoutError(
                f"the degrees of {self.dims} multiply to {self.dims.size} but {len(self.ranks)} ranks are given "
                f"({format_ranks(self.ranks)}); give {self.dims.size} ranks or change a degree"
            )

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None) -> Layout:
        """Read ``"fsdp2.tp2@0-3"`` or ``"dp2.tp2@0,2,1,3"``.

        Without ``@`` the ranks are 0 .. size-1, and ``size`` must equal ``world_size`` if given. With ``@`` every
        rank must be below ``world_size``. Raises LayoutError.
        """
        degrees, separator, listed = text.partition("@")
        dims = ParallelDims.parse(degrees)
        if separator:
            layout = cls(dims, parse_ranks(listed))
        elif world_size is not None and dims.size != world_size:
            raise LayoutError(
                f"the degrees of {text.strip()!r} multiply to {dims.size} but there are {world_size} ranks; "
                f'change a degree or name the ranks, as in "{dims}@0-{dims.size - 1}"'
            )
        else:
            layout = cls(dims, tuple(range(dims.size)))
        if world_size is not None and max(layout.ranks) >= world_size:
            raise LayoutError(
                f"layout {text.strip()!r} uses rank {max(layout.ranks)} but there are only {world_size} ranks "
                f"(0-{world_size - 1}); use fewer ranks or start more processes"
            )
        return layout

    def __str__(self) -> str:
        return f"{self.dims}@{format_ranks(self.ranks)}"

    def __contains__(self, rank: object) -> bool:
        return rank in self._position

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of ``rank``. Raises LayoutError when the rank is not part of the layout."""
        index = self._index(rank)
        return Coordinate(*(index // stride % degree for degree, stride in self.spans(AXES)))

    def share(self, rank: int, *axes: str) -> Share:
        """Return the place of ``rank`` among the ranks along ``axes``. Raises LayoutError as `coordinate` does."""
        index, num_shares, position = self._index(rank), 1, 0
        for degree, stride in self.spans(axes):
            num_shares, position = num_shares * degree, position * degree + index // stride % degree
        return Share(num_shares, position)

    def count(self, *axes: str) -> int:
        """Return the number of ranks along ``axes``."""
        number = 1
        for degree, _ in self.spans(axes):
            number *= degree
        return number

    def spans(self, axes: Iterable[str]) -> list[tuple[int, int]]:
        """Return the degree of each axis, and the distance of its neighbours in ``ranks``."""
        try:
            return [self._spans[axis] for axis in axes]
        except KeyError as error:
            raise LayoutError(f"unknown axis {error}; use {', '.join(self._spans)}") from None

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axes``, itself included, in the layout's order."""
        index = self._index(rank)
        start = index - sum(index // stride % degree * stride for degree, stride in self.spans(axes))
        return tuple(self.ranks[start + offset] for offset in self._offsets(axes))

    def batch_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that work on other samples with the same part of the model as ``rank``, itself included."""
        return self.group(rank, *self.batch_axes)

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share the weights of each layer, and the samples, with ``rank``, itself included."""
        return self.group(rank, *self.tensor_axes)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every group along ``axes``, ordered by the position of its first rank in the layout.

        Takes time in proportion to the number of ranks, while `group` for each of them takes its square.
        """
        spans, offsets = self.spans(axes), self._offsets(axes)
        starts = (i for i in range(len(self.ranks)) if not any(i // stride % degree for degree, stride in spans))
        return tuple(tuple(self.ranks[start + offset] for offset in offsets) for start in starts)

    @property
    def is_sharded(self) -> bool:
        """Whether a forward pass gathers weights."""
        return self.count(*self.shard_axes) > 1

    @property
    def runs_in_lockstep(self) -> bool:
        """Whether a forward pass is collective over ranks with other samples: it gathers weights or sends tokens."""
        return self.dims.fsdp * self.dims.ep > 1  # ranks along cp gather, too, for the same samples

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold the same weights, and average their gradients."""
        return self.count(*self.replica_axes) > 1

    @property
    def axis_without_generation(self) -> str | None:
        """First degree above 1 with which no call can generate; None if there is none."""
        if self.dims.vpp > 1:
            return "vpp"
        return next((axis for axis in self.token_axes if self.count(axis) > 1), None)

    @property
    def row_divisions(self) -> tuple[Layout, ...]:
        """Layouts in which more of these ranks divide rows instead of samples, first of ``dp``, then of ``fsdp``.

        >>> [str(other.dims) for other in Layout.parse("dp2.fsdp2").row_divisions]
        ['fsdp2.cp2', 'cp4']
        """
        dims, found = self.dims, []
        for factor in range(2, dims.dp * dims.fsdp + 1):
            dp = dims.dp // math.gcd(dims.dp, factor)
            fsdp, rest = divmod(dims.dp * dims.fsdp, factor * dp)
            degrees = replace(dims, ep=1, dp=dp, fsdp=max(1, fsdp), cp=factor * dims.cp)
            if rest == 0 and (dims.ep == 1 or dims.ep in degrees.expert_degrees):
                found.append(Layout(replace(degrees, ep=dims.ep), self.ranks))
        return tuple(found)

    @property
    def data_parallel_size(self) -> int:
        """Number of shares that a batch is split into: ``dp * fsdp``."""
        return self.count(*self.batch_axes)

    def data_parallel_index(self, rank: int) -> int:
        """Return the index of the batch share that ``rank`` works on; dp is the outer index, fsdp the inner one."""
        return self.share(rank, *self.batch_axes).position

    def _index(self, rank: int) -> int:
        if rank not in self._position:
            raise LayoutError(f"rank {rank} is not part of layout {self}; pass one of its ranks")
        return self._position[rank]

    def _offsets(self, axes: Iterable[str]) -> list[int]:
        """Return the distances in ``ranks`` from the first rank of a group along ``axes`` to each of its ranks."""
        offsets = [0]
        for degree, stride in self.spans(axes):
            offsets = [offset + position * stride for offset in offsets for position in range(degree)]
        return sorted(offsets)


def _expert_spans(dims: ParallelDims) -> dict[str, tuple[int, int]]:
    """Return degrees and strides of the axes along which experts are divided; see ``Layout._spans``."""
    ep, fsdp, stride = dims.ep, dims.fsdp, dims.cp * dims.tp
    copy = max(ep, fsdp)
    return {
        "ep": (ep, stride),
        "expert_fsdp": (copy // ep, ep * stride),
        "expert_dp": (dims.dp * fsdp // copy, copy * stride),
        "copy": (copy, stride),
    }


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read ``"0-3,8,6"`` as ranks in that order. Raises LayoutError."""
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", part)
        if match is None:
            raise LayoutError(
                f'{part.strip()!r} in "@{text.strip()}" is not a rank or a range; '
                'write ranks as in "@0-3" or "@0,2,1,3"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise LayoutError(
                f'the range {part.strip()} in "@{text.strip()}" runs backwards; list such ranks one by one'
            )
        ranks.extend(range(first, last + 1))
    return tuple(ranks)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the shortest text that ``parse_ranks`` reads back; ascending runs are written as ``first-last``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def name_expert_degrees(legal: tuple[int, ...]) -> str:
    """Return the way out of a wrong degree ``ep``, for an error message."""
    return "leave ep out" if legal == (1,) else f"use ep in {legal}"


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 1; True, which Python counts as 1, is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
