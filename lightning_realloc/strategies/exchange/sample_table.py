"""An iteration's samples as every rank knows them: ids, lengths and values per sample.

Every rank works out from a table which rank works on which samples. Token sequences stay on the ranks that made them
or work on them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_realloc.batch.samples import Column, Ragged, Samples, images_in_order
from lightning_realloc.batch.shares import Integers
from lightning_realloc.batch.training import Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import DataError, PlanError


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The ranks that hold a call's results for each sample; the first of them sends these."""

    shares: Integers
    """(N,) share of each sample, -1 for one without results."""
    ranks: Mapping[int, tuple[int, ...]]
    """Share -> the ranks that hold its results."""

    @property
    def senders(self) -> Integers:
        """The (N,) ranks that send each sample's results, -1 for one without."""
        first = np.full(max(self.ranks, default=-1) + 2, -1)  # the last one is that of share -1
        for share, ranks in self.ranks.items():
            first[share] = ranks[0]
        return first[self.shares]

    def held_by(self, rank: int) -> NDArray[np.bool_]:
        """Return whether a rank holds the results of each sample, (N,)."""
        return np.isin(self.shares, [share for share, ranks in self.ranks.items() if rank in ranks])


class SampleTable:
    """The samples of the loader's batch, or those that a generating call made of it.

    Args:
        known: Ids and columns of all samples, in the table's order. Of generated sequences these are the lengths.
        holders: The ranks that hold each sample's sequences; None: every rank does, as of the loader's batch.
        chunks: The positions of each chunk in which the samples came, ascending within a chunk.
    """

    def __init__(self, known: Samples, holders: Holders | None = None, *, chunks: Sequence[Integers] = ()) -> None:
        self.known = known
        self.holders = holders
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.known)

    @property
    def lengths(self) -> Integers:
        """All tokens of each sample, (N,), prompt and response together: the size of its forward pass."""
        return sequence_lengths(self.known)

    @property
    def trained_positions(self) -> Integers:
        """The positions that training calls work on: all but those whose column ``trained`` is False."""
        if "trained" not in self.known:
            return np.arange(len(self))
        return np.flatnonzero(self.known.tensor("trained").numpy())

    def groups(self, group_size: int = 1) -> Integers:
        """Return a group number per sample: its prompt's id or, without prompt ids, each ``group_size`` in a row."""
        if "prompt_id" in self.known:
            groups: Integers = self.known.tensor("prompt_id").numpy()
            return groups
        return np.arange(len(self)) // group_size

    def totals(self, positions: Sequence[int] | Integers, *, group_size: int, sums_of: Sequence[str]) -> Totals:
        """Return the totals that losses of a mini-batch of these positions divide by.

        Raises:
            DataError: for a column of ``sums_of`` that only the ranks that computed it have.
        """
        if missing := [name for name in sums_of if not isinstance(self.known.columns.get(name), Tensor)]:
            counted = [name for name, column in self.known.columns.items() if isinstance(column, Tensor)]
            raise DataError(
                f"totals_of={tuple(sums_of)!r} sums columns of one number per sample of the batch or, if responses are "
                f"generated, of the generating call ({', '.join(counted) or 'none here'}); {missing[0]!r} is none of "
                f"them. Columns of @infer and @compute calls are not known on all ranks: have a @compute(..., "
                f"whole_batch=True) method divide its values by their sum"
            )
        rows = torch.as_tensor(positions)
        if "num_model_tokens" in self.known:  # without those of an environment, which no loss counts
            counts = self.known.tensor("num_model_tokens")
        else:
            counts = self.known.ragged("response_ids").lengths
        return Totals(
            num_sequences=len(positions),
            num_tokens=int(counts[rows].sum()),
            group_size=group_size,
            sums={name: float(self.known.tensor(name)[rows].sum()) for name in sums_of},
        )

    def ids(self, positions: Integers) -> Tensor:
        """Return the ids at these positions."""
        return self.known.ids[torch.from_numpy(positions)]

    def positions(self, samples: Samples) -> Integers:
        """Return the positions of these samples."""
        positions: Integers = self.known.rows_of(samples.ids).numpy()
        return positions

    def add_columns(self, columns: Mapping[str, Column]) -> None:
        """Add columns that are now known of all samples."""
        self.known = self.known.with_columns(**columns)


class PositionedRows:
    """The rows that this rank works on under one call, by their positions in a table or a chunk."""

    def __init__(self, rows: Samples, positions: Integers) -> None:
        self._rows = rows
        self._row_of = {position: row for row, position in enumerate(positions.tolist())}

    def select(self, positions: Sequence[int]) -> Samples:
        """Return the samples at these positions, in this order."""
        return self._rows.select([self._row_of[position] for position in positions])

    def read_images_ahead(self, parts: Sequence[Sequence[int]]) -> None:
        """Read the images of the samples at these positions in the background, in this order."""
        shown = images_in_order(self._rows)
        order = [images for part in parts for place in part for images in shown[self._row_of[place]]]
        if order:
            order[0].read_ahead(order)


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """One chunk of a generating rank's samples, as this rank works on it."""

    lengths: Integers
    """Tokens of all samples of the chunk, prompts included."""
    rows: PositionedRows
    """The samples that this rank works on, by their positions in the chunk."""


@dataclass(slots=True)
class ChunkResults:
    """Results of one call on this rank that were made before all samples were generated."""

    chunks: list[Samples] = field(default_factory=list)
    """Results of each forward pass, as far as this rank holds them."""
    times: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each piece of work, by ``time.perf_counter()``."""

    @property
    def samples(self) -> Samples | None:
        """All results; None where other ranks hold them."""
        return Samples.concatenate(self.chunks) if self.chunks else None

    @property
    def seconds(self) -> float:
        """Seconds of work."""
        return self.seconds_before(math.inf)

    def seconds_before(self, moment: float) -> float:
        """Return the seconds of work before ``moment``."""
        return sum((max(0.0, min(end, moment) - begin) for begin, end in self.times), start=0.0)


def sequence_lengths(samples: Samples) -> Integers:
    """Return the tokens of each sample, (N,), prompt and response together.

    Raises:
        PlanError: for samples that have neither.
    """
    columns = [name for name in ("prompt_ids", "response_ids") if name in samples]
    if not columns:
        raise PlanError(
            f"samples are packed by 'prompt_ids' and 'response_ids'; these have {', '.join(samples.columns)}"
        )
    lengths: Integers = np.sum([samples.ragged(name).lengths.numpy() for name in columns], axis=0)
    return lengths


def outline(samples: Samples) -> Samples:
    """Return the samples' numbers, with the lengths of sequences in place of sequences."""
    return Samples(samples.ids, samples.columns).lengths_only()


def product_columns(samples: Samples, producer: ModelFunctionCall, names: Collection[str]) -> Samples:
    """Return the columns that belong to some of a call's products.

    Columns that the call did not announce belong to its first product. Values per sample of a generating call are left
    out: every rank knows them already.
    """
    kept: dict[str, Column] = {}
    for name, column in samples.columns.items():
        product = name if name in producer.produces else producer.produces[0]
        is_known = producer.kind == "generate" and not isinstance(column, Ragged)
        if product in names and not is_known:
            kept[name] = column
    return Samples(samples.ids, kept, {name: column for name, column in samples.data.items() if name in names})


def values_of(samples: Samples) -> dict[str, Tensor]:
    """Return the columns of one value per sample."""
    return {name: column for name, column in samples.columns.items() if isinstance(column, Tensor)}


def with_objects(made: Samples, prompts: Samples) -> Samples:
    """Give every response its prompt's python objects, which every rank has and which are never sent."""
    if "prompt_id" not in made:
        raise PlanError("a generate call must return the column 'prompt_id', the id of each response's prompt")
    row_of = {prompt_id: row for row, prompt_id in enumerate(prompts.ids.tolist())}
    rows: Sequence[int] = [row_of[prompt_id] for prompt_id in made.tensor("prompt_id").tolist()]
    return made.with_columns(**{name: tuple(column[row] for row in rows) for name, column in prompts.data.items()})


def check_unchanged(call: ModelFunctionCall, made: Samples | None, sent: Samples) -> None:
    """Refuse a generating call that returns other samples than those that other calls have worked on.

    Raises:
        PlanError: which names the call and the way out.
    """
    if made is None or not set(sent.ids.tolist()).issubset(made.ids.tolist()) or not made.by_ids(sent.ids).equals(sent):
        raise PlanError(
            f"call {call.name!r} returned other samples than sample_responses sent while it ran; return them as they "
            f"are, and leave changes to a call of their own, or set ReallocStrategy(generation_chunks=1)"
        )
