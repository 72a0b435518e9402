"""Tokens out: continuous batching on the weights that training just wrote."""

from __future__ import annotations

from lightning_realloc.generation.engine import GenerationEngine
from lightning_realloc.generation.run import GenerationStats
from lightning_realloc.generation.samples import Completion
from lightning_realloc.generation.sampling import SamplingParams
from lightning_realloc.generation.speculation import Speculation

__all__ = ["Completion", "GenerationEngine", "GenerationStats", "SamplingParams", "Speculation"]
