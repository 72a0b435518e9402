"""What a call does when its device's memory runs out: smaller micro-batches, or an error that says what to lower."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from lightning_realloc.batch.shares import MicroBatch
from lightning_realloc.batch.training import halved
from lightning_realloc.dataflow.dataflow import CallKind, ModelFunctionCall
from lightning_realloc.errors import DeviceFull
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_pool import EnginePool

log = logging.getLogger(__name__)

WAYS_OUT: dict[CallKind, str] = {
    "generate": "lower max_slots of the call in the plan, max_cache_bytes or max_new_tokens",
    "infer": "lower micro_batch_tokens of the call in the plan",
    "train": "lower micro_batch_tokens of the call in the plan or in TrainOptions, set gradient_checkpointing there",
}
"""Kind of a call -> what makes it need less memory."""
T = TypeVar("T")


class SmallerBatches:
    """Halves the micro-batches of a call for the rest of the run whenever the device's memory runs out.

    Args:
        engines: Their kept caches are freed first.
    """

    def __init__(self, context: CallContext, engines: EnginePool) -> None:
        self._context, self._engines = context, engines
        self._halvings: Counter[str] = Counter()
        """Call -> how often its micro-batches were halved."""

    def forget(self) -> None:
        """Start with whole micro-batches again."""
        self._halvings.clear()

    def divided(self, call: ModelFunctionCall, micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
        """Return micro-batches as small as they have to be."""
        return halved(micro_batches, self._halvings[call.name], self._context.algorithm.group_size)

    def run(
        self,
        call: ModelFunctionCall,
        layout: Layout,
        micro_batches: Sequence[MicroBatch],
        work: Callable[[Sequence[MicroBatch]], T],
    ) -> T:
        """Return the result of ``work`` on the micro-batches; one rank alone tries smaller ones where memory runs out.

        Raises:
            DeviceFull: if memory runs out otherwise; other ranks already wait in a collective.
        """
        while True:
            parts = self.divided(call, micro_batches)
            size = max(len(micro.positions) for micro in parts)
            try:
                return work(parts)
            except torch.OutOfMemoryError as error:
                smaller = halved(parts, 1, self._context.algorithm.group_size)
                is_alone = len(layout.ranks) == 1
                made_room = is_alone and self._engines.give_up_caches()
                if not is_alone or (not made_room and len(smaller) == len(parts)):
                    limit = f"micro_batch_tokens={self._context.micro_batch_tokens(call)}"
                    detail = f" with micro-batches of up to {size} samples and {limit}"
                    raise full_device(call, layout, error, self._engines, detail) from error
            # Only now: the error kept the activations alive.
            torch.cuda.empty_cache()
            if not made_room:
                self._halvings[call.name] += 1
                log.warning("%s ran out of memory with %d samples at a time: halving them", call.name, size)


def full_device(
    call: ModelFunctionCall, layout: Layout, error: BaseException, engines: EnginePool, detail: str = ""
) -> DeviceFull:
    """Return the error for a call that cannot go on, with the ways out."""
    others = [str(other.dims) for other in layout.row_divisions] if call.kind != "generate" else []
    dividing = f"divide rows over its ranks ({', '.join(others)}), " if others else ""
    freeing = "set GenerationOptions(free_cache=True), " if engines.keeps_caches else ""
    return DeviceFull(
        f"{call.name} in layout {layout} ran out of memory{detail}: {freeing}{WAYS_OUT[call.kind]}, {dividing}"
        f"offload other roles in the plan, or cut the weights over more ranks ({str(error).splitlines()[0]})"
    )


@contextmanager
def naming_full_device(call: ModelFunctionCall, layout: Layout, engines: EnginePool) -> Iterator[None]:
    """Raise DeviceFull with the call and the ways out where the device's memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise full_device(call, layout, error, engines) from error
