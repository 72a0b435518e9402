"""Runs with a rollout budget train on every response once, and get the responses of runs without a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_realloc import GenerationOptions
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.generation import RolloutBudget, SamplingParams
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.calls.test_conversations import informed
from tests.strategies.pool.test_set_plan import Move
from tests.strategies.runs import Batches
from tests.workers import WorkerFailure, WorkerPool

SAMPLING = SamplingParams(n=2, max_new_tokens=40, stop_token_ids=tuple(range(112, 128)))
"""Responses have eight tokens on average."""
TALKING = SamplingParams(n=2, max_new_tokens=32, stop_token_ids=tuple(range(80, 128)))


def budget(**limits: Any) -> dict[str, Any]:
    """Return the settings of an algorithm with a budget."""
    return {"generation": GenerationOptions(rollout_budget=RolloutBudget(**limits))}


@dataclass
class Learnt:
    """Responses that a run trained on, on this rank."""

    responses: list[dict[int, list[int]]] = field(default_factory=list)
    """Sample id -> tokens, for every iteration."""
    objects: dict[int, Any] = field(default_factory=dict)
    """Sample id -> the prompt's text."""
    logged: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def all(self) -> dict[int, list[int]]:
        """All responses; each was trained on once."""
        merged: dict[int, list[int]] = {}
        for responses in self.responses:
            assert merged.keys().isdisjoint(responses)
            merged |= responses
        return merged


def noted(algorithm: type[Any]) -> type[Any]:
    """Return the algorithm, which records the samples that it trains on."""

    class Noted(algorithm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.learnt = Learnt()

        def summarize(self, samples: Samples) -> Mapping[str, Tensor]:
            self.learnt.responses.append(dict(zip(samples.ids.tolist(), runs.rows_of_tokens(samples), strict=True)))
            self.learnt.objects |= dict(zip(samples.ids.tolist(), samples.objects("prompt"), strict=True))
            summary: Mapping[str, Tensor] = super().summarize(samples)
            return summary

    return Noted


@dataclass
class SaveAfter(Callback):
    """Writes a checkpoint after an iteration."""

    step: int
    path: Path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Save."""
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Counted(Batches):
    """Batches whose place in the run Lightning can restore."""

    position = 0

    def __iter__(self) -> Iterator[Samples]:
        for index, batch in enumerate(super().__iter__()):
            if index >= self.position:
                self.position = index + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches were handed out."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after them."""
        self.position = state["position"]


def learn(
    name: str, layout: str, world_size: int, settings: dict[str, Any], *, batches: int = 4,
    strategy: dict[str, Any] | None = None, save: tuple[int, Path] | None = None, resume: Path | None = None,
    moves: Mapping[int, Any] | None = None,
) -> Learnt:  # fmt: skip
    """Return the result of a run of this many iterations."""
    algorithms = {"grpo": runs.RecordedGRPO, "ppo": runs.RecordedPPO}
    given = {"sampling": SAMPLING, "learning_rate": 1e-2, "tokenizer": runs.byte_tokenizer(), **settings}
    module = noted(algorithms[name])(
        runs.tiny_model("llama"), runs.low_tokens, reference=runs.tiny_model("llama", seed=1), **given
    )
    plan = "static" if world_size == 1 else runs.plan_of(module, layout)
    placed = ReallocStrategy(plan, **(strategy or {}))
    record = runs.Record()
    callbacks: list[Callback] = [record, *([SaveAfter(*save)] if save else []), Move(moves or {})]
    trainer = runs.trainer(placed, world_size, callbacks=callbacks)
    trainer.fit(module, Counted(batches), ckpt_path=resume)
    learnt: Learnt = module.learnt
    learnt.logged, learnt.weights = record.logged, placed.full_weights("actor")
    return learnt


def run(
    workers: WorkerPool, name: str, layout: str, world_size: int, settings: dict[str, Any], *, batches: int = 4
) -> Learnt:
    """Return the first rank's result, which is the same on every rank."""
    function = partial(learn, name, layout, world_size, settings, batches=batches)
    everyone = workers.run(function, world_size=world_size, init_process_group=False)
    assert all(learnt.responses == everyone[0].responses for learnt in everyone)
    first: Learnt = everyone[0]
    return first


@pytest.mark.parametrize("name", matrix(["grpo", "ppo"]))
def test_a_budget_that_is_never_spent_changes_nothing(workers: WorkerPool, name: str) -> None:
    never_spent = budget(tokens=10_000, seconds=1000.0)
    plain, bounded = (run(workers, name, "dp2", 2, each, batches=2) for each in ({}, never_spent))
    assert bounded.responses == plain.responses
    assert runs.largest_difference(bounded.weights, plain.weights) == 0.0
    for mine, others in zip(bounded.logged, plain.logged, strict=True):
        assert mine == others | {"carried_samples": 0.0, "staleness": 0.0}


@pytest.mark.parametrize(
    ("name", "layout", "environment"),
    matrix(
        [("grpo", "dp2", None), ("grpo", "fsdp2", None), ("ppo", "tp2", None), ("grpo", "dp2", informed)],
        ("grpo", "dp2", informed),
    ),
)
def test_responses_that_take_several_iterations_have_the_same_tokens(
    workers: WorkerPool, name: str, layout: str, environment: Any
) -> None:  # fmt: skip
    # The policy does not change, so every response is the same as without a budget, only later.
    settings: dict[str, Any] = {"learning_rate": 0.0, "environment": environment}
    settings["sampling"] = SAMPLING if environment is None else TALKING
    plain = run(workers, name, layout, 2, settings, batches=3)
    tokens = 30 if layout != "tp2" else 50
    pieces = run(workers, name, layout, 2, settings | budget(tokens=tokens), batches=3)
    carried = [step["carried_samples"] for step in pieces.logged]
    assert max(carried) > 0
    done, everything = pieces.all, plain.all
    assert all(done[sample_id] == everything[sample_id] for sample_id in done)
    assert len(done) == len(everything) - carried[-1]
    # Reward functions get the columns of a response's prompt in a later iteration, too.
    assert all(text == f"prompt {sample_id // 2}" for sample_id, text in pieces.objects.items())
    assert all(step.get("stopped/failure", 0.0) == 0.0 for step in pieces.logged)  # and so do environments
    assert pieces.logged[0]["staleness"] == 0.0 and max(step["staleness"] for step in pieces.logged) > 0.0


def test_samples_at_the_staleness_limit_are_finished_or_dropped(workers: WorkerPool) -> None:
    def run_with(late: Any) -> Learnt:
        settings = {"learning_rate": 0.0, **budget(tokens=20, max_staleness=1, late=late)}
        return run(workers, "ppo", "dp2", 2, settings)

    finished, dropped = run_with("finish"), run_with("drop")
    for step in (*finished.logged, *dropped.logged):
        assert step["carried_samples"] <= 12  # samples of one batch
    assert len(finished.all) == 48 - finished.logged[-1]["carried_samples"]
    left_out = sum(step["dropped_samples"] for step in dropped.logged)
    assert left_out > 0 and len(dropped.all) == 48 - dropped.logged[-1]["carried_samples"] - left_out
    assert "dropped_samples" not in finished.logged[0]
    assert all(finished.all[sample_id] == tokens for sample_id, tokens in dropped.all.items() if sample_id < 36)


@pytest.mark.exhaustive
def test_every_iteration_has_a_sample_for_every_mini_batch(workers: WorkerPool) -> None:
    settings = {**budget(tokens=1), "train_options": TrainOptions(num_minibatches=4)}
    learnt = run(workers, "grpo", "dp2", 2, settings)
    assert all(len(responses) >= 4 for responses in learnt.responses)
    assert min(step["carried_samples"] for step in learnt.logged) > 0


def moved(plans: Mapping[int, Any]) -> Learnt:
    """Return the result of a run whose plan changes after these iterations."""
    return learn("grpo", "dp2", 2, {"learning_rate": 0.0, **budget(tokens=30)}, moves=plans)


@pytest.mark.exhaustive  # under the same plan: below
def test_carried_samples_continue_under_another_plan(workers: WorkerPool) -> None:
    plans = {
        step: {"calls": {"actor.generate": layout, "reference.infer": "dp2", "actor.train": "dp2"}}
        for step, layout in ((1, "dp1@1"), (2, "tp2"))
    }
    learnt: Learnt = workers.run(moved, plans, world_size=2, init_process_group=False)[0]
    plain = run(workers, "grpo", "dp2", 2, {"learning_rate": 0.0}).all
    assert all(step["carried_samples"] > 0 for step in learnt.logged[:2])
    assert all(plain[sample_id] == tokens for sample_id, tokens in learnt.all.items())
    assert len(learnt.all) == len(plain) - learnt.logged[-1]["carried_samples"]


def resumed(folder: str) -> list[Learnt]:
    """Return a straight run, and one that resumes after its second iteration."""
    path = Path(folder) / "half"
    straight = learn("grpo", "dp2", 2, budget(tokens=40), save=(2, path))
    return [straight, learn("grpo", "dp2", 2, budget(tokens=40), resume=path)]


@pytest.mark.exhaustive  # with parts of responses: test_learned_parts.py
def test_a_resumed_run_continues_the_carried_samples(workers: WorkerPool, tmp_path: Path) -> None:
    straight, later = workers.run(resumed, str(tmp_path), world_size=2, init_process_group=False)[0]
    assert straight.logged[1]["carried_samples"] > 0
    assert later.responses == straight.responses[2:]
    assert later.logged == straight.logged[2:]
    assert runs.largest_difference(later.weights, straight.weights) == 0.0


def refused(strategy: dict[str, Any]) -> None:
    """Fit with a budget under a strategy that does not support it."""
    learn("grpo", "dp2", 2, budget(tokens=40), strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"max_staleness": 1}, r"which max_staleness generates before .* use ReallocStrategy\(max_staleness=0\)"),
        ({"generation_chunks": 2}, r"generation_chunks=2 sends .* use ReallocStrategy\(generation_chunks=1\)"),
    ],
)
def test_strategies_that_do_not_support_a_budget_are_refused(
    workers: WorkerPool, strategy: dict[str, Any], message: str
) -> None:  # fmt: skip
    with pytest.raises(WorkerFailure, match=message):
        workers.run(refused, strategy, world_size=2, init_process_group=False)
