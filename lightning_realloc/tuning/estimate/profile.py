"""What was measured on the devices present, and how it is read between and beyond the measured points.

Filled by ``runtime.profiler``; read by ``measured``. A table is plain data: it is saved as JSON and compared by value.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import ParallelDims

PassKind = Literal["infer", "train", "train_last", "decode"]
"""``train`` is a forward and backward pass that keeps its gradients to itself, ``train_last`` one that reduces them."""
FORMAT = 1
"""Of the JSON; another one is not read."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over one size: never falling, piecewise linear through the measured points.

    Beyond the last point, and before the first, the nearest segment goes on, not below 0; a single point is read as
    proportional to the size.
    """

    points: tuple[tuple[float, float], ...]
    """(size, seconds), sizes ascending, seconds not falling."""

    def __post_init__(self) -> None:
        if not self.points:
            raise PlanError("a curve needs at least one measured point")
        for (size, seconds), (larger, slower) in zip(self.points, self.points[1:], strict=False):
            if larger <= size or slower < seconds:
                raise PlanError(f"a curve rises from point to point; ({larger}, {slower}) follows ({size}, {seconds})")

    @classmethod
    def through(cls, samples: Iterable[tuple[float, float]]) -> Curve:
        """Return the never-falling curve nearest to the samples, of equal sizes their median.

        Nearest in squares, by pooling adjacent violators. Source: Ayer et al., "An Empirical Distribution Function for
        Sampling with Incomplete Information", 1955, doi:10.1214/aoms/1177728423.
        """
        by_size: dict[float, list[float]] = {}
        for size, seconds in samples:
            by_size.setdefault(float(size), []).append(float(seconds))
        pools: list[tuple[float, list[float]]] = []  # mean seconds, sizes
        for size in sorted(by_size):
            mean, sizes = median(by_size[size]), [size]
            while pools and pools[-1][0] > mean:
                before, earlier = pools.pop()
                mean = (before * len(earlier) + mean * len(sizes)) / (len(earlier) + len(sizes))
                sizes = earlier + sizes
            pools.append((mean, sizes))
        return cls(tuple((size, mean) for mean, sizes in pools for size in sizes))

    def __call__(self, size: float) -> float:
        """Return the seconds of a size."""
        if len(self.points) == 1:
            ((known, seconds),) = self.points
            return seconds * size / known
        at = min(max(bisect_left(self.points, (size,)), 1), len(self.points) - 1)
        (left, low), (right, high) = self.points[at - 1 : at + 1]
        return max(0.0, low + (high - low) * (size - left) / (right - left))


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds over two sizes: a curve over the first for some values of the second, linear between those."""

    curves: tuple[tuple[float, Curve], ...]
    """(second size, curve over the first), second sizes ascending."""

    @classmethod
    def through(cls, samples: Iterable[tuple[float, float, float]]) -> Surface:
        """Return the surface of (first size, second size, seconds)."""
        by_second: dict[float, list[tuple[float, float]]] = {}
        for first, second, seconds in samples:
            by_second.setdefault(float(second), []).append((first, seconds))
        return cls(tuple((second, Curve.through(by_second[second])) for second in sorted(by_second)))

    def __call__(self, first: float, second: float) -> float:
        """Return the seconds of two sizes."""
        if len(self.curves) == 1:
            return self.curves[0][1](first)
        at = min(max(bisect_left([size for size, _ in self.curves], second), 1), len(self.curves) - 1)
        (left, below), (right, above) = self.curves[at - 1 : at + 1]
        low, high = below(first), above(first)
        return max(0.0, low + (high - low) * (second - left) / (right - left))


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One model's pass over one micro-batch, or its decoding step, on a group of ranks that works alone."""

    block: Surface
    """Of one block. Sizes: tokens and their sequences' length; of decoding, sequences and their context."""
    rest: Surface
    """Of all but the blocks: embedding, head, loss or sampling, and what the host does."""


class PassKey(NamedTuple):
    """What was measured."""

    model: str
    """A name for the shape of blocks and head."""
    kind: PassKind
    dims: ParallelDims
    """pp is 1; dp, too, but where gradients are reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTable:
    """All that was measured on one kind of machine."""

    machine: Mapping[str, str]
    """Device, versions, number of ranks: what a table must share with the machine that it is read on."""
    passes: Mapping[PassKey, PassTimes] = field(default_factory=dict)
    optimizer: Mapping[str, Curve] = field(default_factory=dict)
    """Model -> elements of a rank -> seconds to clip their gradients and to step."""
    moves: Mapping[str, Curve] = field(default_factory=dict)
    """Transport -> bytes of the busiest rank -> seconds of a reallocation."""
    offload: Curve | None = None
    """Bytes of a rank -> seconds until they are back from the host."""
    crowding: Mapping[int, Curve] = field(default_factory=dict)
    """Tensor-parallel degree -> busy ranks of a node -> how many times longer passes take than those of one group."""
    seconds: float = 0.0
    """What measuring took."""

    def slowdown_of(self, busy: float, tp: int = 1) -> float:
        """Return how many times longer passes of groups of ``tp`` ranks take where so many ranks of a node are busy.

        Beyond what was measured it grows in proportion: no more gets done. Without a measurement it is 1.
        """
        curve = self.crowding.get(tp) or self.crowding.get(1)
        if curve is None:
            return 1.0
        known, factor = curve.points[-1]
        return max(1.0, curve(busy)) if busy <= known else factor * busy / known

    def to_json(self) -> str:
        """Return the table as text."""
        content = {
            "format": FORMAT,
            "machine": dict(self.machine),
            "seconds": self.seconds,
            "crowding": {str(tp): curve.points for tp, curve in self.crowding.items()},
            "moves": {name: curve.points for name, curve in self.moves.items()},
            "offload": None if self.offload is None else self.offload.points,
            "optimizer": {name: curve.points for name, curve in self.optimizer.items()},
            "passes": [
                {"model": key.model, "kind": key.kind, "dims": key.dims.degrees,
                 "block": _plain(times.block), "rest": _plain(times.rest)}
                for key, times in self.passes.items()
            ],
        }  # fmt: skip
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ProfileTable:
        """Read what :meth:`to_json` wrote. Raises PlanError for anything else."""
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise PlanError(f"a profile of format {content['format']} cannot be read, only {FORMAT}; remove it")
            return cls(
                machine=dict(content["machine"]),
                seconds=float(content["seconds"]),
                crowding={int(tp): _curve(points) for tp, points in content["crowding"].items()},
                moves={name: _curve(points) for name, points in content["moves"].items()},
                offload=None if content["offload"] is None else _curve(content["offload"]),
                optimizer={name: _curve(points) for name, points in content["optimizer"].items()},
                passes=dict(map(_read_pass, content["passes"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"this is no profile that was saved here ({error!r}); remove it") from error


def _plain(surface: Surface) -> list[Any]:
    return [[second, curve.points] for second, curve in surface.curves]


def _curve(points: Iterable[Iterable[float]]) -> Curve:
    return Curve(tuple((float(size), float(seconds)) for size, seconds in points))


def _surface(curves: Iterable[tuple[float, Iterable[Iterable[float]]]]) -> Surface:
    return Surface(tuple((float(second), _curve(points)) for second, points in curves))


def _read_pass(entry: Mapping[str, Any]) -> tuple[PassKey, PassTimes]:
    if entry["kind"] not in get_args(PassKind):
        raise ValueError(f"kind {entry['kind']!r}")
    key = PassKey(str(entry["model"]), entry["kind"], ParallelDims(*entry["dims"]))
    return key, PassTimes(_surface(entry["block"]), _surface(entry["rest"]))
