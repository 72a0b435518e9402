"""Run generating calls on this rank: engine, chunks that are sent meanwhile, and samples that are carried over."""

from __future__ import annotations

import torch

from lightning_realloc.batch.samples import Divided, Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.strategies.calls.engines import EnginePool, PeerFailure
from lightning_realloc.strategies.calls.infer_call import EarlyInference, InferCalls
from lightning_realloc.strategies.calls.metrics import IdleClock
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.precision import without_gradients
from lightning_realloc.strategies.pool.replica import Replica


class GenerateCalls:
    """Runs generating calls.

    Args:
        algorithm: Its methods generate.
        pool: The models.
        engines: Engines of the models' replicas.
        inference: Runs calls that a rank may start before all ranks have finished generating.
        idle: Clock of this rank's waiting.
        device: Device of this rank.
    """

    def __init__(
        self, algorithm: RunnableAlgorithm, pool: ModelPool, engines: EnginePool, inference: InferCalls,
        idle: IdleClock, *, device: torch.device,
    ) -> None:  # fmt: skip
        self._algorithm, self._pool, self._engines = algorithm, pool, engines
        self._inference, self._idle, self._device = inference, idle, device

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
            early = EarlyInference.from_fusion(call, data, self._pool, self._inference, partial_results)
        if num_chunks > 1 or early is not None:
            engine.partial_results = partial_results
        try:
            precision, adapted = without_gradients(replica.model, self._device), self._pool.adapted_for
            with precision, replica_engine.freed_for(early), adapted(call, replica.model):
                made: Samples | Divided = getattr(self._algorithm, call.method)(engine, prompts)
            self._engines.send_history(replica_engine, data.run, data.index(call))
            data.report.metrics |= self._engines.metrics(call.name, replica)
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
            engine.partial_results = None
            # Training needs the memory more. And a cache that has grown rounds logprobs differently, in the last bit,
            # than the fresh one of a run that was resumed here.
            engine.release()
