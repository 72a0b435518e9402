"""Callback that tunes the execution plan during training: measure, search, try a few plans, keep the fastest.

``tuning.tuner`` decides the next action; this callback carries it out: it reads clocks, installs plans and informs the
user. Each rank has its own tuner with the same inputs, so all ranks act alike without communication.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_realloc.callbacks.iteration_clock import (
    IterationClock,
    TimedIteration,
    gather_measurements,
    mean_factors,
)
from lightning_realloc.callbacks.reallocation import ParameterReallocation
from lightning_realloc.callbacks.run_view import measure_links_again, run_view
from lightning_realloc.callbacks.tuning_report import Measured, comparison_table, describe_outcome
from lightning_realloc.callbacks.tuning_resume import plan_ranks, reason_not_to_resume, tuning_settings
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, LayoutError, PlanError, ReallocError
from lightning_realloc.remote_path import expand_home, local_folder
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.setting_hints import suggest_settings
from lightning_realloc.trainers import planned_iterations, trainer_callbacks
from lightning_realloc.tuning.candidates import PlanEvaluator, WorkUnit
from lightning_realloc.tuning.shapes.lengths import Lengths
from lightning_realloc.tuning.tuner import Tuner
from lightning_realloc.tuning.tuner_actions import (
    MIN_BUDGET_S,
    Candidate,
    Commit,
    Measure,
    Reading,
    Search,
    Switch,
    TunerSettings,
    Watch,
)


@suggest_settings({})
class AutoTuner(Callback):
    """Find a faster execution plan during training; the result is never slower than the initial plan.

    No iteration is lost: a plan changes where tensors lie, and training results stay the same.

    Args:
        max_trials: Maximum number of plans to try in one tuning.
        max_overhead: Maximum cost of tuning as a fraction of the run: searches, plan changes, and the extra time of
            slower iterations. The run's length follows from the Trainer's ``max_steps`` and ``max_epochs``.
        search_seconds: Maximum seconds of one search; ``max_overhead`` may reduce it.
        profile_seconds: Approximate maximum seconds for measuring passes on these ranks before the search;
            ``max_overhead`` may reduce it. Runs that are too short for it search with data-sheet values, and those
            whose budget pays for no trial are not tuned.
        save_to: File for a faster plan, written by rank 0 under the Trainer's ``default_root_dir``; None writes none.
        drift_threshold: Tune again if the same work takes longer by this fraction, or if the work of iterations changes
            by it. None never tunes again.
        margin: Fraction of an iteration's time that a plan must save to replace the initial plan.
        profile_cache: Folder of measured passes for later runs on the same machine; None stores nothing.
        seed: Seed of the search.

    Example:
        >>> from lightning_realloc import AutoTuner
        >>> tuner = AutoTuner(max_trials=2, save_to="plans/best.yaml")  # Trainer(strategy="realloc", callbacks=[tuner])
    """

    def __init__(
        self,
        *,
        max_trials: int = 4,
        max_overhead: float = 0.05,
        search_seconds: float = 10.0,
        profile_seconds: float = 30.0,
        save_to: str | Path | None = "execution_plan.yaml",
        drift_threshold: float | None = 0.3,
        margin: float = 0.05,
        profile_cache: str | Path | None = "~/.cache/lightning-realloc/profiles",
        seed: int = 0,
    ) -> None:
        self.settings = TunerSettings(
            max_trials=max_trials,
            max_overhead=max_overhead,
            search_seconds=search_seconds,
            profile_seconds=profile_seconds,
            drift_threshold=drift_threshold,
            margin=margin,
        )
        for name, path in (("save_to", save_to), ("profile_cache", profile_cache)):
            if path is not None and (not isinstance(path, str | Path) or not str(path)):
                raise ConfigError(f"{name}={path!r} must be a path, or None to disable it")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed={seed!r} must be a whole number")
        if save_to is not None and Path(save_to).suffix not in (".yaml", ".yml"):
            raise ConfigError(f"save_to={str(save_to)!r} is written as YAML; give it a name that ends with .yaml")
        self.save_to = save_to
        self.profile_cache = profile_cache
        self.seed = seed
        self._tuner: Tuner | None = None
        self._restored: Mapping[str, Any] | None = None
        self._began_at = 0
        self._settings: dict[str, str] = {}
        self._work_unit: WorkUnit | None = None
        self.evaluator: PlanEvaluator | None = None
        """Evaluator of plans that the latest search used; None before the first one."""
        self._profile_s = 0.0
        self._profiled_lengths: list[Lengths] = []
        self.has_profile = False
        """Whether predictions use measured passes, instead of data-sheet values only."""
        self._clock = IterationClock()
        self._iterations: list[TimedIteration] = []
        """Iterations measured so far for the current request."""
        self._measured: dict[ExecutionPlan, Measured] = {}
        self._factors: dict[str, float] = {}
        self._previous: Lengths | None = None

    @property
    def tuner(self) -> Tuner:
        """Measurements and decisions so far; ConfigError before training."""
        if self._tuner is None:
            raise ConfigError("nothing is tuned yet; read AutoTuner.tuner from on_train_batch_start on")
        return self._tuner

    # ---- hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError for a run without plans to tune."""
        if stage != "fit":
            return
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "set_plan"):
            raise ConfigError(
                f"AutoTuner needs Trainer(strategy='realloc'), which can change plans; this Trainer has "
                f"{type(strategy).__name__}"
            )
        if strategy.dataflow is None:
            raise ConfigError(
                f"AutoTuner tunes the layouts of an algorithm's calls, but {type(pl_module).__name__} declares none; "
                f"remove the callback, or declare calls as in docs/own-algorithm.md"
            )
        if strategy.max_staleness:
            raise ConfigError(
                "AutoTuner changes plans between iterations, but with max_staleness responses wait there to be "
                "trained on; tune with max_staleness=0 and give the saved plan to the run that generates ahead"
            )
        callbacks = trainer_callbacks(trainer)
        if any(isinstance(callback, ParameterReallocation) and not callback.enabled for callback in callbacks):
            raise ConfigError(
                "ParameterReallocation(enabled=False) keeps every role in its training layout, but AutoTuner would "
                "change layouts; remove one of the two"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start tuning, or continue from a checkpoint."""
        run = run_view(trainer)
        try:
            run.plan_evaluator([Lengths((1,), (1,))])
        except PlanError as error:
            raise ConfigError(f"AutoTuner cannot estimate a plan's time: {error}; or remove the callback") from error
        self._reset()
        self._settings = tuning_settings(trainer)
        restored, self._restored = self._restored, None
        problem = None if restored is None else reason_not_to_resume(restored, trainer)
        if problem is not None:
            rank_zero_info(f"AutoTuner starts from scratch: {problem}")
        if restored is None or problem is not None:
            self._began_at = trainer.global_step
            self._tuner = Tuner(run.pool.plan, self.settings, self._num_iterations(trainer))
        else:
            self._resume(trainer, restored)
        self._act(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._clock.start(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Record an iteration, and carry out the tuner's next actions."""
        timed, action = self._clock.stop(trainer), self.tuner.action
        if timed is None:
            return
        if isinstance(action, Measure):
            self._iterations.append(timed)
            if len(self._iterations) == action.skip + action.count:
                self._report(trainer, action)
        elif isinstance(action, Watch):
            self._watch(trainer, timed)
        self._act(trainer)
        pl_module.log("tuner/trials", float(self.tuner.num_tried), batch_size=1)
        if self.tuner.drift is not None:
            pl_module.log("tuner/drift", self.tuner.drift, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a message if the run ended before a plan was chosen."""
        if self.tuner.num_tunings == 0:
            rank_zero_info(
                "AutoTuner: the run ended before a plan was chosen; use more iterations, or fewer max_trials"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run continues."""
        if self._tuner is None:
            return {}
        return {
            "world_size": len(plan_ranks(self._tuner.current)),
            "calls": [name for name, _ in self._tuner.current.calls],
            "settings": self._settings,
            "began_at": self._began_at,
            "tuner": self._tuner.state_dict(),
            "yardstick": None if self._work_unit is None else self._work_unit.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state; `on_train_start` evaluates it."""
        self._restored = state_dict or None

    # ---- start
    def _reset(self) -> None:
        self._work_unit = self.evaluator = self._previous = None
        self._iterations.clear()
        self._profiled_lengths.clear()
        self._measured.clear()
        self._profile_s = 0.0

    def _resume(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Install the committed plan, or, if a tuning was in progress, the best measured one."""
        run = run_view(trainer)
        self._began_at = state["began_at"]
        self._tuner = Tuner(run.pool.plan, self.settings, self._num_iterations(trainer))
        self._tuner.load_state_dict(state["tuner"])
        if state["tuner"]["phase"] == "trial":
            rank_zero_info(
                "AutoTuner does not repeat the trial that was in progress in the checkpoint: it may have ended the run"
            )
        self._tuner.done = trainer.global_step - self._began_at  # also counts iterations of an interrupted window
        if state["yardstick"] is not None:
            lengths = [Lengths(tuple(prompts), tuple(made)) for prompts, made in state["yardstick"]["lengths"]]
            profile = run.profile(lengths, cache=self._cache, seconds=0.0)  # from the cache only
            self.evaluator = run.plan_evaluator(lengths, profile)
            plan = ExecutionPlan.from_mapping(state["yardstick"]["plan"])
            self._work_unit = WorkUnit(self.evaluator, plan, lengths)
        run.set_plan(self._tuner.current)

    @property
    def _cache(self) -> Path | None:
        return None if self.profile_cache is None else expand_home(Path(self.profile_cache))

    def _num_iterations(self, trainer: Trainer) -> int | None:
        """Return the number of iterations since this tuner's first; None if the Trainer sets no end."""
        planned = planned_iterations(trainer)
        return None if planned is None else max(0, planned - self._began_at)

    # ---- the tuner's actions
    def _act(self, trainer: Trainer) -> None:
        """Carry out all actions that need no iteration."""
        while isinstance(action := self.tuner.action, Search | Switch | Commit):
            if isinstance(action, Search):
                self._search(trainer, action)
            elif isinstance(action, Switch):
                self._switch(trainer, action)
            else:
                self._commit(trainer)

    def _report(self, trainer: Trainer, action: Measure) -> None:
        """Report the requested iterations to the tuner."""
        run = run_view(trainer)
        lengths = [one.lengths for one in self._iterations]
        self._factors = mean_factors(self._iterations[action.skip :])
        seconds, measured = gather_measurements(self._iterations, skip=action.skip, peak_bytes=_take_cuda_peak(trainer))
        self._iterations.clear()
        if self.tuner.phase == "profile":
            self._profiled_lengths = [*self._profiled_lengths, *lengths]
        budget_s = self.settings.budget_s(self.tuner.num_iterations, median(seconds))
        if self._work_unit is None and budget_s >= MIN_BUDGET_S:
            begin = time.perf_counter()
            self._work_unit = WorkUnit(run.plan_evaluator(lengths, factors=self._factors), run.pool.plan, lengths)
            self._profile_s = max(gather_objects(time.perf_counter() - begin))
        self._measured[self.tuner.current] = measured
        works = [1.0 if self._work_unit is None else self._work_unit.work(made) for made in lengths]
        self.tuner.measured([Reading(duration, work) for duration, work in zip(seconds, works, strict=True)])

    def _search(self, trainer: Trainer, action: Search) -> None:
        """Measure passes if the time suffices; search on rank 0 and broadcast the plans."""
        run = run_view(trainer)
        begin = time.perf_counter()
        if self.tuner.num_tunings and run.links is not None:
            measure_links_again(run)  # one may be why iterations take longer
        with run.runner.record.during("measuring passes"):
            profile = run.profile(self._profiled_lengths, cache=self._cache, seconds=action.profile_seconds)
        self.evaluator = run.plan_evaluator(self._profiled_lengths, profile, self._factors)
        self._profiled_lengths.clear()
        self.has_profile = profile is not None
        answer: Any = None  # candidates, seconds predicted for the plan in use, and a problem
        if trainer.is_global_zero:
            try:
                with run.runner.record.during("plan search"):
                    answer = (*self._propose(action.seconds), "")
            except ReallocError as error:
                answer = [], None, f"the search found nothing: {error}"
        candidates, predicted, problem = trainer.strategy.broadcast(answer, 0)
        duration = max(gather_objects(time.perf_counter() - begin + self._profile_s))
        self._profile_s = 0.0
        self.tuner.searched(candidates, predicted_start_s=predicted, seconds=duration, problem=problem)

    def _propose(self, seconds: float) -> tuple[list[Candidate], float | None]:
        """Return plans to try, and the predicted seconds of the current plan."""
        assert self.evaluator is not None, "made at the end of a profile"
        current = self.tuner.current
        found = self.evaluator.propose(current, seconds=seconds, seed=self.seed)
        return found, self.evaluator.seconds(current)

    def _switch(self, trainer: Trainer, action: Switch) -> None:
        """Install a plan; if a trial's plan cannot be installed, restore the previous one."""
        run = run_view(trainer)
        begin, problem = time.perf_counter(), None
        try:
            run.set_plan(action.plan)
        except (PlanError, LayoutError) as error:  # raised on every rank
            if not action.is_trial:
                raise
            problem = error
            run.set_plan(self.tuner.current)
        seconds = max(gather_objects(time.perf_counter() - begin))
        if problem is None:
            _take_cuda_peak(trainer)
            self.tuner.switched(seconds)
        else:
            rank_zero_warn(f"AutoTuner skips a plan that cannot be used: {problem}")
            self.tuner.failed(seconds)

    def _commit(self, trainer: Trainer) -> None:
        rank_zero_info(describe_outcome(self.tuner))
        if trainer.is_global_zero and self.evaluator is not None:
            rank_zero_info(self._table())
            if self.tuner.best is not self.tuner.start:
                self._save(trainer)
        self.tuner.committed()
        self._profiled_lengths.clear()
        self._previous = None

    def _watch(self, trainer: Trainer, timed: TimedIteration) -> None:
        """Report the previous iteration to the tuner. All ranks know its time already, so none waits."""
        if self._work_unit is None:
            return  # the run is too short to be tuned
        rate = trainer.callback_metrics.get("tokens_per_s")
        before, self._previous = self._previous, timed.lengths
        if rate is None:  # no rate is shared: a single training call on all ranks
            self.tuner.watched(Reading(max(gather_objects(timed.seconds)), self._work_unit.work(timed.lengths)))
        elif before is not None and float(rate) > 0:
            self.tuner.watched(Reading(before.num_tokens / float(rate), self._work_unit.work(before)))

    # ---- output
    def _table(self) -> str:
        assert self.evaluator is not None
        plan = self.tuner.current
        return comparison_table(
            plan,
            self._measured.get(plan, Measured()),
            seconds=self.tuner.best.score,
            predicted_s=self.evaluator.seconds(plan),
            predicted_calls=self.evaluator.call_seconds(plan),
            predicted_bytes=self.evaluator.peak_bytes(plan),
        )

    def _save(self, trainer: Trainer) -> None:
        if self.save_to is None:
            return
        path = local_folder(trainer.default_root_dir) / expand_home(self.save_to)
        best, start, strategy = self.tuner.best, self.tuner.start, trainer.strategy
        device = strategy.root_device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        comment = (
            f"{type(trainer.lightning_module).__name__} on {trainer.world_size} x {kind}: {best.score:.3g} s an "
            f"iteration, {start.score:.3g} s with the initial plan; at step {trainer.global_step}"
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.tuner.current.save(path, comment=comment)
        except OSError as error:
            rank_zero_warn(f"AutoTuner could not write its plan to {path}: {error}; the run continues with this plan")


def _take_cuda_peak(trainer: Trainer) -> int | None:
    """Return this rank's peak CUDA bytes since the last call; None on CPU, where libraries count as well."""
    return run_view(trainer).runner.peak_memory.take("tuner") if trainer.strategy.root_device.type == "cuda" else None
