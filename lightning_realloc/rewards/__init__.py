"""Reward functions: plain functions, worker processes, reward servers, verifiers, and reward shaping.

Names are imported from their modules on first use, so that a worker that tests code or numbers needs no torch.
Start with `RewardFunctions`, which calls the functions and adds up their rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_realloc.rewards.code_tests import CodeTests as CodeTests
    from lightning_realloc.rewards.failure_rule import Failed as Failed
    from lightning_realloc.rewards.functions import RewardFunction as RewardFunction
    from lightning_realloc.rewards.functions import RewardFunctions as RewardFunctions
    from lightning_realloc.rewards.functions import Rewards as Rewards
    from lightning_realloc.rewards.ray_reward import RayReward as RayReward
    from lightning_realloc.rewards.remote import RemoteReward as RemoteReward
    from lightning_realloc.rewards.retries import Retries as Retries
    from lightning_realloc.rewards.shaping import OverlongPenalty as OverlongPenalty
    from lightning_realloc.rewards.shaping import Shaped as Shaped
    from lightning_realloc.rewards.verifiers import Format as Format
    from lightning_realloc.rewards.verifiers import Length as Length
    from lightning_realloc.rewards.verifiers import NumericAnswer as NumericAnswer
    from lightning_realloc.rewards.verifiers import Regex as Regex
    from lightning_realloc.rewards.verifiers import exact_match as exact_match
    from lightning_realloc.rewards.workers.pooled import PooledReward as PooledReward

__getattr__, __dir__ = lazy_names(__name__)
