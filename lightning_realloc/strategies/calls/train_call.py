"""Run training calls on this rank: micro-batches, backward, gradient reduction, clipping, optimizer steps, metrics."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import (
    Loss,
    MicroBatch,
    Totals,
    TrainOptions,
    pack_columns,
)
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import PlanError, ReallocError
from lightning_realloc.layout import AXES
from lightning_realloc.runtime.model.training_mode import set_training_mode
from lightning_realloc.runtime.parallel.compiled import compiled_blocks
from lightning_realloc.runtime.parallel.gradients import clip_gradients, first_bad_gradient
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.pipeline import PipelineStage, pipeline_train
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.strategies.checkpoints.rng_state import seeded
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.sample_table import PositionedRows
from lightning_realloc.strategies.pool.replica import Replica

LossMethod = Callable[..., Loss]


log = logging.getLogger(__name__)


class OptimizerHooks(Protocol):
    """Lightning's optimizers, precision and backward pass, as a training call needs them."""

    @property
    def iteration(self) -> int:
        """Iterations done so far."""

    def optimizer_of(self, role: str) -> torch.optim.Optimizer:
        """Return the role's optimizer."""

    def forward_context(self, *, wrapped: bool) -> AbstractContextManager[None]:
        """Return the context of a training forward pass: autocast unless FSDP, which wraps the model, casts."""

    def backward_loss(self, loss: Tensor) -> None:
        """Compute gradients, with Lightning's hooks."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer with Lightning's hooks."""


class TrainCalls:
    """Runs training calls on the home replicas of their roles.

    Args:
        algorithm: Its methods compute the losses.
        hooks: Lightning's optimizers and hooks.
        meshes: Process groups.
        device: Device of the models.
        rank: This process.
    """

    def __init__(
        self, algorithm: RunnableAlgorithm, hooks: OptimizerHooks, meshes: MeshRegistry, *, device: torch.device,
        rank: int,
    ) -> None:  # fmt: skip
        self._algorithm = algorithm
        self._options_of = algorithm.train_options_of
        self._hooks = hooks
        self._meshes = meshes
        self._device = device
        self._rank = rank
        self._seed = algorithm.seed
        self._skipped = SkippedSteps()

    def forget_skipped_steps(self) -> None:
        """Count skipped steps anew, since a role's next layout may have ranks that saw none of them."""
        self._skipped = SkippedSteps()

    def order_seeds(self, role: str, iteration: int) -> list[int]:
        """Return a seed per epoch of a role's training call, for the order of its mini-batches."""
        num_epochs = self._options_of(role).num_epochs
        return [hash((self._seed, iteration, epoch)) % 2**63 for epoch in range(num_epochs)]

    def run(self, call: ModelFunctionCall, replica: Replica, data: IterationData) -> None:
        """Take the optimizer steps of one iteration, and record their mean loss, metrics and gradient norm."""
        method, rows, table = getattr(self._algorithm, call.method), data.rows(call), data.table(call)
        steps = data.routes.train_steps(call, table)
        set_training_mode(replica.model, dropout=self._algorithm.dropout)
        sums = _MetricSums()
        # Dropout: the same masks on all ranks of a tensor-parallel group, whose activations must stay equal, others on
        # every data-parallel rank and pipeline stage, and the same ones again in a run that is resumed here.
        layout, options = replica.layout, self._options_of(replica.role)
        share = layout.data_parallel_index(self._rank) + layout.data_parallel_size * layout.coordinate(self._rank).pp
        own_masks = seeded(hash((self._seed, self._hooks.iteration, share)) % 2**63, self._device)
        with own_masks, compiled_blocks(replica.model, options.compile):
            for step in steps:
                totals = table.totals(
                    step.positions, group_size=self._algorithm.group_size, sums_of=self._algorithm.totals_of
                )
                mine = step.shares[layout.data_parallel_index(self._rank)]
                if not self._step(method, replica, rows, mine, totals, sums):
                    break
        means = self._means(replica, sums) | {"skipped_steps": float(sums.num_skipped)}
        if options.stop_above:
            means["steps"] = float(sums.num_steps)
        data.training_metrics[call.name] = {f"{replica.role}/{name}": value for name, value in means.items()}

    def _means(self, replica: Replica, sums: _MetricSums) -> dict[str, float]:
        """Return the means over all ranks, the same on each. Collective over the layout."""
        means = {name: float(value) for name, value in sums.reduce(self._group(replica), self._device).items()}
        if replica.layout.dims.pp > 1:  # only the last stage knows losses and metrics
            means = PipelineStage(replica.model, replica.model_layout, self._meshes).from_last(means)
        return means

    def _step(
        self, method: LossMethod, replica: Replica, rows: PositionedRows, micro_batches: Sequence[MicroBatch],
        totals: Totals, sums: _MetricSums,
    ) -> bool:  # fmt: skip
        """Take one optimizer step; return False if its mini-batch exceeds a limit, without a step.

        A step whose gradient norm is not finite is skipped, and the next mini-batch is tried.
        """
        options = self._options_of(replica.role)
        optimizer = self._hooks.optimizer_of(replica.role)
        optimizer.zero_grad(set_to_none=True)
        measured = _MetricSums()
        if replica.layout.dims.pp > 1:
            self._through_pipeline(method, replica, rows, micro_batches, totals, measured)
            micro_batches = ()
        for number, micro in enumerate(micro_batches):
            if isinstance(replica.model, FSDPModule):
                replica.model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            batch = self._pack(rows, micro)
            with self._hooks.forward_context(wrapped=isinstance(replica.model, FSDPModule)):
                loss = self._loss(method, replica, batch, micro, totals, measured)
            self._hooks.backward_loss(loss)
        sums.merge(measured)
        if options.stop_above and self._exceeds(options, replica, measured):
            optimizer.zero_grad(set_to_none=True)
            return False
        norm = clip_gradients(replica.model, replica.model_layout, self._meshes, options.max_grad_norm)
        is_finite = bool(norm.isfinite())  # the one wait for the device per step
        if options.max_grad_norm is not None:
            sums.add_shared("grad_norm", norm if is_finite else norm.new_full((), torch.nan))
        if is_finite:
            self._hooks.step(optimizer)
            self._skipped.record_step(replica.role)
            sums.num_steps += 1
        else:
            sums.num_skipped += 1
            self._record_skip(replica, float(norm), sums.num_minibatches)
        optimizer.zero_grad(set_to_none=True)  # the calls after this one need the memory
        return True

    def _pack(self, rows: PositionedRows, micro: MicroBatch) -> PackedBatch:
        return pack_columns(rows.select(micro.positions), self._device, share_prompts=self._algorithm.share_prompts)

    def _record_skip(self, replica: Replica, norm: float, minibatch: int) -> None:
        """Log a skipped mini-batch, and stop the run after too many. Collective over the layout."""
        bad = first_bad_gradient(replica.model, replica.model_layout, self._meshes)
        cause = f"its gradient norm is {norm}" + ("" if bad is None else f", the first bad parameter is {bad}")
        self._skipped.record_skip(
            replica.role, f"iteration {self._hooks.iteration}, mini-batch {minibatch}", cause,
            limit=self._options_of(replica.role).max_skipped_steps, warns=self._rank == replica.layout.ranks[0],
        )  # fmt: skip

    def _exceeds(self, options: TrainOptions, replica: Replica, measured: _MetricSums) -> bool:
        """Return whether a mini-batch exceeds a limit; the same on every rank of the layout, to the last bit."""
        above = options.exceeded(self._means(replica, measured)) is not None
        group = self._meshes.group(replica.layout, *AXES)
        if group is None:
            return above
        anywhere = torch.tensor(above, dtype=torch.uint8, device=self._device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        return bool(anywhere)

    def _through_pipeline(
        self, method: LossMethod, replica: Replica, rows: PositionedRows, micros: Sequence[MicroBatch], totals: Totals,
        sums: _MetricSums,
    ) -> None:  # fmt: skip
        """Run forward and backward of all micro-batches; the last stage alone knows losses."""
        stage = PipelineStage(replica.model, replica.model_layout, self._meshes)
        batches = [self._pack(rows, micro) for micro in micros]
        pipeline_train(
            stage,
            batches,
            lambda _, number: self._loss(method, replica, batches[number], micros[number], totals, sums),
            context=partial(self._hooks.forward_context, wrapped=isinstance(replica.model, FSDPModule)),
            backward=self._hooks.backward_loss,
        )

    def _loss(
        self, method: LossMethod, replica: Replica, batch: PackedBatch, micro: MicroBatch, totals: Totals,
        sums: _MetricSums,
    ) -> Tensor:  # fmt: skip
        """Return the scalar that backward starts from for one micro-batch, and add its loss to ``sums``."""
        loss = method(replica.model, batch, totals)
        if not loss.value.requires_grad:
            raise PlanError(
                f"the loss of {replica.role} does not depend on its weights; is a role frozen that is trained?"
            )
        sums.add(loss, counts=micro.counts)
        # Sharded data parallelism averages gradients over its ranks, and the parts of a loss must add up.
        return loss.value * (replica.layout.data_parallel_size if micro.counts else 0)

    def _group(self, replica: Replica) -> dist.ProcessGroup | None:
        return self._meshes.group(replica.layout, "dp", "fsdp")


class SkippedSteps:
    """Counts the optimizer steps in a row that each role skipped because its gradient norm was not finite.

    Every rank of a role's layout sees the same norms, so all of them count alike and raise together.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()

    def record_step(self, role: str) -> None:
        """Record a step that was taken."""
        self._in_a_row[role] = 0

    def record_skip(self, role: str, place: str, cause: str, *, limit: int | None, warns: bool) -> None:
        """Record a step that was skipped.

        Args:
            role: The model whose step it was.
            place: The iteration and the mini-batch, for messages.
            cause: The norm and the parameter, for messages.
            limit: Skipped steps in a row that stop the run; None: it never stops.
            warns: Whether this rank writes the warning.

        Raises:
            ReallocError: at the limit.
        """
        self._in_a_row[role] += 1
        count = self._in_a_row[role]
        if warns:
            log.warning("%s: skipped the optimizer step of %s: %s; skipped in a row: %d", role, place, cause, count)
        if limit is not None and count >= limit:
            raise ReallocError(
                f"{role}: the gradient norm was not finite in {count} optimizer steps in a row, "
                f"max_skipped_steps={limit}, last in {place}: {cause}. The weights are those before the first of them. "
                f"Lower the learning rate, look at the data and rewards of these mini-batches, or raise "
                f"max_skipped_steps in TrainOptions (None never stops)"
            )


class _MetricSums:
    """Sums losses and metrics over micro-batches, and merges data-parallel ranks in one collective."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps skipped because the gradient norm was not finite."""
        self.num_minibatches = 0
        """Mini-batches counted so far."""
        self._loss: list[Tensor] = []
        self._totals: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[Tensor]] = {}
        self._shared: dict[str, list[Tensor]] = {}

    def add(self, loss: Loss, *, counts: bool) -> None:
        """Add one micro-batch; a repeated one adds zero, so that every rank knows every metric's name."""
        self._loss.append(loss.value.detach().float() * counts)
        for name, average in loss.metrics.items():
            self._totals.setdefault(name, []).append(average.total.detach().float() * counts)
            self._weights.setdefault(name, []).append(torch.as_tensor(average.weight, dtype=torch.float32) * counts)

    def merge(self, minibatch: _MetricSums) -> None:
        """Add the micro-batches of one mini-batch."""
        self.num_minibatches += 1
        self._loss += minibatch._loss
        for ours, theirs in ((self._totals, minibatch._totals), (self._weights, minibatch._weights)):
            for name, values in theirs.items():
                ours.setdefault(name, []).extend(values)

    def add_shared(self, name: str, value: Tensor) -> None:
        """Add one optimizer step's value that is the same on all ranks; NaN if the step was skipped."""
        self._shared.setdefault(name, []).append(value.detach().float())

    def reduce(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Tensor]:
        """Return the means over all micro-batches of all ranks of the group."""
        names = sorted(self._totals)
        zero = torch.zeros((), device=device)
        sums = [torch.stack([zero, *self._loss]).sum()]
        for name in names:
            sums.append(torch.stack([zero, *self._totals.get(name, [])]).sum())
            sums.append(torch.stack([zero, *(w.to(device) for w in self._weights.get(name, []))]).sum())
        packed = torch.stack(sums)
        if group is not None:
            dist.all_reduce(packed, group=group)
        result = {"loss": packed[0] / max(1, self.num_minibatches)}
        for index, name in enumerate(names):
            result[name] = packed[1 + 2 * index] / packed[2 + 2 * index].clamp_min(1e-12)
        return result | {name: torch.stack(values).nanmean() for name, values in self._shared.items()}
