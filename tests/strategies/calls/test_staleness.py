"""Generation k steps ahead gives the responses of on-policy runs over chosen batches.

Where weights arrive during generation, a run that takes the same versions after the same steps gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.batch.samples import Samples, samples_from_state
from lightning_realloc.callbacks import AutoTuner
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.resume.__main__ import run as resumed_differently
from tests.resume.cases import CASES, fit
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerFailure, WorkerPool

TOGETHER = {"actor.generate": "dp2", "reference.infer": "dp2", "actor.train": "dp2"}
APART = {"actor.generate": "dp1@0", "reference.infer": "dp1@1", "actor.train": "dp1@1"}


@dataclass
class Chosen:
    """Batches with these numbers, in this order."""

    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Samples]:
        batches = list(Batches(4))
        return iter([batches[number] for number in self.numbers])


def wait_for(file: Path) -> bool:
    """Wait for a file of another rank; return whether it came."""
    give_up_at = time.monotonic() + 30.0
    while not file.exists() and time.monotonic() < give_up_at:
        time.sleep(0.005)
    return file.exists()


def overlapping(algorithm: str, settings: dict[str, Any], plan: dict[str, str], folder: Path) -> tuple[list[bool], int]:
    """Train three batches, where a generation ends only after training on the batch before has begun.

    Returns:
        Whether it had begun in time, for every generation but the first one, and the number of losses.
    """
    module: Any = {"grpo": runs.grpo, "ppo": runs.ppo}[algorithm](**settings)
    roll_out, actor_loss = module.roll_out, module.actor_loss
    num_generations, num_losses, in_time = 0, 0, list[bool]()

    def late_roll_out(*args: Any) -> Any:
        nonlocal num_generations
        made = roll_out(*args)
        if num_generations > 0:
            in_time.append(wait_for(folder / f"trained {num_generations - 1}"))
        num_generations += 1
        return made

    def noted_loss(*args: Any) -> Any:
        nonlocal num_losses
        (folder / f"trained {num_losses}").touch()
        num_losses += 1
        return actor_loss(*args)

    module.roll_out, module.actor_loss = late_roll_out, noted_loss
    runs.train(module, ReallocStrategy({"calls": plan}, max_staleness=1), 2, Batches(3))
    return in_time, num_losses


class Stop(Callback):
    """Ends a run after some iterations, in the middle of an epoch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Request the end."""
        trainer.should_stop = trainer.global_step == self.after


class WaitingAtStart(Callback):
    """Records which samples wait to be trained on when a fit begins, by batch, as a checkpoint would."""

    def __init__(self) -> None:
        self.found: list[list[list[int]]] = []

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Record them."""
        states = trainer.strategy.runner.waiting_state()
        self.found.append([samples_from_state(state["batch"]).ids.tolist() for state in states])


def fit_three_times(folder: str) -> list[list[list[int]]]:
    """Stop in the middle of an epoch, fit again, and fit again from the checkpoint of the first end."""
    module, waiting = runs.grpo(), WaitingAtStart()
    strategy = ReallocStrategy({"calls": TOGETHER}, max_staleness=1)
    trainer = runs.trainer(strategy, 2, callbacks=[Stop(2), waiting], max_epochs=2)
    trainer.fit(module, Batches(4))
    trainer.save_checkpoint(folder)
    for resumed_from in (None, folder):
        trainer.should_stop = False
        trainer.fit(module, Batches(4), ckpt_path=resumed_from)
    return waiting.found


def run_twice(plan: dict[str, str], settings: dict[str, Any]) -> tuple[list[float | None], list[int]]:
    """Stop in the middle of an epoch and fit again; return the logged staleness and the steps."""
    module, record = runs.grpo(**settings), runs.Record()
    trainer = runs.trainer(
        ReallocStrategy({"calls": plan}, max_staleness=1), 2, callbacks=[Stop(2), record], max_epochs=2
    )
    trainer.fit(module, Batches(4))
    trainer.should_stop = False
    trainer.fit(module, Batches(4))
    return [step.get("staleness") for step in record.logged], record.steps


def run_some(plan: dict[str, str], staleness: int, numbers: tuple[int, ...], options: dict[str, Any]) -> Outcome:
    """Return the outcome of GRPO on these batches."""
    epochs = options.pop("max_epochs", 1)
    overlap = options.pop("overlap", "iterations")
    strategy = ReallocStrategy({"calls": plan}, max_staleness=staleness, overlap=overlap)
    callbacks = [AutoTuner()] if options.pop("tune", False) else []
    module = runs.grpo(**options)
    batches: Any = Chosen(numbers)
    return runs.train(module, strategy, 2, batches, max_epochs=epochs, callbacks=callbacks)


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(workers: WorkerPool) -> Run:
    """``run("together" or "apart", staleness, *batches, **options)`` returns the first rank's outcome, made once."""

    @cache
    def run_once(plan: str, staleness: int, *numbers: int, **options: Any) -> Outcome:
        layouts = {"together": TOGETHER, "apart": APART}[plan]
        outcome: Outcome = workers.run(
            run_some, layouts, staleness, numbers, options, world_size=2, init_process_group=False, deadline_s=60
        )[0]
        return outcome

    return run_once


@pytest.fixture(scope="module")
def initial(run: Run) -> Outcome:
    """The outcome of a policy that does not learn: its answers to all batches are those of the initial policy."""
    return run("together", 0, 0, 1, 2, 3, learning_rate=0.0)


def test_responses_come_from_the_policy_one_step_before(run: Run, initial: Outcome) -> None:
    ahead = run("together", 1, 0, 1, 2, 3)
    assert len(ahead.tokens) == 4  # every batch was trained on, in its order
    # The initial policy answers batches 0 and 1; the policy after training on batch 0 answers batch 2.
    skipped = run("together", 0, 0, 2)
    assert ahead.tokens[0] == skipped.tokens[0] == initial.tokens[0]
    assert ahead.tokens[1] == initial.tokens[1]
    assert ahead.tokens[2] == skipped.tokens[1] != initial.tokens[2]
    # The policy that answers batch 3 has also trained on batch 1, though on responses of an older policy.
    assert ahead.tokens[3] != run("together", 0, 0, 1, 3).tokens[2]
    # The first step trains on nothing; the last one trains on two batches and logs the later one's staleness.
    assert [step.get("staleness") for step in ahead.logged] == [None, 0.0, 1.0, 1.0]
    assert ahead.steps == [1, 2, 3, 4]


@pytest.mark.parametrize("overlap", matrix(["iterations", "calls", "none"], "iterations"))
def test_generation_on_separate_ranks_changes_no_result(run: Run, overlap: str) -> None:
    together = run("together", 1, 0, 1, 2, 3)
    apart = run("apart", 1, 0, 1, 2, 3, overlap=overlap)
    assert apart.tokens == together.tokens
    assert apart.rewards == together.rewards
    assert runs.mean_difference(apart.weights, together.weights) < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    matrix(
        [("grpo", {}), ("grpo", {"kl": KL(0.04, place="reward")}), ("grpo", {"kl_coef": 0.0}), ("ppo", {})],
        ("grpo", {"kl_coef": 0.0}),
        ("ppo", {}),
    ),
)
def test_training_on_a_batch_overlaps_generation_of_the_next(
    workers: WorkerPool, tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    plan = {name: layout for name, layout in APART.items() if settings.get("kl_coef") != 0.0 or name[0] != "r"}
    if algorithm == "ppo":
        plan |= {"critic.infer": "dp1@1", "critic.train": "dp1@1"}
    generating, training = workers.run(
        overlapping, algorithm, settings, plan, tmp_path, world_size=2, init_process_group=False, deadline_s=90
    )
    # Training on the first and second batch overlaps generation of the second and third.
    assert (generating, training) == (([True, True], 0), ([], 3))


@pytest.mark.exhaustive
def test_two_steps_ahead_responses_come_from_the_policy_two_steps_before(run: Run, initial: Outcome) -> None:
    ahead = run("together", 2, 0, 1, 3, 2, 0)
    assert len(ahead.tokens) == 5
    assert ahead.tokens[:3] == [initial.tokens[number] for number in (0, 1, 3)]
    assert ahead.tokens[3] == run("together", 0, 0, 2).tokens[1]  # the policy after training on batch 0
    assert [step.get("staleness") for step in ahead.logged] == [None, None, 0.0, 1.0, 2.0]
    assert ahead.steps == [1, 2, 3, 4, 5]
    apart = run("apart", 2, 0, 1, 3, 2, 0, overlap="calls")  # weights move between calls: the same run
    assert apart.tokens == ahead.tokens
    assert runs.mean_difference(apart.weights, ahead.weights) < 1e-6


def test_an_epoch_ends_with_every_batch_trained_on(run: Run, initial: Outcome) -> None:
    ahead = run("together", 1, 0, 1, max_epochs=2)
    assert len(ahead.tokens) == 4
    # The second epoch begins with a policy that has trained on both batches, so its first responses are not stale.
    assert [step.get("staleness") for step in ahead.logged] == [None, 1.0, 1.0, 1.0]
    assert ahead.tokens[:2] == initial.tokens[:2]
    assert ahead.tokens[2] != initial.tokens[0]


@pytest.mark.parametrize("settings", matrix([{}, {"kl_coef": 0.0}], {}))
def test_a_batch_that_waits_when_a_run_stops_is_left_out(workers: WorkerPool, settings: dict[str, Any]) -> None:
    plan = {name: layout for name, layout in APART.items() if settings == {} or name[0] != "r"}
    staleness, steps = workers.run(run_twice, plan, settings, world_size=2, init_process_group=False, deadline_s=60)[0]
    assert steps[:2] == [1, 2]
    assert staleness[:2] == [None, 0.0]
    assert staleness[2] is None  # the second fit begins with a batch of its own
    assert set(staleness[3:]) <= {0.0, 1.0} and len(staleness) > 4


@pytest.mark.exhaustive  # a run that resumes: below
def test_a_fit_begins_with_the_batch_of_its_own_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "stopped")
    first, again, resumed = workers.run(fit_three_times, folder, world_size=2, init_process_group=False)[0]
    assert (first, again) == ([], [])
    assert resumed == [list(Batches(4))[1].ids.tolist()]


def resume_on_one_rank(folder: str) -> list[dict[str, float]]:
    """Return what a run logs that continues on one rank from a checkpoint with a waiting batch."""
    case = replace(CASES["stale"], layout="one")
    return fit(case, folder, 2, 0)


def test_a_resumed_run_trains_on_the_batch_that_waited(workers: WorkerPool, tmp_path: Path) -> None:
    # Within an epoch; `make resume` resumes from other moments, too.
    assert resumed_differently(CASES["stale"], workers, tmp_path, moments=[2]) == []
    expected = workers.run(fit, CASES["stale"], str(tmp_path), 2, 0, world_size=2, init_process_group=False)[0]
    (found,) = workers.run(resume_on_one_rank, str(tmp_path), world_size=1, init_process_group=False)
    assert [step["staleness"] for step in found] == [step["staleness"] for step in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["reward"] == pytest.approx(theirs["reward"])


@pytest.mark.exhaustive  # with its own bound: above
@pytest.mark.parametrize("bounds", ["0", "1 3"])
def test_a_run_goes_on_with_another_bound(workers: WorkerPool, tmp_path: Path, bounds: str) -> None:
    case = CASES["two stale"]
    workers.run(fit, case, str(tmp_path), None, 0, world_size=2, init_process_group=False)
    for bound in map(int, bounds.split()):
        other = replace(case, options={"max_staleness": bound})
        logged = workers.run(fit, other, str(tmp_path), 2, 0, world_size=2, init_process_group=False)[0]
        ages = [step["staleness"] for step in logged if "staleness" in step]
        assert ages[0] <= 2.0 and ages[-1] == min(bound, 2), bound


@pytest.mark.exhaustive  # one that learns, whose first responses are those of one that does not: above
def test_a_policy_that_does_not_learn_gives_the_same_responses_one_step_ahead(run: Run, initial: Outcome) -> None:
    ahead = run("together", 1, 0, 1, 2, learning_rate=0.0)
    assert ahead.tokens == initial.tokens[:3]
    assert ahead.rewards == initial.rewards[:3]


def test_settings_that_cannot_run_ahead_are_refused(run: Run) -> None:
    for wrong in (-1, 1.5, True, "two"):
        with pytest.raises(ConfigError, match=f"max_staleness={wrong!r} must be a whole number of training steps"):
            ReallocStrategy(max_staleness=wrong)  # type: ignore[arg-type]
    for folder in (3, ""):
        with pytest.raises(ConfigError, match=f"replay_versions={folder!r} must be the folder"):
            ReallocStrategy(max_staleness=2, replay_versions=folder)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="they arrive between calls; use max_staleness of 2 or more"):
        ReallocStrategy(max_staleness=1, replay_versions="runs/x")
    with pytest.raises(WorkerFailure, match="tune with max_staleness=0 and give the saved plan"):
        run("together", 1, 0, 1, tune=True)
