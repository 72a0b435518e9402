"""Protocol of a running algorithm as callbacks see it; ``ReallocStrategy`` is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.runtime.measure.links import RunLinks, describe_links
from lightning_realloc.strategies.calls.call_runner import CallRunner
from lightning_realloc.strategies.checkpoints.safety.failed_saves import FailedSaves
from lightning_realloc.strategies.measure.profiling import Profile
from lightning_realloc.strategies.pool.builder import PlanSource
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.weight_averages import WeightAverages
from lightning_realloc.tuning.candidates import PlanEvaluator
from lightning_realloc.tuning.shapes.lengths import Lengths


class RunView(Protocol):
    """Models, calls and results of a run. ``ReallocStrategy`` documents the members."""

    num_shown: int
    shown: tuple[Samples, ...]
    lengths: Lengths | None
    max_staleness: int
    generation_chunks: int
    links: RunLinks | None
    failed_saves: FailedSaves

    @property
    def dataflow(self) -> Dataflow | None: ...
    @property
    def pool(self) -> ModelPool: ...
    @property
    def runner(self) -> CallRunner: ...
    @property
    def averages(self) -> WeightAverages: ...
    def profile(
        self, iterations: Sequence[Lengths], *, cache: Path | None, seconds: float = math.inf
    ) -> Profile | None: ...
    def plan_evaluator(
        self, iterations: Sequence[Lengths], profile: Profile | None = None, factors: Mapping[str, float] | None = None
    ) -> PlanEvaluator: ...
    def set_plan(self, plan: PlanSource) -> None: ...
    def check_huggingface(self, role: str, *, dtype: str | torch.dtype | None = None) -> None: ...
    def save_huggingface(
        self, role: str, folder: str | AnyPath, *, dtype: str | torch.dtype | None = None, merge: bool = False
    ) -> None: ...


def measure_links_again(run: RunView) -> bool:
    """Measure the links between nodes again, and warn of those that have become slow; return whether there are any.

    Only where they are measured. Collective over all ranks, between iterations.
    """
    assert run.links is not None, "links between nodes are measured"
    with run.runner.collective("measuring links"):
        fall = run.links.measure_again()
    if fall is None:
        rank_zero_info(f"iterations became slower, but links are as at the start; {describe_links(run.links.cluster)}")
    else:
        rank_zero_warn(fall)
    return fall is not None


def run_view(trainer: Trainer) -> RunView:
    """Return the run of a Trainer, whose strategy callbacks of this package require to be ``"realloc"``."""
    return cast(RunView, trainer.strategy)
