"""Profile of a machine: measured seconds, with interpolation between and beyond the measured points.

The profiler in ``strategies.measure`` fills a table, and ``measured`` reads it. A table is plain data, which is saved
as JSON and compared by value.
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
"""``train`` is a forward and backward pass without reduction of gradients; ``train_last`` reduces them."""
FORMAT_VERSION = 2
"""Version of the JSON format that is written. For a file of an unknown version, a run warns and measures again."""
_AXES_OF_FORMAT_1 = ("pp", "dp", "fsdp", "tp")
"""Format 1 listed degrees by position, in this order; format 2 names them, as in ``"dp2.tp2"``."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a non-decreasing, piecewise linear function of a size.

    Outside of the measured points the nearest segment is extended, but not below 0. A single point means seconds in
    proportion to the size.
    """

    points: tuple[tuple[float, float], ...]
    """Pairs (size, seconds), with ascending sizes and non-decreasing seconds."""

    def __post_init__(self) -> None:
        if not self.points:
            raise PlanError("a curve needs at least one measured point")
        for (size, seconds), (larger, slower) in zip(self.points, self.points[1:], strict=False):
            if larger <= size or slower < seconds:
                raise PlanError(f"a curve rises from point to point; ({larger}, {slower}) follows ({size}, {seconds})")

    @classmethod
    def from_samples(cls, samples: Iterable[tuple[float, float]]) -> Curve:
        """Fit a curve to samples (size, seconds) by isotonic regression; equal sizes count as their median.

        Least squares by pooling adjacent violators. Source: Ayer et al., "An Empirical Distribution Function for
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
        """Return the seconds for a size."""
        if len(self.points) == 1:
            ((known, seconds),) = self.points
            return seconds * size / known
        at = min(max(bisect_left(self.points, (size,)), 1), len(self.points) - 1)
        (left, low), (right, high) = self.points[at - 1 : at + 1]
        return max(0.0, low + (high - low) * (size - left) / (right - left))


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds as a function of two sizes: curves over the first size, with linear interpolation in the second."""

    curves: tuple[tuple[float, Curve], ...]
    """Pairs (second size, curve over the first size), with ascending second sizes."""

    @classmethod
    def from_samples(cls, samples: Iterable[tuple[float, float, float]]) -> Surface:
        """Fit a surface to samples (first size, second size, seconds)."""
        by_second: dict[float, list[tuple[float, float]]] = {}
        for first, second, seconds in samples:
            by_second.setdefault(float(second), []).append((first, seconds))
        return cls(tuple((second, Curve.from_samples(by_second[second])) for second in sorted(by_second)))

    def __call__(self, first: float, second: float) -> float:
        """Return the seconds for two sizes."""
        if len(self.curves) == 1:
            return self.curves[0][1](first)
        at = min(max(bisect_left([size for size, _ in self.curves], second), 1), len(self.curves) - 1)
        (left, below), (right, above) = self.curves[at - 1 : at + 1]
        low, high = below(first), above(first)
        return max(0.0, low + (high - low) * (second - left) / (right - left))


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of a pass over one micro-batch, or of a decoding step, while all other ranks are idle.

    The sizes of both surfaces are tokens and sequence length; for decoding, sequences and context length.
    """

    block: Surface
    """Seconds of one block."""
    rest: Surface
    """Seconds outside of blocks: embedding, head, loss or sampling, and host work."""


class PassKey(NamedTuple):
    """Key of a measured pass."""

    model: str
    """Name of the shape of blocks and head."""
    kind: PassKind
    dims: ParallelDims
    """Degrees of the measurement; pp is 1, and dp is 1 unless gradients are reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTable:
    """All measurements of one machine type."""

    machine: Mapping[str, str]
    """Device, versions and number of ranks; a table is valid only for a machine with the same values."""
    passes: Mapping[PassKey, PassTimes] = field(default_factory=dict)
    """Seconds of passes."""
    optimizer: Mapping[str, Curve] = field(default_factory=dict)
    """Model -> curve from the elements of a rank to the seconds to clip their gradients and to step."""
    moves: Mapping[str, Curve] = field(default_factory=dict)
    """Transport -> curve from the bytes of the busiest rank to the seconds of a reallocation."""
    offload: Curve | None = None
    """Curve from the bytes of a rank to the seconds to copy them back from the host; None: not measured."""
    crowding: Mapping[int, Curve] = field(default_factory=dict)
    """Tensor-parallel degree -> curve from the busy ranks of a node to the slowdown against one group alone."""
    seconds: float = 0.0
    """Duration of the measurement."""

    def slowdown_of(self, busy: float, tp: int = 1) -> float:
        """Return the factor by which passes of groups of ``tp`` ranks take longer with ``busy`` busy ranks on a node.

        Beyond the measured range it grows in proportion to ``busy``, since throughput no longer grows. Without a
        measurement it is 1.
        """
        curve = self.crowding.get(tp) or self.crowding.get(1)
        if curve is None:
            return 1.0
        known, factor = curve.points[-1]
        return max(1.0, curve(busy)) if busy <= known else factor * busy / known

    def to_json(self) -> str:
        """Return the table as JSON text."""
        content = {
            "format": FORMAT_VERSION,
            "machine": dict(self.machine),
            "seconds": self.seconds,
            "crowding": {str(tp): curve.points for tp, curve in self.crowding.items()},
            "moves": {name: curve.points for name, curve in self.moves.items()},
            "offload": None if self.offload is None else self.offload.points,
            "optimizer": {name: curve.points for name, curve in self.optimizer.items()},
            "passes": [
                {
                    "model": key.model,
                    "kind": key.kind,
                    "dims": str(key.dims),
                    "block": _plain(times.block),
                    "rest": _plain(times.rest),
                }
                for key, times in self.passes.items()
            ],
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ProfileTable:
        """Read the text that :meth:`to_json` returned.

        Raises:
            PlanError: for any other text.
        """
        try:
            content = json.loads(text)
            if content["format"] in (1, FORMAT_VERSION):
                return cls(
                    machine=dict(content["machine"]),
                    seconds=float(content["seconds"]),
                    crowding={int(tp): _curve(points) for tp, points in content["crowding"].items()},
                    moves={name: _curve(points) for name, points in content["moves"].items()},
                    offload=None if content["offload"] is None else _curve(content["offload"]),
                    optimizer={name: _curve(points) for name, points in content["optimizer"].items()},
                    passes=dict(map(_read_pass, content["passes"])),
                )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"this is not a profile of ProfileTable.to_json ({error!r}); remove it") from error
        raise PlanError(
            f"a profile of format {content['format']} cannot be read, only up to {FORMAT_VERSION}; remove it"
        )


def _plain(surface: Surface) -> list[Any]:
    return [[second, curve.points] for second, curve in surface.curves]


def _curve(points: Iterable[Iterable[float]]) -> Curve:
    return Curve(tuple((float(size), float(seconds)) for size, seconds in points))


def _surface(curves: Iterable[tuple[float, Iterable[Iterable[float]]]]) -> Surface:
    return Surface(tuple((float(second), _curve(points)) for second, points in curves))


def _read_pass(entry: Mapping[str, Any]) -> tuple[PassKey, PassTimes]:
    if entry["kind"] not in get_args(PassKind):
        raise ValueError(f"kind {entry['kind']!r}")
    key = PassKey(str(entry["model"]), entry["kind"], _read_dims(entry["dims"]))
    return key, PassTimes(_surface(entry["block"]), _surface(entry["rest"]))


def _read_dims(degrees: str | list[int]) -> ParallelDims:
    if isinstance(degrees, str):
        return ParallelDims.parse(degrees)
    return ParallelDims(**dict(zip(_AXES_OF_FORMAT_1, degrees, strict=True)))
