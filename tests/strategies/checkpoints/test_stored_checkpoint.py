"""Resuming from a checkpoint that an earlier release wrote: PPO with EMA, two ranks, after two iterations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_realloc import EMA, GAE, KL, ReallocStrategy
from lightning_realloc.data.loader import BatchLoader
from tests.devices import CPU_ALONE
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import contents, differences, make_optimizer, table
from tests.workers import WorkerPool

STORED = Path(__file__).with_name("ppo_after_2.zip")
PLAN = runs.calls(
    actor_generate="dp2", reference_infer="dp2", critic_infer="dp2", actor_train="fsdp2", critic_train="fsdp2"
)
SIZES = {
    "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def fit(folder: Path, max_steps: int, resume: Path | None) -> list[dict[str, float]]:
    """Train from a checkpoint, write one to ``folder``, and return the logged metrics."""
    module = runs.ppo(
        actor=tiny_model("llama", **SIZES), reference=tiny_model("llama", seed=1, **SIZES), kl=KL(target=1.0),
        advantages=GAE(normalize_values=True), seed=0, optimizer=make_optimizer("adam"),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9),
    )  # fmt: skip
    record = runs.Record()
    fitted = runs.trainer(
        ReallocStrategy(PLAN), 2, max_steps=max_steps, max_epochs=-1, callbacks=[EMA(decay=0.9), record]
    )
    fitted.fit(module, BatchLoader(table(responses=False), batch_size=4, seed=5), ckpt_path=resume)
    fitted.save_checkpoint(folder)
    return record.logged


def state(folder: Path) -> dict[str, Any]:
    """Return the contents of ``meta.pt`` without Lightning's version and its counts of loops, tensors as lists.

    Settings that optimizers were given are left out, since early versions did not store them.
    """
    meta = apply_to_collection(torch.load(folder / "meta.pt", weights_only=True), Tensor, Tensor.tolist)
    for stored in meta["optimizer_states"]:
        stored["param_groups"] = [
            {key: value for key, value in group.items() if key != "given"} for group in stored["param_groups"]
        ]
    return {name: value for name, value in meta.items() if name not in ("loops", "epoch", "pytorch-lightning_version")}


@CPU_ALONE
def test_a_checkpoint_of_an_earlier_release_is_read_completely_and_resumed(workers: WorkerPool, tmp_path: Path) -> None:
    shutil.unpack_archive(STORED, tmp_path)
    stored, again, later = tmp_path / "ppo_after_2", tmp_path / "again", tmp_path / "later"

    nothing = workers.run(fit, again, 2, stored, world_size=2, init_process_group=False)[0]
    logged = workers.run(fit, later, 4, stored, world_size=2, init_process_group=False)[0]

    assert nothing == []
    assert differences(contents(again), contents(stored)) == {}
    assert state(again) == state(stored)
    assert len(logged) == 2 and logged[0].keys() >= {"actor/loss", "critic/loss", "kl_coef"}
    assert {name for name in differences(contents(later), contents(stored)) if "actor" in name}
