"""Predicted and measured peak bytes of a plan.

The measurement observes every operation, which slows a run. So it is a separate run with short responses.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

from benchmarks.plan_turn import Arm, Readings, Workload, make_module, make_prompts
from benchmarks.ranks import gather_from_ranks

RESPONSE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Peak of one rank over the calls of an iteration and the transitions between them."""

    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Predicted over measured bytes, minus 1."""
        return self.predicted / self.measured - 1


def compare_peaks(arm: Arm, work: Workload) -> tuple[PeakBytes, ...]:
    """Train for two iterations, the second with all replicas in place; return the peaks of all ranks. Collective."""
    from benchmarks.workload import make_trainer
    from lightning_realloc import MemoryMonitor, ReallocStrategy
    from lightning_realloc.runtime.measure.memory_stats import StorageMeter
    from lightning_realloc.strategies.pool.memory_check import describe_roles
    from lightning_realloc.tuning.memory import parts as memory_parts
    from lightning_realloc.tuning.memory.forecast import forecast_memory

    work = replace(work, new_tokens=min(work.new_tokens, RESPONSE_TOKENS))
    gc.collect()
    standing = StorageMeter()  # tensors left over from other turns
    standing.start()
    standing.stop()
    monitor = MemoryMonitor()
    noted = Readings(rollouts=[{}])
    module, prompts = make_module(work, noted), make_prompts(work)
    strategy = ReallocStrategy(plan=arm.plan, overlap=arm.overlap)
    trainer = make_trainer(strategy=strategy, callbacks=[monitor], max_steps=2)
    trainer.fit(module, prompts)
    options = module.train_options_of("actor")
    load = memory_parts.Workload(
        num_sequences=work.num_prompts, prompt_tokens=work.prompt_tokens, response_tokens=work.new_tokens,
        micro_batch_tokens=options.micro_batch_tokens_on("cpu"), num_minibatches=options.num_minibatches,
    )  # fmt: skip
    forecast = forecast_memory(
        strategy.pool.dataflow, strategy.plan, describe_roles(module.roles(), {}),
        memory_parts.MemorySettings(shares_memory=True, builds_on_device=True), load, ranks=(trainer.global_rank,),
    )  # fmt: skip
    measured = max(*monitor.phases.values(), *monitor.transitions.values()) - standing.current_bytes
    predicted = forecast.iteration_peak.parts.total
    return tuple(gather_from_ranks(PeakBytes(predicted, measured)))
