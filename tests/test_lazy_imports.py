"""Parts of the package that nothing imports or reads before they are needed, found in one fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
found = {}

def loaded(part):
    return [name for name in sys.modules if part in name]

import lightning_realloc.generation.engine, lightning_realloc.generation.loop.run
found["speculative decoding"] = loaded("generation.speculative")

from lightning_realloc.generation import GenerationEngine
from lightning_realloc import DPO, SamplingParams, setting_hints
from tests.models import tiny_model
GenerationEngine(tiny_model("llama")).generate([[5]], SamplingParams(max_new_tokens=2))
found["rebalancing"] = loaded("generation.rebalance")

tables = setting_hints._read_tables.cache_info
DPO("x", beta=0.3)
found["hints"] = tables().currsize
try:
    SamplingParams(max_tokens=2)
except ValueError:
    found["hints after an unknown setting"] = tables().currsize

import lightning_realloc.cli, lightning_realloc.rewards.ray_reward
found["ray"] = "ray" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Mapping[str, Any]:
    """What the script had loaded after each step."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_plain_generation_imports_nothing_of_speculative_decoding(found: Mapping[str, Any]) -> None:
    assert found["speculative decoding"] == []


def test_an_engine_without_peers_does_not_import_rebalance(found: Mapping[str, Any]) -> None:
    assert found["rebalancing"] == []


def test_hints_are_loaded_only_after_an_unknown_setting(found: Mapping[str, Any]) -> None:
    assert found["hints"] == 0
    assert found["hints after an unknown setting"] == 1


def test_nothing_imports_ray_before_it_is_asked_for(found: Mapping[str, Any]) -> None:
    assert found["ray"] is False
