"""Replica: one role's weights in one layout."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.strategies.pool.weight_copy import WeightCopy


@dataclass(slots=True)
class Replica:
    """One role's weights in one layout, as this rank sees them."""

    role: str
    """The role whose weights these are."""
    model_layout: ModelLayout
    """Where every parameter lies."""
    model: nn.Module
    """The module; without weights on a rank outside the layout."""
    weight_copy: WeightCopy | None = None
    """Fills this replica from the home replica; None for the home replica, and before the first use."""
    version: int = 0
    """Version of the home replica's weights that it holds; 0 before the first use."""
    frozen_version: int = 0
    """Version of the weights that training leaves unchanged; 0 before the first use."""

    def forget(self) -> None:
        """Mark all weights as stale."""
        self.version = self.frozen_version = 0

    @property
    def layout(self) -> Layout:
        """Parallel degrees and ranks."""
        return self.model_layout.layout

    @property
    def is_sharded(self) -> bool:
        """Whether a forward pass gathers weights, and so is collective."""
        return self.layout.dims.fsdp > 1
