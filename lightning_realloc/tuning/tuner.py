"""State machine that tunes the plan of a run: measure, search, try plans, commit the fastest, watch, and tune again.

It is pure: it reads no clock and moves no weights. The caller carries out `Tuner.action` and reports the result.
Every rank has a tuner and reports the same values, so that all ranks decide the same.

Iterations are compared by seconds over *work*, the estimated seconds of their lengths under one fixed plan, relative to
the first measured iterations. Token counts would suit training only, since a batch generates for as long as its longest
response. By tokens, a plan would look slow because one of its iterations had a single long response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.tuning.tuner_actions import (
    MIN_BUDGET_S,
    Action,
    Baseline,
    Candidate,
    Commit,
    Measure,
    Reading,
    Search,
    Switch,
    Trial,
    TunerSettings,
    Watch,
)

WARM_UP_ITERATIONS = 2
"""Iterations that are not counted at the start of a run, when libraries load and buffers grow."""
SETTLING_ITERATIONS = 1
"""Iterations that are not counted after a change of plans, when replicas are filled and pipelines start."""
COUNTED_ITERATIONS = 3
"""Counted iterations of each plan. More of them reduce noise, and lengthen trials of slow plans."""
RECOUNTED_ITERATIONS = 2
"""Counted iterations of the second measurement of the start plan, if a plan beats it by little."""
CLEARLY_SLOWER_RATIO = 1.25
"""Seconds relative to the best plan's beyond which a plan is dropped after one iteration."""
CLEARLY_FASTER_RATIO = 0.85
"""Seconds relative to the start plan's below which the start plan is not measured again."""
WINDOW_ITERATIONS = 8
"""Iterations of the median that is watched for drift. More of them react later, and to less noise."""
COOLDOWN_ITERATIONS = 24
"""Iterations after a commit without another tuning."""
SEARCH_SHARE = 0.03
"""Most seconds of a search, as a fraction of the remaining budget. A faster plan shortens the run, and the budget."""
PROFILE_SHARE = 0.05
"""Most seconds of measuring passes, as a fraction of the remaining budget. The passes that a search cannot do without
are measured in any case."""
HOPELESS_RATIO = 1.5
"""Predicted seconds relative to the best plan's beyond which a plan is not tried."""
TRIAL_SHARE = 0.8
"""Fraction of the budget that trials may be planned with; the rest is for trials that cost more than expected."""
MIN_SEARCH_S = 0.02
"""A search with fewer seconds is not started."""
MIN_REMAINING_ITERATIONS = 2 * (2 * SETTLING_ITERATIONS + COUNTED_ITERATIONS)
"""Iterations that must remain for another trial to pay off."""

Phase = Literal["profile", "search", "trial", "confirm", "install", "commit", "watch"]


class Tuner:
    """Finds the fastest of a few plans during a run.

    Args:
        start: The plan that the run starts with.
        num_iterations: Iterations of the whole run; None: unknown, which leaves the cost of tuning unlimited.
    """

    def __init__(self, start: ExecutionPlan, settings: TunerSettings, num_iterations: int | None) -> None:
        self.settings = settings
        self.num_iterations = num_iterations
        self.current = start
        """The plan in use."""
        self.trials = [Trial(start)]
        """Trials of the latest tuning, with its start plan first."""
        self.num_tunings = 0
        """Number of commits."""
        self.num_tried = 0
        """Plans tried in the latest tuning, with those that failed."""
        self.done = 0
        """Iterations reported so far."""
        self.costs = {"search": 0.0, "switch": 0.0, "slower": 0.0}
        """Seconds that tuning has cost: searches with their profiles, changes of plans, and the extra seconds of
        iterations under slower plans than the start plan."""
        self.reason = "the run begins"
        """Reason for the latest tuning."""
        self.stopped = ""
        """Reason why the latest tuning did not try all plans; empty if it did."""
        self.phase: Phase = "profile"
        self.action: Action = Measure(WARM_UP_ITERATIONS, COUNTED_ITERATIONS)
        self._queue: list[Candidate] = []
        self._failed: set[str] = set()
        self._switch_s = self._trial_s = self._spent_before = 0.0
        self._work = 1.0
        self._recounted = False
        self._committed_at = 0
        self._window: list[Reading] = []
        self._usual: Reading | None = None
        self._baseline = Baseline(COUNTED_ITERATIONS)
        least = WARM_UP_ITERATIONS + COUNTED_ITERATIONS + MIN_REMAINING_ITERATIONS
        if num_iterations is not None and num_iterations < least:
            self.stopped = f"its {num_iterations} iterations are too few, {least} are the least"
            self._end()

    # ---- results
    @property
    def start(self) -> Trial:
        """The plan that the latest tuning started with."""
        return self.trials[0]

    @property
    def best(self) -> Trial:
        """The fastest measured plan; the start plan unless another one beats it by the margin."""
        fastest = min(self.trials, key=lambda trial: trial.score)
        return fastest if fastest.score < (1 - self.settings.margin) * self.start.score else self.start

    @property
    def spent_s(self) -> float:
        """Seconds that tuning has cost."""
        return sum(self.costs.values())

    @property
    def budget_s(self) -> float:
        """Most seconds that all tuning may cost."""
        return self.settings.budget_s(self.num_iterations, self.best.score * self._work)

    @property
    def drift(self) -> float | None:
        """Seconds of the latest iterations relative to those after the commit; None before enough iterations."""
        if self._usual is None or len(self._window) < WINDOW_ITERATIONS:
            return None
        return self._typical().seconds / self._usual.seconds

    # ---- reports
    def measured(self, readings: Sequence[Reading]) -> None:
        """Record the iterations that `Measure` asked for, starting with those that do not count."""
        asked = self.action
        assert isinstance(asked, Measure) and len(readings) == asked.skip + asked.count, (
            "a report that no action asked for"
        )
        self.done += len(readings)
        trial = self._running()
        scores = [reading.seconds / reading.work for reading in readings[asked.skip :]]
        if self.phase == "profile":
            self._measure_baseline(readings[asked.skip :])
            return
        if self.phase != "confirm":
            trial.scores += scores
        if trial is not self.start:
            usual = self.start.score
            self.costs["slower"] += sum(max(0.0, reading.seconds - usual * reading.work) for reading in readings)
        if self.phase == "confirm":
            trial.scores = min(scores, trial.scores, key=median)  # in doubt the start plan stays
            self._decide()
        elif len(trial.scores) == 1 and not self._is_clearly_slower(trial):
            self.action = Measure(SETTLING_ITERATIONS, COUNTED_ITERATIONS - 1)
        else:
            self._try_next()

    def searched(
        self, candidates: Iterable[Candidate], *, predicted_start_s: float | None, seconds: float, problem: str = ""
    ) -> None:
        """Record the result of a search.

        Args:
            candidates: The plans that it proposes.
            predicted_start_s: Estimated seconds of an iteration under the start plan; None: unknown.
            seconds: Seconds of the search, with the profile before it.
            problem: Reason why it found nothing; empty otherwise.
        """
        assert self.phase == "search", "a report that no action asked for"
        self.costs["search"] += seconds
        self.start.predicted_s = predicted_start_s
        self.stopped = problem
        fresh = {
            one.plan: one
            for one in reversed(list(candidates))
            if one.plan != self.start.plan and one.plan.digest not in self._failed
        }
        self._queue = sorted(fresh.values(), key=lambda one: one.predicted_s)[: self.settings.max_trials]
        self._try_next()

    def switched(self, seconds: float) -> None:
        """Record that the plan of `Switch` is installed, which took ``seconds``."""
        asked = self.action
        assert isinstance(asked, Switch), "a report that no action asked for"
        self._count_switch(seconds)
        self.current = asked.plan
        if self.phase == "trial":
            self.trials.append(Trial(self._queue[0].plan, self._queue[0].predicted_s))
            del self._queue[0]
            self.action = Measure(SETTLING_ITERATIONS, 1)
        elif self.phase == "confirm":
            self.action = Measure(SETTLING_ITERATIONS, RECOUNTED_ITERATIONS)
        else:
            self._end()

    def failed(self, seconds: float) -> None:
        """Record that the plan of `Switch` could not be installed, so that the previous plan is kept."""
        assert self.phase == "trial", "a plan that ran before cannot fail"
        self._count_switch(seconds)
        self._failed.add(self._queue.pop(0).plan.digest)
        self._try_next()

    def committed(self) -> None:
        """Record that the result was reported to the user."""
        assert self.phase == "commit", "a report that no action asked for"
        self.num_tunings += 1
        self._committed_at = self.done
        self._window, self._usual = [], None
        self.phase, self.action = "watch", Watch()

    def watched(self, reading: Reading) -> None:
        """Record an iteration under the committed plan; start another tuning if iterations have drifted."""
        self.done += 1
        if self.done - self._committed_at <= SETTLING_ITERATIONS:
            self.costs["slower"] += max(0.0, reading.seconds - self.best.score * reading.work)  # replicas are filled
            return
        self._window = [*self._window, reading][-WINDOW_ITERATIONS:]
        if len(self._window) < WINDOW_ITERATIONS or self.settings.drift_threshold is None:
            return
        if self._usual is None:
            self._usual = self._typical()
        elif self.done - self._committed_at >= COOLDOWN_ITERATIONS:
            self._judge_drift(self._typical(), self._usual, 1 + self.settings.drift_threshold)

    # ---- phases
    def _measure_baseline(self, counted: Sequence[Reading]) -> None:
        """Record iterations of the start plan; search once they have settled."""
        self._baseline.add(counted)
        self.start.scores, self._work = self._baseline.scores, self._baseline.work
        if self._baseline.has_settled:
            self._baseline = Baseline(COUNTED_ITERATIONS)
            self._start_search()
        else:
            self.action = Measure(0, 1)

    def _start_search(self) -> None:
        left = self.budget_s - self.spent_s
        seconds = min(self.settings.search_seconds, SEARCH_SHARE * left)
        if seconds < MIN_SEARCH_S or self.budget_s < MIN_BUDGET_S:
            self.stopped = f"{max(0.0, left):.2f} s may be spent on tuning this run, too little for a search"
            self._end()
        elif self._is_almost_over():
            self.stopped = "the run is almost over"
            self._end()
        else:
            profile_seconds = min(self.settings.profile_seconds, PROFILE_SHARE * left)
            self.phase, self.action = "search", Search(seconds, profile_seconds)

    def _try_next(self) -> None:
        """Try the next plan, or decide if no affordable plan is left."""
        if self.phase == "trial":
            self._trial_s = max(self._trial_s, self.spent_s - self._spent_before)
        self._queue = [one for one in self._queue if not self._is_hopeless(one)]
        if self._queue and self._is_affordable(self._queue[0]):
            self.num_tried += 1
            self._spent_before = self.spent_s
            self.phase, self.action = "trial", Switch(self._queue[0].plan, is_trial=True)
        else:
            self._queue.clear()
            self._decide()

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Whether a plan is predicted to be far slower than the best one.

        If tried plans were faster than predicted, this one may be as well. If they were slower, it may still be as fast
        as predicted, since it is of another kind.
        """
        ratios = [trial.score / trial.predicted_s for trial in self.trials[1:] if trial.predicted_s]
        return bool(ratios) and candidate.predicted_s * min(1.0, *ratios) > HOPELESS_RATIO * self.best.score

    def _is_affordable(self, candidate: Candidate) -> bool:
        if self._is_almost_over():
            self.stopped = "the run is almost over"
            return False
        predicted, iterations = self.start.predicted_s, 2 * SETTLING_ITERATIONS + COUNTED_ITERATIONS
        slower = 0.0 if not predicted else max(0.0, candidate.predicted_s / predicted - 1) * self.start.score
        there_and_back = 2 * self._switch_s + iterations * slower * self._work
        expected = max(there_and_back, self._trial_s + self._switch_s)
        left = TRIAL_SHARE * self.budget_s - self.spent_s
        if expected > left:
            self.stopped = (
                f"another trial could cost {expected:.2f} s, and {max(0.0, left):.2f} s are left for it of "
                f"max_overhead={self.settings.max_overhead}"
            )
            return False
        return True

    def _decide(self) -> None:
        """Measure the start plan again if another one beats it by little; otherwise install the best plan."""
        best, start = self.best, self.start
        is_close = best is not start and best.score > CLEARLY_FASTER_RATIO * start.score
        there_and_back = self.spent_s + 2 * self._switch_s <= TRIAL_SHARE * self.budget_s
        if is_close and there_and_back and not self._recounted and not self._is_almost_over():
            self._recounted, self.phase = True, "confirm"
            if self.current == start.plan:
                self.action = Measure(SETTLING_ITERATIONS, RECOUNTED_ITERATIONS)
            else:
                self.action = Switch(start.plan, is_trial=False)
        elif self.current != best.plan:
            self.phase, self.action = "install", Switch(best.plan, is_trial=False)
        else:
            self._end()

    def _end(self) -> None:
        self.phase, self.action = "commit", Commit()

    def _judge_drift(self, now: Reading, usual: Reading, factor: float) -> None:
        """Start another tuning if iterations take longer for the same work, or have other work."""
        if now.seconds > factor * usual.seconds:
            self.reason = (
                f"the same work takes {now.seconds / usual.seconds:.2f} times as long as after the last tuning"
            )
        elif not usual.work / factor <= now.work <= factor * usual.work:
            self.reason = f"an iteration has {now.work / usual.work:.2f} times the work it had after the last tuning"
        else:
            return
        if self._is_almost_over() or SEARCH_SHARE * (self.budget_s - self.spent_s) < MIN_SEARCH_S:
            self._usual = now  # the budget is spent; check again after another change of this size
            return
        self.trials = [Trial(self.current)]
        self.num_tried, self._recounted, self.stopped = 0, False, ""
        self.phase, self.action = "profile", Measure(0, COUNTED_ITERATIONS)

    # ---- helpers
    def _running(self) -> Trial:
        return next(trial for trial in reversed(self.trials) if trial.plan == self.current)

    def _is_clearly_slower(self, trial: Trial) -> bool:
        return trial.score > CLEARLY_SLOWER_RATIO * min(other.score for other in self.trials if other is not trial)

    def _is_almost_over(self) -> bool:
        return self.num_iterations is not None and self.num_iterations - self.done < MIN_REMAINING_ITERATIONS

    def _count_switch(self, seconds: float) -> None:
        self.costs["switch"] += seconds
        self._switch_s = max(self._switch_s, seconds)

    def _typical(self) -> Reading:
        """Return the medians of the window: seconds per work, and work."""
        scores = [reading.seconds / reading.work for reading in self._window]
        return Reading(median(scores), median(reading.work for reading in self._window))

    # ---- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return plain values, which :meth:`load_state_dict` reads."""
        return {
            "phase": self.phase,
            "current": self.current.to_mapping(),
            "trials": [trial.to_mapping() for trial in self.trials],
            "queue": [Trial(one.plan, one.predicted_s).to_mapping() for one in self._queue],
            "failed": sorted(self._failed),
            "counts": [self.num_tunings, self.num_tried, self.done, self._committed_at],
            "costs": dict(self.costs),
            "seconds": [self._switch_s, self._trial_s, self._work],
            "recounted": self._recounted,
            "reason": self.reason,
            "usual": None if self._usual is None else [self._usual.seconds, self._usual.work],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; the caller must install `current` before the next iteration.

        An interrupted trial is not repeated, since it may be the reason why the run ended. An interrupted profile, or
        second measurement of the start plan, is repeated.
        """
        self.trials = [Trial.from_mapping(entry) for entry in state["trials"]]
        waiting = [Trial.from_mapping(entry) for entry in state["queue"]]
        self._queue = [Candidate(one.plan, one.predicted_s or 0.0) for one in waiting]
        self._failed = set(state["failed"])
        self.num_tunings, self.num_tried, self.done, self._committed_at = state["counts"]
        self.costs = dict(state["costs"])
        self._switch_s, self._trial_s, self._work = state["seconds"]
        self._spent_before = self.spent_s
        self._recounted, self.reason = state["recounted"], state["reason"]
        self._usual = None if state["usual"] is None else Reading(*state["usual"])
        phase, running = state["phase"], ExecutionPlan.from_mapping(state["current"])
        if phase == "watch":
            self.current, self.phase, self.action = running, "watch", Watch()
            self._committed_at = min(self._committed_at, self.done - SETTLING_ITERATIONS)
        elif phase in ("profile", "search"):
            self.current, self.trials = running, [Trial(running)]
            self.phase, self.action = "profile", Measure(WARM_UP_ITERATIONS, COUNTED_ITERATIONS)
        else:
            self._drop_interrupted(phase, running)

    def _drop_interrupted(self, phase: Phase, running: ExecutionPlan) -> None:
        if phase == "trial" and running != self.start.plan:
            self._failed.add(running.digest)
            self.trials = [trial for trial in self.trials if trial.plan != running]
        elif phase == "confirm":
            self._recounted = False
        self.current = self.best.plan
        self._try_next()
