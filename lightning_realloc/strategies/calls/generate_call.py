"""Running generating calls on this rank: its engine, what is handed on meanwhile, and what is carried on afterwards."""

from __future__ import annotations

from typing import Any

import torch

from lightning_realloc.batch.samples import Divided, Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.strategies.calls.early_work import EarlyCalls
from lightning_realloc.strategies.calls.engines import EnginePool, ReplicaEngine
from lightning_realloc.strategies.calls.idle import IdleClock
from lightning_realloc.strategies.calls.lockstep import PeerFailure
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.precision import without_gradients
from lightning_realloc.strategies.pool.replica import Replica


class GenerateCalls:
    """Runs prompts through engines.

    Args:
        module: The algorithm; its methods do the work.
        pool: Its models.
        generators: Their engines.
        tails: Calls that a rank may go on to before all have generated; None: none may.
        idle: Learns how long this rank waited for samples.
        device: Of this rank.
    """

    def __init__(
        self,
        module: Any,
        pool: ModelPool,
        generators: EnginePool,
        tails: EarlyCalls | None,
        idle: IdleClock,
        *,
        device: torch.device,
    ) -> None:
        self._module, self._pool, self._engines = module, pool, generators
        self._tails, self._idle, self._device = tails, idle, device

    def share(self, call: ModelFunctionCall, replica: Replica, prompts: Samples, data: IterationData) -> Samples:
        """Return what this rank makes of its prompts; what is finished early is handed on at once."""
        generator = self._engines.of(call, replica, version=data.version)
        generator.begin(data.run, data.index(call))
        partial_results = PartialResults(data.routes.fusion.parts(call), lambda made: data.send_chunk(call, made))
        tail = (
            self._tails.of(call, data, partial_results)
            if self._tails is not None and generator.moves is not None
            else None
        )
        if data.routes.fusion.parts(call) > 1 or tail is not None:
            generator.engine.partial_results = partial_results
        try:
            precision, adapted = without_gradients(replica.model, self._device), self._pool.adapted_for
            with precision, generator.freed_for(tail), adapted(call, replica.model):
                made: Samples | Divided = getattr(self._module, call.method)(generator.engine, prompts)
            self._tell(call, replica, generator, data)
            if isinstance(made, Divided):
                data.carry(call, made.carried)
                return made.finished
            if tail is not None:
                data.record_early(tail.hand_in(call, made))
            return made
        except PeerFailure:
            raise
        except Exception:
            if generator.lockstep is not None:
                generator.lockstep.give_up()
            raise
        finally:
            generator.engine.partial_results = None
            # Training needs the memory more. And a cache that has grown rounds logprobs differently, in the last bit,
            # than the fresh one of a run that was resumed here.
            generator.engine.release()

    def _tell(self, call: ModelFunctionCall, replica: Replica, generator: ReplicaEngine, data: IterationData) -> None:
        """Tell peers' drafters what was made, and everybody what it took."""
        self._engines.tell(generator, data.run, data.index(call))
        data.facts |= self._engines.facts(call.name, replica)
        moved = generator.migration_stats
        self._idle.add(0.0 if moved is None else moved.waited_s)
