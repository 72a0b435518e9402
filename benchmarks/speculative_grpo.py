"""Tokens per step of the history drafter for a policy that learns between two epochs.

The task and model are those of the demo, on one process: words to sort, GRPO at temperature 1, eight responses to each
prompt.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from benchmarks.harness import BenchmarkReport
from examples import demo
from examples import report as demo_report
from lightning_realloc import GRPO, ReallocStrategy, Speculation

TOKENS_PER_STEP = 1.5
"""Least tokens per row and step with drafts of length `ALWAYS`, in every epoch but the first."""
ALWAYS = 4
DEPTHS = (0, None, ALWAYS)
"""Draft lengths: none, adaptive, and always four. The adaptive length minimises seconds rather than steps."""
SETTINGS = demo.Settings(
    num_prompts=256, epochs=3, num_ranks=1, warm_up_layout="dp1", generate_layout="dp1", infer_layout="dp1",
    train_layout="dp1",
)  # fmt: skip
"""Settings of the demo, with eight iterations an epoch on one process."""


class TokensPerStep(Callback):
    """Keeps the logged drafting rates, rewards and seconds of each iteration."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.rewards: list[float] = []
        self.seconds: list[float] = []
        """Wall seconds of generation."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the logged metrics."""
        self.rates.append(float(trainer.callback_metrics["tokens_per_step/actor.generate"]))
        self.rewards.append(float(trainer.callback_metrics["reward"]))
        self.seconds.append(float(trainer.callback_metrics["seconds/actor.generate"]))


def measure_grpo(report: BenchmarkReport, settings: demo.Settings = SETTINGS) -> None:
    """Train with the demo's GRPO and drafts from earlier responses; add a row per depth and epoch.

    In the first epoch, drafts come only from finished responses of the same prompt and the sample's own text. The
    target is for always-on drafts, in the worst epoch but the first. The adaptive depth decides by seconds whether to
    draft.
    """
    demo_report.silence_hints()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        settings = replace(settings, folder=Path(folder))
        demo.write_files(settings)
        demo.warm_up(settings)
        records = {depth: _learn(settings, depth) for depth in DEPTHS}
    per_epoch = settings.num_iterations // settings.epochs
    for depth, record in records.items():
        for epoch in range(settings.epochs):
            own = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            report.add_row(
                model="grpo", batch=settings.prompts_per_iteration * settings.responses_per_prompt, drafter="history",
                arm="adaptive" if depth is None else str(depth), epoch=epoch + 1,
                tokens_per_row_step=fmean(record.rates[own]), reward=fmean(record.rewards[own]),
                generate_wall_s=median(record.seconds[own]),
            )  # fmt: skip
    worst = min(row["tokens_per_row_step"] for row in report.rows
                if row["model"] == "grpo" and row["arm"] == str(ALWAYS) and row["epoch"] > 1)  # fmt: skip
    name = f"grpo, {ALWAYS} tokens deep: tokens per row-step, worst epoch but the first"
    report.require_at_least(name, worst, TOKENS_PER_STEP)


def _learn(settings: demo.Settings, depth: int | None) -> TokensPerStep:
    """Train the warmed-up model for some epochs over the same prompts."""
    speculation = Speculation(drafter="history", num_draft_tokens=depth)
    module = demo.make_grpo(settings, partial(GRPO, speculation=speculation))
    data, record = demo.make_prompts(settings), TokensPerStep()
    strategy = ReallocStrategy(plan=settings.plan)
    trainer = demo.make_trainer(settings, f"grpo-{depth}", strategy, [record], max_epochs=settings.epochs)
    trainer.limit_val_batches = 0
    trainer.fit(module, data)
    return record
