"""Train adapters of tiny models for the tests: GRPO and PPO with nonzero initial adapters, and recorded bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.training import Loss, Totals
from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.strategies import ReallocStrategy
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


class CheckedGRPO(runs.RecordedGRPO):
    """GRPO that compares its models' outputs with expected ones."""

    base: nn.Module
    """The full actor without adapters."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.off_by: dict[str, list[float]] = {"reference": [], "generation": []}

    def score_reference(self, reference: nn.Module, batch: PackedBatch) -> Tensor:
        """Score, and compare with the base."""
        logprobs = super().score_reference(reference, batch)
        expected = token_logprobs(self.base, batch, temperature=1.0, only_responses=True).logprobs
        self.off_by["reference"].append(float((logprobs - expected).abs().max()))
        return logprobs

    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Compare the log-probabilities of generation with the policy's."""
        loss = super().actor_loss(actor, batch, totals)
        with torch.no_grad():
            logprobs = token_logprobs(actor, batch, temperature=1.0, only_responses=True).logprobs
        difference = (logprobs - batch["behaviour_logprobs"]) * batch.response_mask
        self.off_by["generation"].append(float(difference.abs().max()))
        return loss


class Moved(PhaseCallback):
    """Records (iteration, call, bytes that moved)."""

    def __init__(self) -> None:
        self.moved: list[tuple[int, str, int]] = []

    def on_reallocate(
        self, trainer: Trainer, pl_module: LightningModule, phase: str, report: ReallocationReport
    ) -> None:
        """Count one reallocation."""
        self.moved.append((trainer.global_step, phase, report.bytes_moved))


def adapted_grpo(
    family: str = "qwen3", module_class: type[runs.RecordedGRPO] = runs.RecordedGRPO, **settings: Any
) -> Any:
    """Return GRPO that trains adapters and uses the base as the reference."""
    settings = {
        "sampling": runs.SAMPLING, "optimizer": partial(SGD, lr=0.5), "tokenizer": byte_tokenizer(),
        "peft_config": LORA, "kl_coef": 0.1, "loss_average": "sequence", **settings,
    }  # fmt: skip
    return module_class(settings.pop("actor", None) or tiny_model(family), runs.low_tokens, **settings)


def train(plans: list[Any], settings: dict[str, Any], count: int) -> list[tuple[runs.Outcome, list[Any]]]:
    """Train under each plan; return the outcomes and the bytes moved."""
    found, world_size = [], runs.world_size()
    for plan in plans:
        moved = Moved()
        outcome = runs.train(
            adapted_grpo(**settings), ReallocStrategy(plan), world_size, runs.Batches(count), callbacks=[moved]
        )
        found.append((outcome, moved.moved))
    return found


def train_checked(plan: Any, callbacks: list[Callback]) -> tuple[runs.Outcome, dict[str, list[float]], tuple[str, ...]]:
    """Train; return the outcome, the largest errors of outputs on this rank, and the roles with replicas."""
    world_size, module = runs.world_size(), adapted_grpo(module_class=CheckedGRPO)
    vars(module)["base"] = tiny_model("qwen3")  # not registered as a submodule
    outcome = runs.train(module, ReallocStrategy(plan), world_size, runs.Batches(3), callbacks=callbacks)
    return outcome, module.off_by, module.trainer.strategy.pool.roles


class ChangeOfPlan(Callback):
    """Changes to another plan after the first iteration."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Set the plan."""
        if trainer.global_step == 1:
            trainer.strategy.set_plan(self.plan)  # type: ignore[attr-defined]


def train_ppo(plans: list[Any]) -> list[runs.Outcome]:
    """Train adapters of an actor and of a critic under each plan."""
    found, world_size = [], runs.world_size()
    for plan in plans:
        module = runs.ppo(optimizer=partial(SGD, lr=0.1), peft_config=LORA)
        found.append(runs.train(module, ReallocStrategy(plan), world_size, runs.Batches(2)))
    return found
