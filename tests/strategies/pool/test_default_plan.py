"""A run without a plan takes one that fits, and says so; a later Trainer goes on with it."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.generation import SamplingParams
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.largest_workload import largest_workload
from lightning_realloc.tuning.memory.forecast import SET_UP, forecast_memory
from lightning_realloc.tuning.search.default_plan import largest_by_phase
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

ROWS = [{"prompt": "abcdefgh"}] * 16


class _Messages(logging.Handler):
    """Keeps the texts of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(record.getMessage())


def _fit(module: Any, memory: int | None = None, *, num_ranks: int = 2, plan: Any = "heuristic", **options: Any) -> Any:
    """Train; return the strategy."""
    strategy = ReallocStrategy(plan, memory_per_device=memory)
    trainer = runs.trainer(strategy, num_ranks, max_steps=1, **options)
    trainer.fit(module, PromptDataModule(ROWS, batch_size=8, tokenizer=byte_tokenizer()))
    return strategy


class _SetHeuristic(Callback):
    """Asks for the heuristic plan after an iteration."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Set the plan."""
        trainer.strategy.set_plan("heuristic")


def _module() -> Any:
    config: Any = tiny_model("llama").config
    return runs.grpo(actor=config, reference=config, sampling=SamplingParams(n=2, max_new_tokens=64))


def _needed(strategy: ReallocStrategy) -> int:
    """Return the bytes that a run's plan needs for its longest samples."""
    builder = strategy._placed.builder()
    trainer = strategy.connected_module.trainer
    workload = largest_workload(builder.module, trainer, builder.dataflow.trained_roles)
    assert workload is not None
    forecast = forecast_memory(
        builder.dataflow,
        strategy.plan,
        builder.describe_roles(),
        builder.memory_settings(),
        workload,
        ranks=range(builder.facts.world_size),
    )
    return max(size for phase, size in largest_by_phase(forecast).items() if phase != SET_UP)


def _run_with_less_and_less_memory() -> tuple[list[str], list[str], list[int], int]:
    """Return plans, messages of the choice, and bytes of runs; and the device's bytes of all but the first."""
    messages, logger = _Messages(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(messages)
    first = _fit(_module())
    memory, module = _needed(first), _module()  # all of it would be filled
    second = _fit(module, memory)
    third = _fit(module)
    logger.removeHandler(messages)
    plans = [one.plan.table() for one in (first, second, third)]
    chosen = [text for text in messages.texts if text.startswith("the heuristic plan needs")]
    return plans, chosen, [memory, _needed(second)], memory


def test_a_run_without_a_plan_takes_one_that_fits_and_a_later_trainer_goes_on_with_it(workers: WorkerPool) -> None:
    found = workers.run(_run_with_less_and_less_memory, world_size=2, init_process_group=False, deadline_s=90.0)
    for plans, _, needed, memory in found:
        heuristic, chosen, later = plans
        assert chosen != heuristic and later == chosen
        assert needed[1] <= 0.9 * memory < needed[0]
    assert found[0][0] == found[1][0]
    (text,) = found[0][1]
    assert "and plans may fill" in text and "took one that needs" in text and "actor.train" in text


def _plans_of_one_budget() -> list[str]:
    """Return the plans of a fit, a validation and a change to the heuristic plan; the first one must save memory."""
    memory = _needed(_fit(_module(), num_ranks=1))
    fitted = _fit(_module(), memory, num_ranks=1)
    validated = ReallocStrategy(memory_per_device=memory)
    data = PromptDataModule(ROWS, val_data=ROWS, batch_size=8, tokenizer=byte_tokenizer())
    runs.trainer(validated, 1, limit_val_batches=1).validate(_module(), data, verbose=False)
    changed = _fit(_module(), memory, num_ranks=1, plan="static", callbacks=[_SetHeuristic()])
    assert any(call.gradient_checkpointing or call.micro_batch_tokens for _, call in fitted.plan.calls)
    return [one.plan.digest for one in (fitted, validated, changed)]


def test_validation_and_set_plan_choose_the_plan_of_a_fit(workers: WorkerPool) -> None:
    (plans,) = workers.run(_plans_of_one_budget, world_size=1, init_process_group=False)
    assert len(set(plans)) == 1
