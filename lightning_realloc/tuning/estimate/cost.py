"""Estimate the seconds of one call under one plan: blocks form stages, stages micro-batches, and micro-batches a call.

The estimate is that of the slowest stage, with equal ranks. It ignores ranks with longer samples, other jobs on the
same links, and framework time between kernels beyond one launch time per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.dataflow.pipeline_schedule import ScheduleName, idle_turns
from lightning_realloc.layout.dims import ParallelDims
from lightning_realloc.limits import MAX_CAPTURED_TOKENS
from lightning_realloc.tuning.estimate.estimator import CallSeconds
from lightning_realloc.tuning.estimate.group_placement import Placement
from lightning_realloc.tuning.estimate.hardware import Group, Links
from lightning_realloc.tuning.estimate.kernels import Kernels, TowerKernels
from lightning_realloc.tuning.memory.call_shape import CallShape
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.shapes.decoding import DecodeSegment, count_step_shapes, plan_decoding


@dataclass(frozen=True)
class Tokens:
    """Sequence lengths of an iteration."""

    workload: Workload
    responses: tuple[int, ...]
    """Equally likely response lengths."""

    @cached_property
    def response(self) -> float:
        """Mean response length."""
        return sum(self.responses) / len(self.responses)

    @cached_property
    def sequence(self) -> float:
        """Mean length of a prompt with its response."""
        return self.workload.prompt_tokens + self.response

    @cached_property
    def context(self) -> float:
        """Mean number of tokens that a token attends to: half a sequence, where long sequences have more weight."""
        lengths = [self.workload.prompt_tokens + response for response in self.responses]
        return sum(length * length for length in lengths) / sum(lengths) / 2


class Pass(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    compute: float = 0.0
    exchange: float = 0.0
    """Seconds of tensor-parallel communication."""

    @property
    def total(self) -> float:
        return self.compute + self.exchange

    def plus(self, other: Pass) -> Pass:
        """Return the seconds of both passes, one after the other."""
        return Pass(self.compute + other.compute, self.exchange + other.exchange)

    def repeated(self, times: float) -> Pass:
        """Return the seconds of ``times`` such passes."""
        return Pass(times * self.compute, times * self.exchange)


_NOTHING = Pass()


class StageWork(NamedTuple):
    """Passes that those of every stage consist of."""

    block: Pass
    head: Pass
    """Work of the last stage besides its blocks."""
    images: Pass
    """Work of the first stage besides its blocks."""

    def plus(self, other: StageWork) -> StageWork:
        """Return both, one after the other."""
        return StageWork(*(own.plus(further) for own, further in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """Cost model of one role's calls under one layout."""

    num_sharded: int
    """Elements of the fullest rank, with the padding of FSDP's shards."""
    num_trained_sharded: int
    """Trained elements of the rank that holds most of them, with padding."""
    num_experts: int
    """Elements of experts among ``num_sharded``."""
    num_trained_experts: int
    """Elements of experts among ``num_trained_sharded``."""
    num_tied: int
    """Trained elements of the fullest rank that another pipeline stage holds, too."""
    num_given: int
    """Elements of the fullest rank that a vLLM is given before each generation; 0 without one."""
    stage_blocks: tuple[int, ...]
    """Number of blocks of every pipeline stage."""
    trained_share: float
    """Fraction of the model's elements that have gradients."""
    dims: ParallelDims
    place: Placement
    kernels: Kernels
    links: Links
    settings: MemorySettings
    tokens: Tokens
    tower: TowerKernels | None = None
    """Times of the tower that reads the workload's images; None without images."""

    def seconds(self, kind: CallKind, plan: CallPlan) -> CallSeconds:
        """Return the seconds of a call of that kind with the options of a plan."""
        shape = CallShape.from_plan(kind, plan, self.tokens.workload, self.tokens.sequence)
        if kind == "generate":
            parts = self._generate(shape) + self._hand_over()
        elif kind == "infer":
            parts = self._infer(shape)
        else:
            parts = (self._train(shape, plan) + self._count_experts(shape)).scaled(shape.num_steps)
        return parts + CallSeconds(other=self.links.efficiency.call_s)

    # ---- calls
    def _infer(self, shape: CallShape) -> CallSeconds:
        tokens, rows = self._micro_batch(shape)
        stage = self._forward_stage(
            tokens, self.tokens.context, self._scored_head(rows), self._read_images(shape.mean_micro_batch)
        )
        return self._pipelined(stage, self._exposed_gather(stage), shape.num_micro_batches, self._send(tokens))

    def _train(self, shape: CallShape, plan: CallPlan) -> CallSeconds:
        """Return the seconds of one optimizer step."""
        tokens, rows = self._micro_batch(shape)
        reads = self._forward_work(
            tokens, self.tokens.context, self._scored_head(rows), self._read_images(shape.mean_micro_batch)
        )
        learns = self._backward_work(shape, plan.gradient_checkpointing)
        forward, backward, both = (self._slowest_stage(*work) for work in (reads, learns, reads.plus(learns)))
        sharding = self._exposed_gather(forward) + self._exposed_gather(backward)
        sends = 2 * self._send(tokens)
        waiting = self._waiting_share(tokens, plan)
        one = self._pipelined(both, sharding, shape.num_micro_batches, sends, waiting_share=waiting)
        return one + self._reduce(backward) + self._sum_tied() + self._optimize()

    def _count_experts(self, shape: CallShape) -> CallSeconds:
        """Return the seconds of the passes before an optimizer step that only count the tokens of each expert.

        There are none without a loss that balances experts, and where one micro-batch is a rank's share of the step.
        """
        experts = self.kernels.shape.experts
        if experts is None or not experts.is_balanced or (shape.num_micro_batches <= 1 and self.dims.pp == 1):
            return CallSeconds()
        return self._route(shape)

    def _route(self, shape: CallShape) -> CallSeconds:
        """Return the seconds of a step's forward passes without heads."""
        tokens, _ = self._micro_batch(shape)
        stage = self._forward_stage(tokens, self.tokens.context, _NOTHING, self._read_images(shape.mean_micro_batch))
        return self._pipelined(stage, self._exposed_gather(stage), shape.num_micro_batches, self._send(tokens))

    def _generate(self, shape: CallShape) -> CallSeconds:
        load, pp = self.tokens.workload, self.dims.pp
        waves = max(shape.num_waves, min(pp, shape.share))
        prompts = shape.num_prompts(shape.share) / waves
        tokens = prompts * load.prompt_tokens
        launch, head = self.links.efficiency.decode_launch_s, self._sampled_head(shape.share / waves)
        images = self._read_images(prompts)
        prefill = self._forward_stage(tokens, load.prompt_tokens / 2, head, images, launch_s=launch)
        parts = self._pipelined(prefill, self._exposed_gather(prefill), waves, self._send(tokens))
        segments = plan_decoding(self.tokens.responses, load.prompt_tokens, shape.share, shape.slots)
        for segment in segments:
            # Under a pipeline the sequences form as many groups as there are stages, so that every stage is busy.
            batch = segment.sequences / pp
            stage = self._decode_stage(batch, segment.longest)
            step = CallSeconds(
                compute=stage.compute,
                tensor_parallel=stage.exchange,
                pipeline=self._send(batch),
                sharding=self._exposed_gather(stage),
            )
            parts += step.scaled(segment.steps * pp)
        return parts + self._capture(segments)

    def _hand_over(self) -> CallSeconds:
        """Return the time in which a vLLM takes the weights over; its steps are priced as those of the ranks."""
        return CallSeconds(other=self.kernels.device.hand_over(self.num_given * self.settings.copy_bytes))

    def _capture(self, segments: Sequence[DecodeSegment]) -> CallSeconds:
        """Return the time to capture each shape of a generation's steps once; 0 if graphs stay between generations."""
        efficiency = self.links.efficiency
        if not self.settings.engine.captures_anew:
            return CallSeconds()
        shapes = count_step_shapes([segment for segment in segments if self._is_captured(segment.sequences)])
        launched = self.kernels.shape.num_layers * efficiency.decode_launch_s
        return CallSeconds(compute=shapes * efficiency.capture_steps * launched)

    # ---- stages
    def _read_images(self, prompts: float) -> Pass:
        """Return the tower's pass over the images of some prompts; each sequence of a micro-batch brings its own."""
        return Pass(self.tower.forward(prompts) if self.tower is not None else 0.0)

    def _learn_images(self, prompts: float, *, recomputes: bool) -> Pass:
        """Return the tower's backward pass over the images of some prompts."""
        return Pass(self.tower.backward(prompts, recomputes=recomputes) if self.tower is not None else 0.0)

    def _forward_stage(
        self, tokens: float, context: float, head: Pass, images: Pass, *, launch_s: float | None = None
    ) -> Pass:
        return self._slowest_stage(*self._forward_work(tokens, context, head, images, launch_s=launch_s))

    def _forward_work(
        self, tokens: float, context: float, head: Pass, images: Pass, *, launch_s: float | None = None
    ) -> StageWork:
        launch = self.links.efficiency.layer_launch_s if launch_s is None else launch_s
        block = self._launched(self.kernels.forward(tokens, context), self._exchange(tokens), launch)
        return StageWork(block, head, images)

    def _backward_work(self, shape: CallShape, checkpointing: bool) -> StageWork:
        share, (tokens, rows) = self.trained_share, self._micro_batch(shape)
        launch, exchange = self.links.efficiency.layer_launch_s, self._exchange(tokens)
        context = self.tokens.context
        block = self._launched(self.kernels.backward(tokens, context, trained_share=share), exchange, launch)
        if checkpointing:
            block = block.plus(self._launched(self.kernels.forward(tokens, context), exchange, launch))
        again = self.kernels.tiled_head(rows, is_trained=share == 1)
        head = Pass((1 + share) * self.kernels.head(rows) + again + self.kernels.logprobs(rows))
        return StageWork(block, head, self._learn_images(shape.mean_micro_batch, recomputes=checkpointing))

    def _decode_stage(self, sequences: float, attended: float) -> Pass:
        efficiency, kernels = self.links.efficiency, self.kernels.decode(sequences, attended)
        if self._is_captured(sequences):
            block = Pass(kernels + efficiency.captured_block_s, self._exchange(sequences))
        else:
            block = self._launched(kernels, self._exchange(sequences), efficiency.decode_launch_s)
        host = Pass(efficiency.step_s + efficiency.row_s * sequences)
        return self._slowest_stage(block, self._sampled_head(sequences).plus(host))

    def _is_captured(self, sequences: float) -> bool:
        """Return whether a decoding step is a CUDA graph.

        It has few enough tokens, and no communication except tensor parallelism's if the engine captures that.
        """
        engine, dims = self.settings.engine, self.dims
        num_tokens = sequences * (1 + engine.num_ahead)
        is_local = dims.fsdp == dims.pp == dims.ep == 1 and (dims.tp == 1 or engine.captures_collectives)
        return self.links.efficiency.captures_steps and is_local and num_tokens <= MAX_CAPTURED_TOKENS

    def _scored_head(self, rows: float) -> Pass:
        """Return the pass of the head on ``rows`` tokens, with their logprobs."""
        return Pass(self.kernels.head(rows) + self.kernels.logprobs(rows), self._join_sums(rows))

    def _sampled_head(self, rows: float) -> Pass:
        """Return the pass of the head on ``rows`` tokens, with drawing the next token."""
        return Pass(self.kernels.head(rows) + self.kernels.sampling(rows), self._join_logits(rows))

    def _slowest_stage(self, block: Pass, head: Pass, images: Pass = _NOTHING) -> Pass:
        """Return the slowest stage: the one with most blocks, the first, with the tower, or the last, with the head."""
        *others, blocks = self.stage_blocks
        last = block.repeated(blocks).plus(head)
        if not others:
            return last.plus(images)
        first = block.repeated(others[0]).plus(images)
        return max(last, first, block.repeated(max(others)), key=lambda stage: stage.total)

    def _launched(self, compute: float, exchange: float, launch: float) -> Pass:
        """Return the pass of a block: its kernels or the host's launches of them, whichever takes longer."""
        efficiency, shape = self.links.efficiency, self.kernels.shape
        launch += 2 * efficiency.collective_launch_s if self.dims.tp > 1 else 0.0
        if shape.experts is not None:
            collectives = 3 if self.dims.ep > 1 else 0  # numbers of tokens, tokens, and outputs
            own = efficiency.experts_launch_s + collectives * efficiency.collective_launch_s
            launch += shape.experts.mean_over_blocks(shape.num_layers, own, 0.0)
        return Pass(max(compute, launch - exchange), exchange)

    # ---- micro-batches
    def _micro_batch(self, shape: CallShape) -> tuple[float, float]:
        """Return a rank's mean tokens of a micro-batch, and those that it computes logits or scores for."""
        lengths, samples = self.tokens, shape.mean_micro_batch / self.place.cp.size
        scored = lengths.response if self.kernels.shape.num_outputs > 1 else lengths.sequence
        return samples * lengths.sequence, samples * scored

    def _waiting_share(self, tokens: float, plan: CallPlan) -> float | None:
        """Return the part of a stage's passes that waits under ZB-H1: gradients of weights of linear layers.

        None under 1F1B. Of blocks with experts, those of attention wait.
        """
        if plan.pipeline_schedule == "1f1b":
            return None
        kernels, context, share = self.kernels, self.tokens.context, self.trained_share
        has_experts = kernels.shape.experts is not None
        waiting = kernels.projections(tokens) if has_experts else kernels.products(tokens)
        forward = kernels.forward(tokens, context) * (2 if plan.gradient_checkpointing else 1)
        return share * waiting / (forward + kernels.backward(tokens, context, trained_share=share))

    def _pipelined(
        self, stage: Pass, sharding: float, count: int, send: float, *, waiting_share: float | None = None
    ) -> CallSeconds:
        """Return the seconds of ``count`` micro-batches, with the idle turns that fill and drain a pipeline."""
        pp, vpp = self.dims.pp, self.dims.vpp
        schedule: ScheduleName = "1f1b" if waiting_share is None else "zero_bubble"
        turns, waiting_turns = idle_turns(schedule, pp, count, vpp=vpp)
        waiting = (waiting_share or 0.0) * stage.total
        idle = turns * (stage.total - waiting + sharding) + waiting_turns * waiting
        return CallSeconds(
            compute=count * stage.compute,
            tensor_parallel=count * stage.exchange,
            sharding=count * sharding,
            pipeline=idle + (count * vpp + pp - 1) * send,
        )

    # ---- communication
    def _exchange(self, tokens: float) -> float:
        """Return the time of a block's two all-reduces of hidden states, and of one for shared experts.

        Its backward pass has as many.
        Context-parallel ranks that divide heads exchange queries and outputs of attention, and all exchange keys and
        values. Expert-parallel ranks exchange
        the hidden state of each expert of a token, and its output.
        """
        shape, element, tp = self.kernels.shape, self.kernels.element_bytes, self.place.tp
        cp, rows = self.place.cp, shape.row_shares(self.dims)
        by_head = Group(cp.size // rows, -(-cp.nodes // rows), cp.link)
        hidden = tokens * shape.hidden * element
        seconds = 2 * self.links.all_reduce(hidden, tp)
        seconds += self.links.all_to_all(2 * tokens * shape.queries(tp.size) * element, by_head)
        seconds += self.links.all_to_all(2 * tokens * rows * shape.keys(tp.size) * element, cp)
        if shape.experts is None:
            return seconds
        routed = 2 * self.links.all_to_all(shape.experts.per_token * hidden, self.place.ep)
        shared = self.links.all_reduce(hidden, tp) if shape.experts.shared_features else 0.0
        return seconds + shape.experts.mean_over_blocks(shape.num_layers, routed + shared, 0.0)

    def _join_sums(self, rows: float) -> float:
        """Return the time to exchange three fp32 numbers per token, from which tensor-parallel ranks get logprobs."""
        return self.links.gather(12 * rows * self.dims.tp, self.place.tp) if self.kernels.shape.num_outputs > 1 else 0.0

    def _join_logits(self, rows: float) -> float:
        outputs = self.kernels.shape.num_outputs
        return self.links.gather(rows * outputs * self.kernels.element_bytes, self.place.tp) if outputs > 1 else 0.0

    def _send(self, tokens: float) -> float:
        """Return the time to send hidden states to the next stage; each tensor-parallel rank has one counterpart."""
        if self.dims.pp == 1:
            return 0.0
        size = tokens * self.kernels.shape.hidden * self.kernels.element_bytes
        return self.links.send(size, self.place.stages)

    def _exposed_gather(self, overlapped: Pass) -> float:
        """Return the time of FSDP's gather of a stage that the pass does not hide; the first block is never hidden."""
        if self.dims.num_shards == 1:
            return 0.0
        return self._exposed(self._gather(self.num_sharded, self.num_experts), overlapped)

    def _gather(self, sharded: int, experts: int) -> float:
        """Return the time to gather shards, or to scatter gradients; those of experts over the ranks that ep leaves."""
        place, size = self.place, self.settings.gathered_bytes
        if self.dims.ep == 1:
            return self.links.gather(sharded * place.fsdp.size * size, place.fsdp)
        dense = self.links.gather((sharded - experts) * place.fsdp.size * size, place.fsdp)
        return dense + self.links.gather(experts * place.expert_fsdp.size * size, place.expert_fsdp)

    def _reduce(self, overlapped: Pass) -> CallSeconds:
        """Return the time of reducing gradients that the last backward pass does not hide; its last block never is."""
        experts = self.num_trained_experts if self.dims.ep > 1 else 0
        scatter, size = self._gather(self.num_trained_sharded, experts), self.settings.gathered_bytes
        replicas = self.links.all_reduce((self.num_trained_sharded - experts) * size, self.place.dp)
        replicas += self.links.all_reduce(experts * size, self.place.expert_dp)
        if scatter + replicas == 0:
            return CallSeconds()
        exposed = self._exposed(scatter + replicas, overlapped) / (scatter + replicas)
        return CallSeconds(sharding=scatter * exposed, data_parallel=replicas * exposed)

    def _sum_tied(self) -> CallSeconds:
        """Return the time in which the first and the last stage exchange the gradients of tied embeddings."""
        if self.num_tied == 0:
            return CallSeconds()
        size = self.num_tied * self.settings.master_bytes
        return CallSeconds(pipeline=self.links.send(size, self.place.stages))

    def _exposed(self, communication: float, overlapped: Pass) -> float:
        if not self.links.efficiency.hides_communication:
            return communication
        blocks = max(1, *self.stage_blocks)
        return max(communication - overlapped.total, communication / blocks)

    def _optimize(self) -> CallSeconds:
        """Return the time to clip gradients and to step.

        Gradients are read for their norm, read and written to scale them, and read by the optimizer, which reads and
        writes weights and optimizer state.
        """
        size = 4 * self.settings.master_bytes + 2 * (self.settings.master_bytes + self.settings.optimizer_bytes)
        return CallSeconds(optimizer=self.kernels.device.stream(self.num_trained_sharded * size))
