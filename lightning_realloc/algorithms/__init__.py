"""Algorithms, one file each: LightningModules that declare their models and calls.

Start with `SFT`, then `GRPO`. `MultiModelModule` in `base` is the base class of all.
Names are imported from their modules on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_realloc.algorithms.base.calls import compute as compute
    from lightning_realloc.algorithms.base.calls import generate as generate
    from lightning_realloc.algorithms.base.calls import infer as infer
    from lightning_realloc.algorithms.base.calls import train as train
    from lightning_realloc.algorithms.base.module import MultiModelModule as MultiModelModule
    from lightning_realloc.algorithms.base.role import Role as Role
    from lightning_realloc.algorithms.best_of_n import BestOfN as BestOfN
    from lightning_realloc.algorithms.distillation import OnPolicyDistillation as OnPolicyDistillation
    from lightning_realloc.algorithms.dpo import DPO as DPO
    from lightning_realloc.algorithms.grpo import GRPO as GRPO
    from lightning_realloc.algorithms.kto import KTO as KTO
    from lightning_realloc.algorithms.online_dpo import OnlineDPO as OnlineDPO
    from lightning_realloc.algorithms.orpo import ORPO as ORPO
    from lightning_realloc.algorithms.ppo import PPO as PPO
    from lightning_realloc.algorithms.process_reward import ProcessReward as ProcessReward
    from lightning_realloc.algorithms.reinforce import ReinforcePlusPlus as ReinforcePlusPlus
    from lightning_realloc.algorithms.remax import ReMax as ReMax
    from lightning_realloc.algorithms.reward_model import RewardModel as RewardModel
    from lightning_realloc.algorithms.rloo import RLOO as RLOO
    from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient as PolicyGradient
    from lightning_realloc.algorithms.sft import SFT as SFT

__getattr__, __dir__ = lazy_names(__name__)
