"""Score a joint choice of plans for all calls of an iteration: its seconds, and its bytes beyond the budget.

Every call has a table of options for every number of ranks; see ``options``. A choice is an option on a set of ranks. A
state has a choice for every call, and a set of offloaded roles. Intermediate results are cached, since a search
evaluates many similar states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.search.options import Option, PricedCall, Pricing
from lightning_realloc.tuning.search.space import CallOptions, RankSet, node_run
from lightning_realloc.tuning.timeline.iteration_schedule import IterationSchedule, Overlap, ScheduleBuilder
from lightning_realloc.tuning.timeline.steady_state import (
    WaitGraph,
    contended_seconds_per_iteration,
    seconds_per_iteration,
)

_MAX_CACHED = 200_000
"""Most entries of a cache. A full cache is emptied, since a search visits an unbounded number of states."""


@dataclass(slots=True, eq=False)
class PlacedOption:
    """An option on some ranks."""

    option: Option
    ranks: RankSet
    seconds: float
    """Seconds of the option."""
    layout: int
    """Number of the layout; equal layouts have the same number."""


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


State = Sequence[PlacedOption | None]
"""A choice for every call of the problem; None for a call without a choice yet."""


class Problem:
    """The calls of an iteration, their options, and the scores of joint choices.

    Args:
        models: Role -> its model.
        options: Values to try for the options of calls.
        memory_budget: Bytes of a device that a plan may fill.
        is_late: Whether to stop pricing options, see `Pricing.tables`.
        generation_parts: Number of chunks in which samples go to inference on other ranks.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        models: Mapping[str, ModelSpec],
        estimator: Estimator,
        *,
        options: CallOptions,
        overlap: Overlap,
        memory_budget: int,
        is_late: Callable[[], bool],
        generation_parts: int = 1,
    ) -> None:
        missing = [role for role in dataflow.roles if role not in models]
        if missing:
            raise PlanError(f"role {missing[0]!r} needs a model; there are {', '.join(models) or 'none'}")
        self.dataflow, self.estimator, self.cluster = dataflow, estimator, estimator.cluster
        self.models, self.options = models, options
        self.overlap, self.budget = overlap, memory_budget
        timed = [call for call in dataflow.iteration_calls if call.role is not None]
        homes = [dataflow.home_call(estimator.owner(role)) for role in dataflow.roles]
        self.calls = tuple(call for call in dataflow.model_calls if call in timed or call in homes)
        self.timed = tuple(call in timed for call in self.calls)
        self.numbers = range(len(self.calls))
        index = {call.name: i for i, call in enumerate(self.calls)}
        self.owners = tuple(estimator.owner(str(call.role)) for call in self.calls)
        self.home = tuple(index[dataflow.home_call(owner).name] for owner in self.owners)
        self.trained = tuple(call.role in dataflow.trained_roles for call in self.calls)
        self.siblings = tuple(tuple(j for j in self.numbers if self.owners[j] == owner) for owner in self.owners)
        self._since_training = tuple(self._calls_since_training(i) for i in self.numbers)
        self.schedule_builder = ScheduleBuilder(dataflow, self.calls, 1 if overlap == "none" else generation_parts)
        self._layouts: dict[tuple[ParallelDims, int], int] = {}
        self._moves: dict[tuple[int, int, int], float] = {}
        self._schedule_cache: dict[tuple[object, ...], tuple[IterationSchedule, WaitGraph]] = {}
        self._groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self._layout = lru_cache(maxsize=256)(Layout)
        pricing = Pricing(models=models, estimator=estimator, options=options, memory_budget=memory_budget)
        subjects = [PricedCall(self.calls[i], self.home[i] == i, self.timed[i]) for i in self.numbers]
        self.tables, self.is_complete = pricing.tables(subjects, is_late)
        per_node = range(1, self.cluster.devices_per_node + 1)
        self.has_contention = any(estimator.slowdown(count) != 1.0 for count in per_node)
        """Whether busy ranks of a node slow each other down."""
        self.capacity = self.cluster.num_nodes * max(count / estimator.slowdown(count) for count in per_node)
        """Rank-seconds of work that the cluster can do in a second."""
        self.least_seconds = [self._least(i, lambda option: option.seconds) for i in self.numbers]
        self.least_work = [self._least(i, self.work_of) for i in self.numbers]

    # ---- minimum over options
    def _least(self, i: int, value: Callable[[Option], float]) -> float:
        if not self.timed[i]:
            return 0.0
        return min((value(option) for options in self.tables[i].values() for option in options), default=math.inf)

    def work_of(self, option: Option) -> float:
        """Return the rank-seconds of a call without contention between its ranks."""
        return option.seconds * self._work_rate(option.dims.size)

    def _work_rate(self, num_ranks: int) -> float:
        """Return the rank-seconds of work that the ranks of a task do in a second while other ranks are idle."""
        return num_ranks / self.estimator.slowdown(min(num_ranks, self.cluster.devices_per_node))

    # ---- choices
    def place(self, option: Option, ranks: RankSet) -> PlacedOption:
        """Return an option on some ranks."""
        key = (option.dims, ranks.mask)
        return PlacedOption(option, ranks, option.seconds, self._layouts.setdefault(key, len(self._layouts)))

    def execution_plan(self, state: Sequence[PlacedOption], offload: Iterable[str] = ()) -> ExecutionPlan:
        """Return a state as a plan; calls that only serve evaluation run at the home of their role."""
        calls = []
        for call, choice in zip(self.calls, state, strict=True):
            plan = choice.option.plan
            layout = Layout(choice.option.dims, choice.ranks.ranks)
            calls.append(
                (call.name, CallPlan(layout, plan.micro_batch_tokens, plan.gradient_checkpointing, plan.max_slots))
            )
        return ExecutionPlan(tuple(calls), tuple(offload)).completed(self.dataflow)

    def is_alone(self, i: int) -> bool:
        """Whether a call is the only one of its role and of the roles that share its weights."""
        return all(j == i for j in self.siblings[i])

    def is_only_copy(self, i: int) -> bool:
        """Whether a call is the only one of its role apart from the home call."""
        return self.home[i] != i and len(self.siblings[i]) == 2

    # ---- costs
    def score(self, state: State, offload: frozenset[str] = frozenset()) -> Score:
        """Return the cost of a state; for an incomplete state, a lower bound on the cost of every completion."""
        moves = [self.move_seconds(i, state) for i in self.numbers]
        durations = self._durations(state, moves, offload)
        schedule, waits = self._schedule_of(state, moves, offload)
        if self.has_contention and None not in state:
            seconds = contended_seconds_per_iteration(
                schedule, self._masks(state, moves), durations, self.overlap, self.cluster, self.estimator.slowdown
            )
        else:
            seconds = seconds_per_iteration(schedule.step_seconds(durations), waits, self.overlap)
        if None in state:
            seconds = max(seconds, self._work(state, durations) / self.capacity)
            return Score(self._excess(state, offload)[0], 0, seconds)
        return Score(*self._excess(state, offload), seconds)

    def move_seconds(self, i: int, state: State) -> float:
        """Return the seconds to move weights to a call; 0 if they are there already, or may be in an incomplete state.

        A replica is filled once after each training call, for the first call that uses it. Weights that are never
        trained, such as a shared base, do not move again.
        """
        chosen, home = state[i], state[self.home[i]]
        if not self.trained[i] or not self.timed[i] or chosen is None or home is None or chosen.layout == home.layout:
            return 0.0
        for j in self._since_training[i]:
            other = state[j]
            if other is None or other.layout == chosen.layout:
                return 0.0
        key = (i, home.layout, chosen.layout)
        if key not in self._moves:
            if len(self._moves) > _MAX_CACHED:
                self._moves.clear()
            source, target = (self._layout(one.option.dims, one.ranks.ranks) for one in (home, chosen))
            self._moves[key] = self.estimator.move_seconds(str(self.calls[i].role), source, target)
        return self._moves[key]

    def _durations(self, state: State, moves: Sequence[float], offload: frozenset[str]) -> list[float]:
        """Return the seconds of every task: task 2i moves weights to call i, and task 2i + 1 is call i."""
        durations = []
        for i, chosen in enumerate(state):
            seconds = self.least_seconds[i] if chosen is None else chosen.seconds
            if chosen is not None and self.timed[i] and self.calls[i].role in offload:
                seconds += self.estimator.offload_seconds(chosen.option.resident_bytes)
            durations += [moves[i], seconds]
        return durations

    def _work(self, state: State, durations: Sequence[float]) -> float:
        """Return the rank-seconds of work in an iteration."""
        total = 0.0
        for i, chosen in enumerate(state):
            home = state[self.home[i]]
            if chosen is None:
                total += self.least_work[i]
                continue
            total += self._work_rate(chosen.ranks.size) * durations[2 * i + 1]
            if durations[2 * i] and home is not None:
                total += self._work_rate((chosen.ranks.mask | home.ranks.mask).bit_count()) * durations[2 * i]
        return total

    def _schedule_of(
        self, state: State, moves: Sequence[float], offload: frozenset[str]
    ) -> tuple[IterationSchedule, WaitGraph]:
        places: list[object] = [(0 if c is None else 2 * c.ranks.mask) + (moves[i] > 0) for i, c in enumerate(state)]
        if self.schedule_builder.early:  # without early calls, offloading does not change the schedule
            places.append(offload)
        key = tuple(places)
        if key not in self._schedule_cache:
            if len(self._schedule_cache) > _MAX_CACHED // 10:
                self._schedule_cache.clear()
            masks = self._masks(state, moves)
            schedule = self.schedule_builder.schedule(masks, offload)
            waits = WaitGraph.from_masks(schedule.step_masks(masks), schedule.needs, schedule.carried)
            self._schedule_cache[key] = schedule, waits
        return self._schedule_cache[key]

    def _masks(self, state: State, moves: Sequence[float]) -> list[int]:
        """Return the ranks of every task as bits; 0 for a move that is not needed and for a call without a choice."""
        masks = []
        for i, chosen in enumerate(state):
            home = state[self.home[i]]
            mask = 0 if chosen is None or not self.timed[i] else chosen.ranks.mask
            masks += [mask | home.ranks.mask if moves[i] > 0 and home is not None else 0, mask]
        return masks

    def _excess(self, state: State, offload: frozenset[str]) -> tuple[int, int]:
        """Return the bytes of the fullest rank beyond the budget, and the number of ranks without a call."""
        groups = self._groups_of(state)
        resident: list[int] = []
        copies: set[tuple[str, int]] = set()
        for i, chosen in enumerate(state):
            home = state[self.home[i]]
            if chosen is None or home is None:
                resident.append(0)
            elif home is chosen:
                resident.append(chosen.option.resident_bytes)
            else:
                place = (self.owners[i], chosen.layout)
                is_new = chosen.layout != home.layout and place not in copies
                resident.append(chosen.option.resident_bytes if is_new else 0)
                copies.add(place)
        most = 0
        for group in groups[1:]:
            if offload:
                most = max(most, self._peak_with_offload(group, state, resident, offload))
            else:
                active = max(chosen.option.active_bytes for i in group if (chosen := state[i]) is not None)
                most = max(most, sum(resident[i] for i in group) + active)
        return max(0, most - self.budget), groups[0][0]

    def _peak_with_offload(
        self, group: Sequence[int], state: State, resident: Sequence[int], offload: frozenset[str]
    ) -> int:
        """Return a rank's peak if offloaded roles are on the device only in their calls and in the call before each."""
        roles = [self.calls[i].role for i in group]
        stays = sum(resident[i] for i, role in zip(group, roles, strict=True) if role not in offload)
        most = 0
        for index, i in enumerate(group):
            present = {roles[index]}
            if None not in state:  # in an incomplete state other calls may come in between
                present.add(roles[(index + 1) % len(group)])
            back = sum(resident[j] for j, role in zip(group, roles, strict=True) if role in offload and role in present)
            chosen = state[i]
            most = max(most, stays + back + (0 if chosen is None else chosen.option.active_bytes))
        return most

    def _groups_of(self, state: State) -> tuple[tuple[int, ...], ...]:
        """Return (number of idle ranks,), then the calls of each group of ranks that run the same calls."""
        key = tuple(0 if chosen is None else chosen.ranks.mask for chosen in state)
        if key not in self._groups:
            if len(self._groups) > _MAX_CACHED // 10:
                self._groups.clear()
            atoms: list[tuple[int, tuple[int, ...]]] = [((1 << self.cluster.num_devices) - 1, ())]
            for i, mask in enumerate(key):
                inside = [(atom & mask, (*calls, i)) for atom, calls in atoms if atom & mask]
                atoms = inside + [(atom & ~mask, calls) for atom, calls in atoms if atom & ~mask]
            idle = sum(atom.bit_count() for atom, calls in atoms if not calls)
            self._groups[key] = ((idle,), *(calls for _, calls in atoms if calls))
        return self._groups[key]

    def _calls_since_training(self, i: int) -> tuple[int, ...]:
        """Return the calls of a role between its training and call ``i``, across the border of iterations."""
        if not self.trained[i] or self.home[i] == i:
            return ()
        siblings = [j for j in self.siblings[i] if self.timed[j] and self.calls[j].role == self.calls[i].role]
        if i not in siblings:
            return ()
        own, training = siblings.index(i), siblings.index(self.home[i])
        return tuple(siblings[training + 1 : own] if own > training else siblings[training + 1 :] + siblings[:own])

    def chains_to(self, end: int) -> list[list[int]]:
        """Return every chain of calls that ends with ``end``, in which each call needs products of the previous one."""
        makers = [task // 2 for task in self.schedule_builder.needs[2 * end + 1] if task != 2 * end]
        if not makers:
            return [[end]]
        return [[*chain, end] for maker in makers for chain in self.chains_to(maker)]

    def all_ranks(self) -> RankSet:
        """Return all ranks of the cluster."""
        return node_run(self.cluster, 0, self.cluster.num_nodes)
