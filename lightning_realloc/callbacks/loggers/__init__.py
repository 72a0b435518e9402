"""Tables and pictures in the Trainer's loggers, and a logger for Trackio.

Start with `writers`: a further logger is an entry of its `WRITERS`.
"""

from lightning_realloc.callbacks.loggers.trackio_logger import TrackioLogger

__all__ = ["TrackioLogger"]
