"""Work out which rank works on which samples in every call, and which rank needs whose results. Pure.

Lengths are known on every rank, so every rank works this out by itself and gets the same answer. Calls may be fused
with generation (RLHFuse, arXiv:2409.13221): they start on chunks of samples while others are still generated. A chunk
is the samples that one generating rank sends at once. Its lengths alone decide which rank works on which part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from lightning_realloc.batch.shares import (
    Integers,
    MicroBatchPlan,
    SharedWork,
    micro_batch_plan,
    share_of_each,
    share_within_teams,
)
from lightning_realloc.batch.training import TrainOptions, TrainStep, train_steps
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies.exchange.sample_table import Holders, SampleTable
from lightning_realloc.tuning.timeline.fusion import fused_first, fused_groups, fused_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlacement:
    """Where a call with a model runs, and how it divides its samples."""

    layout: Layout
    """Layout of the call's model."""
    micro_batch_tokens: int
    """Most tokens of one forward pass."""
    train_options: TrainOptions
    """Options of a training call; other calls ignore them."""
    order_seeds: Sequence[int] = ()
    """One seed per epoch of a training call, for the order of its mini-batches."""

    @property
    def holders(self) -> Mapping[int, tuple[int, ...]]:
        """Data-parallel share -> the ranks that hold its results, those of the last stage. The first sends them."""
        return _last_ranks(self.layout)

    @property
    def senders(self) -> tuple[int, ...]:
        """The rank that sends a call's results, for each data-parallel share."""
        return tuple(ranks[0] for ranks in self.holders.values())


@lru_cache(maxsize=256)
def _last_ranks(layout: Layout) -> Mapping[int, tuple[int, ...]]:
    """Return for each data-parallel share the ranks of the last stage that work on it."""
    last = {ranks[-1] for ranks in layout.groups(*layout.stage_axes)}
    shares = zip(*(ranks for ranks in layout.groups(*layout.batch_axes) if ranks[0] in last), strict=True)
    return MappingProxyType(dict(enumerate(shares)))


@lru_cache(maxsize=256)
def _ranks_of_shares(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return for each data-parallel share all ranks that work on it."""
    found: list[list[int]] = [[] for _ in range(layout.data_parallel_size)]
    for rank in layout.ranks:
        found[layout.data_parallel_index(rank)].append(rank)
    return tuple(map(tuple, found))


@dataclass(frozen=True, slots=True)
class Fusion:
    """The calls of one iteration that start before a generating call has finished."""

    calls: tuple[ModelFunctionCall, ...]
    """All calls in running order: a fused call comes before computations that wait for all samples."""
    placements: Mapping[str, CallPlacement]
    """Call -> its placement, for calls with a model."""
    num_chunks: int
    """Chunks in which a generating rank sends its samples, where a fused call waits for them."""
    sources: Mapping[str, str]
    """Fused call on other ranks -> the generating call whose chunks it works on."""

    @classmethod
    def from_calls(
        cls, calls: Sequence[ModelFunctionCall], placements: Mapping[str, CallPlacement], num_chunks: int
    ) -> Fusion:
        """Find the calls that can be fused; there are none with ``num_chunks=1``."""
        if num_chunks == 1:
            return cls(tuple(calls), placements, num_chunks, {})
        sources = fused_sources(calls, {name: place.layout.ranks for name, place in placements.items()})
        return cls(fused_first(calls, sources), placements, num_chunks, sources)

    def num_chunks_of(self, source: ModelFunctionCall) -> int:
        """Return how many chunks each rank of a generating call sends, empty ones included."""
        return self.num_chunks if source.name in self.sources.values() else 1

    def source(self, call: ModelFunctionCall) -> ModelFunctionCall:
        """Return the generating call whose chunks a fused call works on."""
        return next(source for source in self.calls if source.name == self.sources[call.name])

    def users(self, source: ModelFunctionCall, rank: int) -> list[ModelFunctionCall]:
        """Return the fused calls of a generating call in which ``rank`` takes part."""
        return [
            call
            for call in self.calls
            if self.sources.get(call.name) == source.name and rank in self.placements[call.name].layout
        ]

    def chunk_shares(self, call: ModelFunctionCall, lengths: Integers) -> MicroBatchPlan:
        """Return the micro-batches of a chunk for each data-parallel rank of ``call``; a rank may have none.

        Positions count from the chunk's first sample. Repetitions that keep collective passes in step stay within it.

        Args:
            call: The fused call.
            lengths: Tokens of each sample in the chunk.
        """
        place = self.placements[call.name]
        in_step, num_shares = place.layout.runs_in_lockstep, place.layout.data_parallel_size
        limit = place.micro_batch_tokens
        plan = micro_batch_plan(lengths, num_shares, max_tokens=limit, equal_counts=in_step, call=call.name)
        return plan if in_step else plan.without_fillers()

    def chunk_positions(self, source: ModelFunctionCall, rank: int, lengths: Integers) -> Integers:
        """Return the positions of a chunk that ``rank`` works on in any fused call, ascending."""
        found = [np.zeros(0, dtype=np.int64)]
        for call in self.users(source, rank):
            index = self.placements[call.name].layout.data_parallel_index(rank)
            found.append(SharedWork.of(*self.chunk_shares(call, lengths).work()).by(index))
        return np.unique(np.concatenate(found))

    def groups(
        self, calls: Sequence[ModelFunctionCall], *, alone: Collection[str] = ()
    ) -> list[tuple[ModelFunctionCall, ...]]:
        """Return ``calls`` in groups that run together; see `fused_groups`."""
        return fused_groups(calls, self.sources, alone=alone)


@dataclass(slots=True)
class Routes:
    """Shares of all calls of one iteration, computed on first use."""

    calls: Sequence[ModelFunctionCall]
    """Calls in running order; fused ones may run earlier than they were given."""
    placements: Mapping[str, CallPlacement]
    """Call -> its placement, for calls with a model."""
    world_size: int
    """All ranks."""
    num_chunks: int = 1
    """Chunks in which samples are sent to calls on other ranks while they are generated."""
    group_size: int = 1
    """Neighbours that stay together in training, in computations and, if they came together, in inference."""
    generates_ahead: bool = False
    """Whether a batch is inferred and trained on one iteration after it was generated."""
    fusion: Fusion = field(init=False)
    """The calls that start before all samples are generated."""
    owners: Mapping[str, ModelFunctionCall | None] = field(init=False)
    """Call -> the generating call whose samples it works on; None for the loader's batch."""
    _work: dict[str, SharedWork] = field(init=False, default_factory=dict)
    _infers: dict[str, MicroBatchPlan] = field(init=False, default_factory=dict)
    _trains: dict[str, tuple[TrainStep, ...]] = field(init=False, default_factory=dict)
    _holders: dict[str, Holders] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.fusion = Fusion.from_calls(self.calls, self.placements, self.num_chunks)
        self.calls = self.fusion.calls
        self.owners = {call.name: table_owner(call, self.calls) for call in self.calls}

    # ---- when
    def calls_at_once(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls that run in the same iteration as their batch is loaded.

        If generation runs ahead, these are the generating calls and computations that generating ranks make of their
        own samples alone. Run later, such a computation would wait for the next generation, and everyone for it.
        """
        if not self.generates_ahead:
            return tuple(self.calls)
        at_once: list[ModelFunctionCall] = []
        made_later: set[str] = set()
        for call in self.calls:
            is_local = call.kind == "compute" and not call.whole_batch and made_later.isdisjoint(call.needs)
            if call.kind == "generate" or is_local:
                at_once.append(call)
            else:
                made_later.update(call.produces)
        return tuple(at_once)

    def calls_later(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls that run one iteration after their batch was loaded."""
        at_once = self.calls_at_once()
        return tuple(call for call in self.calls if call not in at_once)

    # ---- who works on which samples
    def positions(self, call: ModelFunctionCall, rank: int, table: SampleTable) -> Integers:
        """Return the positions of ``table`` that ``rank`` works on in ``call``, ascending."""
        if call.kind == "compute":
            return self.work(call, table).by(rank)
        layout = self.placements[call.name].layout
        return self.work(call, table).by(layout.data_parallel_index(rank) if rank in layout else -1)

    def work(self, call: ModelFunctionCall, table: SampleTable) -> SharedWork:
        """Return which data-parallel shares of a call, or which ranks of a computation, work on which positions."""
        if call.name not in self._work:
            self._work[call.name] = self._find_work(call, table)
        return self._work[call.name]

    def _find_work(self, call: ModelFunctionCall, table: SampleTable) -> SharedWork:
        if call.kind == "compute":
            return SharedWork.of(self._computing_rank(call, table), np.arange(len(table)))
        if call.kind == "generate":
            num_shares = self.placements[call.name].layout.data_parallel_size
            return SharedWork.of(share_of_each(table.lengths, num_shares), np.arange(len(table)))
        if call.kind == "infer":
            return SharedWork.of(*self.micro_batches(call, table).work())
        steps = [step.shares.work() for step in self.train_steps(call, table)]
        shares, positions = (np.concatenate(columns) for columns in zip(*steps, strict=True))
        return SharedWork.of(shares, positions)

    def micro_batches(self, call: ModelFunctionCall, table: SampleTable) -> MicroBatchPlan:
        """Return the forward passes of an inference call by data-parallel rank; a fused call goes chunk by chunk."""
        if call.name not in self._infers:
            if call.name in self.fusion.sources:
                plan = self._plan_by_chunk(call, table)
            else:
                place = self.placements[call.name]
                plan = micro_batch_plan(
                    table.lengths, place.layout.data_parallel_size, max_tokens=place.micro_batch_tokens,
                    equal_counts=place.layout.runs_in_lockstep, group_size=self.group_size, call=call.name,
                )  # fmt: skip
            self._infers[call.name] = plan
        return self._infers[call.name]

    def _plan_by_chunk(self, call: ModelFunctionCall, table: SampleTable) -> MicroBatchPlan:
        lengths = table.lengths
        plans = [self.fusion.chunk_shares(call, lengths[chunk]).reindexed(chunk) for chunk in table.chunks]
        return MicroBatchPlan.joined(plans)

    def train_steps(self, call: ModelFunctionCall, table: SampleTable) -> tuple[TrainStep, ...]:
        """Return the optimizer steps of a training call."""
        if call.name not in self._trains:
            place, positions, lengths = self.placements[call.name], table.trained_positions, table.lengths
            steps = train_steps(
                lengths[positions], place.train_options, place.layout.data_parallel_size,
                max_tokens=place.micro_batch_tokens, equal_counts=place.layout.runs_in_lockstep,
                order_seeds=place.order_seeds, group_size=self.group_size, call=call.name,
            )  # fmt: skip
            self._trains[call.name] = tuple(step.reindexed(positions) for step in steps)
        return self._trains[call.name]

    def _computing_rank(self, call: ModelFunctionCall, table: SampleTable) -> Integers:
        """Return the rank that computes each position, (N,).

        Samples of a prompt stay together, on ranks that hold them already. A computation that runs one iteration later
        is made by the ranks of the call that uses it, and one over the whole batch by the first of these.
        """
        ranks = self.computing_ranks(call)
        if call.whole_batch:
            return np.full(len(table), ranks[0])
        holders = None if call in self.calls_later() else table.holders
        if holders is None:
            holders = Holders(np.zeros(len(table), dtype=np.int64), {0: ranks})
        found = np.full(len(table), -1)
        rows = np.flatnonzero(holders.shares >= 0)
        teams = [holders.ranks.get(share, ()) for share in range(max(holders.ranks) + 1)]
        team_of, groups = holders.shares[rows], table.groups(self.group_size)[rows]
        places = share_within_teams(team_of, list(map(len, teams)), groups=groups)
        starts = np.cumsum([0, *map(len, teams)])
        found[rows] = np.concatenate(teams)[starts[team_of] + places]
        return found

    def computing_ranks(self, call: ModelFunctionCall) -> tuple[int, ...]:
        """Return the ranks that may take part in a computation, for any samples."""
        if call.whole_batch:
            return self._ranks_of_user(call)[:1]
        if call in self.calls_later():
            return self._ranks_of_user(call)
        owner = self.owners[call.name]
        return tuple(range(self.world_size)) if owner is None else self.placements[owner.name].layout.ranks

    def _ranks_of_user(self, call: ModelFunctionCall) -> tuple[int, ...]:
        """Return the ranks of the first call with a model that needs a result of ``call``; rank 0 without one."""
        for user in self.users(call):
            if user.name in self.placements:
                return self.placements[user.name].layout.ranks
        return (0,)

    # ---- who needs which results
    def producer(self, name: str) -> ModelFunctionCall | None:
        """Return the call that produces ``name``; None for the loader."""
        return next((call for call in self.calls if name in call.produces), None)

    def users(self, producer: ModelFunctionCall) -> list[ModelFunctionCall]:
        """Return the calls of this iteration that need a result of ``producer``."""
        return [user for user in self.calls if not set(user.needs).isdisjoint(producer.produces)]

    def needs(self, call: ModelFunctionCall, rank: int) -> tuple[str, ...]:
        """Return the names that ``rank`` needs for ``call``: pipeline stages before the last run on tokens alone."""
        if call.role is None:
            return call.needs
        layout = self.placements[call.name].layout
        if rank not in layout or layout.coordinate(rank).pp == layout.dims.pp - 1:
            return call.needs
        owner = self.owners[call.name]
        return tuple(name for name in call.needs if owner is None or name in owner.produces)

    def products(self, producer: ModelFunctionCall, receiver: int, table: SampleTable) -> frozenset[str]:
        """Return the products of ``producer`` that ``receiver`` needs in later calls.

        All rows of a call on a rank have equal columns, from every sender and in chunks or not.
        """
        if self.fusion.users(producer, receiver):
            return frozenset(producer.produces)
        users = (user for user in self.users(producer) if len(self.positions(user, receiver, table)))
        return frozenset(name for user in users for name in self.needs(user, receiver)).intersection(producer.produces)

    def outgoing(self, producer: ModelFunctionCall, sender: int, table: SampleTable) -> Mapping[int, Integers]:
        """Return rank -> positions whose results ``sender`` sends it, ascending.

        Senders and receivers read the same plan, so neither waits for a message that the other does not know of.
        """
        holders = self.holders(producer, table)
        mine = holders.senders == sender
        held_by = {rank for ranks in holders.ranks.values() if ranks[:1] == (sender,) for rank in ranks}
        wanted: dict[int, list[Integers]] = {}
        for user in self.users(producer):
            teams = None if user.kind == "compute" else _ranks_of_shares(self.placements[user.name].layout)
            for share, positions in self.work(user, table).within(mine):
                for rank in (share,) if teams is None else teams[share]:
                    if rank not in held_by and not set(self.needs(user, rank)).isdisjoint(producer.produces):
                        wanted.setdefault(rank, []).append(positions)
        sent = {rank: np.unique(np.concatenate(parts)) for rank, parts in wanted.items()}
        rest = {rank: rows[~np.isin(rows, self._in_chunks(producer, rank, table))] for rank, rows in sent.items()}
        return {rank: rows for rank, rows in sorted(rest.items()) if len(rows)}

    def senders(self, producer: ModelFunctionCall, receiver: int, table: SampleTable) -> list[int]:
        """Return the ranks that send results of ``producer`` to ``receiver``: those to whose `outgoing` it belongs."""
        needed = [
            self.positions(user, receiver, table)
            for user in self.users(producer)
            if not set(self.needs(user, receiver)).isdisjoint(producer.produces)
        ]
        is_sent = np.zeros(len(table), dtype=bool)
        for positions in needed:
            is_sent[positions] = True
        is_sent[self._in_chunks(producer, receiver, table)] = False
        holders = self.holders(producer, table)
        found: list[int] = np.unique(holders.senders[is_sent & ~holders.held_by(receiver)]).tolist()
        return found

    def _in_chunks(self, producer: ModelFunctionCall, receiver: int, table: SampleTable) -> Integers:
        """Return the positions whose results ``receiver`` gets in chunks."""
        users = self.fusion.users(producer, receiver)
        parts = [self.positions(user, receiver, table) for user in users]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def holders(self, producer: ModelFunctionCall, table: SampleTable) -> Holders:
        """Return for each position the ranks that hold the results of ``producer``."""
        if producer.kind == "generate":
            assert table.holders is not None, "a generated table names its holders"
            return table.holders
        if producer.name not in self._holders:
            self._holders[producer.name] = self._find_holders(producer, table)
        return self._holders[producer.name]

    def _find_holders(self, producer: ModelFunctionCall, table: SampleTable) -> Holders:
        held = np.full(len(table), -1)
        if producer.kind == "compute":
            work = self.work(producer, table)
            held[work.positions] = work.shares
            return Holders(held, {rank: (rank,) for rank in np.unique(work.shares).tolist()})
        shares, positions = self.micro_batches(producer, table).work(counted=True)
        held[positions] = shares
        return Holders(held, self.placements[producer.name].holders)


def table_owner(call: ModelFunctionCall, calls: Sequence[ModelFunctionCall]) -> ModelFunctionCall | None:
    """Return the generating call whose samples ``call`` works on; None for the loader's batch.

    Raises:
        PlanError: for a call that needs results on two sets of samples.
    """
    producers = {name: producer for producer in calls for name in producer.produces}
    found: dict[str, ModelFunctionCall] = {}
    for name in call.needs:
        producer = producers.get(name)
        if producer is None:
            continue
        owner = producer if producer.kind == "generate" else table_owner(producer, calls)
        if owner is not None:
            found[owner.name] = owner
    if len(found) > 1:
        raise PlanError(
            f"call {call.name!r} needs what was made of two sets of samples, by {' and '.join(found)}; "
            f"let each call work on the samples of one"
        )
    return next(iter(found.values()), None)
