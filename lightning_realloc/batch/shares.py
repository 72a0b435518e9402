"""Which data-parallel rank takes which samples. Pure: lengths in, positions out, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_realloc.errors import PlanError


def balanced_shares(
    lengths: Sequence[int], num_shares: int, *, groups: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return for every share the positions it takes, ascending, so that the summed lengths are close to equal.

    Positions with the same entry in ``groups`` stay together. No share is empty while another could give one
    of its groups away: with at least as many groups as shares, every share gets something.

    The longest group goes first, each to the share that has least so far: at most 4/3 - 1/(3 shares) of the best
    possible maximum. Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969).
    """
    if num_shares < 1:
        raise PlanError(f"samples are shared out among 1 or more ranks; got num_shares={num_shares}")
    if groups is not None and len(groups) != len(lengths):
        raise PlanError(f"groups must name one group per length; got {len(groups)} groups for {len(lengths)} lengths")
    members: dict[int, list[int]] = {}
    for position in range(len(lengths)):
        members.setdefault(position if groups is None else groups[position], []).append(position)
    weight = {group: sum(lengths[position] for position in rows) for group, rows in members.items()}
    # The number of positions breaks ties, so that empty sequences spread too and no share stays empty.
    shares = [(0, 0, share) for share in range(num_shares)]
    taken: list[list[int]] = [[] for _ in range(num_shares)]
    for group in sorted(members, key=lambda name: (-weight[name], members[name][0])):
        total, count, share = heapq.heappop(shares)
        taken[share].extend(members[group])
        heapq.heappush(shares, (total + weight[group], count + len(members[group]), share))
    return tuple(tuple(sorted(rows)) for rows in taken)
