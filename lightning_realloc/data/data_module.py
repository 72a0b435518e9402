"""Base class of data modules: read rows, hold some out, limit their length, and make loaders."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.data.loader import BatchLoader, EvaluationLoader, epoch_batches
from lightning_realloc.data.row_tables import BadRows, LongRows, RowTables
from lightning_realloc.data.rows import (
    Row,
    RowSource,
    lasting,
    split_by_hash,
)
from lightning_realloc.data.sources import is_stream
from lightning_realloc.data.streams.row_streams import RowStream
from lightning_realloc.data.streams.stream_loader import StreamLoader, stream_epoch_batches
from lightning_realloc.errors import DataError
from lightning_realloc.seeds import seed_of_run
from lightning_realloc.setting_hints import DATA_HINTS, SuggestsSettings, refuses_unknown

log = logging.getLogger(__name__)

USE_WITHOUT_STREAMING = "give the rows without streaming, such as DatasetSource(..., split='train[:1000]')"
"""Way out of errors about settings that need all rows."""


class RowDataModule(SuggestsSettings, RowTables, L.LightningDataModule):
    """Global batches of :class:`Samples` from rows; a subclass converts rows to columns.

    Args:
        data: A JSONL or Parquet file, a pattern or a list of files, a folder written by ``save_to_disk`` of
            ``datasets``, a :class:`DatasetSource`, a list of dictionaries, or a ``datasets.Dataset``.
        batch_size: Rows per iteration, over all ranks together.
        val_data: Held-out rows, read like ``data``.
        val_fraction: Share of ``data`` to hold out, chosen by a hash of the row; an alternative to ``val_data``.
        tokenizer: A Hugging Face name, folder, tokenizer or processor; by default the LightningModule's.
        seed: Seed of the row order and of the held-out split. By default the order uses the seed of
            ``seed_everything``, else 0. The split then uses 0, so that runs with different seeds are compared on the
            same rows.
        shuffle: Whether to reorder the rows in every epoch.
        drop_last: Whether to drop a last batch that is smaller than the others.
        long_rows: Policy for rows with more tokens than fit: ``refuse`` raises an error, ``truncate`` shortens them,
            ``drop`` skips them.
        bad_rows: Policy for rows with an error, such as a conversation without an answer: ``refuse`` raises it, which
            names the row; ``drop`` leaves such rows out, and warns with their number and the first error. Lines of a
            file that are not JSON objects, and rows with other columns than the first, are always refused.
        bucket_batches: Number of batches of the shuffled order within which rows are grouped by length; None does not
            group.
        shuffle_buffer: For a stream: number of rows that are read and shuffled at a time.
        reads_ahead: For a stream: whether a thread reads the next ``shuffle_buffer`` rows during training.
        chat_template_kwargs: Settings of the chat template by name, such as ``enable_thinking``; a row's column
            ``chat_template_kwargs`` overrides them.
        processor_kwargs: Settings by name with which the model's processor of images is loaded, such as ``max_pixels``
            of Qwen2.5-VL. A processor that is given as ``tokenizer`` keeps its own.
        check_pixels: Whether to decode each image at the start, which finds damage inside a file. By default, only
            headers and ends of files are checked. ``bad_rows`` applies to what is found.
    """

    names_elsewhere = DATA_HINTS
    group_size: int = 1
    """Number of adjacent samples made from one row; they are always in one batch."""
    _read_for: tuple[object, ...] = ()
    """LightningModule, tokenizer and context for which rows were read."""

    @refuses_unknown
    def __init__(
        self,
        data: RowSource,
        *,
        batch_size: int,
        val_data: RowSource | None = None,
        val_fraction: float = 0.0,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        long_rows: LongRows = "refuse",
        bad_rows: BadRows = "refuse",
        bucket_batches: int | None = None,
        shuffle_buffer: int = 1000,
        reads_ahead: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        check_pixels: bool = False,
    ) -> None:
        super().__init__(
            data,
            tokenizer=tokenizer,
            long_rows=long_rows,
            bad_rows=bad_rows,
            chat_template_kwargs=chat_template_kwargs,
            processor_kwargs=processor_kwargs,
            check_pixels=check_pixels,
        )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise DataError(
                f"batch_size={batch_size!r} must be a whole number of at least 1; an iteration takes that many rows"
            )
        if not isinstance(val_fraction, int | float) or not 0.0 <= val_fraction < 1.0:
            raise DataError(f"val_fraction={val_fraction} must be a number of at least 0 and below 1")
        if val_data is not None and val_fraction > 0.0:
            raise DataError(f"val_data and val_fraction={val_fraction} both name held-out rows; give one of them")
        if is_stream(val_data):
            raise DataError(
                "val_data is a stream, but held-out rows are read whole; give a part of it without streaming, such as "
                "DatasetSource(..., split='test[:500]'), or give list(stream.take(500)) and train on stream.skip(500)"
            )
        for name, value, off in (("val_fraction", val_fraction, 0.0), ("bucket_batches", bucket_batches, None)):
            if is_stream(data) and value != off:
                raise DataError(
                    f"{name}={value} needs all rows, which a stream does not have yet; leave it out, or "
                    f"{USE_WITHOUT_STREAMING}"
                )
        self.batch_size = batch_size
        self.val_data = val_data
        self.val_fraction = val_fraction
        self._seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.bucket_batches = bucket_batches
        self.shuffle_buffer = shuffle_buffer
        self.reads_ahead = reads_ahead
        self._tables: dict[str, Samples] = {}
        self._train_loader: BatchLoader | StreamLoader | None = None
        self._evaluation_loaders: dict[str, EvaluationLoader] = {}

    # ---- Lightning's hooks
    def setup(self, stage: str | None = None) -> None:
        """Read, check and tokenize all rows, so that errors in them appear before the first step.

        For a stream, this covers only the first block, and only for training. Rows are read once for each
        LightningModule and its tokenizer. Every new run begins with the first batch.
        """
        models = (self._module(), self.tokenizer, self.model_context())
        is_new = models != self._read_for
        if is_new or (stage == "fit" and getattr(self.trainer, "global_step", 0) == 0):
            self.teardown()
            self._train_loader = None
            self._evaluation_loaders.clear()
        if is_new or not self._tables:
            self._read_tables()
            self._read_for = models
        if is_stream(self.data) and stage in (None, "fit"):
            kind = BatchLoader if self._overfits else StreamLoader
            if not isinstance(self._train_loader, kind):
                self._train_loader = self._first_batches() if self._overfits else self._stream_loader(self.shuffle)

    def train_dataloader(self) -> BatchLoader | StreamLoader:
        """Return the training batches; in one run always the same loader, so that its epoch count continues."""
        loader = self._train_loader
        if loader is None:
            loader = self._train_loader = self.make_loader()
        if isinstance(loader, StreamLoader):
            loader.epoch_batches = stream_epoch_batches(self.trainer)
        else:
            loader.shuffle = self.shuffle and not self._overfits
            loader.epoch_batches = epoch_batches(self.trainer, len(loader))
        return loader

    def make_loader(self) -> BatchLoader:
        """Return the loader of training batches from rows that were read."""
        return BatchLoader(
            self._table("train"),
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            group_size=self.group_size,
            bucket_batches=self.bucket_batches,
        )

    def teardown(self, stage: str | None = None) -> None:
        """Stop reading a stream."""
        if isinstance(self._train_loader, StreamLoader):
            self._train_loader.close()

    def val_dataloader(self) -> EvaluationLoader | list[object]:
        """Return the held-out batches in the order of the rows; an empty list without held-out rows.

        Raises:
            DataError: for ``trainer.validate`` without held-out rows, which would run nothing.
        """
        if "val" in self._tables:
            return self._evaluation("val")
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            raise DataError(
                f"trainer.validate needs held-out rows, and {type(self).__name__} has none; give val_data= or "
                f"val_fraction=, or call trainer.test, which then takes all rows"
            )
        # Lightning treats an empty container as a loader of length zero, and warns about it.
        warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        return []

    def test_dataloader(self) -> EvaluationLoader:
        """Return the held-out batches, or all rows if none are held out."""
        return self._evaluation("val" if "val" in self._tables else "train")

    def predict_dataloader(self) -> EvaluationLoader:
        """Return the rows of ``data`` that are not held out, in order."""
        return self._evaluation("train")

    # ---- for algorithms
    @property
    def seed(self) -> int:
        """Seed of the row order; the same on every rank."""
        return seed_of_run(self.trainer) if self._seed is None else self._seed

    @property
    def tables(self) -> dict[str, Samples]:
        """Samples of ``train`` and, if rows are held out, of ``val``; empty before :meth:`setup`."""
        return dict(self._tables)

    def add_columns(self, split: str, **columns: Column) -> None:
        """Add columns to the samples of a split; all later batches include them."""
        self._tables[split] = self._table(split).with_columns(**columns)
        if split == "train" and isinstance(self._train_loader, BatchLoader):
            self._train_loader.table = self._tables[split]
        if split in self._evaluation_loaders:
            self._evaluation_loaders[split].table = self._tables[split]

    # ---- inside
    def _read_tables(self) -> None:
        tokenizer = self.tokenizer
        self._tables, self._read_for = {}, ()
        self.data, self.val_data = lasting(self.data), lasting(self.val_data)
        rows = () if is_stream(self.data) else self.read(self.data)
        held_out: tuple[Row, ...] = ()
        if self.val_data is not None:
            held_out = self.read(self.val_data)
        elif self.val_fraction > 0.0:
            rows, held_out = self._split(rows)
        if rows:
            self._tables["train"] = self._tabulated(rows, tokenizer)
        if held_out:
            self._tables["val"] = self._tabulated(held_out, tokenizer)
        found = "read as they are needed" if is_stream(self.data) else len(self._tables["train"]) // self.group_size
        rank_zero_info(f"rows to train on: {found}; held out: {len(held_out)}")

    def _split(self, rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        column = self.split_column(rows)
        self.require(rows, column)
        rest, held_out = split_by_hash(rows, column, fraction=self.val_fraction, seed=self._seed or 0)
        if not rest or not held_out:
            raise DataError(
                f"val_fraction={self.val_fraction} leaves {len(rest)} rows to train on and {len(held_out)} held out of "
                f"{len(rows)}; both need at least one, change val_fraction or seed, or give val_data"
            )
        return rest, held_out

    def _table(self, split: str) -> Samples:
        if split == "train" and is_stream(self.data):
            raise DataError(f"a stream cannot be tested on or predicted as a whole; {USE_WITHOUT_STREAMING}")
        if split not in self._tables:
            raise DataError(f"{type(self).__name__} has read no rows yet; call setup() first, as Trainer does")
        return self._tables[split]

    def _evaluation(self, split: str) -> EvaluationLoader:
        if split not in self._evaluation_loaders:
            table = self._table(split)
            self._evaluation_loaders[split] = EvaluationLoader(
                table, batch_size=self.batch_size, group_size=self.group_size
            )
        return self._evaluation_loaders[split]

    @property
    def _overfits(self) -> bool:
        """Whether every epoch has the same batches. Lightning then expects unshuffled loaders."""
        return bool(getattr(self.trainer, "overfit_batches", 0) > 0)

    def _first_batches(self) -> BatchLoader:
        """Return the first ``overfit_batches`` batches of a stream."""
        count = getattr(self.trainer, "overfit_batches", None)
        if not isinstance(count, int):
            raise DataError(
                f"overfit_batches={count} is a fraction, but a stream has no length; give a whole number of batches"
            )
        stream = self._stream_loader(shuffle=False)
        first = Samples.concatenate(list(islice(stream, count)))
        stream.close()
        return BatchLoader(
            first.with_ids(torch.arange(len(first))),
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=False,
            group_size=self.group_size,
        )

    def _stream_loader(self, shuffle: bool) -> StreamLoader:
        """Return the loader of a stream, after a check of its first rows."""
        stream_epoch_batches(self.trainer)
        tokenizer = self.tokenizer
        loader = StreamLoader(
            RowStream.open(self.data),
            lambda block: self._tabulated(self._shaped(block, self.data), tokenizer),
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=shuffle,
            shuffle_buffer=self.shuffle_buffer,
            drop_last=self.drop_last,
            group_size=self.group_size,
            reads_ahead=self.reads_ahead,
            rank=0 if self.trainer is None else self.trainer.global_rank,
            num_ranks=1 if self.trainer is None else self.trainer.world_size,
        )
        loader.check()
        return loader

    def _module(self) -> object:
        return None if self.trainer is None else self.trainer.lightning_module
