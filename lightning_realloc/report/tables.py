"""Numbers and tables as people read them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_realloc.layout.dims import Layout, format_ranks

LONGEST_RANKS = 24
"""Letters of a list of ranks; longer ones are summed up."""


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB where they are few."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def short_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a layout lists them; many in another order than ascending are summed up."""
    listed = list(ranks)
    text = format_ranks(listed)
    if len(text) <= LONGEST_RANKS:
        return text
    ordered = format_ranks(sorted(listed))
    return f"{ordered} reordered" if len(ordered) <= LONGEST_RANKS else f"{len(listed)} of {min(listed)}-{max(listed)}"


def short_layout(layout: Layout) -> str:
    """Return a layout with its ranks summed up."""
    return f"{layout.dims}@{short_ranks(layout.ranks)}"


def aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), indent: str = "  ") -> str:
    """Return rows as columns: those named in ``left`` start alike, the others end alike."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in enumerate(row))
        for row in rows
    )
    return "\n".join(indent + line.rstrip() for line in lines)
