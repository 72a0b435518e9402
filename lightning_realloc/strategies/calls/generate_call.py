"""Run generating calls on this rank: engine, chunks that are sent meanwhile, and samples that are carried over."""

from __future__ import annotations

from lightning_realloc.batch.samples import Divided, Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engines import EnginePool, PeerFailure
from lightning_realloc.strategies.calls.infer_call import EarlyInference, InferCalls
from lightning_realloc.strategies.calls.metrics import IdleClock
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.pool.replica import Replica


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
        if num_chunks > 1 or early is not None:
            engine.partial_results = partial_results
        try:
            with self._context.reading(call, replica), replica_engine.freed_for(early):
                made: Samples | Divided = self._context.method_of(call)(engine, prompts)
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
