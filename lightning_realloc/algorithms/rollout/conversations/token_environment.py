"""Construct an environment of tokens from a setting: a function, a class or an import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from lightning_realloc.environments.environment_factory import resolved_source
from lightning_realloc.environments.message_environment import MessageEnvironment
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Environment
from lightning_realloc.rewards.signatures import check_takes

# This order matters: a class_path that jsonargparse makes no object of stays a mapping, and its init_args do, too.
_OneSource = str | MessageEnvironment | Mapping[str, Any] | Callable[..., Any]
EnvironmentSource = str | Mapping[str, _OneSource] | MessageEnvironment | Callable[..., Any]
"""An environment of messages: its class, an object to copy, a function that makes one, or several of these by name. Or
one of tokens: a function of a turn, or a class of such functions that is constructed from the tokenizer. Or an import
path."""


def import_environment(source: EnvironmentSource) -> Callable[..., Any]:
    """Return the environment of tokens, or the class of one, that a setting names.

    Raises:
        ConfigError: for an import path that cannot be resolved, and for objects that cannot be called, or not with one
            argument.
    """
    found: Any = resolved_source(source)
    if isinstance(source, Mapping) and callable(found):  # class_path makes an object without the tokenizer
        found = found()
    if not callable(found):
        raise ConfigError(
            f"environment={source!r} is a {type(found).__name__}; give a class of MessageEnvironment, a class with "
            f"a method reset and tools as methods, or a function of a Turn; in YAML its import path"
        )
    argument = "the tokenizer" if isinstance(found, type) else "a Turn"
    way_out = "give its other arguments defaults"
    if isinstance(found, type):
        way_out += ", or, if it answers in messages, derive it from MessageEnvironment or give it a method reset"
    check_takes(found, argument, what="environment", way_out=way_out, error=ConfigError)
    return cast("Callable[..., Any]", found)


def make_environment(found: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> Environment:
    """Return the environment; a class is instantiated with the tokenizer.

    Raises:
        ConfigError: if the instance cannot be called.
    """
    environment = found(tokenizer) if isinstance(found, type) else found
    if not callable(environment):
        raise ConfigError(
            f"environment={found.__name__} makes a {type(environment).__name__}, which cannot be called with a Turn; "
            f"give the class a method __call__(self, turn)"
        )
    return environment
