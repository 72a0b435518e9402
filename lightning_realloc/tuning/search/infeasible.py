"""Error for a search without a plan that fits into memory, with the missing bytes, and a sufficient number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.tuning.search.options import Pricing, SearchedCall, further_bytes, searched_calls
from lightning_realloc.tuning.search.problem import Problem, Score
from lightning_realloc.tuning.search.space import call_dims

MAX_NODES = 512
"""Largest number of nodes that `enough_nodes` tries; beyond, pricing a layout takes seconds."""
NODES_STEP = 16
"""Tried numbers of nodes differ by one in this many; more of them name a closer number."""


class NothingFitsError(PlanError):
    """No plan of the space fits into memory.

    Args:
        way_out: What would fit, or the whole message.
        shortage: The missing bytes, which the message begins with.
    """

    def __init__(self, way_out: str, *, shortage: str = "") -> None:
        super().__init__("; ".join(filter(None, (shortage, way_out))))
        self.way_out, self.shortage = way_out, shortage

    def with_closest(self, closest: str) -> NothingFitsError:
        """Return the error with a sentence about the plan that came closest."""
        shortage = f"{self.shortage}; {closest}" if self.shortage else closest
        return NothingFitsError(self.way_out, shortage=shortage)


def nothing_fits(problem: Problem, best: Score | None) -> NothingFitsError:
    """Return the error for a problem.

    Args:
        best: Score of the plan that needs the fewest bytes; None if a call has no option.
    """
    cluster, budget = problem.cluster, problem.budget
    if best is not None and best.idle_ranks and not best.excess_bytes:
        return NothingFitsError(
            f"no plan uses all of {cluster.num_nodes} x {cluster.devices_per_node} devices: the best one leaves "
            f"{best.idle_ranks} without a call; use fewer devices"
        )
    if best is None:
        lack = _lack_of_options(problem)
    else:
        lack = f"the fullest rank of the best one lacks {_bytes(best.excess_bytes)}"
    here = f"{cluster.num_nodes} x {cluster.devices_per_node} devices with {_bytes(budget)} each for a plan"
    return NothingFitsError(
        "use more such devices, devices with that much more memory, or smaller micro-batches",
        shortage=f"no plan fits on {here}: {lack}",
    )


def enough_nodes(pricing: Pricing, is_over: Callable[[], bool]) -> int | None:
    """Return about the smallest larger number of nodes on which all calls fit, each in a layout of its own.

    Args:
        is_over: Called before each number of nodes is tried; True ends the search.

    Returns:
        None if no number that was tried suffices.
    """
    few, many = pricing.estimator.cluster.num_nodes, pricing.estimator.cluster.num_nodes + 1
    while many <= MAX_NODES and not is_over():
        if _fits(pricing, many):
            break
        few, many = many, 2 * many
    else:
        return None
    while many - few > max(1, many // NODES_STEP) and not is_over():
        middle = (few + many) // 2
        few, many = (few, middle) if _fits(pricing, middle) else (middle, many)
    return many


class _Need(NamedTuple):
    """Bytes of a call on the fullest rank."""

    kept: int
    """Bytes that stay between calls."""
    active: int
    """Bytes that the call adds."""
    layout: Layout


def _fits(pricing: Pricing, num_nodes: int) -> bool:
    """Whether all calls fit on all ranks of a number of nodes."""
    ranks = tuple(range(num_nodes * pricing.estimator.cluster.devices_per_node))
    homes: dict[int, Layout] = {}
    kept = active = 0
    for call in sorted(searched_calls(pricing.estimator), key=lambda call: not call.is_home):
        need = _least_need(pricing, call, ranks, homes.get(call.home))
        if need is None:
            return False
        homes.setdefault(call.home, need.layout)
        kept, active = kept + need.kept, max(active, need.active)
    return kept + active <= pricing.memory_budget


def _least_need(pricing: Pricing, call: SearchedCall, ranks: tuple[int, ...], home: Layout | None) -> _Need | None:
    """Return the fewest bytes of a call over its layouts on some ranks; None without a legal layout.

    Args:
        home: Layout of the home of the call's weights, where most calls need no replica; None for the home call.
    """
    estimator = pricing.estimator
    flow, cluster = estimator.dataflow, estimator.cluster
    legal = call_dims(flow.call(call.name), pricing.models, len(ranks), cluster, pricing.options)
    layouts = [Layout(dims, ranks) for dims in _least_replicated(legal)]
    if home is not None and home.dims in legal:
        layouts.append(home)
    needs = (_need(pricing, call, layout, home) for layout in layouts)
    return min(needs, key=lambda need: need.kept + need.active, default=None)


def _least_replicated(legal: Iterable[ParallelDims]) -> Iterable[ParallelDims]:
    """Return the degrees with the fewest replicas of otherwise equal ones, which need the fewest bytes."""
    found = {(dims.pp, dims.cp, dims.tp, dims.ep): dims for dims in sorted(legal, key=lambda dims: dims.fsdp)}
    return found.values()


def _need(pricing: Pricing, call: SearchedCall, layout: Layout, home: Layout | None) -> _Need:
    """Return the bytes of a call in a layout, with its smallest micro-batches or fewest slots."""
    estimator = pricing.estimator
    kept = further_bytes(estimator, call, layout)
    is_copied = call.kind == "generate" and estimator.generates_in_copy(call.owner, layout)
    if layout != home or is_copied:
        kept += estimator.resident_bytes(call.role, layout, is_home=call.is_home)
    smallest = pricing.options.plans(call.kind, layout)[:2]  # with and without checkpointing
    return _Need(kept, min(estimator.active_bytes(call.name, plan) for plan in smallest), layout)


def _lack_of_options(problem: Problem) -> str:
    """Return how many bytes the first call without an option lacks on all ranks."""
    call = next(call for call, table in zip(problem.calls, problem.tables, strict=True) if not table)
    need = _least_need(problem.pricing, call, tuple(range(problem.cluster.num_devices)), None)
    missing = 0 if need is None else need.kept + need.active - problem.budget
    if missing <= 0:
        return f"{call.name} cannot run at all, according to the estimator"
    return f"{call.name} lacks {_bytes(missing)} in every layout"


def _bytes(size: int) -> str:
    return f"{size:,} bytes ({size / 2**30:,.2f} GiB)" if size >= 2**27 else f"{size:,} bytes"
