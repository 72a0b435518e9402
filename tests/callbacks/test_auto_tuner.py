"""AutoTuner leaves training unchanged, commits the fastest measured plan, and resumes from a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.optim import SGD

from lightning_realloc import GenerationOptions
from lightning_realloc.algorithms.base.calls import train as trains
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.callbacks import AutoTuner, ParameterReallocation
from lightning_realloc.callbacks.iteration_clock import IterationClock, TimedIteration, mean_factors
from lightning_realloc.callbacks.tuning_report import Measured, comparison_table, describe_outcome
from lightning_realloc.callbacks.tuning_resume import reason_not_to_resume, tuning_settings
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Speculation
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.tuning.candidates import WorkUnit
from lightning_realloc.tuning.shapes.lengths import Lengths
from lightning_realloc.tuning.tuner import COUNTED_ITERATIONS, WARM_UP_ITERATIONS, Tuner
from lightning_realloc.tuning.tuner_actions import Candidate, Commit, Reading, Switch, TunerSettings
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.tuning.examples import PPO_FLOW
from tests.workers import WorkerPool

START = calls(actor_train="fsdp2", actor_generate="fsdp2", reference_infer="fsdp2")
IMPOSSIBLE = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp1@2")
FEW: dict[str, Any] = {"search_seconds": 0.3, "profile_seconds": 1.0, "max_overhead": 1.0, "max_trials": 2}
OTHER = calls(actor_train="dp2", actor_generate="dp2", reference_infer="tp2")
DESCENT = partial(SGD, lr=0.05, momentum=0.9)
SAMPLING = replace(runs.SAMPLING, max_new_tokens=4)
ITERATIONS = 28
"""At most: enough for times that settle as late as the tuner waits for."""
WORLD_SIZE = 2


@dataclass
class Kept:
    """Result of one run."""

    outcome: runs.Outcome
    plans: list[str] = field(default_factory=list)
    """Digest of the plan of every iteration."""
    digest: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    """Digest of a measured plan -> seconds."""
    best: str = ""
    tried: int = 0
    tunings: int = 0
    phase: str = ""
    has_profile: bool = False
    first_trial: tuple[str, int] | None = None


@dataclass
class Recording(runs.Record):
    """Callback that also ends a run under the committed plan, and writes checkpoints there and in the first trial.

    Args:
        first_trial: Digest of the plan of the first trial, and the number of iterations at its checkpoint.
    """

    ends: bool = False
    save: str | None = None
    tuner: Watching | None = None
    save_trial: str | None = None
    first_trial: tuple[str, int] | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Record, save and stop."""
        super().on_train_batch_end(trainer, *args)
        if self.save_trial is not None and self.first_trial is None and self._is_in_a_trial():
            trainer.save_checkpoint(self.save_trial)
            self.first_trial = (trainer.strategy.plan.digest, trainer.global_step)  # type: ignore[attr-defined]
        if self.ends and self._is_committed(trainer.strategy):
            if self.save is not None:
                trainer.save_checkpoint(self.save)
            trainer.should_stop = True

    def _is_committed(self, strategy: Any) -> bool:
        assert self.tuner is not None
        return self.tuner.tuner.phase == "watch" and self.tuner.plans[-1] == strategy.plan.digest

    def _is_in_a_trial(self) -> bool:
        assert self.tuner is not None
        return self.tuner.tuner.phase == "trial" and self.tuner.plans[-1] != self.tuner.plans[0]


class Watching(AutoTuner):
    """Records the plan of every iteration; on request, first proposes a plan that cannot be used."""

    def __init__(self, *, first: Any = None, **settings: Any) -> None:
        super().__init__(profile_cache="profiles", **settings)
        self.first = first
        self.plans: list[str] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Record the plan of the coming iteration."""
        self.plans.append(trainer.strategy.plan.digest)  # type: ignore[attr-defined]
        super().on_train_batch_start(trainer, *args)

    def _propose(self, seconds: float) -> tuple[list[Candidate], float | None]:
        found, predicted = super()._propose(seconds)
        first = [] if self.first is None else [Candidate(ExecutionPlan.from_mapping(self.first), 1e-9)]
        return [*first, *found], predicted


def train(tuner: Watching | None, plan: Any, steps: int, *, load: Any = None, **saving: Any) -> Kept:
    """Train GRPO for ``steps``, or until the end that :class:`Recording` finds; return the result."""
    record, module = Recording(tuner=tuner, **saving), runs.grpo(optimizer=DESCENT, sampling=SAMPLING)
    # With other settings a loss that only some ranks know is logged an iteration late.
    strategy = ReallocStrategy(plan, overlap="calls")
    callbacks = [record] if tuner is None else [tuner, record]
    trainer = runs.trainer(strategy, WORLD_SIZE, max_steps=steps, max_epochs=-1, callbacks=callbacks)
    epochs = Batches(1, size=3)  # every iteration ends an epoch, so that a run can be resumed after any of them
    trainer.fit(module, epochs, ckpt_path=load)
    kept = Kept(runs.Outcome(record.logged, record.steps, strategy.full_weights("actor"), module.tokens))
    if tuner is not None:
        found = tuner.tuner
        kept.plans, kept.digest, kept.best, kept.phase = (
            tuner.plans,
            strategy.plan.digest,
            found.best.plan.digest,
            found.phase,
        )
        kept.scores = {trial.plan.digest: trial.score for trial in found.trials}
        kept.has_profile = tuner.has_profile
        kept.tried, kept.tunings, kept.first_trial = found.num_tried, found.num_tunings, record.first_trial
    return kept


@dataclass
class Results:
    """Results of one rank's runs."""

    tuned: Kept
    """Begins with a slow plan, and tries an impossible one first."""
    written: str
    """File with its plan; empty if it kept the plan that it began with."""
    untuned: Kept
    committed: Kept
    """Continued from the end of the tuned run, for two iterations."""


def all_runs(folder: str) -> Results:
    """Train with a tuner and without one, and resume the tuned run from its end.

    A run of 1,000 iterations has time to measure passes.
    """
    os.chdir(folder)
    tuned = train(Watching(first=IMPOSSIBLE, **FEW), START, 1000, save="tuned.ckpt", ends=True, save_trial="trial.ckpt")
    file = Path("execution_plan.yaml")
    written = file.read_text() if file.exists() else ""
    done = len(tuned.outcome.steps)
    untuned = train(None, "heuristic", done)
    committed = train(Watching(**FEW), START, done + 2, load="tuned.ckpt")
    return Results(tuned, written, untuned, committed)


def continue_a_trial(folder: str) -> Kept:
    """Continue the tuned run from its first trial, until a plan is committed."""
    os.chdir(folder)
    return train(Watching(**FEW), START, ITERATIONS, load="trial.ckpt", ends=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of all runs."""
    return str(tmp_path_factory.mktemp("tuned"))


@pytest.fixture(scope="module")
def everyone(workers: WorkerPool, folder: str) -> list[Results]:
    """Return the results of every rank."""
    return workers.run(all_runs, folder, world_size=WORLD_SIZE, init_process_group=False, deadline_s=170.0)


@pytest.mark.slow
def test_a_tuned_run_gives_the_same_results_as_an_untuned_one(everyone: list[Results]) -> None:
    tuned, untuned = everyone[0].tuned, everyone[0].untuned
    assert tuned.outcome.tokens == untuned.outcome.tokens
    for ours, theirs in zip(tuned.outcome.logged, untuned.outcome.logged, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=1e-5)
        assert ours["reward"] == theirs["reward"]
    assert runs.largest_difference(tuned.outcome.weights, untuned.outcome.weights) <= 1e-5
    assert all(other.tuned.plans == tuned.plans and other.tuned.scores == tuned.scores for other in everyone)
    # The start and some other plans were measured; the impossible plan was not.
    assert tuned.has_profile
    assert tuned.tried >= 2 and len(tuned.scores) == tuned.tried and tuned.tunings == 1
    start = ExecutionPlan.from_mapping(START).digest
    assert tuned.plans[: WARM_UP_ITERATIONS + COUNTED_ITERATIONS] == [start] * (WARM_UP_ITERATIONS + COUNTED_ITERATIONS)
    assert tuned.plans[-1] == tuned.digest == tuned.best
    assert tuned.digest in (start, min(tuned.scores, key=tuned.scores.__getitem__))
    assert tuned.outcome.logged[-1]["tuner/trials"] == tuned.tried
    written = everyone[0].written
    if tuned.digest == start:
        assert not written, "nothing changed"
    else:
        assert ExecutionPlan.from_mapping(yaml.safe_load(written)).digest == tuned.digest
        assert written.startswith("# RecordedGRPO on 2 x cpu: ")


def test_a_resumed_run_keeps_its_committed_plan(everyone: list[Results]) -> None:
    # It is installed before the first iteration, and watched from there on.
    tuned, committed = everyone[0].tuned, everyone[0].committed
    assert committed.plans == [tuned.digest] * 2 and committed.phase == "watch"


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/tuning/test_tuner.py interrupts trials of a simulated run
def test_a_run_that_was_interrupted_in_a_trial_continues_tuning(
    workers: WorkerPool, folder: str, everyone: list[Results]
) -> None:
    tuned = everyone[0].tuned
    assert tuned.first_trial is not None
    interrupted, num_done = tuned.first_trial
    assert interrupted != ExecutionPlan.from_mapping(START).digest
    resumed = workers.run(continue_a_trial, folder, world_size=WORLD_SIZE, init_process_group=False, deadline_s=120.0)[
        0
    ]
    # That plan does not run again, the others do, and one is committed.
    assert interrupted not in resumed.plans
    assert resumed.tunings == 1 and resumed.digest == resumed.best
    straight = tuned.outcome.tokens[num_done:]
    num_both = min(len(straight), len(resumed.outcome.tokens))  # each run ends once its plan is committed
    assert num_both > 0 and straight[:num_both] == resumed.outcome.tokens[:num_both]


def too_short(folder: str) -> tuple[list[str], int, Any, list[str]]:
    """Return the plans of a run that is too short to be tuned, its tunings, their cost, and the files written."""
    os.chdir(folder)
    tuner = Watching(max_overhead=1.0)
    kept = train(tuner, START, 3)
    return kept.plans, kept.tunings, tuner.tuner.costs, [path.name for path in Path(folder).iterdir()]


def test_a_run_that_is_too_short_is_left_alone(workers: WorkerPool, tmp_path: Path) -> None:
    everyone = workers.run(too_short, str(tmp_path), world_size=WORLD_SIZE, init_process_group=False)
    for plans, tunings, costs, files in everyone:
        assert plans == [ExecutionPlan.from_mapping(START).digest] * 3
        assert (tunings, files) == (1, []) and set(costs.values()) == {0.0}


# ---- resuming from a checkpoint
@dataclass
class Runs:
    """Stand-in for a Trainer, its strategy and its pool, by what decides whether a checkpoint's tuning continues."""

    plan: ExecutionPlan
    world_size: int
    lightning_module: Any
    generation_chunks: int = 1

    @property
    def strategy(self) -> Runs:
        """The strategy."""
        return self

    @property
    def pool(self) -> Runs:
        """The pool, with the plan in use."""
        return self


def test_tuning_does_not_continue_from_a_checkpoint_of_another_run() -> None:
    plan, module = ExecutionPlan.from_mapping, runs.grpo()
    start = Runs(plan(START), 4, module)
    state = {
        "world_size": 4, "calls": [name for name, _ in start.plan.calls], "settings": tuning_settings(start),
        "tuner": Tuner(start.plan, TunerSettings(), None).state_dict(), "yardstick": {"plan": OTHER, "lengths": []},
    }  # fmt: skip
    assert reason_not_to_resume(state, start) is None
    assert reason_not_to_resume(state, Runs(plan(OTHER), 4, module)) is None  # an earlier tuning's start
    assert "tuned on 4 ranks, this run has 2" in str(reason_not_to_resume(state, Runs(plan(START), 2, module)))
    assert "another plan than the checkpoint's" in str(reason_not_to_resume(state, Runs(plan(IMPOSSIBLE), 4, module)))
    assert "this algorithm has actor.train" in str(
        reason_not_to_resume(state, Runs(plan(calls(actor_train="dp4")), 4, module))
    )


def test_tuning_does_not_continue_from_a_checkpoint_with_other_settings() -> None:
    plan = ExecutionPlan.from_mapping(START)
    settings = tuning_settings(Runs(plan, 4, runs.grpo()))
    state = {
        "world_size": 4, "calls": [name for name, _ in plan.calls], "settings": settings,
        "tuner": Tuner(plan, TunerSettings(), None).state_dict(), "yardstick": None,
    }  # fmt: skip
    reseeded = runs.grpo(sampling=replace(runs.SAMPLING, seed=7))
    assert reason_not_to_resume(state, Runs(plan, 4, reseeded)) is None
    bounded = runs.grpo(generation=GenerationOptions(max_cache_bytes=4096))
    drafting = runs.grpo(speculation=Speculation(drafter="ngram"))
    assert reason_not_to_resume(state, Runs(plan, 4, bounded)) == (
        "the checkpoint was tuned with max_cache_bytes=None, this run has max_cache_bytes=4096"
    )
    assert "tuned with speculation=None, this run has speculation=Speculation(" in str(
        reason_not_to_resume(state, Runs(plan, 4, drafting))
    )
    assert "generation_chunks=1, this run has generation_chunks=2" in str(
        reason_not_to_resume(state, Runs(plan, 4, runs.grpo(), generation_chunks=2))
    )
    state["settings"]["generation_parts"] = state["settings"].pop("generation_chunks")  # of an earlier release
    assert reason_not_to_resume(state, Runs(plan, 4, runs.grpo())) is None


# ---- watching
@dataclass
class Logged:
    """Stand-in for a trainer with logged metrics only."""

    callback_metrics: dict[str, Any]


class Tokens(WorkUnit):
    """Work unit of ten tokens."""

    def __init__(self) -> None:
        pass

    def work(self, lengths: Lengths) -> float:
        """Return tokens over ten."""
        return lengths.num_tokens / 10


def test_an_iteration_is_timed_by_the_rate_that_is_logged_after_the_next_one() -> None:
    callback = AutoTuner()
    callback._tuner, callback._work_unit = tuned(0.5), Tokens()
    callback._tuner.committed()
    told: list[Reading] = []
    callback._tuner.watched = told.append  # type: ignore[method-assign]
    for tokens, rate in ((10, 99.0), (20, 5.0), (40, 8.0)):  # the first rate is of an iteration under another plan
        lengths = Lengths((tokens // 2,), (tokens // 2,))
        callback._watch(Logged({"tokens_per_s": rate}), TimedIteration(7.0, lengths, {}))  # type: ignore[arg-type]
    assert told == [Reading(10 / 5.0, 1.0), Reading(20 / 8.0, 2.0)]
    callback._watch(Logged({}), TimedIteration(7.0, Lengths((5,), (5,)), {}))  # type: ignore[arg-type]
    assert told[-1] == Reading(7.0, 1.0)


@dataclass
class Stepping:
    """Stand-in for a Trainer: steps, lengths, and itself as the strategy and the runner of calls."""

    global_step: int = 0
    lengths: Lengths | None = None
    lightning_module: object = None
    seconds: dict[str, float] = field(default_factory=dict)
    callback_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def strategy(self) -> Stepping:
        """Strategy with the lengths of the latest iteration."""
        return self

    @property
    def runner(self) -> Stepping:
        """Runner with the seconds of calls."""
        return self


def test_a_batch_without_a_step_is_not_timed() -> None:
    clock, trainer = IterationClock(), Stepping()
    clock.start(trainer)
    trainer.seconds["actor.generate"] = 2.0  # dynamic sampling found too few groups
    assert clock.stop(trainer) is None
    clock.start(trainer)
    trainer.seconds |= {"actor.generate": 3.0, "actor.train": 0.5}
    trainer.callback_metrics |= {"seconds/actor.generate": 1.5, "partner_s/actor.generate": 0.5, "seconds/x": 1.0}
    trainer.global_step, trainer.lengths = 1, Lengths((5,), (5,))
    timed = clock.stop(trainer)
    assert timed is not None and timed.lengths == Lengths((5,), (5,))
    assert timed.calls == {"actor.generate": 1.0, "actor.train": 0.5}
    assert timed.factors == {"actor.generate": 1.5}  # 1 s of the actor, half a second of its partners
    assert mean_factors([timed, replace(timed, factors={"actor.generate": 2.5})]) == {"actor.generate": 2.0}
    trainer.lengths = None
    clock.start(trainer)
    trainer.global_step = 2
    with pytest.raises(ConfigError, match=r"NoneType has none: keep its inherited training_step"):
        clock.stop(trainer)


# ---- errors
class Classifier(nn.Module):
    """A model without a decoder's config."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)


class Shapeless(MultiModelModule):
    """An algorithm whose model has no information about layers."""

    def roles(self) -> tuple[Role, ...]:
        """Return the one model."""
        return (Role(name="actor", source=Classifier(), trained=True),)

    @trains("actor", needs="batch")
    def learn(self, actor: nn.Module, batch: Any) -> Any:
        """Never called."""


def refusals() -> list[str]:
    """Return the errors of runs with an AutoTuner in the wrong place."""
    told = []
    switched_off = ParameterReallocation(enabled=False)
    cases: list[tuple[Any, Any, list[Any]]] = [
        ("auto", runs.grpo(), []),
        (ReallocStrategy(), BoringModel(), []),
        (ReallocStrategy(), runs.grpo(), [switched_off]),
        (ReallocStrategy(), Shapeless(), []),
    ]
    for strategy, module, others in cases:
        with pytest.raises(ConfigError) as caught:
            runs.trainer(strategy, 1, callbacks=[AutoTuner(), *others]).fit(module, Batches(1))
        told.append(str(caught.value))
    return told


def test_a_run_without_anything_to_tune_is_refused(workers: WorkerPool) -> None:
    (told,) = workers.run(refusals, world_size=1, init_process_group=False, deadline_s=60.0)
    words = (
        "AutoTuner needs Trainer(strategy='realloc'), which can change plans; this Trainer has SingleDeviceStrategy",
        "BoringModel declares none; remove the callback",
        "ParameterReallocation(enabled=False) keeps every role in its training layout",
        "role 'actor' has no shape, which times are estimated from",
    )
    for message, expected in zip(told, words, strict=True):
        assert expected in message


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"give it a name that ends with \.yaml"):
        AutoTuner(save_to="plan.json")
    with pytest.raises(ConfigError, match="max_trials=0 must be a whole number"):
        AutoTuner(max_trials=0)
    for wrong in ({"max_overhead": "5%"}, {"margin": None}, {"drift_threshold": "big"}, {"save_to": 5},
                  {"profile_cache": ""}, {"seed": 1.5}, {"max_trials": True}):  # fmt: skip
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"{name}="):
            AutoTuner(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nothing is tuned yet"):
        _ = AutoTuner().tuner


# ---- messages and tables
FSDP, APART = (
    ExecutionPlan.static(PPO_FLOW, Layout.parse("fsdp4@0-3")),
    ExecutionPlan.from_mapping({
        "calls": {call.name: "dp2@2-3" if call.role == "critic" else "dp2@0-1" for call in PPO_FLOW.model_calls}
        | {"actor.train": {"layout": "fsdp4@0-3", "gradient_checkpointing": True}},
        "offload": ["reference"],
    }),
)  # fmt: skip


def tuned(seconds: float) -> Tuner:
    """Return a tuner that has measured a start of two seconds and one other plan."""
    tuner = Tuner(FSDP, TunerSettings(), None)
    tuner.measured([Reading(2.0, 1.0)] * (WARM_UP_ITERATIONS + COUNTED_ITERATIONS))
    tuner.searched([Candidate(APART, 1.0)], predicted_start_s=2.0, seconds=0.25)
    tuner.switched(0.05)
    while not isinstance(tuner.action, Switch | Commit):
        tuner.measured([Reading(seconds, 1.0)] * (tuner.action.skip + tuner.action.count))  # type: ignore[union-attr]
    return tuner


def test_the_summary_line_names_the_speedup_its_cost_and_the_changed_calls() -> None:
    head, tail = describe_outcome(tuned(0.5)).split("): ")
    assert head == (
        "AutoTuner commits a plan of 0.5 s an iteration, 4.00 times as fast as the one of 2 s it began with (1 other "
        "plan tried; tuning has cost 0.30 s: measuring and search 0.25 s, changes of plans 0.05 s, "
        "slower iterations 0.00 s"
    )
    assert tail.split(", ") == [
        "actor.generate fsdp4@0-3 -> dp2@0-1",
        "actor.train fsdp4@0-3 -> {gradient_checkpointing: true",
        "layout: fsdp4@0-3}",
        "critic.infer fsdp4@0-3 -> dp2@2-3",
        "critic.train fsdp4@0-3 -> dp2@2-3",
        "reference.infer fsdp4@0-3 -> dp2@0-1",
        "reward.infer fsdp4@0-3 -> dp2@0-1",
        "offload nothing -> reference",
    ]
    assert describe_outcome(tuned(2.0)).startswith("AutoTuner keeps the plan of 2 s an iteration: 1 other plan tried")
    assert describe_outcome(Tuner(FSDP, TunerSettings(), 12)) == (
        "AutoTuner does not tune this run: its 12 iterations are too few, 15 are the least"
    )


def test_the_table_has_predicted_and_measured_values_next_to_each_other() -> None:
    table = comparison_table(
        APART, Measured({"actor.generate": 0.25, "actor.train": 0.5}, (2**20, 2**21, 2**20, 2**20)),
        seconds=0.75, predicted_s=1.0,
        predicted_calls={"actor.generate": 0.4, "actor.train": 0.6, "critic.train": 0.2},
        predicted_bytes={(0, 1): 2**22, (2, 3): 2**23},
    )  # fmt: skip
    assert [line.split() for line in table.splitlines()] == [
        ["layout", "predicted", "measured"],
        ["actor.generate", "dp2@0-1", "0.400", "s", "0.250", "s"],
        ["actor.train", "{gradient_checkpointing:", "true,", "layout:", "fsdp4@0-3}", "0.600", "s", "0.500", "s"],
        ["critic.train", "dp2@2-3", "0.200", "s"],
        ["an", "iteration", "1.000", "s", "0.750", "s"],
        ["peak", "of", "rank", "0-1", "4", "MiB", "2", "MiB"],
        ["peak", "of", "rank", "2-3", "8", "MiB", "1", "MiB"],
    ]
