"""Generate by continuous batching, on the weights that training has just changed.

Begin with `base_engine.Engine.generate`; `engine.py` carries a call out, and `loop/run.py` makes its steps.
`speculative/` and `rebalance/` are used only when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.base_engine import Engine
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Completion
from lightning_realloc.generation.engine import GenerationEngine
from lightning_realloc.generation.hf_engine import HFEngine
from lightning_realloc.generation.loop.environment import Conversation, Environment, Turn
from lightning_realloc.generation.loop.run import GenerationStats
from lightning_realloc.generation.schedule.budget import RolloutBudget
from lightning_realloc.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_realloc.generation.speculative.config import Speculation
    from lightning_realloc.generation.vllm.vllm_engine import VLLMEngine
    from lightning_realloc.generation.vllm.vllm_options import VLLMOptions

__all__ = [
    "Completion",
    "Conversation",
    "Engine",
    "Environment",
    "GenerationEngine",
    "GenerationStats",
    "HFEngine",
    "ModelInput",
    "RolloutBudget",
    "SamplingParams",
    "Speculation",
    "Turn",
    "VLLMEngine",
    "VLLMOptions",
]
__getattr__, __dir__ = lazy_names(__name__)
