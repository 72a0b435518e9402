"""Long matrices of cases: `make test` runs their boundaries, `make test-all` all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def matrix(cases: Iterable[Any], *boundaries: Any) -> list[Any]:
    """Return cases for ``pytest.mark.parametrize``; those that are no ``boundaries`` are marked ``exhaustive``."""
    listed = list(cases)
    unknown = [case for case in boundaries if case not in listed]
    assert not unknown, f"no cases of the matrix: {unknown}"
    return [case if case in boundaries else _exhaustive(case) for case in listed]


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of one value of each axis; the boundaries have each value of each axis at least once."""
    boundaries = [tuple(axis[index % len(axis)] for axis in axes) for index in range(max(map(len, axes)))]
    return matrix(itertools.product(*axes), *boundaries)


def few_and_more(few: Sequence[Any], more: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by its argument ``cases``, all of which it runs at once: a few, and exhaustively more."""
    return pytest.mark.parametrize("cases", [list(few), _exhaustive(list(more))], ids=["few", "more"])


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Return the values of a parameter in this module's tests of this run, for a fixture that prepares them at once."""
    found: dict[int, Any] = {}
    for item in request.session.items:
        values = getattr(item, "callspec", None)
        if item.path == request.path and values is not None and argument in values.params:
            found.setdefault(id(values.params[argument]), values.params[argument])
    return list(found.values())


def _exhaustive(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)
