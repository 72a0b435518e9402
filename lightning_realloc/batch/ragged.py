"""Ragged sequences: B sequences of different lengths in one tensor, without padding.

Lengths always live on the host, so planning and bookkeeping never wait for a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_realloc.batch.shares import Integers
from lightning_realloc.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """B sequences of different lengths, concatenated.

    Example:
        >>> Ragged.from_list([[1, 2, 3], [4]]).lengths.tolist()
        [3, 1]
    """

    values: Tensor
    """Concatenated sequences: shape (N, ...), on any device."""
    lengths: Tensor
    """Length of each sequence: (B,) int64 on the host, summing to N. A sequence may be empty."""

    def __post_init__(self) -> None:
        check_host_integers(self.lengths, "Ragged.lengths")
        if self.values.dim() == 0:
            raise DataError("Ragged.values needs a token dimension; got a scalar tensor, pass shape (N, ...)")
        if self.lengths.numel() and int(self.lengths.min()) < 0:
            raise DataError(f"Ragged.lengths may not be negative; got {int(self.lengths.min())}")
        if int(self.lengths.sum()) != self.values.shape[0]:
            raise DataError(
                f"Ragged.lengths must sum to the {self.values.shape[0]} tokens of Ragged.values; "
                f"they sum to {int(self.lengths.sum())}"
            )

    @classmethod
    def from_list(cls, sequences: Iterable[Sequence[float] | Tensor], *, dtype: torch.dtype | None = None) -> Ragged:
        """Concatenate the sequences; ``dtype`` defaults to the tensors' own, and to int64 for Python numbers."""
        rows = [row if isinstance(row, Tensor) else torch.tensor(row, dtype=dtype or torch.int64) for row in sequences]
        lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
        if not rows:
            return cls(torch.empty(0, dtype=dtype or torch.int64), lengths)
        values = torch.cat(rows)
        return cls(values if dtype is None else values.to(dtype), lengths)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return all sequences of the first part, then those of the second, and so on."""
        if not parts:
            raise DataError("Ragged.concatenate needs at least one part; got none")
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def num_tokens(self) -> int:
        """Sum of all lengths, N."""
        return int(self.values.shape[0])

    @property
    def offsets(self) -> Tensor:
        """Bounds of the sequences, (B + 1,) int64 on the host: sequence b is ``values[offsets[b]:offsets[b + 1]]``."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def split(self) -> list[Tensor]:
        """Return the sequences as B views of ``values``."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def to_lists(self) -> list[list[int]]:
        """Return the sequences as Python lists; floats if ``values`` are floats."""
        flat, offsets = self.values.tolist(), self.offsets.tolist()
        return [flat[begin:end] for begin, end in itertools.pairwise(offsets)]

    def select(self, indices: Sequence[int] | Tensor | Integers) -> Ragged:
        """Return the sequences at these positions, in this order; a position may repeat."""
        rows, offsets = as_indices(indices, len(self)), self.offsets
        lengths = self.lengths[rows]
        if not self.values.numel():  # lengths alone, of all samples of an iteration
            return Ragged(self.values.new_empty(int(lengths.sum()), *self.values.shape[1:]), lengths)
        begins, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
        parts = [self.values[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return Ragged(torch.cat(parts) if parts else self.values[:0], lengths)

    def split_by(self, sizes: Sequence[int]) -> list[Ragged]:
        """Return so many sequences after each other, without copies; the sizes add up to all sequences."""
        lengths = self.lengths.split(list(sizes))
        values = self.values.split([int(part.sum()) for part in lengths])
        return [Ragged(*part) for part in zip(values, lengths, strict=True)]

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same sequences with ``values`` on ``device``."""
        return Ragged(self.values.to(device), self.lengths)

    def equals(self, other: Ragged, *, atol: float = 0.0) -> bool:
        """Return whether both hold the same sequences of the same dtype, up to ``atol``."""
        return torch.equal(self.lengths, other.lengths) and tensors_equal(self.values, other.values, atol)


def check_host_integers(tensor: Tensor, name: str) -> None:
    """Raise DataError unless ``tensor`` is (B,) int64 on the host; ``name`` is for the message."""
    if tensor.dim() != 1 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
        raise DataError(
            f"{name} must be a 1-D int64 tensor on the CPU; got {tensor.dim()}-D {tensor.dtype} on {tensor.device}"
        )


def repeated_ids(ids: Integers) -> list[int]:
    """Return up to five ids that are there more than once."""
    if (ids[1:] > ids[:-1]).all():  # as mostly
        return []
    ordered = np.sort(ids)
    found: list[int] = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])[:5].tolist()
    return found


def as_indices(indices: Sequence[int] | Tensor | Integers, num_rows: int) -> Tensor:
    """Return positions as an int64 tensor on the host; DataError for positions outside ``0..num_rows - 1``."""
    rows = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    if rows.dim() != 1:
        raise DataError(f"select takes a flat list of positions; got {rows.dim()} dimensions")
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= num_rows):
        raise DataError(f"positions must lie in 0..{num_rows - 1}; got {int(rows.min())}..{int(rows.max())}")
    return rows


def tensors_equal(ours: Tensor, theirs: Tensor, atol: float) -> bool:
    """Return whether shapes and dtypes agree and values differ by at most ``atol``."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(ours, theirs) if atol == 0.0 else torch.allclose(ours, theirs, rtol=0.0, atol=atol)
