"""Tables as aligned text, and as HTML for notebooks. Standard library alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), indent: str = "  ") -> str:
    """Return rows as aligned columns: left-aligned those in ``left``, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in enumerate(row))
        for row in rows
    )
    return "\n".join(indent + line.rstrip() for line in lines)


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = "") -> str:
    """Return a table; cells that are numbers are aligned to the right."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    look = "right" if isinstance(value, int | float) else "left"
    return f'<td style="text-align:{look}">{escape(str(value))}</td>'
