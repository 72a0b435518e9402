"""In which order does a pipeline stage run its micro-batches, and what does it exchange with its neighbours?

One forward, one backward (Narayanan et al., arXiv:2104.04473, section 2.2): a stage holds the activations of at most as
many micro-batches as there are stages from it to the last, whatever their number. All stages know all micro-batches,
so the shape of every message is known beforehand; its dtype, which autocast decides, is told once per run.

``torch.distributed.pipelining`` runs the same schedules, but for one shape: a stage fixes the shapes of its messages in
its first step, and on the next one of another length the first stage raises and the others wait for ever (torch 2.13).
Packed micro-batches hardly ever have the same length, and padding them to buckets would cost tokens in every layer, and
the packing's restarting positions would have to cover the padding. Two functions of messages are less than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import LayoutError, PlanError
from lightning_realloc.layout import ModelLayout
from lightning_realloc.runtime.forward.packed_attention import packed_attention
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.stage import passage_of

Result = TypeVar("Result")
LossStep = Callable[[nn.Module, int], Tensor]
"""Returns the scalar to start backward from, for a micro-batch by its number; called on the last stage alone."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PipelineStage:
    """This rank's stage of a model that `parallelize` laid out with pp > 1, and the ranks before and after it.

    A stage talks to the ranks at its own place along the other axes: the same share of the batch, and under tensor
    parallelism, where hidden states are whole on every rank, the same index.
    """

    def __init__(self, model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry) -> None:
        """Raises LayoutError for a layout with pp=1."""
        layout = model_layout.layout
        group = meshes.group(layout, "pp")
        if group is None:
            raise LayoutError(f"layout {layout} has pp=1, so the model is no pipeline stage; call it as it is")
        self.model = model
        self.passage = passage_of(model)
        ranks = layout.group(meshes.rank, "pp")
        self.index, self.count = ranks.index(meshes.rank), len(ranks)
        self.before = _Neighbour(ranks[self.index - 1] if self.index else None, group, meshes.device_type)
        self.after = _Neighbour(None if self.is_last else ranks[self.index + 1], group, meshes.device_type)
        self._group, self._last_rank = group, ranks[-1]

    @property
    def is_last(self) -> bool:
        """Whether the head, and so the loss, is here."""
        return self.index == self.count - 1

    def from_last(self, value: Result) -> Result:
        """Return the last stage's value, which can be pickled, on every stage. Collective over the pipeline."""
        held = [value]
        dist.broadcast_object_list(held, src=self._last_rank, group=self._group)
        return held[0]

    def begin(self) -> None:
        """Start a run: its first messages tell the dtype of all others."""
        self.before.dtype = self.after.dtype = None

    def shape(self, batch: PackedBatch) -> tuple[int, ...]:
        """The shape of a micro-batch's hidden states, (1, N, D)."""
        return (1, batch.num_tokens, self.passage.width)

    def depart(self, batch: PackedBatch, received: Tensor | None) -> Tensor:
        """Run a micro-batch through a stage that is not the last; return the (1, N, D) hidden states it ends with."""
        with self.passage.open(batch.input_ids, received), packed_attention(self.model, batch) as inputs:
            self.model(**inputs)
        departing, self.passage.departing = self.passage.departing, None
        if departing is None or departing.shape != self.shape(batch):
            shape = None if departing is None else tuple(departing.shape)
            raise LayoutError(
                f"the blocks of {type(self.model).__name__} must hand on hidden states of shape {self.shape(batch)} "
                f"to be divided into stages, and gave {shape}; use pp=1"
            )
        return departing


def pipeline_infer(
    stage: PipelineStage, micro_batches: Sequence[PackedBatch], method: Callable[[nn.Module, PackedBatch], Result]
) -> list[Result] | None:
    """Return ``method(model, batch)`` of every micro-batch on the last stage; None on the others, which feed it.

    Collective over the pipeline, with the same micro-batches on every stage.
    """
    results = []
    with torch.no_grad():
        stage.begin()
        for batch in micro_batches:
            received = stage.before.exchange(None, stage.shape(batch))
            if stage.is_last:
                with stage.passage.open(batch.input_ids, received):
                    results.append(method(stage.model, batch))
            else:
                stage.after.exchange(stage.depart(batch, received), None)
    return results if stage.is_last else None


def pipeline_train(
    stage: PipelineStage,
    micro_batches: Sequence[PackedBatch],
    loss_step: LossStep,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    """Run every micro-batch forward and backward; gradients add up as in one process.

    Collective over the pipeline, with the same micro-batches on every stage. Under FSDP they are reduced in the last
    one's backward pass.

    Args:
        context: Around every forward pass, such as autocast.
        backward: Starts the backward pass from what ``loss_step`` returned, on the last stage.
    """
    _OneForwardOneBackward(stage, micro_batches, loss_step, context, backward).run()


class _OneForwardOneBackward:
    """One run of the schedule: fill the pipeline, then alternate, then drain it."""

    def __init__(
        self,
        stage: PipelineStage,
        micro_batches: Sequence[PackedBatch],
        loss_step: LossStep,
        context: Callable[[], AbstractContextManager[Any]],
        backward: Callable[[Tensor], None],
    ) -> None:
        self._stage = stage
        self._batches = micro_batches
        self._loss_step = loss_step
        self._context = context
        self._start_backward = backward
        self._under_way: deque[tuple[Tensor | None, Tensor]] = deque()
        """What was received and what was made of it, of micro-batches that wait for their backward pass."""
        self._num_done = 0

    def run(self) -> None:
        before, after = self._stage.before, self._stage.after
        self._stage.begin()
        count = len(self._batches)
        ahead = min(self._stage.count - self._stage.index - 1, count)
        for number in range(ahead):
            after.exchange(self._forward(number, before.exchange(None, self._shape(number))), None)
        received = before.exchange(None, self._shape(ahead)) if ahead < count else None
        for number in range(ahead, count):
            made = self._forward(number, received)
            gradient = after.exchange(made, self._shape(number - ahead))
            upstream = self._backward(gradient)
            received = before.exchange(upstream, self._shape(number + 1) if number + 1 < count else None)
        for number in range(count - ahead, count):
            before.exchange(self._backward(after.exchange(None, self._shape(number))), None)

    def _shape(self, number: int) -> tuple[int, ...]:
        return self._stage.shape(self._batches[number])

    def _forward(self, number: int, received: Tensor | None) -> Tensor:
        """Return the hidden states to send on; on the last stage, which sends nothing on, the loss."""
        if received is not None:
            received.requires_grad_()
        stage, batch = self._stage, self._batches[number]
        with self._context():
            if stage.is_last:
                with stage.passage.open(batch.input_ids, received):
                    made = self._loss_step(stage.model, number)
            else:
                made = stage.depart(batch, received)
        self._under_way.append((received, made))
        return made.detach()

    def _backward(self, gradient: Tensor | None) -> Tensor | None:
        """Run the oldest micro-batch's backward pass from its gradient, or loss; return the gradient to send back."""
        received, made = self._under_way.popleft()
        self._num_done += 1
        self._tell_fsdp(is_last=self._num_done == len(self._batches))
        if self._stage.is_last:
            self._start_backward(made)
        elif made.requires_grad:
            torch.autograd.backward(made, gradient)
        if received is None:
            return None
        if received.grad is None:
            raise PlanError(
                f"the loss of a micro-batch does not depend on what stage {self._stage.index} was given; "
                "a loss must be computed from the model's output for the whole micro-batch"
            )
        return received.grad

    def _tell_fsdp(self, *, is_last: bool) -> None:
        model = self._stage.model
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
            # No hook gathers the root's own weights for a backward pass that starts inside the model, so they stay
            # gathered while there is one to come. Blocks let go of theirs after every use.
            model.set_reshard_after_backward(is_last, recurse=False)


class _Neighbour:
    """The rank that holds the stage before or after this one; without a rank nothing is sent or received.

    Every exchange waits until it is done. In this schedule neighbours meet in matching exchanges, so none waits for
    ever, and what is sent and received in one exchange travels together, as NCCL demands of a pair of ranks.
    """

    def __init__(self, rank: int | None, group: dist.ProcessGroup, device_type: str) -> None:
        self._rank = rank
        self._group = group
        self._device = torch.device(device_type)
        is_gloo = dist.get_backend(group) == "gloo"
        self._wire_device = torch.device("cpu") if is_gloo else self._device  # gloo sends from host memory only
        self.dtype: torch.dtype | None = None
        """Of all messages of the run; None before the first one, which tells it."""

    def exchange(self, outgoing: Tensor | None, shape: tuple[int, ...] | None) -> Tensor | None:
        """Send ``outgoing`` and return what is received in its place, of ``shape``; None stands for no message."""
        if self._rank is None or (outgoing is None and shape is None):
            return None
        if self.dtype is None:
            self.dtype = self._agree_on_dtype(outgoing)
        incoming = None
        operations = []
        if outgoing is not None:
            sent = outgoing.to(self._wire_device).contiguous()
            operations.append(dist.P2POp(dist.isend, sent, self._rank, self._group))
        if shape is not None:
            incoming = torch.empty(shape, dtype=self.dtype, device=self._wire_device)
            operations.append(dist.P2POp(dist.irecv, incoming, self._rank, self._group))
        self._run(operations)
        return None if incoming is None else incoming.to(self._device)

    def _agree_on_dtype(self, outgoing: Tensor | None) -> torch.dtype:
        code = torch.zeros(1, dtype=torch.int64, device=self._wire_device)
        if outgoing is not None:
            code.fill_(_DTYPES.index(outgoing.dtype))
        operation = dist.irecv if outgoing is None else dist.isend
        self._run([dist.P2POp(operation, code, cast(int, self._rank), self._group)])
        return _DTYPES[int(code.item())]

    @staticmethod
    def _run(operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
