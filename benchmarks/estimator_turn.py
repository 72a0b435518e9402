"""One workload of `benchmarks.estimator`: a run under random plans, which are priced and then timed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from benchmarks.plan_turn import WORLD_SIZE, Readings, Workload, make_module
from benchmarks.ranks import gather_from_ranks

UNCOUNTED, COUNTED = 1, 2
"""Iterations of a plan: one that makes replicas, then timed ones."""
WARM_UP_PLANS = 1
"""Plans before the first timed one, under which optimizers make their state and libraries load."""
SHARE_OF_SHARDED_GENERATION = 0.15
"""Share of plans with sharded generation, which takes ten times as long as the rest of the iteration."""


@dataclass(frozen=True, slots=True)
class CallPoint:
    """Predicted and measured seconds of one call under one layout."""

    call: str
    layout: str
    micro_batch_tokens: int | None
    predicted_s: float
    measured_s: float
    """Seconds of the slowest rank, without waiting, in the faster of the timed iterations, as in a profile."""


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """Predicted and measured seconds of an iteration under one plan."""

    predicted_s: float
    measured_s: float
    """Seconds of an iteration."""
    calls: tuple[CallPoint, ...]


@dataclass(slots=True)
class Turn:
    """Measurements of one workload."""

    profile_s: float = 0.0
    """Seconds of the profile."""
    crowding: Mapping[int, Any] = field(default_factory=dict)
    """Tensor-parallel degree -> (busy ranks, factor of seconds)."""
    plans: list[PlanPoint] = field(default_factory=list)


def random_plans(strategy: Any, seed: int) -> Iterator[Any]:
    """Yield random legal plans without end, with ranks, degrees and micro-batches of its own for every call."""
    from lightning_realloc import ExecutionPlan, Layout
    from lightning_realloc.dataflow.execution_plan import CallPlan
    from lightning_realloc.errors import ReallocError
    from lightning_realloc.tuning.search.space import legal_dims, rank_sets

    rng, flow, cluster = random.Random(seed), strategy.dataflow, strategy.cluster
    models = {role: strategy.pool.home(role).model_layout.model for role in strategy.pool.roles}
    sets = list(rank_sets(cluster))
    while True:
        smallest = rng.choice((1, 2, 2, 4))
        may_shard = rng.random() < SHARE_OF_SHARDED_GENERATION
        calls = []
        for call in flow.model_calls:
            ranks = rng.choice([one.ranks for one in sets if one.size >= smallest])
            legal = legal_dims(models[call.role], call.kind, len(ranks), cluster)
            if call.kind == "generate" and not may_shard:
                legal = tuple(dims for dims in legal if dims.fsdp == 1)
            dims = rng.choice(legal)
            tokens = None if call.kind == "generate" else rng.choice((512, 2048))
            calls.append((call.name, CallPlan(Layout(dims, ranks), tokens)))
        plan = ExecutionPlan(tuple(calls))
        try:
            plan.check(flow, WORLD_SIZE)
            plan.check_models(flow, models)
        except ReallocError:
            continue  # a rank without work, or a layout that does not fit its model
        yield plan


def measure(work: Workload, *, num_plans: int, seed: int, overlap: Literal["iterations", "none"], profile: Any) -> Any:
    """Run ``num_plans`` random plans, and return a `Turn` and the used profile. Collective.

    If ``profile`` is None, it is measured before the first plan.
    """
    from benchmarks.workload import make_trainer, random_prompts
    from lightning_realloc import ParameterReallocation, ReallocStrategy

    meter = _make_meter(work, num_plans, seed, overlap, profile)
    steps = (WARM_UP_PLANS + num_plans) * (UNCOUNTED + COUNTED)
    strategy = ReallocStrategy(overlap=overlap)
    trainer = make_trainer(strategy=strategy, callbacks=[ParameterReallocation(), meter], max_steps=steps)
    prompts = random_prompts(work.num_prompts * steps, length=work.prompt_tokens, batch_size=work.num_prompts)
    trainer.fit(make_module(work, Readings(rollouts=[{}])), prompts)
    return meter.turn, meter.profile


def _make_meter(work: Workload, num_plans: int, seed: int, overlap: Any, profile: Any) -> Any:
    from lightning_realloc import PhaseCallback
    from lightning_realloc.tuning.shapes.lengths import Lengths

    class Meter(PhaseCallback):
        """Changes the plan, prices it and times its iterations."""

        def __init__(self) -> None:
            self.turn, self.profile = Turn(), profile
            self._number = -WARM_UP_PLANS * (UNCOUNTED + COUNTED)
            self._plans: list[Any] = []
            self._prices: Any = None
            self._begin = 0.0
            self._before: Mapping[str, float] = {}
            self._calls: list[dict[str, float]] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            strategy = trainer.strategy
            if not self._plans:
                self._prepare(strategy)
            plan, phase = divmod(self._number, UNCOUNTED + COUNTED)
            if phase == 0:
                strategy.set_plan(self._plans[plan])
            if phase == UNCOUNTED:
                dist.barrier()
                self._begin, self._before = time.perf_counter(), dict(strategy.runner.seconds)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            plan, phase = divmod(self._number, UNCOUNTED + COUNTED)
            self._number += 1
            if plan < 0 or phase < UNCOUNTED:
                return
            now = dict(trainer.strategy.runner.seconds)
            self._calls.append({name: took - self._before.get(name, 0.0) for name, took in now.items()})
            self._before = now
            if phase == UNCOUNTED + COUNTED - 1:
                parts = gather_from_ranks((time.perf_counter() - self._begin, self._calls))
                self.turn.plans.append(_plan_point(self._plans[plan], self._prices, overlap, parts))
                self._calls = []

        def _prepare(self, strategy: Any) -> None:
            lengths = [Lengths((work.prompt_tokens,) * work.num_prompts, (work.new_tokens,) * work.num_prompts)]
            if self.profile is None:
                self.profile = strategy.profile(lengths, cache=None)
            table = self.profile.table
            self.turn.profile_s = table.seconds
            self.turn.crowding = {tp: curve.points for tp, curve in table.crowding.items()}
            evaluator = strategy.plan_evaluator(lengths, self.profile)
            self._prices = evaluator.estimator
            found = random_plans(strategy, seed)
            self._plans = [next(found) for _ in range(num_plans)]

    return Meter()


def _plan_point(
    plan: Any, prices: Any, overlap: Any, parts: Sequence[tuple[float, Sequence[Mapping[str, float]]]]
) -> PlanPoint:
    """Return the point of a plan; ``parts`` has each rank's seconds of all iterations, and of calls in each."""
    from lightning_realloc.tuning.timeline.simulator import simulate

    calls = tuple(
        CallPoint(
            name, str(chosen.layout), chosen.micro_batch_tokens, prices.call_seconds(name, chosen).total,
            min(max(of[at].get(name, 0.0) for _, of in parts) for at in range(COUNTED)),
        )
        for name, chosen in plan.calls
    )  # fmt: skip
    predicted = simulate(plan, prices, overlap=overlap).seconds_per_iteration
    return PlanPoint(predicted, max(seconds for seconds, _ in parts) / COUNTED, calls)
