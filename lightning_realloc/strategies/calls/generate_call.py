"""Run generating calls on this rank: engines, chunks that are sent meanwhile, and samples that are carried over.

An engine belongs to a replica and lives as long as the plan; its drafter outlives it. A drafter that learns from
earlier responses gets those of data-parallel peers, too: a prompt may come back on another rank. A rank sends its
responses after a call, and receives the peers' before the next one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.batch.samples import Divided, Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import GenerationEngine, HFEngine
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.generation.rebalance.handover import MigrationStats
from lightning_realloc.generation.rebalance.peers import MovableSamples, Peers
from lightning_realloc.generation.speculative.drafter import Drafter, Exchange
from lightning_realloc.generation.speculative.registry import build_drafter
from lightning_realloc.runtime.messages.mailbox import FrameKind
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.infer_call import EarlyInference, InferCalls
from lightning_realloc.strategies.calls.metrics import IdleClock, speculation_metrics
from lightning_realloc.strategies.calls.vllm_engines import VLLMEngines
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.iteration_report import IterationReport
from lightning_realloc.strategies.pool.replica import Replica

if TYPE_CHECKING:
    from lightning_realloc.generation import VLLMEngine

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

    role: str
    """Role of the replica."""
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

    def begin(self, run: int, index: int) -> None:
        """Start call number ``index`` of a run."""
        if self.moves is not None:
            self.moves.at(run, index)
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

    def engine_for(self, call: ModelFunctionCall, replica: Replica, *, version: int) -> ReplicaEngine:
        """Return a replica's engine; its drafter has received the peers' responses.

        Args:
            call: The generating call.
            replica: Its replica.
            version: Iterations in which the weights were trained.

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
        known.engine.weights_updated(version)
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
                last.setdefault(generator.role, []).append(generator.drafter)
        self._kept |= last
        self._engines.clear()

    def close(self) -> None:
        """End the processes of this rank's engines; a later call starts them again."""
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
        if self._algorithm.engine == "hf":
            oracle = HFEngine(replica.model, tokenizer=tokenizer, max_slots=max_slots)
            return ReplicaEngine(replica.role, oracle, None, Drafter(), peers)
        if self._algorithm.engine == "vllm":
            return ReplicaEngine(replica.role, self._vllm.build(replica, max_slots), None, Drafter(), peers)
        lockstep = None
        if replica.is_sharded:
            group = self._context.pool.meshes.group(layout, "dp", "fsdp")
            lockstep = None if group is None else Lockstep(group, self._context.device)
        speculation = self._algorithm.speculation
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
            agree=_agreement(self._context.pool.meshes.group(layout, "tp"), self._context.device),
            peers=moves,
        )
        return ReplicaEngine(replica.role, engine, lockstep, drafter, peers, moves)

    def _check(self, call: ModelFunctionCall, replica: Replica) -> None:
        """Refuse drafters and engines that cannot run where ranks gather a model's blocks together in every step."""
        if self._algorithm.engine == "vllm":
            self._vllm.check(call, replica)
        speculation = self._algorithm.speculation
        asked = "draft by its own first blocks" if speculation is not None and speculation.drafter == "blocks" else None
        if self._algorithm.engine != "native":
            asked = f"generate by engine={self._algorithm.engine!r}"
        if replica.is_sharded and asked is not None:
            raise GenerationError(
                f"{call.name} runs in the layout {replica.layout}, whose blocks are gathered by all ranks together, "
                f"and cannot {asked}; give it a layout with fsdp=1, or another engine or drafter"
            )


class GenerateCalls:
    """Runs generating calls.

    Args:
        context: The algorithm and its models on this rank.
        engines: Engines of the models' replicas.
        inference: Runs calls that a rank may start before all ranks have finished generating.
        idle: Clock of this rank's waiting.
    """

    def __init__(self, context: CallContext, engines: EnginePool, inference: InferCalls, idle: IdleClock) -> None:
        self._context, self._engines, self._inference, self._idle = context, engines, inference, idle

    def run(self, call: ModelFunctionCall, replica: Replica, data: IterationData) -> Samples:
        """Return the samples that this rank generates; chunks of them are sent as soon as they are full."""
        prompts = data.inputs(call)
        if prompts is None:
            prompts = data.table(call).known.select([])
        replica_engine = self._engines.engine_for(call, replica, version=data.version)
        replica_engine.begin(data.run, data.index(call))
        engine, num_chunks = replica_engine.engine, data.routes.fusion.num_chunks_of(call)
        partial_results = PartialResults(num_chunks, lambda made: data.send_chunk(call, made))
        early = None
        if replica_engine.moves is not None:
            early = EarlyInference.from_fusion(call, data, self._context.pool, self._inference, partial_results)
        shared = partial_results if num_chunks > 1 or early is not None else None
        self._context.mailbox.record.follow(engine.progress)
        try:
            with self._context.reading(call, replica), engine.sharing(shared, early):
                made: Samples | Divided = self._context.method_of(call)(engine, prompts)
            self._engines.send_history(replica_engine, data.run, data.index(call))
            self._record_metrics(call.name, replica, replica_engine, data.report)
            self._idle.add(replica_engine.seconds_waited)
            if isinstance(made, Divided):
                data.carry(call, made.carried)
                return made.finished
            if early is not None:
                data.record_early(early.results(call, made))
            return made
        except PeerFailure:
            raise
        except Exception:
            if replica_engine.lockstep is not None:
                replica_engine.lockstep.give_up()
            raise
        finally:
            # Training needs the memory more. And a cache that has grown rounds logprobs differently, in the last bit,
            # than the fresh one of a run that was resumed here.
            engine.release()

    def _record_metrics(self, call: str, replica: Replica, generator: ReplicaEngine, report: IterationReport) -> None:
        """Report the metrics of a call; of tensor-parallel ranks, which make the same samples, only the first does."""
        if replica.layout.coordinate(self._context.rank).tp:
            return
        algorithm, stats, moved = self._context.algorithm, generator.engine.stats, generator.migration_stats
        if algorithm.speculation is not None:
            report.sums |= speculation_metrics(call, stats)
        if algorithm.max_cache_bytes is not None:
            report.sums[f"preemptions/{call}"] = float(stats.num_preemptions)
        if moved is not None:
            report.sums[f"moved_samples/{call}"] = float(moved.num_received)


def refuse_long_prompts(prompts: Samples, replica: Replica) -> None:
    """Refuse a prompt that leaves no room for a response, by its sample id. An engine knows this rank's prompts only.

    Raises:
        GenerationError: which names the prompt.
    """
    config: Any = getattr(replica.model, "config", None)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    lengths = prompts.ragged("prompt_ids").lengths
    if context is None or not len(prompts) or int(lengths.max()) < context:
        return
    row = int(lengths.argmax())
    text = f": {str(prompts.objects('prompt')[row])[:80]!r}" if "prompt" in prompts.data else ""
    raise GenerationError(
        f"the prompt of sample {int(prompts.ids[row])} has {int(lengths[row])} tokens, and {replica.role}'s context of "
        f"{context} leaves no room for a response; shorten it to at most {context - 1} tokens or leave it out{text}"
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
