"""Many runs beside each other: a line for each, and which of equal settings got worse or slower. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_realloc.recording.events import PlanInstalled, RunEnded
from lightning_realloc.report.runs.comparison import flat_settings, group_runs
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.report.runs.score_words import accuracy_sentences, compare_runs, full_name, shown_interval
from lightning_realloc.report.runs.sections.run_cost import iteration_seconds
from lightning_realloc.scores.bootstrap import ScoreInterval, intervals
from lightning_realloc.scores.question_scores import ACCURACY

SLOWER = 1.15
"""Ratio of the seconds of an iteration from which a run counts as slower; equal runs differ by less on one machine."""
MIN_TIMED = 5
"""Iterations that a run needs for a comparison of seconds."""
_NOT_SHOWN = re.compile(r"(.*\.)?(seed|seed_everything|devices|plan|data)(\..*)?|weights of .*")
"""Settings that have columns of their own, or say little of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in a line; None for what it did not record."""

    name: str
    """Its folder, from the one that was asked for."""
    end: str
    """``ended``, ``failed: ...``, ``no end`` of a run that goes on or was killed, ``damaged``, or ``unknown``."""
    problems: tuple[str, ...]
    """Files that could not be read, in words."""
    begin_s: float | None = None
    """Time of day at its start, in seconds since 1970."""
    algorithm: str | None = None
    num_iterations: int = 0
    score: tuple[str, ScoreInterval] | None = None
    """Name and value of the latest accuracy on the first evaluated set."""
    best_score: tuple[float, int] | None = None
    """Largest value of this score, and the iterations done then."""
    reward: float | None = None
    """Mean reward of the last tenth."""
    iteration_s: float | None = None
    """Median seconds of an iteration."""
    device_hours: float | None = None
    plan: str | None = None
    """Layouts of the latest plan."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        score = None if self.score is None else {"name": self.score[0], **self.score[1]._asdict()}
        return {name: getattr(self, name) for name in self.__slots__} | {"score": score}


def summarize_run(run: RunFolder) -> RunSummary:
    """Return a run in a line."""
    record = run.record
    seconds = [] if record is None else iteration_seconds(record)
    steps = [int(series.steps[-1]) for series in run.metrics.values() if len(series.steps)]
    score = _latest_score(run)
    rewards = [run.metrics[name] for name in ("score", "reward") if name in run.metrics]
    events = () if record is None else record.last.events
    plans = [one.plan for one in events if isinstance(one, PlanInstalled)]
    return RunSummary(
        name=run.name,
        begin_s=None if record is None else record.sessions[0].started.unix_s,
        algorithm=_algorithm(run),
        num_iterations=max(steps, default=0),
        end="unknown" if record is None else _end([one for one in events if isinstance(one, RunEnded)]),
        score=score,
        best_score=None if score is None else _best(run, score[0]),
        reward=_known(rewards[0].final_mean()) if rewards else None,
        iteration_s=median(seconds[1:]) if len(seconds) > 1 else None,
        device_hours=None if record is None else sum(seconds) * len(record.last.started.devices) / 3600,
        plan=_layouts(plans[-1]) if plans else None,
        problems=run.problems,
    )


def differing_settings(runs: Sequence[RunFolder]) -> list[dict[str, str]]:
    """Return for each run name -> value of the settings that differ among the runs that have them.

    Seeds, data and plans are left out.
    """
    settings = [flat_settings(run) for run in runs]
    names = dict.fromkeys(name for one in settings for name in one if not _NOT_SHOWN.fullmatch(name))
    differing = [name for name in names if len({one[name] for one in settings if name in one}) > 1]
    return [{name: one[name] for name in differing if name in one} for one in settings]


def regressions(runs: Sequence[RunFolder], baseline: RunFolder | None = None) -> list[str]:
    """Return sentences on runs that are worse or slower than the one before with equal settings, or a baseline.

    Worse means that the interval of the difference in accuracy leaves out 0.
    """
    if baseline is not None:
        pairs = [(baseline, run) for run in runs if run is not baseline]
    else:
        groups = (sorted(group.runs, key=_begin) for group in group_runs([run for run in runs if run.record]))
        pairs = [(group[-2], group[-1]) for group in groups if len(group) > 1]
    return [sentence for before, after in pairs for sentence in _worsened(before, after)]


def _worsened(before: RunFolder, after: RunFolder) -> Iterator[str]:
    yield from accuracy_sentences(one for one in compare_runs(before, after) if one.result == "worse")
    times = [[] if run.record is None else iteration_seconds(run.record)[1:] for run in (before, after)]
    if min(map(len, times)) >= MIN_TIMED:
        earlier, later = map(median, times)
        if later > SLOWER * earlier:
            yield (
                f"{after.name} takes {later:.3g} s an iteration, {later / earlier:.2f} times as long as {before.name} "
                f"({earlier:.3g} s)."
            )


def _begin(run: RunFolder) -> float:
    assert run.record is not None
    return run.record.sessions[0].started.unix_s


def _latest_score(run: RunFolder) -> tuple[str, ScoreInterval] | None:
    for evaluation in run.evaluations.values():
        if ACCURACY in evaluation.scores.names:
            return full_name(evaluation, ACCURACY), intervals(evaluation.scores)[ACCURACY]
    return None


def _best(run: RunFolder, name: str) -> tuple[float, int] | None:
    series = run.metrics[name].finite() if name in run.metrics else None
    if series is None or not len(series.values):
        return None
    at = int(series.values.argmax())
    return float(series.values[at]), int(series.steps[at])


def _algorithm(run: RunFolder) -> str | None:
    if run.record is not None:
        return run.record.last.started.algorithm
    model = (run.config or {}).get("model")
    path = model.get("class_path") if isinstance(model, dict) else None
    return str(path).rpartition(".")[2] if path else None


def _end(ends: Sequence[RunEnded]) -> str:
    if not ends:
        return "no end"
    return "ended" if ends[-1].error is None else f"failed: {ends[-1].error}"


def _layouts(plan: Any) -> str:
    """Return the layouts of a plan's calls, each once."""
    calls = plan.get("calls", {})
    found = [one.get("layout", "") if isinstance(one, dict) else str(one) for one in calls.values()]
    return " ".join(dict.fromkeys(found))


def _known(value: float) -> float | None:
    return value if value == value else None  # NaN


def score_cell(summary: RunSummary) -> str:
    """Return the latest score with its interval, and the best one where that is larger."""
    if summary.score is None:
        return "–"
    name, latest = summary.score
    best = summary.best_score
    later = "" if best is None or best[0] <= latest.value else f", best {best[0]:.3g} at {best[1]}"
    return f"{name.removesuffix(f'/{ACCURACY}')} {shown_interval(latest)}{later}"
