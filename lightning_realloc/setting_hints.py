"""Suggest our setting for an unknown keyword: names of TRL, OpenRLHF, verl, vLLM and Lightning's Trainer, and typos.

The tables of other libraries' names are package data, ``setting_hints.yaml``. It is read when a keyword is unknown.
The algorithms' table is divided into topics. Keys of verl are patterns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, wraps
from importlib import import_module
from importlib.resources import files
from typing import Any, ClassVar, Self, TypeVar, cast
from weakref import WeakKeyDictionary

from lightning_realloc.errors import ConfigError

_Class = TypeVar("_Class", bound=type)
_Initializer = TypeVar("_Initializer", bound=Callable[..., None])
_PACKAGE = f"{__package__}."
_CALL = r"\w\([^()]*(?:\([^()]*\)[^()]*)*\)"
"""A call within a hint, whose keywords are not settings of the class."""
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_VAR_POSITIONAL, _VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_MOST_OWNERS = 3
"""Algorithms that an error names."""
_MOST_LISTED = 16
"""Most settings that an error lists; a longer list hides its first words."""


class HintTable(Mapping[str, str]):
    """One table of ``setting_hints.yaml``: another library's name for a setting -> our setting, or advice.

    Args:
        name: Name of the table.
        groups: Setting -> class of the group that it takes, whose settings are hinted at, too.
    """

    def __init__(self, name: str, **groups: type) -> None:
        self._name = name
        self._groups = groups

    def __getitem__(self, setting: str) -> str:
        return self._hints()[setting]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hints())

    def __len__(self) -> int:
        return len(self._hints())

    def _hints(self) -> Mapping[str, str]:
        of_groups = {
            setting: f"{group}={kind.__name__}({setting}=...)"
            for group, kind in self._groups.items()
            for setting in settings_of(kind)
        }
        return of_groups | _read_tables()[self._name]


@cache
def _read_tables() -> dict[str, dict[str, str]]:
    tables = _parse_file()
    hints = {name: hint for topic in tables["algorithm"].values() for name, hint in topic.items()}
    renamed = {earlier: hints[flag] for earlier, flag in tables["renamed_flags"].items()}
    return tables | {"algorithm": renamed | hints | tables["renamed_settings"]}


def algorithm_topics() -> Mapping[str, Mapping[str, str]]:
    """Return the algorithms' hints by topic, as the documentation shows them."""
    topics: Mapping[str, Mapping[str, str]] = _parse_file()["algorithm"]
    return topics


def _parse_file() -> dict[str, Any]:
    import yaml  # only for an error message

    tables: dict[str, Any] = yaml.safe_load(
        files(__package__).joinpath("setting_hints.yaml").read_text(encoding="utf-8")
    )
    return tables


ALGORITHM_HINTS = HintTable("algorithm")
DATA_HINTS = HintTable("data")
SAMPLING_HINTS = HintTable("sampling")
TRAIN_OPTIONS_HINTS = HintTable("train_options")
SPECULATION_HINTS = HintTable("speculation")
ENGINE_HINTS = HintTable("engine")
STRATEGY_HINTS = HintTable("strategy")
ROLE_HINTS = HintTable("role")
GENERATION_HINTS = HintTable("generation")
KL_HINTS = HintTable("kl")
GAE_HINTS = HintTable("gae")
ENTROPY_HINTS = HintTable("entropy")
CORRECTION_HINTS = HintTable("correction")
POLICY_LOSS_HINTS = HintTable("policy_loss")
POLICY_LOSS_NAMES = HintTable("policy_losses")
VERL_HINTS = HintTable("verl")


def hint_for(name: str) -> str | None:
    """Return our counterpart of another library's setting or flag, None for an unknown name."""
    tables = (ALGORITHM_HINTS, DATA_HINTS, SAMPLING_HINTS, TRAIN_OPTIONS_HINTS)
    return next((table[name] for table in tables if name in table), None) or hint_of_verl(name)


def loss_elsewhere(name: str) -> str | None:
    """Return our settings for a policy loss that other libraries or papers name, None for an unknown name."""
    return POLICY_LOSS_NAMES.get(name.lower().replace("-", "_"))


def hint_of_verl(key: str) -> str | None:
    """Return our counterpart of a key of verl's configuration, such as ``data.train_batch_size``, None for another.

    A name without dots is a whole key with ``_`` for its dots, or the end of keys that all have the same counterpart.
    """
    key = re.sub(r"^actor_rollout_ref[._]", "", key)
    if "." in key:
        return next((hint for pattern, hint in VERL_HINTS.items() if fnmatchcase(key, pattern)), None)
    meant = {hint for pattern, hint in VERL_HINTS.items() if _ends_in(pattern, key)}
    return meant.pop() if len(meant) == 1 else None


def _ends_in(pattern: str, name: str) -> bool:
    parts = pattern.split(".")
    starts = [0] if parts[0] in ("critic", "ref", "reward*") else range(len(parts))  # the actor has the same names
    return parts[-1] != "*" and any(fnmatchcase(name, "_".join(parts[start:])) for start in starts)


class SuggestsSettings:
    """Base class whose constructor answers an unknown setting with the one that is probably meant.

    Subclasses outside of this package that define ``__init__`` may accept such a name. The base that gets the settings
    that they pass on refuses unknown ones, by :func:`refuses_unknown`.
    """

    __slots__ = ()
    names_elsewhere: ClassVar[Mapping[str, str]] = {}
    """Other libraries' names for settings -> ours."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the constructor of each class of this package name the settings that it lacks."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and cls.__module__.startswith(_PACKAGE):
            type.__setattr__(cls, "__init__", _refuses_missing(vars(cls)["__init__"]))

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Check the settings, before Python refuses unknown ones without a hint."""
        if settings:
            cls.check_settings(settings)
        return super().__new__(cls)

    @classmethod
    def check_settings(cls, settings: Mapping[str, object]) -> None:
        """Refuse unknown settings.

        Raises:
            ConfigError: for the first of them, with the setting that is probably meant.
        """
        if _takes_settings(cls)[0].__module__.startswith(_PACKAGE):
            _refuse_unknown(cls, settings)


def refuses_unknown(initialize: _Initializer) -> _Initializer:
    """Decorate the ``__init__`` of a base class to answer unknown settings that subclasses pass on with a hint."""
    known = inspect.signature(initialize).parameters

    @wraps(initialize)
    def __init__(self: object, *args: Any, **settings: Any) -> None:
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigError(describe_unknown_settings(type(self), unknown))
        initialize(self, *args, **settings)

    return cast("_Initializer", __init__)


def suggest_settings(hints: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Decorate a class, such as a dataclass, to answer unknown settings as :class:`SuggestsSettings` does.

    A dataclass cannot have that base: the command line would then ask for its ``class_path``.
    """

    def decorate(cls: _Class) -> _Class:
        initialize = _refuses_missing(vars(cls)["__init__"])

        @wraps(initialize)
        def __init__(self: object, *args: Any, **settings: Any) -> None:
            if settings:
                _refuse_unknown(cls, settings)
            initialize(self, *args, **settings)

        cls.__init__ = __init__  # type: ignore[misc]
        cls.names_elsewhere = hints  # type: ignore[attr-defined]
        return cls

    return decorate


def _refuses_missing(initialize: _Initializer) -> _Initializer:
    """Decorate an ``__init__`` to raise ConfigError for settings that are left out and have no default."""
    _, *parameters = inspect.signature(initialize).parameters.values()
    required = {each.name: each.kind for each in parameters if each.default is each.empty}
    required = {name: kind for name, kind in required.items() if kind not in (_VAR_POSITIONAL, _VAR_KEYWORD)}

    @wraps(initialize)
    def __init__(self: object, *args: Any, **settings: Any) -> None:
        given = {*settings, *(parameter.name for parameter in parameters[: len(args)])}
        if missing := [name for name in required if name not in given]:
            form = ", ".join(f"{name}=..." if kind is _KEYWORD else name for name, kind in required.items())
            name = type(self).__name__
            raise ConfigError(f"{name} needs {' and '.join(missing)}, without a default; write {name}({form})")
        initialize(self, *args, **settings)

    return cast("_Initializer", __init__)


def _refuse_unknown(cls: type, settings: Iterable[str]) -> None:
    known = settings_of(cls)
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(describe_unknown_settings(cls, unknown))


def describe_unknown_settings(cls: type, names: Sequence[str]) -> str:
    """Return the error message for names that are no settings of a class."""
    meant = [_meant_by(name, cls) for name in names]
    if len(names) > 1:
        meant = [f"{name}: {own}" for name, own in zip(names, meant, strict=True)]
    return f"{cls.__name__} has no setting {', '.join(names)}; {'; '.join(meant)}"


def _meant_by(name: str, cls: type) -> str:
    import lightning as L  # only for an error message

    hints: Mapping[str, str] = getattr(cls, "names_elsewhere", {})
    if name not in hints and name in inspect.signature(L.Trainer).parameters:
        return f"here it is Lightning's Trainer({name}=...)"
    if hint := hints.get(name) or hint_of_verl(name):
        if own := re.findall(rf"\b{cls.__name__}\(([^()]*)\)", hint):  # within the class that the hint names
            return f"here it is {' or '.join(own)}"
        return f"here it is {hint}{_lack_of(hint, cls, name)}"
    if owners := _others_with(name, cls):
        return f"it is a setting of {', '.join(owners[:_MOST_OWNERS])}{' and others' * (len(owners) > _MOST_OWNERS)}"
    known = sorted(settings_of(cls))
    alike = get_close_matches(name, known, n=1)
    if alike:
        return f"did you mean {alike[0]}=?"
    if len(known) > _MOST_LISTED:
        return f"help({_takes_settings(cls)[0].__name__}) describes the {len(known)} that it has"
    return f"it has {', '.join(known)}"


def _others_with(name: str, cls: type) -> list[str]:
    """Return the algorithms with a setting that a class lacks; none for a class that is no algorithm."""
    import lightning as L  # only for an error message

    package = import_module("lightning_realloc")
    public = (getattr(package, each) for each in package.__all__)
    algorithms = [each for each in public if isinstance(each, type) and issubclass(each, L.LightningModule)]
    return [each.__name__ for each in algorithms if name in settings_of(each)] if cls in algorithms else []


def _lack_of(hint: str, cls: type, name: str) -> str:
    """Return a remark if a hint begins with another setting, and a class has no setting that it names."""
    named = re.findall(r"(\w+)=", re.sub(_CALL, "", hint))
    if not re.match(r"\w+=", hint) or hint.startswith(f"{name}=") or settings_of(cls).intersection(named):
        return ""
    return f"; {cls.__name__} has no {named[0]}="


_DEFAULTS: WeakKeyDictionary[type, dict[str, object]] = WeakKeyDictionary()
"""Results of :func:`setting_defaults`. Keys are weak: a class made in a function keeps that function's models alive."""


def settings_of(cls: type) -> frozenset[str]:
    """Return the names of the settings that a class takes itself or passes on to its bases."""
    return frozenset(setting_defaults(cls))


def setting_defaults(cls: type) -> Mapping[str, object]:
    """Return the settings of :func:`settings_of` with their defaults, ``inspect.Parameter.empty`` without one."""
    if cls not in _DEFAULTS:
        _DEFAULTS[cls] = _read_defaults(cls)
    return _DEFAULTS[cls]


def _read_defaults(cls: type) -> dict[str, object]:
    defaults: dict[str, object] = {}
    for base in _takes_settings(cls):
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        defaults = own | defaults  # a subclass's default counts
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return defaults


def _takes_settings(cls: type) -> list[type]:
    """Return the classes that define ``__init__``, in the order in which settings are passed on."""
    return [base for base in cls.__mro__ if "__init__" in vars(base)]
