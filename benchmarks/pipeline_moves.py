"""Seconds until the last of several pipelines has generated its samples, with and without moving samples between them.

Four ranks form two pipelines of two stages, with the forwards of `benchmarks.pipeline`. Responses of the first
pipeline are four times as long, on average, as those of the second one. Engines do not know the lengths. The arms take
turns: no sample moves, queued samples move, or running ones as well, which are read again where they arrive.

Run ``python -m benchmarks.pipeline_moves``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.migration import EndsAtLength
from benchmarks.pipeline import NUM_LAYERS, Arm
from benchmarks.ranks import answers_of_ranks, gather_from_ranks
from lightning_realloc.generation.base_engine import EngineCall
from lightning_realloc.generation.loop.run import GenerationStats
from lightning_realloc.generation.rebalance.peers import MovableSamples, Peers
from lightning_realloc.generation.staged.staged_engine import StagedEngine
from lightning_realloc.layout import Layout
from lightning_realloc.runtime.messages.mailbox import Mailbox
from lightning_realloc.runtime.parallel.mesh import MeshRegistry

LAYOUT = "pp2.dp2"
SAMPLES, SLOTS = 64, 12
"""Samples and slots of each pipeline."""
MEANS = (48, 12)
"""Mean length of a response in each pipeline; lengths are geometric."""
LONGEST = 160
MOVES: tuple[MovableSamples | None, ...] = (None, "queued", "all")
LEAST_GAIN = 1.15
"""Seconds without moves over those with queued samples moving."""


class _Engine(StagedEngine):
    """A stage's engine whose responses have given lengths, by sample id."""

    lengths: Mapping[int, int] = {}

    def _complete(self, call: EngineCall) -> GenerationStats:
        return super()._complete(replace(call, stop=EndsAtLength(self.lengths)))


def draw(turn: int) -> tuple[list[list[int]], dict[int, int]]:
    """Return the prompts, and the length of each response; those of the two pipelines alternate."""
    rng = random.Random(turn)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(4, 16))] for _ in range(2 * SAMPLES)]
    lengths = {i: min(1 + int(rng.expovariate(1 / MEANS[i % 2])), LONGEST) for i in range(2 * SAMPLES)}
    return prompts, lengths


def work(rank: int, num_turns: int, answers: Connection) -> None:
    """Measure all arms in turns; the first rank sends (seconds, tokens, samples that moved) of each arm."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    layout, meshes = Layout.parse(LAYOUT), MeshRegistry("cpu")
    meshes.create([layout])
    host = meshes.new_host_group()
    assert host is not None
    mailbox = Mailbox(rank, dist.get_world_size(), host)
    others = tuple(other for other in layout.batch_group(rank) if other != rank)
    is_last = layout.coordinate(rank).pp == layout.dims.pp - 1
    arms = [
        Arm(layout, meshes, host, max_slots=SLOTS, kind=_Engine, longest=LONGEST,
            peers=Peers(mailbox, rank, others, moves) if moves and is_last else None)
        for moves in MOVES
    ]  # fmt: skip
    for number in range(num_turns + 1):
        prompts, lengths = draw(number)
        made: dict[int, Any] = {}
        for index in range(len(arms)) if number % 2 else reversed(range(len(arms))):
            engine: Any = arms[index].engine
            engine.lengths = lengths
            turn = arms[index].generate(prompts, [LONGEST] * len(prompts))
            stats = engine.migration_stats
            moved = sum(gather_from_ranks(0 if stats is None else stats.num_received))
            made[index] = (turn.seconds, turn.tokens, moved)
            mailbox.release(0)
        if rank == 0 and number:  # the first turn warms up
            answers.send([made[index] for index in range(len(arms))])


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=5, help="turns, all arms in each")
    options: argparse.Namespace = parser.parse_args(arguments)
    report = BenchmarkReport("pipeline_moves", settings={"layers": NUM_LAYERS, "turns": options.turns})
    turns = list(answers_of_ranks(work, options.turns, world_size=4))
    for index, moves in enumerate(MOVES):
        ratio = median(turn[0][0] / turn[index][0] for turn in turns)
        equal = all(turn[index][1] == turn[0][1] for turn in turns)
        report.add_row(
            moves=moves or "none", seconds=median(turn[index][0] for turn in turns), ratio=ratio,
            moved_per_turn=sum(turn[index][2] for turn in turns) / len(turns), tokens="equal" if equal else "differ",
        )  # fmt: skip
        report.require_at_least(f"equal tokens, {moves or 'none'}", float(equal), 1.0)
        if moves == "queued":
            report.require_at_least("seconds without moves over those with", ratio, LEAST_GAIN)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
