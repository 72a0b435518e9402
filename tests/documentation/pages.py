"""Pages of the documentation and the blocks of code on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")))


class Block(NamedTuple):
    """A fenced block of code."""

    info: str
    """Text after the opening fence: a language, and perhaps a title."""
    text: str
    line: int
    """Number of lines on the page before ``text``."""


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page, from top to bottom."""
    lines = (ROOT / page).read_text().splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    for start, end in zip(fences[::2], fences[1::2], strict=True):
        yield Block(lines[start].removeprefix("```"), "\n".join(lines[start + 1 : end]) + "\n", start + 1)


def examples(page: str, language: str) -> list[Block]:
    """Return the blocks of a page that run in one language: those with a title do not."""
    return [block for block in blocks(page) if block.info == language]
