"""Formatting of numbers, ranks, layouts and tables for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), indent: str = "  ") -> str:
    """Return rows as aligned columns: left-aligned those in ``left``, the others right-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in enumerate(row))
        for row in rows
    )
    return "\n".join(indent + line.rstrip() for line in lines)
