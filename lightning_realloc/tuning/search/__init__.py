"""Search for the fastest execution plan that fits into memory.

Start with `search_plan`.
"""

from lightning_realloc.moved_modules import moved_names

__getattr__ = moved_names(__name__)
