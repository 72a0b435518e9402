"""How do the tests train adapters? GRPO and PPO on tiny models, fresh adapters that already matter, bytes recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import SGD

from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.runtime.executor import ReallocationReport
from lightning_realloc.strategies import ReallocStrategy
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


class Moved(PhaseCallback):
    """Keeps (iteration, call, bytes that moved)."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, str, int]] = []

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Count one reallocation."""
        self.moved.append((trainer.global_step, phase, report.bytes_moved))


def adapted_grpo(family: str = "qwen3", **settings: Any) -> runs.RecordedGRPO:
    """Return GRPO that trains adapters and has no reference of its own."""
    settings = {
        "sampling": runs.SAMPLING, "optimizer": partial(SGD, lr=0.5), "tokenizer": byte_tokenizer(),
        "peft_config": LORA, "kl_coef": 0.1, **settings,
    }  # fmt: skip
    return runs.RecordedGRPO(settings.pop("actor", None) or tiny_model(family), runs.low_tokens, **settings)


def train(plans: list[Any], settings: dict[str, Any], count: int = 3) -> list[tuple[runs.Outcome, list[Any]]]:
    """Train under each plan; return what came of it and what moved."""
    found, world_size = [], runs.world_size()
    for plan in plans:
        moved = Moved()
        outcome = runs.train(
            adapted_grpo(**settings), ReallocStrategy(plan), world_size, runs.Batches(count), callbacks=[moved]
        )
        found.append((outcome, moved.moved))
    return found
