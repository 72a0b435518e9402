"""Reports that ranks exchange once per iteration: metrics, values per sample, and samples for the next iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.runtime.messages.codec import decode_message, encode_message

_CARRIED, _SHOWN = "carried over", "shown"
"""Names in a message, next to names of calls."""


@dataclass(slots=True)
class IterationReport:
    """One rank's report, or those of all ranks merged."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of calls before training; of all ranks the largest value of each."""
    values: dict[str, Samples] = field(default_factory=dict)
    """Call -> values per sample that it made, and lengths in place of sequences."""
    carried: Samples | None = None
    """Samples that generating calls left for the next iteration, by id; None: there are none."""
    shown: Samples | None = None
    """Responses of the first samples by id, and perhaps further ones; None: not asked for, or known from the loader."""

    def add_carried(self, samples: Samples) -> None:
        """Add samples that a generating call left for the next iteration."""
        self.carried = _join([self.carried, samples])

    def encode(self) -> Tensor:
        """Return the report as one (bytes,) uint8 tensor on the host."""
        others = {_CARRIED: self.carried, _SHOWN: self.shown}
        present = {name: samples for name, samples in others.items() if samples is not None}
        return encode_message(self.metrics, self.values | present)

    @classmethod
    def from_message(cls, content: Tensor) -> IterationReport:
        """Return the report that :meth:`encode` was called on."""
        metrics, samples = decode_message(content)
        carried, shown = samples.pop(_CARRIED, None), samples.pop(_SHOWN, None)
        return cls(metrics, samples, carried, shown)

    @classmethod
    def merge(cls, reports: Sequence[IterationReport]) -> IterationReport:
        """Merge the reports of all ranks, in order of rank."""
        metrics: dict[str, float] = {}
        for report in reports:
            metrics |= {name: max(value, metrics.get(name, value)) for name, value in report.metrics.items()}
        calls = dict.fromkeys(name for report in reports for name in report.values)
        values = {name: Samples.concatenate([r.values[name] for r in reports if name in r.values]) for name in calls}
        return cls(metrics, values, _join([r.carried for r in reports]), _join([r.shown for r in reports]))


def _join(parts: Sequence[Samples | None]) -> Samples | None:
    present = [part for part in parts if part is not None]
    return Samples.concatenate(present).sorted_by_id() if present else None
