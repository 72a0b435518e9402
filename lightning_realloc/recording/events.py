"""Events of a run that rank 0 records: start, plans in use, predictions, validations, end; as lines of JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_realloc.layout.cluster import data_sheet_of
from lightning_realloc.tuning.timeline.call_timeline import TimelineEntry

MEASURED_PASSES, DATA_SHEETS = "measured passes", "data sheets"
"""Sources of predicted seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The beginning of a fit, or of its continuation from a checkpoint."""

    format: int
    """Version of the record's files."""
    unix_s: float
    """Time of day, in seconds since 1970: 0 on the clock of the record from here on."""
    step: int
    """Iterations done before."""
    max_steps: int | None
    """Iterations of the whole run; None if no limit is known."""
    algorithm: str
    """Name of its class."""
    devices: tuple[str, ...]
    """Name of every rank's device."""
    hosts: tuple[str, ...]
    """Name of every rank's host."""
    precision: str
    roles: Mapping[str, int] = field(default_factory=dict)
    """Role -> number of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInstalled:
    """A plan that the run uses from an iteration on."""

    step: int
    """Iterations done before."""
    plan: Mapping[str, Any]
    """The plan as a mapping, as in its YAML file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPredicted:
    """Prediction for the plan in use, for sequences as long as those of the latest iteration."""

    step: int
    """Iterations done before."""
    source: str
    """Source of the seconds: `MEASURED_PASSES` or `DATA_SHEETS`."""
    seconds_per_iteration: float
    entries: tuple[TimelineEntry, ...]
    """One iteration in the steady state, from 0 seconds on."""
    peak_bytes: Mapping[str, tuple[int, ...]]
    """Phase -> peak bytes of every rank."""
    memory_budget: int
    """Bytes of a device."""

    def has_seconds_of(self, devices: Iterable[str]) -> bool:
        """Return whether the seconds are those of these devices, by their names: measured, or of their data sheets."""
        return self.source == MEASURED_PASSES or all(data_sheet_of(device) is not None for device in devices)

    @classmethod
    def from_entries(cls, entries: Sequence[TimelineEntry], *, iteration: int, **others: Any) -> PlanPredicted:
        """Return the prediction of one iteration of a simulated timeline; ``others``: the remaining fields."""
        return cls(entries=tuple(_from_zero(entries, iteration)), **others)


def _from_zero(entries: Sequence[TimelineEntry], iteration: int) -> Iterator[TimelineEntry]:
    chosen = sorted((one for one in entries if one.iteration == iteration), key=lambda one: (one.start, one.end))
    for one in chosen:
        yield TimelineEntry(one.phase, 0, one.ranks, one.start - chosen[0].start, one.end - chosen[0].start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """A validation between two iterations, which no iteration's seconds include."""

    step: int
    """Iterations done before."""
    seconds: float
    """Duration on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint or model that could not be written, after which training went on."""

    step: int
    """Iterations done before."""
    path: str
    """Its path or address."""
    error: str
    """Message of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The end of a fit."""

    unix_s: float
    step: int
    """Iterations done."""
    error: str | None = None
    """Error that ended it; None if it ended as planned."""


Event = RunStarted | PlanInstalled | PlanPredicted | Validated | SaveFailed | RunEnded
_NAMES: Mapping[str, type[Event]] = {
    "started": RunStarted,
    "plan": PlanInstalled,
    "prediction": PlanPredicted,
    "validation": Validated,
    "failed save": SaveFailed,
    "ended": RunEnded,
}


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event's line."""
    name = next(name for name, cls in _NAMES.items() if isinstance(event, cls))
    return {"event": name, **asdict(event)}


def event_from_json(content: Mapping[str, Any]) -> Event | None:
    """Return the event of a line, None for one that this version does not know.

    Raises:
        KeyError, TypeError, ValueError: for an event without its fields.
    """
    fields = dict(content)
    cls = _NAMES.get(fields.pop("event"))
    if cls is None:
        return None
    fields["step"] = int(fields["step"])
    if cls is RunStarted:
        limit = fields["max_steps"]
        fields |= {name: tuple(str(one) for one in fields[name]) for name in ("devices", "hosts")}
        fields |= {"format": int(fields["format"]), "unix_s": float(fields["unix_s"])}
        fields |= {"max_steps": None if limit is None else int(limit)}
        fields |= {"roles": {role: int(number) for role, number in fields["roles"].items()}}
    if cls is PlanInstalled:
        fields["plan"] = dict(fields["plan"])
    if cls is Validated:
        fields["seconds"] = float(fields["seconds"])
    if cls is PlanPredicted:
        fields["entries"] = tuple(_entry_from_json(**one) for one in fields["entries"])
        fields["peak_bytes"] = {phase: tuple(map(int, sizes)) for phase, sizes in fields["peak_bytes"].items()}
        fields["seconds_per_iteration"] = float(fields["seconds_per_iteration"])
        fields["memory_budget"] = int(fields["memory_budget"])
    return cls(**fields)


def _entry_from_json(phase: str, iteration: int, ranks: Sequence[int], start: float, end: float) -> TimelineEntry:
    return TimelineEntry(str(phase), int(iteration), tuple(map(int, ranks)), float(start), float(end))
