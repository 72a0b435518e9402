"""Idle time of training pipelines under each schedule, next to its formula.

The passes of a tiny model last as long as an accelerator would take: every block and micro-batch as long forward, as
long backward, and as long for the gradients of its weights. Ranks, messages, losses and gradients are real. There is no
FSDP and no optimizer. A schedule's formula is that of `idle_turns`.

Schedules take turns, with one run of blocks for each stage and with two (`vpp2`). Gradients of schedules are compared.

Run ``python -m benchmarks.pipeline_training``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks, max_over_ranks
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.pipeline_schedule import ScheduleName, idle_turns
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.forward.deferred_weights import DeferredWeights
from lightning_realloc.runtime.model.structure import find_blocks
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.pipeline import PipelineStage, pipeline_train

NUM_LAYERS = 8
PASS_S = 0.1
"""Seconds of one block's forward pass, of its backward pass, and of the gradients of its weights."""
MOST_IDLE_ABOVE_FORMULA = 0.1
"""Largest difference of a measured idle share from its formula."""
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
NUM_RUNS = (1, 2)
"""Runs of blocks of each stage."""


@dataclass
class Clock:
    """Makes passes last as long as on an accelerator."""

    schedule: ScheduleName = "1f1b"
    due_s: float = 0.0

    def begin(self, seconds: float) -> None:
        """Start a pass that takes ``seconds``."""
        self.due_s = time.perf_counter() + seconds

    def end(self) -> None:
        """Wait until the pass has taken its time."""
        time.sleep(max(0.0, self.due_s - time.perf_counter()))

    def pace(self, block: nn.Module) -> None:
        """Pace the passes of a block."""
        block.register_forward_pre_hook(self._before)
        block.register_forward_hook(self._after)

    def _before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.begin(PASS_S)
        entered: Tensor = _AtBackward.apply(inputs[0], self.end)
        return entered, *inputs[1:]

    def _after(self, _: nn.Module, __: object, output: Tensor) -> Tensor:
        self.end()
        backward_s = PASS_S if self.schedule == "zero_bubble" else 2 * PASS_S
        left: Tensor = _AtBackward.apply(output, partial(self.begin, backward_s))
        return left


class _AtBackward(torch.autograd.Function):
    """Returns its input, and calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None


class Arm:
    """The stage of one rank."""

    def __init__(self, layout: Layout, meshes: MeshRegistry) -> None:
        self.vpp = layout.dims.vpp
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        model: nn.Module = LlamaForCausalLM(config).train()
        spec = replace(describe_model(model), costs=())  # stages of equal numbers of blocks
        model_layout = ModelLayout(spec, layout)
        self.model = parallelize(model, model_layout, meshes)
        self.stage = PipelineStage(self.model, model_layout, meshes)
        blocks = [block for _, block in find_blocks(self.model) if any(True for _ in block.parameters())]
        self.num_blocks, self.clock = len(blocks), Clock()
        for block in blocks:
            self.clock.pace(block)

    def train(self, schedule: ScheduleName, batches: Sequence[PackedBatch]) -> tuple[float, dict[str, Tensor]]:
        """Return the seconds until the last rank has all gradients, and this rank's gradients. Collective."""
        self.clock.schedule = schedule
        self.model.zero_grad()

        def loss(model: nn.Module, number: int) -> Tensor:
            return token_logprobs(model, batches[number]).logprobs.square().mean()

        compute = DeferredWeights.compute_oldest

        def paced(weights: DeferredWeights) -> None:
            self.clock.begin(self.num_blocks / self.vpp * PASS_S)
            compute(weights)
            self.clock.end()

        dist.barrier()
        begin = time.perf_counter()
        with mock.patch.object(DeferredWeights, "compute_oldest", paced):
            pipeline_train(self.stage, batches, loss, schedule=schedule)
        seconds = max_over_ranks(time.perf_counter() - begin)
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return seconds, found


def packed_rows(count: int) -> list[PackedBatch]:
    """Return micro-batches of two rows."""

    def rows(length: int) -> Ragged:
        return Ragged.from_list([torch.randint(0, 64, (length,)) for _ in range(2)])

    return [pack(Samples(torch.arange(2), {"prompt_ids": rows(2), "response_ids": rows(6)})) for _ in range(count)]


def work(rank: int, size: int, counts: Sequence[int], num_turns: int, answers: Connection) -> None:
    """Measure all schedules in turns; the first rank sends for each number of micro-batches the seconds of each."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    layouts, meshes = [Layout.parse(f"pp{size}.vpp{vpp}") for vpp in NUM_RUNS], MeshRegistry("cpu")
    meshes.create(layouts)
    arms = {layout.dims.vpp: Arm(layout, meshes) for layout in layouts}
    for arm in arms.values():
        arm.train("zero_bubble", packed_rows(size))  # warms up
    cases = [(vpp, schedule) for vpp in NUM_RUNS for schedule in SCHEDULES]
    for count in counts:
        torch.manual_seed(count)
        batches, turns = packed_rows(count), []
        for number in range(num_turns):
            made = {case: arms[case[0]].train(case[1], batches) for case in (cases if number % 2 else cases[::-1])}
            turns.append({case: seconds for case, (seconds, _) in made.items()})
        pairs = [(made[vpp, "1f1b"][1], made[vpp, "zero_bubble"][1]) for vpp in NUM_RUNS]
        error = max(
            float((other[name] - usual[name]).abs().max() / usual[name].abs().max())
            for usual, other in pairs
            for name in usual
        )
        error = max_over_ranks(error)
        if rank == 0:
            answers.send((count, error, turns))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=3, help="turns of each case, all schedules in each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of stages")
    options: argparse.Namespace = parser.parse_args(arguments)
    settings = {"layers": NUM_LAYERS, "pass_s": PASS_S, "turns": options.turns}
    report = BenchmarkReport("pipeline_training", settings=settings)
    for size in options.ranks:
        results: Any = answers_of_ranks(work, size, (size, 2 * size, 4 * size), options.turns, world_size=size)
        stage_s = PASS_S * NUM_LAYERS / size
        for count, error, turns in results:
            busy_s = 3 * count * stage_s
            for vpp, schedule in itertools.product(NUM_RUNS, SCHEDULES):
                seconds = median(turn[vpp, schedule] for turn in turns)
                waits, weight_waits = idle_turns(schedule, size, count, vpp=vpp)
                formula_s = (2 * waits + weight_waits) * stage_s
                idle, formula = 1 - busy_s / seconds, formula_s / (busy_s + formula_s)
                speedup = median(turn[1, "1f1b"] / turn[vpp, schedule] for turn in turns)
                report.add_row(
                    stages=size, micro_batches=count, vpp=vpp, schedule=schedule, seconds=seconds, idle_share=idle,
                    formula=formula, times_1f1b=speedup,
                )  # fmt: skip
                name = f"{schedule}, pp{size}.vpp{vpp}, {count} micro-batches"
                report.require_at_most(f"idle share above its formula, {name}", idle - formula, MOST_IDLE_ABOVE_FORMULA)
            report.require_at_most(f"difference of gradients, {size} stages, {count} micro-batches", error, 1e-5)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
