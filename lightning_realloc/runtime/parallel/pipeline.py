"""Run packed micro-batches through the stages of a pipeline, in the order of a `pipeline_schedule`.

All stages know all micro-batches, so every message's shape is known in advance. Its dtype, which autocast decides, is
sent once per run.

``torch.distributed.pipelining`` has the same schedules, but for one shape. A stage fixes its message shapes in its
first step; at the next length the first stage raises and the others wait forever (torch 2.13). Packed micro-batches
rarely have equal lengths. Padding them to buckets would add tokens to every layer, and the packing's restarting
positions would have to cover the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.dataflow.pipeline_schedule import ScheduleName, StagePass, pipeline_turns
from lightning_realloc.errors import LayoutError, PlanError
from lightning_realloc.layout import ModelLayout
from lightning_realloc.runtime.forward.attention.packed_attention import packed_attention
from lightning_realloc.runtime.forward.deferred_weights import DeferredWeights
from lightning_realloc.runtime.forward.token_group import row_division
from lightning_realloc.runtime.messages.objects import broadcast_object
from lightning_realloc.runtime.model.structure import find_blocks, transformers_model
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.neighbour import ExpectedTensor, Neighbour
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
        self.last_run = layout.dims.num_runs - 1
        """The run of blocks before the head."""
        others = {(self.index + step) % self.count for step in (-1, 1)}
        self.neighbours = {other: Neighbour(ranks[other], group, meshes.device_type) for other in others}
        """Stage -> its rank; the last and the first stage are neighbours, too."""
        nobody = Neighbour(None, group, meshes.device_type)
        self.before = self.neighbours[self.index - 1] if self.index else nobody
        self.after = nobody if self.is_last else self.neighbours[self.index + 1]
        self._model_layout = model_layout
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
        """Start the passes of a call. The first messages of two neighbours send the dtype of all others."""
        for neighbour in self.neighbours.values():
            neighbour.dtype = None

    def blocks(self, run: int) -> Iterator[FSDPModule]:
        """Yield the blocks of a run that FSDP wraps."""
        bounds = self._model_layout.model.stage_blocks(self.last_run + 1)[run]
        for _, block in find_blocks(self.model)[bounds.start : bounds.stop]:
            assert isinstance(block, FSDPModule), "FSDP wraps all blocks or none"
            yield block

    def sum_tied_gradients(self) -> None:
        """Add the gradients of weights on both the first and the last stage, so that both hold the sum, bit for bit.

        Collective over these two stages. FSDP has reduced the gradients: equal shards are added.
        """
        other_end = self.neighbours.get(0 if self.is_last else self.count - 1)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and len(self._model_layout.stages(name)) > 1:
                if parameter.grad is None:  # the other stage may have one
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local_tensor(parameter.grad)
                assert other_end is not None, "the first and the last stage are neighbours"
                other_end.dtype = gradient.dtype
                gradient += other_end.start_receive(tuple(gradient.shape), gradient).wait()

    def shape(self, batch: PackedBatch) -> tuple[int, ...]:
        """Return the shape of a micro-batch's hidden states, (1, N, D), or of this rank's slice of them."""
        division = row_division(transformers_model(self.model), batch)
        return (1, batch.num_tokens if division is None else division.slice_length, self.io.width)

    def run_blocks(self, batch: PackedBatch, received: Tensor | None, run: int) -> Tensor:
        """Run a micro-batch through a run of blocks before the last; return the (1, N, D) hidden states after it."""
        with self.io.open(batch.input_ids, received, run=run), packed_attention(self.model, batch) as inputs:
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
    stage: PipelineStage,
    micro_batches: Sequence[PackedBatch],
    method: Callable[[nn.Module, PackedBatch], Result],
    *,
    count: Callable[[], None] = lambda: None,
) -> list[Result] | None:
    """Return ``method(model, batch)`` of every micro-batch on the last stage, and None on the others.

    Collective over the pipeline, with the same micro-batches on every stage.

    Args:
        count: Called when a micro-batch leaves this stage.
    """
    results = []

    def make(one: StagePass, received: Tensor | None) -> Tensor | None:
        batch, output = micro_batches[one.micro_batch], None
        if one.run == stage.last_run:
            with stage.io.open(batch.input_ids, received, run=one.run):
                results.append(method(stage.model, batch))
        else:
            output = stage.run_blocks(batch, received, one.run)
        if one.run + stage.count > stage.last_run:
            count()
        return output

    with torch.no_grad():
        _run_passes(stage, micro_batches, None, make)
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
    weights = DeferredWeights() if schedule == "zero_bubble" else None
    run = _Training(stage, micro_batches, loss_step, context, backward, weights)
    with nullcontext() if weights is None else weights.leaving_out(local_products(stage.model)):
        _run_passes(stage, micro_batches, schedule, run.make)
    stage.sum_tied_gradients()


def _run_passes(
    stage: PipelineStage,
    batches: Sequence[PackedBatch],
    schedule: ScheduleName | None,
    make: Callable[[StagePass, Tensor | None], Tensor | None],
) -> None:
    """Run the passes of a stage in the order of a schedule.

    Args:
        schedule: None: forward passes alone.
        make: Runs a pass, given its input, which is None at both ends of the pipeline; returns its result.
    """
    if isinstance(stage.model, FSDPModule):
        stage.model._get_fsdp_state()._lazy_init()  # finds all blocks, of which a pass may replace some
    stage.begin()
    arriving: dict[StagePass, ExpectedTensor] = {}
    turns = pipeline_turns(schedule, stage.count, len(batches), vpp=(stage.last_run + 1) // stage.count)
    for turn in turns[stage.index]:
        result = None
        if turn.made is not None:
            pending = arriving.pop(turn.made, None)
            result = make(turn.made, None if pending is None else pending.wait())
        for exchange in turn.exchanges:
            neighbour, sent = stage.neighbours[exchange.peer], None if exchange.sent is None else result
            if exchange.received is not None:
                shape = stage.shape(batches[exchange.received.micro_batch])
                arriving[exchange.received] = neighbour.start_receive(shape, sent)
            elif sent is not None:
                neighbour.post(sent)
    for neighbour in stage.neighbours.values():
        neighbour.settle()


@dataclass
class _Training:
    """Forward and backward passes of a stage."""

    _stage: PipelineStage
    _batches: Sequence[PackedBatch]
    _loss_step: LossStep
    _context: Callable[[], AbstractContextManager[Any]]
    _start_backward: Callable[[Tensor], None]
    _weights: DeferredWeights | None
    """Gradients that backward passes leave out; None: they compute all."""
    _pending: dict[StagePass, tuple[Tensor | None, Tensor]] = field(default_factory=dict, init=False)
    """(input, output or loss) of the forward passes, by the backward pass that they wait for."""

    def make(self, one: StagePass, received: Tensor | None) -> Tensor | None:
        """Run a pass. A forward pass returns hidden states or a loss, a backward pass the gradient of its input."""
        self._prepare_fsdp(one)
        if one.kind == "forward":
            return self._forward(one, received)
        if one.kind == "backward":
            return self._backward(one, received)
        self._compute_weights()
        return None

    def _forward(self, one: StagePass, received: Tensor | None) -> Tensor:
        stage, batch = self._stage, self._batches[one.micro_batch]
        if received is not None:
            received.requires_grad_()
        with self._context():
            if one.run == stage.last_run:
                with stage.io.open(batch.input_ids, received, run=one.run):
                    output = self._loss_step(stage.model, one.micro_batch)
            else:
                output = stage.run_blocks(batch, received, one.run)
        self._pending[one._replace(kind="backward")] = received, output
        return output.detach()

    def _backward(self, one: StagePass, gradient: Tensor | None) -> Tensor | None:
        received, output = self._pending.pop(one)
        if self._weights is not None:
            self._weights.begin_backward()
        if one.run == self._stage.last_run:
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

    def _prepare_fsdp(self, one: StagePass) -> None:
        """Let FSDP reduce the gradients of blocks in the last pass of their run, and the others in the last of all."""
        model = self._stage.model
        if not isinstance(model, FSDPModule):
            return
        kind = "backward" if self._weights is None else "weights"
        ends_run = one.kind == kind and one.micro_batch == len(self._batches) - 1
        is_last = ends_run and one.run == self._stage.index
        model.set_requires_gradient_sync(is_last)
        if ends_run:
            for block in self._stage.blocks(one.run):
                block.set_requires_gradient_sync(True)
        # No hook gathers the root's own weights for a backward pass that starts inside the model. So they stay
        # gathered until the last one. Blocks free theirs after every use.
        model.set_reshard_after_backward(is_last, recurse=False)
