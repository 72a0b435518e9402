"""What does a search for a plan ask about its parts? Seconds of a call and of a move, bytes of both.

The answers come from ``roofline`` (worked out from shapes and rates) or from measurements; a search sees the protocol.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSeconds:
    """One call under one :class:`CallPlan`, by what the slowest rank spends its time on."""

    compute: float = 0.0
    """Arithmetic and memory traffic of the model, and launching it."""
    tensor_parallel: float = 0.0
    """Adding up partial results inside layers."""
    sharding: float = 0.0
    """Gathering FSDP's weights and scattering its gradients, as far as computing does not hide it."""
    data_parallel: float = 0.0
    """Adding up gradients of replicas, as far as computing does not hide it."""
    pipeline: float = 0.0
    """Waiting for the first and the last micro-batch, and sending hidden states from stage to stage."""
    optimizer: float = 0.0
    other: float = 0.0
    """What a call costs however small it is."""

    @property
    def total(self) -> float:
        """Seconds from the call's start to its end."""
        return sum(_seconds(self))

    def __add__(self, other: CallSeconds) -> CallSeconds:
        sums = map(operator.add, _seconds(self), _seconds(other))
        return CallSeconds(**dict(zip(_PARTS, sums, strict=True)))

    def times(self, factor: float) -> CallSeconds:
        """Return all parts multiplied by ``factor``."""
        return CallSeconds(**{name: factor * value for name, value in zip(_PARTS, _seconds(self), strict=True)})


# Looked up once: a search adds up tens of thousands of these.
_PARTS = tuple(item.name for item in fields(CallSeconds))
_seconds: Callable[[CallSeconds], tuple[float, ...]] = operator.attrgetter(*_PARTS)


class Estimator(Protocol):
    """What a search asks. Pure and deterministic; thousands of distinct calls a second, repeated ones for nothing."""

    @property
    def dataflow(self) -> Dataflow:
        """The calls that can be asked about."""

    @property
    def cluster(self) -> ClusterSpec:
        """Where they run."""

    def owner(self, role: str) -> str:
        """Return the role on whose replicas a role's calls work: itself, unless it shares that one's base."""

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return how long a call takes once its inputs and weights are there."""

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        """Return how long a role's weights travel from their home to another layout, 0 between equal ones.

        Of a role that is trained in part, what a copy needs from the second time on: the trained part.
        """

    def offload_seconds(self, num_bytes: float) -> float:
        """Return how long a rank takes to have so many bytes back from its host."""

    def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
        """Return what a replica keeps between calls on the fullest rank of its layout."""

    def active_bytes(self, call: str, plan: CallPlan) -> int:
        """Return what a call adds on the rank where it adds most."""

    def slowdown(self, busy: int) -> float:
        """Return how many times longer a rank's work takes when so many ranks of its node work, itself one of them.

        1 where every rank has what it computes with to itself; calls are priced with their own ranks at work alone.
        """
