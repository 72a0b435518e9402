"""Learning and speed of the demo's GRPO when generation runs up to k training steps ahead, on a rank of its own.

Rank 0 generates, rank 1 scores and trains. Besides computing, every pass sleeps as long as a device would take, so that
both ranks work at the same time on any machine. The seconds of a generation vary from iteration to iteration as those
of long responses do: by a factor from a log-normal distribution with mean 1. All arms see the same factors. They start
from the same warmed-up model, in turns, with several seeds.

Run ``python -m benchmarks.staleness``.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.everything import digest
from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks
from examples import report as demo_report
from examples.demo import Settings, make_grpo, make_prompts, warm_up, write_files
from lightning_realloc import GRPO, ReallocStrategy

ARMS = (0, 1, 2, 4)
"""Values of ``max_staleness``."""
NUM_LAST = 10
"""Last iterations whose mean reward is shown."""
PLAN = {"actor.generate": "dp1@0", "reference.infer": "dp1@1", "actor.train": "dp1@1"}


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds that passes take besides computing."""

    step_s: float = 0.04
    """Of a decoding step, in the mean over iterations."""
    spread: float = 0.6
    """Standard deviation of the factor's logarithm."""
    token_s: float = 6e-5
    """Of a token in training; inference takes a third."""

    def factor(self, seed: int, iteration: int) -> float:
        """Return the factor of an iteration's generation; its mean is 1."""
        rng = random.Random(seed * 100_003 + iteration)
        return math.exp(rng.gauss(0.0, self.spread) - self.spread**2 / 2)


@dataclass(frozen=True, slots=True)
class Curve:
    """One run of one arm."""

    rewards: tuple[float, ...]
    """Mean reward of every batch that was trained on."""
    staleness: float
    """Mean age of the learned tokens, in training steps."""
    held_out: float
    """Share of held-out prompts answered right after the run."""
    seconds: float
    """Of all iterations but the first."""
    idle: float
    """Mean share of an iteration that ranks waited."""
    weights: str
    """Digest of the trained weights."""


class SlowGRPO(GRPO):
    """GRPO whose passes also take a device's seconds."""

    simulated = Device()

    def roll_out(self, actor: Any, prompts: Any) -> Any:
        """Generate, with a pause before each step of a training rollout."""
        if not self.training_now:
            return super().roll_out(actor, prompts)
        pause_s = self.simulated.step_s * self.simulated.factor(self.seed, self._strategy.iteration)
        hook = actor._model.register_forward_pre_hook(lambda *_: time.sleep(pause_s))
        try:
            return super().roll_out(actor, prompts)
        finally:
            hook.remove()

    def score_reference(self, reference: Any, batch: Any) -> Any:
        """Score after a pause."""
        time.sleep(self.simulated.token_s * batch.num_tokens / 3)
        return super().score_reference(reference, batch)

    def actor_loss(self, actor: Any, batch: Any, totals: Any) -> Any:
        """Return the loss after a pause."""
        time.sleep(self.simulated.token_s * batch.num_tokens)
        return super().actor_loss(actor, batch, totals)


class Clock(Callback):
    """Notes rewards, ages and the times of iterations."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.staleness: list[float] = []
        self.idle: list[float] = []
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note an iteration."""
        metrics = trainer.callback_metrics
        self.times.append(time.perf_counter())
        if "reward" in metrics:
            self.rewards.append(float(metrics["reward"]))
            self.staleness.append(float(metrics.get("staleness", 0.0)))
            self.idle.append(float(metrics.get("idle_share", 0.0)))


def held_out_after(settings: Settings, model: GRPO, strategy: ReallocStrategy, watch: Callback) -> float:
    """Train on the demo's prompts, and return the share of held-out ones answered right then. Collective."""
    trainer = L.Trainer(
        accelerator="cpu", devices=settings.num_ranks, strategy=strategy, max_epochs=settings.epochs, logger=False,
        callbacks=[watch], num_sanity_val_steps=0, limit_val_batches=0, enable_model_summary=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=settings.folder,
    )  # fmt: skip
    data = make_prompts(settings)
    trainer.fit(model, data)
    trainer.limit_val_batches = 1.0
    (after,) = trainer.validate(model, data, verbose=False)
    return after["val/reward"]


def run_arm(settings: Settings, max_staleness: int) -> Curve:
    """Train the warmed-up model. Collective over both ranks."""
    model, clock = make_grpo(settings, SlowGRPO), Clock()
    strategy = ReallocStrategy(plan={"calls": PLAN}, max_staleness=max_staleness)
    held_out = held_out_after(settings, model, strategy, clock)
    weights = digest(strategy.full_weights("actor"))
    return Curve(
        tuple(clock.rewards),
        fmean(clock.staleness),
        held_out,
        clock.times[-1] - clock.times[0],
        fmean(clock.idle),
        weights,
    )


def work_on(rank: int, settings: Settings, device: Device, seeds: Sequence[int], answers: Connection) -> None:
    """Run all arms with all seeds on this rank; the first rank sends the curves."""
    demo_report.silence_hints()
    SlowGRPO.simulated = device
    for seed in seeds:
        mine = replace(settings, seed=seed, folder=settings.folder / str(seed))
        if rank == 0:
            write_files(mine)
        torch.distributed.barrier()
        warm_up(mine)
        for arm in ARMS if seed % 2 == 0 else reversed(ARMS):
            curve = run_arm(mine, arm)
            if rank == 0:
                answers.send((seed, arm, curve))


def fill(report: BenchmarkReport, curves: dict[int, list[Curve]], num_iterations: int) -> None:
    """Add a row for each arm, and the ratio of iterations per second to that of the first arm."""
    in_step = [curve.seconds for curve in curves[ARMS[0]]]
    for arm, found in curves.items():
        held_out = [curve.held_out for curve in found]
        report.add_row(
            max_staleness=arm,
            held_out=fmean(held_out),
            held_out_sd=stdev(held_out) if len(found) > 1 else math.nan,
            reward_at_end=fmean(fmean(curve.rewards[-NUM_LAST:]) for curve in found),
            reward_midway=fmean(fmean(curve.rewards[len(curve.rewards) // 2 :][:NUM_LAST]) for curve in found),
            age_of_tokens=fmean(curve.staleness for curve in found),
            iterations_per_s=fmean((num_iterations - 1) / curve.seconds for curve in found),
            over_in_step=fmean(slow / curve.seconds for slow, curve in zip(in_step, found, strict=True)),
            idle_share=fmean(curve.idle for curve in found),
        )


def main(arguments: list[str] | None = None) -> int:
    """Run all arms in turns."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of data, weights and sampling")
    parser.add_argument("--iterations", type=int, default=60, help="iterations of each run")
    parser.add_argument("--token-us", type=float, default=60.0, help="microseconds of training a token")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(folder=Path(folder), num_ranks=2, warm_up_layout="dp2", epochs=1)
        settings = replace(settings, num_prompts=options.iterations * settings.prompts_per_iteration)
        device = Device(token_s=options.token_us / 1e6)
        report = BenchmarkReport(
            "staleness", seeds=tuple(options.seeds), settings={"iterations": options.iterations, **asdict(device)}
        )
        curves: dict[int, list[Curve]] = {arm: [] for arm in ARMS}
        for seed, arm, curve in answers_of_ranks(work_on, settings, device, options.seeds, world_size=2):
            curves[arm].append(curve)
            report.settings.setdefault("rewards", {})[f"k={arm}, seed {seed}"] = curve.rewards
            print(f"seed {seed}, k={arm}: held out {curve.held_out:.3f}, {curve.seconds:.0f} s", flush=True)
        fill(report, curves, options.iterations)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
