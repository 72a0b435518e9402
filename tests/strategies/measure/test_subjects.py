"""Decoding steps are timed as they run in a generation."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from lightning_realloc.generation import GenerationEngine
from lightning_realloc.strategies.measure import subjects
from lightning_realloc.tuning.estimate.pass_samples import Size
from tests.models import tiny_model


def test_every_decoding_step_but_the_first_is_timed_by_an_engine_that_may_capture_steps(monkeypatch: Any) -> None:
    ticks, locksteps = itertools.count(), []

    class Engine(GenerationEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            locksteps.append(options["lockstep"])
            super().__init__(*args, **options)

    monkeypatch.setattr(subjects, "GenerationEngine", Engine)
    machine: Any = SimpleNamespace(facts=SimpleNamespace(device=torch.device("cpu")), clock=lambda: next(ticks))
    decode = subjects._make_decode(machine)
    assert decode(tiny_model("llama").eval(), None, Size(3, 5, 0), 4) == [1, 1, 1, 1]
    assert next(ticks) == 6  # the step that reads the prompt, the first decoding step, and four timed ones
    assert locksteps == [None]  # in lockstep nothing is captured
