"""Arguments of a tool call: read from JSON, converted to the types of the schema, and bound to the function.

A call that does not fit its tool is a mistake of the model, whose error it can read and correct.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from lightning_realloc.environments.tools.tool import Tool

_KINDS: tuple[tuple[type | tuple[type, ...], set[str]], ...] = (
    (str, {"string"}),
    (int, {"integer", "number"}),
    (float, {"number"}),
    (type(None), {"null"}),
    (Mapping, {"object"}),
    ((list, tuple), {"array"}),
)
"""Types in JSON schemas of a value's type; booleans, which are integers in Python, are apart."""


class CallError(Exception):
    """Tool call that cannot be carried out, in words for the model."""


def arguments_of(tool: Tool, given: object) -> dict[str, Any]:
    """Return the keyword arguments of a call.

    Formats of tool calls without types, such as XML, make ``7`` of the text "7", or the reverse. So a value of another
    type than the schema's is converted where its JSON text fits.

    Args:
        given: A mapping, or JSON text of an object.

    Raises:
        CallError: for other arguments, missing or unknown ones, and values that the schema excludes.
    """
    arguments = _object_of(given, tool.name)
    parameters = tool.schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    converted = {name: _converted(name, value, properties.get(name) or {}) for name, value in arguments.items()}
    try:
        inspect.signature(tool.function).bind(**converted)
    except TypeError as problem:
        raise CallError(f"{tool.name}: {problem}; its arguments are {_described(properties)}") from None
    except ValueError:  # a builtin, whose signature is not known
        pass
    return converted


def _object_of(given: object, name: str) -> Mapping[str, Any]:
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given or "{}")
        except ValueError as problem:
            raise CallError(f"the arguments of {name} are no JSON ({problem}): {given[:200]}") from None
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CallError(f"the arguments of {name} must be a JSON object; got {json.dumps(found, default=str)[:200]}")
    return found


def _converted(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value in the type of its schema; a schema without a plain ``type`` accepts any."""
    declared = schema.get("type")
    allowed = {declared} if isinstance(declared, str) else set(declared or ())
    if schema.get("nullable"):
        allowed.add("null")
    found = value
    if allowed and not _kinds(value) & allowed:
        found = _reread(value, allowed)
        if not _kinds(found) & allowed:
            raise CallError(
                f"argument {name!r} must be of type {' or '.join(sorted(allowed))}; got {json.dumps(value)[:200]}"
            )
    if "enum" in schema and found not in schema["enum"] and not (found is None and "null" in allowed):
        raise CallError(f"argument {name!r} must be one of {json.dumps(schema['enum'])}; got {json.dumps(value)[:200]}")
    return found


def _reread(value: Any, allowed: set[str]) -> Any:
    """Return the value of a JSON text, the text of another value, or the integer that a float equals."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if "string" in allowed:
        return json.dumps(value, ensure_ascii=False)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _kinds(value: Any) -> set[str]:
    """Return the names of the types in JSON schemas that a value has; none for those that schemas do not name."""
    if isinstance(value, bool):
        return {"boolean"}
    return next((names for kind, names in _KINDS if isinstance(value, kind)), set())


def _described(properties: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({schema.get('type', 'any')})" for name, schema in properties.items()) or "none"
