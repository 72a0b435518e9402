"""The Lightning strategies."""

from lightning_realloc.strategies.realloc import ReallocStrategy

__all__ = ["ReallocStrategy"]
