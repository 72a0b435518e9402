"""Every bound of a healthy run: a run that is made unhealthy on purpose raises its alarm, and the page lists it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_realloc import Correction, SamplingParams
from lightning_realloc.callbacks import MetricAlarm
from lightning_realloc.callbacks.metric_alarm import HEALTHY
from lightning_realloc.rewards import Failed
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Batches, RecordedGRPO

PAGE = Path(__file__).parents[2] / "docs/healthy-runs.md"


def one_token(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward the share of one token, so that a policy that learns fast says nothing else."""
    return [sum(token == 5 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def all_equal(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward all responses alike."""
    return [1.0 for _ in completion_ids]


def at_random(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Reward nothing that can be learned."""
    return [hash(tuple(ids)) % 7 / 6.0 for ids in completion_ids]


def half_fails(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[Any]:
    """Fail for every other response."""
    return [Failed("odd") if number % 2 else float(len(ids)) for number, ids in enumerate(completion_ids)]


half_fails.on_failure = "mask"  # type: ignore[attr-defined]


class OtherEngine(RecordedGRPO):
    """GRPO whose engine adds an error to the logits of each token."""

    error = 2.0
    """Standard deviation."""

    def roll_out(self, actor: Any, prompts: Any) -> Any:
        """Generate with the error."""
        biases = self.error * torch.randn(actor._model.config.vocab_size, generator=torch.Generator().manual_seed(0))
        hook = actor._model.get_output_embeddings().register_forward_hook(lambda module, given, logits: logits + biases)
        try:
            return super().roll_out(actor, prompts)
        finally:
            hook.remove()


def made_as(kind: type[RecordedGRPO], **settings: Any) -> RecordedGRPO:
    """Return GRPO of a subclass."""
    made = runs.grpo(**settings)
    made.__class__ = kind
    return made


class Exploding(RecordedGRPO):
    """GRPO whose gradients are not finite."""

    def actor_loss(self, *args: Any) -> Any:
        """Return an infinite loss."""
        loss = super().actor_loss(*args)
        return replace(loss, value=loss.value * float("inf"))


FAST = {"learning_rate": 0.05, "kl_coef": 1e-6}
"""A learning rate that no model survives."""
UNHEALTHY: Mapping[str, Callable[[], RecordedGRPO]] = {
    "actor/entropy": partial(runs.grpo, reward=one_token, sampling=SamplingParams(n=8, max_new_tokens=4), **FAST),
    "actor/kl": partial(runs.grpo, **FAST),
    "actor/clip_fraction": partial(
        runs.grpo, reward=at_random, kl_coef=0.0, learning_rate=0.02, train_options=runs.options(num_epochs=4)
    ),
    "actor/engine_kl": partial(made_as, OtherEngine, correction="token-truncate"),
    "actor/effective_sample_size": partial(made_as, OtherEngine, correction=Correction(weigh="sequence")),
    "actor/correction_excluded": partial(made_as, OtherEngine, correction="geometric"),
    "frac_reward_zero_std": partial(runs.grpo, reward=all_equal),
    "stopped/length": partial(runs.grpo, sampling=SamplingParams(n=2, max_new_tokens=2)),
    "reward_failures/*": partial(runs.grpo, reward=half_fails, learning_rate=0.0),
    "*/skipped_steps": partial(made_as, Exploding),
}
"""Metric -> a run in which it leaves its range."""
FURTHER = {"actor/entropy": 20, "actor/kl": 9, "actor/clip_fraction": 9}
"""Iterations until it does."""


@pytest.mark.parametrize("name", matrix(UNHEALTHY, "actor/engine_kl", "stopped/length"))
def test_an_unhealthy_run_raises_its_alarm(caplog: pytest.LogCaptureFixture, name: str) -> None:
    bound = HEALTHY[name]
    batches = Batches(bound.num_iterations + FURTHER.get(name, 0))
    with caplog.at_level(logging.WARNING):
        trainer = runs.trainer("realloc", 1, callbacks=[MetricAlarm("healthy", spikes=())])
        trainer.fit(UNHEALTHY[name](), batches)
    alarms = [record.getMessage() for record in caplog.records if record.getMessage().startswith("iteration ")]
    assert any(re.search(rf"{name.replace('*', '[a-z_]+')} is .* {bound.advice}", alarm) for alarm in alarms), alarms


def test_a_usual_run_raises_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = runs.trainer("realloc", 1, callbacks=[MetricAlarm("healthy")])
        trainer.fit(runs.grpo(correction="token-truncate", learning_rate=1e-3), Batches(12))
    assert [record.getMessage() for record in caplog.records if "iteration" in record.getMessage()] == []


def test_every_bound_has_an_unhealthy_run_and_a_line_on_the_page() -> None:
    assert UNHEALTHY.keys() == HEALTHY.keys()
    shown = {}
    for line in PAGE.read_text().splitlines():
        if found := re.match(r"\| `([^`]+)` \| (above|below) ([\d.]+) \| (\d+) \|", line):
            shown[found[1]] = (found[2], float(found[3]), int(found[4]))
    assert shown == {
        name: ("above", bound.high, bound.num_iterations) if bound.low is None else
        ("below", bound.low, bound.num_iterations) for name, bound in HEALTHY.items()
    }  # fmt: skip
