"""Checksums add up over any division of a tensor, and change with any element, place or dtype."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_realloc.runtime.transfer.checksums import (
    SAMPLES_PER_TENSOR,
    BoxFamily,
    Checksums,
    HeldBox,
    box_checksum,
    samples_per_box,
)

SHAPES = [(), (1,), (7,), (40,), (3, 5), (1, 9), (12, 1), (2, 3, 4), (2, 1, 3, 5)]


def of_whole(tensor: Tensor) -> int:
    return int(box_checksum(tensor, (0,) * tensor.dim(), tensor.shape))


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cuts_of(size: int, rng: st.DataObject) -> list[tuple[int, int]]:
    inner = rng.draw(st.lists(st.integers(0, size), max_size=3))
    return list(itertools.pairwise(sorted({0, size, *inner})))


@given(st.sampled_from(SHAPES), st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]), st.data())
@settings(max_examples=60, deadline=None)
def test_boxes_add_up_to_the_whole_however_it_is_divided(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    whole, total = values(shape, dtype), 0
    for spans in itertools.product(*(cuts_of(size, data) for size in shape)):
        box = whole[tuple(slice(*span) for span in spans)]
        total += int(box_checksum(box, [start for start, _ in spans], shape))
    assert (total - of_whole(whole)) % (1 << 64) == 0


def naive(tensor: Tensor) -> int:
    """Return the checksum by Python's own integers, element by element."""

    def mixed(number: int) -> int:
        state = number * 0x9E3779B97F4A7C15 % (1 << 64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> shift)) * factor % (1 << 64)
        return (state ^ (state >> 31)) | 1

    width = tensor.shape[-1]
    bits = tensor.view(torch.int32).flatten().tolist()
    salt = 0xD1B54A32D192ED03
    return sum(mixed(i // width) * mixed((i % width + salt) % (1 << 64)) * b for i, b in enumerate(bits)) % (1 << 64)


def test_a_checksum_is_the_sum_of_keys_times_bits() -> None:
    tensor = values((3, 4, 5))
    assert of_whole(tensor) % (1 << 64) == naive(tensor)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_each_change_is_found(data: st.DataObject) -> None:
    """A flipped bit, two elements in each other's place, a range of zeros, a transposed matrix, rounded values."""
    shape = data.draw(st.sampled_from([(6, 6), (36,), (2, 3, 6)]))
    tensor = values(shape, seed=data.draw(st.integers(0, 5)))
    changed = tensor.clone()
    flat = changed.view(-1)
    one, other = data.draw(st.lists(st.integers(0, 35), min_size=2, max_size=2, unique=True))
    change = data.draw(st.sampled_from(["bit", "swap", "zero", "transpose", "round"]))
    if change == "bit":
        flat.view(torch.int32)[one] ^= 1 << data.draw(st.integers(0, 30))
    elif change == "swap":
        flat[one], flat[other] = float(flat[other]), float(flat[one])
    elif change == "zero":
        flat[min(one, other) : max(one, other)] = 0
    elif change == "transpose":
        changed = tensor.reshape(6, 6).t().contiguous().view(shape)
    else:
        changed = tensor.bfloat16().float()
    assert of_whole(changed) != of_whole(tensor)


def test_nan_of_any_bits_are_equal_and_zeros_of_either_sign_are_not() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert of_whole(quiet) == of_whole(torch.full((3,), math.nan))
    assert of_whole(torch.tensor([0.0])) != of_whole(torch.tensor([-0.0]))


def box(held: Tensor, offset: int, whole: Tensor) -> HeldBox:
    """Return rows from ``offset`` on, held by themselves."""
    shape = tuple(held.shape)
    return HeldBox(shape, (0, 0), shape, (offset, 0), tuple(whole.shape), samples_per_box(2), 0)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_checksums_of_parts_add_up_for_every_seed(is_sampled: bool) -> None:
    whole = {name: values((50, 40), seed=seed) for seed, name in enumerate("ab")}
    sums = torch.zeros(2, 5, dtype=torch.int64)
    for part in (slice(0, 20), slice(20, 50)):
        held = {name: tensor[part].clone() for name, tensor in whole.items()}
        family = BoxFamily(("a", "b"), (box(held["a"], part.start, whole["a"]),))
        checksums = Checksums([family], held, dtype=torch.bfloat16, is_sampled=is_sampled)
        for seed in range(5):
            sums[:, seed] += checksums.compute(seed)
    boxes = [
        HeldBox((stop - start, 40), (start, 0), (50, 40), (start, 0), (50, 40), samples_per_box(2), 0)
        for start, stop in ((0, 20), (20, 50))
    ]
    target = {name: tensor.bfloat16() for name, tensor in whole.items()}
    received = Checksums([BoxFamily(("a", "b"), tuple(boxes))], target, dtype=torch.bfloat16, is_sampled=is_sampled)
    for seed in range(5):
        assert torch.equal(received.compute(seed), sums[:, seed])
    assert len(set(sums[0].tolist())) == (5 if is_sampled else 1)


def test_samples_have_the_first_and_last_element_and_reach_all_others() -> None:
    """An element is found when its change changes the checksum."""
    tensor = torch.ones(100, 40)
    sampled = Checksums([BoxFamily(("a",), (HeldBox.whole((100, 40)),))], {"a": tensor}, dtype=None, is_sampled=True)
    reached, all_of_one = set[int](), list[int]()
    for seed in range(200):
        keys = _reached(sampled, seed)
        assert {0, 3999} <= keys
        reached |= keys
        all_of_one.append(len(keys))
    assert set(all_of_one) == {SAMPLES_PER_TENSOR}
    assert len(reached) > 0.99 * 4000  # 254 random elements of equal parts of 15.6: (1 - 1/15.6)**200 < 1e-5 are left


def _reached(checksums: Checksums, seed: int) -> set[int]:
    assert checksums._samples is not None
    return set(checksums._samples.draw(seed)[0].tolist())


def test_a_contiguous_change_longer_than_two_parts_is_always_found() -> None:
    tensor = values((64, 256))
    sampled = Checksums([BoxFamily(("a",), (HeldBox.whole((64, 256)),))], {"a": tensor}, dtype=None, is_sampled=True)
    before = [int(sampled.compute(seed)) for seed in range(30)]
    length = 2 * tensor.numel() // SAMPLES_PER_TENSOR
    for seed, start in enumerate(range(0, tensor.numel() - length, tensor.numel() // 30)):
        original = tensor.view(-1)[start : start + length].clone()
        tensor.view(-1)[start : start + length] = 0
        assert int(sampled.compute(seed % 30)) != before[seed % 30], start
        tensor.view(-1)[start : start + length] = original
