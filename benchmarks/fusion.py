"""Inference on finished responses while others are still generated, next to inference afterwards.

PPO with four random Llamas on two CPU ranks of one thread each. The table has wall seconds of an iteration, inference
that ran before generation ended, idle time and differences of losses. Rank 0 generates and trains the actor; rank 1
runs the other calls. Arms differ in the number of chunks in which samples are sent on; 1 sends all at the end.

Arms take turns with the same prompts and seeds. Each turn has a Trainer of its own, a warm-up iteration and measured
iterations, with a barrier between iterations. Response lengths are geometric; 8 samples run at a time.

Run ``python -m benchmarks.fusion``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from benchmarks.ranks import answers_of_ranks, gather_from_ranks, turns_within

PLAN = {"calls": {
    "actor.generate": {"layout": "dp1@0", "max_slots": 8},
    "reference.infer": "dp1@1", "reward.infer": "dp1@1", "critic.infer": "dp1@1",
    "actor.train": "dp1@0", "critic.train": "dp1@1",
}}  # fmt: skip
WORLD_SIZE = 2
INFER = ("reference.infer", "reward.infer", "critic.infer")
TOLERANCE = 1e-5
SAME_RESPONSES = 0.98
"""Least share of equal responses. In float32, rounding in another batch changes about one draw in 10,000."""


WHOLE, JUDGED = 1, 4
"""Compared numbers of chunks, the baseline first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the four models, and samples of an iteration."""

    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 4
    vocabulary: int = 4096
    num_prompts: int = 32
    prompt_tokens: int = 32
    new_tokens: int = 256
    """Longest response, in tokens."""
    mean_tokens: int = 96
    """Approximate mean response length without the limit."""
    arms: tuple[int, ...] = (WHOLE, 2, JUDGED, 8)
    """Numbers of chunks."""
    measured: int = 2
    """Measured iterations, after a warm-up iteration."""


TINY = Workload(
    hidden_size=64, intermediate_size=128, num_layers=2, vocabulary=512, num_prompts=6, prompt_tokens=8, new_tokens=12,
    mean_tokens=6, arms=(WHOLE, JUDGED), measured=1,
)  # fmt: skip


@dataclass(slots=True)
class Readings:
    """Measurements of one rank, summed over the measured iterations."""

    seconds: float = 0.0
    idle_s: float = 0.0
    hidden_s: float = 0.0
    """Seconds of inference before generation ended."""
    infer_s: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Losses of actor and critic in each iteration."""
    tokens: list[list[int]] = field(default_factory=list)
    """Tokens of each response of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Measurements of one turn of one arm, per iteration."""

    seconds: float
    infer_s: float
    """Seconds of inference over all ranks, without waiting."""
    hidden_s: float
    """Seconds of inference before generation ended, on one rank."""
    idle_share: float
    """Share of time that a rank is idle, mean over ranks."""
    losses: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]


def run_arm(num_chunks: int, work: Workload) -> Turn:
    """Train with a new Trainer, and return the measurements of both ranks. Collective."""
    from benchmarks.workload import make_trainer, random_prompts
    from lightning_realloc import ReallocStrategy

    noted = Readings()
    strategy = ReallocStrategy(plan=PLAN, overlap="calls", generation_chunks=num_chunks)
    trainer = make_trainer(strategy=strategy, callbacks=[_make_meter(noted)], max_steps=1 + work.measured)
    count = work.num_prompts * (1 + work.measured)
    prompts = random_prompts(count, length=work.prompt_tokens, batch_size=work.num_prompts)
    trainer.fit(_make_module(work, noted), prompts)
    return merge(gather_from_ranks(noted), work.measured)


def merge(ranks: Sequence[Readings], measured: int) -> Turn:
    """Combine the measurements of all ranks."""
    return Turn(
        seconds=max(rank.seconds for rank in ranks) / measured,
        infer_s=sum(rank.infer_s for rank in ranks) / measured,
        hidden_s=max(rank.hidden_s for rank in ranks) / measured,  # the same on all ranks
        idle_share=fmean(rank.idle_s / rank.seconds for rank in ranks),
        losses=tuple(ranks[0].losses),
        tokens=tuple(tuple(tokens) for rank in ranks for tokens in rank.tokens),
    )


def _make_module(work: Workload, noted: Readings) -> Any:
    from benchmarks.workload import byte_tokenizer, llama_config, stable_adam
    from lightning_realloc import PPO, SamplingParams

    class Recorded(PPO):
        def roll_out(self, actor: Any, prompts: Any) -> Any:
            made = super().roll_out(actor, prompts)
            noted.tokens += made.ragged("response_ids").to_lists()
            return made

    config = llama_config(work)
    ends = tuple(range(work.vocabulary - max(1, work.vocabulary // work.mean_tokens), work.vocabulary))
    sampling = SamplingParams(max_new_tokens=work.new_tokens, stop_token_ids=ends)

    return Recorded(config, config, tokenizer=byte_tokenizer(), sampling=sampling, optimizer=stable_adam(1e-5))


def _make_meter(noted: Readings) -> Any:
    from lightning.pytorch.callbacks import Callback

    class Meter(Callback):
        """Measures every iteration but the first."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            dist.barrier()
            self._begin = self._totals(trainer)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            known = trainer.callback_metrics
            noted.losses += [float(known[name]) for name in ("actor/loss", "critic/loss")]
            if batch_idx:
                spent = [after - before for after, before in zip(self._totals(trainer), self._begin, strict=True)]
                noted.seconds += spent[0]
                noted.idle_s += spent[1]
                noted.infer_s += spent[2]
                noted.hidden_s += sum(float(known.get(f"hidden_s/{call}", 0.0)) for call in INFER)

        def _totals(self, trainer: Any) -> tuple[float, float, float]:
            runner = trainer.strategy.runner
            return time.perf_counter(), runner.seconds_idle, sum(runner.seconds.get(call, 0.0) for call in INFER)

    return Meter()


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Run all turns of all arms on this rank; rank 0 sends the results."""
    work = workload(options)
    for number in turns_within(options.turns, options.limit_s):
        for arm in work.arms if number % 2 == 0 else work.arms[::-1]:
            turn = run_arm(arm, work)
            gc.collect()
            if rank == 0:
                answers.send((arm, turn))


def workload(options: argparse.Namespace) -> Workload:
    """Return the workload that the options ask for."""
    return TINY if options.tiny else Workload()


def loss_difference(turn: Turn, other: Turn) -> float:
    """Return the largest difference of losses: relative, or absolute for losses below 1."""
    pairs = zip(turn.losses, other.losses, strict=True)
    return max(abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in pairs)


def same_responses(turn: Turn, other: Turn) -> float:
    """Return the share of responses with the same tokens."""
    return fmean(ours == theirs for ours, theirs in zip(turn.tokens, other.tokens, strict=True))


def fill(report: BenchmarkReport, turns: Mapping[int, Sequence[Turn]]) -> None:
    """Add a row for each number of chunks, and the targets."""
    whole = turns[WHOLE]
    for num_chunks, made in turns.items():
        report.add_row(
            num_chunks=num_chunks,
            seconds=round(median(turn.seconds for turn in made), 2),
            over_whole=round(paired_ratio([t.seconds for t in whole], [t.seconds for t in made]), 3),
            infer_s=round(median(turn.infer_s for turn in made), 2),
            hidden_s=round(median(turn.hidden_s for turn in made), 2),
            idle=round(median(turn.idle_share for turn in made), 3),
            loss_diff=max(loss_difference(turn, whole[0]) for turn in made),
            same=round(min(same_responses(turn, whole[0]) for turn in made), 4),
        )
    ratio = paired_ratio([turn.seconds for turn in whole], [turn.seconds for turn in turns[JUDGED]])
    report.require_at_least(f"iteration with {WHOLE} chunk over {JUDGED} chunks", ratio, 1.0)
    every = [turn for made in turns.values() for turn in made]
    report.require_at_most(
        "largest difference of losses from the same tokens",
        max(loss_difference(turn, whole[0]) for turn in every if turn.tokens == whole[0].tokens),
        TOLERANCE,
    )
    same = min(same_responses(turn, whole[0]) for turn in every)
    report.require_at_least("share of responses with the same tokens", same, SAME_RESPONSES)


def main(arguments: list[str] | None = None) -> int:
    """Run every arm in turn and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=4, help="turns of each arm")
    parser.add_argument("--tiny", action="store_true", help="models of 100,000 weights, for a quick look")
    parser.add_argument(
        "--limit-s", type=float, default=240.0, help="seconds for all turns; there are fewer turns if needed"
    )
    options = parser.parse_args(arguments)
    settings = {"world_size": WORLD_SIZE, "plan": PLAN} | asdict(workload(options))
    report = BenchmarkReport("fusion", settings=settings)
    turns: defaultdict[int, list[Turn]] = defaultdict(list)
    for num_chunks, turn in answers_of_ranks(work_on, options, world_size=WORLD_SIZE):
        turns[num_chunks].append(turn)
        sys.stderr.write(f"chunks: {num_chunks}, {turn.seconds:.2f} s an iteration, {turn.hidden_s:.2f} s hidden\n")
    fill(report, turns)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
