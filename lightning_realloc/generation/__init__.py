"""Tokens out: continuous batching on the weights that training just wrote."""

from __future__ import annotations

from lightning_realloc.generation.budget import RolloutBudget
from lightning_realloc.generation.conversation import Conversation, Environment, Turn
from lightning_realloc.generation.engine import GenerationEngine
from lightning_realloc.generation.hf_engine import HFEngine
from lightning_realloc.generation.run import GenerationStats
from lightning_realloc.generation.samples import Completion
from lightning_realloc.generation.sampling import SamplingParams
from lightning_realloc.generation.speculation import Speculation

__all__ = [
    "Completion",
    "Conversation",
    "Environment",
    "GenerationEngine",
    "GenerationStats",
    "HFEngine",
    "RolloutBudget",
    "SamplingParams",
    "Speculation",
    "Turn",
]
