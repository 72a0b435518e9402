"""Lightning callbacks: tuning, reallocation, weight averages, Hugging Face export, predictions, monitoring and loggers.

Start with `PhaseCallback`, whose hooks run around every call. `AutoTuner` chooses the plan during a run.
Names are imported from their modules on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_realloc.callbacks.auto_tuner import AutoTuner as AutoTuner
    from lightning_realloc.callbacks.ema import EMA as EMA
    from lightning_realloc.callbacks.huggingface import SaveHuggingFace as SaveHuggingFace
    from lightning_realloc.callbacks.loggers import TrackioLogger as TrackioLogger
    from lightning_realloc.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from lightning_realloc.callbacks.metric_alarm import MetricAlarm as MetricAlarm
    from lightning_realloc.callbacks.phase import PhaseCallback as PhaseCallback
    from lightning_realloc.callbacks.predictions import PredictionWriter as PredictionWriter
    from lightning_realloc.callbacks.reallocation import ParameterReallocation as ParameterReallocation
    from lightning_realloc.callbacks.rollout_table import RolloutTable as RolloutTable
    from lightning_realloc.callbacks.timeline import Timeline as Timeline

__getattr__, __dir__ = lazy_names(__name__)
