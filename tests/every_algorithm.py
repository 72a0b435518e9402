"""Every algorithm of the package, for tests that hold for all of them."""

from __future__ import annotations

from lightning_realloc import (
    DPO,
    GRPO,
    KTO,
    ORPO,
    PPO,
    RLOO,
    SFT,
    BestOfN,
    OnlineDPO,
    OnPolicyDistillation,
    ProcessReward,
    ReinforcePlusPlus,
    ReMax,
    RewardModel,
)

ALGORITHMS = (
    *(DPO, GRPO, KTO, ORPO, PPO, RLOO, SFT, BestOfN, OnlineDPO),
    *(OnPolicyDistillation, ProcessReward, ReinforcePlusPlus, ReMax, RewardModel),
)
