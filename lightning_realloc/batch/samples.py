"""What travels between calls: samples keyed by id, with ragged sequences, scalars and python objects side by side.

Every sequence is stored without padding. The bookkeeping (ids and lengths) always lives on the host, so
planning who gets what never waits for a device. How samples reach another rank is the transport's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_realloc.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """B sequences of different lengths, laid end to end."""

    values: Tensor
    """(N, ...), on any device: the sequences one after the other."""
    lengths: Tensor
    """(B,) int64 on the host, summing to N. A sequence may be empty."""

    def __post_init__(self) -> None:
        _check_host_integers(self.lengths, "Ragged.lengths")
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
        """Return the sequences packed; ``dtype`` defaults to the tensors' own, and to int64 for python numbers."""
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
        """N, the sum of all lengths."""
        return int(self.values.shape[0])

    @property
    def offsets(self) -> Tensor:
        """(B + 1,) int64 on the host: sequence b is ``values[offsets[b]:offsets[b + 1]]``."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def split(self) -> list[Tensor]:
        """Return the sequences as B views of ``values``."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def to_lists(self) -> list[list[int]]:
        """Return the sequences as python lists (floats if ``values`` are floats)."""
        flat, offsets = self.values.tolist(), self.offsets.tolist()
        return [flat[begin:end] for begin, end in itertools.pairwise(offsets)]

    def select(self, indices: Sequence[int] | Tensor) -> Ragged:
        """Return the sequences at these positions, in this order; a position may repeat."""
        rows = _as_indices(indices, len(self))
        begins, ends = self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
        parts = [self.values[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return Ragged(torch.cat(parts) if parts else self.values[:0], self.lengths[rows])

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same sequences with ``values`` on ``device``."""
        return Ragged(self.values.to(device), self.lengths)

    def equals(self, other: Ragged, *, atol: float = 0.0) -> bool:
        """Return whether both hold the same sequences of the same dtype, up to ``atol``."""
        return torch.equal(self.lengths, other.lengths) and _tensors_equal(self.values, other.values, atol)


Column = Tensor | Ragged | tuple[object, ...]
"""One value per sample: a (B, ...) tensor, B sequences, or B python objects."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples keyed by unique ids, and what is known about each, column by column."""

    ids: Tensor
    """(B,) int64 on the host, without repetition: the name of a sample on every rank."""
    columns: Mapping[str, Column]
    """Tensors and sequences. Tuples that are given here are moved to ``data``."""
    data: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The data set's columns: python objects, known on every rank and never sent. They are a namespace of their own: a
    name may be in ``columns`` too."""

    def __post_init__(self) -> None:
        _check_host_integers(self.ids, "Samples.ids")
        objects = {name: column for name, column in self.columns.items() if isinstance(column, tuple)}
        columns = {name: column for name, column in self.columns.items() if name not in objects}
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "data", {**self.data, **objects})
        if len(set(self.ids.tolist())) != len(self):
            raise DataError(f"Samples.ids must be unique; repeated: {_repeated(self.ids.tolist())}")
        for name, column in [*columns.items(), *self.data.items()]:
            _check_column(name, column, len(self))

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def __contains__(self, name: str) -> bool:
        """Return whether ``columns`` has this name; ask ``data`` for those of the data set."""
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        """Return the column of this name, that of ``data`` where ``columns`` has none."""
        column = self.columns.get(name, self.data.get(name))
        if column is None:
            raise DataError(f"no column {name!r} in these samples; there are {sorted({*self.columns, *self.data})}")
        return column

    def tensor(self, name: str) -> Tensor:
        """Return the (B, ...) tensor column ``name``."""
        column = self[name]
        if not isinstance(column, Tensor):
            raise DataError(f"column {name!r} must hold one tensor row per sample; it is a {type(column).__name__}")
        return column

    def ragged(self, name: str) -> Ragged:
        """Return the column of sequences ``name``."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise DataError(f"column {name!r} must hold sequences (Ragged); it is a {type(column).__name__}")
        return column

    def objects(self, name: str) -> tuple[object, ...]:
        """Return the data set's column ``name``."""
        if name in self.data:
            return self.data[name]
        column = self[name]
        raise DataError(f"column {name!r} must hold python objects (tuple); it is a {type(column).__name__}")

    def with_columns(self, /, **columns: Column) -> Samples:
        """Return the same samples with these columns added or replaced; tuples go to ``data``."""
        objects = {name: column for name, column in columns.items() if isinstance(column, tuple)}
        others = {name: column for name, column in columns.items() if name not in objects}
        return Samples(self.ids, {**self.columns, **others}, {**self.data, **objects})

    def without_columns(self, *names: str) -> Samples:
        """Return the same samples without these tensors and sequences; names that are absent are ignored."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name not in names})

    def with_ids(self, ids: Tensor) -> Samples:
        """Return the same samples under other ids."""
        return replace(self, ids=ids)

    def lengths_only(self) -> Samples:
        """Return the same samples with sequences as their lengths alone: ``Ragged`` values of shape (N, 0)."""
        columns = {
            name: Ragged(column.values.new_empty(column.num_tokens, 0), column.lengths)
            for name, column in self.columns.items()
            if isinstance(column, Ragged)
        }
        return self.with_columns(**columns)

    def select(self, indices: Sequence[int] | Tensor) -> Samples:
        """Return the samples at these positions, in this order."""
        rows = _as_indices(indices, len(self))
        return self._picked(rows, self.ids[rows])

    def by_ids(self, ids: Sequence[int] | Tensor) -> Samples:
        """Return the samples with these ids, in this order; every id must be present."""
        position = {sample_id: row for row, sample_id in enumerate(self.ids.tolist())}
        wanted = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        missing = [sample_id for sample_id in wanted if sample_id not in position]
        if missing:
            raise DataError(f"{len(missing)} of {len(wanted)} sample ids are not here, the first are {missing[:5]}")
        return self.select([position[sample_id] for sample_id in wanted])

    def sorted_by_id(self) -> Samples:
        """Return the samples in ascending order of their ids."""
        return self.select(self.ids.argsort())

    def repeat(self, count: int) -> Samples:
        """Return every sample ``count`` times in a row; copy k of sample ``id`` becomes ``id * count + k``."""
        if count < 1:
            raise DataError(f"a sample can be repeated 1 or more times; got {count}")
        rows = torch.arange(len(self)).repeat_interleave(count)
        ids = self.ids[rows] * count + torch.arange(count).repeat(len(self))
        return self._picked(rows, ids)

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        """Return the samples of all parts, which must have the same columns and no id in common."""
        if not parts:
            raise DataError("Samples.concatenate needs at least one part; got none")
        first = parts[0]
        for part in parts[1:]:
            difference = sorted((first.columns.keys() ^ part.columns.keys()) | (first.data.keys() ^ part.data.keys()))
            if difference:
                raise DataError(f"parts to concatenate must have the same columns; these are not in all: {difference}")
        columns = {name: _concatenate(name, [part.columns[name] for part in parts]) for name in first.columns}
        data = {name: tuple(itertools.chain(*(part.data[name] for part in parts))) for name in first.data}
        return Samples(torch.cat([part.ids for part in parts]), columns, data)

    def to(self, device: torch.device | str) -> Samples:
        """Return the same samples with tensors and sequences on ``device``; ids and lengths stay on the host."""
        moved = {
            name: column if isinstance(column, tuple) else column.to(device) for name, column in self.columns.items()
        }
        return replace(self, columns=moved)

    def equals(self, other: Samples, *, atol: float = 0.0) -> bool:
        """Return whether both hold the same samples in the same order, tensors equal up to ``atol``."""
        if not torch.equal(self.ids, other.ids) or set(self.columns) != set(other.columns) or self.data != other.data:
            return False
        return all(_columns_equal(column, other.columns[name], atol) for name, column in self.columns.items())

    def _picked(self, rows: Tensor, ids: Tensor) -> Samples:
        columns = {name: _select(column, rows) for name, column in self.columns.items()}
        places = rows.tolist()
        data = {name: tuple(column[place] for place in places) for name, column in self.data.items()}
        return Samples(ids, columns, data)


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """What a generating call may return in place of samples: those of this iteration, and what is left for the next."""

    finished: Samples
    """What the other calls work on."""
    carried: Samples
    """What all ranks are told of, sequences included, and no call works on."""


def _check_host_integers(tensor: Tensor, what: str) -> None:
    if tensor.dim() != 1 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
        raise DataError(
            f"{what} must be a 1-D int64 tensor on the CPU; got {tensor.dim()}-D {tensor.dtype} on {tensor.device}"
        )


def _check_column(name: str, column: Column, num_samples: int) -> None:
    if isinstance(column, Tensor):
        rows = column.shape[0] if column.dim() else None
    elif isinstance(column, Ragged | tuple):
        rows = len(column)
    else:
        raise DataError(
            f"column {name!r} must be a Tensor, a Ragged or a tuple of objects; got {type(column).__name__}"
        )
    if rows != num_samples:
        raise DataError(f"column {name!r} must have one row for each of the {num_samples} samples; it has {rows}")


def _repeated(ids: list[int]) -> list[int]:
    ordered = sorted(ids)
    return sorted({a for a, b in itertools.pairwise(ordered) if a == b})[:5]


def _as_indices(indices: Sequence[int] | Tensor, num_rows: int) -> Tensor:
    rows = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
    if rows.dim() != 1:
        raise DataError(f"select takes a flat list of positions; got {rows.dim()} dimensions")
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= num_rows):
        raise DataError(f"positions must lie in 0..{num_rows - 1}; got {int(rows.min())}..{int(rows.max())}")
    return rows


def _select(column: Column, rows: Tensor) -> Column:
    assert not isinstance(column, tuple), "python objects are in Samples.data"
    return column.select(rows) if isinstance(column, Ragged) else column[rows.to(column.device)]


def _kind(column: Column) -> type:
    return Tensor if isinstance(column, Tensor) else type(column)


def _concatenate(name: str, columns: Sequence[Column]) -> Column:
    first = columns[0]
    if any(_kind(column) is not _kind(first) for column in columns):
        kinds = sorted({_kind(column).__name__ for column in columns})
        raise DataError(f"column {name!r} must be of one kind in all parts; got {kinds}")
    if isinstance(first, Ragged):
        return Ragged.concatenate([column for column in columns if isinstance(column, Ragged)])
    return torch.cat([column for column in columns if isinstance(column, Tensor)])


def _columns_equal(ours: Column, theirs: Column, atol: float) -> bool:
    if isinstance(ours, Ragged):
        return isinstance(theirs, Ragged) and ours.equals(theirs, atol=atol)
    return isinstance(ours, Tensor) and isinstance(theirs, Tensor) and _tensors_equal(ours, theirs, atol)


def _tensors_equal(ours: Tensor, theirs: Tensor, atol: float) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(ours, theirs) if atol == 0.0 else torch.allclose(ours, theirs, rtol=0.0, atol=atol)
