"""Groups of samples that take turns, and the commands that say what they run."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.generation.core.step import DecodeRow, ForwardStep, PrefillChunk
from lightning_realloc.generation.schedule.slot_plan import Prompt
from lightning_realloc.generation.staged.commands import SlotChange, StageStep
from lightning_realloc.generation.staged.groups import divide_prompts, own_samples
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=9), st.integers(1, 4))
def test_groups_share_all_samples_evenly_and_long_ones_come_first(asked: list[tuple[int, int]], count: int) -> None:
    prompts, first = [], 0
    for number, (num_samples, hint) in enumerate(asked):
        prompts.append(Prompt(number, 5, tuple(range(first, first + num_samples)), hint))
        first += num_samples
    groups = divide_prompts(prompts, count)
    assert len(groups) == count
    sizes = []
    taken: Counter[int] = Counter()
    for group in groups:
        places, own = own_samples(group)
        assert [place for prompt in own for place in prompt.samples] == list(range(len(places)))
        assert [prompt.length_hint for prompt in own] == sorted((p.length_hint for p in own), reverse=True)
        taken.update(places)
        sizes.append(len(places))
    assert taken == Counter(range(first))
    assert max(sizes) <= -(-first // count)


def test_a_prompts_samples_stay_together_where_groups_stay_even() -> None:
    prompts = [Prompt(number, 5, (2 * number, 2 * number + 1)) for number in range(4)]
    groups = divide_prompts(prompts, 2)
    assert [[prompt.samples for prompt in group] for group in groups] == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


def test_a_command_arrives_with_the_tokens_of_its_step() -> None:
    prefill = PrefillChunk((4, 5, 6), (0, 2), 7, {"pixels": torch.arange(4.0)})
    step = ForwardStep([prefill], [DecodeRow((9,), 3, key=11), DecodeRow((8, 7, 6), 5, held=(1, 2))])
    sent = StageStep.of(1, [SlotChange("copy", (0, (1, 2), 5))], step)
    received = decode_value(encode_value(sent))
    assert isinstance(received, StageStep) and received[:2] == sent[:2]
    assert received.rows == [DecodeRow([9], 3), DecodeRow([8, 7, 6], 5)]
    (read,) = received.prefills
    assert (list(read.tokens), list(read.slots), read.begin) == ([4, 5, 6], [0, 2], 7)
    assert torch.equal(read.extras["pixels"], prefill.extras["pixels"])
