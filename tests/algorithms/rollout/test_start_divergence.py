"""Whether a reference starts as the actor does, and how far the first rollout may diverge from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.rollout.start_divergence import mean_divergence, rounding_limit, starts_as
from lightning_realloc.batch.samples import Ragged, Samples
from tests.models import tiny_model

CONFIG, MODEL = LlamaConfig(), tiny_model("llama")
LORA = {"peft_type": "LORA"}


@pytest.mark.parametrize(
    ("actor", "reference", "alike"),
    [
        ({"source": "org/base"}, {"source": "org/base"}, True),
        ({"source": "."}, {"source": Path(".")}, True),
        ({"source": "org/base"}, {"source": "org/other"}, False),
        ({"source": CONFIG}, {"source": CONFIG}, True),
        ({"source": MODEL}, {"source": MODEL}, True),
        ({"source": MODEL}, {"source": tiny_model("llama")}, False),  # equal weights, perhaps by chance
        ({"source": "org/base", "peft": LORA}, {"source": "org/base", "shares": "actor"}, True),
        (
            {"source": "org/base", "peft": "saved"},
            {"source": "org/base", "shares": "actor"},
            False,
        ),  # named by the user
        ({"source": "org/base", "peft": "saved"}, {"source": "org/base", "peft": "saved"}, True),
        ({"source": "org/base", "peft": "saved"}, {"source": "org/base", "peft": "others"}, False),
        ({"source": "org/base", "quantization": {"load_in_4bit": True}}, {"source": "org/base"}, False),
    ],
)
def test_a_reference_starts_as_the_actor_with_its_source_and_adapters(
    actor: dict[str, Any], reference: dict[str, Any], alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    roles = Role(name="reference", trained=False, **reference), Role(name="actor", trained=True, **actor)
    assert starts_as(*roles) is alike


def test_the_limit_follows_the_least_precise_computation() -> None:
    wide, narrow = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    exact = rounding_limit(wide, precision="32-true", engine="native")
    rough = {
        rounding_limit(wide, precision="bf16-mixed", engine="native"),
        rounding_limit(wide, precision="32-true", engine="vllm"),
        rounding_limit(narrow, precision="32-true", engine="native"),
    }
    assert len(rough) == 1 and exact < rough.pop()


def test_the_divergence_is_per_token_of_responses_whose_rewards_are_known() -> None:
    responses = Ragged(torch.zeros(6, dtype=torch.int64), torch.tensor([1, 2, 3]))
    samples = Samples(torch.arange(3), {"response_ids": responses})
    assert mean_divergence(samples, None) is None
    assert mean_divergence(samples, torch.tensor(0.5)) == 0.5
    summed = samples.with_columns(kl_k1=torch.tensor([2.0, math.nan, 4.0]))
    assert mean_divergence(summed, None) == pytest.approx((2 + 4) / (1 + 3))
