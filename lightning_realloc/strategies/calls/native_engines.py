"""Engines ``"native"`` of the replicas on this rank, with their drafters, which outlive the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from lightning_realloc.generation import GenerationEngine
from lightning_realloc.layout import Layout
from lightning_realloc.runtime.model.adapter_layers import adapter_config
from lightning_realloc.runtime.parallel.pipeline import PipelineStage
from lightning_realloc.runtime.parallel.stage_link import StageLink
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_factory import EngineFactory, ReplicaEngine, agreement
from lightning_realloc.strategies.calls.lockstep import Lockstep
from lightning_realloc.strategies.calls.weight_updates import WeightUpdates
from lightning_realloc.strategies.pool.replica import Replica

if TYPE_CHECKING:
    from lightning_realloc.generation.rebalance.peers import Peers
    from lightning_realloc.generation.speculative.drafter import Drafter
    from lightning_realloc.generation.staged.staged_engine import StagedEngine


class NativeEngines(EngineFactory):
    """Builds engines of continuous batching."""

    def __init__(self, context: CallContext) -> None:
        super().__init__(context)
        self._kept: dict[str, list[Drafter]] = {}
        """Role -> drafters of the last plan in which this rank generated for it."""

    def _build(
        self, replica: Replica, peers: tuple[int, ...], max_slots: int, updates: WeightUpdates | None
    ) -> ReplicaEngine:
        if replica.layout.count(*Layout.stage_axes) > 1:
            return self._build_staged(replica, peers, max_slots, updates)
        context, algorithm, options = self._context, self._algorithm, self._algorithm.generation_options
        lockstep = self._lockstep(replica)
        drafter = self._drafter(replica, peers)
        moves = self._moves(peers, lockstep)
        engine = GenerationEngine(
            replica.model,
            tokenizer=algorithm.tokenizer,
            max_slots=max_slots,
            lockstep=lockstep,
            speculation=algorithm.speculation,
            drafter=drafter,
            max_cache_bytes=options.max_cache_bytes,
            cuda_graphs=options.cuda_graphs,
            compile=options.compile,
            batch_invariant=options.batch_invariant,
            agree=agreement(context.pool.meshes.tensor_group(replica.layout), context.device),
            # Adapters are merged into the weights during a generation; newer ones wait for the next.
            poll_weights=None if updates is None or adapter_config(replica.model) is not None else updates.poll,
            peers=moves,
        )
        return ReplicaEngine(
            replica=replica,
            engine=engine,
            peers=peers,
            lockstep=lockstep,
            drafter=drafter,
            moves=moves,
            updates=updates,
        )

    def _build_staged(
        self, replica: Replica, peers: tuple[int, ...], max_slots: int, updates: WeightUpdates | None
    ) -> ReplicaEngine:
        """Return the engine of a pipeline's stage."""
        link, lockstep = self._link(replica), self._lockstep(replica)
        drafter = self._drafter(replica, peers) if link.is_last else None
        moves = self._moves(peers, lockstep) if link.is_last else None
        taken = None if adapter_config(replica.model) is not None else updates
        engine = self._stage(replica, link, max_slots, lockstep=lockstep, drafter=drafter, updates=taken, peers=moves)
        return ReplicaEngine(
            replica=replica,
            engine=engine,
            peers=peers,
            lockstep=lockstep,
            drafter=drafter,
            moves=moves,
            updates=updates,
            stages=engine,
        )

    def _link(self, replica: Replica) -> StageLink:
        mailbox = self._context.mailbox
        assert mailbox.group is not None, "a pipeline has several ranks"
        stage = PipelineStage(replica.model, replica.model_layout, self._context.pool.meshes)
        return StageLink(stage, mailbox.group, mailbox.record)

    def _stage(
        self,
        replica: Replica,
        link: StageLink,
        max_slots: int,
        *,
        role: str | None = None,
        lockstep: Lockstep | None = None,
        drafter: Drafter | None = None,
        updates: WeightUpdates | None = None,
        peers: Peers | None = None,
    ) -> StagedEngine:
        """Return a stage's engine; ``role``: that of a model which environments ask."""
        from lightning_realloc.generation.staged.staged_engine import StagedEngine

        context, algorithm = self._context, self._algorithm
        return StagedEngine(
            replica.model,
            link,
            role=role,
            updates=updates,
            tokenizer=algorithm.tokenizer if role is None else algorithm.tokenizer_of(role),
            max_slots=max_slots,
            lockstep=lockstep,
            speculation=None if drafter is None else algorithm.speculation,
            drafter=drafter,
            peers=peers,
            max_cache_bytes=algorithm.generation_options.max_cache_bytes,
            agree=agreement(context.pool.meshes.tensor_group(replica.layout), context.device),
        )

    def _build_plain(self, replica: Replica, max_slots: int) -> GenerationEngine:
        context, options = self._context, self._algorithm.generation_options
        if replica.layout.count(*Layout.stage_axes) > 1:
            return self._stage(replica, self._link(replica), max_slots, role=replica.role)
        return GenerationEngine(
            replica.model,
            tokenizer=self._algorithm.tokenizer_of(replica.role),
            max_slots=max_slots,
            max_cache_bytes=options.max_cache_bytes,
            cuda_graphs=options.cuda_graphs,
            compile=options.compile,
            batch_invariant=options.batch_invariant,
            agree=agreement(context.pool.meshes.tensor_group(replica.layout), context.device),
        )

    def forget(self, engines: Iterable[ReplicaEngine]) -> None:
        """Keep the drafters for the next plan's engines."""
        last: dict[str, list[Drafter]] = {}
        for generator in engines:
            drafter = generator.drafter
            if drafter is not None and not drafter.reads_target_cache:  # else it is a part of that model
                last.setdefault(generator.replica.role, []).append(drafter)
        self._kept |= last

    def _lockstep(self, replica: Replica) -> Lockstep | None:
        if not replica.layout.runs_in_lockstep:
            return None
        group = self._context.pool.meshes.batch_group(replica.layout)
        return None if group is None else Lockstep(group, self._context.device)

    def _moves(self, peers: tuple[int, ...], lockstep: Lockstep | None) -> Peers | None:
        setting = self._algorithm.generation_options.sample_reallocation
        # Ranks that gather a model's blocks together make every step together: moving samples would gain nothing.
        if not setting or not peers or lockstep is not None:
            return None
        from lightning_realloc.generation.rebalance.peers import Peers

        return Peers(self._context.mailbox, self._context.rank, peers, "all" if setting == "all" else "queued")

    def _drafter(self, replica: Replica, peers: tuple[int, ...]) -> Drafter | None:
        """Return a drafter for a replica, which reports to ``peers``; None without speculation."""
        if self._algorithm.speculation is None:
            return None
        drafter = self._new_or_kept_drafter(replica)
        drafter.has_listeners = bool(peers)
        return drafter

    def _new_or_kept_drafter(self, replica: Replica) -> Drafter:
        """Return a drafter of an earlier plan, if there is one.

        Tensor-parallel ranks start anew. They must draft alike, and drafters of other ranks learnt in another order.
        """
        speculation = self._algorithm.speculation
        assert speculation is not None, "asked only with speculation"
        from lightning_realloc.generation.speculative.registry import build_drafter

        group = self._context.pool.meshes.tensor_group(replica.layout)
        if group is not None:
            return build_drafter(speculation, replica.model, spread=partial(_spread, group))
        kept = self._kept.get(replica.role)
        return kept.pop() if kept else build_drafter(speculation, replica.model)


def _spread(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Broadcast the first rank's tensors."""
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=0)
