"""Run generating calls on this rank: chunks that are sent meanwhile, and samples that are carried over."""

from __future__ import annotations

import time
from typing import Any

from lightning_realloc.batch.samples import EXPERTS, Divided, Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.loop.streaming import PartialResults
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_factory import ReplicaEngine
from lightning_realloc.strategies.calls.engine_pool import EnginePool
from lightning_realloc.strategies.calls.lockstep import PeerFailure
from lightning_realloc.strategies.calls.metrics import IdleClock, speculation_metrics
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.iteration_report import IterationReport
from lightning_realloc.strategies.pool.replica import Replica


class GenerateCalls:
    """Runs generating calls."""

    def __init__(self, context: CallContext, engines: EnginePool, idle: IdleClock) -> None:
        self._context, self._engines, self._idle = context, engines, idle

    def run(self, call: ModelFunctionCall, replica: Replica, data: IterationData) -> Samples | None:
        """Return the samples that this rank generates; chunks of them are sent as soon as they are full.

        Stages of a pipeline before the last return None.
        """
        prompts = data.inputs(call)
        if prompts is None:
            prompts = data.table(call).known.select([])
        replica_engine = self._engines.engine_for(call, replica)
        replica_engine.begin(data, data.index(call))
        engine, chunked = replica_engine.engine, data.chunked(call)
        if self._context.algorithm.generation_options.router_replay:
            engine.record_experts(EXPERTS in call.produces and self._context.algorithm.training_now)
        shared = None if chunked is None else PartialResults(chunked.num_chunks, chunked.send)
        self._context.mailbox.record.follow(engine.progress)
        self._engines.is_generating = True
        try:
            keeps = self._engines.keeps_caches
            reading = self._context.reading(call, replica, merges=engine.merges_adapters, keeps_merged=keeps)
            with reading, engine.sharing(shared):
                began_at = time.monotonic()
                made = self._generate(call, replica_engine, prompts)
                seconds = time.monotonic() - began_at
            if made is None:
                return None
            self._engines.send_history(replica_engine, data.run, data.index(call))
            if (waits := engine.waits.waits()) is not None:
                self._context.mailbox.record.add_environment_waits(waits)
                data.report.maxima[f"waiting_share/{call.name}"] = waits.idle_s / seconds
            self._record_metrics(call.name, replica, replica_engine, data.report)
            self._idle.add(replica_engine.seconds_waited)
            if replica_engine.updates is not None:
                replica_engine.updates.end()
            if isinstance(made, Divided):
                data.carry(call, made.carried)
                return made.finished
            return made
        except PeerFailure:
            raise
        except Exception:
            if replica_engine.lockstep is not None:
                replica_engine.lockstep.give_up()
            raise
        finally:
            self._engines.is_generating = False
            # A cache that has grown rounds logprobs differently, in the last bit, than that of a run resumed here, so
            # deterministic runs free it. Longer held-out samples must not leave a larger one to training.
            if not self._engines.keeps_caches or not self._context.algorithm.training_now:
                replica_engine.release()

    def _generate(
        self, call: ModelFunctionCall, generator: ReplicaEngine, prompts: Samples
    ) -> Samples | Divided | None:
        """Run the algorithm's method; a pipeline's stages before the last follow that one, and return None."""
        stages, method = generator.stages, self._context.method_of(call)
        if stages is not None and stages.is_follower:
            if not stages.follow():
                raise PeerFailure
            return None
        has_failed = True
        try:
            made: Samples | Divided = method(generator.engine, prompts)
            has_failed = False
        finally:
            if stages is not None:
                stages.leave(has_failed=has_failed)
        return made

    def _record_metrics(self, call: str, replica: Replica, generator: ReplicaEngine, report: IterationReport) -> None:
        """Report the metrics of a call; of tensor-parallel ranks, which make the same samples, only the first does."""
        waits = generator.engine.waits
        if generator.engine.partners:
            report.maxima[f"partner_s/{call}"] = waits.reply_s
        if replica.layout.coordinate(self._context.rank).tp:
            return
        if (given := generator.engine.given_weights) is not None:
            trainer, rank = self._context.algorithm.trainer, self._context.rank
            node = range(trainer.world_size // trainer.num_nodes * trainer.node_rank, rank)
            is_first = not any(other in node for other in replica.layout.ranks)
            report.sums[f"given_bytes/{call}"] = float(given.num_bytes)
            report.sums[f"given_bytes_minimum/{call}"] = float(given.num_bytes * is_first)
            report.maxima |= {f"given_s/{call}": given.seconds, f"given_check_s/{call}": given.check_s}
        if generator.engine.partners:
            report.sums[f"partner_replies/{call}"] = float(waits.num_replies)
            report.sums[f"partner_tokens/{call}"] = float(waits.num_reply_tokens)
        algorithm, stats, moved = self._context.algorithm, generator.engine.stats, generator.engine.migration_stats
        if algorithm.speculation is not None:
            report.sums |= speculation_metrics(call, stats)
        if algorithm.generation_options.max_cache_bytes is not None:
            report.sums[f"preemptions/{call}"] = float(stats.num_preemptions)
        if self._context.device.type == "cuda" and "captures" in generator.engine.capabilities:
            report.maxima[f"capture_s/{call}"] = stats.capture_s
        if (counts := generator.engine.expert_counts) is not None:
            report.expert_counts[call] = counts.cpu()
        if moved is not None:
            report.sums[f"moved_samples/{call}"] = float(moved.num_received)
        if generator.updates is not None:
            report.sums[f"weight_updates/{call}"] = float(generator.updates.num_taken)


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
