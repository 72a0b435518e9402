"""Engines ``"vllm"`` of the replicas on this rank. Starting vLLM takes minutes, so its processes outlive the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_factory import EngineFactory, ReplicaEngine
from lightning_realloc.strategies.calls.weight_updates import WeightUpdates
from lightning_realloc.strategies.pool.replica import Replica

if TYPE_CHECKING:
    from lightning_realloc.generation.vllm.service import VLLMService


class VLLMEngines(EngineFactory):
    """Builds engines on one vLLM per role."""

    def __init__(self, context: CallContext) -> None:
        super().__init__(context)
        self._services: dict[tuple[str, int], VLLMService] = {}
        """(Role, slots) -> its vLLM; one for each role."""

    def _build(
        self, replica: Replica, peers: tuple[int, ...], max_slots: int, updates: WeightUpdates | None
    ) -> ReplicaEngine:
        """Return a replica's engine, on the vLLM of its role if that has as many slots."""
        from lightning_realloc.generation.vllm.vllm_engine import VLLMEngine

        key = replica.role, max_slots
        for other in [known for known in self._services if known[0] == replica.role and known != key]:
            self._services.pop(other).close()
        options = self._algorithm.generation_options
        engine = VLLMEngine(
            replica.model,
            tokenizer=self._algorithm.tokenizer,
            max_slots=max_slots,
            max_cache_bytes=options.max_cache_bytes,
            options=options.vllm,
            service=self._services.get(key),
        )
        self._services[key] = engine.service
        return ReplicaEngine(replica=replica, engine=engine, peers=peers, updates=updates)

    def close(self) -> None:
        """End all processes; a later call starts them again."""
        for service in self._services.values():
            service.close()
