"""Lightning callbacks: tuning, reallocation, weight averages, Hugging Face export, predictions, monitoring and loggers.

Start with `PhaseCallback`, whose hooks run around every call. `AutoTuner` chooses the plan during a run.
"""

from lightning_realloc.callbacks.auto_tuner import AutoTuner
from lightning_realloc.callbacks.ema import EMA
from lightning_realloc.callbacks.huggingface import SaveHuggingFace
from lightning_realloc.callbacks.loggers import TrackioLogger
from lightning_realloc.callbacks.memory_monitor import MemoryMonitor
from lightning_realloc.callbacks.metric_alarm import MetricAlarm
from lightning_realloc.callbacks.phase import PhaseCallback
from lightning_realloc.callbacks.predictions import PredictionWriter
from lightning_realloc.callbacks.reallocation import ParameterReallocation
from lightning_realloc.callbacks.rollout_table import RolloutTable
from lightning_realloc.callbacks.timeline import Timeline

__all__ = [
    "EMA",
    "AutoTuner",
    "MemoryMonitor",
    "MetricAlarm",
    "ParameterReallocation",
    "PhaseCallback",
    "PredictionWriter",
    "RolloutTable",
    "SaveHuggingFace",
    "Timeline",
    "TrackioLogger",
]
