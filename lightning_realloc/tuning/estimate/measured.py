"""Estimate the seconds of calls and moves from a profile of the machine. Bytes come from the roofline estimator.

A profile has the seconds of a block, and of the rest of a model, at some degrees on one node. They form stages,
micro-batches and calls as in ``cost``. A call at degrees without measurements gets its roofline estimate, times the
ratio of measured to roofline seconds at the nearest measured degrees. What groups over several nodes add to it is not
scaled: it follows from the links, which a run over nodes has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_realloc.dataflow.dataflow import CallKind, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.tuning.estimate.cost import CallCost, Pass
from lightning_realloc.tuning.estimate.estimator import CallSeconds
from lightning_realloc.tuning.estimate.profile import Curve, PassKey, PassKind, PassTimes, ProfileTable
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator, busiest_node
from lightning_realloc.tuning.memory.call_shape import CallShape
from lightning_realloc.tuning.shapes.decoding import plan_decoding

_KINDS: Mapping[CallKind, tuple[PassKind, ...]] = {
    "generate": ("infer", "decode"),
    "infer": ("infer",),
    "train": ("train", "train_last", "infer"),
}
"""Passes that a call consists of; a training call with checkpointing repeats the inference pass."""
UNMEASURED_FACTOR = 3.0
"""Factor on the estimate of a call on one node that was not measured; larger values favour measured layouts more."""
_MAX_CACHED_MOVES = 100_000
"""Entries of the cache of moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost(CallCost):
    """Cost model of one role's calls under a layout whose passes were measured."""

    passes: Mapping[PassKind, PassTimes]
    """Kind of pass -> its seconds."""
    optimizer: Curve
    """Curve from the elements of a rank to the seconds of the optimizer's step."""
    contention: Callable[[float], float]
    """Fraction of the layout's ranks that are busy -> factor by which passes take longer than in the measurement."""

    def _infer(self, shape: CallShape) -> CallSeconds:
        count, (tokens, _) = shape.num_micro_batches, self._micro_batch(shape)
        images = self._like_blocks(self._read_images(shape.mean_micro_batch), tokens)
        stage = self._measured("infer", tokens, self.tokens.sequence, images=images)
        stage = stage.repeated(self._contention_of(count))
        return self._pipelined(stage, 0.0, count, self._send(tokens))

    def _train(self, shape: CallShape, plan: CallPlan) -> CallSeconds:
        count, (tokens, _) = shape.num_micro_batches, self._micro_batch(shape)
        prompts, recomputes = shape.mean_micro_batch, plan.gradient_checkpointing
        images = self._read_images(prompts).plus(self._learn_images(prompts, recomputes=recomputes))
        images, length = self._like_blocks(images, tokens), self.tokens.sequence
        usual, last = (self._measured(kind, tokens, length, images=images) for kind in ("train", "train_last"))
        if recomputes:
            again = self._measured("infer", tokens, length, rest=False)
            usual, last = usual.plus(again), last.plus(again)
        usual, last = (stage.repeated(self._contention_of(count)) for stage in (usual, last))
        waiting = self._waiting_share(tokens, plan)
        parts = self._pipelined(usual, 0.0, count, 2 * self._send(tokens), waiting_share=waiting)
        reduction = max(0.0, last.total - usual.total)
        step = self.optimizer(self.num_trained_sharded) * self.contention(1.0)
        return parts + CallSeconds(sharding=reduction, optimizer=step)

    def _route(self, shape: CallShape) -> CallSeconds:
        count, (tokens, _) = shape.num_micro_batches, self._micro_batch(shape)
        images = self._like_blocks(self._read_images(shape.mean_micro_batch), tokens)
        stage = self._measured("infer", tokens, self.tokens.sequence, rest=False, images=images)
        return self._pipelined(stage.repeated(self._contention_of(count)), 0.0, count, self._send(tokens))

    def _generate(self, shape: CallShape) -> CallSeconds:
        load, pp = self.tokens.workload, self.dims.pp
        count = shape.num_prompts(shape.share)
        prompts = count * (load.prompt_tokens - 1)
        images = self._like_blocks(self._read_images(count), prompts)
        # The first step is a forward pass over the prompts, and a decoding step for their last tokens.
        first = self._measured("infer", prompts, load.prompt_tokens, rest=False, images=images).plus(
            self._measured("decode", shape.slots, load.prompt_tokens)
        )
        parts = CallSeconds(compute=first.total)
        segments = plan_decoding(self.tokens.responses, load.prompt_tokens, shape.share, shape.slots)
        for segment in segments:
            batch = segment.sequences / pp
            stage = self._measured("decode", batch, segment.context)
            parts += CallSeconds(compute=stage.compute, pipeline=self._send(batch)).scaled(segment.steps * pp)
        return parts.scaled(self.contention(1.0)) + self._capture(segments)

    def _measured(
        self, kind: PassKind, first: float, second: float, *, rest: bool = True, images: Pass | None = None
    ) -> Pass:
        times = self.passes[kind]
        head = Pass(times.rest(first, second) if rest else 0.0)
        return self._slowest_stage(Pass(times.block(first, second)), head, images or Pass())

    def _like_blocks(self, images: Pass, tokens: float) -> Pass:
        """Return a tower's passes times the ratio of measured to estimated seconds of a block of the language model.

        Towers are not measured. Their blocks are products and attention on the same device.
        """
        if not images.total:
            return images
        block = self.kernels.forward(tokens, self.tokens.context) + self._exchange(tokens)
        return images.repeated(self.passes["infer"].block(tokens, self.tokens.sequence) / block)

    def _contention_of(self, micro_batches: int) -> float:
        """Return the slowdown of a call with idle stages while the pipeline fills and drains."""
        return self.contention(micro_batches / (micro_batches + (self.dims.pp - 1) / self.dims.vpp))


class MeasuredEstimator:
    """An `Estimator` that uses a profile.

    Args:
        roofline: Estimator of bytes, and of the seconds of calls and moves without measurements.
        table: The profile.
        models: Role -> name of its shape in the table.
    """

    def __init__(self, roofline: RooflineEstimator, table: ProfileTable, models: Mapping[str, str]) -> None:
        self.roofline, self.table, self.models = roofline, table, dict(models)
        self.dataflow, self.cluster = roofline.dataflow, roofline.cluster
        self.owner = roofline.owner
        self.resident_bytes, self.active_bytes = roofline.resident_bytes, roofline.active_bytes
        self.generates_in_copy = roofline.generates_in_copy
        self._calls: dict[tuple[object, ...], CallSeconds] = {}
        self._busiest = lru_cache(maxsize=_MAX_CACHED_MOVES)(self._busiest_bytes)

    def slowdown(self, busy: int) -> float:
        """Return the factor by which a rank's work takes longer when ``busy`` ranks of its node work."""
        return self.table.slowdown_of(busy)

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return the seconds of a call, from the moment its inputs and weights exist, while no other call runs."""
        place = self.roofline.place(plan.layout)
        key = (call, plan.layout.dims, place, busiest_node(plan.layout, self.cluster), plan.options)
        if key not in self._calls:
            self._calls[key] = self._estimate(call, plan)
        return self._calls[key]

    def is_measured(self, call: str, dims: ParallelDims) -> bool:
        """Whether the passes of a call were measured at these degrees, ignoring pp and vpp."""
        chosen = self.dataflow.call(call)
        if chosen.role is None:
            return True
        return all(key in self.table.passes for key in self._keys(chosen.role, chosen.kind, dims).values())

    def _estimate(self, call: str, plan: CallPlan) -> CallSeconds:
        chosen, dims = self.dataflow.call(call), plan.layout.dims
        if chosen.role is None:
            return CallSeconds()
        spans_nodes = self._spans_nodes(chosen.kind, plan.layout)
        if self.is_measured(call, dims) and not spans_nodes:
            return self._from_passes(chosen, plan)
        estimated = self.roofline.call_seconds(call, plan)
        nearest = self._nearest(call, dims)
        if nearest is None:
            return estimated
        there = replace(plan, layout=Layout(nearest, tuple(range(nearest.size))), pipeline_schedule="1f1b")
        ratio = self._from_passes(chosen, there).total / self.roofline.call_seconds(call, there).total
        if not spans_nodes:
            return estimated.scaled(UNMEASURED_FACTOR * ratio)
        inside = self.roofline.seconds_within_node(call, plan)
        return estimated + inside.scaled(ratio - 1)

    def _spans_nodes(self, kind: CallKind, layout: Layout) -> bool:
        """Return whether ranks that communicate in a call's passes lie on several nodes; replicas do in training."""
        place = self.roofline.place(layout)
        groups = [place.tp, place.fsdp, place.cp, place.ep, place.expert_fsdp]
        replicas = [place.dp, place.expert_dp] if kind == "train" else []
        return any(group.nodes > 1 for group in groups + replicas)

    def _from_passes(self, call: ModelFunctionCall, plan: CallPlan) -> CallSeconds:
        dims, role = plan.layout.dims, str(call.role)
        keys = self._keys(role, call.kind, dims)
        alone, busy = next(iter(keys.values())).dims.size, busiest_node(plan.layout, self.cluster)

        def contention(share: float) -> float:
            there = self.table.slowdown_of(alone, dims.tp)
            return self.table.slowdown_of(max(alone, share * busy), dims.tp) / there

        base = self.roofline.cost(role, plan)
        shared = {name: getattr(base, name) for name in CallCost.__dataclass_fields__}
        cost = MeasuredCost(
            **shared,
            passes={k: self.table.passes[key] for k, key in keys.items()},
            optimizer=self.table.optimizer.get(self.models[role], Curve(((1.0, 0.0),))),
            contention=contention,
        )
        return cost.seconds(call.kind, plan).scaled(self.roofline.factors.get(call.name, 1.0))

    def _keys(self, role: str, kind: CallKind, dims: ParallelDims) -> dict[PassKind, PassKey]:
        inside = replace(dims, pp=1, vpp=1)
        alone = inside if dims.ep > 1 else replace(inside, dp=1)  # replicas communicate only to reduce gradients
        return {
            one: PassKey(self.models[role], one, inside if one.startswith("train") else alone) for one in _KINDS[kind]
        }

    def _nearest(self, call: str, dims: ParallelDims) -> ParallelDims | None:
        """Return the measured degrees nearest to ``dims``; None without any.

        Those with the same tp come first, then those that exchange tokens as ``dims`` do, of which those with the same
        ep; then those with the same fsdp and cp, then the largest.
        """
        known = {replace(key.dims, pp=1) for key in self.table.passes}

        def likeness(one: ParallelDims) -> tuple[object, ...]:
            exchanges = (one.ep > 1) == (dims.ep > 1), one.ep == dims.ep
            return (
                one.tp == dims.tp,
                *exchanges,
                one.fsdp == dims.fsdp,
                one.cp == dims.cp,
                one.size,
                one.degrees,
                one.ep,
            )

        return max((one for one in known if self.is_measured(call, one)), key=likeness, default=None)

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        """Return the seconds to move a role's weights from their home to another layout; 0 between equal layouts.

        Moves were measured between ranks of one node, so others get the roofline's estimate. Through shared memory each
        source rank writes its part of one replica; FSDP allocates its own shards, which are sent.
        """
        if source == target:
            return 0.0
        curve = self.table.moves.get(
            "direct" if target.dims.num_shards > 1 or "push" not in self.table.moves else "push"
        )
        nodes = {self.cluster.node_of(rank) for rank in (*source.ranks, *target.ranks)}
        if curve is None or len(nodes) > 1:
            return self.roofline.move_seconds(role, source, target)
        return curve(self._busiest(role, source, target))

    def _busiest_bytes(self, role: str, source: Layout, target: Layout) -> float:
        size = self.roofline.settings.copy_bytes
        if target.dims.num_shards == 1 and "push" in self.table.moves:
            return size * self.roofline.num_moved(role) / len(source.ranks)
        moved = self.roofline.moved(role, source, target)
        return size * max(moved.received, moved.sent_inside)

    def offload_seconds(self, num_bytes: float) -> float:
        """Return the seconds in which a rank copies this many bytes back from its host."""
        curve = self.table.offload
        return self.roofline.offload_seconds(num_bytes) if curve is None else curve(num_bytes)
