"""Samples that pass between calls: columns of tensors, sequences and Python objects, keyed by sample id.

Sequences are stored without padding. Ids and lengths always live on the host, so routing never waits for a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_realloc.batch.model_input import AnswerInput, ModelInput, prompt_digest
from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.batch.ragged import Ragged as Ragged
from lightning_realloc.batch.ragged import as_indices, check_host_integers, repeated_ids, tensors_equal
from lightning_realloc.batch.shares import Integers
from lightning_realloc.batch.stored_objects import plain_value, restored_value
from lightning_realloc.errors import DataError

Column = Tensor | Ragged | tuple[object, ...]
"""One value per sample: a (B, ...) tensor, B sequences, or B Python objects."""
TOKEN_AGES = "token_ages"
"""Column (B,) of the sum of the ages of a response's tokens, in training steps."""
OLDEST_AGES = "oldest_ages"
"""Column (B,) of the largest age of a response's tokens, in training steps."""
EXPERTS = "experts"
"""Column of sequences (P + T, layers * chosen) of the experts that prompt and response tokens had in generation."""
PROMPT_KEY = "prompt_key"
"""Column (B,) of `ModelInput.prompt_key`."""
EXTRA_INPUT = "input/"
"""Beginning of the names of columns that are further inputs of the model: sequences of rows, ``input/pixel_values`` for
the argument ``pixel_values`` of its ``forward``."""

IMAGES = "images"
"""Column of the data set with each sample's `PromptImages`."""
RECORD = "record/"
"""Beginning of the names of columns about whole samples that no model reads, such as sequences of other lengths than
the response's: they stay with their samples, and are not packed."""
ANSWER_INPUTS = f"{RECORD}answer_inputs"
"""Column of sequences of bytes, as of `answer_column`: environments' answers that show images, inside responses."""
PROMPT_IMAGES = f"{RECORD}prompt_images"
"""Column of sequences of bytes, as of `image_column`: images of prompts that environments have written."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples keyed by unique ids, with one value per sample in each column.

    Example:
        >>> samples = Samples(torch.tensor([7, 9]), {"response_ids": Ragged.from_list([[1, 2, 3], [4]])})
        >>> samples.by_ids([9]).ragged("response_ids").to_lists()
        [[4]]
    """

    ids: Tensor
    """Unique sample ids, (B,) int64 on the host. An id means the same sample on every rank."""
    columns: Mapping[str, Column]
    """Tensors and sequences by name. The constructor moves tuples to ``data``."""
    data: Mapping[str, tuple[object, ...]] = field(default_factory=dict, metadata={"sent": False})
    """Columns of the data set: Python objects, known on every rank and never sent. A name may be in ``columns`` too."""

    def __post_init__(self) -> None:
        check_host_integers(self.ids, "Samples.ids")
        objects = {name: column for name, column in self.columns.items() if isinstance(column, tuple)}
        columns = {name: column for name, column in self.columns.items() if name not in objects}
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "data", {**self.data, **objects})
        if repeated := repeated_ids(self.ids.numpy()):
            raise DataError(f"Samples.ids must be unique; repeated: {repeated}")
        for name, column in [*columns.items(), *self.data.items()]:
            _check_column(name, column, len(self))

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def __contains__(self, name: str) -> bool:
        """Return whether ``columns`` has this name; ``data`` is not searched."""
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        """Return the column of this name from ``columns``, else from ``data``."""
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
        """Return the column ``name`` of the data set."""
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
        """Return the same samples without these tensors and sequences; absent names are ignored."""
        return replace(self, columns={name: column for name, column in self.columns.items() if name not in names})

    def with_ids(self, ids: Tensor) -> Samples:
        """Return the same samples under other ids."""
        return replace(self, ids=ids)

    def lengths_only(self) -> Samples:
        """Return the same samples with the lengths of sequences only: ``Ragged`` values of shape (N, 0)."""
        columns = {
            name: Ragged(column.values.new_empty(column.num_tokens, 0), column.lengths)
            for name, column in self.columns.items()
            if isinstance(column, Ragged)
        }
        return self.with_columns(**columns)

    def select(self, indices: Sequence[int] | Tensor | Integers, *, ids: Tensor | None = None) -> Samples:
        """Return the samples at these positions, in this order, under new ``ids`` if one is repeated."""
        rows = as_indices(indices, len(self))
        return self._picked(rows, self.ids[rows] if ids is None else ids)

    def select_parts(self, parts: Sequence[Integers]) -> list[Samples]:
        """Return as `select` for each part: sequences and tensors are gathered at once, and parts are views of them."""
        rows, sizes = as_indices(np.concatenate(parts), len(self)), list(map(len, parts))
        ids = self.ids[rows].split(sizes)
        divided: dict[str, Sequence[Column]] = {}
        for name, column in self.columns.items():
            gathered = _select(column, rows)
            divided[name] = gathered.split_by(sizes) if isinstance(gathered, Ragged) else gathered.split(sizes)
        return [
            Samples(
                ids[index],
                {name: columns[index] for name, columns in divided.items()},
                {name: tuple(column[row] for row in part) for name, column in self.data.items()},
            )
            for index, part in enumerate(parts)
        ]

    def by_ids(self, ids: Sequence[int] | Tensor) -> Samples:
        """Return the samples with these ids, in this order; DataError if an id is absent."""
        return self.select(self.rows_of(ids))

    def rows_of(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Return the positions of the samples with these ids, in this order; DataError if an id is absent."""
        wanted = torch.as_tensor(ids, dtype=torch.int64)
        ordered, rows = self.ids.sort()
        places = torch.searchsorted(ordered, wanted)
        is_here = torch.zeros_like(wanted, dtype=torch.bool)
        is_inside = places < len(self)
        is_here[is_inside] = ordered[places[is_inside]] == wanted[is_inside]
        if not is_here.all():
            missing = wanted[~is_here].tolist()
            raise DataError(f"{len(missing)} of {len(wanted)} sample ids are not here, the first are {missing[:5]}")
        return rows[places]

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
        """Return the samples of all parts, which must have the same columns and disjoint ids."""
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
    """Result of a generating call that leaves some samples for the next iteration."""

    finished: Samples
    """Samples of this iteration, which the other calls use."""
    carried: Samples
    """Samples kept for the next iteration. All ranks receive them, sequences included; no call uses them yet."""


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


def _select(column: Column, rows: Tensor) -> Tensor | Ragged:
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
    return isinstance(ours, Tensor) and isinstance(theirs, Tensor) and tensors_equal(ours, theirs, atol)


def extra_columns(samples: Samples) -> list[str]:
    """Return the names of the columns that are further inputs of the model."""
    return [name for name in samples.columns if name.startswith(EXTRA_INPUT)]


def extra_inputs(samples: Samples) -> dict[str, Ragged]:
    """Return the further inputs of the model, by the keyword that its ``forward`` expects."""
    return {name.removeprefix(EXTRA_INPUT): samples.ragged(name) for name in extra_columns(samples)}


def prompt_images(samples: Samples) -> list[PromptImages | None]:
    """Return the images of each sample's prompt, those of an environment in place of the data's; None for no images."""
    column = samples.data.get(IMAGES, (None,) * len(samples))
    of_data = [images if isinstance(images, PromptImages) and images else None for images in column]
    return [own or images for own, images in zip(column_images(samples, PROMPT_IMAGES), of_data, strict=True)]


def images_in_order(samples: Samples) -> list[list[PromptImages]]:
    """Return the images of each sample's prompt, if it shows some, and of each answer of its environment that does."""
    every = zip(prompt_images(samples), answer_inputs(samples), strict=True)
    given = ((of_prompt, *(one.input.images for one in answers)) for of_prompt, answers in every)
    return [[images for images in row if images is not None] for row in given]


def model_inputs(samples: Samples) -> list[ModelInput]:
    """Return each sample's prompt as a model reads it, with its key from the column ``prompt_key`` if there is one."""
    extras = {name: column.split() for name, column in extra_inputs(samples).items()}
    keys = samples.tensor(PROMPT_KEY).tolist() if PROMPT_KEY in samples else [-1] * len(samples)
    made: list[ModelInput] = []
    for row, (prompt, images) in enumerate(
        zip(samples.ragged("prompt_ids").to_lists(), prompt_images(samples), strict=True)
    ):
        if images is None:
            made.append(ModelInput(tuple(prompt), {name: rows[row] for name, rows in extras.items()}, keys[row]))
        else:
            made.append(images_input(prompt, images, keys[row]))
    return made


def images_input(token_ids: Sequence[int], images: PromptImages, prompt_key: int = -1) -> ModelInput:
    """Return a prompt with images; -1: with a key of its token ids and images."""
    key = prompt_digest(token_ids, {}, of_inputs=images.key) if prompt_key < 0 else prompt_key
    return ModelInput(tuple(token_ids), images.inputs, key)


def answer_column(answers: Iterable[Sequence[AnswerInput]]) -> Ragged:
    """Return B samples' answers with images as ragged uint8, images as checkpoints hold them; no bytes for none."""
    return _stored_column([list(map(_plain_answer, one)) for one in answers])


def answer_inputs(samples: Samples) -> list[tuple[AnswerInput, ...]]:
    """Return the answers with images in each sample's response; pixels are read when they are asked for."""
    if ANSWER_INPUTS not in samples:
        return [()] * len(samples)
    return [tuple(map(_answer_of, answers or ())) for answers in _stored(samples.ragged(ANSWER_INPUTS))]


def image_column(images: Iterable[PromptImages | None]) -> Ragged:
    """Return the images that B environments show as ragged uint8; no bytes for none."""
    return _stored_column(images)


def column_images(samples: Samples, name: str) -> list[PromptImages | None]:
    """Return the images in a column of `image_column`; None for no images, and without the column."""
    return _stored(samples.ragged(name)) if name in samples else [None] * len(samples)


def _plain_answer(one: AnswerInput) -> dict[str, Any]:
    """Return an answer without the positions of its tokens."""
    given = one.input
    return {"begin": one.begin, "token_ids": list(given.token_ids), "extras": given.extras, "key": given.prompt_key}


def _answer_of(plain: Mapping[str, Any]) -> AnswerInput:
    return AnswerInput(plain["begin"], ModelInput(tuple(plain["token_ids"]), plain["extras"], plain["key"]))


def _stored_column(values: Iterable[Any]) -> Ragged:
    """Return values as bytes of checkpoints, ragged uint8; no bytes for those that are False."""

    def content(value: Any) -> Tensor:
        stream = BytesIO()
        torch.save(plain_value(value), stream)
        return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)

    return Ragged.from_list([content(value) if value else [] for value in values], dtype=torch.uint8)


def _stored(column: Ragged) -> list[Any]:
    """Return the values of `_stored_column`; None for those without bytes."""
    rows = (row.cpu().numpy().tobytes() for row in column.split())
    return [restored_value(torch.load(BytesIO(row), weights_only=True)) if row else None for row in rows]


def prompt_keys(samples: Samples) -> Tensor:
    """Return the (B,) int64 keys of the samples' prompts: the column ``prompt_key`` or, without one, digests."""
    if PROMPT_KEY in samples:
        return samples.tensor(PROMPT_KEY)
    return torch.tensor([each.prompt_key for each in model_inputs(samples)], dtype=torch.int64)


def all_samples(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts with new ids 0, 1, ..., because parts may have equal ones."""
    ids = torch.split(torch.arange(sum(map(len, parts))), [len(part) for part in parts])
    return Samples.concatenate([part.with_ids(own) for own, part in zip(ids, parts, strict=True)])


def samples_state(samples: Samples) -> dict[str, Any]:
    """Return plain data for a checkpoint."""

    def plain(column: Column) -> Any:
        return {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else column

    columns = {name: plain(column) for name, column in samples.columns.items()}
    return {"ids": samples.ids, "columns": columns, "data": plain_value({n: list(c) for n, c in samples.data.items()})}


def samples_from_state(state: Mapping[str, Any]) -> Samples:
    """Restore the result of :func:`samples_state`."""

    def column(plain: Any) -> Column:
        if isinstance(plain, Mapping):
            return Ragged(plain["values"], plain["lengths"])
        return tuple(plain) if isinstance(plain, list) else plain  # lists: of checkpoints without "data"

    columns = {name: column(plain) for name, plain in state["columns"].items()}
    data = restored_value(state.get("data", {}))
    samples = Samples(state["ids"], columns, {name: tuple(values) for name, values in data.items()})
    # Responses of checkpoints from before there were keys.
    is_old = {"prompt_id", "prompt_ids"} <= samples.columns.keys() and PROMPT_KEY not in samples
    return samples.with_columns(**{PROMPT_KEY: prompt_keys(samples)}) if is_old else samples
