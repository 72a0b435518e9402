"""How long does one call take under one plan? Blocks put together to stages, stages to micro-batches, those to a call.

Worked out for the slowest stage of equal ranks. What is left out: ranks whose samples happen to be longer, other jobs
on the same links, and what a framework does between its kernels beyond a launch time per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import AXES, Layout, ParallelDims
from lightning_realloc.layout.model import stage_blocks
from lightning_realloc.tuning.estimate.estimator import CallSeconds
from lightning_realloc.tuning.estimate.hardware import Group, Links
from lightning_realloc.tuning.estimate.kernels import Kernels
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.shapes.decoding import plan_decoding
from lightning_realloc.tuning.shapes.weights import Weights


class Placement(NamedTuple):
    """How the groups of a layout's axes lie on nodes: the widest of each."""

    tp: Group
    fsdp: Group
    dp: Group
    stages_share_node: bool

    @classmethod
    def of(cls, layout: Layout, cluster: ClusterSpec) -> Placement:
        """Look at the nodes of every group."""
        nodes = (np.array(layout.ranks) // cluster.devices_per_node).reshape(layout.dims.degrees)
        groups = {axis: _widest(nodes, index) for index, axis in enumerate(AXES)}
        share = layout.dims.pp == 1 or not np.diff(nodes, axis=0).any()
        return cls(groups["tp"], groups["fsdp"], groups["dp"], bool(share))


def _widest(nodes: np.ndarray, axis: int) -> Group:
    size = nodes.shape[axis]
    if size == 1:
        return Group(1, 1)
    changes = np.diff(np.sort(nodes, axis=axis), axis=axis) != 0
    return Group(size, int(1 + changes.sum(axis=axis).max()))


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an iteration's sequences are like."""

    workload: Workload
    responses: tuple[int, ...]
    """Equally likely response lengths."""

    @property
    def response(self) -> float:
        """Mean response length."""
        return sum(self.responses) / len(self.responses)

    @property
    def sequence(self) -> float:
        """Mean length of a prompt with its response."""
        return self.workload.prompt_tokens + self.response

    @property
    def context(self) -> float:
        """Tokens that a token of whole sequences attends to, as a mean: half a sequence, long ones weighing more."""
        lengths = [self.workload.prompt_tokens + response for response in self.responses]
        return sum(length * length for length in lengths) / sum(lengths) / 2


class Pass(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    compute: float = 0.0
    exchange: float = 0.0
    """Tensor parallelism's."""

    @property
    def total(self) -> float:
        return self.compute + self.exchange

    def plus(self, other: Pass) -> Pass:
        """Return one after the other."""
        return Pass(self.compute + other.compute, self.exchange + other.exchange)

    def repeated(self, times: float) -> Pass:
        """Return it ``times`` times."""
        return Pass(times * self.compute, times * self.exchange)


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """What one data-parallel rank's forward passes hold."""

    count: int
    tokens: float
    """Of one of them, as a mean."""
    rows: float
    """Tokens that logits are computed for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """One role's calls under one layout."""

    weights: Weights
    trained: Weights
    """Those with gradients."""
    dims: ParallelDims
    place: Placement
    kernels: Kernels
    links: Links
    settings: MemorySettings
    tokens: Tokens

    def seconds(
        self, kind: CallKind, *, micro_batch_tokens: int | None, gradient_checkpointing: bool, max_slots: int
    ) -> CallSeconds:
        """Return how long a call of that kind takes."""
        if kind == "generate":
            parts = self._generate(max_slots)
        elif kind == "infer":
            parts = self._infer(micro_batch_tokens)
        else:
            parts = self._train(micro_batch_tokens, gradient_checkpointing)
        return parts + CallSeconds(other=self.links.efficiency.call_s)

    # ---- calls
    def _infer(self, limit: int | None) -> CallSeconds:
        micro = self._micro_batches(limit, 1)
        stage = self._forward_stage(micro.tokens, self.tokens.context, self._logprobs(micro.rows))
        return self._pipelined(stage, self._exposed_gather(stage), micro.count, self._send(micro.tokens))

    def _train(self, limit: int | None, checkpointing: bool) -> CallSeconds:
        minibatches = self.tokens.workload.num_minibatches
        micro = self._micro_batches(limit, minibatches)
        forward = self._forward_stage(micro.tokens, self.tokens.context, self._logprobs(micro.rows))
        backward = self._backward_stage(micro, checkpointing)
        sharding = self._exposed_gather(forward) + self._exposed_gather(backward)
        one = self._pipelined(forward.plus(backward), sharding, micro.count, 2 * self._send(micro.tokens))
        epochs = self.tokens.workload.num_epochs
        return (one + self._reduce(backward) + self._optimize()).times(minibatches * epochs)

    def _generate(self, max_slots: int) -> CallSeconds:
        load, pp = self.tokens.workload, self.dims.pp
        share = math.ceil(load.num_sequences / self._shares)
        waves = max(math.ceil(share / max_slots), min(pp, share))
        prompts = math.ceil(share / load.samples_per_prompt) * load.prompt_tokens / waves
        prefill = self._forward_stage(prompts, load.prompt_tokens / 2, self._draws(share / waves))
        parts = self._pipelined(prefill, self._exposed_gather(prefill), waves, self._send(prompts))
        for stretch in plan_decoding(self.tokens.responses, load.prompt_tokens, share, max_slots):
            # Under a pipeline as many groups of sequences as stages take turns, so that every stage has one of them.
            batch = stretch.sequences / pp
            stage = self._decode_stage(batch, stretch.context)
            step = CallSeconds(
                compute=stage.compute, tensor_parallel=stage.exchange, pipeline=self._send(batch),
                sharding=self._exposed_gather(stage),
            )  # fmt: skip
            parts += step.times(stretch.steps * pp)
        return parts

    # ---- stages
    def _forward_stage(self, tokens: float, context: float, head: Pass) -> Pass:
        block = self._launched(
            self.kernels.forward(tokens, context), self._exchange(tokens), self.links.efficiency.layer_launch_s
        )
        return self._slowest_stage(block, head)

    def _backward_stage(self, micro: MicroBatches, checkpointing: bool) -> Pass:
        share = self.trained.total / self.weights.total
        launch, exchange = self.links.efficiency.layer_launch_s, self._exchange(micro.tokens)
        context = self.tokens.context
        block = self._launched(
            self.kernels.backward(micro.tokens, context, trained_share=share), exchange, launch
        )  # fmt: skip
        if checkpointing:
            block = block.plus(self._launched(self.kernels.forward(micro.tokens, context), exchange, launch))
        head = Pass((1 + share) * self.kernels.head(micro.rows) + self.kernels.logprobs(micro.rows))
        return self._slowest_stage(block, head)

    def _decode_stage(self, sequences: float, context: float) -> Pass:
        efficiency = self.links.efficiency
        block = self._launched(
            self.kernels.decode(sequences, context), self._exchange(sequences), efficiency.decode_launch_s
        )
        return self._slowest_stage(block, self._draws(sequences).plus(Pass(efficiency.step_s)))

    def _logprobs(self, rows: float) -> Pass:
        """The head on ``rows`` tokens whose log-probabilities are asked for."""
        return Pass(self.kernels.head(rows) + self.kernels.logprobs(rows), self._join_sums(rows))

    def _draws(self, rows: float) -> Pass:
        """The head on ``rows`` tokens after which one is drawn."""
        return Pass(self.kernels.head(rows) + self.kernels.draws(rows), self._join_logits(rows))

    def _slowest_stage(self, block: Pass, head: Pass) -> Pass:
        """Return the stage that the others wait for: the first has most blocks, the last one the head."""
        blocks = [len(run) for run in stage_blocks(self.kernels.shape.num_layers, self.dims.pp)]
        last = block.repeated(blocks[-1]).plus(head)
        return max(block.repeated(blocks[0]), last, key=lambda stage: stage.total) if self.dims.pp > 1 else last

    def _launched(self, compute: float, exchange: float, launch: float) -> Pass:
        """A block takes as long as its kernels, or as its host takes to launch them, and the two sums under tp."""
        efficiency, shape = self.links.efficiency, self.kernels.shape
        launch += 2 * efficiency.collective_launch_s if self.dims.tp > 1 else 0.0
        if shape.experts is not None:
            launch += shape.experts.per_block(shape.num_layers, efficiency.experts_launch_s, 0.0)
        return Pass(max(compute, launch - exchange), exchange)

    # ---- micro-batches
    @property
    def _shares(self) -> int:
        return self.dims.dp * self.dims.fsdp

    def _micro_batches(self, limit: int | None, minibatches: int) -> MicroBatches:
        load = self.tokens.workload
        share = math.ceil(load.num_sequences / (self._shares * minibatches))
        each = max(1, int((limit or load.micro_batch_tokens) // self.tokens.sequence))
        count = math.ceil(share / each)
        rows = share / count * (self.tokens.response if self.kernels.shape.num_outputs > 1 else self.tokens.sequence)
        return MicroBatches(count, share / count * self.tokens.sequence, rows)

    def _pipelined(self, stage: Pass, sharding: float, count: int, send: float) -> CallSeconds:
        """Return ``count`` micro-batches one after the other; under a pipeline the last stage begins when the first
        micro-batch has come through, and the first ends before the last one goes: ``pp - 1`` turns of waiting."""
        turns = self.dims.pp - 1
        return CallSeconds(
            compute=count * stage.compute, tensor_parallel=count * stage.exchange, sharding=count * sharding,
            pipeline=turns * (stage.total + sharding) + (count + turns) * send,
        )  # fmt: skip

    # ---- communication
    def _exchange(self, tokens: float) -> float:
        """One block's two sums of hidden states over tensor-parallel ranks; as many in its backward pass."""
        size = tokens * self.kernels.shape.hidden * self.kernels.element_bytes
        return 2 * self.links.all_reduce(size, self.place.tp)

    def _join_sums(self, rows: float) -> float:
        """What tensor-parallel ranks tell each other of the log-probabilities of tokens: three fp32 numbers each."""
        return self.links.gather(12 * rows * self.dims.tp, self.place.tp) if self.kernels.shape.num_outputs > 1 else 0.0

    def _join_logits(self, rows: float) -> float:
        outputs = self.kernels.shape.num_outputs
        return self.links.gather(rows * outputs * self.kernels.element_bytes, self.place.tp) if outputs > 1 else 0.0

    def _send(self, tokens: float) -> float:
        """Hidden states to the next stage; every tensor-parallel rank sends them to its counterpart."""
        if self.dims.pp == 1:
            return 0.0
        size = tokens * self.kernels.shape.hidden * self.kernels.element_bytes
        return self.links.send(size, within_node=self.place.stages_share_node)

    def _exposed_gather(self, beside: Pass) -> float:
        """What gathering a stage's weights takes longer than the pass that it runs beside, and its first block."""
        if self.dims.fsdp == 1:
            return 0.0
        size = self.weights.of_stage(self.dims) * self.settings.gathered_bytes
        return self._exposed(self.links.gather(size, self.place.fsdp), beside)

    def _reduce(self, beside: Pass) -> CallSeconds:
        """What summing gradients takes longer than the last micro-batch's backward pass, and its last block."""
        size = self.trained.of_stage(self.dims) * self.settings.gathered_bytes
        scatter = self.links.gather(size, self.place.fsdp)
        replicas = self.links.all_reduce(size / self.dims.fsdp, self.place.dp)
        if scatter + replicas == 0:
            return CallSeconds()
        exposed = self._exposed(scatter + replicas, beside) / (scatter + replicas)
        return CallSeconds(sharding=scatter * exposed, data_parallel=replicas * exposed)

    def _exposed(self, communication: float, beside: Pass) -> float:
        if not self.links.efficiency.hides_communication:
            return communication
        blocks = max(1, math.ceil(self.kernels.shape.num_layers / self.dims.pp))
        return max(communication - beside.total, communication / blocks)

    def _optimize(self) -> CallSeconds:
        """Clip gradients and step: gradients are read for their norm, read and written scaled, and read; weights and
        optimizer state are read and written."""
        elements = self.trained.of_stage(self.dims) / self.dims.fsdp
        size = 4 * self.settings.master_bytes + 2 * (self.settings.master_bytes + self.settings.optimizer_bytes)
        return CallSeconds(optimizer=self.kernels.device.stream(elements * size))
