"""Forms in which data holds the tests of a program: Python text, standard input and output, calls of a function."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.texts import shortened

NUMBER_TOLERANCE = 1e-6
"""Accepted error of a number with a decimal point or an exponent: absolute below 1, relative above."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# Runs among the names of the tested code: only its own name may be added to them.
_CALLS = """
def _check_calls():
    from copy import deepcopy
    from math import inf, isclose, nan
    def same(given, wanted):
        if isinstance(wanted, (list, tuple)) and isinstance(given, (list, tuple)):
            return len(given) == len(wanted) and all(map(same, given, wanted))
        if isinstance(wanted, float) and isinstance(given, (int, float)):
            return isclose(given, wanted, rel_tol={tolerance}, abs_tol={tolerance})
        return given == wanted
    def passes(arguments, wanted):
        owner = globals().get("Solution")
        function = getattr(owner(), {name!r}) if hasattr(owner, {name!r}) else globals()[{name!r}]
        try:
            given = function(*deepcopy(arguments))
        except Exception:
            return False
        return same(given, wanted) or isinstance(wanted, list) and len(wanted) == 1 and same(given, wanted[0])
    assert any(all(passes(*case) for case in cases) for cases in {readings!r})
_check_calls()
"""


@dataclass(frozen=True, slots=True)
class OutputTest:
    """Test of a program that reads standard input and writes standard output."""

    given: str
    """Standard input."""
    expected: str
    """Standard output."""

    def accepts(self, output: str) -> bool:
        """Return whether an output is the expected one, apart from trailing white space and rounding of numbers."""
        found, wanted = _lines(output), _lines(self.expected)
        return len(found) == len(wanted) and all(map(_is_same_line, found, wanted))


def program_tests(given: Any, column: str) -> tuple[str | OutputTest, ...] | None:
    """Return the tests of one prompt, each as Python text or an `OutputTest`; None if the reward does not apply.

    Raises:
        RewardError: for tests in another form.
    """
    if given is None:
        return None
    items = list(given) if _is_list(given) else [given]
    try:
        tests = [test for item in items for part in _parsed(item) for test in _tests_of(part)]
    except _UnknownForm as error:
        raise RewardError(
            f"a test in column {column!r} must be Python, or a mapping with 'input' and 'output'; it is "
            f"{shortened(error.args[0])}; lists 'inputs' and 'outputs' must have equal length, and with 'fn_name' an "
            f"input is a list of arguments"
        ) from None
    if not tests:
        raise RewardError(f"column {column!r} needs at least one test for every prompt; use None where there are none")
    return tuple(tests)


class _UnknownForm(Exception):
    """A test in no known form."""


def _parsed(item: Any) -> list[Any]:
    """Return the tests in a text that is a list or mapping; as Python it would pass, whatever the program does."""
    if isinstance(item, str) and item.lstrip()[:1] in ("[", "{"):
        for parse in (json.loads, ast.literal_eval):
            try:
                found = parse(item.strip())
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all of them of literal_eval
                continue
            return found if isinstance(found, list) else [found]
    return [item]


def _tests_of(item: Any) -> list[str | OutputTest]:
    if isinstance(item, str):
        return [item]
    if not isinstance(item, Mapping):
        raise _UnknownForm(item)
    name = item.get("fn_name")
    if item.get("inputs") is None and item.get("outputs") is None:  # datasets fills keys of other rows with None
        given, expected = item.get("input"), item.get("output")
        if "output" not in item or (expected is None and not name):
            raise _UnknownForm(item)
        if not name and _is_list(given) and _is_list(expected) and len(given) == len(expected):
            return [OutputTest(*map(_as_text, case)) for case in zip(given, expected, strict=True)]
        return [_calls(name, given, expected, item) if name else OutputTest(_as_text(given), _as_text(expected))]
    given, expected = item.get("inputs"), item.get("outputs")
    if not _is_list(given) or not _is_list(expected) or len(given) != len(expected):
        raise _UnknownForm(item)
    cases = zip(given, expected, strict=True)
    return [_calls(name, *case, item) if name else OutputTest(*map(_as_text, case)) for case in cases]


def _calls(name: str, arguments: Any, expected: Any, item: object) -> str:
    """Return Python text that calls a function, or a method of ``Solution``, and compares the result.

    If all arguments are lists, as many as results, each may also be a call of its own.
    """
    if not _is_list(arguments):
        raise _UnknownForm(item)
    readings: list[Sequence[Any]] = [[(list(arguments), expected)]]
    if _is_list(expected) and len(arguments) == len(expected) and all(map(_is_list, arguments)):
        readings.append(list(zip(arguments, expected, strict=True)))
    return _CALLS.format(tolerance=NUMBER_TOLERANCE, name=name, readings=readings)


def _is_list(value: object) -> TypeGuard[Collection[Any]]:
    return isinstance(value, Collection) and not isinstance(value, str | Mapping)


def _as_text(value: Any) -> str:
    """Return a text, or the lines of a list."""
    if value is None:
        return ""
    return "\n".join(str(line).rstrip("\n") for line in value) if _is_list(value) else str(value)


def _lines(output: str) -> list[str]:
    """Return the lines of an output without trailing white space and trailing empty lines."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _is_same_line(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if _NUMBER.split(found) != _NUMBER.split(wanted):
        return False
    return all(map(_is_same_number, _NUMBER.findall(found), _NUMBER.findall(wanted)))


def _is_same_number(found: str, wanted: str) -> bool:
    """Return whether two texts are one number. If an integer is expected, it must be the same text."""
    if found == wanted:
        return True
    if wanted.lstrip("+-").isdigit():
        return False
    return math.isclose(float(found), float(wanted), rel_tol=NUMBER_TOLERANCE, abs_tol=NUMBER_TOLERANCE)
