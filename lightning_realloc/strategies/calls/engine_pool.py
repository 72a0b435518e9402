"""Engines that generate on this rank: one for each replica, with its drafter, for as long as the plan.

Drafters outlive their engines. A drafter that learns from earlier responses gets those of data-parallel peers, too: a
prompt may come back on another rank. A rank sends its responses after a call, and receives the peers' before the next.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import GenerationError
from lightning_realloc.runtime.messages.codec import decode_message, encode_message
from lightning_realloc.runtime.messages.mailbox import FrameKind
from lightning_realloc.runtime.model.adapter_layers import free_merged
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_factory import EngineFactory, HFEngines, ReplicaEngine, VLLMEngines
from lightning_realloc.strategies.calls.native_engines import NativeEngines
from lightning_realloc.strategies.pool.replica import Replica

if TYPE_CHECKING:
    from lightning_realloc.generation.speculative.drafter import Drafter

log = logging.getLogger(__name__)

FACTORIES: Mapping[str, type[EngineFactory]] = {"native": NativeEngines, "hf": HFEngines, "vllm": VLLMEngines}
"""Engine -> the factory that builds it for replicas."""


class EnginePool:
    """Builds engines for replicas, and exchanges responses between their drafters."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._engines: dict[int, ReplicaEngine] = {}
        """Engines by the id of their model."""
        self._factory = FACTORIES[context.algorithm.engine](context)
        self._expected: list[tuple[Drafter, tuple[int, ...], int, int]] = []
        """Drafter, peers, run and call of responses that the peers sent, and this rank has not received yet."""
        self.keeps_caches = False
        """Whether caches, CUDA graphs and merged adapters stay between generations, as long as the run goes on."""
        self.is_generating = False
        """Whether an engine runs, and needs its cache."""

    def engine_for(self, call: ModelFunctionCall, replica: Replica) -> ReplicaEngine:
        """Return a replica's engine; its drafter has received the peers' responses.

        Raises:
            GenerationError: for a layout that cannot generate, or cannot draft as the algorithm asks.
        """
        self.receive_history()
        axis = replica.layout.axis_without_generation
        if axis is not None:  # the plan gives another layout, which no callback made real
            raise GenerationError(
                f"{call.name} cannot generate in the layout {replica.layout}; give it one with {axis}=1, and leave "
                f"reallocation on"
            )
        known = self._engines.get(id(replica.model))
        if known is None:
            known = self._engines[id(replica.model)] = self._factory.build(call, replica)
            known.engine.partners = {role: self._factory.build_partner(call, replica, role) for role in call.partners}
        return known

    def send_history(self, generator: ReplicaEngine, run: int, index: int) -> None:
        """Send the peers' drafters the responses of call number ``index`` of a run, without waiting."""
        drafter, peers = generator.drafter, generator.peers
        if peers and drafter is not None and drafter.exchanges:
            self._context.mailbox.send(peers, FrameKind.HISTORY, run, index, encode_message(drafter.news()))
            self._expected.append((drafter, peers, run, index))

    def receive_history(self, *, before: int | None = None) -> None:
        """Give drafters the peers' responses of runs before ``before``, None: of all runs; waits for them."""
        due = [expected for expected in self._expected if before is None or expected[2] < before]
        for drafter, peers, run, index in due:
            for peer in peers:
                content = self._context.mailbox.receive(FrameKind.HISTORY, run, index, peer)
                drafter.receive_news(decode_message(content))
        self._expected = self._expected[len(due) :]

    def forget(self) -> None:
        """Drop the engines of the plan before, and keep their drafters for the next one's."""
        self.receive_history()
        self._factory.forget(self._engines.values())
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
            if "keeps_cache" in generator.engine.capabilities:
                generator.release()
                free_merged(generator.replica.model)

    def close(self) -> None:
        """Free kept caches, and end the processes of this rank's engines; a later call starts them again."""
        self.free_caches()
        self._factory.close()
