"""Measures the first iterations, searches for a better execution plan, tries a few on real iterations, keeps the best.

What to do next is decided in ``tuning.tuner``; here it is done: clocks are read, plans installed, users told. Every
rank has a tuner of its own and tells it the same, so all do the same without asking each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_realloc.callbacks.iteration_clock import IterationClock, Timed, seen_by_all
from lightning_realloc.callbacks.memory_monitor import cheap_peak
from lightning_realloc.callbacks.reallocation import ParameterReallocation
from lightning_realloc.callbacks.tuning_report import Measured, comparison, outcome
from lightning_realloc.callbacks.tuning_resume import obstacle, ranks_of, settings_of
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, LayoutError, PlanError, ReallocError
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.setting_hints import suggest_settings
from lightning_realloc.tuning.candidates import PlanEvaluator, WorkUnit
from lightning_realloc.tuning.shapes.lengths import Lengths
from lightning_realloc.tuning.tuner import Tuner
from lightning_realloc.tuning.tuner_actions import (
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
    """Finds a faster execution plan while training goes on; never ends slower than it began.

    No iteration is lost: plans change where tensors lie, not what is learnt.

    Args:
        max_trials: Plans tried in one tuning.
        max_overhead: What tuning may cost, as a share of the run: searches, changes of plans, and what iterations took
            longer than they would have. The run's length is what the Trainer's ``max_steps`` and ``max_epochs`` say.
        search_seconds: Of one search, at most; it also keeps within ``max_overhead``.
        profile_seconds: Of measuring passes on these ranks before the search, about at most; likewise. A run too short
            for it searches with figures from data sheets.
        save_to: Where rank 0 writes the plan, under the Trainer's ``default_root_dir``; None writes nothing.
        drift_threshold: Tune again when the same work takes longer by this share, or iterations have that much more or
            less work; None never does.
        margin: A plan must save this share of an iteration to replace the one that the run began with.
        profile_cache: Folder where measured passes are kept for later runs on the same machine; None keeps nothing.
        seed: Of the search.
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
                raise ConfigError(f"{name}={path!r} must be a path, or None for none")
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
        self._yardstick: WorkUnit | None = None
        self._evaluator: PlanEvaluator | None = None
        self._profile_s = 0.0
        self._typical: Sequence[Lengths] = ()
        self.has_profile = False
        """Whether predictions rest on measured passes, and not on data sheets alone."""
        self._clock = IterationClock()
        self._iterations: list[Timed] = []
        """Those that were asked for, so far."""
        self._measured: dict[ExecutionPlan, Measured] = {}
        self._previous: Lengths | None = None

    @property
    def tuner(self) -> Tuner:
        """What was measured and decided. Raises ConfigError before training."""
        if self._tuner is None:
            raise ConfigError("nothing is tuned yet; read AutoTuner.tuner from on_train_batch_start on")
        return self._tuner

    # ---- hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run in which there is nothing to tune."""
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
                f"AutoTuner tunes where an algorithm's calls run, and {type(pl_module).__name__} declares none; leave "
                f"the callback out, or declare calls as in docs/algorithms.md"
            )
        if strategy.max_staleness:
            raise ConfigError(
                "AutoTuner changes plans between iterations, and with max_staleness=1 responses wait there to be "
                "trained on; tune with max_staleness=0 and give the plan it saves to the run that generates ahead"
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, ParameterReallocation) and not callback.enabled for callback in callbacks):
            raise ConfigError(
                "ParameterReallocation(enabled=False) leaves every role where it is trained, which AutoTuner would "
                "change; leave one of the two out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or go on where a checkpoint was written."""
        strategy: Any = trainer.strategy
        try:
            strategy.plan_evaluator([Lengths((1,), (1,))])
        except PlanError as error:
            raise ConfigError(f"AutoTuner cannot say what a plan takes: {error}; or leave the callback out") from error
        self._forget()
        self._settings = settings_of(strategy)
        restored, self._restored = self._restored, None
        problem = None if restored is None else obstacle(restored, strategy)
        if problem is not None:
            rank_zero_info(f"AutoTuner begins anew: {problem}")
        if restored is None or problem is not None:
            self._began_at = trainer.global_step
            self._tuner = Tuner(strategy.plan, self.settings, self._num_iterations(trainer))
        else:
            self._resume(trainer, restored)
        self._act(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._clock.start(trainer.strategy)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Take an iteration in, and do what follows from it."""
        timed, action = self._clock.stop(trainer.strategy), self.tuner.action
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
        """Say so where the run was over before the tuning."""
        if self.tuner.num_tunings == 0:
            rank_zero_info(
                "AutoTuner: the run ended before a plan was chosen; use more iterations, or fewer max_trials"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from."""
        if self._tuner is None:
            return {}
        return {
            "world_size": len(ranks_of(self._tuner.current)),
            "calls": [name for name, _ in self._tuner.current.calls],
            "settings": self._settings,
            "began_at": self._began_at,
            "tuner": self._tuner.state_dict(),
            "yardstick": None if self._yardstick is None else self._yardstick.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` returned; it is looked at when training begins."""
        self._restored = state_dict or None

    # ---- beginning
    def _forget(self) -> None:
        self._yardstick = self._evaluator = self._previous = None
        self._iterations.clear()
        self._measured.clear()
        self._profile_s = 0.0

    def _resume(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Install the plan that was committed, or, in the middle of a tuning, the best one measured."""
        strategy: Any = trainer.strategy
        self._began_at = state["began_at"]
        self._tuner = Tuner(strategy.plan, self.settings, self._num_iterations(trainer))
        self._tuner.load_state_dict(state["tuner"])
        if state["tuner"]["phase"] == "trial":
            rank_zero_info(
                "AutoTuner does not repeat the trial that was under way in the checkpoint: it may be why the run ended"
            )
        self._tuner.done = trainer.global_step - self._began_at  # iterations of a window that was cut off, too
        if state["yardstick"] is not None:
            lengths = [Lengths(tuple(prompts), tuple(made)) for prompts, made in state["yardstick"]["lengths"]]
            profile = strategy.profile(lengths, cache=self._cache, seconds=0.0)  # as far as it is known already
            self._evaluator = strategy.plan_evaluator(lengths, profile)
            self._yardstick = WorkUnit(
                self._evaluator, ExecutionPlan.from_mapping(state["yardstick"]["plan"]), lengths
            )  # fmt: skip
        strategy.set_plan(self._tuner.current)

    @property
    def _cache(self) -> Path | None:
        return None if self.profile_cache is None else Path(self.profile_cache).expanduser()

    def _num_iterations(self, trainer: Trainer) -> int | None:
        """Return how many iterations there are since this tuner's first; None where the Trainer sets no end."""
        steps = [trainer.max_steps] if trainer.max_steps >= 0 else []
        epochs, batches = trainer.max_epochs, trainer.num_training_batches
        if epochs is not None and epochs >= 0 and batches != float("inf"):
            steps.append(int(epochs * batches))
        return max(0, min(steps) - self._began_at) if steps else None

    # ---- what the tuner asks for
    def _act(self, trainer: Trainer) -> None:
        """Do everything that needs no iteration."""
        while isinstance(action := self.tuner.action, Search | Switch | Commit):
            if isinstance(action, Search):
                self._search(trainer, action)
            elif isinstance(action, Switch):
                self._switch(trainer, action)
            else:
                self._commit(trainer)

    def _report(self, trainer: Trainer, asked: Measure) -> None:
        """Tell the tuner of the iterations it asked for."""
        strategy: Any = trainer.strategy
        lengths = [one.lengths for one in self._iterations]
        seconds, measured = seen_by_all(self._iterations, skip=asked.skip, peak_bytes=cheap_peak(trainer))
        self._iterations.clear()
        if self.tuner.phase == "profile":
            begin = time.perf_counter()
            self._evaluator, self._typical = strategy.plan_evaluator(lengths), lengths
            if self._yardstick is None:
                self._yardstick = WorkUnit(self._evaluator, strategy.plan, lengths)
            self._profile_s = max(gather_objects(time.perf_counter() - begin))
        assert self._yardstick is not None, "made at the end of a profile"
        self._measured[self.tuner.current] = measured
        works = [self._yardstick.work(made) for made in lengths]
        self.tuner.measured([Reading(took, work) for took, work in zip(seconds, works, strict=True)])

    def _search(self, trainer: Trainer, asked: Search) -> None:
        """Measure what passes take, where the time suffices; let rank 0 look for plans, and tell all."""
        strategy: Any = trainer.strategy
        begin = time.perf_counter()
        profile = strategy.profile(self._typical, cache=self._cache, seconds=asked.profile_seconds)
        if profile is not None:
            self._evaluator = strategy.plan_evaluator(self._typical, profile)
        self.has_profile = profile is not None
        answer: tuple[list[Candidate], float | None, str] | None = None
        if trainer.is_global_zero:
            try:
                answer = (*self._propose(asked.seconds), "")
            except ReallocError as error:
                answer = [], None, f"the search found nothing: {error}"
        candidates, predicted, problem = strategy.broadcast(answer, 0)
        took = max(gather_objects(time.perf_counter() - begin + self._profile_s))
        self._profile_s = 0.0
        self.tuner.searched(candidates, predicted_start_s=predicted, seconds=took, problem=problem)

    def _propose(self, seconds: float) -> tuple[list[Candidate], float | None]:
        """Return plans to try, and what the one that runs should take."""
        assert self._evaluator is not None, "made at the end of a profile"
        current = self.tuner.current
        found = self._evaluator.propose(current, seconds=seconds, seed=self.seed)
        return found, self._evaluator.seconds(current)

    def _switch(self, trainer: Trainer, asked: Switch) -> None:
        """Install a plan; where a new one cannot be, have the one before it run on."""
        strategy: Any = trainer.strategy
        begin, problem = time.perf_counter(), None
        try:
            strategy.set_plan(asked.plan)
        except (PlanError, LayoutError) as error:  # on every rank
            if not asked.is_trial:
                raise
            problem = error
            strategy.set_plan(self.tuner.current)
        seconds = max(gather_objects(time.perf_counter() - begin))
        if problem is None:
            if strategy.root_device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(strategy.root_device)
            self.tuner.switched(seconds)
        else:
            rank_zero_warn(f"AutoTuner goes on without a plan that cannot be used: {problem}")
            self.tuner.failed(seconds)

    def _commit(self, trainer: Trainer) -> None:
        rank_zero_info(outcome(self.tuner))
        if trainer.is_global_zero and self._evaluator is not None:
            rank_zero_info(self._table())
            self._save(trainer)
        self.tuner.committed()
        self._previous = None

    def _watch(self, trainer: Trainer, timed: Timed) -> None:
        """Tell the tuner of the iteration before, of which all ranks know already what it took: nobody waits."""
        rate = trainer.callback_metrics.get("tokens_per_s")
        before, self._previous = self._previous, timed.lengths
        assert self._yardstick is not None, "made at the end of a profile"
        if rate is None:  # calls that tell each other nothing: a single training call on all ranks
            self.tuner.watched(Reading(max(gather_objects(timed.seconds)), self._yardstick.work(timed.lengths)))
        elif before is not None and float(rate) > 0:
            self.tuner.watched(Reading(before.num_tokens / float(rate), self._yardstick.work(before)))

    # ---- what users see
    def _table(self) -> str:
        assert self._evaluator is not None
        plan = self.tuner.current
        return comparison(
            plan,
            self._measured.get(plan, Measured()),
            seconds=self.tuner.best.score,
            predicted_s=self._evaluator.seconds(plan),
            predicted_calls=self._evaluator.call_seconds(plan),
            predicted_bytes=self._evaluator.peak_bytes(plan),
        )

    def _save(self, trainer: Trainer) -> None:
        if self.save_to is None:
            return
        path = Path(trainer.default_root_dir) / self.save_to
        best, start, strategy = self.tuner.best, self.tuner.start, trainer.strategy
        device = strategy.root_device
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        comment = (
            f"{type(trainer.lightning_module).__name__} on {trainer.world_size} x {kind}: {best.score:.3g} s an "
            f"iteration, {start.score:.3g} s with the plan before; at step {trainer.global_step}"
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.tuner.current.save(path, comment=comment)
        except OSError as error:
            rank_zero_warn(
                f"AutoTuner could not write its plan to {path}: {error}; the run goes on with it all the same"
            )
