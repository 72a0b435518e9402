"""Values of ``--tools`` and ``--environment``: Python files, import paths and a short name become import paths."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_realloc.environments.tools.tool import Tool, tools_of
from lightning_realloc.errors import ConfigError, describe_error
from lightning_realloc.remote_path import expand_home

TOOL_NAMES: Mapping[str, str] = {"python": "lightning_realloc.environments.python_tool:python"}
"""Import paths of the package's tools by short name."""
TOOL_FORMS = (
    "a Python file, whose public functions are the tools; one function as file.py:function or module:function; or "
    "python, which runs the model's programs"
)
"""All values that ``--tools`` accepts, as the end of a sentence."""
ENVIRONMENT_FORMS = "a class as file.py:Class or module:Class"
"""All values that ``--environment`` accepts, as the end of a sentence."""


def agent_settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Return an algorithm's ``environment``, ``tools`` and ``conversation`` for the flags that are given.

    Raises:
        ConfigError: for values that name no tools or no environment, and for ``--max-turns`` without either.
    """
    settings: dict[str, Any] = {}
    if flags.environment is not None:
        settings["environment"] = environment_setting(flags.environment)
    if flags.tools:
        settings["tools"] = tool_setting(flags.tools)
    if flags.max_turns is not None:
        if not settings:
            raise ConfigError(
                f"--max-turns={flags.max_turns} bounds a conversation with tools or an environment; give --tools or "
                f"--environment, or leave it out"
            )
        settings["conversation"] = {"max_turns": flags.max_turns}
    return settings


def tool_setting(given: Sequence[str]) -> list[str]:
    """Return an algorithm's ``tools``, which are import paths, for the values of ``--tools``.

    >>> tool_setting(["python", "my.module:search"])
    ['lightning_realloc.environments.python_tool:python', 'my.module:search']

    Raises:
        ConfigError: for a file that is missing, cannot be imported or has no tools, for functions of it that cannot be
            described to a model, and for unknown names.
    """
    return [path for value in given for path in _tool_paths(value)]


def environment_setting(given: str) -> str:
    """Return an algorithm's ``environment``, which is an import path, for the value of ``--environment``.

    Raises:
        ConfigError: for a file that is missing, cannot be imported or lacks the class, and for other names.
    """
    file, name = _parts(given)
    if file is None:
        if ":" not in given and "." not in given:
            raise ConfigError(f"--environment={given} is no import path; give {ENVIRONMENT_FORMS}")
        return given
    module = _imported("--environment", file)
    if name is None or not hasattr(module, name):
        classes = _defined(module, inspect.isclass)
        defined = f"it defines {', '.join(classes)}" if classes else "it defines none"
        raise ConfigError(f"--environment={given} must name a class of {file}, as {file}:Class; {defined}")
    return f"{module.__name__}:{name}"


def _tool_paths(given: str) -> list[str]:
    if given in TOOL_NAMES:
        return [TOOL_NAMES[given]]
    file, name = _parts(given)
    if file is None:
        if ":" in given or "." in given:
            return [given]
        near = difflib.get_close_matches(given, TOOL_NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"give {TOOL_FORMS}"
        raise ConfigError(f"--tools={given} is unknown; {hint}")
    module = _imported("--tools", file)
    names = _defined(module, _is_tool) if name is None else [name]
    if not names:
        raise ConfigError(
            f"--tools={given} defines no public function; define the tools there, or give those that it imports as "
            f"module:function"
        )
    for each in names:
        _check_tool(given, module, each, is_named=name is not None)
    return [f"{module.__name__}:{each}" for each in names]


def _check_tool(given: str, module: ModuleType, name: str, *, is_named: bool) -> None:
    if not hasattr(module, name):
        others = ", ".join(_defined(module, _is_tool)) or "none"
        raise ConfigError(f"--tools={given}: there is no {name} in the file; its public functions are {others}")
    try:
        tools_of([getattr(module, name)])
    except ConfigError as error:
        way_out = "" if is_named else "; or begin the name of a function that is no tool with _"
        raise ConfigError(f"--tools={given}: {error}{way_out}") from error


def _parts(given: str) -> tuple[str | None, str | None]:
    """Return the Python file that a value names, and what it names in the file; None for what it does not name."""
    file, _, name = given.rpartition(":")
    if file.endswith(".py"):
        return file, name
    return (given, None) if given.endswith(".py") else (None, None)


def _imported(flag: str, file: str) -> ModuleType:
    """Import a file under the name by which every rank of a run, and a saved configuration, can import it."""
    path = expand_home(Path(file))
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no {file!r} in {Path.cwd()}; give a Python file, or an import path")
    name = _module_name(path.resolve())
    if name is None:
        raise ConfigError(
            f"{flag}: {file!r} is not below a folder that Python imports from; run the command in the file's folder, "
            f"or add that to PYTHONPATH"
        )
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{flag}: {file!r} cannot be imported ({describe_error(error)}); correct the file") from error
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != path.resolve():
        raise ConfigError(f"{flag}: another module than {file!r} has the name {name} ({origin}); rename the file")
    return module


def _module_name(file: Path) -> str | None:
    """Return the shortest name by which a file can be imported; None if there is none."""
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    names = [file.relative_to(folder).with_suffix("").parts for folder in folders if file.is_relative_to(folder)]
    return min((".".join(parts) for parts in names if not any("." in part for part in parts)), key=len, default=None)


def _defined(module: ModuleType, is_wanted: Callable[[Any], bool]) -> list[str]:
    """Return the public names of what a module defines itself, in its order."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and is_wanted(value) and _is_defined_in(module, value)
    ]


def _is_tool(value: object) -> bool:
    return isinstance(value, Tool) or (callable(value) and inspect.isfunction(inspect.unwrap(value)))


def _is_defined_in(module: ModuleType, value: object) -> bool:
    """Return whether a value is the module's own; a `Tool` that it imports counts too."""
    return isinstance(value, Tool) or getattr(value, "__module__", None) == module.__name__
