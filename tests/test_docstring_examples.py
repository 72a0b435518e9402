"""Examples in docstrings run and give the results that they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import lightning_realloc

PACKAGE = Path(lightning_realloc.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0 and results.failed == 0, f"python -m doctest shows the examples of {name} that fail"
