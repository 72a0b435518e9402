"""Engines ``"vllm"`` of the replicas on this rank. Starting vLLM takes minutes, so its processes outlive the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import GenerationError
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

    def _check(self, call: ModelFunctionCall, replica: Replica) -> None:
        """Refuse also layouts that vLLM cannot take weights from: tensor parallelism, several ranks of one server."""
        layout, options = replica.layout, self._algorithm.generation_options.vllm
        if layout.dims.tp > 1:
            raise GenerationError(
                f"{call.name} runs in the layout {layout}, and engine='vllm' takes over whole weights from each rank; "
                f"give it a layout with tp=1, such as dp{layout.dims.tp}, or use engine='native'"
            )
        if options is not None and options.address is not None and len(layout.ranks) > 1:
            raise GenerationError(
                f"{call.name} runs in the layout {layout} of {len(layout.ranks)} ranks, which would all give weights "
                f"to the server {options.address}; give it a layout of one rank, or leave address out"
            )
        super()._check(call, replica)

    def close(self) -> None:
        """End all processes; a later call starts them again."""
        for service in self._services.values():
            service.close()
