"""In which order do samples come, and where did we stop? The same global batches on every rank.

Ranks are given no shares here: the runtime deals every batch out by length. The order follows from the seed and
the epoch alone, and Lightning stores a loader's place in its checkpoints, so a resumed run goes on with the next batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from lightning_realloc.errors import CheckpointError, DataError
from lightning_realloc.runtime.samples import Samples


class RowOrder:
    """The order of the rows in each epoch; what Lightning calls a sampler."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; Lightning calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.permutation())

    def permutation(self) -> list[int]:
        """Return this epoch's rows in order."""
        if not self.shuffle:
            return list(range(self.num_rows))
        digest = hashlib.sha256(f"{self.seed},{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        return torch.randperm(self.num_rows, generator=generator).tolist()


class BatchLoader:
    """Batches of samples, epoch after epoch.

    A sample's id is ``epoch * num_rows + row``: unique over the run, and the same wherever the sample goes.

    Args:
        table: Every row once, with ids 0..num_rows - 1 in order.
        batch_size: Samples per batch over all ranks together.
        drop_last: Whether to leave out a last batch that is smaller than the others.

    Raises:
        DataError: when that leaves no batch at all.
    """

    def __init__(
        self, table: Samples, *, batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        if drop_last and len(table) < batch_size:
            raise DataError(
                f"batch_size={batch_size} needs as many rows, there are {len(table)}; "
                f"lower batch_size, add rows or set drop_last=False"
            )
        self.table = table
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler = RowOrder(len(table), seed=seed, shuffle=shuffle)
        self._position = 0
        self._resume_at: tuple[int, int] | None = None

    def __len__(self) -> int:
        full, left_over = divmod(len(self.table), self.batch_size)
        return full + (left_over > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes through."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Samples]:
        # A generator: this runs at the first batch, after Lightning has set the epoch of a resumed run.
        epoch = self.sampler.epoch
        resume_at, self._resume_at = self._resume_at, None
        self._position = resume_at[1] if resume_at is not None and resume_at[0] == epoch else 0
        order = self.sampler.permutation()
        while self._position < len(self):
            begin = self._position * self.batch_size
            # Counted before it is handed out: a checkpoint written while the batch is trained on has it behind it.
            self._position += 1
            rows = self.table.select(order[begin : begin + self.batch_size])
            yield Samples(rows.ids + epoch * len(self.table), rows.columns)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the run, and what it depends on."""
        return {"epoch": self.sampler.epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that was handed out last.

        Raises:
            CheckpointError: when the data or its order are not those of the checkpoint.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"resuming mid-run needs the same data in the same order; the checkpoint has {name}="
                    f"{state.get(name)} and this run {name}={value}, set it back or start from the weights alone"
                )
        self.sampler.set_epoch(state["epoch"])
        self._position = state["position"]
        self._resume_at = (state["epoch"], state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": len(self.table),
            "batch_size": self.batch_size,
            "seed": self.sampler.seed,
            "shuffle": self.sampler.shuffle,
        }
