"""Learning of the demo's GRPO from stale rollouts of an engine with noise, with each correction.

Rank 0 generates up to four training steps ahead, and rank 1 trains. The engine adds an error to the logits of each
token, the same in every step, as an engine with rounded weights does: it changes which tokens are drawn, and the
log-probabilities that are recorded. Held-out prompts are answered without it. The first arm is on-policy and without
errors. All arms start from the same warmed-up model, with several seeds.

Run ``python -m benchmarks.off_policy``.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks
from benchmarks.staleness import NUM_LAST, PLAN, held_out_after
from examples import report as demo_report
from examples.demo import Settings, make_grpo, warm_up, write_files
from lightning_realloc import GRPO, ReallocStrategy, TrainOptions

MAX_STALENESS = 4
ARMS: Mapping[str, Mapping[str, Any] | None] = {
    "on-policy": None,
    "none": {"ratio_to": "proximal", "correction": "none"},
    "behaviour": {"ratio_to": "behaviour"},
    "token-truncate": {"correction": "token-truncate"},
    "sequence-mask": {"correction": "sequence-mask"},
    "geometric": {"correction": "geometric"},
    "reject": {"correction": "reject"},
}
"""Settings of GRPO by arm; None: on-policy, without noise."""
SHOWN = ("actor/engine_kl", "actor/correction_excluded", "actor/effective_sample_size", "staleness", "actor/grad_norm")


@dataclass(frozen=True, slots=True)
class Curve:
    """One run of one arm."""

    rewards: tuple[float, ...]
    """Mean reward of every batch that was trained on."""
    held_out: float
    """Share of held-out prompts answered right after the run, without noise."""
    metrics: Mapping[str, float]
    """Means over the iterations."""


class NoisyGRPO(GRPO):
    """GRPO whose training rollouts come from logits with errors."""

    noise = 0.0
    """Standard deviation."""

    def roll_out(self, actor: Any, prompts: Any) -> Any:
        """Generate from the logits with errors."""
        if not self.training_now or not self.noise:
            return super().roll_out(actor, prompts)
        head = actor._model.get_output_embeddings()
        generator = torch.Generator().manual_seed(self.seed)  # the same errors in every iteration
        errors = self.noise * torch.randn(head.out_features, generator=generator)
        hook = head.register_forward_hook(lambda module, inputs, logits: logits + errors)
        try:
            return super().roll_out(actor, prompts)
        finally:
            hook.remove()

    def check_batch(self, batch: Any) -> None:
        """Allow stale rollouts without a correction, too."""
        if self.ratio_to == "behaviour" or self.correction is not None:
            super().check_batch(batch)


class Watch(Callback):
    """Notes rewards and metrics."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.metrics: dict[str, list[float]] = {name: [] for name in SHOWN}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note an iteration."""
        logged = trainer.callback_metrics
        if "reward" in logged:
            self.rewards.append(float(logged["reward"]))
        for name, values in self.metrics.items():
            if name in logged:
                values.append(float(logged[name]))


def run_arm(settings: Settings, arm: Mapping[str, Any] | None, *, noise: float, epochs: int) -> Curve:
    """Train the warmed-up model. Collective over both ranks."""
    NoisyGRPO.noise = 0.0 if arm is None else noise
    options = TrainOptions(num_minibatches=settings.steps_per_iteration, num_epochs=epochs)
    model, watch = make_grpo(settings, partial(_made, {} if arm is None else arm, options)), Watch()
    calls = {name: PLAN.get(name, PLAN["actor.train"]) for name in (call.name for call in model.dataflow.model_calls)}
    strategy = ReallocStrategy(plan={"calls": calls}, max_staleness=0 if arm is None else MAX_STALENESS)
    held_out = held_out_after(settings, model, strategy, watch)
    means = {name: fmean(values) for name, values in watch.metrics.items() if values}
    return Curve(tuple(watch.rewards), held_out, means)


def _made(arm: Mapping[str, Any], options: TrainOptions, *args: Any, **settings: Any) -> GRPO:
    return NoisyGRPO(*args, **{**settings, "train_options": options, **arm})


def work_on(
    rank: int, settings: Settings, arms: Sequence[str], seeds: Sequence[int], noise: float, epochs: int,
    answers: Connection,
) -> None:  # fmt: skip
    """Run all arms with all seeds on this rank; the first rank sends the curves."""
    demo_report.silence_hints()
    for seed in seeds:
        mine = replace(settings, seed=seed, folder=settings.folder / str(seed))
        if rank == 0:
            write_files(mine)
        torch.distributed.barrier()
        warm_up(mine)
        for name in arms:
            curve = run_arm(mine, ARMS[name], noise=noise, epochs=epochs)
            if rank == 0:
                answers.send((seed, name, curve))


def fill(report: BenchmarkReport, curves: Mapping[str, Sequence[Curve]]) -> None:
    """Add a row for each arm."""
    for name, found in curves.items():
        held_out = [curve.held_out for curve in found]
        means = {
            shown: fmean(values)
            for shown in SHOWN
            if (values := [curve.metrics[shown] for curve in found if shown in curve.metrics])
        }
        report.add_row(
            correction=name,
            held_out=fmean(held_out),
            held_out_sd=stdev(held_out) if len(found) > 1 else math.nan,
            reward_at_end=fmean(fmean(curve.rewards[-NUM_LAST:]) for curve in found),
            **means,
        )


def main(arguments: list[str] | None = None) -> int:
    """Run all arms with all seeds."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of data, weights and sampling")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="corrections to run")
    parser.add_argument("--iterations", type=int, default=40, help="iterations of each run")
    parser.add_argument("--noise", type=float, default=1.0, help="standard deviation of the errors of logits")
    parser.add_argument("--epochs", type=int, default=1, help="passes over each batch")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="learning rate of GRPO")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            folder=Path(folder), num_ranks=2, warm_up_layout="dp2", epochs=1, learning_rate=options.learning_rate
        )
        settings = replace(settings, num_prompts=options.iterations * settings.prompts_per_iteration)
        told = {name: getattr(options, name) for name in ("iterations", "noise", "epochs", "learning_rate")}
        report = BenchmarkReport("off_policy", seeds=tuple(options.seeds), settings=dict(told))
        curves: dict[str, list[Curve]] = {arm: [] for arm in options.arms}
        work = (settings, options.arms, options.seeds, options.noise, options.epochs)
        for seed, name, curve in answers_of_ranks(work_on, *work, world_size=2):
            curves[name].append(curve)
            tens = [fmean(curve.rewards[begin : begin + NUM_LAST]) for begin in range(0, options.iterations, NUM_LAST)]
            report.settings.setdefault("rewards", {})[f"{name}, seed {seed}"] = tens
            at_end = fmean(curve.rewards[-NUM_LAST:])
            print(
                f"seed {seed}, {name}: held out {curve.held_out:.3f}, reward {at_end:.3f}, {curve.metrics}", flush=True
            )
        fill(report, curves)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
