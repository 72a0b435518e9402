"""What a joint choice of plans for all calls of an iteration costs: seconds, and bytes beyond the budget.

Every call has a table of options for every number of ranks, see ``search_options``. A choice is an option on a set of
ranks; a state is a choice for every call, and what is offloaded. What a search evaluates again and again is cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.search.chunked import ChunkedTasks
from lightning_realloc.tuning.search.options import Option, Pricing, Subject
from lightning_realloc.tuning.search.space import CallOptions, RankSet, node_run
from lightning_realloc.tuning.timeline.simulator import Overlap
from lightning_realloc.tuning.timeline.steady_state import Waits, crowded_seconds_per_iteration, seconds_per_iteration

_MAX_CACHED = 200_000
"""Entries of a cache that is emptied when it is full: what a search visits has no end."""


@dataclass(slots=True, eq=False)
class Choice:
    """An option on some ranks."""

    option: Option
    ranks: RankSet
    layout_key: tuple[ParallelDims, int]
    """Equal for equal layouts, and cheaper to compare."""
    seconds: float
    layout: int
    """The number of its layout."""


class Score(NamedTuple):
    """What a state costs; of two, the smaller one is better."""

    excess_bytes: int
    """What the fullest rank needs beyond the budget."""
    idle_ranks: int
    """Ranks that no call uses: a run cannot have any."""
    seconds: float
    """Of an iteration."""

    @property
    def is_legal(self) -> bool:
        """Whether such a plan can be run."""
        return self.excess_bytes == 0 and self.idle_ranks == 0


State = Sequence[Choice | None]
"""A choice for every call of the problem; None: not chosen yet."""


class Problem:
    """The calls of an iteration, their options, and what joint choices cost."""

    def __init__(
        self, dataflow: Dataflow, models: Mapping[str, ModelSpec], estimator: Estimator, *, options: CallOptions,
        overlap: Overlap, memory_budget: int, is_late: Callable[[], bool], generation_parts: int = 1,
    ) -> None:  # fmt: skip
        """Price every option, until ``is_late`` says that there is no time for more."""
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
        self._needs, self._carried = _dependencies(dataflow, self.calls)
        self.portions: ChunkedTasks | None = None
        if generation_parts > 1 and overlap != "none":
            self.portions = ChunkedTasks(dataflow, self.calls, self._needs, self._carried, generation_parts)
        self._layouts: dict[tuple[ParallelDims, int], int] = {}
        self._moves: dict[tuple[int, int, int], float] = {}
        self._waits: dict[tuple[int, ...], Waits] = {}
        self._groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self._layout = lru_cache(maxsize=256)(Layout)
        pricing = Pricing(models=models, estimator=estimator, options=options, memory_budget=memory_budget)
        subjects = [Subject(self.calls[i], self.home[i] == i, self.timed[i]) for i in self.numbers]
        self.tables, self.is_complete = pricing.tables(subjects, is_late)
        per_node = range(1, self.cluster.devices_per_node + 1)
        self.is_crowded = any(estimator.slowdown(count) != 1.0 for count in per_node)
        """Whether ranks of a node are in each other's way."""
        self.capacity = self.cluster.num_nodes * max(count / estimator.slowdown(count) for count in per_node)
        """Rank-seconds of work that the cluster does in a second."""
        self.least_seconds = [self._least(i, lambda option: option.seconds) for i in self.numbers]
        self.least_work = [self._least(i, self.work_of) for i in self.numbers]

    # ---- least of all options
    def _least(self, i: int, value: Callable[[Option], float]) -> float:
        if not self.timed[i]:
            return 0.0
        return min((value(option) for options in self.tables[i].values() for option in options), default=math.inf)

    def work_of(self, option: Option) -> float:
        """Return the rank-seconds of a call that its ranks would take if none were in another's way."""
        return option.seconds * self._work_rate(option.dims.size)

    def _work_rate(self, num_ranks: int) -> float:
        """Return the rank-seconds of work that so many ranks of a task do in a second, as they are priced: alone."""
        return num_ranks / self.estimator.slowdown(min(num_ranks, self.cluster.devices_per_node))

    # ---- choices
    def choose(self, option: Option, ranks: RankSet) -> Choice:
        """Return an option on some ranks."""
        key = (option.dims, ranks.mask)
        return Choice(option, ranks, key, option.seconds, self._layouts.setdefault(key, len(self._layouts)))

    def execution_plan(self, state: Sequence[Choice], offload: Iterable[str] = ()) -> ExecutionPlan:
        """Return a state as a plan, evaluation's calls at home."""
        calls = []
        for call, choice in zip(self.calls, state, strict=True):
            plan = choice.option.plan
            layout = Layout(choice.option.dims, choice.ranks.ranks)
            calls.append((call.name, CallPlan(layout, plan.micro_batch_tokens, plan.gradient_checkpointing,
                                              plan.max_slots)))  # fmt: skip
        return ExecutionPlan(tuple(calls), tuple(offload)).completed(self.dataflow)

    def is_alone(self, i: int) -> bool:
        """Whether no other call's weights come from this call's layout, or share it."""
        return all(j == i for j in self.siblings[i])

    def is_only_copy(self, i: int) -> bool:
        """Whether a call is the only one of its role besides the home call."""
        return self.home[i] != i and len(self.siblings[i]) == 2

    # ---- costs
    def score(self, state: State, offload: frozenset[str] = frozenset()) -> Score:
        """Return what a state costs; with calls not chosen yet, a bound from below on what it can come to."""
        moves = [self.move_seconds(i, state) for i in self.numbers]
        durations = self._durations(state, moves, offload)
        if self.portions is not None:
            seconds = self._seconds_in_portions(state, moves, durations, offload, self.portions)
        elif self.is_crowded and None not in state:
            seconds = self._crowded_seconds(durations, self._masks(state, moves), self._needs, self._carried)
        else:
            seconds = seconds_per_iteration(durations, self._waits_of(state, moves), self.overlap)
        if None in state:
            seconds = max(seconds, self._work(state, durations) / self.capacity)
            return Score(self._excess(state, offload)[0], 0, seconds)
        return Score(*self._excess(state, offload), seconds)

    def _seconds_in_portions(
        self, state: State, moves: Sequence[float], durations: Sequence[float], offload: frozenset[str],
        portions: ChunkedTasks,
    ) -> float:  # fmt: skip
        steps = portions.steps(self._masks(state, moves), offload)
        spread = steps.spread(durations)
        if self.is_crowded and None not in state:
            return self._crowded_seconds(spread, steps.masks, steps.needs, steps.carried)
        return seconds_per_iteration(spread, steps.waits, self.overlap)

    def _crowded_seconds(
        self, durations: Sequence[float], masks: Sequence[int], needs: Sequence[Sequence[int]],
        carried: Sequence[Sequence[int]],
    ) -> float:  # fmt: skip
        return crowded_seconds_per_iteration(
            durations, masks, needs, carried, self.overlap, self.cluster, self.estimator.slowdown
        )

    def move_seconds(self, i: int, state: State) -> float:
        """Return how long weights take to a call in an iteration; 0 where they lie there already, or may.

        A copy is filled once after each training call, for the first call that uses it; what is never trained, as the
        base that a role shares, stays as it is.
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
        """Return seconds of every call's move and call, in turn."""
        durations = []
        for i, chosen in enumerate(state):
            seconds = self.least_seconds[i] if chosen is None else chosen.seconds
            if chosen is not None and self.timed[i] and self.calls[i].role in offload:
                seconds += self.estimator.offload_seconds(chosen.option.resident_bytes)
            durations += [moves[i], seconds]
        return durations

    def _work(self, state: State, durations: Sequence[float]) -> float:
        """Return the rank-seconds of an iteration."""
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

    def _waits_of(self, state: State, moves: Sequence[float]) -> Waits:
        key = tuple((0 if c is None else 2 * c.ranks.mask) + (moves[i] > 0) for i, c in enumerate(state))
        if key not in self._waits:
            if len(self._waits) > _MAX_CACHED // 10:
                self._waits.clear()
            self._waits[key] = Waits.of(self._masks(state, moves), self._needs, self._carried)
        return self._waits[key]

    def _masks(self, state: State, moves: Sequence[float]) -> list[int]:
        """Return the ranks of every move and call, in turn, as bits."""
        masks = []
        for i, chosen in enumerate(state):
            home = state[self.home[i]]
            mask = 0 if chosen is None or not self.timed[i] else chosen.ranks.mask
            masks += [mask | home.ranks.mask if moves[i] > 0 and home is not None else 0, mask]
        return masks

    def _excess(self, state: State, offload: frozenset[str]) -> tuple[int, int]:
        """Return the most bytes beyond the budget on any rank, and how many ranks have nothing to do."""
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
        """Return a rank's peak where some roles are there only in their own calls and in the one before each."""
        roles = [self.calls[i].role for i in group]
        stays = sum(resident[i] for i, role in zip(group, roles, strict=True) if role not in offload)
        most = 0
        for at, i in enumerate(group):
            present = {roles[at]}
            if None not in state:  # else calls may come in between
                present.add(roles[(at + 1) % len(group)])
            back = sum(resident[j] for j, role in zip(group, roles, strict=True) if role in offload and role in present)
            chosen = state[i]
            most = max(most, stays + back + (0 if chosen is None else chosen.option.active_bytes))
        return most

    def _groups_of(self, state: State) -> tuple[tuple[int, ...], ...]:
        """Return (number of idle ranks,), then the calls of every group of ranks that take part in the same ones."""
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
        """Return the calls of the role between its training and call ``i``, round the iteration."""
        if not self.trained[i] or self.home[i] == i:
            return ()
        siblings = [j for j in self.siblings[i] if self.timed[j] and self.calls[j].role == self.calls[i].role]
        if i not in siblings:
            return ()
        at, training = siblings.index(i), siblings.index(self.home[i])
        return tuple(siblings[training + 1 : at] if at > training else siblings[training + 1 :] + siblings[:at])

    def chains_to(self, end: int) -> list[list[int]]:
        """Return every chain of calls that ends with ``end``, each needing the products of the one before it."""
        makers = [task // 2 for task in self._needs[2 * end + 1] if task != 2 * end]
        if not makers:
            return [[end]]
        return [[*chain, end] for maker in makers for chain in self.chains_to(maker)]

    def all_ranks(self) -> RankSet:
        """Return the whole cluster."""
        return node_run(self.cluster, 0, self.cluster.num_nodes)


def _dependencies(
    dataflow: Dataflow, calls: Sequence[ModelFunctionCall]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return what every task waits for within an iteration, and from the one before; task 2i moves, 2i+1 calls.

    Computations on the host take no time here; who needs their products needs theirs. A role's calls before its
    training wait for the training of the iteration before: their weights come from it.
    """
    number = {call.name: 2 * i + 1 for i, call in enumerate(calls)}
    makers: dict[str, set[int]] = {}
    needs: list[tuple[int, ...]] = [()] * (2 * len(calls))
    for call in dataflow.calls:
        wanted = set().union(*(makers.get(name, set()) for name in call.needs))
        if call.name in number:
            task = number[call.name]
            needs[task] = (*sorted(wanted), task - 1)
            wanted = {task}
        makers |= {name: wanted for name in call.produces}
    carried: list[tuple[int, ...]] = [()] * (2 * len(calls))
    for training in (call for call in calls if call.kind == "train"):
        for i, call in enumerate(calls):
            if call.role == training.role:
                carried[2 * i + 1] = (number[training.name],)
    return tuple(needs), tuple(carried)
