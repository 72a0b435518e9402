"""One role's weights in one layout: what a call works on."""

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
    """The model this is a replica of."""
    model_layout: ModelLayout
    """Where every parameter of it lies."""
    model: nn.Module
    """The module; on a rank outside the layout a skeleton without weights."""
    delivery: WeightCopy | None = None
    """What fills it from the home replica; None for the home replica itself, and before the first filling."""
    version: int = 0
    """The version of the home replica's weights that it holds; 0 before the first filling."""
    frozen_version: int = 0
    """The same of the weights that training leaves as they are."""

    def forget(self) -> None:
        """Hold nothing any more."""
        self.version = self.frozen_version = 0

    @property
    def layout(self) -> Layout:
        """Degrees and ranks."""
        return self.model_layout.layout

    @property
    def is_sharded(self) -> bool:
        """Whether a forward pass gathers weights, and so is a collective; under replication alone it is not."""
        return self.layout.dims.fsdp > 1
