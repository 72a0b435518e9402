"""Algorithms, one file each: LightningModules that declare their models and calls.

Start with `SFT`, then `GRPO`. `MultiModelModule` in `base` is the base class of all.
"""

from __future__ import annotations

from lightning_realloc.algorithms.base.calls import compute, generate, infer, train
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.best_of_n import BestOfN
from lightning_realloc.algorithms.distillation import OnPolicyDistillation
from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.kto import KTO
from lightning_realloc.algorithms.online_dpo import OnlineDPO
from lightning_realloc.algorithms.orpo import ORPO
from lightning_realloc.algorithms.ppo import PPO
from lightning_realloc.algorithms.process_reward import ProcessReward
from lightning_realloc.algorithms.reinforce import ReinforcePlusPlus
from lightning_realloc.algorithms.remax import ReMax
from lightning_realloc.algorithms.reward_model import RewardModel
from lightning_realloc.algorithms.rloo import RLOO
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient
from lightning_realloc.algorithms.sft import SFT

__all__ = [
    "DPO", "GRPO", "KTO", "ORPO", "PPO", "RLOO", "SFT", "BestOfN", "OnPolicyDistillation", "OnlineDPO", "ProcessReward",
    "ReMax", "ReinforcePlusPlus", "RewardModel", "MultiModelModule", "PolicyGradient", "Role", "compute", "generate",
    "infer", "train",
]  # fmt: skip
