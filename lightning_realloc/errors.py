"""What the package raises when a caller asked for something that cannot be done.

Every message gives the rule, the values that broke it and the way out.
"""

from __future__ import annotations


class ReallocError(Exception):
    """Base of every error that this package raises on purpose."""


class RankLost(ReallocError):
    """Another rank ended while this one waited for it; why it did is in that rank's log."""


class LayoutError(ReallocError, ValueError):
    """A layout that cannot be built: its text, its degrees, or its fit to a model."""


class PlanError(ReallocError, ValueError):
    """An execution plan or dataflow that contradicts itself, the model or the cluster."""


class DataError(ReallocError, ValueError):
    """Training data that cannot be read or used as it is."""


class RewardError(ReallocError, ValueError):
    """A reward function that failed or returned something other than one finite number per sample."""


class GenerationError(ReallocError, ValueError):
    """A generation request that the engine or the model cannot serve."""


class CheckpointError(ReallocError, ValueError):
    """A checkpoint that does not belong to this run."""


class ConfigError(ReallocError, ValueError):
    """A setting of the trainer or the strategy that cannot work."""
