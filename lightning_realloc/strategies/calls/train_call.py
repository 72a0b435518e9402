"""Run training calls on this rank: micro-batches, backward, gradient reduction, clipping, optimizer steps, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import EXPERTS
from lightning_realloc.batch.shares import MicroBatch
from lightning_realloc.batch.training import (
    Loss,
    Totals,
    TrainOptions,
    num_counted_tokens,
)
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import LayoutError, PlanError, ReallocError
from lightning_realloc.layout import AXES
from lightning_realloc.runtime.forward.activation_offload import ActivationOffload
from lightning_realloc.runtime.forward.routers import balance_loss_of, balance_weight, routers_of
from lightning_realloc.runtime.model.choice_biases import update_biases
from lightning_realloc.runtime.model.training_mode import set_training_mode
from lightning_realloc.runtime.parallel.compiled import compiled_blocks
from lightning_realloc.runtime.parallel.gradients import (
    clip_gradients,
    first_bad_gradient,
    first_bad_weight,
    uneven_gradient,
)
from lightning_realloc.runtime.parallel.packed_forward import route_tokens
from lightning_realloc.runtime.parallel.pipeline import PipelineStage, pipeline_infer, pipeline_train
from lightning_realloc.runtime.parallel.tp_plan import PARTIAL_GRADIENT, with_wildcards
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_pool import EnginePool
from lightning_realloc.strategies.calls.full_device import SmallerBatches
from lightning_realloc.strategies.calls.metrics import MetricSums, SkippedSteps
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.sample_table import PositionedRows
from lightning_realloc.strategies.lightning.optimizer_hooks import LightningOptimizers
from lightning_realloc.strategies.pool.replica import Replica

EXPERT_BALANCE_LOSS = "expert_balance_loss"
LossMethod = Callable[..., Loss]


@dataclass(frozen=True, slots=True)
class _Job:
    """One training call on this rank."""

    call: ModelFunctionCall
    method: LossMethod
    """The algorithm's loss."""
    replica: Replica
    """Home replica of the trained role."""
    rows: PositionedRows
    """This rank's samples."""
    options: TrainOptions
    """Options of the role."""
    optimizer: torch.optim.Optimizer
    """Optimizer of the role."""
    balance_weight: float
    """Weight of the loss that balances experts; 0: none."""

    @property
    def gradient_scale(self) -> int:
        """Factor of losses: FSDP averages gradients over its ranks, and the parts of a loss must add up."""
        layout = self.replica.layout
        return layout.count(*layout.replica_axes, *layout.shard_axes)


class TrainCalls:
    """Runs training calls on the home replicas of their roles."""

    def __init__(self, context: CallContext, hooks: LightningOptimizers, engines: EnginePool) -> None:
        self._context, self._hooks, self._record = context, hooks, context.mailbox.record
        self._skipped = SkippedSteps()
        self._smaller = SmallerBatches(context, engines)
        self._checked: set[str] = set()
        """Roles whose gradients agree between tensor-parallel ranks in their layout."""

    def forget_layouts(self) -> None:
        """Count skipped steps and halvings and check gradients anew: a role's next layout may have other cuts."""
        self._skipped, self._checked = SkippedSteps(), set()
        self._smaller.forget()

    def order_seeds(self, role: str, iteration: int) -> list[int]:
        """Return a seed per epoch of a role's training call, for the order of its mini-batches."""
        algorithm = self._context.algorithm
        epochs = range(algorithm.train_options_of(role).num_epochs)
        return [hash((algorithm.seed, iteration, epoch)) % 2**63 for epoch in epochs]

    def run(self, call: ModelFunctionCall, replica: Replica, data: IterationData) -> None:
        """Take the optimizer steps of one iteration, and record their mean loss, metrics and gradient norm."""
        algorithm, table, role = self._context.algorithm, data.table(call), replica.role
        method, options = self._context.method_of(call), algorithm.train_options_of(role)
        weight = balance_weight(replica.model, options.router_aux_loss_coef, role)
        job = _Job(call, method, replica, data.rows(call), options, self._hooks.optimizer_of(role), weight)
        share, sums = replica.layout.data_parallel_index(self._context.rank), MetricSums()
        steps = data.routes.train_steps(call, table)
        parts = (self._smaller.divided(call, step.shares[share]) for step in steps)
        self._record.expect_parts(sum(map(len, parts)), "micro-batches")
        set_training_mode(replica.model, dropout=algorithm.dropout)
        with self._dropout_masks(replica), compiled_blocks(replica.model, options.compile), self._offloaded(job):
            for step in steps:
                totals = table.totals(step.positions, group_size=algorithm.group_size, sums_of=algorithm.totals_of)
                totals = self._without_excluded(job, call, step.shares[share], totals)
                if not self._step(job, step.shares[share], totals, sums):
                    break
        means = self._means(job, sums) | {"skipped_steps": float(sums.num_skipped)}
        if (routers := routers_of(replica.model)) is not None:
            group = self._context.pool.meshes.group(replica.layout, *AXES)
            means |= sums.expert_load(routers, group, self._context.device)
        if options.stop_above:
            means["steps"] = float(sums.num_steps)
        data.training_metrics[call.name] = {f"{role}/{name}": value for name, value in means.items()}

    def _without_excluded(
        self, job: _Job, call: ModelFunctionCall, micro_batches: Sequence[MicroBatch], totals: Totals
    ) -> Totals:
        """Return totals without the tokens of excluded samples, which only the rank that trains on a sample knows.

        Collective over data-parallel ranks. Earlier pipeline stages hold no such columns, and compute no loss.
        """
        rows = job.rows.select([position for micro in micro_batches if micro.counts for position in micro.positions])
        names = [name for name in self._context.algorithm.excluded_by if name in call.needs and name in rows]
        if not names:
            return totals
        counted = torch.tensor(num_counted_tokens(rows, names), device=self._context.device)
        group = self._context.pool.meshes.batch_group(job.replica.layout)
        if group is not None:
            dist.all_reduce(counted, group=group)
        return replace(totals, num_tokens=max(1, int(counted)))  # without any token, the loss is zero

    @contextmanager
    def _dropout_masks(self, replica: Replica) -> Iterator[None]:
        """Seed dropout by iteration and rank, so that a resumed run draws the same masks.

        Ranks of a tensor-parallel group draw equal masks, since their activations must stay equal. All others draw
        different ones, for other samples, tokens or layers.
        """
        layout, rank = replica.layout, self._context.rank
        share = layout.share(rank, *layout.stage_axes, *layout.batch_axes, *layout.token_axes).position
        seed = hash((self._context.algorithm.seed, self._hooks.iteration, share)) % 2**63
        device = self._context.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if device.type == "cpu":  # torch.manual_seed also formats three stack traces, for devices that are not used
                torch.default_generator.manual_seed(seed)
            else:
                torch.manual_seed(seed)
            yield

    def _offloaded(self, job: _Job) -> AbstractContextManager[None]:
        """Keep activations on the host between the passes if the plan says so."""
        if not self._context.pool.plan.call(job.call.name).activation_offload:
            return nullcontext()
        return ActivationOffload(self._context.device).around(job.replica.model)

    def _step(self, job: _Job, micro_batches: Sequence[MicroBatch], totals: Totals, sums: MetricSums) -> bool:
        """Take one optimizer step; return False if its mini-batch exceeds a limit, without a step.

        A step whose gradient norm is not finite is skipped, and the next mini-batch is tried.
        """
        replica, options, optimizer = job.replica, job.options, job.optimizer
        measured = self._run_micro_batches(job, micro_batches, totals)
        sums.merge(measured)
        if options.stop_above and self._exceeds(job, measured):
            optimizer.zero_grad(set_to_none=True)
            return False
        norm = clip_gradients(replica.model, replica.model_layout, self._context.pool.meshes, options.max_grad_norm)
        is_finite = bool(norm.isfinite())  # the one wait for the device per step
        if options.max_grad_norm is not None:
            sums.add_shared("grad_norm", norm if is_finite else norm.new_full((), torch.nan))
        if is_finite and float(norm) > 0:
            self._require_even_gradients(replica)
        if is_finite:
            self._hooks.step(optimizer)
            self._skipped.record_step(replica.role)
            self._update_biases(job, measured)
            sums.num_steps += 1
        else:
            sums.num_skipped += 1
            self._record_skip(job, float(norm), sums.num_minibatches)
        optimizer.zero_grad(set_to_none=True)  # the calls after this one need the memory
        return True

    def _run_micro_batches(self, job: _Job, micro_batches: Sequence[MicroBatch], totals: Totals) -> MetricSums:
        """Set the gradients of a mini-batch, and return its metrics. See `SmallerBatches` for its errors."""

        def attempt(parts: Sequence[MicroBatch]) -> MetricSums:
            job.optimizer.zero_grad(set_to_none=True)
            job.rows.read_images_ahead([micro.positions for micro in parts])
            measured = MetricSums()
            self._accumulate_gradients(job, parts, totals, measured)
            return measured

        return self._smaller.run(job.call, job.replica.layout, micro_batches, attempt)

    def _accumulate_gradients(
        self, job: _Job, micro_batches: Sequence[MicroBatch], totals: Totals, sums: MetricSums
    ) -> None:
        """Run forward and backward of all micro-batches. In a pipeline only the last stage knows losses."""
        model, is_wrapped = job.replica.model, isinstance(job.replica.model, FSDPModule)
        if job.balance_weight:
            sums.balance_loss = balance_loss_of(model, self._context.device)
            if len(micro_batches) > 1 or job.replica.layout.dims.pp > 1:
                self._count_experts(job, micro_batches, sums)
        packs = (self._pack(job, micro, sums) for micro in micro_batches)
        if job.replica.layout.dims.pp > 1:
            batches = list(packs)
            pipeline_train(
                self._stage(job.replica),
                batches,
                lambda _, number: self._loss(job, batches[number], micro_batches[number], totals, sums),
                schedule=self._context.pool.plan.call(job.call.name).pipeline_schedule,
                context=partial(self._counted_forward, is_wrapped),
                backward=self._hooks.backward_loss,
            )
            return
        for number, (batch, micro) in enumerate(self._record.counted(zip(packs, micro_batches, strict=True)), start=1):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == len(micro_batches))
            with self._hooks.forward_context(wrapped=is_wrapped):
                loss = self._loss(job, batch, micro, totals, sums)
            self._settle_balance(job, sums)
            self._hooks.backward_loss(loss)

    def _count_experts(self, job: _Job, micro_batches: Sequence[MicroBatch], sums: MetricSums) -> None:
        """Run all micro-batches forward without gradients, for the share of tokens that each expert has in the step.

        Dropout then draws the same masks again. Collective over the layout.
        """
        replica, device = job.replica, self._context.device
        packs = [
            replace(self._pack(job, micro, sums), expert_counts=None, expert_loads=None) for micro in micro_batches
        ]
        precision = self._hooks.forward_context(wrapped=isinstance(replica.model, FSDPModule))
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), precision:
            if replica.layout.dims.pp > 1:
                pipeline_infer(self._stage(replica), packs, route_tokens)
            else:
                for batch in packs:
                    route_tokens(replica.model, batch)
        self._settle_balance(job, sums)

    def _settle_balance(self, job: _Job, sums: MetricSums) -> None:
        """Sum the use of experts over all ranks, if there is a loss that needs it. Collective over the layout."""
        loss, layout = sums.balance_loss, job.replica.layout
        if loss is None or loss.is_settled:
            return
        group = self._context.pool.meshes.group(layout, *AXES)
        if group is not None:
            dist.all_reduce(loss.sums, group=group)
        copies = layout.count(*layout.tensor_axes)
        value = loss.settle(weight=job.balance_weight, num_copies=copies, gradient_scale=job.gradient_scale)
        sums.add_shared(EXPERT_BALANCE_LOSS, value)

    def _update_biases(self, job: _Job, measured: MetricSums) -> None:
        """Update the biases by which tokens choose experts after an optimizer step. Collective over the layout."""
        routers, rate = routers_of(job.replica.model), job.options.router_bias_update_rate
        if not rate or routers is None:
            return
        loads = routers.no_counts(self._context.device) if measured.expert_loads is None else measured.expert_loads
        group = self._context.pool.meshes.group(job.replica.layout, *AXES)
        if group is not None:  # tensor-parallel ranks count the same tokens: directions stay
            dist.all_reduce(loads, group=group)
        update_biases(job.replica.model, loads, rate)

    def _pack(self, job: _Job, micro: MicroBatch, sums: MetricSums) -> PackedBatch:
        """Return a micro-batch whose forward adds to the counts of experts, if its model has some."""
        rows, routers = job.rows.select(micro.positions), routers_of(job.replica.model)
        if EXPERTS in job.call.needs and EXPERTS not in rows:
            raise PlanError(
                f"router_replay=True needs the experts of responses, and those of {job.call.name} were generated "
                f"without; set router_replay=False to train on them"
            )
        batch = self._context.pack(job.call, rows)
        if routers is None or not micro.counts:
            return batch
        if sums.expert_counts is None:
            sums.expert_counts = routers.no_counts(self._context.device)
        if sums.expert_loads is None and job.options.router_bias_update_rate:
            sums.expert_loads = routers.no_counts(self._context.device)
        return replace(
            batch,
            expert_counts=sums.expert_counts,
            expert_loads=sums.expert_loads,
            balance_loss=sums.balance_loss,
        )

    @contextmanager
    def _counted_forward(self, is_wrapped: bool) -> Iterator[None]:
        """Surround a forward pass of a pipeline's stage, and count its micro-batch. Only the last stage has a loss."""
        with self._hooks.forward_context(wrapped=is_wrapped):
            yield
        self._record.advance()

    def _loss(self, job: _Job, batch: PackedBatch, micro: MicroBatch, totals: Totals, sums: MetricSums) -> Tensor:
        """Return the scalar that backward starts from for one micro-batch, and add its loss to ``sums``."""
        replica = job.replica
        loss = job.method(replica.model, batch, totals)
        if not isinstance(loss, Loss):
            raise PlanError(
                f"a @train method must return a Loss; {getattr(job.method, '__name__', 'that')} of {replica.role} "
                f"returned a {type(loss).__name__}: write Loss(value, metrics)"
            )
        if not loss.value.requires_grad:
            raise PlanError(
                f"the loss of {replica.role} does not depend on its weights; is a role frozen that is trained?"
            )
        sums.add(loss, counts=micro.counts)
        return loss.value * (job.gradient_scale if micro.counts else 0)

    def _stage(self, replica: Replica) -> PipelineStage:
        return PipelineStage(replica.model, replica.model_layout, self._context.pool.meshes)

    def _means(self, job: _Job, sums: MetricSums) -> dict[str, float]:
        """Return the means over all ranks, the same on each. Collective over the layout."""
        replica = job.replica
        group = self._context.pool.meshes.batch_group(replica.layout)
        means = {name: float(value) for name, value in sums.reduce(group, self._context.device).items()}
        means["loss"] += job.balance_weight * means.get(EXPERT_BALANCE_LOSS, 0.0)
        return self._stage(replica).from_last(means) if replica.layout.dims.pp > 1 else means

    def _exceeds(self, job: _Job, measured: MetricSums) -> bool:
        """Return whether a mini-batch exceeds a limit; the same on every rank of the layout, to the last bit."""
        above = job.options.exceeded(self._means(job, measured)) is not None
        group = self._context.pool.meshes.group(job.replica.layout, *AXES)
        if group is None:
            return above
        anywhere = torch.tensor(above, dtype=torch.uint8, device=self._context.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        return bool(anywhere)

    def _require_even_gradients(self, replica: Replica) -> None:
        """Raise LayoutError before a role's first step if gradients of tensor-parallel ranks differ. Collective."""
        if replica.layout.dims.tp == 1 or replica.role in self._checked:
            return
        self._checked.add(replica.role)
        uneven = uneven_gradient(replica.model, replica.model_layout, self._context.pool.meshes)
        if uneven is not None:
            module = with_wildcards(uneven.rpartition(".")[0])
            raise LayoutError(
                f"{replica.role}: the gradient of {uneven} differs between the tensor-parallel ranks of "
                f"{replica.layout}, because it reads only a rank's own features; set tp_plans={{{replica.role!r}: "
                f"{{{module!r}: {PARTIAL_GRADIENT!r}}}}} of ReallocStrategy, or give {replica.role} a layout with tp=1"
            )

    def _record_skip(self, job: _Job, norm: float, minibatch: int) -> None:
        """Log a skipped mini-batch, and stop the run after too many. Collective over the layout.

        Raises:
            ReallocError: after too many, or if the weights themselves are not finite, which no later step mends.
        """
        replica = job.replica
        bad_weight = first_bad_weight(replica.model, replica.model_layout, self._context.pool.meshes)
        if bad_weight is not None:
            raise ReallocError(
                f"the weights of {replica.role} are not finite in iteration {self._hooks.iteration}, the first in "
                f"{bad_weight}: no further step mends them. Resume from the latest checkpoint, with a lower learning "
                f"rate, a larger eps of the optimizer, or a wider precision"
            )
        bad = first_bad_gradient(replica.model, replica.model_layout, self._context.pool.meshes)
        cause = f"its gradient norm is {norm}" + ("" if bad is None else f", the first bad parameter is {bad}")
        place = f"iteration {self._hooks.iteration}, mini-batch {minibatch}"
        warns, limit = self._context.rank == replica.layout.ranks[0], job.options.max_skipped_steps
        self._skipped.record_skip(replica.role, place, cause, limit=limit, warns=warns)
