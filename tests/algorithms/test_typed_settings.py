"""Types of the settings that algorithms pass on, as editors and type checkers read them from ``Unpack[...]``."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any, get_type_hints

import pytest
from lightning.pytorch import LightningModule

import lightning_realloc
from lightning_realloc import MultiModelModule
from lightning_realloc.setting_hints import settings_of

PUBLIC = {name: getattr(lightning_realloc, name) for name in lightning_realloc.__all__}
ALGORITHMS = [cls for cls in PUBLIC.values() if isinstance(cls, type) and issubclass(cls, MultiModelModule)]


def typed_settings(cls: type) -> dict[str, Any]:
    """Return the passed-on settings that a type checker sees, with their types."""
    annotation = cls.__init__.__annotations__.get("settings")  # type: ignore[misc]
    if annotation is None:
        return {}
    name = annotation.removeprefix("Unpack[").removesuffix("]")
    return get_type_hints(vars(sys.modules[defining(cls).__module__])[name], localns=PUBLIC)


def defining(cls: type) -> type:
    """Return the class whose constructor a class has."""
    return next(base for base in cls.__mro__ if "__init__" in vars(base))


def own_settings(cls: type) -> dict[str, Any]:
    """Return the settings that the signature of a class's constructor names, with their types."""
    constructor = vars(defining(cls))["__init__"]
    parameters, hints = inspect.signature(constructor).parameters, get_type_hints(constructor, localns=PUBLIC)
    return {name: hints[name] for name, p in parameters.items() if name in hints and p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_setting_of_an_algorithm_has_a_line_below_args(algorithm: type) -> None:
    for base in (cls for cls in algorithm.__mro__ if "__init__" in vars(cls) and issubclass(cls, MultiModelModule)):
        lines = inspect.getdoc(base).partition("\nArgs:\n")[2]  # type: ignore[union-attr]
        undocumented = own_settings(base).keys() - set(re.findall(r"(?m)^ {4}(\w+): ", lines))
        assert not undocumented, f"add {', '.join(sorted(undocumented))} below Args: of {base.__name__}'s docstring"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_type_checker_sees_every_setting_of_an_algorithm(algorithm: type) -> None:
    own, passed_on = own_settings(algorithm), typed_settings(algorithm)
    assert own.keys() | passed_on.keys() == settings_of(algorithm)
    assert own.keys().isdisjoint(passed_on), "PEP 692 forbids a name in both"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_passed_on_settings_have_the_types_of_the_classes_that_take_them(algorithm: type) -> None:
    bases = [base for base in algorithm.__mro__ if "__init__" in vars(base) and issubclass(base, LightningModule)]
    takers = bases[1 : bases.index(MultiModelModule) + 1] if algorithm is not MultiModelModule else []
    taken: dict[str, Any] = {}
    for base in takers:
        taken = own_settings(base) | taken
    passed_on = typed_settings(algorithm)
    assert passed_on == {name: taken[name] for name in passed_on}
