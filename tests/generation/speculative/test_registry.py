"""Every name of a drafter is built, and has an entry among the drafters of the tests."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from lightning_realloc.generation import Speculation
from lightning_realloc.generation.speculative.config import DrafterName
from lightning_realloc.generation.speculative.registry import _MODEL_FREE, build_drafter
from tests.generation.markov import drafter_model, target
from tests.generation.speculative.drafters import DRAFTERS

WITH_MODEL: dict[str, Any] = {"model": {"draft_model": drafter_model}, "blocks": {"draft_blocks": lambda: 1}}
"""Drafters that draft with a model -> the setting that each needs."""


@pytest.mark.parametrize("name", get_args(DrafterName))
def test_every_drafter_is_built_and_tested(name: Any) -> None:
    assert name in DRAFTERS, f"add {name!r} to DRAFTERS in tests/generation/speculative/drafters.py"
    assert name in _MODEL_FREE or name in WITH_MODEL, (
        f"add {name!r} to _MODEL_FREE in generation/speculative/registry.py; if it needs a setting, build it in "
        f"build_drafter there, and add the setting to WITH_MODEL here"
    )
    needed = {setting: make() for setting, make in WITH_MODEL.get(name, {}).items()}
    built = build_drafter(Speculation(drafter=name, **needed), target())
    assert type(built) is type(DRAFTERS[name](target()))
