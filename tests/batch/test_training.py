"""Optimizer steps from samples: every sample once, the same plan on every rank, no plan without samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.shares import MicroBatch, micro_batch_plan
from lightning_realloc.batch.training import (
    Totals,
    TrainOptions,
    halved,
    minibatch_positions,
    num_counted_tokens,
    pack_columns,
    train_steps,
)
from lightning_realloc.errors import ConfigError, DataError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=24)


@given(lengths=LENGTHS, num_shares=st.integers(1, 5), max_tokens=st.integers(30, 90), equal_counts=st.booleans())
def test_micro_batches_hold_every_sample_once(
    lengths: list[int], num_shares: int, max_tokens: int, equal_counts: bool
) -> None:
    plans = micro_batch_plan(lengths, num_shares, max_tokens=max_tokens, equal_counts=equal_counts, call="actor.train")
    assert len(plans) == num_shares
    counted = [position for plan in plans for micro in plan if micro.counts for position in micro.positions]
    assert sorted(counted) == list(range(len(lengths)))
    for plan in plans:
        # Every rank runs at least one, so that it takes part in reducing gradients.
        assert plan
        assert all(sum(lengths[position] for position in micro.positions) <= max_tokens for micro in plan)
    if equal_counts:
        assert len({len(plan) for plan in plans}) == 1


@given(lengths=LENGTHS, num_shares=st.integers(1, 5), max_tokens=st.integers(30, 90))
def test_repetitions_come_last_and_change_nothing_else(lengths: list[int], num_shares: int, max_tokens: int) -> None:
    equal = micro_batch_plan(lengths, num_shares, max_tokens=max_tokens, equal_counts=True, call="actor.train")
    ragged = micro_batch_plan(lengths, num_shares, max_tokens=max_tokens, equal_counts=False, call="actor.train")
    for ours, theirs in zip(equal, ragged, strict=True):
        assert [micro for micro in ours if micro.counts] == [micro for micro in theirs if micro.counts]
        counts = [micro.counts for micro in ours]
        assert counts == sorted(counts, reverse=True)
    # The repeated sample is the shortest one.
    repeated = {micro.positions for plan in equal for micro in plan if not micro.counts}
    assert all(lengths[positions[0]] == min(lengths) and len(positions) == 1 for positions in repeated)


def test_a_sequence_that_fits_no_micro_batch_is_named() -> None:
    with pytest.raises(DataError, match=r"a sequence must fit one micro-batch of actor.train; one has 12 tokens"):
        micro_batch_plan([4, 12], 1, max_tokens=8, equal_counts=False, call="actor.train")


@given(
    groups=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=12),
    group_size=st.integers(1, 3), num_shares=st.integers(1, 4), num_minibatches=st.integers(1, 3),
    equal_counts=st.booleans(),
)  # fmt: skip
def test_groups_are_never_split(
    groups: list[list[int]], group_size: int, num_shares: int, num_minibatches: int, equal_counts: bool
) -> None:
    lengths = [length for group in groups for length in group[:group_size]]
    options = TrainOptions(num_epochs=2, num_minibatches=min(num_minibatches, len(groups)))
    steps = train_steps(
        np.array(lengths), options, num_shares, max_tokens=40, equal_counts=equal_counts, order_seeds=(1, 2),
        group_size=group_size, call="actor.train",
    )  # fmt: skip
    assert len(steps) == 2 * options.num_minibatches
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        assert sorted(position for step in epoch for position in step.positions) == list(range(len(lengths)))
    for step in steps:
        counted = [position for share in step.shares for m in share if m.counts for position in m.positions]
        assert sorted(counted) == list(step.positions)
        for micro in (micro for share in step.shares for micro in share):
            assert sum(lengths[position] for position in micro.positions) <= 40
            firsts = micro.positions[::group_size]
            # whole groups, each in its order: 4, 5, 0, 1 for pairs, never 5, 0
            assert list(micro.positions) == [first + place for first in firsts for place in range(group_size)]
            assert all(first % group_size == 0 for first in firsts)


@given(num_groups=st.integers(1, 20), group_size=st.integers(1, 3), times=st.integers(0, 6), counts=st.booleans())
def test_halved_micro_batches_hold_the_same_groups_in_order(
    num_groups: int, group_size: int, times: int, counts: bool
) -> None:
    whole = MicroBatch(tuple(range(num_groups * group_size)), counts)
    parts = halved([whole], times, group_size)
    assert [position for part in parts for position in part.positions] == list(whole.positions)
    assert all(part.counts == counts and len(part.positions) % group_size == 0 for part in parts)
    assert all(0 < len(part.positions) // group_size <= math.ceil(num_groups / 2**times) for part in parts)


@given(lengths=LENGTHS, num_shares=st.integers(1, 5), max_tokens=st.integers(30, 90), equal_counts=st.booleans())
def test_pairs_are_planned_like_single_samples_of_their_total_length(
    lengths: list[int], num_shares: int, max_tokens: int, equal_counts: bool
) -> None:
    halves = [part for length in lengths for part in (length // 2, length - length // 2)]
    pairs = micro_batch_plan(
        halves, num_shares, max_tokens=max_tokens, equal_counts=equal_counts, call="actor.train", group_size=2
    )
    single = micro_batch_plan(lengths, num_shares, max_tokens=max_tokens, equal_counts=equal_counts, call="actor.train")
    assert [[(tuple(p // 2 for p in m.positions[::2]), m.counts) for m in plan] for plan in pairs] == [
        [(m.positions, m.counts) for m in plan] for plan in single
    ]


def test_errors_name_pairs_where_samples_come_in_pairs() -> None:
    with pytest.raises(DataError, match=r"a pair must fit one micro-batch of actor.train; one has 12 tokens"):
        micro_batch_plan([2, 2, 6, 6], 1, max_tokens=8, equal_counts=False, call="actor.train", group_size=2)
    with pytest.raises(DataError, match=r"come in groups of 2, and there are 3"):
        micro_batch_plan([2, 2, 6], 1, max_tokens=8, equal_counts=False, call="actor.train", group_size=2)
    with pytest.raises(ConfigError, match=r"num_minibatches=3 needs as many pairs in an iteration, there are 2"):
        minibatch_positions(4, 3, seed=0, group_size=2)
    assert Totals(num_sequences=6, num_tokens=9, group_size=2).num_groups == 3


def test_a_limit_is_exceeded_by_larger_values_and_nan_and_refused_if_not_measured() -> None:
    options = TrainOptions(stop_above={"ratio": 1.5, "kl": 0.1})
    assert options.exceeded({"ratio": 1.5, "kl": 0.1, "loss": 9.0}) is None
    assert options.exceeded({"ratio": 1.4, "kl": 0.2}) == "kl"
    assert options.exceeded({"ratio": float("nan"), "kl": 0.0}) == "ratio"
    with pytest.raises(
        ConfigError, match="stop_above names 'kl', which this loss does not measure; it measures loss, "
    ):
        options.exceeded({"ratio": 1.0, "loss": 9.0})
    with pytest.raises(ConfigError, match="it measures nothing: name one of its metrics, or leave 'ratio' out"):
        options.exceeded({})
    with pytest.raises(ConfigError, match=r"stop_above\['kl'\]=nan must be a finite number; leave it out to never"):
        TrainOptions(stop_above={"kl": float("nan")})


@given(num_samples=st.integers(1, 40), num_minibatches=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_mini_batches_partition_the_samples_evenly(num_samples: int, num_minibatches: int, seed: int) -> None:
    if num_samples < num_minibatches:
        with pytest.raises(ConfigError, match="needs as many samples in an iteration"):
            minibatch_positions(num_samples, num_minibatches, seed=seed)
        return
    parts = minibatch_positions(num_samples, num_minibatches, seed=seed)
    assert sorted(position for part in parts for position in part) == list(range(num_samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(list(part) == sorted(part) for part in parts)
    again = minibatch_positions(num_samples, num_minibatches, seed=seed)
    assert all(map(np.array_equal, parts, again))


def test_another_seed_gives_another_order() -> None:
    first, second = (minibatch_positions(20, 2, seed=seed)[0].tolist() for seed in (0, 1))
    assert first != second
    # A single mini-batch holds all samples in order.
    assert [part.tolist() for part in minibatch_positions(3, 1, seed=5)] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_epochs": 0}, "num_epochs=0 must be a whole number, at least 1"),
        ({"num_minibatches": -1}, "num_minibatches=-1 must be a whole number, at least 1"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0 must be a whole number, at least 1"),
        (
            {"max_skipped_steps": 0},
            "max_skipped_steps=0 must be a whole number, at least 1; use None to never stop the run",
        ),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0 must be a positive number; use None to leave gradients alone"),
        ({"max_grad_norm": True}, r"max_grad_norm=True must be a positive number"),
        ({"max_grad_norm": "1"}, r"max_grad_norm='1' must be a positive number"),
        ({"num_epochs": True}, r"num_epochs=True must be a whole number, at least 1"),
        ({"num_minibatches": 1.5}, r"num_minibatches=1\.5 must be a whole number, at least 1"),
        ({"max_skipped_steps": "3"}, r"max_skipped_steps='3' must be a whole number, at least 1; use None to never"),
    ],
)
def test_options_that_cannot_work_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**settings)  # type: ignore[arg-type]


def test_a_mini_batch_without_a_response_token_is_refused() -> None:
    # Every loss divides by the number of response tokens: the weights would become NaN.
    with pytest.raises(DataError, match="needs at least one response token; its 2 sequences have none"):
        Totals(num_sequences=2, num_tokens=0)


def test_columns_of_numbers_are_packed_and_objects_are_left_out() -> None:
    samples = Samples(
        torch.arange(2),
        {
            "prompt_ids": Ragged.from_list([[5], [6, 7]]),
            "response_ids": Ragged.from_list([[8, 9], [10]]),
            "behaviour_logprobs": Ragged.from_list([[-1.0, -2.0], [-3.0]], dtype=torch.float32),
            "advantages": torch.tensor([0.5, -0.5]),
            "prompt": ("a", "b"),
        },
    )
    packed = pack_columns(samples, torch.device("cpu"))
    assert sorted(packed.columns) == ["advantages", "behaviour_logprobs"]
    assert packed.input_ids.tolist() == [[5, 8, 9, 6, 7, 10]]
    assert packed["behaviour_logprobs"].tolist() == [0.0, -1.0, -2.0, 0.0, 0.0, -3.0]
    assert packed.per_token(packed["advantages"]).tolist() == [0.5, 0.5, 0.5, -0.5, -0.5, -0.5]


def test_tokens_of_samples_with_a_nan_are_not_counted() -> None:
    nan = float("nan")
    columns = {
        "response_ids": Ragged.from_list([[1, 2], [3, 4, 5], [6]]),
        "per_sample": torch.tensor([0.0, nan, 1.0]),
        "per_token": Ragged.from_list([[0.0, 1.0], [0.0, 1.0, 2.0], [nan]], dtype=torch.float32),
    }
    samples = Samples(torch.arange(3), columns)
    assert num_counted_tokens(samples, ()) == 6
    assert num_counted_tokens(samples, ("per_sample",)) == 3
    assert num_counted_tokens(samples, ("per_sample", "per_token")) == 2
    heard = Ragged.from_list([[True, False], [True] * 3, [True]], dtype=torch.bool)
    assert num_counted_tokens(samples.with_columns(model_mask=heard), ("per_sample",)) == 2
