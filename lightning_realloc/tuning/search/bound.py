"""Lagrangian lower bound on the seconds of an iteration, from each call's options alone, without joint choices."""

from __future__ import annotations

import numpy as np

from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.timeline.fusion import chunk_shares

_WEIGHTS = np.linspace(0.0, 1.0, 41)
"""Multipliers of rank-seconds against the seconds of a chain. Each gives a valid bound; more give a tighter one."""


def lower_bound(problem: Problem) -> float:
    """Return seconds that no plan of the problem is faster than; 0 if not all options were priced.

    An iteration of T seconds on N ranks has N T rank-seconds for its calls; with contention on a node, N and the ranks
    of a call count by the work that they do. Under every overlap, T is also at least the seconds of each chain of calls
    that depends on a training's new weights. So for any w in [0, 1]

        T >= sum over calls of min over the call's options of  w * ranks * seconds / N + (1 - w) * on * seconds

    where ``on`` is 1 for calls of the chain and 0 for others. The result is the largest bound over w and chains.
    """
    if not problem.is_complete:
        return 0.0
    if problem.overlap == "none":
        return sum(problem.work.least_seconds)
    timed = [i for i in problem.numbers if problem.calls[i].is_timed]
    tables = {i: _seconds_and_shares(problem, i) for i in timed}
    off = {i: _WEIGHTS * shares.min() for i, (_, shares) in tables.items()}
    chains = [cut for chain in _chains(problem) for cut in _cuts(problem, chain)]
    parts = {part for chain in chains for part in chain.items()}
    on = {(i, part): _on_chain(part * tables[i][0], tables[i][1]) for i, part in parts}
    return max(_bound(timed, on, off, chain) for chain in chains)


def _bound(
    timed: list[int], on: dict[tuple[int, float], np.ndarray], off: dict[int, np.ndarray], chain: dict[int, float]
) -> float:
    rows = [on[i, chain[i]] if i in chain else off[i] for i in timed]
    return float(np.sum(rows, axis=0).max())


def _cuts(problem: Problem, chain: frozenset[int]) -> list[dict[int, float]]:
    """Return the sequential parts of a chain, each as call -> fraction of its seconds.

    The last chunk of an early inference call comes after the whole generation, and the whole inference call comes after
    the generation's first chunk.
    """
    whole = dict.fromkeys(chain, 1.0)
    sources, num_chunks = problem.schedule_builder.early, problem.schedule_builder.num_chunks
    early = [i for i in chain if sources.get(i) in chain]
    if not early:
        return [whole]
    last_chunk = whole | dict.fromkeys(early, 1 / num_chunks)
    return [last_chunk, whole | {sources[i]: chunk_shares(num_chunks)[0] for i in early}]


def _seconds_and_shares(problem: Problem, i: int) -> tuple[np.ndarray, np.ndarray]:
    options = [option for options in problem.tables[i].values() for option in options]
    seconds = np.array([option.seconds for option in options])
    return seconds, np.array([problem.work.of_option(option) for option in options]) / problem.work.capacity


def _on_chain(seconds: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return np.array([(weight * shares + (1 - weight) * seconds).min() for weight in _WEIGHTS])


def _chains(problem: Problem) -> list[frozenset[int]]:
    """Return the sets of calls that run one after the other in every iteration.

    If iterations overlap, a chain must start with a call of the role whose training ends it. That call waits for the
    weights of the previous iteration, which closes a cycle of one iteration.
    """
    found = []
    for end in problem.calls:
        if end.is_timed:
            for chain in _chains_to(problem, end.number):
                if problem.overlap == "calls":
                    found.append(frozenset(chain))
                elif end.is_trained and end.is_home:
                    first = next(index for index, i in enumerate(chain) if problem.calls[i].role == end.role)
                    found.append(frozenset(chain[first:]))
    return found or [frozenset()]


def _chains_to(problem: Problem, end: int) -> list[list[int]]:
    """Return every chain of calls that ends with ``end``, in which each call needs products of the previous one."""
    makers = [task // 2 for task in problem.schedule_builder.needs[2 * end + 1] if task != 2 * end]
    if not makers:
        return [[end]]
    return [[*chain, end] for maker in makers for chain in _chains_to(problem, maker)]
