"""What one rank knows of the samples of an iteration: something about all of them, everything about some.

Ids, lengths and values per sample are known of all samples, since every rank works out from them who does what. Token
sequences are held where they were made and where they are worked on, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError

Holders = Sequence[tuple[int, ...]]
"""For every position the ranks that hold what a call made of that sample; the first one sends it."""


def outline(samples: Samples) -> Samples:
    """Return the samples' numbers, with the lengths of sequences in place of sequences."""
    return Samples(samples.ids, samples.columns).lengths_only()


def only_columns(samples: Samples, producer: ModelFunctionCall, names: set[str]) -> Samples:
    """Return what belongs to these of a call's products; columns that it did not announce belong to its first one.

    What a generating call made per sample is known everywhere already and left out.
    """
    kept: dict[str, Column] = {}
    for name, column in samples.columns.items():
        product = name if name in producer.produces else producer.produces[0]
        known = producer.kind == "generate" and not isinstance(column, Ragged)
        if product in names and not known:
            kept[name] = column
    return Samples(samples.ids, kept, {name: column for name, column in samples.data.items() if name in names})


class Chosen:
    """The rows that this rank works on under one call, by their positions in the table."""

    def __init__(self, rows: Samples, positions: Sequence[int]) -> None:
        self.rows = rows
        self._row_of = {position: row for row, position in enumerate(positions)}

    def at(self, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions of the table, in this order."""
        return self.rows.select([self._row_of[position] for position in positions])


class SampleTable:
    """One set of samples: the loader's batch, or what a generating call made of it.

    Args:
        known: Ids and what is known of all samples on every rank, in the table's order.
        is_batch: Whether ``known`` holds the sequences too, as the loader's batch does.
        units: The positions of each portion in which the samples came, ascending; in the order of portions.
        early: Call -> rank -> what it worked on while others generated: the positions of each forward pass.
    """

    def __init__(
        self,
        known: Samples,
        *,
        is_batch: bool,
        units: Sequence[Sequence[int]] = (),
        early: Mapping[str, Mapping[int, Sequence[tuple[int, ...]]]] | None = None,
    ) -> None:
        self.known = known
        self.is_batch = is_batch
        self.units = units
        self.early = early or {}
        self._ids = known.ids.tolist()
        self._held: dict[str, list[Samples]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample: its prompt, and its response where there is one."""
        columns = [name for name in ("prompt_ids", "response_ids") if name in self.known]
        if not columns:
            raise PlanError(
                f"samples are packed by 'prompt_ids' and 'response_ids'; these have {', '.join(self.known.columns)}"
            )
        return [int(n) for n in sum(self.known.ragged(name).lengths for name in columns).tolist()]  # type: ignore[union-attr]

    @property
    def token_counts(self) -> list[int]:
        """Response tokens of every sample that the model chose: those to learn from."""
        if "num_model_tokens" in self.known:
            return [int(count) for count in self.known.tensor("num_model_tokens").tolist()]
        return [int(length) for length in self.known.ragged("response_ids").lengths.tolist()]

    @property
    def learnt(self) -> list[int]:
        """The positions that training calls work on: all but those whose ``trained`` is False."""
        if "trained" not in self.known:
            return list(range(len(self)))
        return [int(position) for position in self.known.tensor("trained").nonzero().flatten().tolist()]

    def groups(self, group_size: int = 1) -> list[int]:
        """Return what stays together: the samples of a prompt or, where none is named, each ``group_size`` in a row."""
        if "prompt_id" in self.known:
            return [int(prompt_id) for prompt_id in self.known.tensor("prompt_id").tolist()]
        return [position // group_size for position in range(len(self))]

    def totals(self, positions: Sequence[int], *, group_size: int, sums_of: Sequence[str]) -> Totals:
        """Return what losses of a mini-batch of these positions divide by."""
        rows, counts = torch.tensor(positions), self.token_counts
        return Totals(
            num_sequences=len(positions),
            num_tokens=sum(counts[position] for position in positions),
            group_size=group_size,
            sums={name: float(self.known.tensor(name)[rows].sum()) for name in sums_of},
        )

    def ids(self, positions: Iterable[int]) -> list[int]:
        """Return the ids at these positions."""
        return [self._ids[position] for position in positions]

    def hold(self, call: str, part: Samples) -> None:
        """Keep what a call made of some samples, here or elsewhere."""
        self._held.setdefault(call, []).append(part)

    def rows(self, call: str, positions: Sequence[int]) -> Samples:
        """Return what a call made of the samples at these positions, which must be held here."""
        return Samples.concatenate(self._held.get(call, [])).by_ids(self.ids(positions))

    def learn(self, columns: dict[str, Column]) -> None:
        """Add what has become known of all samples."""
        self.known = self.known.with_columns(**columns)
