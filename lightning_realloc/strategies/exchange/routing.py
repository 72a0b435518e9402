"""Which rank works on which samples in every call, and so which rank must hear of what from whom. Pure arithmetic.

Lengths are known everywhere, so every rank answers these questions by itself, and the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_realloc.batch.packing import balanced_shares
from lightning_realloc.batch.training import MicroBatch, TrainStep, micro_batch_plan, train_steps
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.strategies.exchange.call_fusion import Fusion
from lightning_realloc.strategies.exchange.call_placement import CallPlacement
from lightning_realloc.strategies.exchange.sample_table import Holders, SampleTable


@dataclass(slots=True)
class Routes:
    """The shares of all calls of one iteration, worked out when first asked for."""

    calls: Sequence[ModelFunctionCall]
    """In the order in which they run; fused ones may come earlier than they were given."""
    placements: Mapping[str, CallPlacement]
    """Of every call with a model."""
    world_size: int
    """All ranks."""
    num_parts: int = 1
    """In how many portions samples are handed on to calls on other ranks while they are generated."""
    group_size: int = 1
    """How many neighbours stay together in training, in computations and, where they came together, in inference."""
    generates_ahead: bool = False
    """Whether a batch is inferred and trained on an iteration after it was generated."""
    fusion: Fusion = field(init=False)
    """Which calls take samples in so."""
    _shares: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    _infers: dict[str, tuple[tuple[MicroBatch, ...], ...]] = field(default_factory=dict)
    _trains: dict[str, tuple[TrainStep, ...]] = field(default_factory=dict)
    _computes: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    _holders: dict[str, Holders] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fusion = Fusion.of(self.calls, self.placements, self.num_parts)
        self.calls = self.fusion.calls

    def at_once(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls that run in the iteration whose batch it is.

        Where generation runs ahead, these are the generating ones, and computations that generating ranks make of
        nothing but that: left for later, they would stand behind the next generation, and all others wait for them.
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

    def later(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls that run in the iteration behind it."""
        at_once = self.at_once()
        return tuple(call for call in self.calls if call not in at_once)

    # ---- portions
    def prompts(self, call: ModelFunctionCall, table: SampleTable) -> tuple[tuple[int, ...], ...]:
        """Return for every data-parallel rank the positions that it generates for."""
        if call.name not in self._shares:
            layout = self.placements[call.name].layout
            self._shares[call.name] = balanced_shares(table.lengths, layout.data_parallel_size)
        return self._shares[call.name]

    def micro_batches(self, call: ModelFunctionCall, table: SampleTable) -> tuple[tuple[MicroBatch, ...], ...]:
        """Return for every data-parallel rank the forward passes of an inference call, of a fused one unit by unit.

        Those that a rank made while others generated come first; what nobody did is shared out.
        """
        if call.name in self.fusion.sources and call.name not in self._infers:
            self._infers[call.name] = self._unit_micro_batches(call, table)
        if call.name in table.early and call.name not in self._infers:
            self._infers[call.name] = self._early_and_rest(call, table)
        if call.name not in self._infers:
            place = self.placements[call.name]
            self._infers[call.name] = micro_batch_plan(
                table.lengths, place.layout.data_parallel_size, max_tokens=place.micro_batch_tokens,
                equal_counts=place.layout.dims.fsdp > 1, group_size=self.group_size,
            )  # fmt: skip
        return self._infers[call.name]

    def _unit_micro_batches(self, call: ModelFunctionCall, table: SampleTable) -> tuple[tuple[MicroBatch, ...], ...]:
        lengths = table.lengths
        plans: list[list[MicroBatch]] = [[] for _ in range(self.placements[call.name].layout.data_parallel_size)]
        for unit in table.units:
            shares = self.fusion.unit_shares(call, [lengths[position] for position in unit])
            for plan, share in zip(plans, shares, strict=True):
                plan += [MicroBatch(tuple(unit[row] for row in micro.positions), micro.counts) for micro in share]
        return tuple(map(tuple, plans))

    def _early_and_rest(self, call: ModelFunctionCall, table: SampleTable) -> tuple[tuple[MicroBatch, ...], ...]:
        place, early = self.placements[call.name], table.early[call.name]
        num_shares = place.layout.data_parallel_size
        plans: list[list[MicroBatch]] = [[] for _ in range(num_shares)]
        for rank, packs in early.items():
            plans[place.layout.data_parallel_index(rank)] += [MicroBatch(tuple(pack), True) for pack in packs]
        done = {position for packs in early.values() for pack in packs for position in pack}
        rest = [position for position in range(len(table)) if position not in done]
        if rest:
            all_lengths = table.lengths
            lengths = [all_lengths[position] for position in rest]
            shares = micro_batch_plan(lengths, num_shares, max_tokens=place.micro_batch_tokens, equal_counts=False)
            for plan, share in zip(plans, shares, strict=True):
                counted = (micro for micro in share if micro.counts)
                plan += [MicroBatch(tuple(rest[row] for row in micro.positions), True) for micro in counted]
        return tuple(map(tuple, plans))

    def train_steps(self, call: ModelFunctionCall, table: SampleTable) -> tuple[TrainStep, ...]:
        """Return the optimizer steps of a training call."""
        if call.name not in self._trains:
            place, positions, lengths = self.placements[call.name], table.learnt, table.lengths
            steps = train_steps(
                [lengths[position] for position in positions], place.train_options, place.layout.data_parallel_size,
                max_tokens=place.micro_batch_tokens, equal_counts=place.layout.dims.fsdp > 1,
                order_seeds=place.order_seeds, group_size=self.group_size,
            )  # fmt: skip
            self._trains[call.name] = tuple(step.reindexed(positions) for step in steps)
        return self._trains[call.name]

    def computed(
        self, call: ModelFunctionCall, table: SampleTable, made: Holders | None
    ) -> Mapping[int, Sequence[int]]:
        """Return rank -> the positions that it computes; ``made`` tells who holds the samples, None: everybody.

        Whole prompts stay together, and on ranks that hold them already; later than the iteration in which they were
        generated, on those of the call that uses it. What needs the whole batch is computed on the first one of these.
        """
        if call.name not in self._computes:
            self._computes[call.name] = self._compute_shares(call, table, made)
        return self._computes[call.name]

    def _compute_shares(
        self, call: ModelFunctionCall, table: SampleTable, made: Holders | None
    ) -> dict[int, tuple[int, ...]]:
        ranks = self.computing_ranks(call)
        if call.whole_batch:
            return {ranks[0]: tuple(range(len(table)))}
        teams: dict[tuple[int, ...], list[int]] = {}
        holders = None if call in self.later() else made
        for position in range(len(table)):
            teams.setdefault(ranks if holders is None else holders[position], []).append(position)
        shares: dict[int, tuple[int, ...]] = {}
        group_of = table.groups(self.group_size)
        for team, positions in teams.items():
            groups = [group_of[position] for position in positions]
            for rank, rows in zip(team, balanced_shares([1] * len(positions), len(team), groups=groups), strict=True):
                shares[rank] = tuple(positions[row] for row in rows)
        return shares

    def computing_ranks(self, call: ModelFunctionCall) -> tuple[int, ...]:
        """Return the ranks that may take part in a computation, whatever samples there are."""
        if call.whole_batch:
            return self._ranks_of_user(call)[:1]
        if call in self.later():
            return self._ranks_of_user(call)
        owner = table_owner(call, self.calls)
        return tuple(range(self.world_size)) if owner is None else self.placements[owner.name].layout.ranks

    def _ranks_of_user(self, call: ModelFunctionCall) -> tuple[int, ...]:
        """Return the ranks of the first call with a model that needs what ``call`` produces; without one, the first."""
        for user in self.users(call):
            if user.name in self.placements:
                return self.placements[user.name].layout.ranks
        return (0,)

    # ---- who needs what
    def users(self, call: ModelFunctionCall) -> list[ModelFunctionCall]:
        """Return the calls of this iteration that need what ``call`` produces."""
        return [user for user in self.calls if not set(user.needs).isdisjoint(call.produces)]

    def needs(self, call: ModelFunctionCall, rank: int) -> tuple[str, ...]:
        """Return the names that ``rank`` needs for ``call``: stages before a pipeline's last run on tokens alone."""
        if call.role is None:
            return call.needs
        layout = self.placements[call.name].layout
        if rank not in layout or layout.coordinate(rank).pp == layout.dims.pp - 1:
            return call.needs
        owner = table_owner(call, self.calls)
        return tuple(name for name in call.needs if owner is None or name in owner.produces)

    def worked_on(
        self, call: ModelFunctionCall, rank: int, table: SampleTable, made: Holders | None
    ) -> tuple[int, ...]:
        """Return the positions of ``table`` that ``rank`` works on under ``call``, ascending."""
        if call.kind == "compute":
            return tuple(sorted(self.computed(call, table, made).get(rank, ())))
        layout = self.placements[call.name].layout
        if rank not in layout:
            return ()
        index = layout.data_parallel_index(rank)
        if call.kind == "generate":
            return self.prompts(call, table)[index]
        if call.kind == "infer":
            micros = self.micro_batches(call, table)[index]
        else:
            micros = tuple(micro for step in self.train_steps(call, table) for micro in step.shares[index])
        return tuple(sorted({position for micro in micros for position in micro.positions}))

    def holders(self, call: ModelFunctionCall, table: SampleTable, made: Holders | None) -> Holders:
        """Return for every position of ``table`` the ranks that hold what an infer or compute call made of it."""
        if call.name not in self._holders:
            holders: list[tuple[int, ...]] = [()] * len(table)
            if call.kind == "compute":
                for rank, positions in self.computed(call, table, made).items():
                    for position in positions:
                        holders[position] = (rank,)
            else:
                for index, micros in enumerate(self.micro_batches(call, table)):
                    ranks = self.placements[call.name].holders(index)
                    for position in (p for micro in micros if micro.counts for p in micro.positions):
                        holders[position] = ranks
            self._holders[call.name] = holders
        return self._holders[call.name]


def table_owner(call: ModelFunctionCall, calls: Sequence[ModelFunctionCall]) -> ModelFunctionCall | None:
    """Return the generating call whose samples ``call`` works on; None for the loader's batch.

    Raises:
        PlanError: when it needs what was made of two sets of samples.
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
