"""Curricula in training: rewards reach the data module on all ranks, and batches do not depend on ranks or plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from lightning_realloc import Curriculum, DynamicSampling, PromptDataModule
from lightning_realloc.strategies import ReallocStrategy
from tests.models import byte_tokenizer
from tests.strategies import runs
from tests.workers import WorkerPool

CURRICULUM = Curriculum(min_responses=2, revisit=0.0)


def of_prompt(prompts: Sequence[str], **columns: object) -> list[float]:
    """Reward half of the responses to odd prompts, and all to even ones."""
    return [float(int(prompt) % 2 == 0 or place % 2 == 0) for place, prompt in enumerate(prompts)]


def drawn(kind: str, plan: Any, settings: dict[str, Any]) -> tuple[list[list[int]], list[dict[str, float]]]:
    """Return the rows of the batches of eight iterations, and what each logged."""
    module = {"grpo": runs.grpo, "ppo": runs.ppo}[kind](reward=of_prompt, **settings)
    rows = [{"prompt": f"{number}"} for number in range(8)]
    sets = {"low": rows[:4], "high": rows[4:]}
    data = PromptDataModule(sets, batch_size=4, seed=1, tokenizer=byte_tokenizer(), curriculum=CURRICULUM)
    batches: list[list[int]] = []
    prepare = module.prepare_batch

    def noted(batch: Any) -> Any:
        batches.append([number % 8 for number in batch.ids.tolist()])
        return prepare(batch)

    module.prepare_batch, record = noted, runs.Record()
    trainer = runs.trainer(ReallocStrategy(plan), runs.world_size(), max_steps=8, max_epochs=-1, callbacks=[record])
    trainer.fit(module, data)
    return batches, record.logged


class _Log(DummyLogger):
    """Keeps the metrics of every iteration as a logger receives them."""

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.received.setdefault(step or 0, {}).update(metrics)


def logged_of_sets() -> list[list[str]]:
    """Return the sets with a logged reward in each iteration of one epoch, whose mix changes from one to the other."""
    rows = [{"prompt": f"{number}"} for number in range(8)]
    mix = [(0, {"low": 1.0, "high": 0.0}), (1, {"low": 0.0, "high": 1.0})]
    sets = {"low": rows[:4], "high": rows[4:]}
    data = PromptDataModule(sets, batch_size=2, seed=1, tokenizer=byte_tokenizer(), mix=mix)
    log = _Log()
    runs.trainer("realloc", 1, max_steps=3, logger=log, log_every_n_steps=1).fit(runs.grpo(reward=of_prompt), data)
    return [[name for name in received if name.startswith("set_reward/")] for received in log.received.values()]


def test_a_set_without_a_prompt_in_an_iteration_logs_no_reward(workers: WorkerPool) -> None:
    found = workers.run(logged_of_sets, world_size=1, init_process_group=False)
    assert found == [[["set_reward/low"], ["set_reward/high"], ["set_reward/high"]]]


def test_ranks_and_plans_draw_the_same_batches(workers: WorkerPool) -> None:
    (alone,) = workers.run(drawn, "grpo", "static", {}, world_size=1, init_process_group=False)
    plan = runs.calls(actor_generate="tp2", reference_infer="dp2", actor_train="fsdp2")
    together = workers.run(drawn, "grpo", plan, {}, world_size=2, init_process_group=False)
    assert all(batches == alone[0] for batches, _ in together)
    for logged in (alone[1], together[0][1]):
        names = ("curriculum/resting", "curriculum/with_signal", "set_reward/low", "set_share/high")
        assert [[metrics[name] for name in names] for metrics in logged] == [
            [metrics[name] for name in names] for metrics in alone[1]
        ]
    # After a pass of two batches, the four even prompts rest, and odd ones are drawn.
    assert alone[1][1]["curriculum/resting"] == 0.5
    assert sorted(alone[0][2]) == [1, 3, 5, 7]
    assert alone[1][2]["curriculum/with_signal"] == 1.0
    assert alone[1][2]["curriculum/difficulty"] == 0.5


def test_discarded_groups_and_single_responses_are_measured_too(workers: WorkerPool) -> None:
    refilled = {"dynamic_sampling": DynamicSampling(max_refills=1)}
    ((batches, _),) = workers.run(drawn, "grpo", "static", refilled, world_size=1, init_process_group=False)
    assert sorted(batches[2]) == [1, 3, 5, 7]
    ((batches, logged),) = workers.run(drawn, "ppo", "static", {}, world_size=1, init_process_group=False)
    assert logged[1]["curriculum/resting"] == 0.5 and sorted(batches[2]) == [1, 3, 5, 7]
    assert not math.isnan(logged[-1]["curriculum/difficulty"])
