"""Hardware description of a cluster: nodes, devices, memory and bandwidths.

Planning needs only ``node_of``. The estimator in ``tuning`` reads the rates; the profiler replaces them by measured
ones.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_realloc.errors import LayoutError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class NodeLink:
    """Link between two nodes, in the slower direction."""

    first: int
    """The node with the lower number."""
    second: int
    bytes_per_s: float
    """Bandwidth from one device to the other node while all devices of its node send."""
    latency_s: float
    """Latency of one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster of equal nodes with equal devices.

    Links between nodes may differ. Rank r is device ``r % devices_per_node`` of node ``r // devices_per_node``.

    >>> ClusterSpec.parse("h100:2x8").node_of(9)
    1
    """

    num_nodes: int = 1
    devices_per_node: int = 1
    device_memory_bytes: int
    """Memory of one device, in bytes."""
    device_flops: float
    """Peak dense bf16 floating-point operations per second of one device."""
    device_memory_bytes_per_s: float
    """Memory bandwidth of one device, in bytes per second."""
    intra_node_bytes_per_s: float
    """Bandwidth from one device to the other devices of its node, in one direction."""
    inter_node_bytes_per_s: float
    """Bandwidth from one device to other nodes, in one direction."""
    host_bytes_per_s: float
    """Bandwidth between one device and its host's memory (offloading), in one direction."""
    intra_node_latency_s: float = 10e-6
    """Latency of one message inside a node, in seconds."""
    inter_node_latency_s: float = 20e-6
    """Latency of one message between nodes, in seconds."""
    node_links: tuple[NodeLink, ...] = ()
    """Pairs of nodes whose link is slower than ``inter_node_bytes_per_s`` and ``inter_node_latency_s``, as measured.
    Those of nodes that the cluster lacks do not count."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name != "node_links" and getattr(self, name) <= 0:
                raise LayoutError(
                    f"{name}={getattr(self, name)} of a cluster must be positive; give a measured or nominal value"
                )

        for link in self.node_links:
            if not 0 <= link.first < link.second or min(link.bytes_per_s, link.latency_s) <= 0:
                raise LayoutError(f"{link} must have its lower node first, and positive rates; give measured values")

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster; one rank per device."""
        return self.num_nodes * self.devices_per_node

    @property
    def ranks_by_node(self) -> tuple[range, ...]:
        """The ranks of each node."""
        size = self.devices_per_node
        return tuple(range(node * size, (node + 1) * size) for node in range(self.num_nodes))

    def node_of(self, rank: int) -> int:
        """Return the node of ``rank``. Raises LayoutError when the cluster has no such device."""
        if not 0 <= rank < self.num_devices:
            raise LayoutError(
                f"rank {rank} is outside a cluster of {self.num_nodes}x{self.devices_per_node} devices; "
                f"use ranks 0-{self.num_devices - 1} or describe more nodes"
            )
        return rank // self.devices_per_node

    def slow_links(self, nodes: Collection[int]) -> list[NodeLink]:
        """Return the slow links among some nodes."""
        return [link for link in self.node_links if link.first in nodes and link.second in nodes]

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Read ``"h100:16x8"`` (preset, nodes x devices per node) or ``"h100"`` (one node). Raises LayoutError."""
        match = re.fullmatch(r"\s*([a-z0-9-]+)\s*(?::\s*([1-9][0-9]*)x([1-9][0-9]*)\s*)?", text.lower())
        preset_name = text.partition(":")[0].strip().lower()
        count = text.partition(":")[2].strip()
        if preset_name in PRESETS and re.fullmatch("[1-9][0-9]*", count):
            raise LayoutError(
                f'cluster {text!r} must be of the form "PRESET:NODESxDEVICES"; write "{preset_name}:1x{count}" for one '
                f"node of {count} device{'' if count == '1' else 's'}"
            )
        if match is None and preset_name in PRESETS:
            raise LayoutError(
                f'cluster {text!r} must have at least one node of one device; write "PRESET" or '
                f'"PRESET:NODESxDEVICES", as in "{preset_name}:2x8", with a preset of {", ".join(PRESETS)}'
            )
        if match is None or match[1] not in PRESETS:
            begin_so = [name for name in PRESETS if preset_name and name.startswith(preset_name)]
            near = begin_so or difflib.get_close_matches(preset_name, PRESETS, n=2)
            offer = f" (nearest: {', '.join(near)})" if near else ""
            raise LayoutError(
                f'unknown cluster {text!r}{offer}; write "PRESET" or "PRESET:NODESxDEVICES", '
                f"with a preset of {', '.join(PRESETS)}"
            )
        preset = PRESETS[match[1]]
        return replace(preset, num_nodes=int(match[2]), devices_per_node=int(match[3])) if match[2] else preset

    @classmethod
    def local(cls, num_devices: int, preset: str = "cpu") -> ClusterSpec:
        """Return one node with ``num_devices`` devices of a preset. Raises LayoutError for an unknown preset."""
        return replace(cls.parse(preset), num_nodes=1, devices_per_node=num_devices)


PRESETS: dict[str, ClusterSpec] = {
    # One process with about one core. Nominal figures; the profiler replaces them.
    "cpu": ClusterSpec(
        device_memory_bytes=8 * GIB, device_flops=5e10, device_memory_bytes_per_s=1e10,
        intra_node_bytes_per_s=2e9, inter_node_bytes_per_s=1.25e9, host_bytes_per_s=1e10,
        intra_node_latency_s=300e-6, inter_node_latency_s=500e-6,
    ),
    # From data sheets, SXM form: dense bf16, NVLink in one direction, one 200 or 400 Gb/s adapter per device.
    "a100-80g": ClusterSpec(
        devices_per_node=8, device_memory_bytes=80 * GIB, device_flops=312e12, device_memory_bytes_per_s=2.039e12,
        intra_node_bytes_per_s=300e9, inter_node_bytes_per_s=25e9, host_bytes_per_s=25e9,
    ),
    "a800-80g": ClusterSpec(
        devices_per_node=8, device_memory_bytes=80 * GIB, device_flops=312e12, device_memory_bytes_per_s=2.039e12,
        intra_node_bytes_per_s=200e9, inter_node_bytes_per_s=25e9, host_bytes_per_s=25e9,
    ),
    "h100": ClusterSpec(
        devices_per_node=8, device_memory_bytes=80 * GIB, device_flops=989e12, device_memory_bytes_per_s=3.35e12,
        intra_node_bytes_per_s=450e9, inter_node_bytes_per_s=50e9, host_bytes_per_s=50e9,
    ),
    "h200": ClusterSpec(
        devices_per_node=8, device_memory_bytes=141 * 10**9, device_flops=989e12, device_memory_bytes_per_s=4.8e12,
        intra_node_bytes_per_s=450e9, inter_node_bytes_per_s=50e9, host_bytes_per_s=50e9,
    ),
    # HGX B200 data sheet; dense rates are half of those with sparsity. PCIe 5.0 x16, one 400 Gb/s adapter per device.
    "b200": ClusterSpec(
        devices_per_node=8, device_memory_bytes=180 * 10**9, device_flops=2250e12, device_memory_bytes_per_s=7.7e12,
        intra_node_bytes_per_s=900e9, inter_node_bytes_per_s=50e9, host_bytes_per_s=50e9,
    ),
    # GB200 NVL72 data sheet, a 72nd of the rack. A node is the rack, whose devices all share NVLink; two devices share
    # the 450 GB/s of a Grace processor's NVLink-C2C.
    "gb200": ClusterSpec(
        devices_per_node=72, device_memory_bytes=186 * 10**9, device_flops=2500e12, device_memory_bytes_per_s=8e12,
        intra_node_bytes_per_s=900e9, inter_node_bytes_per_s=50e9, host_bytes_per_s=225e9,
    ),
    # AMD Instinct MI300X data sheet: seven Infinity Fabric links of 64 GB/s in one direction, PCIe 5.0 x16.
    "mi300x": ClusterSpec(
        devices_per_node=8, device_memory_bytes=192 * 10**9, device_flops=1307e12, device_memory_bytes_per_s=5.3e12,
        intra_node_bytes_per_s=448e9, inter_node_bytes_per_s=50e9, host_bytes_per_s=50e9,
    ),
    # Tesla V100 SXM2 data sheet, the form with 32 GB. Volta has no bf16, so this is the rate of fp32. PCIe 3.0 x16; in
    # AWS p3dn.24xlarge, eight devices share 100 Gb/s.
    "v100": ClusterSpec(
        devices_per_node=8, device_memory_bytes=32 * GIB, device_flops=15.7e12, device_memory_bytes_per_s=900e9,
        intra_node_bytes_per_s=150e9, inter_node_bytes_per_s=1.56e9, host_bytes_per_s=12e9,
    ),
    # PCIe 4.0 x16 between devices, one 100 Gb/s share of an adapter.
    "l40s": ClusterSpec(
        devices_per_node=8, device_memory_bytes=48 * GIB, device_flops=362e12, device_memory_bytes_per_s=864e9,
        intra_node_bytes_per_s=25e9, inter_node_bytes_per_s=12.5e9, host_bytes_per_s=25e9,
    ),
    # NVIDIA L4 data sheet. PCIe 4.0 x16; in Google g2-standard-96, eight devices share 100 Gb/s.
    "l4": ClusterSpec(
        devices_per_node=8, device_memory_bytes=24 * GIB, device_flops=121e12, device_memory_bytes_per_s=300e9,
        intra_node_bytes_per_s=25e9, inter_node_bytes_per_s=1.56e9, host_bytes_per_s=25e9,
    ),
    # NVIDIA A10G data sheet, the variant of AWS. PCIe 4.0 x16; in g5.48xlarge, eight devices share 100 Gb/s.
    "a10g": ClusterSpec(
        devices_per_node=8, device_memory_bytes=24 * GIB, device_flops=70e12, device_memory_bytes_per_s=600e9,
        intra_node_bytes_per_s=25e9, inter_node_bytes_per_s=1.56e9, host_bytes_per_s=25e9,
    ),
    # NVIDIA T4 data sheet. Turing has no bf16, so this is the rate of fp32. PCIe 3.0 x16; in AWS g4dn.metal, eight
    # devices share 100 Gb/s.
    "t4": ClusterSpec(
        devices_per_node=8, device_memory_bytes=16 * GIB, device_flops=8.1e12, device_memory_bytes_per_s=320e9,
        intra_node_bytes_per_s=12e9, inter_node_bytes_per_s=1.56e9, host_bytes_per_s=12e9,
    ),
    # NVIDIA Ada architecture white paper, bf16 with fp32 accumulation. PCIe 4.0 x16 without access from device to
    # device: messages pass through host memory, at half the rate. 10 Gb/s between machines, nominal.
    "rtx4090": ClusterSpec(
        devices_per_node=2, device_memory_bytes=24 * GIB, device_flops=165e12, device_memory_bytes_per_s=1.008e12,
        intra_node_bytes_per_s=12e9, inter_node_bytes_per_s=1.25e9, host_bytes_per_s=25e9,
    ),
    # NVIDIA Ampere GA102 architecture white paper, bf16 with fp32 accumulation. As above, without an NVLink bridge.
    "rtx3090": ClusterSpec(
        devices_per_node=2, device_memory_bytes=24 * GIB, device_flops=71e12, device_memory_bytes_per_s=936e9,
        intra_node_bytes_per_s=12e9, inter_node_bytes_per_s=1.25e9, host_bytes_per_s=25e9,
    ),
}  # fmt: skip
"""Nominal clusters of one node, by preset name."""


def data_sheet_of(device: str) -> str | None:
    """Return the preset of a device by its name, as its driver reports it; None if its data sheet is not known.

    >>> data_sheet_of("NVIDIA A100-SXM4-80GB"), data_sheet_of("NVIDIA GeForce RTX 4090"), data_sheet_of("cpu")
    ('a100-80g', 'rtx4090', None)
    """
    words = re.findall("[a-z0-9]+", device.lower())
    names = {*words, *map("".join, pairwise(words))}
    presets = (name for name in PRESETS if name != "cpu")  # its figures are nominal
    return next((name for name in presets if name.partition("-")[0] in names), None)
