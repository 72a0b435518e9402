"""A run warns if its first rollout diverges from a reference that should equal the actor."""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.online_dpo import OnlineDPO
from lightning_realloc.algorithms.ppo import PPO
from lightning_realloc.algorithms.rloo import RLOO
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.strategies import ReallocStrategy
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "in the loss": (GRPO, {"kl_coef": 0.04, "train_options": TrainOptions(num_epochs=2, num_minibatches=2)}),
    "in rewards": (RLOO, {}),
    "with a critic": (PPO, {}),
    "of pairs": (OnlineDPO, {}),
}


class Changed:
    """A mixin for algorithms that change the actor's weights once it is built."""

    actor: nn.Module

    def configure_model(self) -> None:
        """Build the models, and add noise to the actor."""
        is_new = not hasattr(self, "actor")
        super().configure_model()  # type: ignore[misc]
        if is_new:
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for weight in self.actor.parameters():
                    weight += 0.3 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)


def module_of(kind: Any, *, changed: bool = False, **settings: Any) -> Any:
    """Return an algorithm on the tiny llama with a learning rate that one step shows in the divergence."""
    kind = type(f"Changed{kind.__name__}", (Changed, kind), {}) if changed else kind
    shared = {"sampling": runs.SAMPLING, "tokenizer": byte_tokenizer(), "learning_rate": 0.02}
    return kind(tiny_model("llama"), runs.low_tokens, **{**shared, **settings})


def said(module: Any, *, steps: int = 1, ckpt_path: str | None = None, **options: Any) -> list[str]:
    """Fit, and return the warnings about the first rollout."""
    trainer = runs.trainer(ReallocStrategy("static"), 1, max_steps=steps, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, runs.Batches(4), ckpt_path=ckpt_path)
    if ckpt_path is None and steps > 1:
        trainer.save_checkpoint("trained.ckpt")
    return [str(one.message) for one in caught if "KL to the reference" in str(one.message)]


def compare_starts(folder: str) -> dict[str, list[str]]:
    """Return the warnings of runs by name."""
    os.chdir(folder)
    found: dict[str, list[str]] = {}
    for name, (kind, settings) in CASES.items():
        found[name] = said(module_of(kind, **settings))
        found[f"{name}, changed"] = said(module_of(kind, changed=True, **settings))
    kind, settings = CASES["in the loss"]
    found["16 bit"] = said(module_of(kind, **settings), precision="bf16-mixed")
    found["given"] = said(module_of(kind, reference=tiny_model("llama", seed=1), **settings))
    learnt = module_of(kind, **settings)
    logger = CSVLogger(folder, name="logs", version="")
    found["two steps"] = said(learnt, steps=2, logger=logger, log_every_n_steps=1)
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert [bool(row["actor/kl_at_start"]) for row in rows] == [True, False]
    assert all(row["actor/kl"] for row in rows)
    found["second fit"] = said(learnt)
    found["resumed"] = said(module_of(kind, **settings), steps=3, ckpt_path="trained.ckpt")
    return found


def test_a_first_rollout_far_from_a_reference_of_the_same_source_is_named(workers: WorkerPool, tmp_path: Path) -> None:
    (found,) = workers.run(compare_starts, str(tmp_path), world_size=1, init_process_group=False, deadline_s=120.0)
    for name, messages in found.items():
        assert len(messages) == name.endswith("changed"), (name, messages)
    for name in CASES:
        assert "nats per token in the first rollout, and rounding explains up to 0.0001" in found[f"{name}, changed"][0]
