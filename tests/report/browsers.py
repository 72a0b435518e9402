"""Helpers for tests that open pages in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

DRAWN = "body[data-drawn=true]"
"""Selector of a page whose charts are drawn."""


@contextmanager
def watched_page(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """Open an address at a desktop's size and yield the page; errors of its scripts fail the test."""
    settings = {"viewport": {"width": 1440, "height": 900}, "bypass_csp": True}  # for axe's script
    context = browser.new_context(**settings | options)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.wait_for_selector(DRAWN)
    try:
        yield page
    finally:
        context.close()
    assert not errors, errors


def serious_barriers(page: Any) -> list[tuple[str, str]]:
    """Return the serious findings of axe about a page: their rule, and the first element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]
