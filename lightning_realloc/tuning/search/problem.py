"""Score a joint choice of plans for all calls of an iteration: its seconds, and its bytes beyond the budget.

Every call has a table of options for every number of ranks; see ``options``. A choice is an option on a set of ranks. A
state has a choice for every call, and a set of offloaded roles. Intermediate results are cached, since a search
evaluates many similar states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.search.options import (
    Option,
    OptionTable,
    PlacedOption,
    Pricing,
    SearchedCall,
    State,
    searched_calls,
)
from lightning_realloc.tuning.search.rank_memory import peak_and_idle
from lightning_realloc.tuning.search.space import CallOptions, RankSet
from lightning_realloc.tuning.timeline.iteration_schedule import IterationSchedule, Overlap, ScheduleBuilder
from lightning_realloc.tuning.timeline.steady_state import (
    WaitGraph,
    contended_seconds_per_iteration,
    seconds_per_iteration,
)

_MAX_CACHED_MOVES = 200_000
"""Most cached moves. A full cache is emptied, since a search visits an unbounded number of states."""
_MAX_CACHED_SCHEDULES = 20_000


class Score(NamedTuple):
    """Cost of a state; smaller is better, with the fields compared in order."""

    excess_bytes: int
    """Bytes of the fullest rank beyond the budget."""
    idle_ranks: int
    """Number of ranks without a call, which a run does not allow."""
    seconds: float
    """Seconds of an iteration."""

    @property
    def is_legal(self) -> bool:
        """Whether a run can use the plan."""
        return self.excess_bytes == 0 and self.idle_ranks == 0


class Problem:
    """The calls of an iteration, their options, and the scores of joint choices.

    Args:
        models: Role -> its model.
        options: Values to try for the options of calls.
        memory_budget: Bytes of a device that a plan may fill.
        is_late: Whether to stop pricing options where every call has some, see `Pricing.tables`.
        is_over: Whether to stop pricing options in any case.
        generation_chunks: Number of chunks in which samples go to inference on other ranks.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        estimator: Estimator,
        *,
        options: CallOptions,
        overlap: Overlap,
        memory_budget: int,
        is_late: Callable[[], bool],
        is_over: Callable[[], bool] = lambda: False,
        generation_chunks: int = 1,
    ) -> None:
        dataflow = estimator.dataflow
        missing = [role for role in dataflow.roles if role not in models]
        if missing:
            raise PlanError(f"role {missing[0]!r} needs a model; there are {', '.join(models) or 'none'}")
        self.dataflow, self.models, self.estimator = dataflow, models, estimator
        self.options, self.overlap, self.budget = options, overlap, memory_budget
        self.calls = searched_calls(estimator)
        self.pricing = Pricing(models=models, estimator=estimator, options=options, memory_budget=memory_budget)
        self.tables, self.is_complete = self.pricing.tables(self.calls, is_late, is_over)
        self.work = Work(estimator, self.calls, self.tables)
        self.schedule_builder = ScheduleBuilder(
            dataflow, [dataflow.call(call.name) for call in self.calls], 1 if overlap == "none" else generation_chunks
        )
        self._since_training = [self._calls_since_training(call) for call in self.calls]
        self._layouts: dict[tuple[ParallelDims, int], int] = {}
        self._moves: dict[tuple[int, int, int], float] = {}
        self._elsewhere: dict[tuple[object, ...], float] = {}
        """Seconds of calls where links between nodes differ."""
        self._schedule_of = lru_cache(maxsize=_MAX_CACHED_SCHEDULES)(self._make_schedule)

    @property
    def numbers(self) -> range:
        """Numbers of the calls."""
        return range(len(self.calls))

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster that the calls run on."""
        return self.estimator.cluster

    # ---- choices
    def place(self, option: Option, ranks: RankSet) -> PlacedOption:
        """Return an option on some ranks."""
        key = (option.dims, ranks.mask)
        return PlacedOption(option, ranks, self._layouts.setdefault(key, len(self._layouts)))

    def execution_plan(self, state: Sequence[PlacedOption], offload: Iterable[str] = ()) -> ExecutionPlan:
        """Return a state as a plan; calls that only serve evaluation run at the home of their role."""
        calls = tuple(
            (call.name, CallPlan(Layout(choice.option.dims, choice.ranks.ranks), *choice.option.plan.options))
            for call, choice in zip(self.calls, state, strict=True)
        )
        return ExecutionPlan(calls, tuple(offload)).completed(self.dataflow)

    # ---- costs
    def call_seconds(self, i: int, chosen: PlacedOption) -> float:
        """Return the seconds of a call on its ranks, which slow links between nodes may make longer."""
        cluster, option = self.cluster, chosen.option
        is_elsewhere = cluster.node_links and chosen.ranks.size > cluster.devices_per_node
        if not (is_elsewhere and self.calls[i].is_timed):
            return option.seconds
        key = (i, chosen.layout, option.plan.options)
        if key not in self._elsewhere:
            if len(self._elsewhere) > _MAX_CACHED_MOVES:
                self._elsewhere.clear()
            plan = CallPlan(Layout(option.dims, chosen.ranks.ranks), *option.plan.options)
            self._elsewhere[key] = self.estimator.call_seconds(self.calls[i].name, plan).total
        return self._elsewhere[key]

    def score(self, state: State, offload: frozenset[str] = frozenset()) -> Score:
        """Return the cost of a state; for an incomplete state, a lower bound on the cost of every completion."""
        return self._score_with([self.move_seconds(i, state) for i in self.numbers], state, offload)

    def least_score(self, state: State, offload: frozenset[str] = frozenset()) -> Score:
        """Return a lower bound on the `score` of a state: moves that were not priced yet take no time.

        Pricing a move takes as long as hundreds of scores on hundreds of devices.
        """
        keys = [self._needed_move(i, state) for i in self.numbers]
        return self._score_with([0.0 if key is None else self._moves.get(key, 0.0) for key in keys], state, offload)

    def knows_moves(self, state: State) -> bool:
        """Whether the `score` of a state prices no move; True where ranks slow each other down.

        There, tasks that start earlier may end later, so that scores have no such bound.
        """
        keys = (self._needed_move(i, state) for i in self.numbers)
        return self.work.has_contention or all(key is None or key in self._moves for key in keys)

    def _score_with(self, moves: Sequence[float], state: State, offload: frozenset[str]) -> Score:
        masks = self._task_masks(state, moves)
        durations = self._durations(state, moves, offload)
        # Without early calls, offloading does not change the schedule.
        schedule, waits = self._schedule_of(masks, offload if self.schedule_builder.early else frozenset())
        is_complete = None not in state
        if self.work.has_contention and is_complete:
            seconds = contended_seconds_per_iteration(
                schedule, masks, durations, self.overlap, self.cluster, self.estimator.slowdown
            )
        else:
            seconds = seconds_per_iteration(schedule.step_seconds(durations), waits, self.overlap)
        peak, idle = peak_and_idle(self.calls, state, self.cluster.num_devices, offload)
        if not is_complete:
            idle, seconds = 0, max(seconds, self._work_seconds(state, durations) / self.work.capacity)
        return Score(max(0, peak - self.budget), idle, seconds)

    def move_seconds(self, i: int, state: State) -> float:
        """Return the seconds to move weights to a call; 0 if they are there already, or may be in an incomplete state.

        A replica is filled once after each training call, for the first call that uses it. Weights that are never
        trained, such as a shared base, do not move again.
        """
        key = self._needed_move(i, state)
        if key is None:
            return 0.0
        if key not in self._moves:
            if len(self._moves) > _MAX_CACHED_MOVES:
                self._moves.clear()
            call = self.calls[i]
            places = state[call.home], state[i]
            source, target = (Layout(one.option.dims, one.ranks.ranks) for one in places if one is not None)
            self._moves[key] = self.estimator.move_seconds(call.role, source, target)
        return self._moves[key]

    def _needed_move(self, i: int, state: State) -> tuple[int, int, int] | None:
        """Return the call and the layouts that weights move between before it; None if they do not move."""
        call, chosen = self.calls[i], state[i]
        home = state[call.home]
        if not (call.is_trained and call.is_timed and chosen and home) or chosen.layout == home.layout:
            return None
        for j in self._since_training[i]:
            other = state[j]
            if other is None or other.layout == chosen.layout:
                return None
        return i, home.layout, chosen.layout

    def _calls_since_training(self, call: SearchedCall) -> tuple[int, ...]:
        """Return the calls of a role between its training and this call, across the border of iterations."""
        calls = [j for j in call.siblings if self.calls[j].is_timed and self.calls[j].role == call.role]
        if not call.is_trained or call.is_home or call.number not in calls:
            return ()
        own, training = calls.index(call.number), calls.index(call.home)
        return tuple(calls[training + 1 : own] if own > training else calls[training + 1 :] + calls[:own])

    def _durations(self, state: State, moves: Sequence[float], offload: frozenset[str]) -> list[float]:
        """Return the seconds of every task: task 2i moves weights to call i, and task 2i + 1 is call i."""
        durations = []
        for i, (call, chosen) in enumerate(zip(self.calls, state, strict=True)):
            seconds = self.work.least_seconds[i] if chosen is None else self.call_seconds(i, chosen)
            if chosen is not None and call.is_timed and call.role in offload:
                seconds += self.estimator.offload_seconds(chosen.option.resident_bytes)
            durations += [moves[i], seconds]
        return durations

    def _task_masks(self, state: State, moves: Sequence[float]) -> tuple[int, ...]:
        """Return the ranks of every task as bits; 0 for a move that is not needed and for a call without a choice."""
        masks: list[int] = []
        for i, (call, chosen) in enumerate(zip(self.calls, state, strict=True)):
            home = state[call.home]
            mask = 0 if chosen is None or not call.is_timed else chosen.ranks.mask
            masks += [mask | home.ranks.mask if moves[i] > 0 and home is not None else 0, mask]
        return tuple(masks)

    def _make_schedule(self, masks: tuple[int, ...], offload: frozenset[str]) -> tuple[IterationSchedule, WaitGraph]:
        schedule = self.schedule_builder.schedule(masks, offload)
        return schedule, WaitGraph.from_masks(schedule.step_masks(masks), schedule.needs, schedule.carried)

    def _work_seconds(self, state: State, durations: Sequence[float]) -> float:
        """Return the rank-seconds of work in an iteration."""
        total = 0.0
        for i, (call, chosen) in enumerate(zip(self.calls, state, strict=True)):
            home = state[call.home]
            if chosen is None:
                total += self.work.least[i]
                continue
            total += self.work.rate(chosen.ranks.size) * durations[2 * i + 1]
            if durations[2 * i] and home is not None:
                total += self.work.rate((chosen.ranks.mask | home.ranks.mask).bit_count()) * durations[2 * i]
        return total


class Work:
    """Rank-seconds of work: those that a cluster can do in a second, and those that calls need at least."""

    def __init__(self, estimator: Estimator, calls: Sequence[SearchedCall], tables: Sequence[OptionTable]) -> None:
        self._estimator, cluster = estimator, estimator.cluster
        counts = range(1, cluster.devices_per_node + 1)
        self.has_contention = any(estimator.slowdown(count) != 1.0 for count in counts)
        """Whether busy ranks of a node slow each other down."""
        self.capacity = cluster.num_nodes * max(count / estimator.slowdown(count) for count in counts)
        """Rank-seconds of work that the cluster can do in a second."""

        def least(value: Callable[[Option], float]) -> list[float]:
            rows = [[value(option) for row in table.values() for option in row] for table in tables]
            return [min(row, default=math.inf) if call.is_timed else 0.0 for call, row in zip(calls, rows, strict=True)]

        self.least_seconds = least(lambda option: option.seconds)
        """Least seconds of every call; 0 for a call that no iteration runs."""
        self.least = least(self.of_option)
        """Least rank-seconds of every call; 0 for a call that no iteration runs."""

    def of_option(self, option: Option) -> float:
        """Return the rank-seconds of a call without contention between its ranks."""
        return option.seconds * self.rate(option.dims.size)

    def rate(self, num_ranks: int) -> float:
        """Return the rank-seconds of work that the ranks of a task do in a second while other ranks are idle."""
        return num_ranks / self._estimator.slowdown(min(num_ranks, self._estimator.cluster.devices_per_node))
