"""The engines that a plan's generating calls work with, and what ranks tell each other so that all of them draft well.

An engine belongs to a replica and lives as long as the plan; what its drafter knows outlives it. Where drafts come from
earlier responses, data-parallel ranks tell each other theirs after a call, and hear of the others' before the next: a
prompt may come back elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import GenerationEngine, HFEngine
from lightning_realloc.generation.rebalance.kv_transfer import Peers
from lightning_realloc.generation.rebalance.migration import MigrationStats, WaitingCalls
from lightning_realloc.generation.speculative.drafters import build_drafter
from lightning_realloc.generation.speculative.drafting import Drafter, Exchange
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.calls.lockstep import Lockstep
from lightning_realloc.strategies.calls.metrics import facts_of_generation, facts_of_migration, facts_of_preemptions
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.replica import Replica


@dataclass(frozen=True, slots=True)
class ReplicaEngine:
    """What one rank generates with."""

    role: str
    """Whose responses it generates."""
    engine: GenerationEngine | HFEngine
    lockstep: Lockstep | None
    """Where forwards are collective."""
    drafter: Drafter
    peers: tuple[int, ...]
    """Other ranks that generate other samples with the same part of the same model."""
    moves: Peers | None = None
    """Where samples move between them."""

    @property
    def migration_stats(self) -> MigrationStats | None:
        """What moving samples came to in the last call; None where none can move."""
        if self.moves is None or not isinstance(self.engine, GenerationEngine):
            return None
        return self.engine.migration_stats

    @contextmanager
    def freed_for(self, waiting_calls: WaitingCalls | None) -> Iterator[None]:
        """Let this rank be freed for other calls while others generate."""
        if isinstance(self.engine, GenerationEngine):
            self.engine.waiting_calls = waiting_calls
        try:
            yield
        finally:
            if isinstance(self.engine, GenerationEngine):
                self.engine.waiting_calls = None

    def begin(self, run: int, index: int) -> None:
        """Generate in call number ``index`` of a run."""
        if self.moves is not None:
            self.moves.at(run, index)
        if self.lockstep is not None:
            self.lockstep.begin()


class EnginePool:
    """Makes engines for replicas, and carries news between their drafters.

    Args:
        module: The algorithm; its ``speculation`` says how to draft, its ``max_cache_bytes`` what a cache may take.
        pool: Its models.
        mailbox: Between the ranks.
        device: Where tensors are worked on.
        rank: This process.
    """

    def __init__(self, module: Any, pool: ModelPool, mailbox: Mailbox, *, device: torch.device, rank: int) -> None:
        self._module = module
        self._pool = pool
        self._mailbox = mailbox
        self._device = device
        self._rank = rank
        self._engines: dict[int, ReplicaEngine] = {}
        self._kept: dict[str, list[Drafter]] = {}
        """Drafters of the last plan in which this rank generated for a role, by role."""
        self._told: list[tuple[ReplicaEngine, int, int]] = []
        """Whose peers sent news, in which run, for which call."""

    def of(self, call: ModelFunctionCall, replica: Replica, *, version: int) -> ReplicaEngine:
        """Return what to generate with; its drafter has heard what the peers made before.

        ``version`` is that of the weights: iterations that they were trained in.

        Raises:
            GenerationError: for a layout that cannot generate, or cannot draft as the algorithm asks.
        """
        self.hear()
        if replica.layout.dims.pp > 1:  # the plan gives another layout, which no callback made real
            raise GenerationError(
                f"{call.name} cannot generate in the layout {replica.layout}, a pipeline; give it one with pp=1, and "
                f"leave reallocation on"
            )
        known = self._engines.get(id(replica.model))
        if known is None:
            known = self._engines[id(replica.model)] = self._make(call, replica)
        known.engine.weights_updated(version)
        return known

    def facts(self, call: str, replica: Replica) -> dict[str, float]:
        """Return what this rank tells of the call that it has just made with a replica.

        Of ranks in tensor parallelism, which make the same samples, the first one tells what became of them.
        """
        generator = self._engines[id(replica.model)]
        stats, moved = generator.engine.stats, generator.migration_stats
        told: dict[str, float] = {}
        if self._module.speculation is not None:
            told |= facts_of_generation(call, stats, self._rank)
        if replica.layout.coordinate(self._rank).tp:
            return told
        if self._module.max_cache_bytes is not None:
            told |= facts_of_preemptions(call, stats, self._rank)
        if moved is not None:
            told |= facts_of_migration(call, moved, self._rank)
        return told

    def tell(self, generator: ReplicaEngine, run: int, index: int) -> None:
        """Send the peers what was generated in call number ``index`` of a run; nobody waits."""
        if generator.peers and generator.drafter.exchanges:
            content = _packed(generator.drafter.news())
            self._mailbox.send(generator.peers, FrameKind.HISTORY, run, index, content)
            self._told.append((generator, run, index))

    def hear(self, *, before: int | None = None) -> None:
        """Take in what peers sent, before a run or at all; waits for what is still on its way."""
        due = [told for told in self._told if before is None or told[1] < before]
        for generator, run, index in due:
            for peer in generator.peers:
                generator.drafter.hear(_unpacked(self._mailbox.receive(FrameKind.HISTORY, run, index, peer)))
        self._told = self._told[len(due) :]

    def forget(self) -> None:
        """Drop the engines of the plan before; the next one's draft with what these learnt."""
        self.hear()
        last: dict[str, list[Drafter]] = {}
        for generator in self._engines.values():
            if not generator.drafter.reads_target_cache:  # else it is a part of that model
                last.setdefault(generator.role, []).append(generator.drafter)
        self._kept |= last
        self._engines.clear()

    def _drafter(self, replica: Replica) -> Drafter:
        """Return a drafter for a replica: one of a plan before, if there is one.

        Ranks in tensor parallelism have to draft alike, and came to what they learnt elsewhere in another order: they
        begin anew.
        """
        speculation = self._module.speculation
        if speculation is None:
            return Drafter()
        group = self._pool.meshes.group(replica.layout, "tp")
        if group is not None:
            return build_drafter(speculation, replica.model, spread=partial(_spread, group))
        kept = self._kept.get(replica.role)
        return kept.pop() if kept else build_drafter(speculation, replica.model)

    def _make(self, call: ModelFunctionCall, replica: Replica) -> ReplicaEngine:
        layout = replica.layout
        peers = tuple(rank for rank in layout.group(self._rank, "dp", "fsdp") if rank != self._rank)
        max_slots, tokenizer = self._pool.plan.call(call.name).max_slots, self._module.tokenizer
        self._check(call, replica)
        if self._module.engine == "hf":
            oracle = HFEngine(replica.model, tokenizer=tokenizer, max_slots=max_slots)
            return ReplicaEngine(replica.role, oracle, None, Drafter(), peers)
        lockstep = None
        if replica.is_sharded:
            group = self._pool.meshes.group(layout, "dp", "fsdp")
            lockstep = None if group is None else Lockstep(group, self._device)
        speculation = self._module.speculation
        drafter = self._drafter(replica)
        drafter.has_listeners = bool(peers)
        # Ranks that gather a model's blocks together make every step together: moving samples would gain nothing.
        may_move = self._module.sample_reallocation and lockstep is None and peers
        moves = Peers(self._mailbox, self._rank, peers) if may_move else None
        engine = GenerationEngine(
            replica.model,
            tokenizer=tokenizer,
            max_slots=max_slots,
            lockstep=lockstep,
            speculation=speculation,
            drafter=drafter,
            max_cache_bytes=self._module.max_cache_bytes,
            agree=_agreement(self._pool.meshes.group(layout, "tp"), self._device),
            peers=moves,
        )
        return ReplicaEngine(replica.role, engine, lockstep, drafter, peers, moves)

    def _check(self, call: ModelFunctionCall, replica: Replica) -> None:
        """Refuse what cannot work where ranks gather a model's blocks together, each step of all ranks at once."""
        speculation = self._module.speculation
        asked = "draft by its own first blocks" if speculation is not None and speculation.drafter == "blocks" else None
        if self._module.engine == "hf":
            asked = "generate by engine='hf'"
        if replica.is_sharded and asked is not None:
            raise GenerationError(
                f"{call.name} runs in the layout {replica.layout}, whose blocks are gathered by all ranks together, "
                f"and cannot {asked}; give it a layout with fsdp=1, or another engine or drafter"
            )


def refuse_long_prompts(prompts: Samples, replica: Replica) -> None:
    """Name a prompt that leaves no room for a response; an engine knows only its place in one rank's share."""
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
    """Return a function that gives all ranks of a group the first one's numbers; None for a rank on its own."""
    if group is None:
        return None

    def first_ones(numbers: Sequence[float]) -> list[float]:
        agreed = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.broadcast(agreed, group=group, group_src=0)
        values: list[float] = agreed.tolist()
        return values

    return first_ones


def _spread(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Give all ranks of a group the first one's tensors."""
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
