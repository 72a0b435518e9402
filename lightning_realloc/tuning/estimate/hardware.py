"""How fast is a device at what a model does, and how long do ranks take to exchange something? Formulas and constants.

A :class:`ClusterSpec` says what the data sheet promises; :class:`Efficiency` says what share of it is reached. Where
a profile was measured, it replaces both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec


class Group(NamedTuple):
    """Ranks that take part in a collective operation together."""

    size: int
    nodes: int
    """Nodes that they are spread over, equally many on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What share of a device's nominal rates is reached, and what its host adds.

    Defaults are for data-centre GPUs and PyTorch's own kernels. ``docs/estimates.md`` lists sources and fits.
    """

    matmul_share: float = 0.67
    """Of peak flops in a matrix product large enough to fill the device. Fitted: ``benchmarks.real_figures``, the 7B
    column; it stands for everything around the products that is not priced by itself."""
    tile: int = 128
    """Rows and columns of the result that one multiprocessor computes at a time; a part of a tile costs a whole one.
    Source: NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization."""
    thin_tile: int = 16
    """Rows of a tile where the result has fewer than ``tile``: those of one tensor-core instruction. Such products are
    divided along the summed-over dim, too, so that no multiprocessor idles."""
    tiles_at_once: int = 108
    """Multiprocessors (A100: 108, H100: 132): on average half of them idle in a product's last wave."""
    depth_overhead: int = 128
    """Summed-over elements that filling and draining a tile's pipeline costs as much time as. Nominal."""
    attention_share: float = 0.5
    """Of peak flops in fused attention. Source: Dao, arXiv:2307.08691, fig. 5: 50 to 73 % on A100, the low end with
    causal masks and short sequences."""
    memory_share: float = 0.8
    """Of memory bandwidth in streaming kernels. Source: STREAM-like copies reach 80 to 90 % on A100 and H100."""
    link_share: float = 0.8
    """Of a link's bandwidth in collectives. Source: nccl-tests, all-reduce on 8 A100: about 235 of 300 GB/s."""
    layer_launch_s: float = 0.5e-3
    """Host time of one block's forward pass; a device that computes faster waits for it. Eager modules: 30 to 40
    kernels, 10 to 15 us each."""
    decode_launch_s: float = 0.5e-3
    """The same of one block in a decoding step; a captured graph takes a fraction of it."""
    experts_launch_s: float = 0.2e-3
    """Host time that experts in an MLP's place add to either: about fifteen more kernels (counted: Mixtral's block runs
    49, Llama's 34), which choose experts, sort tokens by them and bring results back into order."""
    collective_launch_s: float = 0.05e-3
    """Host time of one collective inside a block: launching it, and waiting for the last rank to do so. Nominal; an
    engine whose ranks drift apart in decoding pays 0.4 ms (fitted, as above)."""
    step_s: float = 1e-3
    """Host time of a decoding step beyond its blocks: drawing tokens, scheduling."""
    call_s: float = 10e-3
    """Of any call, however small: packing samples, agreeing on them, waiting for the slowest rank."""
    hides_communication: bool = True
    """Whether gathers and reductions of weights run beside computing; on CPU they take the same cores."""

    def __post_init__(self) -> None:
        for name in ("matmul_share", "attention_share", "memory_share", "link_share"):
            if not 0 < getattr(self, name) <= 1:
                raise PlanError(f"{name}={getattr(self, name)} is a share of a nominal rate; use one in (0, 1]")
        for name in ("tile", "thin_tile", "tiles_at_once"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be at least 1")
        launches = ("layer_launch_s", "decode_launch_s", "experts_launch_s", "collective_launch_s", "step_s", "call_s")
        for name in ("depth_overhead", *launches):
            if getattr(self, name) < 0:
                raise PlanError(f"{name}={getattr(self, name)} may not be negative")


CPU_EFFICIENCY = Efficiency(
    matmul_share=0.7, tile=16, thin_tile=1, tiles_at_once=1, depth_overhead=16, attention_share=0.3, memory_share=0.7,
    layer_launch_s=1e-4, decode_launch_s=1e-4, experts_launch_s=1e-4, collective_launch_s=0.0, step_s=1e-3,
    call_s=20e-3, hides_communication=False,
)  # fmt: skip
"""One core, before it is measured. Nominal but for the launches (0.11 to 0.13 ms per block of eager modules) and the
fixed cost of a call, which was seen to be 10 to 25 ms with 4 to 16 sequences."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a cluster at what a decoder asks of it. All times in seconds."""

    cluster: ClusterSpec
    efficiency: Efficiency

    def matmul(
        self, rows: float, inner: float, columns: float, element_bytes: int, *, num_products: float = 1.0
    ) -> float:
        """Return the time of (rows x inner) @ (inner x columns): by arithmetic or by memory traffic, what is longer.

        With ``num_products`` of as many, which one kernel computes: their tiles fill the device together.
        """
        if min(rows, inner, columns, num_products) <= 0:
            return 0.0
        eff = self.efficiency
        is_thin = rows <= eff.tile
        across = math.ceil(columns / eff.tile)
        height = math.ceil(rows / eff.thin_tile) * eff.thin_tile if is_thin else math.ceil(rows / eff.tile) * eff.tile
        tiles = num_products * across * height / eff.tile
        padded = num_products * height * across * eff.tile * inner
        waves = 1.0 if is_thin else (tiles + (eff.tiles_at_once - 1) / 2) / tiles
        fill = 1 + eff.depth_overhead / inner
        arithmetic = 2 * padded * waves * fill / (eff.matmul_share * self.cluster.device_flops)
        traffic = num_products * element_bytes * (rows * inner + inner * columns + rows * columns)
        return max(arithmetic, self.stream(traffic))

    def attention(self, flops: float) -> float:
        """Return the time of fused attention's arithmetic."""
        return flops / (self.efficiency.attention_share * self.cluster.device_flops)

    def stream(self, num_bytes: float) -> float:
        """Return the time of reading or writing device memory."""
        return num_bytes / (self.efficiency.memory_share * self.cluster.device_memory_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Links:
    """A cluster's connections at what ranks exchange. All times in seconds.

    Groups on several nodes reduce inside a node first and exchange a rank's part with its peers on other nodes
    meanwhile, each rank through its own adapter: the slower of the two counts.
    """

    cluster: ClusterSpec
    efficiency: Efficiency

    def gather(self, num_bytes: float, group: Group) -> float:
        """Return the time until every rank has ``num_bytes``, of which it brought an equal part. Scattering sums, too.

        Ring: each rank receives all parts but its own. Source of the ring's and the tree's cost: Thakur et al.,
        "Optimization of Collective Communication Operations in MPICH", 2005, doi:10.1177/1094342005051521.
        """
        if group.size < 2 or num_bytes <= 0:
            return 0.0
        local = group.size / group.nodes
        inside = num_bytes * (local - 1) / local / self._inside
        between = num_bytes * (group.nodes - 1) / group.nodes / local / self._between
        return max(inside, between) + self._hops(group)

    def all_reduce(self, num_bytes: float, group: Group) -> float:
        """Return the time until every rank has the sum: as scattering sums and gathering them."""
        return 2 * self.gather(num_bytes, group)

    def send(self, num_bytes: float, *, within_node: bool) -> float:
        """Return the time of one message between two ranks."""
        if within_node:
            return num_bytes / self._inside + self.cluster.intra_node_latency_s
        return num_bytes / self._between + self.cluster.inter_node_latency_s

    @property
    def _inside(self) -> float:
        return self.efficiency.link_share * self.cluster.intra_node_bytes_per_s

    @property
    def _between(self) -> float:
        return self.efficiency.link_share * self.cluster.inter_node_bytes_per_s

    def _hops(self, group: Group) -> float:
        """Return the latency: of a tree, which small messages take and large ones hide."""
        inside = math.ceil(math.log2(group.size / group.nodes)) if group.size > group.nodes else 0
        between = math.ceil(math.log2(group.nodes)) if group.nodes > 1 else 0
        return inside * self.cluster.intra_node_latency_s + between * self.cluster.inter_node_latency_s
