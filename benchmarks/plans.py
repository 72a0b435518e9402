"""What does one PPO iteration with four models cost on four ranks, under different execution plans?

The same random Llamas, prompts and seeds in every arm: every call sharded over all ranks, one after the other; the
heuristic's plan; a plan made by hand, whose calls run side by side; and that plan with one call at a time. Each turn of
an arm is a Trainer of its own in the same four processes: a warm-up iteration with short responses, then measured ones,
from when all ranks begin the first to when the last rank ends the last, since iterations may overlap.

Memory is live tensors, those that the ranks share divided among them, at the fullest of the moments between calls.
Activations and gathered weights, gone by then, are left out. Idle is what `idle_share` means, of each rank by itself.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.harness import BenchmarkReport, make_parser, paired_ratio
from benchmarks.memory import live_bytes
from benchmarks.ranks import answers_of_ranks

WORLD_SIZE = 4
ROLES = ("actor", "critic", "reference", "reward")
CALLS = {
    "actor.generate": "generate", "reference.infer": "reference", "reward.infer": "reward", "critic.infer": "values",
    "actor.train": "actor", "critic.train": "critic",
}  # fmt: skip
"""Call -> its column."""
FASTER_THAN_STATIC = 4.0
TOLERANCE = 1e-5
ADAM_EPS = 1e-4
"""Adam's usual 1e-8 turns the last bit of a tiny gradient, which depends on the order of sums, into a whole step."""

Plan = Literal["static", "heuristic"] | Mapping[str, Mapping[str, str]]

# Every stage has work for all ranks: the actor generates while the critic learns from the iteration before, the
# reference reads while reward model and critic do, and the actor learns on all.
BY_HAND: Plan = {"calls": {
    "actor.generate": "dp2@0-1",
    "reference.infer": "dp2@0-1",
    "reward.infer": "dp1@2",
    "critic.infer": "dp1@3",
    "actor.train": "fsdp4@0-3",
    "critic.train": "fsdp2@2-3",
}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the calls."""

    name: str
    plan: Plan = field(hash=False)
    overlap: Literal["iterations", "none"]
    measured: int = 3
    """Iterations after the first one."""


STATIC, HEURISTIC, OVERLAPPING, IN_TURN = "static", "heuristic", "overlapping", "in turn"
ARMS = (
    Arm(STATIC, "static", "none", measured=1),  # slow, and every iteration like the others
    Arm(HEURISTIC, "heuristic", "iterations"),
    Arm(OVERLAPPING, BY_HAND, "iterations"),
    Arm(IN_TURN, BY_HAND, "none"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The four models and one iteration's samples; 52 million weights each by default."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_layers: int = 12
    num_heads: int = 8
    num_kv_heads: int = 4
    vocabulary: int = 32000
    num_prompts: int = 4
    prompt_tokens: int = 24
    new_tokens: int = 128
    warmup_tokens: int = 4
    """Length of the first iteration's responses."""
    learning_rate: float = 1e-5


TINY = Workload(
    hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, vocabulary=512, new_tokens=8
)


@dataclass(slots=True)
class Readings:
    """What one rank noted."""

    span_s: float = 0.0
    """Of all measured iterations together."""
    cpu_s: float = 0.0
    idle_s: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)
    """Call -> seconds over the measured iterations; only of calls that this rank takes part in."""
    bytes_moved: int = 0
    """By all ranks, in the measured iterations."""
    bytes_minimum: int = 0
    peak_bytes: int = 0
    rollouts: list[dict[int, list[int]]] = field(default_factory=list)
    """Sample id -> response, of every iteration."""
    scores: list[list[float]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    num_weights: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn of one arm measured, all ranks together; times are of one iteration."""

    seconds: float
    """Of the slowest rank."""
    cpu_s: float
    """All ranks."""
    seconds_per_call: Mapping[str, float]
    """Of the slowest rank that takes part, waiting left out, reallocation included."""
    idle_shares: tuple[float, ...]
    """Of each rank."""
    bytes_moved: int
    bytes_minimum: int
    peak_bytes: tuple[int, ...]
    """Of each rank."""
    rollouts: tuple[Any, ...]
    """Response token ids of every iteration, in the order of sample ids."""
    scores: tuple[Any, ...]
    """The reward model's, of every iteration."""
    losses: Mapping[tuple[str, int], float]
    """Role and iteration -> loss, where it was logged."""
    plan: Mapping[str, Any]
    num_weights: Mapping[str, int]


# --- one arm on one rank ----------------------------------------------------------------------------------------------


def run_arm(arm: Arm, work: Workload) -> Turn:
    """Train one Trainer's iterations on this rank, with the three others, and return what all measured."""
    import lightning as L

    from benchmarks.workload import random_texts
    from lightning_realloc import ParameterReallocation, PromptDataModule, ReallocStrategy

    switching = ParameterReallocation()
    meter = _make_meter(arm, work, switching)
    trainer = L.Trainer(
        accelerator="cpu", devices=WORLD_SIZE, strategy=ReallocStrategy(plan=arm.plan, overlap=arm.overlap),
        callbacks=[switching, meter], max_steps=1 + arm.measured, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = [{"prompt": text} for text in random_texts(work.num_prompts * 8, length=work.prompt_tokens, seed=1)]
    trainer.fit(_make_module(work, meter.noted), PromptDataModule(rows, batch_size=work.num_prompts))
    parts: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(parts, meter.noted)
    return merge(parts, arm)


def merge(parts: Sequence[Readings], arm: Arm) -> Turn:
    """Return all ranks' readings as one."""
    first, number = parts[0], arm.measured
    return Turn(
        seconds=max(part.span_s for part in parts) / number,
        cpu_s=sum(part.cpu_s for part in parts) / number,
        seconds_per_call={call: max(part.calls.get(call, 0.0) for part in parts) / number for call in CALLS},
        idle_shares=tuple(part.idle_s / part.span_s for part in parts),
        bytes_moved=first.bytes_moved // number,
        bytes_minimum=first.bytes_minimum // number,
        peak_bytes=tuple(part.peak_bytes for part in parts),
        rollouts=tuple(_in_order(made) for made in zip(*(part.rollouts for part in parts), strict=True)),
        scores=tuple(map(tuple, first.scores)),
        losses=losses_by_iteration(first.logged, first.plan, arm.overlap),
        plan=first.plan,
        num_weights=first.num_weights,
    )


def losses_by_iteration(
    logged: Sequence[Mapping[str, float]], plan: Mapping[str, Any], overlap: str
) -> dict[tuple[str, int], float]:
    """Return role and iteration -> loss.

    Where iterations overlap, a loss of which not all ranks know at once is logged one iteration later, and the last
    iteration, which waits for its own, logs that instead: the one before it is not known.
    """
    from lightning_realloc import Layout

    losses, last = {}, len(logged) - 1
    for role in ("actor", "critic"):
        num_ranks = len(Layout.parse(_layout(plan["calls"][f"{role}.train"])).ranks)
        delay = 1 if overlap == "iterations" and num_ranks < WORLD_SIZE else 0
        for index, metrics in enumerate(logged[delay:last]):
            losses[role, index] = metrics[f"{role}/loss"]
        losses[role, last] = logged[last][f"{role}/loss"]
    return losses


def _layout(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else str(entry["layout"])


def _in_order(made: Sequence[Mapping[int, list[int]]]) -> list[list[int]]:
    """Return the responses that all ranks made in one iteration, in the order of their ids."""
    rows = {sample_id: tokens for part in made for sample_id, tokens in part.items()}
    return [rows[sample_id] for sample_id in sorted(rows)]


def _make_module(work: Workload, noted: Readings) -> Any:
    from transformers import LlamaConfig

    from benchmarks.workload import byte_tokenizer
    from lightning_realloc import PPO, SamplingParams

    class Recorded(PPO):
        def roll_out(self, actor: Any, prompts: Any) -> Any:
            made = super().roll_out(actor, prompts)
            rows = zip(made.ids.tolist(), made.ragged("response_ids").to_lists(), strict=True)
            noted.rollouts[-1].update(rows)
            return made

        def summarize(self, samples: Any) -> Any:
            noted.scores.append(samples.tensor("scores").tolist())
            return super().summarize(samples)

    config = LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=work.intermediate_size,
        num_hidden_layers=work.num_layers, num_attention_heads=work.num_heads,
        num_key_value_heads=work.num_kv_heads, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    sampling = SamplingParams(max_new_tokens=work.new_tokens, ignore_eos=True)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=work.learning_rate, eps=ADAM_EPS, weight_decay=0.0, fused=True)

    return Recorded(config, config, tokenizer=byte_tokenizer(), sampling=sampling, optimizer=adam)


def _make_meter(arm: Arm, work: Workload, switching: Any) -> Any:
    from lightning_realloc import PhaseCallback

    class Meter(PhaseCallback):
        """Weighs the first iteration, and takes the times of the others together."""

        def __init__(self) -> None:
            self.noted = Readings()
            self._before = Readings()
            self._weighs = False

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self._weigh()
                dist.barrier()  # the measured iterations begin; between them nobody waits for all
                self._before = self._totals(trainer)
            self._weighs = batch_idx == 0
            self.noted.rollouts.append({})
            tokens = work.warmup_tokens if batch_idx == 0 else work.new_tokens
            module.sampling = replace(module.sampling, max_new_tokens=tokens)

        def on_phase_start(self, trainer: Any, module: Any, phase: str) -> None:
            self._weigh()

        def on_phase_end(self, trainer: Any, module: Any, phase: str) -> None:
            self._weigh()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            names = ("actor/loss", "critic/loss")
            known = trainer.callback_metrics
            self.noted.logged.append({name: float(known[name]) for name in names if name in known})
            if batch_idx == arm.measured:
                self._note(self._totals(trainer), self._before)
                pool = trainer.strategy.pool
                self.noted.plan = trainer.strategy.plan.to_mapping()
                self.noted.num_weights = {role: pool.home(role).model_layout.model.num_elements for role in ROLES}

        def _weigh(self) -> None:
            if self._weighs:
                self.noted.peak_bytes = max(self.noted.peak_bytes, live_bytes(num_sharing=WORLD_SIZE))

        def _totals(self, trainer: Any) -> Readings:
            switches, runner = switching.summary().values(), trainer.strategy.runner
            return Readings(
                span_s=time.perf_counter(),
                cpu_s=time.process_time(),
                idle_s=runner.seconds_idle,
                calls=dict(runner.seconds),
                bytes_moved=sum(switch.bytes_moved for switch in switches),
                bytes_minimum=sum(switch.bytes_minimum for switch in switches),
            )

        def _note(self, after: Readings, before: Readings) -> None:
            for name in ("span_s", "cpu_s", "idle_s", "bytes_moved", "bytes_minimum"):
                setattr(self.noted, name, getattr(after, name) - getattr(before, name))
            self.noted.calls = {name: seconds - before.calls[name] for name, seconds in after.calls.items()}

    return Meter()


# --- four ranks -------------------------------------------------------------------------------------------------------


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Run every turn of every arm on this rank; rank 0 sends them on."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    begin = time.monotonic()
    for number in range(options.turns):
        if number and _outlasts(begin, number, options.limit_s):
            break
        for arm in ARMS:
            turn = run_arm(arm, workload(options))
            gc.collect()
            if rank == 0:
                answers.send((arm.name, turn))


def _outlasts(begin: float, turns_done: int, limit_s: float) -> bool:
    """Return whether one more turn would end after the limit, on the slowest rank's clock."""
    spent = torch.tensor([time.monotonic() - begin], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent) * (turns_done + 1) / turns_done > limit_s


def workload(options: argparse.Namespace) -> Workload:
    """Return the workload that the options ask for."""
    return TINY if options.tiny else Workload(new_tokens=options.new_tokens)


# --- judging ----------------------------------------------------------------------------------------------------------


def fill(report: BenchmarkReport, turns: Mapping[str, Sequence[Turn]]) -> None:
    """Add a row for each arm; bytes in megabytes (10^6)."""
    for arm, made in turns.items():
        first = made[0]
        idle = [median(shares) for shares in zip(*(turn.idle_shares for turn in made), strict=True)]
        report.add_row(
            arm=arm,
            seconds=round(median(turn.seconds for turn in made), 2),
            cpu_s=round(median(turn.cpu_s for turn in made), 1),
            **{CALLS[name]: round(median(turn.seconds_per_call[name] for turn in made), 2) for name in CALLS},
            idle=round(fmean(idle), 3),
            by_rank=" ".join(f"{share:.2f}" for share in idle),
            moved=round(first.bytes_moved / 1e6, 1),
            minimum=round(first.bytes_minimum / 1e6, 1),
            # The predicted peak belongs beside the measured one, as soon as a plan's memory can be worked out.
            peak=" ".join(f"{max(sizes) / 1e6:.0f}" for sizes in zip(*(turn.peak_bytes for turn in made), strict=True)),
            **compare(first, turns[STATIC][0]),
        )


def compare(turn: Turn, other: Turn) -> dict[str, float]:
    """Return the share of equal responses, and how far scores and losses differ, in iterations that both have."""
    tokens = _paired(turn.rollouts, other.rollouts)
    scores = _paired(turn.scores, other.scores)
    both = turn.losses.keys() & other.losses.keys()
    return {
        "equal": fmean(ours == theirs for ours, theirs in tokens),
        "score_diff": max(abs(ours - theirs) for ours, theirs in scores),
        "loss_diff": max(abs(turn.losses[key] - other.losses[key]) for key in both),
    }


def _paired(ours: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return two arms' values of the same samples, of as many iterations as both have."""
    iterations = zip(ours, theirs, strict=False)
    return [pair for one, other in iterations for pair in zip(one, other, strict=True)]


def judge(report: BenchmarkReport, turns: Mapping[str, Sequence[Turn]]) -> None:
    """Add the targets."""
    seconds = {arm: [turn.seconds for turn in made] for arm, made in turns.items()}
    idle = {arm: median(fmean(turn.idle_shares) for turn in made) for arm, made in turns.items()}
    best = min((arm for arm in turns if arm != STATIC), key=lambda arm: median(seconds[arm]))
    report.require_at_least(
        f"seconds of {STATIC} over {best}", paired_ratio(seconds[STATIC], seconds[best]), FASTER_THAN_STATIC
    )
    shorter = paired_ratio(seconds[OVERLAPPING], seconds[IN_TURN])
    report.require_at_most(f"seconds of {OVERLAPPING} over {IN_TURN}", shorter, 1.0)
    report.require_at_most(f"idle share of {OVERLAPPING} over {IN_TURN}", idle[OVERLAPPING] / idle[IN_TURN], 1.0)
    against = [compare(turn, turns[STATIC][0]) for made in turns.values() for turn in made]
    against += [compare(turn, turns[IN_TURN][0]) for turn in turns[OVERLAPPING]]
    report.require_at_least("share of equal responses", min(found["equal"] for found in against), 1.0)
    for name, column in (("scores", "score_diff"), ("losses", "loss_diff")):
        report.require_at_most(f"largest difference of {name}", max(found[column] for found in against), TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Run every arm in turn and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=2, help="turns that each arm has")
    parser.add_argument("--new-tokens", type=int, default=Workload().new_tokens, help="length of the responses")
    parser.add_argument("--tiny", action="store_true", help="models of 100,000 weights, for a quick look")
    parser.add_argument("--limit-s", type=float, default=800.0, help="fewer turns if they would last longer")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    report = BenchmarkReport("plans", settings={"world_size": WORLD_SIZE} | asdict(workload(options)))
    turns: defaultdict[str, list[Turn]] = defaultdict(list)
    for arm, turn in answers_of_ranks(work_on, options, world_size=WORLD_SIZE):
        turns[arm].append(turn)
        sys.stderr.write(f"{arm}: {turn.seconds:.2f} s an iteration, CPU {turn.cpu_s:.1f} s\n")
    report.settings["num_weights"] = turns[STATIC][0].num_weights
    report.settings["plans"] = {arm: made[0].plan["calls"] for arm, made in turns.items()}
    fill(report, turns)
    judge(report, turns)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
