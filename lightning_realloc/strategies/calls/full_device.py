"""What a call does when its device's memory runs out: smaller micro-batches, or an error that says what to lower."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from lightning_realloc.batch.training import MicroBatch, halved
from lightning_realloc.dataflow.dataflow import CallKind, ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.strategies.calls.context import CallContext

log = logging.getLogger(__name__)

WAYS_OUT: dict[CallKind, str] = {
    "generate": "lower max_slots of the call in the plan, max_cache_bytes or max_new_tokens",
    "infer": "lower micro_batch_tokens of the call in the plan",
    "train": "lower micro_batch_tokens in TrainOptions, set gradient_checkpointing for the call in the plan",
}
"""Kind of a call -> what makes it need less memory."""
T = TypeVar("T")


class SmallerBatches:
    """Halves the micro-batches of a call for the rest of the run whenever the device's memory runs out.

    Args:
        context: The algorithm, and its models on this rank.
        make_room: Frees memory that nothing needs at once; returns whether there was any.
    """

    def __init__(self, context: CallContext, make_room: Callable[[], bool]) -> None:
        self._context, self._make_room = context, make_room
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
            PlanError: if memory runs out otherwise; other ranks already wait in a collective.
        """
        while True:
            parts = self.divided(call, micro_batches)
            size = max(len(micro.positions) for micro in parts)
            try:
                return work(parts)
            except torch.OutOfMemoryError as error:
                smaller = halved(parts, 1, self._context.algorithm.group_size)
                is_alone = len(layout.ranks) == 1
                has_room = is_alone and self._make_room()
                if not is_alone or (not has_room and len(smaller) == len(parts)):
                    limit = f"micro_batch_tokens={self._micro_batch_tokens(call)}"
                    detail = f" with micro-batches of up to {size} samples and {limit}"
                    raise full_device(call, layout, error, detail) from error
            # Only now: the error kept the activations alive.
            torch.cuda.empty_cache()
            if not has_room:
                self._halvings[call.name] += 1
                log.warning("%s ran out of memory with %d samples at a time: halving them", call.name, size)

    def _micro_batch_tokens(self, call: ModelFunctionCall) -> int:
        options = self._context.algorithm.train_options_of(str(call.role))
        planned = self._context.pool.plan.call(call.name).micro_batch_tokens
        return planned or options.micro_batch_tokens_on(self._context.device.type)


def full_device(call: ModelFunctionCall, layout: Layout, error: BaseException, detail: str = "") -> PlanError:
    """Return the error for a call that cannot go on, with the ways out."""
    return PlanError(
        f"{call.name} in layout {layout} ran out of memory{detail}: {WAYS_OUT[call.kind]}, offload other roles in the "
        f"plan, or cut the weights over more ranks ({str(error).splitlines()[0]})"
    )


@contextmanager
def naming_full_device(call: ModelFunctionCall, layout: Layout) -> Iterator[None]:
    """Raise PlanError with the call and the ways out where the device's memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise full_device(call, layout, error) from error
