"""Protocol of the estimators that plans are priced with: seconds of a call and of a move, and bytes of both.

``roofline`` implements it from shapes and nominal rates, ``measured`` from a profile. The simulator and the search use
only the protocol.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Protocol

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout


class CallSeconds(NamedTuple):
    """Seconds of one call under one `CallPlan`, on its slowest rank, by activity.

    A named tuple: a search makes hundreds of thousands of them, and a frozen dataclass takes several times as long.
    """

    compute: float = 0.0
    """Computation and memory traffic of the model, with kernel launches."""
    tensor_parallel: float = 0.0
    """All-reduces of partial results inside layers."""
    sharding: float = 0.0
    """FSDP's gathers of weights and reductions of gradients that computation does not hide."""
    data_parallel: float = 0.0
    """All-reduces of gradients between replicas that computation does not hide."""
    pipeline: float = 0.0
    """Idle turns that fill and drain the pipeline, and sending hidden states between stages."""
    optimizer: float = 0.0
    """Clipping gradients and the optimizer's step."""
    other: float = 0.0
    """Fixed cost of any call, however small."""

    @property
    def total(self) -> float:
        """Seconds from the start of the call to its end."""
        return sum(self)

    def __add__(self, other: tuple[Any, ...]) -> CallSeconds:
        return CallSeconds(*map(operator.add, self, other))

    def scaled(self, factor: float) -> CallSeconds:
        """Return every activity's seconds multiplied by ``factor``."""
        return CallSeconds(*[factor * value for value in self])


class Estimator(Protocol):
    """Prices the calls and moves of plans.

    Implementations are pure and deterministic. A search needs thousands of distinct calls a second, and repeats calls,
    so implementations cache them.
    """

    @property
    def dataflow(self) -> Dataflow:
        """The dataflow whose calls are priced."""

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster that the calls run on."""

    def owner(self, role: str) -> str:
        """Return the role whose replicas a role's calls use: the role itself, or the one whose base it shares."""

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return the seconds of a call, from the moment its inputs and weights exist."""

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        """Return the seconds to move a role's weights from their home to another layout; 0 between equal layouts.

        For a role that is trained in part, only the trained part counts: a replica keeps the rest after its first fill.
        """

    def offload_seconds(self, num_bytes: float) -> float:
        """Return the seconds in which a rank copies this many bytes back from its host."""

    def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
        """Return the bytes that a replica keeps between calls, on the fullest rank of its layout."""

    def generates_in_copy(self, role: str, layout: Layout) -> bool:
        """Return whether generation reads a replica of its own in the layout of the role's home, in another dtype."""

    def active_bytes(self, call: str, plan: CallPlan) -> int:
        """Return the bytes that a call adds, on the rank where it adds most."""

    def slowdown(self, busy: int) -> float:
        """Return the factor by which a rank's work takes longer when ``busy`` ranks of its node work, itself included.

        It is 1 where ranks do not share compute resources. Calls are priced with only their own ranks at work.
        """
