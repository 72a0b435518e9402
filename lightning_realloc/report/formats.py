"""Formatting of numbers, ranks and layouts for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_realloc.layout.dims import Layout, format_ranks

MAX_RANKS_WIDTH = 24
"""Maximum characters of a list of ranks; longer ones are summarized."""


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB if they are few."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def short_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a layout lists them; long lists in other than ascending order are summarized."""
    listed = list(ranks)
    text = format_ranks(listed)
    if len(text) <= MAX_RANKS_WIDTH:
        return text
    ordered = format_ranks(sorted(listed))
    is_short = len(ordered) <= MAX_RANKS_WIDTH
    return f"{ordered} reordered" if is_short else f"{len(listed)} of {min(listed)}-{max(listed)}"


def short_layout(layout: Layout) -> str:
    """Return a layout with summarized ranks."""
    return f"{layout.dims}@{short_ranks(layout.ranks)}"
