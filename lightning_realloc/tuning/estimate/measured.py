"""Seconds of calls and moves from what was measured on the ranks that are here. Bytes are the roofline's.

Blocks, and the rest of a model, were measured at the degrees of a layout; here they are put together to stages,
micro-batches and calls as ``cost`` does with worked-out ones. What was not measured is worked out, times what the
nearest measured layout takes over what is worked out for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lightning_realloc.dataflow.dataflow import CallKind, Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.tuning.estimate.cost import CallCost, Pass, Placement
from lightning_realloc.tuning.estimate.estimator import CallSeconds
from lightning_realloc.tuning.estimate.profile import Curve, PassKey, PassKind, PassTimes, ProfileTable
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator, busiest_node
from lightning_realloc.tuning.shapes.decoding import plan_decoding
from lightning_realloc.tuning.shapes.weights import traffic

_KINDS: Mapping[CallKind, tuple[PassKind, ...]] = {
    "generate": ("infer", "decode"), "infer": ("infer",), "train": ("train", "train_last", "infer"),
}  # fmt: skip
"""Passes that a call is made of; inference of a training call is what checkpointing computes again."""
CAUTION = 3.0
"""What was not measured must look better by so much to be preferred to what was."""
_MAX_MOVES = 100_000
"""Of which seconds are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost(CallCost):
    """One role's calls under one layout whose passes were measured."""

    passes: Mapping[PassKind, PassTimes]
    optimizer: Curve
    crowding: Callable[[float], float]
    """Share of the layout's ranks that are busy -> how many times longer passes take than where they were measured."""

    def _infer(self, limit: int | None) -> CallSeconds:
        micro = self._micro_batches(limit, 1)
        stage = self._measured("infer", micro.tokens, self.tokens.sequence).repeated(self._crowded(micro.count))
        return self._pipelined(stage, 0.0, micro.count, self._send(micro.tokens))

    def _train(self, limit: int | None, checkpointing: bool) -> CallSeconds:
        minibatches = self.tokens.workload.num_minibatches
        micro = self._micro_batches(limit, minibatches)
        usual, last = (self._measured(kind, micro.tokens, self.tokens.sequence) for kind in ("train", "train_last"))
        if checkpointing:
            again = self._measured("infer", micro.tokens, self.tokens.sequence, rest=False)
            usual, last = usual.plus(again), last.plus(again)
        usual, last = (stage.repeated(self._crowded(micro.count)) for stage in (usual, last))
        parts = self._pipelined(usual, 0.0, micro.count, 2 * self._send(micro.tokens))
        reduction = max(0.0, last.total - usual.total)
        elements = self.trained.of_stage(self.dims) / self.dims.fsdp
        step = self.optimizer(elements) * self.crowding(1.0)
        return (parts + CallSeconds(sharding=reduction, optimizer=step)).times(
            minibatches * self.tokens.workload.num_epochs
        )

    def _generate(self, max_slots: int) -> CallSeconds:
        load, pp = self.tokens.workload, self.dims.pp
        share = -(-load.num_sequences // self._shares)
        prompts = -(-share // load.samples_per_prompt) * (load.prompt_tokens - 1)
        # The first step reads the prompts, but for their last tokens, whose logits it takes.
        first = self._measured("infer", prompts, load.prompt_tokens, rest=False).plus(
            self._measured("decode", min(share, max_slots), load.prompt_tokens)
        )
        parts = CallSeconds(compute=first.total)
        for stretch in plan_decoding(self.tokens.responses, load.prompt_tokens, share, max_slots):
            batch = stretch.sequences / pp
            stage = self._measured("decode", batch, stretch.context)
            parts += CallSeconds(compute=stage.compute, pipeline=self._send(batch)).times(stretch.steps * pp)
        return parts.times(self.crowding(1.0))

    def _measured(self, kind: PassKind, first: float, second: float, *, rest: bool = True) -> Pass:
        times = self.passes[kind]
        head = Pass(times.rest(first, second) if rest else 0.0)
        return self._slowest_stage(Pass(times.block(first, second)), head)

    def _crowded(self, micro_batches: int) -> float:
        """Return how crowded ranks are on average: of a pipeline's stages some wait, at its begin and its end."""
        return self.crowding(micro_batches / (micro_batches + self.dims.pp - 1))


class MeasuredEstimator:
    """An :class:`~lightning_realloc.tuning.estimate.estimator.Estimator` that reads a profile.

    Args:
        roofline: Bytes, the workload, and seconds of what was not measured.
        table: What was measured.
        models: Role -> the name of its shape in the table.
    """

    def __init__(self, roofline: RooflineEstimator, table: ProfileTable, models: Mapping[str, str]) -> None:
        self.roofline, self.table, self.models = roofline, table, dict(models)
        self._calls: dict[tuple[object, ...], CallSeconds] = {}
        self._moves: dict[tuple[str, Layout, Layout], float] = {}

    @property
    def dataflow(self) -> Dataflow:
        """The calls that can be asked about."""
        return self.roofline.dataflow

    @property
    def cluster(self) -> ClusterSpec:
        """Where they run."""
        return self.roofline.cluster

    def owner(self, role: str) -> str:
        """Return the role on whose replicas a role's calls work."""
        return self.roofline.owner(role)

    def slowdown(self, busy: int) -> float:
        """Return how many times longer a rank's work takes when so many ranks of its node work."""
        return self.table.slowdown_of(busy)

    def call_seconds(self, call: str, plan: CallPlan) -> CallSeconds:
        """Return how long a call takes once its inputs and weights are there, while no other call runs."""
        place = Placement.of(plan.layout, self.cluster)
        key = (call, plan.layout.dims, place, busiest_node(plan.layout, self.cluster), plan.micro_batch_tokens,
               plan.gradient_checkpointing, plan.max_slots)  # fmt: skip
        if key not in self._calls:
            self._calls[key] = self._work_out(call, plan)
        return self._calls[key]

    def is_measured(self, call: str, dims: ParallelDims) -> bool:
        """Whether passes of a call were measured under these degrees, pipelines aside."""
        chosen = self.dataflow.call(call)
        if chosen.role is None:
            return True
        return all(key in self.table.passes for key in self._keys(chosen.role, chosen.kind, dims).values())

    def _work_out(self, call: str, plan: CallPlan) -> CallSeconds:
        chosen, dims = self.dataflow.call(call), plan.layout.dims
        if chosen.role is None:
            return CallSeconds()
        if self.is_measured(call, dims):
            return self._from_passes(chosen.role, chosen.kind, plan)
        worked_out = self.roofline.call_seconds(call, plan)
        nearest = self._nearest(call, dims)
        if nearest is None:
            return worked_out
        there = replace(plan, layout=Layout(nearest, tuple(range(nearest.size))))
        measured = self._from_passes(chosen.role, chosen.kind, there)
        return worked_out.times(CAUTION * measured.total / self.roofline.call_seconds(call, there).total)

    def _from_passes(self, role: str, kind: CallKind, plan: CallPlan) -> CallSeconds:
        dims = plan.layout.dims
        keys = self._keys(role, kind, dims)
        alone, busy = next(iter(keys.values())).dims.size, busiest_node(plan.layout, self.cluster)

        def crowding(share: float) -> float:
            there = self.table.slowdown_of(alone, dims.tp)
            return self.table.slowdown_of(max(alone, share * busy), dims.tp) / there

        base = self.roofline.cost(role, plan)
        shared = {name: getattr(base, name) for name in CallCost.__dataclass_fields__}
        cost = MeasuredCost(
            **shared, passes={k: self.table.passes[key] for k, key in keys.items()},
            optimizer=self.table.optimizer.get(self.models[role], Curve(((1.0, 0.0),))), crowding=crowding,
        )  # fmt: skip
        return cost.seconds(
            kind, micro_batch_tokens=plan.micro_batch_tokens, gradient_checkpointing=plan.gradient_checkpointing,
            max_slots=plan.max_slots,
        )  # fmt: skip

    def _keys(self, role: str, kind: CallKind, dims: ParallelDims) -> dict[PassKind, PassKey]:
        inside = replace(dims, pp=1)
        alone = replace(inside, dp=1)  # replicas do not meet but to reduce gradients
        return {
            one: PassKey(self.models[role], one, inside if one.startswith("train") else alone) for one in _KINDS[kind]
        }

    def _nearest(self, call: str, dims: ParallelDims) -> ParallelDims | None:
        """Return the measured degrees most like some others: of equal tp where there are any, then the largest."""
        known = {replace(key.dims, pp=1) for key in self.table.passes}
        fitting = [one for one in known if self.is_measured(call, one)]
        return max(
            fitting, key=lambda one: (one.tp == dims.tp, one.fsdp == dims.fsdp, one.size, one.degrees), default=None
        )

    def move_seconds(self, role: str, source: Layout, target: Layout) -> float:
        """Return how long a role's weights travel from their home to another layout, 0 between equal ones.

        Measured were ranks of one node. Through shared memory each source rank writes its part of one copy; shards that
        FSDP allocates are sent to.
        """
        if source == target:
            return 0.0
        curve = self.table.moves.get("direct" if target.dims.fsdp > 1 or "push" not in self.table.moves else "push")
        nodes = {self.cluster.node_of(rank) for rank in (*source.ranks, *target.ranks)}
        if curve is None or len(nodes) > 1:
            return self.roofline.move_seconds(role, source, target)
        key = (role, source, target)
        if key not in self._moves:
            if len(self._moves) >= _MAX_MOVES:
                self._moves.clear()
            self._moves[key] = curve(self._busiest_bytes(role, source, target))
        return self._moves[key]

    def _busiest_bytes(self, role: str, source: Layout, target: Layout) -> float:
        size, weights = self.roofline.settings.copy_bytes, self.roofline.moved_weights(role)
        if target.dims.fsdp == 1 and "push" in self.table.moves:
            return size * weights.total / len(source.ranks)
        moved = traffic(weights, source, target, self.cluster)
        return size * max(moved.received, moved.sent_inside)

    def offload_seconds(self, num_bytes: float) -> float:
        """Return how long a rank takes to have so many bytes back from its host."""
        curve = self.table.offload
        return self.roofline.offload_seconds(num_bytes) if curve is None else curve(num_bytes)

    def resident_bytes(self, role: str, layout: Layout, *, is_home: bool) -> int:
        """Return what a replica keeps between calls on the fullest rank of its layout."""
        return self.roofline.resident_bytes(role, layout, is_home=is_home)

    def active_bytes(self, call: str, plan: CallPlan) -> int:
        """Return what a call adds on the rank where it adds most."""
        return self.roofline.active_bytes(call, plan)
