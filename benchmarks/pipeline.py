"""Generation through pipeline stages next to replicas of the whole model, on the same ranks.

The forwards of a tiny model last as long as an accelerator would take for the layers that a rank holds: a time for each
layer, whatever the number of tokens, as decoding does that reads weights from memory. Forty milliseconds for all layers
are those of 70 billion weights in bfloat16 at 3.5 TB/s. Everything else is real: ranks, commands, hidden states, keys
and values, draws. So replicas need as many seconds for a forward as all stages together, and with enough samples stages
make as many tokens per second as replicas, but for the loop on the last stage.

The arms take turns, and every turn has other prompts and lengths. Tokens of both arms are compared.

Run ``python -m benchmarks.pipeline``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks, gather_from_ranks
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.generation.rebalance.peers import Peers
from lightning_realloc.generation.staged.staged_engine import StagedEngine
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.model.structure import find_blocks
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from lightning_realloc.runtime.parallel.pipeline import PipelineStage
from lightning_realloc.runtime.parallel.stage_link import StageLink

NUM_LAYERS = 8
LAYER_S = 0.005
"""Seconds of one layer: a forward of all takes 40 ms."""
MOST_TOKENS = 48
LEAST_RATIO = 0.9
SAMPLES = (2, 8, 32)
"""Samples of each rank. A stage's rank works on those of all its pipeline's ranks."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of all ranks."""

    seconds: float
    """From a common start until the last rank has finished."""
    tokens: dict[int, tuple[int, ...]]
    """Sample id -> its tokens, of all ranks."""


class Arm:
    """The engine of one rank under one layout.

    Args:
        longest: Most tokens of a response.
        kind: Class of engines of stages.
        peers: Last stages between which samples move; None: samples stay.
    """

    def __init__(
        self, layout: Layout, meshes: MeshRegistry, host: dist.ProcessGroup, *, max_slots: int = 1024,
        longest: int = MOST_TOKENS, kind: type[StagedEngine] = StagedEngine, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        )  # fmt: skip
        model: nn.Module = LlamaForCausalLM(config).eval().requires_grad_(False).double()
        model_layout = ModelLayout(describe_model(model), layout)
        model = parallelize(model, model_layout, meshes)
        own = sum(1 for _, block in find_blocks(model) if any(True for _ in block.parameters()))
        pace_forwards(model, own * LAYER_S)
        self._layout, self._longest = layout, longest
        self.engine: GenerationEngine = (
            kind(model, StageLink(PipelineStage(model, model_layout, meshes), host), max_slots=max_slots, peers=peers)
            if layout.dims.pp > 1
            else GenerationEngine(model, max_slots=max_slots)
        )

    def generate(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> Turn:
        """Generate the completions of all prompts, this rank's share of them. Collective."""
        engine, rank = self.engine, dist.get_rank()
        size, index = self._layout.data_parallel_size, self._layout.data_parallel_index(rank)
        own = range(index, len(prompts), size)
        params = SamplingParams(max_new_tokens=self._longest, ignore_eos=True)
        dist.barrier()
        begin = time.perf_counter()
        made: dict[int, tuple[int, ...]] = {}
        if isinstance(engine, StagedEngine) and engine.is_follower:
            engine.follow()
        else:
            completions = engine.generate(
                [prompts[i] for i in own], params, sample_ids=list(own), token_limits=[limits[i] for i in own]
            )
            made = {completion.sample_id: completion.token_ids for completion in completions}
            if isinstance(engine, StagedEngine):
                engine.leave()
        everyone = gather_from_ranks((time.perf_counter() - begin, made))
        tokens = {number: ids for _, theirs in everyone for number, ids in theirs.items()}
        return Turn(max(seconds for seconds, _ in everyone), tokens)


def pace_forwards(model: nn.Module, seconds: float) -> None:
    """Let each forward of a model last ``seconds``, if it does not take longer."""
    due_s = 0.0

    def begin(*_: object) -> None:
        nonlocal due_s
        due_s = time.perf_counter() + seconds

    def end(*_: object) -> None:
        time.sleep(max(0.0, due_s - time.perf_counter()))

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


def work(rank: int, texts: Sequence[str], num_turns: int, answers: Connection) -> None:
    """Measure all arms in turns; the first rank sends for each number of samples the turns of each arm."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    layouts = [Layout.parse(text) for text in texts]
    meshes = MeshRegistry("cpu")
    meshes.create(layouts)
    host = meshes.new_host_group()
    assert host is not None
    arms = [Arm(layout, meshes, host) for layout in layouts]
    for count in SAMPLES:
        turns: list[tuple[Turn, ...]] = []
        for number in range(num_turns + 1):
            draw = random.Random(number)
            total = count * len(layouts[0].ranks)
            prompts = [[draw.randrange(256) for _ in range(draw.randint(4, 16))] for _ in range(total)]
            limits = [draw.randint(MOST_TOKENS // 2, MOST_TOKENS) for _ in range(total)]
            order = range(len(arms)) if number % 2 else range(len(arms))[::-1]
            made = {index: arms[index].generate(prompts, limits) for index in order}
            turns.append(tuple(made[index] for index in range(len(arms))))
        if rank == 0:
            answers.send((count, turns[1:]))  # the first one warms up


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=5, help="turns of each case, both arms in each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    options: argparse.Namespace = parser.parse_args(arguments)
    report = BenchmarkReport("pipeline", settings={"layers": NUM_LAYERS, "layer_s": LAYER_S, "turns": options.turns})
    for size in options.ranks:
        texts = (f"dp{size}", f"pp{size}")
        results: Any = answers_of_ranks(work, texts, options.turns, world_size=size)
        for count, turns in results:
            rates = [
                [sum(map(len, turn[arm].tokens.values())) / turn[arm].seconds for turn in turns] for arm in range(2)
            ]
            ratio = median(staged / whole for whole, staged in zip(*rates, strict=True))
            equal = all(whole.tokens == staged.tokens for whole, staged in turns)
            report.add_row(
                replicas=texts[0], stages=texts[1], samples_per_rank=count,
                replicas_tokens_per_s=median(rates[0]), stages_tokens_per_s=median(rates[1]), ratio=ratio,
                tokens="equal" if equal else "differ",
            )  # fmt: skip
            report.require_at_least(f"equal tokens, {texts[1]}, {count} samples", float(equal), 1.0)
            if count == max(SAMPLES) and size == 2:  # four ranks need more than two cores
                report.require_at_least(f"tokens per second, {texts[1]} over {texts[0]}", ratio, LEAST_RATIO)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
