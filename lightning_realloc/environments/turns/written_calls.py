"""Read tool calls as models write them: JSON objects, lists of calls, and calls in Python.

A call read is a dict of ``name`` and ``arguments``; arguments that are no JSON object stay text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAME = re.compile(r"[\w.:/-]{1,128}")
"""Names of tools. Templates write them into later prompts, where anything else could imitate special tokens."""
_NAME_IN_JSON = re.compile(r'"name"\s*:\s*"([^"\\]+)"(?:.*?"(?:arguments|parameters)"\s*:\s*(.*))?', re.DOTALL)
_NAME_IN_PYTHON = re.compile(r"\s*\[?\s*([^\s(\[]+)\((.*)", re.DOTALL)
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


def read_calls(value: object) -> list[dict[str, Any]]:
    """Return the calls in a call, a list of calls, or text in Python; [] if there are none or one is malformed."""
    calls: list[dict[str, Any]] = []
    for item in _flat(value):
        function = item.get("function", item) if isinstance(item, Mapping) else item
        if isinstance(function, str):
            found = _python_calls(function)
        elif isinstance(function, Mapping) and is_name(function.get("name")):
            arguments = function.get("arguments", function.get("parameters"))
            found = [{"name": function["name"], "arguments": read_arguments(arguments)}]
        else:
            found = []
        if not found:
            return []
        calls += found
    return calls


def read_malformed(text: str, name: str | None) -> list[dict[str, Any]]:
    """Return a malformed call with its arguments as text; [] if neither the caller nor the text knows its name."""
    arguments = text
    if name is None and (match := _NAME_IN_JSON.search(text) or _NAME_IN_PYTHON.match(text)):
        name, arguments = match[1], match[2] or text  # never empty, which would be a call without arguments
    name = (name or "").strip()
    return [{"name": name, "arguments": read_arguments(arguments.strip())}] if is_name(name) else []


def is_name(value: object) -> bool:
    """Return whether a value can be the name of a tool."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def read_arguments(value: object) -> dict[str, Any] | str:
    """Return arguments as a dict; anything else than a JSON object as text."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        decoded = json.loads(value)  # in OpenAI's messages, arguments are JSON
    except (ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, dict) else value


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    elif value is not None:
        yield value


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of a list such as ``[add(a=1), ping()]``; [] for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two for deep brackets
        return []


def _python_call(node: ast.expr) -> dict[str, Any]:
    """Return a call; raise ValueError for anything else, and for arguments that are not keywords with literals."""
    if not isinstance(node, ast.Call) or node.args or not is_name(name := ast.unparse(node.func)):
        raise ValueError("only calls with keyword arguments are tool calls")
    return {"name": name, "arguments": dict(_keyword(item) for item in node.keywords)}


def _keyword(item: ast.keyword) -> tuple[str, object]:
    if item.arg is None:
        raise ValueError("** gives arguments no names")
    return item.arg, ast.literal_eval(_JsonConstants().visit(item.value))


class _JsonConstants(ast.NodeTransformer):
    """Replaces the constants of JSON: chat templates write scalars in Python, and what contains others in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node
