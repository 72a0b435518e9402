"""Tokens out: continuous batching on the weights that training just wrote."""

from __future__ import annotations

from lightning_realloc.generation.engine import GenerationEngine, GenerationStats
from lightning_realloc.generation.samples import Completion
from lightning_realloc.generation.sampling import SamplingParams

__all__ = ["Completion", "GenerationEngine", "GenerationStats", "SamplingParams"]
