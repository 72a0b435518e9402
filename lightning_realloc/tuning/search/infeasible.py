"""Error for a search without a plan that fits into memory, with the missing bytes and a sufficient number of nodes."""

from __future__ import annotations

from lightning_realloc.errors import PlanError, ReallocError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.search.options import SearchedCall
from lightning_realloc.tuning.search.problem import Problem, Score
from lightning_realloc.tuning.search.space import legal_dims

MAX_NODES = 512
"""Largest number of nodes that is tried for the error message; beyond, pricing a layout takes seconds."""
NODES_STEP = 16
"""Tried numbers of nodes differ by one in this many; more of them name a closer number."""


class NothingFitsError(PlanError):
    """No plan of the space fits into memory.

    Args:
        way_out: What would fit, or the whole message.
        shortage: The missing bytes, which the message begins with.
        enough_nodes: Number of nodes that suffices with one layout for all calls; None if none is known.
    """

    def __init__(self, way_out: str, *, shortage: str = "", enough_nodes: int | None = None) -> None:
        super().__init__("; ".join(filter(None, (shortage, way_out))))
        self.way_out, self.shortage, self.enough_nodes = way_out, shortage, enough_nodes

    def with_closest(self, closest: str) -> NothingFitsError:
        """Return the error with a sentence about the plan that came closest."""
        shortage = f"{self.shortage}; {closest}" if self.shortage else closest
        return NothingFitsError(self.way_out, shortage=shortage, enough_nodes=self.enough_nodes)


def nothing_fits(problem: Problem, best: Score | None) -> NothingFitsError:
    """Return the error for a problem.

    Args:
        best: Score of the plan that needs the fewest bytes; None if no plan was found.
    """
    cluster, budget = problem.cluster, problem.budget
    need = _least_peak(problem, cluster.num_nodes)
    missing = best.excess_bytes if best is not None else max(0, (need or 0) - budget)
    here = f"{cluster.num_nodes} x {cluster.devices_per_node} devices with {_bytes(budget)} each for a plan"
    nodes = _enough_nodes(problem)
    way_out = "no number of nodes that was tried suffices; use devices with more memory, or smaller micro-batches"
    if nodes is not None:
        way_out = (
            f"{nodes} x {cluster.devices_per_node} such devices would do with one layout for all calls, and fewer "
            f"perhaps with several; or devices with that much more memory"
        )
    if best is not None and best.idle_ranks and not best.excess_bytes:
        return NothingFitsError(
            f"no plan uses all of {cluster.num_nodes} x {cluster.devices_per_node} devices: the best one leaves "
            f"{best.idle_ranks} without a call; use fewer devices"
        )
    lack = f"lacks {_bytes(missing)}" if missing else "cannot run a call at all, according to the estimator"
    shortage = f"no plan fits on {here}: the fullest rank of the best one {lack}"
    return NothingFitsError(way_out, shortage=shortage, enough_nodes=nodes)


def _bytes(size: int) -> str:
    return f"{size:,} bytes ({size / 2**30:,.2f} GiB)" if size >= 2**27 else f"{size:,} bytes"


def _enough_nodes(problem: Problem) -> int | None:
    """Return about the smallest larger number of nodes on which one layout for all calls fits; None if none does."""
    few, many = problem.cluster.num_nodes, problem.cluster.num_nodes + 1
    while not _fits(problem, many):
        few, many = many, 2 * many
        if many > MAX_NODES:
            return None
    while many - few > max(1, many // NODES_STEP):
        middle = (few + many) // 2
        few, many = (few, middle) if _fits(problem, middle) else (middle, many)
    return many


def _fits(problem: Problem, num_nodes: int) -> bool:
    peak = _least_peak(problem, num_nodes)
    return peak is not None and peak <= problem.budget


def _least_peak(problem: Problem, num_nodes: int) -> int | None:
    """Return the least peak bytes of a rank if every call runs on all ranks; None if a role has no legal layout."""
    ranks = tuple(range(num_nodes * problem.cluster.devices_per_node))
    resident, active = 0, 0
    try:
        for role in problem.dataflow.roles:
            calls = [call for call in problem.calls if call.role == role]
            if not calls:  # a further model of another role's call
                continue
            # Degrees that generation allows, all kinds of calls allow.
            strictest = next((call for call in calls if call.kind == "generate"), calls[0])
            least: tuple[int, int] | None = None
            for dims in legal_dims(problem.models[role], strictest.kind, len(ranks), problem.cluster, problem.options):
                layout = Layout(dims, ranks)
                is_owner = problem.estimator.owner(role) == role
                kept = problem.estimator.resident_bytes(role, layout, is_home=True) if is_owner else 0
                if strictest.kind == "generate" and problem.estimator.generates_in_copy(role, layout):
                    kept += problem.estimator.resident_bytes(role, layout, is_home=False)
                added = max(_least_added(problem, call, layout) for call in calls)
                if least is None or kept + added < sum(least):
                    least = (kept, added)
            if least is None:
                return None
            resident, active = resident + least[0], max(active, least[1])
    except ReallocError:
        return None  # an estimator may refuse ranks outside of its cluster
    return resident + active


def _least_added(problem: Problem, call: SearchedCall, layout: Layout) -> int:
    """Return the least bytes that a call adds: those of its smallest micro-batches, with and without checkpointing."""
    smallest = problem.options.plans(call.kind, layout)[:2]
    return min(problem.estimator.active_bytes(call.name, plan) for plan in smallest)
