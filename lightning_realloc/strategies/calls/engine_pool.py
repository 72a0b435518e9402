"""Engines that generate on this rank: one for each replica, with its drafter, for as long as the plan.

Drafters outlive their engines. A drafter that learns from earlier responses gets those of data-parallel peers, too: a
prompt may come back on another rank. A rank sends its responses after a call, and receives the peers' before the next.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import GenerationEngine, HFEngine
from lightning_realloc.generation.rebalance.handover import MigrationStats
from lightning_realloc.generation.rebalance.peers import MovableSamples, Peers
from lightning_realloc.generation.speculative.drafter import Drafter, Exchange
from lightning_realloc.generation.speculative.registry import build_drafter
from lightning_realloc.runtime.messages.mailbox import FrameKind
from lightning_realloc.runtime.model.adapter_layers import adapter_config, free_merged
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.vllm_engines import VLLMEngines
from lightning_realloc.strategies.calls.weight_updates import WeightUpdates
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.pool.replica import Replica

if TYPE_CHECKING:
    from lightning_realloc.generation import VLLMEngine

log = logging.getLogger(__name__)

_IDLE, _WORKING, _FAILED = range(3)


class PeerFailure(Exception):
    """Another rank of the group failed; it reports the cause."""


class Lockstep:
    """Agrees before every step of a generation, on all ranks of a group, whether any of them still has work.

    Args:
        group: The ranks whose forward passes wait for each other.
        device: A device that the group can communicate from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._others_wait = False

    def begin(self) -> None:
        """Start a generation, in which every rank agrees on at least one step."""
        self._others_wait = True

    def __call__(self, has_work: bool) -> bool:
        """Return whether any rank has work. Collective over the group.

        Raises:
            PeerFailure: when another rank gave up.
        """
        status = self._agree(_WORKING if has_work else _IDLE)
        self._others_wait = status == _WORKING
        if status == _FAILED:
            raise PeerFailure
        return status == _WORKING

    def give_up(self) -> None:
        """Report a failure to the ranks that wait for this rank's next step."""
        if self._others_wait:
            self._agree(_FAILED)
            self._others_wait = False

    def _agree(self, status: int) -> int:
        self._status.fill_(status)
        dist.all_reduce(self._status, op=dist.ReduceOp.MAX, group=self._group)
        return int(self._status.item())


@dataclass(frozen=True, slots=True)
class ReplicaEngine:
    """The engine of one replica on this rank."""

    replica: Replica
    """The replica."""
    engine: GenerationEngine | HFEngine | VLLMEngine
    """Generates with the replica's model."""
    lockstep: Lockstep | None
    """Keeps ranks in step whose forward passes are collective; None if they are not."""
    drafter: Drafter
    """Drafts tokens for the engine."""
    peers: tuple[int, ...]
    """Data-parallel ranks: they generate other samples with the same shard of the model."""
    moves: Peers | None = None
    """Moves samples between the peers; None if samples stay."""
    updates: WeightUpdates | None = None
    """Newer weights while it generates; None if weights change between calls only."""

    @property
    def migration_stats(self) -> MigrationStats | None:
        """Statistics of moved samples in the last call; None if samples stay."""
        if self.moves is None or not isinstance(self.engine, GenerationEngine):
            return None
        return self.engine.migration_stats

    @property
    def seconds_waited(self) -> float:
        """Seconds in which this rank waited for samples of peers in the last call."""
        stats = self.migration_stats
        return 0.0 if stats is None else stats.waited_s

    def begin(self, data: IterationData, index: int) -> None:
        """Start call number ``index`` of an iteration."""
        newer = None if self.updates is None else self.updates.begin(data.iteration)
        self.engine.weights_updated(data.version if newer is None else newer)
        if self.moves is not None:
            self.moves.at(data.run, index)
        if self.lockstep is not None:
            self.lockstep.begin()


class EnginePool:
    """Builds engines for replicas, and exchanges responses between their drafters.

    Args:
        context: The algorithm with its settings of engines, speculation and caches, and this rank.
    """

    def __init__(self, context: CallContext) -> None:
        self._context, self._algorithm = context, context.algorithm
        self._engines: dict[int, ReplicaEngine] = {}
        """Engines by the id of their model."""
        self._kept: dict[str, list[Drafter]] = {}
        """Role -> drafters of the last plan in which this rank generated for it."""
        self._vllm = VLLMEngines(self._algorithm)
        self._expected: list[tuple[ReplicaEngine, int, int]] = []
        """Engine, run and call whose peers sent responses that this rank has not received yet."""
        self.keeps_caches = False
        """Whether caches, CUDA graphs and merged adapters stay between generations, as long as the run goes on."""
        self.is_generating = False
        """Whether an engine runs, and needs its cache."""

    def engine_for(self, call: ModelFunctionCall, replica: Replica) -> ReplicaEngine:
        """Return a replica's engine; its drafter has received the peers' responses.

        Args:
            call: The generating call.
            replica: Its replica.

        Raises:
            GenerationError: for a layout that cannot generate, or cannot draft as the algorithm asks.
        """
        self.receive_history()
        if replica.layout.dims.pp > 1:  # the plan gives another layout, which no callback made real
            raise GenerationError(
                f"{call.name} cannot generate in the layout {replica.layout}, a pipeline; give it one with pp=1, and "
                f"leave reallocation on"
            )
        known = self._engines.get(id(replica.model))
        if known is None:
            known = self._engines[id(replica.model)] = self._build(call, replica)
        return known

    def send_history(self, generator: ReplicaEngine, run: int, index: int) -> None:
        """Send the peers' drafters the responses of call number ``index`` of a run, without waiting."""
        if generator.peers and generator.drafter.exchanges:
            content = _packed(generator.drafter.news())
            self._context.mailbox.send(generator.peers, FrameKind.HISTORY, run, index, content)
            self._expected.append((generator, run, index))

    def receive_history(self, *, before: int | None = None) -> None:
        """Give drafters the peers' responses of runs before ``before``, None: of all runs; waits for them."""
        due = [expected for expected in self._expected if before is None or expected[1] < before]
        for generator, run, index in due:
            for peer in generator.peers:
                news = self._context.mailbox.receive(FrameKind.HISTORY, run, index, peer)
                generator.drafter.receive_news(_unpacked(news))
        self._expected = self._expected[len(due) :]

    def forget(self) -> None:
        """Drop the engines of the plan before, and keep their drafters for the next one's."""
        self.receive_history()
        last: dict[str, list[Drafter]] = {}
        for generator in self._engines.values():
            if not generator.drafter.reads_target_cache:  # else it is a part of that model
                last.setdefault(generator.replica.role, []).append(generator.drafter)
        self._kept |= last
        self._engines.clear()

    def give_up_caches(self) -> bool:
        """Free the caches and CUDA graphs that engines keep, and keep no more; return whether there were any.

        Those of a tensor-parallel group stay, since its ranks must replay and capture the same steps.
        """
        is_cut = any(generator.replica.layout.dims.tp > 1 for generator in self._engines.values())
        if self.is_generating or is_cut or not self.keeps_caches or not self._engines:
            return False
        log.warning("memory ran out: caches and CUDA graphs are freed after each generation from now on")
        self.free_caches()
        self.keeps_caches = False
        return True

    def free_caches(self) -> None:
        """Free the caches and CUDA graphs that engines keep."""
        for generator in self._engines.values():
            if isinstance(generator.engine, GenerationEngine):
                generator.engine.release()
                free_merged(generator.replica.model)

    def close(self) -> None:
        """Free kept caches, and end the processes of this rank's engines; a later call starts them again."""
        self.free_caches()
        self._vllm.close()

    def _build_drafter(self, replica: Replica) -> Drafter:
        """Return a drafter for a replica: one of an earlier plan, if there is one.

        Tensor-parallel ranks start anew. They must draft alike, and drafters of other ranks learnt in another order.
        """
        speculation = self._algorithm.speculation
        if speculation is None:
            return Drafter()
        group = self._context.pool.meshes.group(replica.layout, "tp")
        if group is not None:
            return build_drafter(speculation, replica.model, spread=partial(_spread, group))
        kept = self._kept.get(replica.role)
        return kept.pop() if kept else build_drafter(speculation, replica.model)

    def _build(self, call: ModelFunctionCall, replica: Replica) -> ReplicaEngine:
        layout = replica.layout
        peers = tuple(rank for rank in layout.group(self._context.rank, "dp", "fsdp") if rank != self._context.rank)
        max_slots, tokenizer = self._context.pool.plan.call(call.name).max_slots, self._algorithm.tokenizer
        self._check(call, replica)
        updates = self._updates(call, replica)
        if self._algorithm.engine == "hf":
            oracle = HFEngine(replica.model, tokenizer=tokenizer, max_slots=max_slots)
            return ReplicaEngine(replica, oracle, None, Drafter(), peers, updates=updates)
        if self._algorithm.engine == "vllm":
            served = self._vllm.build(replica, max_slots)
            return ReplicaEngine(replica, served, None, Drafter(), peers, updates=updates)
        lockstep = None
        if replica.is_sharded:
            group = self._context.pool.meshes.group(layout, "dp", "fsdp")
            lockstep = None if group is None else Lockstep(group, self._context.device)
        speculation, options = self._algorithm.speculation, self._algorithm.generation_options
        drafter = self._build_drafter(replica)
        drafter.has_listeners = bool(peers)
        # Ranks that gather a model's blocks together make every step together: moving samples would gain nothing.
        setting = self._algorithm.sample_reallocation
        movable: MovableSamples = "all" if setting == "all" else "queued"
        moves = (
            Peers(self._context.mailbox, self._context.rank, peers, movable)
            if setting and lockstep is None and peers
            else None
        )
        engine = GenerationEngine(
            replica.model,
            tokenizer=tokenizer,
            max_slots=max_slots,
            lockstep=lockstep,
            speculation=speculation,
            drafter=None if speculation is None else drafter,
            max_cache_bytes=self._algorithm.max_cache_bytes,
            cuda_graphs=options.cuda_graphs,
            compile=options.compile,
            batch_invariant=options.batch_invariant,
            agree=_agreement(self._context.pool.meshes.group(layout, "tp"), self._context.device),
            # Adapters are merged into the weights during a generation; newer ones wait for the next.
            poll_weights=None if updates is None or adapter_config(replica.model) is not None else updates.poll,
            peers=moves,
        )
        return ReplicaEngine(replica, engine, lockstep, drafter, peers, moves, updates)

    def _updates(self, call: ModelFunctionCall, replica: Replica) -> WeightUpdates | None:
        """Return the source of newer weights in a generation; None if weights change between calls only."""
        context, streams = self._context, self._context.pool.streams
        if not streams.is_allowed(call.name):
            return None
        group = context.pool.meshes.group(replica.layout, "tp")
        return WeightUpdates(
            streams, call.name, group, context.device, context.version_log, record=context.mailbox.record
        )

    def _check(self, call: ModelFunctionCall, replica: Replica) -> None:
        """Refuse drafters and engines that cannot run where ranks gather a model's blocks together in every step."""
        if self._algorithm.engine == "vllm":
            self._vllm.check(call, replica)
        speculation = self._algorithm.speculation
        if self._context.pool.streams.is_allowed(call.name):
            self._check_updates(call)
        asked = "draft by its own first blocks" if speculation is not None and speculation.drafter == "blocks" else None
        if self._algorithm.generation_options.batch_invariant:
            asked = "generate with batch_invariant=True"
        if self._algorithm.engine != "native":
            asked = f"generate by engine={self._algorithm.engine!r}"
        if replica.is_sharded and asked is not None:
            raise GenerationError(
                f"{call.name} runs in the layout {replica.layout}, whose blocks are gathered by all ranks together, "
                f"and cannot {asked}; give it a layout with fsdp=1, or another engine or drafter"
            )

    def _check_updates(self, call: ModelFunctionCall) -> None:
        """Refuse what does not go with weights that change while a rank generates."""
        if self._algorithm.sample_reallocation:
            raise GenerationError(
                f"the ranks of {call.name} take newer weights at steps of their own under max_staleness of 2 and more, "
                f"and samples cannot move between them; use sample_reallocation=False, or max_staleness=1"
            )
        speculation = self._algorithm.speculation
        if self._context.version_log.is_replayed and speculation is not None and speculation.num_draft_tokens is None:
            raise GenerationError(
                "replay_versions takes weights after the same steps again, and a measured draft length makes other "
                "steps; use Speculation(num_draft_tokens=4), say, in both runs, or leave replay_versions out"
            )


def _agreement(
    group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[Sequence[float]], Sequence[float]] | None:
    """Return a function that broadcasts the first rank's numbers; None without a group."""
    if group is None:
        return None

    def first_ones(numbers: Sequence[float]) -> list[float]:
        agreed = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.broadcast(agreed, group=group, group_src=0)
        values: list[float] = agreed.tolist()
        return values

    return first_ones


def _spread(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Broadcast the first rank's tensors."""
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=0)


def _packed(news: Sequence[Exchange]) -> Tensor:
    """Return prompts and responses as bytes: two lengths, then the tokens of both, for each."""
    numbers = array("i")
    for prompt, response in news:
        numbers.extend((len(prompt), len(response), *prompt, *response))
    return (
        torch.frombuffer(bytearray(numbers.tobytes()), dtype=torch.uint8)
        if numbers
        else torch.empty(0, dtype=torch.uint8)
    )


def _unpacked(content: Tensor) -> list[Exchange]:
    numbers: list[int] = content.view(torch.int32).tolist()
    news, place = [], 0
    while place < len(numbers):
        begin = place + 2
        middle, end = begin + numbers[place], begin + numbers[place] + numbers[place + 1]
        news.append((tuple(numbers[begin:middle]), tuple(numbers[middle:end])))
        place = end
    return news
