"""Checksums of tensors that add up over the boxes into which a tensor is divided. This module needs torch alone.

The checksum of a box is the sum of key(index) * bits(element) modulo 2**64, where the index is the element's in the
whole tensor. So ranks that hold disjoint boxes add up their checksums, and compare the sum with that of a rank that
holds the boxes together. Keys are odd: a change of one element always changes the checksum. Any other change keeps it
with a probability of about 2**-32, or less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLES_PER_TENSOR = 256
"""Elements of a tensor that a sampled checksum reads. Raising it finds smaller changes and takes longer."""
_MIN_SAMPLES_PER_BOX = 4
_CHUNK_ELEMENTS = 1 << 16
"""Elements whose bits are in memory at the same time; they fit into a core's cache."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN_BITS = 0x7FC0
_GOLDEN, _MIX_1, _MIX_2, _COLUMN_SALT = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD1B54A32D192ED03)
)


class HeldBox(NamedTuple):
    """A box of a tensor, as it lies in the tensor that a rank holds and in the whole one."""

    shape: tuple[int, ...]
    held_offset: tuple[int, ...]
    """First index of the box in the held tensor."""
    held_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """First index of the box in the whole tensor."""
    whole_shape: tuple[int, ...]
    num_samples: int
    """Elements that a sampled checksum reads; see `samples_per_box`."""
    column: int
    """Checksum that the box belongs to."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> HeldBox:
        """Return the box of a whole tensor."""
        shape, start = tuple(shape), (0,) * len(shape)
        return cls(shape, start, shape, start, shape, samples_per_box(1), 0)


class BoxFamily(NamedTuple):
    """Boxes at the same places of several tensors of one shape and dtype."""

    names: tuple[str, ...]
    boxes: tuple[HeldBox, ...]

    @property
    def num_columns(self) -> int:
        """Number of checksums of each tensor."""
        return 1 + max((box.column for box in self.boxes), default=-1)


class Checksums:
    """Checksums of boxes of the tensors in ``tensors``, whose storage stays the same.

    Args:
        families: Boxes; each name is in ``tensors``.
        dtype: Elements are cast to it first; None: none is.
        is_sampled: Whether a few elements of each box count, other ones for every seed, or all of them.
    """

    def __init__(
        self,
        families: Sequence[BoxFamily],
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None,
        is_sampled: bool,
    ) -> None:
        self._families = [(family, [tensors[name] for name in family.names]) for family in families if family.names]
        self._dtype = dtype
        self.size = sum(len(family.names) * family.num_columns for family, _ in self._families)
        """Number of checksums: for each family, those of each tensor, column by column."""
        device = next((held[0].device for _, held in self._families), torch.device("cpu"))
        boxes = [box for family, _ in self._families for box in family.boxes]
        self._samples = _Samples(boxes, device) if is_sampled and boxes else None
        self._device = device

    @torch.no_grad()
    def compute(self, seed: int) -> Tensor:
        """Return all checksums, as a (size,) int64 tensor on the tensors' device. ``seed`` chooses the samples."""
        found = [torch.empty(0, dtype=torch.int64, device=self._device)]
        if self._samples is None:
            found += [self._sum_all(family, held).flatten() for family, held in self._families]
            return torch.cat(found)
        places, keys, columns = self._samples.draw(seed)
        start = 0
        for family, held in self._families:
            part = slice(start, start + sum(_num_samples(box) for box in family.boxes))
            values = torch.stack([torch.take(tensor, places[part]) for tensor in held])
            products = element_bits(values if self._dtype is None else values.to(self._dtype)).mul_(keys[part])
            sums = products.new_zeros(len(held), family.num_columns)
            found.append(sums.index_add_(1, columns[part], products).flatten())
            start = part.stop
        return torch.cat(found)

    def _sum_all(self, family: BoxFamily, held: Sequence[Tensor]) -> Tensor:
        sums = torch.zeros(len(held), family.num_columns, dtype=torch.int64, device=self._device)
        for row, tensor in zip(sums, held, strict=True):
            for box in family.boxes:
                values = tensor
                for dim, (first, length) in enumerate(zip(box.held_offset, box.shape, strict=True)):
                    values = values.narrow(dim, first, length)
                row[box.column] += box_checksum(values, box.offset, box.whole_shape, dtype=self._dtype)
        return sums


def box_checksum(
    values: Tensor, offset: Sequence[int], whole_shape: Sequence[int], *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the checksum of all elements of a box, an int64 scalar.

    Args:
        values: The box.
        offset: First index of the box in the whole tensor.
        whole_shape: Shape of the whole tensor.
        dtype: Elements are cast to it first; None: they are not.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    indices = torch.zeros((), dtype=torch.int64, device=values.device)
    spans = [first + torch.arange(n, device=values.device) for n, first in zip(values.shape, offset, strict=True)]
    *leading, columns = spans or [indices.view(1)]
    for span, size in zip(leading, whole_shape, strict=False):
        indices = indices.unsqueeze(-1) * size + span
    rows, column_keys = mixed(indices.flatten()), mixed(columns + _COLUMN_SALT)
    table = values.reshape(len(rows), len(columns))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = max(1, _CHUNK_ELEMENTS // len(columns))
    for part, keys in zip(table.split(step), rows.split(step), strict=True):
        bits = element_bits(part if dtype is None else part.to(dtype))
        total += bits.mul_(column_keys).sum(1).mul_(keys).sum()
    return total


def element_bits(values: Tensor) -> Tensor:
    """Return the bits of each element as int64, of all NaNs the same: casts give them various bits."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).to(torch.int64, copy=True)
    if not values.is_floating_point() or values.element_size() == 1:
        return bits
    if values.device.type == "cpu" and not values.sum().isnan():  # three times as fast as looking at each element
        return bits
    return bits.masked_fill_(values != values, _NAN_BITS)


def mixed(numbers: Tensor) -> Tensor:
    """Return odd pseudorandom numbers, one for each int64 number.

    Source: the finalizer of SplitMix64, Steele et al., doi:10.1145/2660193.2660195.
    """
    state = numbers * _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        state = (state ^ _shifted(state, shift)) * factor
    return (state ^ _shifted(state, 31)) | 1


def samples_per_box(num_boxes: int) -> int:
    """Return how many elements to read of each of the boxes that make up a tensor."""
    return max(_MIN_SAMPLES_PER_BOX, SAMPLES_PER_TENSOR // num_boxes)


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """Return the numbers shifted right as unsigned ones."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _num_samples(box: HeldBox) -> int:
    return min(box.num_samples, torch.Size(box.shape).numel())


class _Samples:
    """Places of samples: the first and the last element of each box, and a random one of every equal part between.

    The places of all boxes are computed together, since boxes are many and small; and anew for every seed, since tables
    would take as much memory as a small model.
    """

    def __init__(self, boxes: Sequence[HeldBox], device: torch.device) -> None:
        self._num_dims = max(1, *(len(box.shape) for box in boxes))
        geometry = [_padded_geometry(box, self._num_dims) for box in boxes]
        self._geometry = torch.tensor(geometry, dtype=torch.int64, device=device).view(len(boxes), 5, self._num_dims)
        self._counts, self._columns = (
            torch.tensor(values, device=device) for values in ([*map(_num_samples, boxes)], [b.column for b in boxes])
        )

    def draw(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat indices in the held tensors, keys, and columns; three (N,) int64 tensors, box by box."""
        counts, device = self._counts, self._counts.device
        owner = torch.arange(len(counts), device=device).repeat_interleave(counts)
        numbers = torch.arange(len(owner), device=device) - (counts.cumsum(0) - counts)[owner]
        rest = self._positions(numbers, owner, mixed(torch.tensor(seed, device=device)))
        held, rows, columns = (torch.zeros_like(rest) for _ in range(3))
        sizes, held_offsets, held_shapes, offsets, shapes = self._geometry.unbind(1)
        strides = _strides(sizes), _strides(held_shapes), _strides(shapes[:, :-1])
        for dim in range(self._num_dims):
            index = rest // strides[0][owner, dim]
            rest = rest - index * strides[0][owner, dim]
            held += (index + held_offsets[owner, dim]) * strides[1][owner, dim]
            place = index + offsets[owner, dim]
            if dim == self._num_dims - 1:
                columns = place
            else:
                rows += place * strides[2][owner, dim]
        return held, mixed(rows) * mixed(columns + _COLUMN_SALT), self._columns[owner]

    def _positions(self, numbers: Tensor, owner: Tensor, seed: Tensor) -> Tensor:
        """Return the flat index in its box of each box's numbered samples."""
        count, numel = self._counts[owner], self._geometry[:, 0].prod(1)[owner]
        low, high = (number * numel // count for number in (numbers, numbers + 1))
        is_first, is_last = numbers == 0, numbers == count - 1
        between = low + _shifted(mixed(numbers + seed), 1) % (high - low)
        return torch.where(is_first, low, torch.where(is_last, high - 1, between))


def _strides(shapes: Tensor) -> Tensor:
    """Return the strides of contiguous tensors, for (boxes, dims) shapes."""
    ones = shapes.new_ones(len(shapes), 1)
    return torch.cat([shapes, ones], 1).flip(1).cumprod(1).flip(1)[:, 1:]


def _padded_geometry(box: HeldBox, num_dims: int) -> list[int]:
    """Return sizes, offsets and shapes of a box with leading dims of size 1."""
    pad = num_dims - len(box.shape)
    ones, zeros = (1,) * pad, (0,) * pad
    return [
        *(*ones, *box.shape, *zeros, *box.held_offset, *ones, *box.held_shape),
        *(*zeros, *box.offset, *ones, *box.whole_shape),
    ]
