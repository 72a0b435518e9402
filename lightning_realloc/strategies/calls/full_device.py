"""What a call does when its device's memory runs out: smaller micro-batches, or an error that says what to lower."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from lightning_realloc.batch.training import MicroBatch, halved
from lightning_realloc.dataflow.dataflow import CallKind, ModelFunctionCall
from lightning_realloc.errors import DeviceFull
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies.calls.context import CallContext

log = logging.getLogger(__name__)

WAYS_OUT: dict[CallKind, str] = {
    "generate": "lower max_slots of the call in the plan, max_cache_bytes or max_new_tokens",
    "infer": "lower micro_batch_tokens of the call in the plan",
    "train": "lower micro_batch_tokens of the call in the plan or in TrainOptions, set gradient_checkpointing there",
}
"""Kind of a call -> what makes it need less memory."""
T = TypeVar("T")


class KeptCaches(Protocol):
    """Caches that engines keep between generations; `EnginePool` implements it."""

    @property
    def keeps_caches(self) -> bool:
        """Whether there may be some."""

    def give_up_caches(self) -> bool:
        """Free them, and keep no more; return whether there were any."""


class SmallerBatches:
    """Halves the micro-batches of a call for the rest of the run whenever the device's memory runs out.

    Args:
        caches: What engines keep, which is freed first.
    """

    def __init__(self, context: CallContext, caches: KeptCaches) -> None:
        self._context, self._caches = context, caches
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
                made_room = is_alone and self._caches.give_up_caches()
                if not is_alone or (not made_room and len(smaller) == len(parts)):
                    limit = f"micro_batch_tokens={self._micro_batch_tokens(call)}"
                    detail = f" with micro-batches of up to {size} samples and {limit}"
                    raise full_device(call, layout, error, self._caches, detail) from error
            # Only now: the error kept the activations alive.
            torch.cuda.empty_cache()
            if not made_room:
                self._halvings[call.name] += 1
                log.warning("%s ran out of memory with %d samples at a time: halving them", call.name, size)

    def _micro_batch_tokens(self, call: ModelFunctionCall) -> int:
        options = self._context.algorithm.train_options_of(str(call.role))
        planned = self._context.pool.plan.call(call.name).micro_batch_tokens
        return planned or options.micro_batch_tokens_on(self._context.device.type)


def full_device(
    call: ModelFunctionCall, layout: Layout, error: BaseException, caches: KeptCaches, detail: str = ""
) -> DeviceFull:
    """Return the error for a call that cannot go on, with the ways out."""
    freeing = "set GenerationOptions(free_cache=True), " if caches.keeps_caches else ""
    return DeviceFull(
        f"{call.name} in layout {layout} ran out of memory{detail}: {freeing}{WAYS_OUT[call.kind]}, offload other "
        f"roles in the plan, or cut the weights over more ranks ({str(error).splitlines()[0]})"
    )


@contextmanager
def naming_full_device(call: ModelFunctionCall, layout: Layout, caches: KeptCaches) -> Iterator[None]:
    """Raise DeviceFull with the call and the ways out where the device's memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise full_device(call, layout, error, caches) from error
