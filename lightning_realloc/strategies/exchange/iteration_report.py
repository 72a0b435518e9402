"""Report of a rank to all ranks after the last call before training, with merge rules, and an iteration's result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.runtime.forward.routers import load_metrics
from lightning_realloc.tuning.shapes.lengths import Lengths

V = TypeVar("V", float, Tensor)


@dataclass(slots=True)
class IterationReport:
    """One rank's report, or the merged report of all ranks."""

    maxima: dict[str, float] = field(default_factory=dict)
    """Metrics by name. Merging takes the largest value of all ranks."""
    sums: dict[str, float] = field(default_factory=dict)
    """Metrics by name. Merging adds the values of all ranks."""
    expert_counts: dict[str, Tensor] = field(default_factory=dict)
    """Generating call -> (layers, experts) tokens by expert. Merging adds the counts of all ranks."""
    values: dict[str, Samples] = field(default_factory=dict)
    """Call -> values per sample that it made, and lengths in place of sequences. Merging joins the samples."""
    carried: Samples | None = None
    """Samples that generating calls left for the next iteration; None: there are none. Merging joins them, by id."""
    shown: Samples | None = None
    """The first samples by id with their responses; None: not asked for, or known from the loader. Merging joins them,
    by id, and keeps the first ``num_shown``."""
    num_shown: int = 0
    """Largest number of samples to show."""

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by name."""
        loads = {call: load_metrics(counts) for call, counts in self.expert_counts.items()}
        of_experts = {f"{name}/{call}": value for call, load in loads.items() for name, value in load.items()}
        return self.maxima | self.sums | of_experts

    def add_carried(self, samples: Samples) -> None:
        """Add samples that a generating call left for the next iteration."""
        self.carried = _join([self.carried, samples])

    @classmethod
    def merge(cls, reports: Sequence[IterationReport]) -> IterationReport:
        """Merge reports, in order of rank."""
        calls = dict.fromkeys(name for report in reports for name in report.values)
        shown, num_shown = _join([report.shown for report in reports]), max(report.num_shown for report in reports)
        return cls(
            maxima=_merge([report.maxima for report in reports], max),
            sums=_merge([report.sums for report in reports], sum),
            expert_counts=_merge([report.expert_counts for report in reports], sum),
            values={name: Samples.concatenate([r.values[name] for r in reports if name in r.values]) for name in calls},
            carried=_join([report.carried for report in reports]),
            shown=None if shown is None else shown.select(range(min(num_shown, len(shown)))),
            num_shown=num_shown,
        )


def _merge(metrics: Sequence[Mapping[str, V]], rule: Callable[[list[V]], Any]) -> dict[str, V]:
    """Merge each metric over the ranks that report it."""
    names = dict.fromkeys(name for own in metrics for name in own)
    return {name: rule([own[name] for own in metrics if name in own]) for name in names}


def _join(parts: Sequence[Samples | None]) -> Samples | None:
    present = [part for part in parts if part is not None]
    return Samples.concatenate(present).sorted_by_id() if present else None


@dataclass(frozen=True, slots=True)
class IterationResult:
    """Results of one iteration, the same on every rank."""

    samples: Samples
    """All samples, with the values that calls made of each; of sequences the lengths."""
    metrics: Mapping[str, Tensor]
    """Metrics of all calls. Those of a training call on some ranks may be of the iteration before: no rank waits."""
    overdue: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of training calls in the iteration before, where ``metrics`` has those of this one."""
    carried: Samples | None = None
    """Samples of all ranks that generating calls left for the next iteration; None: there are none."""
    shown: Samples | None = None
    """The first samples by id, with their responses; None if none were asked for."""

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of all prompts and responses; None if the samples do not have both."""
        if not len(self.samples) or "prompt_ids" not in self.samples or "response_ids" not in self.samples:
            return None
        prompts, responses = (self.samples.ragged(name).lengths.tolist() for name in ("prompt_ids", "response_ids"))
        return Lengths(tuple(prompts), tuple(responses))
