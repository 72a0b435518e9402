"""Makespan of generation with and without moving samples between data-parallel ranks.

Three engines with the same weights in every rank take turns: no sample moves, queued samples move (the default), or all
may move. Every turn has new prompts and lengths. Engines do not know the lengths: only the stop rule does, as if by end
tokens. The makespan is wall seconds, from a common start until the last rank finishes.

- Device "cpu": every rank computes on a core of its own.
- Device "waiting": the forwards of a small model sleep as long as an accelerator would take, while the core is free.
  Everything else is real: ranks, rounds, messages, keys and values.

The lower bound is a perfect division of the decoding seconds without moves among the ranks, or the longest sample
alone, whichever is longer. One turn in float64 compares tokens. In float32, rounding in another batch changes a draw
now and then; such responses are counted too.

Run ``python -m benchmarks.migration``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from typing_extensions import override

from benchmarks.generation import build_model
from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks, gather_from_ranks
from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams
from lightning_realloc.generation.core.sample import Sample, StopRule
from lightning_realloc.generation.loop.run import GenerationRun
from lightning_realloc.generation.rebalance.peers import MovableSamples, Peers
from lightning_realloc.runtime.messages.mailbox import Mailbox

LONGEST = 256
PROMPT_TOKENS = (16, 64)
STAYING = "none"
MOVING: tuple[MovableSamples, ...] = ("queued", "all")
ARMS = (STAYING, *MOVING)
"""Samples that move."""
_NUM_EXACT = 1
"""Turns in float64. In float32, rounding changes about one draw in 10,000."""
FASTER_ON_SKEWED, SLOWER_ON_EVEN = 1.15, 0.98


Turn = tuple[float, Sequence[Mapping[str, Any]]]
"""Seconds of the longest sample alone, and the figures of every rank."""


@dataclass(frozen=True, slots=True)
class Case:
    """Distribution of response lengths on each rank."""

    name: str
    means: tuple[float, float]
    """Mean length on the first rank, and on the others."""
    spread: str
    """"geometric", "lognormal" or "uniform"."""
    at_least: float | None = None
    """Ratio of makespans to reach by moving queued samples; None: no target."""
    samples: int = 32
    """Samples per rank."""
    slots: int = 8
    """Slots per rank."""
    turns: int = 1
    """Turns for each turn of the command line."""

    def lengths(self, rank: int, count: int, seed: int) -> list[int]:
        """Return the lengths of a rank's responses."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        mean = self.means[min(rank, 1)]
        uniform = torch.rand(count, generator=generator).clamp(1e-9, 1 - 1e-9)
        if self.spread == "geometric":
            drawn = uniform.log() / torch.tensor(1 - 1 / mean).log()
        elif self.spread == "lognormal":  # the logarithm's standard deviation is 1
            drawn = mean * torch.exp(torch.special.ndtri(uniform) - 0.5)
        else:
            drawn = mean * (0.85 + 0.3 * uniform)
        lengths: list[int] = drawn.ceil().clamp(1, LONGEST).long().tolist()
        return lengths


CASES = (
    Case("skewed", (120.0, 30.0), "geometric", at_least=FASTER_ON_SKEWED),
    Case("skewed, all begun", (120.0, 30.0), "geometric", samples=16, slots=16),  # the longest sample decides
    Case("heavy tail", (60.0, 60.0), "lognormal"),
    Case("alike", (60.0, 60.0), "geometric"),
    Case("even", (90.0, 90.0), "uniform", at_least=SLOWER_ON_EVEN, turns=3),  # resolves 2 %
)


@dataclass(frozen=True, slots=True)
class Device:
    """Device that ranks compute on."""

    name: str
    model: str
    """Name of the model: "tiny", or "small" where forwards sleep."""
    step_s: float = 0.0
    """Seconds that a forward sleeps besides computing."""
    token_s: float = 0.0
    """Seconds that it sleeps for each of its tokens."""
    turns: int = 1
    """Turns for each turn of the command line."""

    def slow_down(self, model: nn.Module) -> None:
        """Make the model's forwards take the device's time."""
        if self.step_s:
            model.register_forward_pre_hook(self._wait, with_kwargs=True)

    def _wait(self, module: nn.Module, args: object, arguments: Mapping[str, Any]) -> None:
        time.sleep(self.step_s + self.token_s * min(arguments["input_ids"].shape[1], _MOST_SLOW_TOKENS))


CPU = Device("cpu", "tiny", turns=4)  # without any move, makespans within a turn differ by up to 7 %
WAITING = Device("waiting", "small", step_s=6e-3, token_s=5e-4)
_MOST_SLOW_TOKENS = 32
"""Tokens of a forward that count: an accelerator reads prompts much faster than it decodes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Device, numbers of ranks and turns of a measurement."""

    device: Device = CPU
    world_sizes: tuple[int, ...] = (2,)
    turns: int = 6
    seed: int = 1


class EndsAtLength(StopRule):
    """Ends each sample after a number of tokens that the engine does not know."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        super().__init__(token_ids=frozenset())
        self._lengths = lengths

    def update(self, sample: Sample) -> bool:
        """See the base."""
        if len(sample.token_ids) >= self._lengths[sample.sample_id]:
            sample.finish_reason = "stop"
        return sample.finish_reason is not None


class _Engine(GenerationEngine):
    """An engine whose responses have given lengths."""

    lengths: Mapping[int, int] = {}

    @override
    def _begin(self, *args: Any) -> GenerationRun:
        run = super()._begin(*args)
        run._stop = EndsAtLength(self.lengths)
        return run


def measure_on_rank(rank: int, settings: Settings, cases: Sequence[Case], answers: Connection) -> None:
    """Measure all cases with the other ranks; the first rank sends the figures of every turn."""
    world_size = dist.get_world_size()
    if settings.device == CPU:
        _stay_on_core(rank)
    mailbox = Mailbox(rank, world_size, dist.new_group(backend="gloo"))
    models = {dtype: _model(settings.device, dtype) for dtype in (torch.float64, torch.float32)}
    peers = Peers(mailbox, rank, mailbox.others)
    for case in cases:
        engines = {
            (dtype, arm): _Engine(model, max_slots=case.slots, peers=None if arm == STAYING else peers)
            for dtype, model in models.items() for arm in ARMS
        }  # fmt: skip
        for turn in range(-_NUM_EXACT - 1, settings.turns * settings.device.turns * case.turns):
            dtype = torch.float64 if turn < -1 else torch.float32
            work = _draw(case, settings, world_size, turn, models[dtype].config.vocab_size)
            made, moves = {}, {}
            for arm in (*ARMS[turn % 3 :], *ARMS[: turn % 3]):
                if arm != STAYING:
                    peers.moves = arm
                made[arm] = _run(engines[dtype, arm], work, rank, case, settings.seed)
                moved = engines[dtype, arm].migration_stats
                moves[arm] = {} if moved is None else asdict(moved)
            mine = {
                "seconds": {arm: made[arm][1] for arm in ARMS},
                "differing": {
                    arm: sum(m != s for m, s in zip(made[arm][0], made[STAYING][0], strict=True)) for arm in MOVING
                },
                "busy_s": made[STAYING][2],
                "moves": moves,
            }
            everybody = gather_from_ranks(mine)
            if rank == 0 and turn != -1:  # the turn before the first warms up, and learns the seconds of steps
                longest_s = _seconds_of_one(engines[dtype, STAYING], work, max(work.lengths.values()))
                answers.send((case.name, turn < 0, longest_s, everybody))
            mailbox.release(peers.run)
            dist.barrier()


def _stay_on_core(rank: int) -> None:
    """Bind this process, and threads that it starts from now on, to one of its cores. Does nothing on macOS."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _model(device: Device, dtype: torch.dtype) -> PreTrainedModel:
    if device.model == "tiny":
        model = build_model("tiny", dtype)
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LONGEST + PROMPT_TOKENS[1],
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    device.slow_down(model)
    return model


@dataclass(frozen=True, slots=True)
class _Work:
    prompts: Mapping[int, tuple[int, ...]]
    """By sample id, those of one rank next to each other."""
    lengths: Mapping[int, int]


def _draw(case: Case, settings: Settings, world_size: int, turn: int, vocabulary: int) -> _Work:
    seed = 100 * settings.seed + turn
    generator = torch.Generator().manual_seed(seed)
    count = case.samples * world_size
    sizes = torch.randint(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, (count,), generator=generator).tolist()
    prompts = [tuple(torch.randint(3, vocabulary, (size,), generator=generator).tolist()) for size in sizes]
    lengths = [n for rank in range(world_size) for n in case.lengths(rank, case.samples, seed)]
    return _Work(dict(enumerate(prompts)), dict(enumerate(lengths)))


def _run(engine: _Engine, work: _Work, rank: int, case: Case, seed: int) -> tuple[list[tuple[int, ...]], float, float]:
    """Return the tokens, the makespan of all ranks, and this rank's own seconds."""
    engine.lengths = work.lengths
    ids = list(range(rank * case.samples, (rank + 1) * case.samples))
    params = SamplingParams(max_new_tokens=LONGEST, seed=seed)
    dist.barrier()
    begin = time.perf_counter()
    completions: list[Completion] = engine.generate([work.prompts[i] for i in ids], params, sample_ids=ids)
    own_s = time.perf_counter() - begin
    dist.barrier()
    if [len(completion.token_ids) for completion in completions] != [work.lengths[i] for i in ids]:
        raise AssertionError("a response has another length than the case asks for")
    return [completion.token_ids for completion in completions], time.perf_counter() - begin, own_s


def _seconds_of_one(engine: _Engine, work: _Work, length: int) -> float:
    engine.lengths = {0: length}
    begin = time.perf_counter()
    engine.generate([work.prompts[0]], SamplingParams(max_new_tokens=LONGEST))
    return time.perf_counter() - begin


def summarise(
    case: Case, world_size: int, arm: MovableSamples, exact: Sequence[Turn], turns: Sequence[Turn]
) -> dict[str, Any]:
    """Return the row of a case for one arm; of ``exact`` turns, made in float64, only tokens count."""
    makespans = {each: [max(rank["seconds"][each] for rank in ranks) for _, ranks in turns] for each in (arm, STAYING)}
    bounds = [max(sum(rank["busy_s"] for rank in ranks) / world_size, longest_s) for longest_s, ranks in turns]
    moves = [rank["moves"][arm] for _, ranks in turns for rank in ranks]
    num_moved = sum(stats["num_received"] for stats in moves)
    return {
        "lengths": case.name,
        "ranks": world_size,
        "moves": arm,
        "turns": len(turns),
        "staying_s": median(makespans[STAYING]),
        "moving_s": median(makespans[arm]),
        "ratio": median(s / m for s, m in zip(makespans[STAYING], makespans[arm], strict=True)),
        "over_bound": median(m / bound for m, bound in zip(makespans[arm], bounds, strict=True)),
        "staying_over_bound": median(s / bound for s, bound in zip(makespans[STAYING], bounds, strict=True)),
        "moves_per_turn": num_moved / len(turns),
        "stall_ms_per_move": 1e3 * sum(stats["stall_s"] for stats in moves) / num_moved if num_moved else 0.0,
        "kB_per_move": sum(stats["bytes_sent"] for stats in moves) / num_moved / 1e3 if num_moved else 0.0,
        "differing": sum(rank["differing"][arm] for _, ranks in turns for rank in ranks),
        "differing_fp64": sum(rank["differing"][arm] for _, ranks in exact for rank in ranks),
        "moves_fp64": sum(rank["moves"][arm]["num_received"] for _, ranks in exact for rank in ranks),
    }


def run(settings: Settings, cases: Sequence[Case], report: BenchmarkReport) -> None:
    """Measure cases on every number of ranks, and add them to the report."""
    for world_size in settings.world_sizes:
        judge(answers_of_ranks(measure_on_rank, settings, cases, world_size=world_size), settings, cases, report)


def judge(answers: Iterable[Any], settings: Settings, cases: Sequence[Case], report: BenchmarkReport) -> None:
    """Add a row and the targets of every case and arm to the report, from the figures of its turns."""
    found = _turns_by_case(answers)
    for case in cases:
        exact, turns = found[case.name]
        world_size = len(turns[0][1])
        for arm in MOVING:
            row = summarise(case, world_size, arm, exact, turns)
            report.add_row(device=settings.device.name, **row)
            name = f"{settings.device.name}, {case.name}, {world_size} ranks, {arm} may move"
            if case.at_least is not None and arm == MOVING[0]:
                report.require_at_least(f"{name}: makespan without moves over with", row["ratio"], case.at_least)
            report.require_at_most(f"{name}: responses with other tokens, in float64", row["differing_fp64"], 0)


def _turns_by_case(answers: Iterable[Any]) -> dict[str, tuple[list[Turn], list[Turn]]]:
    """Return each case's turns in float64 and in float32."""
    found: dict[str, tuple[list[Turn], list[Turn]]] = {}
    for case, is_exact, longest_s, ranks in answers:
        exact, turns = found.setdefault(case, ([], []))
        (exact if is_exact else turns).append((longest_s, ranks))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=5, help="turns of each case, all arms in each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--only", help="run the cases whose name contains this text")
    parser.add_argument("--device", choices=(CPU.name, WAITING.name), help="device to run on; default: both")
    options: argparse.Namespace = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    report = BenchmarkReport("migration", settings={"clock": "wall time", "turns": options.turns})
    cases = [case for case in CASES if options.only is None or options.only in case.name]
    for device in (CPU, WAITING):
        if options.device in (None, device.name):
            sizes = tuple(size for size in options.ranks if device is WAITING or size <= num_cores)
            run(Settings(device, sizes, options.turns), cases, report)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
