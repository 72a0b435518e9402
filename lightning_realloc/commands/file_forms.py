"""YAML and flag forms of settings that errors name in Python, such as ``policy_loss=Clip(high=...)``.

A group of settings, such as ``GenerationOptions``, is a mapping in a file. A value whose class is a choice, such as a
loss or a callback, has ``class_path`` and ``init_args``.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from inspect import isabstract, signature
from types import NoneType
from typing import Any

import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_realloc import rewards
from lightning_realloc.algorithms.losses.policy_losses import PolicyLoss
from lightning_realloc.algorithms.ppo import PPO
from lightning_realloc.algorithms.rollout.policy_gradient import PolicyGradient
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.setting_hints import setting_defaults
from lightning_realloc.strategies import ReallocStrategy

_PACKAGES = (
    *("lightning_realloc", "lightning_realloc.rewards"),
    *("lightning.pytorch", "lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
)
"""Packages whose classes errors name."""
_ALGORITHMS = (PolicyGradient, PPO)
_PLACES: Mapping[type, tuple[str, ...]] = {
    PolicyLoss: ("model", "policy_loss"),
    DatasetSource: ("data", "data"),
    Strategy: ("trainer", "strategy"),
    Callback: ("trainer", "callbacks"),
    Logger: ("trainer", "logger"),
}
"""Base class -> setting that takes its values."""
UNNAMED: Mapping[str, type] = {
    "lightning_realloc.PolicyLoss": PolicyLoss,
    "lightning.Callback": Callback,
    "torch.optim.Optimizer": Optimizer,
    "typing.Union": LRScheduler,
    "torch.nn.Module": NoneType,
    "transformers.PreTrainedConfig": NoneType,
}
"""Class that an error names where the user gave settings without ``class_path`` -> base of the classes that fit, which
``NoneType`` has none of."""
_STRATEGY = "--trainer.strategy ReallocStrategy "
"""Flag without which the strategy is a name, which has no settings."""
_PREFERRED = ("AdamW", "ModelCheckpoint")
_MOST_NAMED = 4
"""Most classes that an error names."""
_BEGINNING = re.compile(r"(?:\b(\w+)=)?\b(partial|[A-Z]\w*)\(")
"""Beginning of a call, with the keyword that it is given to."""
_OPEN = "..."
"""Value that is left to the user."""
_FORMS: Mapping[str, str] = {
    "partners": "must map names to models; write {other: actor} for self-play, or {seller: Qwen/Qwen3-0.6B}",
    "tools": "must be a list of functions; write ['my_tools:add'], or my_tools:add after the flag --model.tools+",
    "environment": "must name an environment; write my_game.Game, {class_path: my_game.Game, init_args: {level: 3}}, "
    "or several by name, {game: my_game.Game, shop: my_shop.Shop}",
    "reward": "must name a reward; write my_rewards.right_answer, a list of such names, {class_path: ..., "
    "init_args: ...}, or the folder or name of a reward model",
    "reward_weights": "must be a list with a number for each reward; write [1.0, 0.5]",
    "learned_parts": "must be a list of thinking, calls and answer; write [calls]",
    "conversation": "must be limits of a conversation; write {max_turns: 4}",
    "parser": "must name a format of tool calls; write hermes, the import path of a function, or a response template",
}
"""Setting of an algorithm -> rule and way out, for values of no form that it takes."""
_KEY = re.compile(r'Parser key "([\w.]+)":')
_VALUE = re.compile(r"^ *Given value: (.*)|Got value: (.*)", re.MULTILINE)
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")
_MOST_SHOWN = 60
"""Most characters of a value that an error shows."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with the value that it has in a file."""

    path: tuple[str, ...]
    """Keys from the file's top, without ``init_args``."""
    value: Any

    def in_file(self) -> str:
        """Return it as YAML, below ``init_args`` of the model or in the top level."""
        *outer, last = self.path if self.path[0] == "trainer" else self.path[1:]
        value = {last: [self.value] if self.path[-1] == "callbacks" else self.value}
        for key in reversed(outer):
            value = {key: value}
        return _flow(value)[1:-1]

    def as_flags(self) -> str:
        """Return it as flags of ``fit``: one for each field of a group."""
        if isinstance(self.value, dict) and "class_path" not in self.value:
            return " ".join(Setting((*self.path, name), each).as_flags() for name, each in self.value.items())
        value = _flow(self.value) if isinstance(self.value, dict | list) else _flow([self.value])[1:-1]
        extends = "+" if self.path[-1] == "callbacks" else ""
        return f"--{'.'.join(self.path)}{extends} {shlex.quote(value)}"


def file_form(message: str, arguments: Sequence[str]) -> str:
    """Return a message's settings in the form that the user writes, to append to the message; empty for none.

    Args:
        message: Text of an error. Its advice follows the first semicolon.
        arguments: Arguments of the command. If a flag names what the message is about, the form is that of flags.
    """
    advice = message.partition("; ")[2]
    settings = [setting for setting in _settings_in(advice) if setting.value not in ({}, _OPEN)]
    flags = [word.partition("=")[0].rpartition(".")[2].strip("-+") for word in arguments if word.startswith("--")]
    if any(re.search(rf"\b{re.escape(flag)}\b", message) for flag in flags):
        forms, place = [setting.as_flags() for setting in settings], "as a flag"
    else:
        forms, place = [setting.in_file() for setting in settings], "in YAML"
    return f"; {place}: {'; '.join(dict.fromkeys(forms))}" if forms else ""


def form_error(message: str) -> str | None:
    """Return our message for a value of the wrong form; None for other mistakes.

    Args:
        message: Error of jsonargparse about one setting. If the value names a class, the error is about that class.

    >>> form_error('Parser key "tools":\\n  Expected a list. Got value: my:add')
    "tools='my:add' must be a list of functions; write ['my_tools:add'], or my_tools:add after the flag --model.tools+"
    """
    key = _KEY.match(message)
    values = [first or second for first, second in _VALUE.findall(message)]
    if key is None or key[1] not in _FORMS or not values or "class_path" in values[-1]:
        return None
    if not UNNAMED.keys() >= {*_CLASS.findall(message)}:
        return None
    return f"{key[1]}={values[-1]!r:.{_MOST_SHOWN}} {_FORMS[key[1]]}"


def unnamed_class(path: str, given: str) -> str:
    """Return a hint for settings that were given without the class that they belong to.

    Args:
        path: Class that the error names, of `UNNAMED`; any other gives an empty hint.
        given: The settings, as jsonargparse prints them.
    """
    pairs = re.findall(r"'(\w+)': ([^,}]+)", given) or re.findall(r"key='(\w+)', val='?([^')]*)", given)
    settings = {name: _OPEN if value == _OPEN else yaml.safe_load(value) for name, value in pairs}

    known = sorted(_concrete(UNNAMED.get(path, NoneType)), key=lambda cls: cls.__name__ not in _PREFERRED)
    fitting = [cls for cls in known if settings.keys() <= setting_defaults(cls).keys()]
    if not known:
        return ""
    named = known if len(known) <= _MOST_NAMED else (fitting or known)[:_MOST_NAMED]
    example, *_ = fitting or known
    form = {"class_path": example.__name__, "init_args": settings if fitting else _OPEN}
    return f"name the class by class_path ({', '.join(cls.__name__ for cls in named)}), as in {_flow(form)}"


def _concrete(base: type) -> list[type]:
    """Return the classes below a base that can be constructed, ours, Lightning's and torch's."""
    children: list[type] = base.__subclasses__()
    below = [cls for child in children for cls in (child, *_concrete(child))]
    origins = ("lightning_realloc", "lightning", "torch")
    public = [cls for cls in below if cls.__module__.partition(".")[0] in origins and not cls.__name__.startswith("_")]
    return [cls for cls in dict.fromkeys(public) if not isabstract(cls)]


def flag_of(algorithm: type, data_module: type, name: str) -> str | None:
    """Return the flag of ``fit`` that sets an algorithm's, a data module's or the Trainer's setting; None without."""
    classes = {"model": algorithm, "data": data_module, "trainer": Trainer, "trainer.strategy": ReallocStrategy}
    for group, cls in classes.items():
        if name in setting_defaults(cls):
            return f"{_STRATEGY if cls is ReallocStrategy else ''}--{group}.{name}"
    places = (place for place, group in _groups_of(algorithm) if name in setting_defaults(group))
    return next((f"--model.{'.'.join(place)}.{name}" for place in places), None)


def _settings_in(text: str) -> Iterator[Setting]:
    """Yield the settings that a text names by calls of classes that files can name."""
    position = 0
    while (found := _BEGINNING.search(text, position)) is not None:
        position = found.end()
        call = _balanced(text, found.start(2))
        node = _parsed(call)
        if node is None:
            continue
        position = found.start(2) + len(call)
        value = _value(node)
        path = _path(found[1], _named(ast.unparse(node.func)))
        if value is not None and path is not None:
            yield Setting(path, value)


def _balanced(text: str, start: int) -> str:
    """Return the call that begins at an index, up to the parenthesis that closes it."""
    depth = 0
    for index in range(text.index("(", start), len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return text[start : index + 1]
    return text[start:]


def _parsed(text: str) -> ast.Call | None:
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    return node if isinstance(node, ast.Call) else None


def _named(name: str) -> type | None:
    """Return the class with a name, ours or Lightning's; None without one."""
    found = (getattr(import_module(package), name, None) for package in _PACKAGES)
    return next((cls for cls in found if isinstance(cls, type)), None)


def _path(keyword: str | None, cls: type | None) -> tuple[str, ...] | None:
    """Return the place in a file for a value of a class that is given to a keyword; None without one."""
    if cls is Trainer:
        return ("trainer",)
    if keyword is not None:
        return ("model", keyword)
    if cls is None:
        return None
    for kind, place in _PLACES.items():
        if issubclass(cls, kind):
            return place
    if _is_reward(cls):
        return ("model", "reward")
    places = (place for algorithm in _ALGORITHMS for place, group in _groups_of(algorithm) if group is cls)
    return next((("model", *place) for place in places), None)


@cache
def _groups_of(cls: type) -> Sequence[tuple[tuple[str, ...], type]]:
    """Return the settings of a class that take a group, with the group's class; also those of groups in a group."""
    found: list[tuple[tuple[str, ...], type]] = []
    for base in cls.__mro__:
        parameters = signature(vars(base)["__init__"]).parameters if "__init__" in vars(base) else {}
        for name, parameter in parameters.items():
            words = re.findall(r"\w+", str(parameter.annotation))
            group = None if "Mapping" in words else next(filter(None, map(_named, words)), None)
            if group is not None and is_dataclass(group):
                found += [((name,), group), *(((name, *inner), each) for inner, each in _groups_of(group))]
    return found


def _is_reward(cls: type) -> bool:
    return cls.__module__.startswith(rewards.__name__)


def _value(node: ast.AST) -> Any:
    """Return an expression's value as a file has it; None for a call of a class that files cannot name."""
    if isinstance(node, ast.Constant):
        return _OPEN if node.value is ... else node.value
    if isinstance(node, ast.Dict):
        keys = [_OPEN if key is None else _value(key) for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    return _value_of_call(node) if isinstance(node, ast.Call) else _OPEN


def _value_of_call(call: ast.Call) -> Any:
    name = ast.unparse(call.func)
    cls = _named(name)
    fields = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    if name == "partial":
        path = ast.unparse(call.args[0]) if call.args else _OPEN
        return {"class_path": path, "init_args": fields} if path.rpartition(".")[2][:1].isupper() else None
    if cls is None:
        return None
    if [ast.unparse(argument) for argument in call.args] != [_OPEN]:  # which stands for any settings
        fields = dict(zip(signature(cls).parameters, map(_value, call.args), strict=False)) | fields
    is_choice = issubclass(cls, tuple(_PLACES)) and cls is not DatasetSource
    if cls is Trainer or (is_dataclass(cls) and not is_choice and not _is_reward(cls)):
        return fields
    path = f"{rewards.__name__}.{name}" if _is_reward(cls) else name
    return {"class_path": path, "init_args": fields} if fields else {"class_path": path}


def _flow(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return str(text).strip().replace(f"'{_OPEN}'", _OPEN)
