"""What is learnt: one file per algorithm, each a LightningModule of declared calls."""

from __future__ import annotations

from lightning_realloc.algorithms.calls import compute, generate, infer, train
from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.module import MultiModelModule
from lightning_realloc.algorithms.ppo import PPO
from lightning_realloc.algorithms.role import Role
from lightning_realloc.algorithms.sft import SFT

__all__ = ["GRPO", "PPO", "SFT", "MultiModelModule", "Role", "compute", "generate", "infer", "train"]
