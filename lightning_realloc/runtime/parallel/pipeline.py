"""Run packed micro-batches through the stages of a pipeline, in the order of a `pipeline_schedule`.

All stages know all micro-batches, so every message's shape is known in advance. Its dtype, which autocast decides, is
sent once per run.

``torch.distributed.pipelining`` has the same schedules, but for one shape. A stage fixes its message shapes in its
first step; at the next length the first stage raises and the others wait forever (torch 2.13). Packed micro-batches
rarely have equal lengths. Padding them to buckets would add tokens to every layer, and the packing's restarting
positions would have to cover the padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.dataflow.pipeline_schedule import ScheduleName, StagePass, stage_passes
from lightning_realloc.errors import LayoutError, PlanError
from lightning_realloc.layout import ModelLayout
from lightning_realloc.runtime.forward.attention.packed_attention import packed_attention
from lightning_realloc.runtime.forward.deferred_weights import DeferredWeights
from lightning_realloc.runtime.forward.token_group import row_division
from lightning_realloc.runtime.messages.objects import broadcast_object
from lightning_realloc.runtime.model.structure import transformers_model
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.neighbour import Neighbour
from lightning_realloc.runtime.parallel.shards import local_tensor
from lightning_realloc.runtime.parallel.stage import get_stage_io
from lightning_realloc.runtime.parallel.tensor_parallel import local_products

Result = TypeVar("Result")
LossStep = Callable[[nn.Module, int], Tensor]
"""Returns the loss of a micro-batch, given the model and the micro-batch's number. Called on the last stage only."""


class PipelineStage:
    """This rank's stage of a model that `parallelize` distributed with pp > 1, and its neighbours.

    Neighbours have the same position along all other axes. They work on the same share of the batch. Under tensor
    parallelism every rank holds whole hidden states, so equal tp indices exchange them.
    """

    def __init__(self, model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry) -> None:
        """Raise LayoutError for a layout with pp=1."""
        layout = model_layout.layout
        group = meshes.group(layout, *layout.stage_axes)
        if group is None:
            raise LayoutError(f"layout {layout} has pp=1, so the model is no pipeline stage; call it as it is")
        self.model = model
        self.io = get_stage_io(model)
        self.ranks = ranks = layout.group(meshes.rank, *layout.stage_axes)
        """Ranks of the pipeline's stages, in their order."""
        self.index, self.count = ranks.index(meshes.rank), len(ranks)
        self.before = Neighbour(ranks[self.index - 1] if self.index else None, group, meshes.device_type)
        self.after = Neighbour(None if self.is_last else ranks[self.index + 1], group, meshes.device_type)
        self._model_layout = model_layout
        self._other_end = Neighbour(ranks[0] if self.is_last else ranks[-1], group, meshes.device_type)
        self._group = group

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the head and computes the loss."""
        return self.index == self.count - 1

    def from_last(self, value: Result) -> Result:
        """Return the last stage's value, plain data, on every stage. Collective over the pipeline."""
        received: Result = broadcast_object(value, self.ranks[-1], self._group)
        return received

    def begin(self) -> None:
        """Start a run. Its first messages send the dtype of all others."""
        self.before.dtype = self.after.dtype = None

    def sum_tied_gradients(self) -> None:
        """Add the gradients of weights on both the first and the last stage, so that both hold the sum, bit for bit.

        Collective over these two stages. FSDP has reduced the gradients: equal shards are added.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and len(self._model_layout.stages(name)) > 1:
                if parameter.grad is None:  # the other stage may have one
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local_tensor(parameter.grad)
                self._other_end.dtype = gradient.dtype
                self._other_end.post(gradient, tuple(gradient.shape))
                other = self._other_end.receive(tuple(gradient.shape))
                assert other is not None, "the other end of a pipeline has a rank"
                self._other_end.settle()
                gradient += other

    def shape(self, batch: PackedBatch) -> tuple[int, ...]:
        """Return the shape of a micro-batch's hidden states, (1, N, D), or of this rank's slice of them."""
        division = row_division(transformers_model(self.model), batch)
        return (1, batch.num_tokens if division is None else division.slice_length, self.io.width)

    def run_blocks(self, batch: PackedBatch, received: Tensor | None) -> Tensor:
        """Run a micro-batch through a stage before the last; return the (1, N, D) hidden states after its blocks."""
        with self.io.open(batch.input_ids, received), packed_attention(self.model, batch) as inputs:
            self.model(**inputs)
        return self.take_output(self.shape(batch))

    def take_output(self, shape: tuple[int, ...]) -> Tensor:
        """Return the hidden states after this stage's blocks, of the forward pass that has just ended.

        Raises:
            LayoutError: for hidden states that have another shape.
        """
        output, self.io.output = self.io.output, None
        if output is None or output.shape != shape:
            given = None if output is None else tuple(output.shape)
            raise LayoutError(
                f"the blocks of {type(self.model).__name__} must return hidden states of shape {shape} "
                f"to be divided into stages, and gave {given}; use pp=1"
            )
        return output


def pipeline_infer(
    stage: PipelineStage, micro_batches: Iterable[PackedBatch], method: Callable[[nn.Module, PackedBatch], Result]
) -> list[Result] | None:
    """Return ``method(model, batch)`` of every micro-batch on the last stage, and None on the others.

    Collective over the pipeline, with the same micro-batches on every stage.
    """
    results = []
    with torch.no_grad():
        stage.begin()
        for batch in micro_batches:
            received = stage.before.receive(stage.shape(batch))
            if stage.is_last:
                with stage.io.open(batch.input_ids, received):
                    results.append(method(stage.model, batch))
            else:
                stage.after.post(stage.run_blocks(batch, received))
        stage.after.settle()
    return results if stage.is_last else None


def pipeline_train(
    stage: PipelineStage,
    micro_batches: Sequence[PackedBatch],
    loss_step: LossStep,
    *,
    schedule: ScheduleName = "1f1b",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    """Run every micro-batch forward and backward; gradients accumulate as in one process.

    Collective over the pipeline, with the same micro-batches on every stage. FSDP reduces gradients in the last pass
    that adds to them, and a weight on two stages then gets the sum of both. So there is none before.

    Args:
        schedule: Order of the passes.
        context: Makes a context manager for every forward pass, such as autocast.
        backward: Starts the backward pass from the result of ``loss_step``, on the last stage.
    """
    passes = stage_passes(schedule, stage.index, stage.count, len(micro_batches))
    weights = DeferredWeights() if schedule == "zero_bubble" else None
    run = _StageRun(stage, micro_batches, loss_step, context, backward, passes, weights)
    with nullcontext() if weights is None else weights.leaving_out(local_products(stage.model)):
        run.run()
    stage.sum_tied_gradients()


@dataclass
class _StageRun:
    """One run of the passes of a stage."""

    _stage: PipelineStage
    _batches: Sequence[PackedBatch]
    _loss_step: LossStep
    _context: Callable[[], AbstractContextManager[Any]]
    _start_backward: Callable[[Tensor], None]
    _passes: Sequence[StagePass]
    _weights: DeferredWeights | None
    """Gradients that backward passes leave out; None: they compute all."""
    _pending: deque[tuple[Tensor | None, Tensor]] = field(default_factory=deque, init=False)
    """(received, output or loss) of the micro-batches that wait for their backward pass."""

    def run(self) -> None:
        stage = self._stage
        stage.begin()
        for one in self._passes:
            expected = None if one.expected is None else self._shape(one.expected)
            self._prepare_fsdp(is_last=one is self._passes[-1])
            if one.kind == "forward":
                stage.after.post(self._forward(one.micro_batch), expected)
            elif one.kind == "weights":
                self._compute_weights()
            elif (gradient := self._backward(one.micro_batch)) is not None:
                stage.before.post(gradient, expected)
        stage.before.settle()
        stage.after.settle()

    def _shape(self, number: int) -> tuple[int, ...]:
        return self._stage.shape(self._batches[number])

    def _forward(self, number: int) -> Tensor:
        """Return the hidden states for the next stage or, on the last stage, the loss."""
        stage, batch = self._stage, self._batches[number]
        received = stage.before.receive(self._shape(number))
        if received is not None:
            received.requires_grad_()
        with self._context():
            if stage.is_last:
                with stage.io.open(batch.input_ids, received):
                    output = self._loss_step(stage.model, number)
            else:
                output = stage.run_blocks(batch, received)
        self._pending.append((received, output))
        return output.detach()

    def _backward(self, number: int) -> Tensor | None:
        """Run a micro-batch's backward pass from its gradient or loss; return the gradient of its input."""
        gradient = self._stage.after.receive(self._shape(number))
        received, output = self._pending.popleft()
        if self._weights is not None:
            self._weights.begin_backward()
        if self._stage.is_last:
            self._start_backward(output)
        elif output.requires_grad:
            torch.autograd.backward(output, gradient)
        if received is None:
            return None
        if received.grad is None:
            raise PlanError(
                f"the loss of a micro-batch does not depend on the input of stage {self._stage.index}; "
                "compute the loss from the model's output for the whole micro-batch"
            )
        return received.grad

    def _compute_weights(self) -> None:
        """Compute the gradients of weights that the oldest backward pass has left out."""
        assert self._weights is not None, "only a schedule that leaves them out has such passes"
        self._weights.compute_oldest()
        if isinstance(self._stage.model, FSDPModule):
            # FSDP adds or reduces gradients at the end of a backward pass. This one has none, so call it, as torch's
            # own pipelines do.
            self._stage.model._get_fsdp_state()._root_post_backward_final_callback()

    def _prepare_fsdp(self, *, is_last: bool) -> None:
        model = self._stage.model
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
            # No hook gathers the root's own weights for a backward pass that starts inside the model. So they stay
            # gathered until the last one. Blocks free theirs after every use.
            model.set_reshard_after_backward(is_last, recurse=False)
