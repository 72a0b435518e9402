"""Fast estimator of seconds and bytes from a roofline with a few terms, for benchmarks of searches.

It deliberately omits efficiencies of kernels, distributions of lengths, and the exact bytes of moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.cuts import TensorParallelCut, sharded
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.tuning.estimate.estimator import CallSeconds

EFFICIENCY = 0.5
"""Fraction of peak flops in matrix products on long inputs."""
HALF_EFFICIENT_TOKENS = 256
"""Tokens of a micro-batch, per tensor-parallel rank, at which half of `EFFICIENCY` is reached."""


def decoder(num_blocks: int, hidden: int, heads: int) -> ModelSpec:
    """Return a model with ``12 * hidden ** 2`` elements in each block, cut along its heads."""
    cuts = sharded(TensorParallelCut(0, num_units=heads))
    blocks = (ParamSpec(f"block.{b}.weight", (12 * hidden, hidden), cuts, "block", b) for b in range(num_blocks))
    return ModelSpec(tuple(blocks), num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyEstimator:
    """Prices plans of decoders made by :func:`decoder`."""

    dataflow: Dataflow
    cluster: ClusterSpec
    models: dict[str, ModelSpec]
    num_sequences: int = 128
    prompt_tokens: int = 128
    response_tokens: int = 896

    def owner(self, role: str) -> str:
        """Return the role itself, since roles do not share weights."""
        return role

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return the seconds of a call by activity."""
        kind, role = self.dataflow.call(call).kind, str(self.dataflow.call(call).role)
        if kind == "generate":
            return self._generate(role, plan)
        dims, spec = plan.layout.dims, self.models[role]
        weights, hidden = _elements(spec), _hidden(spec)
        tokens = self._share(plan) * self._length
        batch = min(tokens, max(plan.micro_batch_tokens or 8192, self._length))
        batches = math.ceil(tokens / batch)
        passes = 1 if kind == "infer" else 4 if plan.gradient_checkpointing else 3
        speed = self.cluster.device_flops * EFFICIENCY * batch / (batch + HALF_EFFICIENT_TOKENS * dims.tp)
        compute = passes * 2 * weights * tokens / dims.tp / dims.pp / speed
        stage = weights * 2 / dims.tp / dims.pp
        gathers = batches * stage * (1 - 1 / dims.fsdp) / self._rate(dims.tp * dims.fsdp)
        sharding = gathers * (passes - 1 if kind == "train" else 1)
        reduced = 0.0
        if kind == "train":
            sharding += 2 * stage * (1 - 1 / dims.fsdp) / self._rate(dims.tp * dims.fsdp)
            reduced = 4 * stage / dims.fsdp * (1 - 1 / dims.dp) / self._rate(dims.tp * dims.fsdp * dims.dp)
        added = 4 * tokens * hidden * (1 - 1 / dims.tp) / self._rate(dims.tp)
        exchanges = passes * 2 * spec.num_blocks / dims.pp * (added + batches * self._latency(dims.tp))
        busy = compute + exchanges + sharding
        return CallSeconds(
            compute=compute,
            tensor_parallel=exchanges,
            sharding=sharding,
            data_parallel=reduced,
            pipeline=busy * (dims.pp - 1) / batches,
            optimizer=8 * stage / dims.fsdp / self.cluster.device_memory_bytes_per_s if kind == "train" else 0.0,
            other=0.005,
        )

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        """Return the seconds of the rank that receives most, with the mean of the elements that ranks already hold."""
        if source == target:
            return 0.0
        copy = 2 * _elements(self.models[role]) / _shards(target)
        is_inside = set(target.ranks) <= set(source.ranks)
        received = copy * (1 - 1 / _shards(source)) if is_inside else copy
        nodes = {self.cluster.node_of(rank) for rank in (*source.ranks, *target.ranks)}
        return received / self._rate(len(nodes) * self.cluster.devices_per_node) + 0.002

    def slowdown(self, busy: int) -> float:
        """Return 1, since ranks do not slow each other down."""
        return 1.0

    def offload_seconds(self, num_bytes: float) -> float:
        """Return the seconds at the host rate of the data sheet."""
        return num_bytes / self.cluster.host_bytes_per_s

    def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
        """Return 16 bytes for each trained weight at home, and 2 for any other."""
        each = 16 if is_home and role in self.dataflow.trained_roles else 2
        return each * _elements(self.models[role]) // _shards(layout)

    def generates_in_copy(self, role: str, layout: Layout) -> bool:
        """Return False: all replicas have the dtype of the home."""
        return False

    def active_bytes(self, call: str, plan: CallPlan) -> int:
        """Return the bytes of gathered weights, gradients, activations and caches."""
        kind, spec = self.dataflow.call(call).kind, self.models[str(self.dataflow.call(call).role)]
        dims, hidden = plan.layout.dims, _hidden(spec)
        gathered = 4 * _elements(spec) // spec.num_blocks // dims.tp if dims.fsdp > 1 else 0
        blocks = math.ceil(spec.num_blocks / dims.pp)
        if kind == "generate":
            slots = min(plan.max_slots, self._share(plan))
            return gathered + slots * self._length * blocks * hidden // dims.tp
        tokens = max(plan.micro_batch_tokens or 8192, self._length)
        one = 34 * tokens * hidden // dims.tp
        if kind == "infer":
            return gathered + one
        kept = blocks * (2 * tokens * hidden if plan.gradient_checkpointing else one) * dims.pp
        gradients = 4 * _elements(spec) // (dims.tp * dims.pp * dims.fsdp)
        return gathered + gradients + one + kept

    def _generate(self, role: str, plan: CallPlan) -> CallSeconds:
        dims, spec = plan.layout.dims, self.models[role]
        weights, share = 2 * _elements(spec) / dims.tp, self._share(plan)
        slots = min(plan.max_slots, share)
        steps = math.ceil(share / slots) * self.response_tokens
        cache = slots * self._length / 2 * spec.num_blocks * _hidden(spec) / dims.tp
        read = (weights + cache) / self.cluster.device_memory_bytes_per_s
        flops = weights / self.cluster.device_flops / EFFICIENCY
        prefill = share * self.prompt_tokens * flops
        gather = weights * (1 - 1 / dims.fsdp) / self._rate(dims.tp * dims.fsdp)
        exchanges = 2 * spec.num_blocks * self._latency(dims.tp) * steps
        return CallSeconds(
            compute=steps * max(read, slots * flops) + prefill,
            tensor_parallel=exchanges,
            sharding=steps * gather,
            other=0.01 + 2e-5 * spec.num_blocks * steps,
        )

    @property
    def _length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def _share(self, plan: CallPlan) -> int:
        return math.ceil(self.num_sequences / (plan.layout.dims.dp * plan.layout.dims.fsdp))

    def _rate(self, group: int) -> float:
        is_inside = group <= self.cluster.devices_per_node
        return self.cluster.intra_node_bytes_per_s if is_inside else self.cluster.inter_node_bytes_per_s

    def _latency(self, group: int) -> float:
        return self.cluster.intra_node_latency_s if group > 1 else 0.0


def _shards(layout: Layout) -> int:
    return layout.dims.tp * layout.dims.pp * layout.dims.fsdp


def _hidden(spec: ModelSpec) -> int:
    return spec.params[0].shape[1]


def _elements(spec: ModelSpec) -> int:
    return 12 * _hidden(spec) ** 2 * spec.num_blocks
