"""Plans of a run, each with its iterations and the prediction for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_realloc.recording.events import PlanInstalled, PlanPredicted
from lightning_realloc.recording.reader import RunRecord, Session
from lightning_realloc.report.runs.rank_time import RankTime


@dataclass(frozen=True, slots=True)
class PlanPeriod:
    """Iterations under one plan, in one session."""

    session: Session = field(repr=False)
    installed: PlanInstalled
    predicted: PlanPredicted | None
    """Prediction for this plan; None if there is none."""
    end: float
    """Last step under the plan."""

    @property
    def predicted_seconds(self) -> PlanPredicted | None:
        """Prediction whose seconds are those of the run's devices; None if there is none, or only nominal figures."""
        devices = self.session.started.devices
        return self.predicted if self.predicted is not None and self.predicted.has_seconds_of(devices) else None

    def iterations(self, time: RankTime) -> slice:
        """Return the place of its iterations among those of a run."""
        return time.between(self.installed.step, self.end)

    def settled(self, time: RankTime) -> slice:
        """Return its iterations but the first one, which moves weights to their new layouts."""
        part = self.iterations(time)
        return slice(min(part.start + 1, part.stop), part.stop)


def plan_periods(record: RunRecord) -> list[PlanPeriod]:
    """Return the plans in use, in order."""
    periods = []
    ends = [*(session.started.step for session in record.sessions[1:]), float("inf")]
    for session, session_end in zip(record.sessions, ends, strict=True):
        installed = [event for event in session.events if isinstance(event, PlanInstalled)]
        predicted = [event for event in session.events if isinstance(event, PlanPredicted)]
        plan_ends = [*(float(event.step) for event in installed[1:]), session_end] if installed else []
        for event, end in zip(installed, plan_ends, strict=True):
            found = next((one for one in predicted if event.step < one.step <= end), None)
            periods.append(PlanPeriod(session, event, found, end))
    return periods
