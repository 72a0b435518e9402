"""Samples leave with what they hold at that moment, whatever was sent ahead."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.rebalance.handover import SampleHandover
from lightning_realloc.generation.rebalance.load import LiveSample, SampleMove
from lightning_realloc.generation.rebalance.migrated_sample import (
    MigratedSample,
    SampleOrigin,
    pack_samples,
    unpack_samples,
)
from lightning_realloc.generation.rebalance.peers import Peers


@dataclass
class OneSample:
    """Access to a rank's only sample, with a byte of keys and values for each position."""

    sample: Sample
    running: list[int] = field(default_factory=lambda: [0])
    queued: list[int] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [self.sample]

    def describe_cache(self) -> list[LayerShape]:
        return []

    def read_cache(self, index: int, begin: int, end: int) -> Tensor:
        assert index in self.running, "a sample without a slot has no keys and values"
        return torch.arange(begin, end, dtype=torch.uint8)

    def settle(self) -> None:
        """No step is in flight."""

    def remove(self, index: int) -> None:
        (self.running if index in self.running else self.queued).remove(index)


class Channel:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, to: int, number: int, content: Tensor) -> None:
        self.sent.append(content)

    def receive(self, source: int, number: int) -> None:
        raise AssertionError("this rank only sends")


@pytest.mark.parametrize(("is_preempted", "num_ahead", "after"), [(False, 3, [(3, 5)]), (True, 0, [])])
def test_a_sample_that_was_preempted_after_its_keys_and_values_left_is_sent_as_tokens(
    is_preempted: bool, num_ahead: int, after: list[tuple[int, int]]
) -> None:
    sample = Sample(7, 0, ModelInput((5, 6)), 20, 1)
    sample.grow([8, 9], [0.0, 0.0])  # three positions are read, the last token is not
    access, channel, pace = OneSample(sample), Channel(), SimpleNamespace(record_stall=lambda seconds: None)
    mailbox: Any = SimpleNamespace(bulk_channel=channel)
    handover = SampleHandover(access, Peers(mailbox, 0, (1,), "all"), pace, None, clock=lambda: 0.0)  # type: ignore[arg-type]
    handover.begin([SampleMove(7, 0, 1, "send")], [LiveSample(7, 3, 10.0, None)], current_round=1)
    if is_preempted:
        access.running, access.queued, sample.num_read = [], [0], 0
    else:
        sample.grow([10, 11], [0.0, 0.0])
    handover.hand_over_all()
    (_, ahead, _), (migrated, rest, _) = map(unpack_samples, channel.sent)
    assert [(span.begin, span.end) for span in ahead] == [(0, 3)]
    assert [(span.begin, span.end) for span in rest] == after
    assert [(each.sample.token_ids, each.num_sent) for each in migrated] == [(sample.token_ids, num_ahead)]


def test_further_inputs_and_the_key_of_a_prompt_travel_with_its_sample() -> None:
    inputs = [ModelInput((5, 6)), ModelInput((5, 6), {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1)}, 3)]
    sent = [MigratedSample(SampleOrigin(0, k, k), Sample(k, k, given, 20, 1)) for k, given in enumerate(inputs)]
    migrated, _, _ = unpack_samples(pack_samples(sent))
    assert [each.sample.input for each in migrated] == inputs
    assert not migrated[0].sample.input.extras
    for name, values in inputs[1].extras.items():
        assert torch.equal(migrated[1].sample.input.extras[name], values)
