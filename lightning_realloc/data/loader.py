"""In which order do samples come, and where did we stop? The same global batches on every rank.

Ranks are given no shares here: the runtime deals every batch out by length. The order follows from the seed and
the epoch alone, and Lightning stores a loader's place in its checkpoints, so a resumed run goes on with the next batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import CheckpointError, DataError


class BatchLoader:
    """Training batches, epoch after epoch, each in another order.

    A sample's id is ``epoch * len(table) + position``: unique over the run, and the same wherever the sample goes.
    Epochs are counted here, not taken from Lightning: where ``max_steps`` ends a run inside an epoch, Lightning counts
    that epoch as done, and a run resumed from there would leave out the rest of its rows.

    Args:
        table: Every row once, with ids 0, 1, ... in order.
        batch_size: Rows per batch over all ranks together.
        drop_last: Whether to leave out a last batch that is smaller than the others.
        group_size: Samples of the table that are one row, next to each other; a batch holds whole rows.
        bucket_batches: Rows of similar length share a batch: within every so many batches of the shuffled order, rows
            are sorted by length; then batches are shuffled. None: rows are drawn whatever their lengths.
        epoch_batches: Batches after which the trainer begins the next epoch, where it does so before all are used
            (``limit_train_batches``).

    Raises:
        DataError: when there is no batch at all.
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
        epoch_batches: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        if bucket_batches is not None and (bucket_batches < 1 or not shuffle):
            raise DataError(
                f"bucket_batches={bucket_batches} with shuffle={shuffle}: it counts batches, at least 1, of a shuffled "
                f"order; set shuffle=True, or bucket_batches=None"
            )
        self.num_rows = len(table) // group_size
        if drop_last and self.num_rows < batch_size:
            raise DataError(
                f"batch_size={batch_size} needs as many rows, there are {self.num_rows}; "
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
        self.epoch_batches = len(self) if epoch_batches is None else min(epoch_batches, len(self))
        self.epoch = 0
        self._position = 0
        self._resuming = False

    def __len__(self) -> int:
        full, left_over = divmod(self.num_rows, self.batch_size)
        return full + (left_over > 0 and not self.drop_last)

    batch_sampler = None  # Lightning asks for it, where it evaluates what has a sampler

    @property
    def sampler(self) -> BatchLoader:
        """What Lightning calls ``set_epoch`` on."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch, unless batches were handed out already or a place was loaded.

        Lightning says so before every epoch, and it is all it says when it resumes between two epochs.
        """
        if self._position == 0 and not self._resuming:
            self.epoch = epoch

    def __iter__(self) -> Iterator[Samples]:
        # A generator, so an iterator that nobody draws from, as Lightning makes one before it resumes, changes nothing.
        if self._position >= self.epoch_batches or (self._position > 0 and not self._resuming):
            self.epoch, self._position = self.epoch + 1, 0
        order = self._order()
        while self._position < self.epoch_batches:
            begin = self._position * self.batch_size
            # Counted before it is handed out: a checkpoint written while the batch is trained on has it behind it.
            self._position += 1
            rows = self.table.select(_samples_of(order[begin : begin + self.batch_size], self.group_size))
            yield rows.with_ids(rows.ids + self.epoch * len(self.table))
        self._resuming = False

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the run, and what it depends on."""
        return {"epoch": self.epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that was handed out last.

        Iterations go on where the one before them stopped until the epoch is through: from a checkpoint written after
        an epoch's last batch, Lightning draws a single batch before it begins anew.

        Raises:
            CheckpointError: when the data or its order are not those of the checkpoint.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"resuming needs the same data in the same order; the checkpoint has {name}={state.get(name)} "
                    f"and this run {name}={value}, set it back or start from the weights alone"
                )
        self.epoch, self._position, self._resuming = state["epoch"], state["position"], True

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        digest = hashlib.sha256(f"{self.seed},{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        order: list[int] = torch.randperm(self.num_rows, generator=generator).tolist()
        if self.bucket_batches is None:
            return order
        return bucketed(
            order, self._lengths, batch_size=self.batch_size, bucket_batches=self.bucket_batches, generator=generator
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "bucket_batches": self.bucket_batches,
        }


class EvaluationLoader:
    """All rows in order, the same batches with the same ids every time: what is sampled for them is comparable.

    Args:
        table: The rows.
        batch_size: Rows per batch over all ranks together; the last one may be smaller.
        group_size: Samples of the table that are one row.
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


def bucketed(
    order: Sequence[int], lengths: Sequence[int], *, batch_size: int, bucket_batches: int, generator: torch.Generator
) -> list[int]:
    """Return the rows of ``order`` so that batches cut from it hold rows of similar length, in any order of batches.

    The rows of a smaller last batch stay those at the end of ``order``, whatever their lengths: which rows an epoch
    leaves out does not depend on them.
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
    """Return the tokens of every row's sequences, all of its samples together."""
    lengths = torch.zeros(len(table), dtype=torch.int64)
    for name in ("prompt_ids", "response_ids"):
        if name in table:
            lengths += table.ragged(name).lengths
    summed: list[int] = lengths.view(-1, group_size).sum(1).tolist()
    return summed


def _samples_of(rows: list[int], group_size: int) -> list[int]:
    """Return the positions of the rows' samples."""
    return [row * group_size + place for row in rows for place in range(group_size)]
