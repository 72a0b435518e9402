"""Loaders of global batches in a reproducible order: the same batches on every rank, resumable within an epoch.

The runtime divides each batch among ranks by length. The order depends on seed and epoch only. Lightning stores a
loader's position in its checkpoints, so a resumed run continues with the next batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import CheckpointError, DataError


class BatchLoader:
    """Training batches, reordered in every epoch.

    A sample's id is ``epoch * len(table) + position``, unique over the run and independent of ranks. The loader counts
    epochs itself: if ``max_steps`` ends a run within an epoch, Lightning counts that epoch as done. A run resumed from
    there would skip the rest of its rows.

    Args:
        table: Every row once, with ids 0, 1, ... in order.
        batch_size: Rows per batch over all ranks together.
        drop_last: Whether to drop a last batch that is smaller than the others.
        group_size: Number of adjacent samples that form one row; a batch holds whole rows.
        bucket_batches: Number of batches of the shuffled order that are sorted by length together, so that a batch
            holds rows of similar length; the batches are then shuffled. None does not group by length.

    Raises:
        DataError: if there is no batch.
    """

    def __init__(
        self,
        table: Samples,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        group_size: int = 1,
        bucket_batches: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        if bucket_batches is not None and (bucket_batches < 1 or not shuffle):
            raise DataError(
                f"bucket_batches={bucket_batches} with shuffle={shuffle}: it is a number of batches, at least 1, of "
                f"the shuffled order; set shuffle=True, or bucket_batches=None"
            )
        self.num_rows = len(table) // group_size
        if drop_last and self.num_rows < batch_size:
            raise DataError(
                f"batch_size={batch_size} needs as many rows, but there are {self.num_rows}; "
                f"lower batch_size, add rows or set drop_last=False"
            )
        self.table = table
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.group_size = group_size
        self.bucket_batches = bucket_batches
        self._lengths = [] if bucket_batches is None else _row_lengths(table, group_size)
        self.epoch_batches = len(self)
        """Batches after which the trainer begins the next epoch, fewer than all under ``limit_train_batches``."""
        self.epoch = 0
        self._position = 0
        self._resuming = False

    def __len__(self) -> int:
        full, left_over = divmod(self.num_rows, self.batch_size)
        return full + (left_over > 0 and not self.drop_last)

    batch_sampler = None  # Lightning reads it from loaders with a sampler

    @property
    def sampler(self) -> BatchLoader:
        """Object on which Lightning calls ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Start at this epoch, unless batches were handed out or a position was loaded.

        Lightning calls it before every epoch. When it resumes between two epochs, it calls nothing else.
        """
        if self._position == 0 and not self._resuming:
            self.epoch = epoch

    def __iter__(self) -> Iterator[Samples]:
        # A generator: Lightning makes an iterator before it resumes, which must not change the state.
        if self._position >= self.epoch_batches or (self._position > 0 and not self._resuming):
            self.epoch, self._position = self.epoch + 1, 0
        order = self._order()
        while self._position < self.epoch_batches:
            # Counted before the yield, so that a checkpoint written during this batch's training includes it.
            self._position += 1
            yield self._batch(order, self._position - 1)
        self._resuming = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run and the settings that it depends on."""
        return {"epoch": self.epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that was handed out last.

        Iterations continue where the previous one stopped until the epoch ends: after a checkpoint at an epoch's last
        batch, Lightning draws a single batch before it starts again.

        Raises:
            CheckpointError: if the data or its order differ from the checkpoint's.
        """
        refuse_other_order("data", self._identity(), state)
        self.epoch, self._position, self._resuming = state["epoch"], state["position"], True

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = seeded_generator(self.seed, self.epoch)
        order: list[int] = torch.randperm(self.num_rows, generator=generator).tolist()
        if self.bucket_batches is None:
            return order
        return bucketed(
            order, self._lengths, batch_size=self.batch_size, bucket_batches=self.bucket_batches, generator=generator
        )

    def _batch(self, order: Sequence[int], place: int) -> Samples:
        """Return an epoch's batch by its place, from the order of the epoch's rows."""
        begin = place * self.batch_size
        rows = self.table.select(_samples_of(order[begin : begin + self.batch_size], self.group_size))
        return rows.with_ids(rows.ids + self.epoch * len(self.table))

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "bucket_batches": self.bucket_batches,
            "sets": None,
            "mix": None,
            "curriculum": None,
        }


class EvaluationLoader:
    """All rows in order, with the same batches and ids every time, so that sampled results are comparable.

    Args:
        table: Samples of the rows.
        batch_size: Rows per batch over all ranks together; the last batch may be smaller.
        group_size: Number of adjacent samples that form one row.
    """

    def __init__(self, table: Samples, *, batch_size: int, group_size: int = 1) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        self.table = table
        self.batch_size = batch_size
        self.group_size = group_size

    def __len__(self) -> int:
        return -(-len(self.table) // (self.batch_size * self.group_size))

    def __iter__(self) -> Iterator[Samples]:
        step = self.batch_size * self.group_size
        for begin in range(0, len(self.table), step):
            yield self.table.select(range(begin, min(begin + step, len(self.table))))


def seeded_generator(*parts: object) -> torch.Generator:
    """Return a generator whose numbers depend on these values alone."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


def refuse_other_order(what: str, settings: Mapping[str, object], stored: Mapping[str, object]) -> None:
    """Raise CheckpointError if a loader's settings differ from those in a checkpoint; ``what``: what it reads."""
    for name, value in settings.items():
        if stored.get(name) != value:
            raise CheckpointError(
                f"resuming needs the same {what} in the same order; the checkpoint has {name}={stored.get(name)} "
                f"and this run {name}={value}, set it back or start from the weights alone"
            )


def bucketed(
    order: Sequence[int], lengths: Sequence[int], *, batch_size: int, bucket_batches: int, generator: torch.Generator
) -> list[int]:
    """Reorder rows so that consecutive batches hold rows of similar length; the order of batches is random.

    Rows of a smaller last batch stay at the end, so the rows that an epoch drops do not depend on lengths.
    """
    num_full = len(order) // batch_size * batch_size
    window = batch_size * bucket_batches
    batches: list[list[int]] = []
    for begin in range(0, num_full, window):
        rows = sorted(order[begin : min(begin + window, num_full)], key=lambda row: lengths[row])
        batches += [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [row for index in shuffled for row in batches[index]] + list(order[num_full:])


def _row_lengths(table: Samples, group_size: int) -> list[int]:
    """Return the number of tokens of every row, over all its samples and sequences."""
    lengths = torch.zeros(len(table), dtype=torch.int64)
    for name in ("prompt_ids", "response_ids"):
        if name in table:
            lengths += table.ragged(name).lengths
    summed: list[int] = lengths.view(-1, group_size).sum(1).tolist()
    return summed


def _samples_of(rows: Sequence[int], group_size: int) -> list[int]:
    """Return the positions of the samples that belong to these rows."""
    return [row * group_size + place for row in rows for place in range(group_size)]


def epoch_batches(trainer: Trainer | None, num_batches: int) -> int:
    """Return how many of a loader's batches the Trainer's epoch has."""
    limit = None if trainer is None else trainer.limit_train_batches
    if limit is None:
        return num_batches
    return min(limit, num_batches) if isinstance(limit, int) else int(limit * num_batches)
