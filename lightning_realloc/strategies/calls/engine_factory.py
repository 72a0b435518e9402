"""One replica's engine on this rank, and the base of the factories that build it; one factory for each engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, GenerationError, shared
from lightning_realloc.generation import Engine, HFEngine
from lightning_realloc.generation.core.capabilities import CAPABILITIES, require_capability
from lightning_realloc.generation.loop.environment import Agree
from lightning_realloc.layout import Layout
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.shared_memory import host_identity
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.lockstep import Lockstep
from lightning_realloc.strategies.calls.weight_updates import WeightUpdates
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.generation_limits import refuse_generation_layout
from lightning_realloc.strategies.pool.replica import Replica

if TYPE_CHECKING:
    from lightning_realloc.generation import VLLMOptions
    from lightning_realloc.generation.rebalance.peers import Peers
    from lightning_realloc.generation.speculative.drafter import Drafter
    from lightning_realloc.generation.staged.staged_engine import StagedEngine
    from lightning_realloc.generation.vllm.service import VLLMService

SERVER_CHECK_S = 30.0
"""Seconds that a vLLM server has to answer before models are built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEngine:
    """The engine of one replica on this rank."""

    replica: Replica
    """The replica."""
    engine: Engine
    """Generates with the replica's model."""
    peers: tuple[int, ...]
    """Data-parallel ranks: they generate other samples with the same shard of the model."""
    lockstep: Lockstep | None = None
    """Keeps ranks in step whose forward passes are collective; None if they are not."""
    drafter: Drafter | None = None
    """Drafts tokens for the engine; None: one token at a time."""
    moves: Peers | None = None
    """Moves samples between the peers; None if samples stay."""
    updates: WeightUpdates | None = None
    """Newer weights while it generates; None if weights change between calls only."""
    stages: StagedEngine | None = None
    """The engine, if the replica is a pipeline's stage on this rank."""

    @property
    def seconds_waited(self) -> float:
        """Seconds in which this rank waited for samples of peers in the last call."""
        stats = self.engine.migration_stats
        return 0.0 if stats is None else stats.waited_s

    def release(self) -> None:
        """Free what the engine, and those of models that its environments talk to, keep between calls."""
        for engine in (self.engine, *self.engine.partners.values()):
            engine.release()

    def begin(self, data: IterationData, index: int) -> None:
        """Start call number ``index`` of an iteration."""
        follows = self.stages is not None and self.stages.is_follower
        newer = None if self.updates is None or follows else self.updates.begin(data.iteration)
        self.engine.weights_updated(data.version if newer is None else newer)
        if self.moves is not None:
            self.moves.at(data.run, index)
        if self.lockstep is not None:
            self.lockstep.begin()


class EngineFactory(ABC):
    """Builds the engines of one kind for replicas on this rank."""

    def __init__(self, context: CallContext) -> None:
        self._context, self._algorithm = context, context.algorithm

    def build(self, call: ModelFunctionCall, replica: Replica) -> ReplicaEngine:
        """Return a replica's engine.

        Raises:
            GenerationError: for a layout in which the engine, or one of its options, cannot run.
        """
        refuse_generation_layout(self._algorithm, call.name, replica.layout)
        ranks = replica.layout.batch_group(self._context.rank)
        peers = tuple(rank for rank in ranks if rank != self._context.rank)
        max_slots = self._context.pool.plan.call(call.name).max_slots
        return self._build(replica, peers, max_slots, self._updates(call, replica))

    @abstractmethod
    def _build(
        self, replica: Replica, peers: tuple[int, ...], max_slots: int, updates: WeightUpdates | None
    ) -> ReplicaEngine:
        """Return the engine of a replica that is checked."""

    def build_partner(self, call: ModelFunctionCall, replica: Replica, role: str) -> Engine:
        """Return the engine of a model that answers the environments of a call, which generates with ``replica``.

        Raises:
            GenerationError: for an engine or a layout in which environments cannot talk to models.
        """
        name = self._algorithm.engine
        require_capability("partners", f"partners={list(call.partners)}", engine=name, error=GenerationError)
        if replica.layout.runs_in_lockstep:
            raise GenerationError(
                f"{call.name} runs in the layout {replica.layout}, whose blocks are run by all ranks together, and "
                f"environments of one rank talk to models when others do not; give it a layout with fsdp=1 and ep=1"
            )
        shares_models = replica.layout.dims.tp > 1 or replica.layout.count(*Layout.stage_axes) > 1
        if self._algorithm.generation_options.sample_reallocation and shares_models:
            raise GenerationError(
                f"{call.name} runs in the layout {replica.layout}, whose ranks answer for models together, and samples "
                f"move to and from each of them at times of its own; give it tp=1 and pp=1, or leave "
                f"sample_reallocation out"
            )
        own = replica if role == call.role else self._context.pool.active(call.name, role)
        if own.layout != replica.layout:
            raise GenerationError(
                f"{call.name} runs in the layout {replica.layout} in place of {own.layout}, where {role} is; "
                f"leave reallocation on, or give {call.name} the layout of {call.role}'s home in the plan"
            )
        return self._build_plain(own, self._context.pool.plan.call(call.name).max_slots)

    def _build_plain(self, replica: Replica, max_slots: int) -> Engine:
        """Return an engine of a replica on this rank alone, or on its tensor-parallel group."""
        raise NotImplementedError(f"{type(self).__name__} builds no engines of partners")

    def forget(self, engines: Iterable[ReplicaEngine]) -> None:  # noqa: B027 - most engines leave nothing
        """Keep the parts of a finished plan's engines that the next plan's engines need."""

    def close(self) -> None:  # noqa: B027 - most engines have no processes
        """End all processes of engines; a later call starts them again."""

    def _updates(self, call: ModelFunctionCall, replica: Replica) -> WeightUpdates | None:
        """Return the source of newer weights in a generation; None if weights change between calls only."""
        context, streams = self._context, self._context.pool.streams
        if not streams.is_allowed(call.name):
            return None
        if self._algorithm.generation_options.sample_reallocation:
            raise GenerationError(
                f"the ranks of {call.name} take newer weights at steps of their own under max_staleness of 2 and more, "
                f"and samples cannot move between them; use sample_reallocation=False, or max_staleness=1"
            )
        speculation = self._algorithm.speculation
        if context.version_log.is_replayed and speculation is not None and speculation.num_draft_tokens is None:
            raise GenerationError(
                "replay_versions takes weights after the same steps again, and a measured draft length makes other "
                "steps; use Speculation(num_draft_tokens=4), say, in both runs, or leave replay_versions out"
            )
        group = context.pool.meshes.tensor_group(replica.layout)
        return WeightUpdates(
            streams, call.name, group, context.device, context.version_log, record=context.mailbox.record
        )


class HFEngines(EngineFactory):
    """Builds engines on the models' own ``generate``."""

    def _build(
        self, replica: Replica, peers: tuple[int, ...], max_slots: int, updates: WeightUpdates | None
    ) -> ReplicaEngine:
        engine = self._build_plain(replica, max_slots)
        return ReplicaEngine(replica=replica, engine=engine, peers=peers, updates=updates)

    def _build_plain(self, replica: Replica, max_slots: int) -> Engine:
        context = self._context
        return HFEngine(
            replica.model,
            tokenizer=self._algorithm.tokenizer_of(replica.role),
            max_slots=max_slots,
            agree=agreement(context.pool.meshes.tensor_group(replica.layout), context.device),
        )


class VLLMEngines(EngineFactory):
    """Builds engines on one vLLM per role. Starting vLLM takes minutes, so its processes outlive the plan."""

    def __init__(self, context: CallContext) -> None:
        super().__init__(context)
        self._services: dict[tuple[str, int, tuple[int, ...]], VLLMService] = {}
        """(Role, slots, tensor-parallel ranks) -> its vLLM; one for each role."""

    def _build(
        self, replica: Replica, peers: tuple[int, ...], max_slots: int, updates: WeightUpdates | None
    ) -> ReplicaEngine:
        """Return a replica's engine, on the vLLM of its role if that has as many slots and the same ranks."""
        from lightning_realloc.generation.vllm.hand_over_proof import HandedModel
        from lightning_realloc.generation.vllm.tensor_ranks import TensorRanks
        from lightning_realloc.generation.vllm.vllm_engine import VLLMEngine

        context = self._context
        key = replica.role, max_slots, replica.layout.tensor_group(context.rank)
        for other in [known for known in self._services if known[0] == replica.role and known != key]:
            self._services.pop(other).close()
        options = self._algorithm.generation_options
        group = context.pool.meshes.tensor_group(replica.layout)
        ranks = None
        if group is not None:
            gather = partial(gather_objects, group=group)
            ranks = TensorRanks(replica.model_layout, context.rank, gather, context.device)
        engine = VLLMEngine(
            replica.model,
            tokenizer=self._algorithm.tokenizer,
            max_slots=max_slots,
            max_cache_bytes=options.max_cache_bytes,
            options=options.vllm,
            service=self._services.get(key),
            ranks=ranks,
            agree=agreement(group, context.device),
            verify_weights=context.pool.verify_weights,
            handed=HandedModel(
                role=replica.role,
                layout=str(replica.layout),
                rank=context.rank,
                first_rank=min(replica.layout.ranks),
            ),
        )
        self._services[key] = engine.service
        if not engine.merges_adapters:
            self._require_adapters_alone(replica)
        return ReplicaEngine(replica=replica, engine=engine, peers=peers, updates=updates)

    def _require_adapters_alone(self, replica: Replica) -> None:
        """Raise GenerationError if training changes a weight of an adapted role which vLLM would get only once."""
        from lightning_realloc.generation.vllm.lone_adapters import adapter_names

        trained = self._context.pool.saved_parameters(replica.role, include_frozen=False) or frozenset()
        if others := sorted(trained.difference(adapter_names(replica.model))):
            raise GenerationError(
                f"vLLM gets adapters alone after the first rollout, and {replica.role} trains {others[0]} as well "
                f"({len(others)} such parameters); freeze them, or set VLLMOptions(merge_adapters=True)"
            )

    def close(self) -> None:
        """End all processes; a later call starts them again."""
        for service in self._services.values():
            service.close()


def check_vllm(algorithm: RunnableAlgorithm, dataflow: Dataflow, plan: ExecutionPlan, rank: int) -> None:
    """Check, before models are built, that each host that generates has vLLM, or reaches the server. Collective.

    Raises:
        ConfigError: on every rank, for the first host without it.
    """
    if "vllm" not in CAPABILITIES[algorithm.engine]:
        return
    calls = [call.name for call in dataflow.calls if call.kind == "generate"]
    generates = any(rank in plan.layout(call).ranks for call in calls)
    hosts, fault = gather_objects(host_identity() if generates else None), None
    if generates and hosts.index(hosts[rank]) == rank:
        try:
            _check_vllm_here(algorithm.generation_options.vllm)
        except GenerationError as error:
            fault = str(error)
    faults = gather_objects(fault)
    for host, found in zip(hosts, faults, strict=True):
        if found is not None:
            where = f"on the host {host.partition('/')[0]}, " if len({*hosts} - {None}) > 1 else ""
            raise shared(ConfigError(f"{where}{found}"))


def _check_vllm_here(options: VLLMOptions | None) -> None:
    """Raise GenerationError for an interpreter without vLLM, and for a server that does not answer."""
    from lightning_realloc.generation.vllm.start.interpreter import interpreter, vllm_version_of
    from lightning_realloc.generation.vllm.vllm_server import server_version

    if options is not None and options.address is not None:
        server_version(options.address, timeout_s=min(options.timeout_s, SERVER_CHECK_S))
    else:
        vllm_version_of(interpreter(None if options is None else options.python))


def agreement(group: dist.ProcessGroup | None, device: torch.device) -> Agree | None:
    """Return a function that broadcasts the first rank's numbers; None without a group."""
    if group is None:
        return None

    def first_ones(numbers: Sequence[float]) -> list[float]:
        agreed = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.broadcast(agreed, group=group, group_src=0)
        values: list[float] = agreed.tolist()
        return values

    return first_ones
