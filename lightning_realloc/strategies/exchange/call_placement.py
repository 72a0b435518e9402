"""Ranks, micro-batch size and training options of one model function call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.layout.dims import Coordinate, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlacement:
    """Where a call with a model runs, and how it divides its samples."""

    layout: Layout
    """Layout of the call's model."""
    micro_batch_tokens: int
    """Most tokens of one forward pass."""
    train_options: TrainOptions
    """Options of a training call; other calls ignore them."""
    order_seeds: Sequence[int] = ()
    """One seed per epoch of a training call, for the order of its mini-batches."""

    def holders(self, index: int) -> tuple[int, ...]:
        """Return the ranks that hold the results of data-parallel share ``index``: those of the last stage."""
        dims = self.layout.dims
        dp, fsdp = divmod(index, dims.fsdp)
        return self.layout.group(self.layout.rank_at(Coordinate(dims.pp - 1, dp, fsdp)), "tp")

    @property
    def senders(self) -> tuple[int, ...]:
        """The rank that sends a call's results, for each data-parallel share."""
        return tuple(self.holders(index)[0] for index in range(self.layout.data_parallel_size))
