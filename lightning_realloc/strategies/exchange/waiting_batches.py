"""Batches that wait to be trained on, as checkpoints keep them: the batches themselves, and each rank's results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_realloc.batch.samples import Samples, samples_from_state, samples_state

Results = Mapping[str, Samples]
"""Call that ran at once -> its results."""


@dataclass(frozen=True, slots=True)
class WaitingBatches:
    """Batches that wait to be trained on, the oldest first."""

    batches: Sequence[Mapping[str, Any]] = ()
    """Prompts, calls and version of each batch, as plain data, equal on all ranks."""
    results: Sequence[Results] = ()
    """Results for each batch: of this rank, or of several."""

    def __len__(self) -> int:
        return len(self.batches)

    def plain_results(self) -> list[dict[str, Any]]:
        """Return the results as plain data."""
        return [{name: samples_state(made) for name, made in results.items()} for results in self.results]


def results_from_plain(plain: Iterable[Mapping[str, Any]]) -> list[Results]:
    """Restore the result of `WaitingBatches.plain_results`."""
    return [{name: samples_from_state(state) for name, state in results.items()} for results in plain]


def joined_results(parts: Iterable[Results]) -> Results:
    """Join the results of several ranks, of which some may hold the same samples."""
    found: dict[str, list[Samples]] = {}
    for results in parts:
        for name, made in results.items():
            known = [earlier.ids.numpy() for earlier in found.get(name, [])]
            is_new = ~np.isin(made.ids.numpy(), np.concatenate(known)) if known else np.ones(len(made), dtype=bool)
            if is_new.any():
                found.setdefault(name, []).append(made.select(np.flatnonzero(is_new)))
    return {name: Samples.concatenate(made) for name, made in found.items()}
