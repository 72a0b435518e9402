"""Plan the transfers that bring a model from one layout to another.

Pure: both layouts are arguments, and every rank that plans gets the same result. The planner follows three rules. A
rank receives only the elements that it needs and does not hold. A box enters a node once and is sent on inside it.
Among equally near holders, the least loaded one sends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_realloc.errors import PlanError
from lightning_realloc.layout import ClusterSpec, ModelLayout
from lightning_realloc.realloc.families import Cell, Family, match_families
from lightning_realloc.realloc.plan import ReallocationPlan, Route, RoutedFamily, list_transfers

PLANNER_VERSION = 1
"""Part of every digest. Raise it whenever the same inputs would give other transfers."""

MAX_CHOICES = 200_000
"""Most sender choices compared for one family. Raising it spreads sends over more replicas and takes more time."""


def plan_reallocation(
    source: ModelLayout,
    target: ModelLayout,
    cluster: ClusterSpec | None = None,
    *,
    element_bytes: int = 2,
    rank: int | None = None,
) -> ReallocationPlan:
    """Plan the reallocation from ``source`` to ``target``.

    Without ``cluster`` all ranks count as one node. With ``rank`` only the transfers of that rank are listed: the
    same as filtering the whole plan, at a fraction of the cost. Raises PlanError when the models differ or a rank
    lies outside the cluster.

    >>> from lightning_realloc import Layout, ModelSpec
    >>> from lightning_realloc.layout import ParamSpec
    >>> model = ModelSpec((ParamSpec("weight", (8, 4), block=0),), num_blocks=1)
    >>> source, target = (ModelLayout(model, Layout.parse(text)) for text in ("fsdp2", "dp2"))
    >>> plan_reallocation(source, target, element_bytes=2).bytes_moved
    64
    """
    nodes = locate_ranks(source, target, cluster)
    check_element_bytes(element_bytes)
    node_of = dict(nodes)
    families = match_families(source, target)
    demands = [tuple(_demands(family, node_of)) for family in families]
    routed = _route(families, demands)
    counted = [(demand, len(f.names)) for f, wanted in zip(families, demands, strict=True) for demand in wanted]
    return ReallocationPlan(
        source=source,
        target=target,
        element_bytes=element_bytes,
        rank=rank,
        transfers=list_transfers(routed, rank),
        digest=_digest(source, target, nodes, element_bytes),
        bytes_minimum=element_bytes * sum(d.cell.numel * len(d.missing) * count for d, count in counted),
        inter_node_bytes_minimum=element_bytes * sum(d.cell.numel * count for d, count in counted if d.is_remote),
        nodes=nodes,
        families=routed,
    )


def locate_ranks(source: ModelLayout, target: ModelLayout, cluster: ClusterSpec | None) -> tuple[tuple[int, int], ...]:
    """Return (rank, node) of every rank of both layouts, ascending. Raises PlanError for ranks outside the cluster."""
    ranks = sorted({*source.layout.ranks, *target.layout.ranks})
    if cluster is None:
        return tuple((rank, 0) for rank in ranks)
    if ranks[-1] >= cluster.num_devices:
        raise PlanError(
            f"rank {ranks[-1]} of {source.layout} -> {target.layout} is outside a cluster of "
            f"{cluster.num_nodes}x{cluster.devices_per_node} devices; use fewer ranks or describe more nodes"
        )
    return tuple((rank, cluster.node_of(rank)) for rank in ranks)


def check_element_bytes(element_bytes: int) -> None:
    """Raise PlanError unless an element has at least one byte."""
    if element_bytes < 1:
        raise PlanError(
            f"element_bytes={element_bytes} must be at least 1; give the item size of the dtype that is sent"
        )


def _digest(source: ModelLayout, target: ModelLayout, nodes: tuple[tuple[int, int], ...], element_bytes: int) -> str:
    """Return the SHA-256 of everything that the transfers depend on; the order of parameters does not count."""
    digest = hashlib.sha256(repr((PLANNER_VERSION, element_bytes, nodes)).encode())
    for side in (source, target):
        model = side.model
        digest.update(f"|{side.layout}|{model.num_blocks}|{model.costs}|{model.first_blocks}|".encode())
        for param in sorted(side.model.params, key=lambda param: param.name):
            digest.update(repr(param).encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Demand:
    """The ranks of one node that need a cell and do not hold it."""

    cell: Cell
    missing: tuple[int, ...]
    candidates: tuple[int, ...]
    """Nearest holders: those on the node, or all of them when the node has none."""
    is_remote: bool
    """Whether the candidates are on other nodes. Then one of ``missing`` receives the cell and sends it on."""


def _demands(family: Family, node_of: Mapping[int, int]) -> Iterator[_Demand]:
    for cell in family.cells:
        lacking: dict[int, list[int]] = {}
        for receiver in cell.receivers:
            if receiver not in cell.holders:
                lacking.setdefault(node_of[receiver], []).append(receiver)
        for node, missing in sorted(lacking.items()):
            near = tuple(holder for holder in cell.holders if node_of[holder] == node)
            yield _Demand(cell, tuple(missing), near or cell.holders, not near)


def _route(families: tuple[Family, ...], demands: list[tuple[_Demand, ...]]) -> tuple[RoutedFamily, ...]:
    """Choose senders family by family, with one load for all; sends without an alternative count from the start."""
    load = _Load()
    for family, wanted in zip(families, demands, strict=True):
        for demand in wanted:
            load.count_forced(demand, len(family.names))
    routed = []
    for family, wanted in zip(families, demands, strict=True):
        num_variants = _num_variants(wanted, len(family.names))
        variants = []
        for index in range(num_variants):
            weight = len(range(index, len(family.names), num_variants))
            variants.append(tuple(route for demand in wanted for route in load.serve(demand, weight)))
        routed.append(RoutedFamily(family.names, tuple(_kept(family)), tuple(variants)))
    return tuple(routed)


def _num_variants(demands: tuple[_Demand, ...], num_params: int) -> int:
    """Return enough variants for every replica to take a turn, within ``MAX_CHOICES``."""
    useful = max((max(len(demand.candidates), len(demand.missing) * demand.is_remote) for demand in demands), default=1)
    affordable = MAX_CHOICES // max(1, sum(len(demand.missing) * len(demand.candidates) for demand in demands))
    return max(1, min(useful, affordable, num_params))


def _kept(family: Family) -> Iterator[Route]:
    for cell in family.cells:
        for rank in cell.receivers:
            if rank in cell.holders:
                yield Route(cell.shape, rank, rank, cell.source_offset, cell.target_offset, 0)


class _Load:
    """Elements that every rank sends, and receives from other nodes, according to the choices so far."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def count_forced(self, demand: _Demand, weight: int) -> None:
        """Count the elements that a sole candidate must send."""
        if len(demand.candidates) == 1:
            copies = 1 if demand.is_remote else len(demand.missing)
            self.sent[demand.candidates[0]] += demand.cell.numel * copies * weight

    def serve(self, demand: _Demand, weight: int) -> Iterator[Route]:
        """Yield the routes that bring a cell to a node's ranks, for ``weight`` parameters."""
        cell, amount = demand.cell, demand.cell.numel * weight
        if not demand.is_remote:
            for receiver in demand.missing:
                yield self._from_source(cell, self._pick(demand.candidates, receiver, amount), receiver)
            return
        first = min(demand.missing, key=lambda rank: (self.received[rank], rank))
        self.received[first] += amount
        yield self._from_source(cell, self._pick(demand.candidates, first, amount), first)
        for receiver in demand.missing:
            if receiver != first:
                self.sent[first] += amount
                yield Route(cell.shape, first, receiver, cell.target_offset, cell.target_offset, 1)

    def _pick(self, candidates: tuple[int, ...], receiver: int, amount: int) -> int:
        """Return the least loaded candidate; on a tie the next one after the receiver, to spread the load."""
        if len(candidates) == 1:
            return candidates[0]
        sender = min(candidates, key=lambda rank: (self.sent[rank], rank < receiver, rank))
        self.sent[sender] += amount
        return sender

    @staticmethod
    def _from_source(cell: Cell, sender: int, receiver: int) -> Route:
        return Route(cell.shape, sender, receiver, cell.source_offset, cell.target_offset, 0)
