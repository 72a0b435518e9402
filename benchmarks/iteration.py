"""One GRPO iteration on four CPU ranks, with a layout for every call and with one layout for all calls.

The arms "realloc" train under FSDP and generate from whole or tensor-parallel replicas. The other arms keep one layout,
with and without gathering its weights once for a whole generation. All arms have the same random Llama, prompts and
seeds. Each turn has a Trainer of its own in the same four processes: a warm-up iteration with short responses, then
measured iterations. The table has wall seconds by call and CPU-seconds.

Memory is the bytes of live tensors on a rank: between iterations, and in addition during generation. Memory that ranks
share is divided among them. Activations, alike in all arms, are left out.

Run ``python -m benchmarks.iteration``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.memory import available_bytes, live_bytes
from benchmarks.plan_turn import in_order
from benchmarks.ranks import answers_of_ranks, gather_from_ranks, turns_within

WORLD_SIZE = 4
CALLS = ("actor.generate", "reference.infer", "actor.train")
FASTER_THAN_STATIC = 4.0
DP4_BYTES = 15 << 30
"""Bytes of dp4 on four ranks, with its construction: weights, gradients, Adam's moments and a reference."""
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Arm:
    """Layout of each call in one arm."""

    name: str
    layouts: tuple[str, str, str]
    """Layouts, in the order of `CALLS`."""
    gathers_once: bool = False
    """Whether sharded weights stay gathered during a whole generation."""

    @property
    def plan(self) -> dict[str, dict[str, str]]:
        """The execution plan."""
        return {"calls": dict(zip(CALLS, self.layouts, strict=True))}

    @property
    def moves(self) -> bool:
        """Whether anything is reallocated."""
        return len(set(self.layouts)) > 1


STATIC = "fsdp4"
ARMS = (
    Arm(STATIC, ("fsdp4", "fsdp4", "fsdp4")),
    Arm("fsdp4 unshard()", ("fsdp4", "fsdp4", "fsdp4"), gathers_once=True),
    # FSDP over one rank gathers too: it copies every weight in every step, unless the copy is made once.
    Arm("dp4", ("dp4", "dp4", "dp4"), gathers_once=True),
    Arm("realloc dp4", ("dp4", "dp4", "fsdp4")),
    Arm("realloc dp2.tp2", ("dp2.tp2", "dp2.tp2", "fsdp4")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the model, 100 million weights by default, and samples of an iteration."""

    hidden_size: int = 768
    intermediate_size: int = 2048
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    vocabulary: int = 32000
    num_prompts: int = 4
    num_generations: int = 2
    prompt_tokens: int = 16
    new_tokens: int = 128
    warmup_tokens: int = 4
    """Length of the first iteration's responses."""
    learning_rate: float = 1e-5
    measured: int = 1
    """Measured iterations, after a warm-up iteration."""


TINY = Workload(
    hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, vocabulary=512, new_tokens=8
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Measurements of one turn of one arm, over all ranks."""

    seconds: float
    """Median wall seconds of an iteration: all ranks begin together, the last one ends it."""
    cpu_s: float
    """CPU-seconds of an iteration, over all ranks."""
    seconds_per_call: Mapping[str, float]
    """Call -> seconds of its slowest rank, with reallocation."""
    switch_s: float
    """Seconds of reallocation in an iteration, over all calls."""
    lasting_bytes: int
    """Bytes of live tensors between iterations, on the rank with most."""
    passing_bytes: int
    """Additional bytes during generation, on the rank with most."""
    rollouts: tuple[Any, ...]
    """Response token ids of every iteration."""
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    num_weights: int

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of live tensors on a rank."""
        return self.lasting_bytes + self.passing_bytes


# --- one arm on one rank ----------------------------------------------------------------------------------------------


def share_of_even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Reward the share of tokens with an even id, a rule for responses that are not text."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def run_arm(arm: Arm, work: Workload) -> Turn:
    """Train with a new Trainer, and return the measurements of all ranks. Collective."""
    from benchmarks.workload import make_trainer, random_prompts
    from lightning_realloc import ParameterReallocation, ReallocStrategy

    meter, switching = _make_meter(work), ParameterReallocation()
    callbacks = [switching, meter, *([_make_gathering()] if arm.gathers_once else [])]
    strategy = ReallocStrategy(plan=arm.plan)
    trainer = make_trainer(strategy=strategy, callbacks=callbacks, max_steps=1 + work.measured)
    prompts = random_prompts(work.num_prompts * 8, length=work.prompt_tokens, batch_size=work.num_prompts)
    trainer.fit(_make_module(work, meter), prompts)
    switches = switching.summary().values()
    meter.noted.switch_s = sum(s.seconds / s.count for s in switches if s.count > 1)
    return merge(gather_from_ranks(meter.noted))


@dataclass(slots=True)
class Readings:
    """Measurements of one rank."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    calls: list[dict[str, float]] = field(default_factory=list)
    switch_s: float = 0.0
    lasting_bytes: int = 0
    passing_bytes: int = 0
    rollouts: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_weights: int = 0


def merge(parts: Sequence[Readings]) -> Turn:
    """Combine the measurements of all ranks. Times leave out the first iteration, responses and losses do not."""
    slowest = [max(values) for values in zip(*(part.seconds for part in parts), strict=True)]
    calls: defaultdict[str, list[float]] = defaultdict(list)
    for ranks in zip(*(part.calls for part in parts), strict=True):
        for name in ranks[0]:
            calls[name].append(max(seconds[name] for seconds in ranks))
    cpu_s = [sum(values) for values in zip(*(part.cpu_s for part in parts), strict=True)]
    return Turn(
        seconds=median(slowest[1:]),
        cpu_s=median(cpu_s[1:]),
        seconds_per_call={name: median(values[1:]) for name, values in calls.items()},
        switch_s=max(part.switch_s for part in parts),
        lasting_bytes=max(part.lasting_bytes for part in parts),
        passing_bytes=max(part.passing_bytes for part in parts),
        rollouts=tuple(in_order(rows) for rows in zip(*(part.rollouts for part in parts), strict=True)),
        losses=tuple(parts[0].losses),
        grad_norms=tuple(parts[0].grad_norms),
        num_weights=parts[0].num_weights,
    )


def _make_module(work: Workload, meter: Any) -> Any:
    from benchmarks.workload import byte_tokenizer, llama_config, stable_adam
    from lightning_realloc import GRPO, SamplingParams

    class Recorded(GRPO):
        def roll_out(self, actor: Any, prompts: Any) -> Any:
            made = super().roll_out(actor, prompts)
            rows = zip(made.ids.tolist(), made.ragged("response_ids").to_lists(), strict=True)
            meter.noted.rollouts.append(dict(rows))
            return made

    sampling = SamplingParams(n=work.num_generations, max_new_tokens=work.new_tokens, ignore_eos=True)

    return Recorded(
        llama_config(work), share_of_even_tokens, tokenizer=byte_tokenizer(), sampling=sampling,
        kl_coef=0.04, optimizer=stable_adam(work.learning_rate),
    )  # fmt: skip


def _make_meter(work: Workload) -> Any:
    from lightning_realloc import PhaseCallback

    class Meter(PhaseCallback):
        """Measures the time of each iteration, and the memory of the first one."""

        def __init__(self) -> None:
            self.noted = Readings()
            self._begin = (0.0, 0.0)
            self._in_first = False
            self._generating_bytes = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self._in_first = batch_idx == 0
            tokens = work.warmup_tokens if self._in_first else work.new_tokens
            module.sampling = replace(module.sampling, max_new_tokens=tokens)
            if batch_idx == 1:
                self.noted.lasting_bytes = live_bytes(num_sharing=WORLD_SIZE)
            self._calls = dict(trainer.strategy.runner.seconds)
            dist.barrier()
            self._begin = time.perf_counter(), time.process_time()

        def on_phase_end(self, trainer: Any, module: Any, phase: str) -> None:
            if self._in_first and phase == "actor.generate":
                self._generating_bytes = live_bytes(num_sharing=WORLD_SIZE)

        def on_phase_start(self, trainer: Any, module: Any, phase: str) -> None:
            if self._in_first and phase == "reference.infer":
                self.noted.passing_bytes = max(0, self._generating_bytes - live_bytes(num_sharing=WORLD_SIZE))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            wall, cpu = time.perf_counter(), time.process_time()
            self.noted.seconds.append(wall - self._begin[0])
            self.noted.cpu_s.append(cpu - self._begin[1])
            seconds = trainer.strategy.runner.seconds
            self.noted.calls.append({name: seconds[name] - self._calls.get(name, 0.0) for name in CALLS})
            self.noted.losses.append(float(trainer.callback_metrics["actor/loss"]))
            self.noted.grad_norms.append(float(trainer.callback_metrics["actor/grad_norm"]))
            self.noted.num_weights = trainer.strategy.pool.home("actor").model_layout.model.num_elements

    return Meter()


def _make_gathering() -> Any:
    from lightning_realloc import PhaseCallback

    class GatherForGeneration(PhaseCallback):
        """Keeps sharded weights gathered during a generation, FSDP2's own way to generate."""

        def on_phase_start(self, trainer: Any, module: Any, phase: str) -> None:
            if phase == "actor.generate":
                for part in self._sharded(trainer):
                    part.set_reshard_after_forward(False, recurse=False)
                    part.unshard()

        def on_phase_end(self, trainer: Any, module: Any, phase: str) -> None:
            if phase == "actor.generate":
                root, *blocks = self._sharded(trainer)
                for block in blocks:
                    block.set_reshard_after_forward(True, recurse=False)
                for part in (root, *blocks):
                    part.reshard()

        def _sharded(self, trainer: Any) -> list[FSDPModule]:
            modules = trainer.strategy.pool.home("actor").model.modules()
            return [module for module in modules if isinstance(module, FSDPModule)]

    return GatherForGeneration()


# --- four ranks -------------------------------------------------------------------------------------------------------


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Run all turns of all arms on this rank; rank 0 sends the results."""
    chosen = [arm for arm in ARMS if arm.name in options.arms]
    for _ in turns_within(options.turns, options.limit_s):
        for arm in chosen:
            turn = run_arm(arm, workload(options))
            gc.collect()
            if rank == 0:
                answers.send((arm, turn))


def workload(options: argparse.Namespace) -> Workload:
    """Return the workload that the options ask for."""
    return TINY if options.tiny else Workload(new_tokens=options.new_tokens)


# --- judging ----------------------------------------------------------------------------------------------------------


def fill(report: BenchmarkReport, turns: Mapping[Arm, Sequence[Turn]]) -> None:
    """Add a row for each arm."""
    static = next((made[0] for arm, made in turns.items() if arm.name == STATIC), None)
    for arm, made in turns.items():
        seconds = median(turn.seconds for turn in made)
        calls = {name: median(turn.seconds_per_call[name] for turn in made) for name in CALLS}
        compared = {} if static is None else compare(made[0], static)
        report.add_row(
            arm=arm.name,
            seconds=round(seconds, 2),
            **{name.partition(".")[2]: round(value, 2) for name, value in calls.items()},
            switch=round(median(turn.switch_s for turn in made), 3),
            cpu_s=round(median(turn.cpu_s for turn in made), 1),
            lasting_mb=round(max(turn.lasting_bytes for turn in made) / 1e6),
            peak_mb=round(max(turn.peak_bytes for turn in made) / 1e6),
            **compared,
        )


def compare(turn: Turn, reference: Turn) -> dict[str, float]:
    """Return the share of equal responses, and the differences of losses (absolute) and gradient norms (relative)."""
    pairs = [
        (mine, theirs)
        for ours, others in zip(turn.rollouts, reference.rollouts, strict=True)
        for mine, theirs in zip(ours, others, strict=True)
    ]
    return {
        "equal_tokens": sum(mine == theirs for mine, theirs in pairs) / len(pairs),
        "loss_diff": max(abs(a - b) for a, b in zip(turn.losses, reference.losses, strict=True)),
        "norm_diff": max(abs(a / b - 1) for a, b in zip(turn.grad_norms, reference.grad_norms, strict=True) if b),
    }


def judge(report: BenchmarkReport, turns: Mapping[Arm, Sequence[Turn]]) -> None:
    """Add the targets for the fastest arm that reallocates."""
    moving = {arm: made for arm, made in turns.items() if arm.moves}
    resting = {arm: made for arm, made in turns.items() if not arm.moves}
    static = next((arm for arm in resting if arm.name == STATIC), None)
    if not moving or static is None:
        return
    best = min(moving, key=lambda arm: _seconds(moving[arm]))
    report.require_at_least(
        f"seconds of {STATIC} over {best.name}", _ratio(turns[static], turns[best]), FASTER_THAN_STATIC
    )
    peak = max(turn.peak_bytes for turn in turns[best])
    fitting = {arm: made for arm, made in resting.items() if max(turn.peak_bytes for turn in made) <= peak}
    rival = min(fitting, key=lambda arm: _seconds(fitting[arm]), default=None)
    if rival is not None:
        name = f"seconds of {best.name} over {rival.name}, the fastest that fits its memory"
        report.require_at_most(name, _ratio(turns[best], turns[rival]), 1.0)
    differences = [compare(turn, turns[static][0]) for made in turns.values() for turn in made]
    report.require_at_least("share of equal responses", min(d["equal_tokens"] for d in differences), 1.0)
    report.require_at_most("largest difference of losses", max(d["loss_diff"] for d in differences), LOSS_TOLERANCE)


def _seconds(turns: Sequence[Turn]) -> float:
    return median(turn.seconds for turn in turns)


def _ratio(slow: Sequence[Turn], fast: Sequence[Turn]) -> float:
    """Return the median of slow/fast over the turns."""
    return median(s.seconds / f.seconds for s, f in zip(slow, fast, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Run all arms in turns and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, default=2, help="turns of each arm")
    parser.add_argument(
        "--arms", nargs="+", default=[arm.name for arm in ARMS], metavar="ARM", help="names of the arms to run"
    )
    parser.add_argument("--new-tokens", type=int, default=Workload().new_tokens, help="length of the responses")
    parser.add_argument("--tiny", action="store_true", help="a model of 100,000 weights, for a quick look")
    parser.add_argument(
        "--limit-s", type=float, default=700.0, help="seconds for all turns; there are fewer turns if needed"
    )
    options = parser.parse_args(arguments)
    available = available_bytes(Path("/proc/meminfo").read_text().splitlines())
    if "dp4" in options.arms and not options.tiny and available < DP4_BYTES:
        others = " ".join(repr(name) for name in options.arms if name != "dp4")
        sys.stderr.write(
            f"dp4 needs {DP4_BYTES / 1e9:.0f} GB of free memory, there are {available / 1e9:.1f}: use --arms {others}\n"
        )
        return 2
    report = BenchmarkReport("iteration", settings={"world_size": WORLD_SIZE} | asdict(workload(options)))
    turns: defaultdict[Arm, list[Turn]] = defaultdict(list)
    for arm, turn in answers_of_ranks(work_on, options, world_size=WORLD_SIZE):
        turns[arm].append(turn)
        sys.stderr.write(f"{arm.name}: {turn.seconds:.2f} s an iteration\n")
    report.settings["num_weights"] = next(iter(turns.values()))[0].num_weights
    whole = min(map(len, turns.values()))
    complete = {arm: made[:whole] for arm, made in turns.items()}
    fill(report, complete)
    judge(report, complete)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
