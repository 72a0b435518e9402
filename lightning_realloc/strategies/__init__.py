"""Lightning strategy that runs an algorithm's calls, each in its own layout, and moves weights between them.

Start with `ReallocStrategy`, then `calls`, which runs an iteration.
"""

from lightning_realloc.strategies.realloc import ReallocStrategy

__all__ = ["ReallocStrategy"]
