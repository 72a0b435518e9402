"""Record the experts of every token of a generation in the cache, as a layer next to its keys and values.

Whatever happens to keys and values happens to records: slots are copied, moved and preempted, prompts share pages,
rejected drafts are overwritten, samples change their rank, and captured steps store into the same memory.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_realloc.generation.cache.kv_cache import KVCache, StepPlaces
from lightning_realloc.runtime.forward.routers import RoutedPass, Routers, install_routers


class ExpertRecords:
    """Experts of the tokens of one engine.

    Args:
        routers: Sizes of the model's routers.
    """

    _layer: ClassVar[int] = -1
    """Number of the layer of records among those of the cache."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self.keeps = False
        """Whether `read` returns records. Tokens are counted in any case."""
        self.counts: Tensor | None = None
        """(layers, experts) tokens of responses by expert, since this was None."""

    @classmethod
    def of_model(cls, model: nn.Module) -> ExpertRecords | None:
        """Return the records of a model's engine; None for a model without known routers."""
        routers = install_routers(model)
        return None if routers is None else cls(routers)

    def routed_pass(self, known: Tensor | None = None) -> RoutedPass:
        """Return a pass for one forward, to give to :meth:`store`; ``known``: see `RoutedPass`."""
        return RoutedPass(self.routers, records=True, known=known)

    @staticmethod
    def store(routed: RoutedPass, places: StepPlaces) -> None:
        """Store the record of a forward's tokens at their places."""
        record = routed.record()[:, None]
        places.store(ExpertRecords._layer, record, record[..., :0])

    def read(self, cache: KVCache, slot: int, counted_from: int, end: int) -> Tensor | None:
        """Return the (end, L * k) record of a slot's first positions on the host, and count it from a position on."""
        cache.begin_forward()
        stored = dict(cache.own_layers())[ExpertRecords._layer][0].flatten(0, 1)
        places = cache.indices(slot, torch.arange(end, device=stored.device))
        record = stored.index_select(0, places)[:, 0]
        counts = self.routers.count(record[counted_from:])
        self.counts = counts if self.counts is None else self.counts + counts
        return record.cpu() if self.keeps else None
