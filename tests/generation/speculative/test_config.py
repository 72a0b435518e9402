"""Settings of speculation: their representation, and errors for invalid ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.speculative.config import DrafterName
from tests.generation.markov import VOCABULARY, target
from tests.generation.speculative.drafters import RandomDrafter
from tests.models import tiny_model


def test_adaptive_rejection_refuses_a_drafter_that_anticipates() -> None:
    class Anticipating(RandomDrafter):
        anticipates = True

    for depth, verification in ((3, "reject"), (None, "match")):
        speculation = Speculation(drafter="none", verification=verification, num_draft_tokens=depth)  # type: ignore[arg-type]
        engine = GenerationEngine(target(), speculation=speculation, drafter=Anticipating(VOCABULARY))
        engine.generate([[5]], SamplingParams(max_new_tokens=4))
    adaptive = Speculation(drafter="none", verification="reject")
    engine = GenerationEngine(target(), speculation=adaptive, drafter=Anticipating(VOCABULARY))
    with pytest.raises(GenerationError, match=r"that of Anticipating may, by anticipates=True; use verification='mat"):
        engine.generate([[5]])


def test_the_representation_shows_changed_settings_and_the_class_of_a_model() -> None:
    assert repr(Speculation()) == "Speculation()"
    shown = repr(Speculation(drafter="model", draft_model=tiny_model("llama"), num_draft_tokens=3))
    assert shown == "Speculation(drafter='model', num_draft_tokens=3, draft_model=LlamaForCausalLM(...))"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "eagle"}, f"drafter='eagle' must be one of {', '.join(get_args(DrafterName))}"),
        ({"verification": "lenient"}, "verification='lenient' must be one of match, gumbel, reject"),
        ({"num_draft_tokens": -1}, "num_draft_tokens=-1 must be at least 0"),
        ({"max_draft_tokens": 0}, "max_draft_tokens=0 must be at least 1"),
        ({"drafter": "model"}, "drafter='model' needs draft_model"),
        (
            {"draft_model": "small"},
            "drafter='history' has no use for draft_model; leave it out, or set drafter='model'",
        ),
        ({"drafter": "blocks"}, "drafter='blocks' needs draft_blocks"),
        ({"draft_learning_rate": 1e-4}, "drafter='history' has no use for draft_learning_rate=0.0001"),
        ({"drafter": "model", "draft_model": "m", "draft_learning_rate": 0.0}, "must be a finite number above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Speculation(**settings)


def test_the_guide_lists_all_drafters() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "drafting.md").read_text()
    table = guide.partition("| `drafter` |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(get_args(DrafterName))
