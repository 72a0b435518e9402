"""How fast can no plan be? A bound on an iteration's seconds that needs every call's options, but no joint choices."""

from __future__ import annotations

import numpy as np

from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.timeline.fusion import portion_shares

_WEIGHTS = np.linspace(0.0, 1.0, 41)
"""Shares of the bound that rank-seconds have, against the seconds of a chain; each gives a valid bound."""


def lower_bound(problem: Problem) -> float:
    """Return seconds that no plan of the problem's space is faster than; 0 where not all options were priced.

    An iteration of T seconds on N ranks has N T rank-seconds for its calls (less where ranks of a node are in each
    other's way: then N and the ranks of a call are what gets done), and under every overlap T seconds for each
    chain of calls that closes over a training's new weights. So for any w in [0, 1]

        T >= sum over calls of the least, over the call's options, of  w * ranks * seconds / N + (1 - w) * on * seconds

    where ``on`` is 1 for calls of the chain and 0 for others: a Lagrangian bound, taken at its best w and chain.
    """
    if not problem.is_complete:
        return 0.0
    if problem.overlap == "none":
        return sum(problem.least_seconds)
    timed = [i for i in problem.numbers if problem.timed[i]]
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
    """Return what parts of a chain's calls follow each other whoever overlaps: call -> the share of its seconds.

    Inference that begins with the first samples has its last portion behind the whole generation, and all of itself
    behind the first portion of that.
    """
    whole = dict.fromkeys(chain, 1.0)
    sources = {} if problem.portions is None else problem.portions.sources
    early = [i for i in chain if sources.get(i) in chain]
    if problem.portions is None or not early:
        return [whole]
    num_parts = problem.portions.num_parts
    behind = whole | dict.fromkeys(early, 1 / num_parts)
    return [behind, whole | {sources[i]: portion_shares(num_parts)[0] for i in early}]


def _seconds_and_shares(problem: Problem, i: int) -> tuple[np.ndarray, np.ndarray]:
    options = [option for options in problem.tables[i].values() for option in options]
    seconds = np.array([option.seconds for option in options])
    return seconds, np.array([problem.work_of(option) for option in options]) / problem.capacity


def _on_chain(seconds: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return np.array([(weight * shares + (1 - weight) * seconds).min() for weight in _WEIGHTS])


def _chains(problem: Problem) -> list[frozenset[int]]:
    """Return the sets of calls that follow each other within every iteration.

    Under overlapping iterations a chain must begin with a call of the role whose training ends it: that call waits for
    the weights of the iteration before, which closes a cycle of one iteration.
    """
    found = []
    for end in problem.numbers:
        if problem.timed[end]:
            for chain in problem.chains_to(end):
                role = problem.calls[end].role
                closes = problem.trained[end] and problem.home[end] == end
                if problem.overlap == "calls":
                    found.append(frozenset(chain))
                elif closes:
                    begins = [at for at, i in enumerate(chain) if problem.calls[i].role == role]
                    found.append(frozenset(chain[begins[0] :]))
    return found or [frozenset()]
