"""What to do next, from what was measured: measure on, search, try a plan, commit one, watch, tune again.

Pure: it reads no clock and moves nothing. Whoever runs it does what `Tuner.action` says and tells it what came of that;
every rank of a run has one, tells it the same, and so does the same.

Iterations are compared by seconds over *work*: what their lengths should take under one and the same plan, 1 for those
of the first measured iterations. Tokens would do for training, but a batch generates for as long as its longest
response: by tokens, an iteration of short responses with one long one among them would count against the plan that it
happened to run under.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.tuning.tuner_actions import (
    Action,
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

WARM_UP = 2
"""Iterations before anything is counted: libraries load, buffers grow."""
AFTER_SWITCH = 1
"""Iterations after a change of plans, and after ranks met, that are not counted: copies are made, pipelines fill."""
COUNTED = 3
"""Iterations that count of each plan."""
RECOUNTED = 2
"""Iterations of the start that count once more, where it is beaten by little."""
CLEARLY_SLOWER, CLEARLY_FASTER = 1.25, 0.85
"""Times the best one's seconds: beyond it a plan is dropped after one iteration. Times the start's: below it no second
look at the start is needed."""
WINDOW = 8
"""Iterations over which a median is watched."""
COOL_DOWN = 24
"""Iterations after a commit in which nothing is tuned again."""
SEARCH_SHARE = 0.03
"""Of what tuning may still cost: a search takes no more. A faster plan shortens the run, and so what may be spent."""
PROFILE_SHARE = 0.05
"""Of it, for measuring passes before the search, where they are not known from an earlier run; the least that is
needed is measured all the same."""
HOPELESS = 1.5
"""Times the best one's seconds: a plan that is predicted to take longer is not tried."""
SHARE_FOR_TRIALS = 0.8
"""Of what tuning may cost, for trials to plan with; the rest is for what turns out to cost more than expected."""
LEAST_SEARCH_S = 0.02
FEWEST_ITERATIONS = 2 * (2 * AFTER_SWITCH + COUNTED)
"""Iterations that must remain for another trial: else there is nobody to gain from it."""

Phase = Literal["profile", "search", "trial", "confirm", "install", "commit", "watch"]


class Tuner:
    """Finds the fastest of a few plans while a run goes on.

    Args:
        start: The plan that runs.
        num_iterations: Of the whole run; None where nobody knows, and cost is not limited.
    """

    def __init__(self, start: ExecutionPlan, settings: TunerSettings, num_iterations: int | None) -> None:
        self.settings = settings
        self.num_iterations = num_iterations
        self.current = start
        """The plan that runs."""
        self.trials = [Trial(start)]
        """Of the latest tuning, its start first."""
        self.num_tunings = 0
        """How often something was committed."""
        self.num_tried = 0
        """Plans tried in the latest tuning, those that failed among them."""
        self.done = 0
        """Iterations that it was told of."""
        self.costs = {"search": 0.0, "switch": 0.0, "slower": 0.0}
        """Seconds that tuning has cost: searches with their profiles, changes of plans, and what iterations took beyond
        what the start would have taken."""
        self.reason = "the run begins"
        """Why the latest tuning was begun."""
        self.stopped = ""
        """Why the latest tuning tried no more; empty where it tried all."""
        self.phase: Phase = "profile"
        self.action: Action = Measure(WARM_UP, COUNTED)
        self._queue: list[Candidate] = []
        self._failed: set[str] = set()
        self._switch_s = self._trial_s = self._spent_before = 0.0
        self._work = 1.0
        self._recounted = False
        self._committed_at = 0
        self._window: list[Reading] = []
        self._usual: Reading | None = None

    # ---- what is known
    @property
    def start(self) -> Trial:
        """The plan that the latest tuning began with."""
        return self.trials[0]

    @property
    def best(self) -> Trial:
        """The fastest plan measured; the start where it is not beaten by the margin."""
        fastest = min(self.trials, key=lambda trial: trial.score)
        return fastest if fastest.score < (1 - self.settings.margin) * self.start.score else self.start

    @property
    def spent_s(self) -> float:
        """Seconds that tuning has cost."""
        return sum(self.costs.values())

    @property
    def budget_s(self) -> float:
        """What all tuning may cost, in seconds."""
        if self.num_iterations is None or math.isinf(self.best.score):
            return math.inf
        return self.settings.max_overhead * self.num_iterations * self.best.score * self._work

    @property
    def drift(self) -> float | None:
        """How the seconds of the latest iterations compare with those after the commit; 1: unchanged. None: unknown."""
        if self._usual is None or len(self._window) < WINDOW:
            return None
        return self._typical().seconds / self._usual.seconds

    # ---- what is told
    def measured(self, readings: Sequence[Reading]) -> None:
        """Take in the iterations that `Measure` asked for, those that do not count first."""
        asked = self.action
        assert isinstance(asked, Measure) and len(readings) == asked.skip + asked.count, "told what was not asked"
        self.done += len(readings)
        trial = self._running()
        scores = [reading.seconds / reading.work for reading in readings[asked.skip :]]
        if self.phase != "confirm":
            trial.scores += scores
        if trial is not self.start:
            usual = self.start.score
            self.costs["slower"] += sum(max(0.0, reading.seconds - usual * reading.work) for reading in readings)
        if self.phase == "profile":
            self._work = median(reading.work for reading in readings)
            self._begin_search()
        elif self.phase == "confirm":
            trial.scores = min(scores, trial.scores, key=median)  # in doubt the start stays
            self._settle()
        elif len(trial.scores) == 1 and not self._is_clearly_slower(trial):
            self.action = Measure(AFTER_SWITCH, COUNTED - 1)
        else:
            self._explore()

    def searched(
        self, candidates: Iterable[Candidate], *, predicted_start_s: float | None, seconds: float, problem: str = ""
    ) -> None:
        """Take in what a search found, and how long it, with the profile before it, took; or why it found nothing."""
        assert self.phase == "search", "told what was not asked"
        self.costs["search"] += seconds
        self.start.predicted_s = predicted_start_s
        self.stopped = problem
        fresh = {one.plan: one for one in reversed(list(candidates))
                 if one.plan != self.start.plan and one.plan.digest not in self._failed}  # fmt: skip
        self._queue = sorted(fresh.values(), key=lambda one: one.predicted_s)[: self.settings.max_trials]
        self._explore()

    def switched(self, seconds: float) -> None:
        """The plan of `Switch` runs now; installing it took so long."""
        asked = self.action
        assert isinstance(asked, Switch), "told what was not asked"
        self._count_switch(seconds)
        self.current = asked.plan
        if self.phase == "trial":
            self.trials.append(Trial(self._queue[0].plan, self._queue[0].predicted_s))
            del self._queue[0]
            self.action = Measure(AFTER_SWITCH, 1)
        elif self.phase == "confirm":
            self.action = Measure(AFTER_SWITCH, RECOUNTED)
        else:
            self._end()

    def failed(self, seconds: float) -> None:
        """The plan of `Switch` could not be installed, and the one before it runs on."""
        assert self.phase == "trial", "a plan that ran before must be possible"
        self._count_switch(seconds)
        self._failed.add(self._queue.pop(0).plan.digest)
        self._explore()

    def committed(self) -> None:
        """The user was told."""
        assert self.phase == "commit", "told what was not asked"
        self.num_tunings += 1
        self._committed_at = self.done
        self._window, self._usual = [], None
        self.phase, self.action = "watch", Watch()

    def watched(self, reading: Reading) -> None:
        """Take in one iteration under the committed plan; begin again where it has drifted."""
        self.done += 1
        if self.done - self._committed_at <= AFTER_SWITCH:
            self.costs["slower"] += max(0.0, reading.seconds - self.best.score * reading.work)  # new copies are made
            return
        self._window = [*self._window, reading][-WINDOW:]
        if len(self._window) < WINDOW or self.settings.drift_threshold is None:
            return
        if self._usual is None:
            self._usual = self._typical()
        elif self.done - self._committed_at >= COOL_DOWN:
            self._judge_drift(self._typical(), self._usual, 1 + self.settings.drift_threshold)

    # ---- phases
    def _begin_search(self) -> None:
        left = self.budget_s - self.spent_s
        seconds = min(self.settings.search_seconds, SEARCH_SHARE * left)
        if seconds < LEAST_SEARCH_S:
            self.stopped = f"{max(0.0, left):.2f} s may be spent on tuning this run, too little for a search"
            self._end()
        elif self._is_almost_over():
            self.stopped = "the run is almost over"
            self._end()
        else:
            profile_seconds = min(self.settings.profile_seconds, PROFILE_SHARE * left)
            self.phase, self.action = "search", Search(seconds, profile_seconds)

    def _explore(self) -> None:
        """Try the next plan, or settle."""
        if self.phase == "trial":
            self._trial_s = max(self._trial_s, self.spent_s - self._spent_before)
        self._queue = [one for one in self._queue if not self._is_hopeless(one)]
        if self._queue and self._is_affordable(self._queue[0]):
            self.num_tried += 1
            self._spent_before = self.spent_s
            self.phase, self.action = "trial", Switch(self._queue[0].plan, is_trial=True)
        else:
            self._queue.clear()
            self._settle()

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Whether a plan is predicted to be far slower than one that was tried.

        Where those were faster than predicted, it may be, too. Where they were slower, it need not: it is of another
        kind.
        """
        ratios = [trial.score / trial.predicted_s for trial in self.trials[1:] if trial.predicted_s]
        return bool(ratios) and candidate.predicted_s * min(1.0, *ratios) > HOPELESS * self.best.score

    def _is_affordable(self, candidate: Candidate) -> bool:
        if self._is_almost_over():
            self.stopped = "the run is almost over"
            return False
        predicted, iterations = self.start.predicted_s, 2 * AFTER_SWITCH + COUNTED
        slower = 0.0 if not predicted else max(0.0, candidate.predicted_s / predicted - 1) * self.start.score
        there_and_back = 2 * self._switch_s + iterations * slower * self._work
        expected = max(there_and_back, self._trial_s + self._switch_s)
        left = SHARE_FOR_TRIALS * self.budget_s - self.spent_s
        if expected > left:
            self.stopped = (
                f"another trial could cost {expected:.2f} s, and {max(0.0, left):.2f} s are left for it of "
                f"max_overhead={self.settings.max_overhead}"
            )
            return False
        return True

    def _settle(self) -> None:
        """Look at the start once more where it is beaten by little; else install the best."""
        best, start = self.best, self.start
        is_close = best is not start and best.score > CLEARLY_FASTER * start.score
        there_and_back = self.spent_s + 2 * self._switch_s <= SHARE_FOR_TRIALS * self.budget_s
        if is_close and there_and_back and not self._recounted and not self._is_almost_over():
            self._recounted, self.phase = True, "confirm"
            if self.current == start.plan:
                self.action = Measure(AFTER_SWITCH, RECOUNTED)
            else:
                self.action = Switch(start.plan, is_trial=False)
        elif self.current != best.plan:
            self.phase, self.action = "install", Switch(best.plan, is_trial=False)
        else:
            self._end()

    def _end(self) -> None:
        self.phase, self.action = "commit", Commit()

    def _judge_drift(self, now: Reading, usual: Reading, factor: float) -> None:
        """Begin again where iterations take longer for their work, or their work is another."""
        if now.seconds > factor * usual.seconds:
            self.reason = (
                f"the same work takes {now.seconds / usual.seconds:.2f} times as long as after the last tuning"
            )
        elif not usual.work / factor <= now.work <= factor * usual.work:
            self.reason = f"an iteration has {now.work / usual.work:.2f} times the work it had after the last tuning"
        else:
            return
        if self._is_almost_over() or SEARCH_SHARE * (self.budget_s - self.spent_s) < LEAST_SEARCH_S:
            self._usual = now  # what tuning may cost is spent; ask again after as much once more
            return
        self.trials = [Trial(self.current)]
        self.num_tried, self._recounted, self.stopped = 0, False, ""
        self.phase, self.action = "profile", Measure(0, COUNTED)

    # ---- helpers
    def _running(self) -> Trial:
        return next(trial for trial in reversed(self.trials) if trial.plan == self.current)

    def _is_clearly_slower(self, trial: Trial) -> bool:
        return trial.score > CLEARLY_SLOWER * min(other.score for other in self.trials if other is not trial)

    def _is_almost_over(self) -> bool:
        return self.num_iterations is not None and self.num_iterations - self.done < FEWEST_ITERATIONS

    def _count_switch(self, seconds: float) -> None:
        self.costs["switch"] += seconds
        self._switch_s = max(self._switch_s, seconds)

    def _typical(self) -> Reading:
        """Return the medians of the window: seconds of work 1, and work."""
        scores = [reading.seconds / reading.work for reading in self._window]
        return Reading(median(scores), median(reading.work for reading in self._window))

    # ---- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` reads: plain values."""
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
        """Go on from a checkpoint, with `current` the plan to install before the next iteration.

        A trial that was under way is not repeated: it may be why the run ended. A profile, and a second look at the
        start, are made again.
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
            self._committed_at = min(self._committed_at, self.done - AFTER_SWITCH)
        elif phase in ("profile", "search"):
            self.current, self.trials = running, [Trial(running)]
            self.phase, self.action = "profile", Measure(WARM_UP, COUNTED)
        else:
            self._drop_interrupted(phase, running)

    def _drop_interrupted(self, phase: Phase, running: ExecutionPlan) -> None:
        if phase == "trial" and running != self.start.plan:
            self._failed.add(running.digest)
            self.trials = [trial for trial in self.trials if trial.plan != running]
        elif phase == "confirm":
            self._recounted = False
        self.current = self.best.plan
        self._explore()
