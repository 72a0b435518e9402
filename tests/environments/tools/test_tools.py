"""Tools of functions, the errors of functions that no model could call, and arguments read from a call."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from lightning_realloc.environments import Tool
from lightning_realloc.environments.tools.arguments import CallError, arguments_of
from lightning_realloc.environments.tools.tool import tools_of
from lightning_realloc.errors import ConfigError
from tests.environments.some_tools import Counter, add, shout


def test_tools_are_functions_methods_import_paths_and_tools_themselves() -> None:
    own = Tool("own", dict, {"type": "function", "function": {"name": "own", "parameters": {}}})
    counter = Counter()
    tools = tools_of([add, "tests.environments.some_tools:shout", counter.increment, own])
    assert [tool.name for tool in tools] == ["add", "shout", "increment", "own"]
    assert tools[1].function is shout and tools[2].function == counter.increment and tools[3] is own
    described = tools[0].schema["function"]
    assert described["description"] == "Add two numbers."
    assert described["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "First number."},
        "b": {"type": "integer", "description": "Second number."},
    }
    assert described["parameters"]["required"] == ["a"]
    assert list(tools[2].schema["function"]["parameters"]["properties"]) == ["step"]


def undocumented(a: int) -> int:
    return a


def unannotated(a) -> int:  # type: ignore[no-untyped-def]
    """Return it.

    Args:
        a: A number.
    """
    return a  # type: ignore[no-any-return]


def half_documented(a: int, b: int) -> int:
    """Return it.

    Args:
        a: A number.
    """
    return a


def misspelt(a: Nowhere) -> int:  # type: ignore[name-defined] # noqa: F821
    """Return it.

    Args:
        a: A number.
    """
    return 1


def positional(a: int, /, *others: int) -> int:
    """Return it.

    Args:
        a: A number.
        others: More.
    """
    return a


def reset(a: int) -> int:
    """Begin again.

    Args:
        a: A number.
    """
    return a


async def lines(path: str) -> Any:
    """Read lines.

    Args:
        path: A file.
    """
    yield path


def twin() -> Callable[..., Any]:
    def add() -> int:
        """Return 1."""
        return 1

    return add


@pytest.mark.parametrize(
    ("tools", "rule"),
    [
        ([undocumented], r"'undocumented' cannot be described.*has no docstring.*section 'Args:'"),
        ([unannotated], r"'unannotated' cannot be described.*missing a type hint.*give every argument an annotation"),
        ([half_documented], r"no description for the argument 'b'.*Tool\(name, function, schema\)"),
        ([misspelt], r"'misspelt' cannot be described to the model \(name 'Nowhere' is not defined\)"),
        ([positional], r"which a, \*others of tool 'positional' cannot be given by; remove the /"),
        ([reset], r"'reset' is named like a method that the environment itself has.*rename it"),
        ([add, twin()], r"'add' is that of tests\.environments\.some_tools\.add and .*twin.*rename one"),
        ([lambda: 1], r"'<lambda>'"),
        ([lines], r"tool 'lines' must return its result, and contains yield, which makes it a generator"),
        ([functools.partial(add, 1)], r"needs a name; functools\.partial.* has none; write a function with def"),
        ([Counter], r"Counter is a class; list methods of an object of it, or give it as environment=Counter"),
        ([7], r"7 is a int"),
        (["tests.environments.some_tools:ad"], r"tool 'tests\.environments\.some_tools:ad' cannot be imported"),
        ("tests.environments.some_tools:add", r"must be a list of functions or import paths; write tools=\[\.\.\.\]"),
        (add, r"must be a list of functions"),
    ],
)
def test_functions_that_no_model_could_call_are_refused_with_the_way_out(tools: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        tools_of(tools)


@pytest.mark.parametrize(
    ("name", "function", "schema", "rule"),
    [
        ("two words", add, {}, r"'two words' of .* has not"),
        ("add", 3, {}, r"'add' is a int"),
        ("add", add, {"name": "add"}, r"the schema of tool 'add' must be \{'type': 'function'"),
        ("sum", add, tools_of([add])[0].schema, r"the schema of tool 'sum' must be"),
    ],
)
def test_tools_written_by_hand_are_checked(name: str, function: Any, schema: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Tool(name, function, schema)


def typed(n: int, x: float, s: str, b: bool, xs: list[int], o: dict[str, int], m: int | None = None) -> None:
    """Take a value of every type.

    Args:
        n: Integer.
        x: Number.
        s: Text.
        b: Truth.
        xs: List.
        o: Object.
        m: Integer or nothing.
    """


RIGHT: dict[str, Any] = {"n": 3, "x": 0.5, "s": "7", "b": True, "xs": [1], "o": {"a": 1}, "m": None}


def test_arguments_may_be_an_object_or_its_text_and_pass_unchanged() -> None:
    (tool,) = tools_of([typed])
    assert arguments_of(tool, RIGHT) == RIGHT
    assert arguments_of(tool, json.dumps(RIGHT)) == RIGHT
    (nothing,) = tools_of([twin()])
    assert arguments_of(nothing, "") == arguments_of(nothing, None) == {}


def test_values_of_another_type_are_converted_where_their_text_fits() -> None:
    (tool,) = tools_of([typed])
    as_texts = {name: value if name == "s" else json.dumps(value) for name, value in RIGHT.items()}
    assert arguments_of(tool, as_texts) == RIGHT  # formats without types hand over texts
    read = arguments_of(tool, {**RIGHT, "n": 3.0, "x": 2, "s": 7})
    assert (read["n"], read["x"], read["s"]) == (3, 2, "7") and isinstance(read["n"], int)
    assert arguments_of(tool, {**RIGHT, "s": {"a": "é"}})["s"] == '{"a": "é"}'


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({**RIGHT, "n": "three"}, "argument 'n' must be of type integer; got \"three\""),
        ({**RIGHT, "n": 2.5}, "argument 'n' must be of type integer; got 2.5"),
        ({**RIGHT, "n": None}, "argument 'n' must be of type integer; got null"),
        ({**RIGHT, "n": True}, "argument 'n' must be of type integer; got true"),
        ({**RIGHT, "m": []}, r"argument 'm' must be of type integer or null; got \[\]"),
        ({**RIGHT, "more": 1}, r"typed: got an unexpected keyword argument 'more'; its arguments are n \(integer\), x"),
        ({"n": 1}, "typed: missing a required argument: 'x'"),
        ('{"n": 1', r'the arguments of typed are no JSON \(.*\): \{"n": 1'),
        ([1, 2], r"the arguments of typed must be a JSON object; got \[1, 2\]"),
        ("[1]", r"must be a JSON object; got \[1\]"),
    ],
)
def test_arguments_that_do_not_fit_are_described_to_the_model(given: object, error: str) -> None:
    (tool,) = tools_of([typed])
    with pytest.raises(CallError, match=error):
        arguments_of(tool, given)


def test_a_choice_outside_the_annotation_is_described_to_the_model() -> None:
    (tool,) = tools_of([shout])
    assert arguments_of(tool, {"text": "a", "how": "down"}) == {"text": "a", "how": "down"}
    with pytest.raises(CallError, match=r"argument 'how' must be one of \[\"up\", \"down\"\]; got \"left\""):
        arguments_of(tool, {"text": "a", "how": "left"})
