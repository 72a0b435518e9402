"""Roofline rates of a device and of the links between ranks, as formulas and constants.

`ClusterSpec` has the rates of the data sheet, and `Efficiency` the fraction of them that is reached. A measured profile
replaces both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec


class LinkRates(NamedTuple):
    """Rates of a link between nodes that is slower than the cluster's usual one."""

    bytes_per_s: float
    latency_s: float


class Group(NamedTuple):
    """Ranks of one collective operation."""

    size: int
    """Number of ranks."""
    nodes: int
    """Number of nodes that the ranks are spread over evenly."""
    link: LinkRates | None = None
    """The slowest link between these nodes; None: the cluster's usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of a device's nominal rates that are reached, and times that its host adds.

    Defaults are for data-centre GPUs and PyTorch's own kernels. ``docs/internals/estimates.md`` lists sources and fits.
    """

    matmul_share: float = 0.67
    """Fraction of peak flops in a matrix product that fills the device. Fitted on the 7B column of
    ``benchmarks.real_figures``; it includes all work around the products that has no price of its own."""
    tile: int = 128
    """Rows and columns of the result that one multiprocessor computes at a time; a partial tile costs a whole one.
    Source: NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization."""
    thin_tile: int = 16
    """Rows of a tile for a result with fewer rows than ``tile``: those of one tensor-core instruction. Such products
    are also split along the inner dim, so that no multiprocessor is idle."""
    tiles_at_once: int = 108
    """Number of multiprocessors (A100: 108, H100: 132). On average half of them are idle in a product's last wave."""
    depth_overhead: int = 128
    """Time to fill and drain a tile's pipeline, in elements of the inner dim. Nominal."""
    attention_share: float = 0.5
    """Fraction of peak flops in fused attention. Source: Dao, arXiv:2307.08691, fig. 5: 50 to 73 % on A100, the low end
    with causal masks and short sequences."""
    memory_share: float = 0.8
    """Fraction of memory bandwidth in streaming kernels. Source: STREAM copies reach 80 to 90 % on A100 and H100."""
    cache_share: float = 0.43
    """Fraction of memory bandwidth at which one token's attention reads the cache. Measured with torch's own attention:
    2.0 and 2.2 of an H200's 4.8 TB/s (docs/benchmarks/generation_cuda.md)."""
    link_share: float = 0.8
    """Fraction of a link's bandwidth in collectives. Source: nccl-tests, all-reduce on 8 A100, 235 of 300 GB/s."""
    layer_launch_s: float = 0.5e-3
    """Host time to launch one block's forward pass, which a faster device waits for. Eager modules launch 30 to 40
    kernels, 10 to 15 us each."""
    decode_launch_s: float = 0.88e-3
    """Host time to launch one block in a generation step that is no CUDA graph: about 44 kernels, 20 us each. Measured
    on an H200's host: 14 ms for 16 blocks (docs/benchmarks/generation_cuda.md)."""
    captures_steps: bool = True
    """Whether the generation engine captures decoding steps as CUDA graphs where it can."""
    captured_block_s: float = 0.11e-3
    """Time that a block in a CUDA graph takes beyond its arithmetic and memory traffic: each of about 44 kernels starts
    when the one before has ended. Measured on an H200: 0.10 to 0.13 ms from 1 to 128 rows, as above."""
    capture_steps: float = 2.5
    """Time to capture a step of another shape, in steps that are no CUDA graph. Measured: two or three."""
    experts_launch_s: float = 0.2e-3
    """Host time that experts add to the launch of a block: about fifteen more kernels (Mixtral's block runs 49, Llama's
    34). They choose experts, sort tokens by expert and restore the order of the results."""
    collective_launch_s: float = 0.05e-3
    """Host time of one collective inside a block: launching it, and waiting for the last rank's launch. Nominal; ranks
    that drift apart in decoding need 0.4 ms (fitted, as above)."""
    step_s: float = 0.7e-3
    """Host time of a decoding step outside of blocks: drawing tokens and scheduling. Measured next to an H200."""
    row_s: float = 30e-6
    """Host time for each sequence of a decoding step: its token, its stop rule and its next input. Fitted to
    docs/benchmarks/generation_cuda.md, with 1 to 128 sequences."""
    hand_over_share: float = 0.3
    """Fraction of memory bandwidth at which a vLLM takes weights over. Nominal: each byte is read and written once."""
    call_s: float = 10e-3
    """Fixed time of any call: packing samples, agreeing on them and waiting for the slowest rank."""
    hides_communication: bool = True
    """Whether FSDP's gathers and reductions overlap with computation; on CPU they use the same cores."""

    def __post_init__(self) -> None:
        for name in ("matmul_share", "attention_share", "memory_share", "cache_share", "link_share", "hand_over_share"):
            if not 0 < getattr(self, name) <= 1:
                raise PlanError(f"{name}={getattr(self, name)} is a share of a nominal rate; use one in (0, 1]")
        for name in ("tile", "thin_tile", "tiles_at_once"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("depth_overhead", "capture_steps", *(f.name for f in fields(self) if f.name.endswith("_s"))):
            if getattr(self, name) < 0:
                raise PlanError(f"{name}={getattr(self, name)} may not be negative")


CPU_EFFICIENCY = Efficiency(
    matmul_share=0.7,
    tile=16,
    thin_tile=1,
    tiles_at_once=1,
    depth_overhead=16,
    attention_share=0.3,
    memory_share=0.7,
    cache_share=0.7,
    hand_over_share=0.04,
    layer_launch_s=1e-4,
    decode_launch_s=1e-4,
    captures_steps=False,
    experts_launch_s=1e-4,
    collective_launch_s=0.0,
    step_s=1e-3,
    call_s=20e-3,
    hides_communication=False,
)
"""Efficiency of one CPU core without a profile. Nominal except for the launches (measured: 0.11 to 0.13 ms per block of
eager modules), the fixed time of a call (measured: 10 to 25 ms with 4 to 16 sequences), and handing weights to vLLM
(measured: 0.38 to 0.39 GB/s, docs/benchmarks/generation.md)."""


@dataclass(frozen=True, slots=True)
class Device:
    """Times of a decoder's kernels on one device, in seconds."""

    cluster: ClusterSpec
    efficiency: Efficiency

    def matmul(
        self, rows: float, inner: float, columns: float, element_bytes: int, *, num_products: float = 1.0
    ) -> float:
        """Return the time of (rows x inner) @ (inner x columns), the larger of arithmetic and memory traffic.

        Args:
            num_products: Number of equal products in one kernel, whose tiles fill the device together.
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
        """Return the time of fused attention with this many flops."""
        return flops / (self.efficiency.attention_share * self.cluster.device_flops)

    def stream(self, num_bytes: float) -> float:
        """Return the time to read or write this many bytes of device memory."""
        return num_bytes / (self.efficiency.memory_share * self.cluster.device_memory_bytes_per_s)

    def hand_over(self, num_bytes: float) -> float:
        """Return the time in which a vLLM takes this many bytes of weights over."""
        return num_bytes / (self.efficiency.hand_over_share * self.cluster.device_memory_bytes_per_s)

    def read_cache(self, num_bytes: float) -> float:
        """Return the time of one token's attention to this many bytes of keys and values."""
        return num_bytes / (self.efficiency.cache_share * self.cluster.device_memory_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Links:
    """Times of communication between ranks, in seconds.

    A group on several nodes communicates inside nodes and between nodes at the same time, each rank through its own
    network adapter; the slower of the two counts. A ring is as fast as the slowest link between two of its nodes.
    """

    cluster: ClusterSpec
    efficiency: Efficiency

    def gather(self, num_bytes: float, group: Group) -> float:
        """Return the time of an all-gather with ``num_bytes`` of output per rank; a reduce-scatter takes the same time.

        Costs of the ring and of the tree are from Thakur et al., "Optimization of Collective Communication Operations
        in MPICH", 2005, doi:10.1177/1094342005051521.
        """
        if group.size < 2 or num_bytes <= 0:
            return 0.0
        local = group.size / group.nodes
        inside = num_bytes * (local - 1) / local / self._inside
        between = num_bytes * (group.nodes - 1) / group.nodes / local / self._between(group.link)
        return max(inside, between) + self._hops(group)

    def all_to_all(self, num_bytes: float, group: Group) -> float:
        """Return the time in which each rank sends equal parts of ``num_bytes`` to all ranks, itself included."""
        if group.size < 2 or num_bytes <= 0:
            return 0.0
        local = group.size / group.nodes
        inside = num_bytes * (local - 1) / group.size / self._inside
        between = num_bytes * (group.size - local) / group.size / self._between(group.link)
        return max(inside, between) + self._hops(group)

    def all_reduce(self, num_bytes: float, group: Group) -> float:
        """Return the time of an all-reduce, as a reduce-scatter and an all-gather."""
        return 2 * self.gather(num_bytes, group)

    def send(self, num_bytes: float, group: Group) -> float:
        """Return the time of a message from one rank of a group to another, on another node if it has several."""
        if group.nodes == 1:
            return num_bytes / self._inside + self.cluster.intra_node_latency_s
        return num_bytes / self._between(group.link) + self._latency_s(group.link)

    @property
    def _inside(self) -> float:
        return self.efficiency.link_share * self.cluster.intra_node_bytes_per_s

    def _between(self, link: LinkRates | None) -> float:
        return self.efficiency.link_share * (self.cluster.inter_node_bytes_per_s if link is None else link.bytes_per_s)

    def _latency_s(self, link: LinkRates | None) -> float:
        return self.cluster.inter_node_latency_s if link is None else link.latency_s

    def _hops(self, group: Group) -> float:
        """Return the latency of a tree, which small messages use; for large ones it is negligible."""
        inside = math.ceil(math.log2(group.size / group.nodes)) if group.size > group.nodes else 0
        between = math.ceil(math.log2(group.nodes)) if group.nodes > 1 else 0
        return inside * self.cluster.intra_node_latency_s + between * self._latency_s(group.link)
