"""Generation exactly one step ahead, compared with on-policy runs over chosen batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_realloc.batch.samples import Samples
from lightning_realloc.callbacks import AutoTuner
from lightning_realloc.strategies import ReallocStrategy
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerFailure, WorkerPool

TOGETHER = {"actor.generate": "dp2", "reference.infer": "dp2", "actor.train": "dp2"}
APART = {"actor.generate": "dp1@0", "reference.infer": "dp1@1", "actor.train": "dp1@1"}


@dataclass
class Chosen:
    """Some of the batches, in this order."""

    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Samples]:
        batches = list(Batches(4))
        return iter([batches[number] for number in self.numbers])


@dataclass
class Clock:
    """When generations ended and first losses were computed here, on the clock that ranks of one host share."""

    generated: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)


def times_of(algorithm: str, settings: dict[str, Any], plan: dict[str, str]) -> Clock:
    """Train four batches with a slow generation that runs ahead, and return this rank's times."""
    clock = Clock()
    module: Any = {"grpo": runs.grpo, "ppo": runs.ppo}[algorithm](**settings)
    roll_out, actor_loss = module.roll_out, module.actor_loss

    def slow_roll_out(*args: Any) -> Any:
        time.sleep(0.5)
        made = roll_out(*args)
        clock.generated.append(time.monotonic())
        return made

    def timed_loss(*args: Any) -> Any:
        clock.trained.append(time.monotonic())
        return actor_loss(*args)

    module.roll_out, module.actor_loss = slow_roll_out, timed_loss
    runs.train(module, ReallocStrategy({"calls": plan}, max_staleness=1), 2, Batches(4))
    return clock


class Stop(Callback):
    """Ends a run after some iterations, in the middle of an epoch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Ask for the end."""
        trainer.should_stop = trainer.global_step == self.after


def run_twice(plan: dict[str, str], settings: dict[str, Any]) -> tuple[list[float | None], list[int]]:
    """Stop in the middle of an epoch, fit again, and return what was logged of staleness, and the steps."""
    module, record = runs.grpo(**settings), runs.Record()
    trainer = runs.trainer(
        ReallocStrategy({"calls": plan}, max_staleness=1), 2, callbacks=[Stop(2), record], max_epochs=2
    )
    trainer.fit(module, Batches(4))
    trainer.should_stop = False
    trainer.fit(module, Batches(4))
    return [step.get("staleness") for step in record.logged], record.steps


def run_some(plan: dict[str, str], staleness: int, numbers: tuple[int, ...], options: dict[str, Any]) -> Outcome:
    """Return what GRPO made of these batches."""
    epochs = options.pop("max_epochs", 1)
    overlap = options.pop("overlap", "iterations")
    strategy = ReallocStrategy({"calls": plan}, max_staleness=staleness, overlap=overlap)
    callbacks = [AutoTuner()] if options.pop("tune", False) else []
    module = runs.grpo(**options)
    batches: Any = Chosen(numbers)
    return runs.train(module, strategy, 2, batches, max_epochs=epochs, callbacks=callbacks)


def run(workers: WorkerPool, plan: dict[str, str], staleness: int, *numbers: int, **options: Any) -> Outcome:
    """Return the first rank's outcome."""
    outcome: Outcome = workers.run(
        run_some, plan, staleness, numbers, options, world_size=2, init_process_group=False, deadline_s=60
    )[0]
    return outcome


def test_responses_come_from_the_policy_one_step_before(workers: WorkerPool) -> None:
    ahead = run(workers, TOGETHER, 1, 0, 1, 2, 3)
    assert len(ahead.tokens) == 4  # every batch was trained on, in its order
    # Batches 0 and 1 are answered by the policy as it was given, batch 2 by that which learnt from batch 0 alone.
    first, skipped = run(workers, TOGETHER, 0, 1), run(workers, TOGETHER, 0, 0, 2)
    assert ahead.tokens[0] == skipped.tokens[0]
    assert ahead.tokens[1] == first.tokens[0]
    assert ahead.tokens[2] == skipped.tokens[1]
    # Batch 3 is answered by what learnt from batch 1 too, though from responses of the policy before.
    assert ahead.tokens[3] != run(workers, TOGETHER, 0, 0, 1, 3).tokens[2]
    # Nothing is trained on in the first step; two batches in the last, which logs the later one's.
    assert [step.get("staleness") for step in ahead.logged] == [None, 0.0, 1.0, 1.0]
    assert ahead.steps == [1, 2, 3, 4]


@pytest.mark.parametrize("overlap", ["iterations", "calls", "none"])
def test_ranks_of_its_own_change_nothing_but_the_time(workers: WorkerPool, overlap: str) -> None:
    together = run(workers, TOGETHER, 1, 0, 1, 2, 3)
    apart = run(workers, APART, 1, 0, 1, 2, 3, overlap=overlap)
    assert apart.tokens == together.tokens
    assert apart.rewards == together.rewards
    assert runs.largest_difference(apart.weights, together.weights) < 1e-4


@pytest.mark.parametrize(
    ("algorithm", "settings"), [("grpo", {}), ("grpo", {"kl_place": "reward"}), ("grpo", {"kl_coef": 0.0}), ("ppo", {})]
)
def test_one_batch_is_trained_on_while_the_next_is_generated(
    workers: WorkerPool, algorithm: str, settings: dict[str, Any]
) -> None:
    plan = {name: layout for name, layout in APART.items() if settings.get("kl_coef") != 0.0 or name[0] != "r"}
    if algorithm == "ppo":
        plan |= {"critic.infer": "dp1@1", "critic.train": "dp1@1"}
    generating, training = workers.run(
        times_of, algorithm, settings, plan, world_size=2, init_process_group=False, deadline_s=60
    )
    assert (len(generating.generated), len(training.trained)) == (4, 4)
    # While the second and third batch are generated, the first and second are learnt from.
    for trained, generated in zip(training.trained[:2], generating.generated[1:3], strict=True):
        assert trained < generated


def test_an_epoch_ends_with_every_batch_trained_on(workers: WorkerPool) -> None:
    ahead = run(workers, TOGETHER, 1, 0, 1, max_epochs=2)
    assert len(ahead.tokens) == 4
    # The second epoch begins with a policy that learnt from both batches, so its first responses are not stale.
    assert [step.get("staleness") for step in ahead.logged] == [None, 1.0, 1.0, 1.0]
    one_epoch = run(workers, TOGETHER, 1, 0, 1)
    assert ahead.tokens[:2] == one_epoch.tokens


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.0}])
def test_a_batch_that_waits_when_a_run_stops_is_left_out(workers: WorkerPool, settings: dict[str, Any]) -> None:
    plan = {name: layout for name, layout in APART.items() if settings == {} or name[0] != "r"}
    staleness, steps = workers.run(run_twice, plan, settings, world_size=2, init_process_group=False, deadline_s=60)[0]
    assert steps[:2] == [1, 2]
    assert staleness[:2] == [None, 0.0]
    assert staleness[2] is None  # the second fit begins with a batch of its own
    assert set(staleness[3:]) <= {0.0, 1.0} and len(staleness) > 4


def test_a_policy_that_does_not_learn_gives_the_same_ahead(workers: WorkerPool) -> None:
    ahead, on_policy = (run(workers, TOGETHER, staleness, 0, 1, 2, learning_rate=0.0) for staleness in (1, 0))
    assert ahead.tokens == on_policy.tokens
    assert ahead.rewards == on_policy.rewards


def test_what_cannot_work_is_refused(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="max_staleness=2: generation runs at most one step ahead; use 0 or 1"):
        run(workers, TOGETHER, 2, 0)
    with pytest.raises(WorkerFailure, match="tune with max_staleness=0 and give the saved plan"):
        run(workers, TOGETHER, 1, 0, 1, tune=True)
