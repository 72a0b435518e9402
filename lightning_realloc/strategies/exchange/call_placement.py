"""Where one model's call runs, and in what portions: what everything else about who does what is worked out from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.layout.dims import Coordinate, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlacement:
    """Where a model's call runs, and in what portions."""

    layout: Layout
    """The layout that its model will be in."""
    micro_batch_tokens: int
    """Most tokens of one forward pass."""
    train_options: TrainOptions
    """Of a training call."""
    order_seeds: Sequence[int] = ()
    """Of a training call's epochs."""

    def holders(self, index: int) -> tuple[int, ...]:
        """Return the ranks that have the results of data-parallel share ``index``: the last stage's."""
        dims = self.layout.dims
        dp, fsdp = divmod(index, dims.fsdp)
        return tuple(self.layout.rank_at(Coordinate(dims.pp - 1, dp, fsdp, tp)) for tp in range(dims.tp))
