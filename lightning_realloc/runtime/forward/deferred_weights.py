"""Gradients of linear layers' weights, left out of backward passes and computed later.

A backward pass then only computes what the previous stage waits for. Later, a weight's gradient needs the layer's input
and its output's gradient, but neither the graph nor the weight: FSDP gathers nothing, and nothing is recomputed.
``stage_backward_weight`` of torch.distributed.pipelining runs the graph of each layer again instead. So weights would
have to stay gathered, and a checkpointed block would be recomputed once for each of its layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn


class DeferredWeights:
    """Gradients that wait, by backward pass."""

    def __init__(self) -> None:
        self._passes: deque[list[tuple[Tensor, Tensor, Tensor]]] = deque()
        """(weight, input, gradient of the output) of every layer in every backward pass."""

    @contextmanager
    def leaving_out(self, layers: Iterable[nn.Linear]) -> Iterator[None]:
        """Leave the gradients of these layers' weights out of backward passes of forwards inside the block.

        The gradient of a layer's output must be that of its product of input and weight. Passes that recompute the
        forward run inside the block, too.
        """
        changed = [layer for layer in layers if layer.weight.requires_grad]
        for layer in changed:
            vars(layer)["forward"] = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in changed:
                del vars(layer)["forward"]

    def begin_backward(self) -> None:
        """Called before every backward pass."""
        self._passes.append([])

    def compute_oldest(self) -> None:
        """Add the gradients of the oldest backward pass to those of the weights."""
        with torch.no_grad():
            for weight, given, gradient in self._passes.popleft():
                given = given.to(gradient.dtype)  # under autocast
                product = (gradient.flatten(0, -2).mT @ given.flatten(0, -2)).to(weight.dtype)
                weight.grad = product if weight.grad is None else weight.grad.add_(product)

    def _forward(self, layer: nn.Linear, given: Tensor) -> Tensor:
        weight = layer.weight
        parameters: dict[str, Any] = layer._parameters
        parameters["weight"] = weight.detach()
        try:
            output = type(layer).forward(layer, given)
        finally:
            parameters["weight"] = weight
        if not torch.is_grad_enabled():
            return output
        return cast(Tensor, _LeaveOut.apply(output, given, weight, self._passes))


class _LeaveOut(torch.autograd.Function):
    """Returns the output, and has no gradient for the weight, but notes from what to compute it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, given: Tensor, weight: Tensor, passes: deque[Any]) -> Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.passes = weight, passes
        ctx.mark_dirty(output)  # a view could not be changed in place by the model
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (given,) = ctx.saved_tensors
        ctx.passes[-1].append((ctx.weight, given, gradient))
        return gradient, None, None, None
