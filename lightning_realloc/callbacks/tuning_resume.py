"""Check whether a run can continue the tuning stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from torch import nn

from lightning_realloc.callbacks.run_view import run_view
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.generation import SamplingParams


def plan_ranks(plan: ExecutionPlan) -> set[int]:
    """Return every rank that a plan uses, which are all ranks of its run."""
    return {rank for layout in plan.layouts for rank in layout.ranks}


_TUNED_SETTINGS = ("sampling", "engine", "speculation")
"""Attributes of an algorithm that affect an iteration's time under a plan."""
_TUNED_OPTIONS = ("max_cache_bytes", "sample_reallocation", "rollout_budget")
"""Fields of its options of generation that do."""

_FORMER_NAMES = {"generation_parts": "generation_chunks"}
"""Names of settings in checkpoints of earlier releases -> names today."""


def tuning_settings(trainer: Trainer) -> dict[str, str]:
    """Return the settings of generation and training that must match for earlier measurements to stay valid.

    Seeds and batch sizes are left out, because the work of an iteration is counted by its lengths.
    """
    module: Any = trainer.lightning_module
    settings = {name: _text(getattr(module, name)) for name in _TUNED_SETTINGS if hasattr(module, name)}
    settings |= {name: str(getattr(module.generation_options, name)) for name in _TUNED_OPTIONS}
    settings["generation_chunks"] = str(run_view(trainer).generation_chunks)
    return settings | {f"train_options of {r}": str(module.train_options_of(r)) for r in module.dataflow.trained_roles}


def _text(setting: Any) -> str:
    if isinstance(setting, SamplingParams):
        return str(replace(setting, seed=0))
    draft_model = getattr(setting, "draft_model", None)
    if isinstance(draft_model, nn.Module):
        return str(replace(setting, draft_model=type(draft_model).__name__))
    return str(setting)


def reason_not_to_resume(state: Mapping[str, Any], trainer: Trainer) -> str | None:
    """Return the reason why a run cannot continue a checkpoint's tuning; None if it can."""
    plan = run_view(trainer).pool.plan
    calls = [name for name, _ in plan.calls]
    if state["world_size"] != trainer.world_size:
        return f"the checkpoint was tuned on {state['world_size']} ranks, this run has {trainer.world_size}"
    if state["calls"] != calls:
        return f"the checkpoint was tuned for {', '.join(state['calls'])}, this algorithm has {', '.join(calls)}"
    then = {_FORMER_NAMES.get(name, name): value for name, value in state.get("settings", {}).items()}
    then.setdefault("rollout_budget", "None")  # earlier releases left it out where nothing is sampled
    for name, now in tuning_settings(trainer).items():
        if then.get(name) != now:
            return f"the checkpoint was tuned with {name}={then.get(name, 'unknown')}, this run has {name}={now}"
    known = [state["tuner"]["current"], *(trial["plan"] for trial in state["tuner"]["trials"])]
    known += [] if state["yardstick"] is None else [state["yardstick"]["plan"]]
    if plan not in map(ExecutionPlan.from_mapping, known):
        return "this run was given another plan than the checkpoint's"
    return None
