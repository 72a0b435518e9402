"""Simulated annealing over joint placements of all calls, from several starts, for large spaces of plans.

A step changes the option or the ranks of a call, the border between two groups of calls, or a training layout with its
replicas. After a step that changes ranks, the affected calls take the best option of a short list. Poor options would
hide a good division of the ranks.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_realloc.tuning.search.exact import offload_sets
from lightning_realloc.tuning.search.options import Option, PlacedOption, undominated
from lightning_realloc.tuning.search.problem import Problem, Score
from lightning_realloc.tuning.search.space import RankSet, node_counts, node_order, node_run, parts

START_TEMPERATURE = 0.02
"""Temperature at the start of a round, as a fraction of an iteration's seconds. A larger one accepts worse plans."""
END_TEMPERATURE = 0.0002
"""Temperature at the end of a round, as a fraction of an iteration's seconds."""
NUM_ROUNDS = 8
"""Rounds of annealing. The first ones start from simple plans, later ones from the best plan."""
NUM_STARTS = 3
"""Rounds that start from the best simple plans."""
SHORTLIST_OPTIONS = 8
"""Options of a short list."""
MAX_POLISH_TRIALS = 120
"""Most choices that a polish tries for one call."""
MAX_DEVICES_WITH_ALL_PARTS = 32
"""Largest cluster on which the parts of all nodes are tried. On others only those of the first node, since nodes are
equal; where links differ, also those of the node with the slowest ones."""


class Improvement(NamedTuple):
    """A new best plan during a search."""

    after_s: float
    """Seconds since the start of the search."""
    evaluations: int
    """Number of plans scored so far."""
    seconds: float
    """Seconds of an iteration under the plan."""


@dataclass(slots=True)
class SearchProgress:
    """Effort of a search, its limits, and the best state so far."""

    clock: Callable[[], float]
    """Returns the current time in seconds."""
    seconds: float
    """Limit of the search, in seconds."""
    max_evaluations: int | None = None
    """Most scored plans; None: no limit."""
    begin: float = field(init=False)
    """Time at the start of the search."""
    evaluations: int = 0
    """Number of scored plans."""
    best: Score | None = None
    """Score of the best state; None before the first one."""
    state: tuple[PlacedOption, ...] = ()
    """Choices of the best state."""
    offload: frozenset[str] = frozenset()
    """Offloaded roles of the best state."""
    history: list[Improvement] = field(default_factory=list)
    """Successive best plans that are legal."""

    def __post_init__(self) -> None:
        self.begin = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the search."""
        return self.clock() - self.begin

    @property
    def share(self) -> float:
        """Fraction of the effort that is spent; at 1 the search must end."""
        of_time = self.elapsed_s / self.seconds
        return of_time if self.max_evaluations is None else max(of_time, self.evaluations / self.max_evaluations)

    def score(self, problem: Problem, state: Sequence[PlacedOption], offload: frozenset[str]) -> Score:
        """Score a complete state, and keep it if it is the best."""
        self.evaluations += 1
        found = problem.score(state, offload)
        if self.best is None or found < self.best:
            self.keep(found, state, offload)
        return found

    def keep(self, score: Score, state: Sequence[PlacedOption], offload: frozenset[str]) -> None:
        """Record a state as the best."""
        self.best, self.state, self.offload = score, tuple(state), offload
        if score.is_legal:
            self.history.append(Improvement(self.elapsed_s, self.evaluations, score.seconds))


class LocalSearch:
    """Annealing in rounds; each ends with a polish, which optimizes one call after the other."""

    def __init__(self, problem: Problem, rng: random.Random, progress: SearchProgress) -> None:
        self._problem, self._rng, self._progress = problem, rng, progress
        cluster = problem.cluster
        self._counts = node_counts(cluster)
        self._order = node_order(cluster)
        """Nodes, so that runs of them have fast links."""
        self._positions = {node: position for position, node in enumerate(self._order)}
        self._runs: dict[tuple[int, int], RankSet] = {}
        ends = {self._order[0], self._order[-1]} if cluster.node_links else {0}
        self._parts = [
            part
            for part in parts(cluster)
            if cluster.num_devices <= MAX_DEVICES_WITH_ALL_PARTS or part.ranks[0] // cluster.devices_per_node in ends
        ]
        self._short: dict[tuple[int, int], list[Option]] = {}
        self._offload_sets = offload_sets(problem)
        self._state: list[PlacedOption] = []
        self._offload: frozenset[str] = frozenset()

    def run(self) -> None:
        """Search until the effort is spent; a first plan is made in any case."""
        begin = self._progress.share
        starts = self._starts()
        polished = None
        for number in range(NUM_ROUNDS):
            if self._progress.share >= 1:
                return
            if number < len(starts):
                self._state, self._offload = list(starts[number]), frozenset()
            else:
                self._state, self._offload = list(self._progress.state), self._progress.offload
            self._anneal(begin + (1 - begin) * (number + 1) / NUM_ROUNDS)
            if self._progress.best != polished:
                self._state, self._offload = list(self._progress.state), self._progress.offload
                self._polish()
                polished = self._progress.best

    # ---- starts
    def _starts(self) -> list[list[PlacedOption]]:
        """Return a few good states: all calls on all ranks, or the nodes divided between trained roles."""
        found: list[tuple[float, int, list[PlacedOption]]] = []
        for division in self._divisions():
            if found and self._progress.share >= 1:
                break
            self._start(division)
            found.append((self._cost(self._score()), len(found), list(self._state)))
        return [state for _, _, state in sorted(found)[:NUM_STARTS]]

    def _divisions(self) -> Iterator[list[RankSet]]:
        """Yield lists of rank sets: all ranks, followed by the ranks of each trained role.

        The first trained role gets every possible number of nodes, and the others divide the rest by their work. A
        cluster with fewer nodes than trained roles is divided into equal parts of every size.
        """
        problem, nodes = self._problem, self._problem.cluster.num_nodes
        everywhere = self._run(0, nodes)
        yield [everywhere]
        trained = [call.number for call in problem.calls if call.is_trained and call.is_home]
        if len(trained) < 2:
            return
        if nodes < len(trained):
            for _, alike in itertools.groupby(self._parts, key=lambda part: part.size):
                places = list(itertools.islice(alike, len(trained)))
                if len(places) == len(trained):
                    yield [everywhere, *places]
            return
        for count in reversed(self._counts):
            counts = self._divided(trained[1:], nodes - count)
            if counts is not None:
                ends = list(itertools.accumulate([count, *counts], initial=0))
                yield [everywhere, *(self._run(a, b - a) for a, b in itertools.pairwise(ends))]

    def _divided(self, homes: Sequence[int], nodes: int) -> list[int] | None:
        """Divide at most ``nodes`` nodes between home calls by their work; None if there are too few nodes."""
        work = [self._problem.work.least[i] for i in homes]
        counts: list[int] = []
        for index in range(len(homes)):
            left = nodes - sum(counts) - (len(homes) - index - 1)
            if left < 1:
                return None
            wished = max(1, min(left, round(nodes * work[index] / max(sum(work), 1e-9))))
            counts.append(max(count for count in self._counts if count <= wished))
        return counts

    def _start(self, places: Sequence[RankSet]) -> None:
        """Place the home of each trained role on its ranks, and every other call where it is best."""
        problem = self._problem
        parts = iter(places[1:])
        sets = [next(parts, places[0]) if call.is_trained and call.is_home else places[0] for call in problem.calls]
        self._offload, self._state = frozenset(), []
        for i, ranks in enumerate(sets):
            if ranks.size not in problem.tables[i]:  # no option fits there
                ranks = self._rng.choice(self._candidate_ranks(i))
            self._state.append(problem.place(self._shortlist(i, ranks.size)[0], ranks))
        for _ in range(2):
            self._refit(problem.numbers)
            for i in problem.numbers if len(places) > 1 else ():
                fitting = [ranks for ranks in places if ranks.size in problem.tables[i]]
                self._take_best(
                    i,
                    [
                        (option, ranks)
                        for ranks in dict.fromkeys([*fitting, self._state[i].ranks])
                        for option in self._shortlist(i, ranks.size)
                    ],
                )

    # ---- steps
    def _anneal(self, until: float) -> None:
        progress, begin = self._progress, self._progress.share
        current = self._cost(self._score())
        while (share := progress.share) < until:
            heat = START_TEMPERATURE * (END_TEMPERATURE / START_TEMPERATURE) ** ((share - begin) / (until - begin))
            old_state, old_offload = list(self._state), self._offload
            self._step()
            # The rule of Metropolis, solved for the cost: that of a worse state is accepted with exp(-increase / heat).
            limit = current * (1 - heat * math.log(1 - self._rng.random()))
            cost = self._cost_up_to(limit)
            if cost > limit:
                self._state, self._offload = old_state, old_offload
            else:
                current = cost

    def _step(self) -> None:
        i = self._rng.randrange(len(self._state))
        draw = self._rng.random()
        if draw < 0.2:
            self._trade(i)
        elif draw < 0.4:
            self._put(i, self._rng.choice(self._problem.tables[i][self._state[i].ranks.size]), self._state[i].ranks)
        elif draw < 0.6:
            self._relocate(i)
        elif draw < 0.8:
            self._shift_border()
        elif draw < 0.97 or len(self._offload_sets) == 1:
            self._change_home(i)
        else:
            self._offload = self._rng.choice(self._offload_sets)

    def _trade(self, i: int) -> None:
        """Change the memory that a call needs, and adapt two other calls to it."""
        ranks = self._state[i].ranks
        self._put(i, self._rng.choice(self._shortlist(i, ranks.size)), ranks)
        others = [j for j in self._problem.numbers if j != i]
        self._refit(self._rng.sample(others, min(2, len(others))))

    def _relocate(self, i: int) -> None:
        """Move a call to other ranks."""
        self._put(i, None, self._rng.choice(self._candidate_ranks(i)))
        self._refit((i,))

    def _shift_border(self) -> None:
        """Move the node at which some calls begin or end to another node."""
        nodes = self._problem.cluster.num_nodes
        borders = sorted({at for choice in self._state for at in self._ends(choice.ranks)} - {0, nodes})
        if not borders:
            return self._relocate(self._rng.randrange(len(self._state)))
        old, new = self._rng.choice(borders), self._rng.randrange(1, nodes)
        if self._rng.random() < 0.5:
            new = min(nodes - 1, max(1, old + self._rng.choice((-2, -1, 1, 2))))
        touched = []
        for i, choice in enumerate(self._state):
            ends = self._ends(choice.ranks)
            if old in ends:
                first, last = sorted(new if at == old else at for at in ends)
                count = last - first
                if count in self._counts and count * self._problem.cluster.devices_per_node in self._problem.tables[i]:
                    self._put(i, None, self._run(first, count))
                    touched.append(i)
        return self._refit(touched)

    def _change_home(self, i: int) -> None:
        """Change the home of a role, and then the layouts that its weights move to."""
        home = self._problem.calls[i].home
        ranks = self._state[home].ranks
        self._put(home, self._rng.choice(self._problem.tables[home][ranks.size]), ranks)
        self._refit([j for j in self._problem.calls[i].siblings if j != home])

    def _refit(self, calls: Sequence[int]) -> None:
        """Give each call in turn the best option of a short list on its ranks."""
        for i in calls:
            ranks = self._state[i].ranks
            options = list(self._shortlist(i, ranks.size))
            home = self._state[self._problem.calls[i].home].option.dims
            options += [one for one in self._problem.tables[i][ranks.size] if one.dims == home][:2]
            self._take_best(i, [(option, ranks) for option in options])

    def _take_best(self, i: int, choices: Sequence[tuple[Option, RankSet]]) -> None:
        best, least = self._state[i], math.inf
        for option, ranks in choices:
            self._put(i, option, ranks)
            cost = self._cost_up_to(least)
            if cost < least:
                best, least = self._state[i], cost
        self._state[i] = best

    def _polish(self) -> None:
        """Try many rank sets and options for each call in turn, until no call improves."""
        before = math.inf
        while (cost := self._cost(self._score())) < before * (1 - 1e-6):
            before = cost
            for i in self._problem.numbers:
                places = self._candidate_ranks(i, everywhere=True)
                trials = [
                    (option, ranks)
                    for ranks in places
                    for option in self._shortlist(i, ranks.size)
                    if option.seconds < cost
                ]
                same = self._state[i].ranks
                trials += [(option, same) for option in self._problem.tables[i][same.size]]
                if len(trials) > MAX_POLISH_TRIALS:
                    trials = self._rng.sample(trials, MAX_POLISH_TRIALS)
                for at in range(0, len(trials), 100):
                    if self._progress.share >= 1:
                        return
                    self._take_best(i, [(self._state[i].option, self._state[i].ranks), *trials[at : at + 100]])

    # ---- places and options
    def _put(self, i: int, option: Option | None, ranks: RankSet) -> None:
        self._state[i] = self._problem.place(option or self._shortlist(i, ranks.size)[0], ranks)

    def _candidate_ranks(self, i: int, *, everywhere: bool = False) -> list[RankSet]:
        """Return sets of ranks for a call that begin or end where those of another call do, and some others."""
        cluster, table = self._problem.cluster, self._problem.tables[i]
        borders = {0, cluster.num_nodes, *(at for choice in self._state for at in self._ends(choice.ranks))}
        counts = [count for count in self._counts if count * cluster.devices_per_node in table]
        if not everywhere and len(counts) > SHORTLIST_OPTIONS:
            counts = self._rng.sample(counts, SHORTLIST_OPTIONS)
        runs = {(at - back, count) for count in counts for at in borders for back in (0, count)}
        found = [
            self._run(first, count)
            for first, count in sorted(runs)
            if first >= 0 and first + count <= cluster.num_nodes
        ]
        found += [choice.ranks for choice in self._state if choice.ranks.size in table]
        return found + [part for part in self._parts if part.size in table]

    def _run(self, first: int, count: int) -> RankSet:
        if (first, count) not in self._runs:
            self._runs[first, count] = node_run(self._problem.cluster, first, count, self._order)
        return self._runs[first, count]

    def _ends(self, ranks: RankSet) -> tuple[int, ...]:
        """Return the first position of a run of whole nodes, and the one after it; () for a part of a node."""
        devices = self._problem.cluster.devices_per_node
        if ranks.size % devices:
            return ()
        if not self._problem.cluster.node_links:
            return ranks.ranks[0] // devices, ranks.ranks[-1] // devices + 1
        positions = [self._positions[rank // devices] for rank in ranks.ranks[::devices]]
        return min(positions), max(positions) + 1

    def _shortlist(self, i: int, size: int) -> list[Option]:
        """Return the fastest option on this many ranks, and some that are slower but need less memory."""
        if (i, size) not in self._short:
            options = self._problem.tables[i][size]
            front = undominated(options, lambda one: (one.seconds, one.active_bytes + one.kept_bytes))
            last, count = len(front) - 1, min(SHORTLIST_OPTIONS, len(front))
            # Denser at the fast end, since memory rarely requires the slowest option.
            picked = sorted({round(last * (at / max(1, count - 1)) ** 2) for at in range(count)})
            self._short[i, size] = [front[at] for at in picked]
        return self._short[i, size]

    # ---- costs
    def _score(self) -> Score:
        return self._progress.score(self._problem, self._state, self._offload)

    def _cost_up_to(self, limit: float) -> float:
        """Return the cost of the state, or a lower bound on it beyond ``limit``, for which no move is priced."""
        problem, progress = self._problem, self._progress
        if not problem.knows_moves(self._state):
            least = problem.least_score(self._state, self._offload)
            if self._cost(least) > limit and progress.best is not None and least >= progress.best:
                progress.evaluations += 1
                return self._cost(least)
        return self._cost(self._score())

    def _cost(self, score: Score) -> float:
        """Return the seconds with a penalty for illegal states, which annealing may pass through to better plans."""
        problem = self._problem
        beyond = score.excess_bytes / problem.budget
        idle = score.idle_ranks / problem.cluster.num_devices
        return score.seconds * (1 + 4 * beyond + idle + (0.05 if not score.is_legal else 0.0))
