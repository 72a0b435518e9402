"""Rows as samples: the tokenizer and the processor of images, limits of length, and rows that cannot be used."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lightning_realloc.batch.samples import IMAGES, Column, Samples, all_samples
from lightning_realloc.data.chat import check_template_settings, template_input
from lightning_realloc.data.images.processor_of_tokenizer import ProcessorOfTokenizer
from lightning_realloc.data.images.row_images import IMAGE_COLUMNS, has_images, readable_rows
from lightning_realloc.data.images.sample_images import ImageProcessor, SampleImages
from lightning_realloc.data.rows import (
    NoUsableRowsError,
    Row,
    RowSource,
    folder_of,
    read_rows,
    use_all_rows,
    use_good_rows,
)
from lightning_realloc.data.sources import is_stream
from lightning_realloc.data.tokenizers import load_tokenizer, tokenizer_in
from lightning_realloc.errors import DataError, counted, require_choice

log = logging.getLogger(__name__)

LongRows = Literal["refuse", "truncate", "drop"]
"""Policy for rows with more tokens than fit."""
BadRows = Literal["refuse", "drop"]
"""Policy for rows that cannot be used."""
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Maximum number of tokens of a row, and the setting that it comes from."""

    tokens: int
    source: str
    """Name of the setting for error messages, such as ``max_prompt_tokens``."""


class RowTables(ABC):
    """Reads rows and makes samples of them; see `RowDataModule` for the settings."""

    message_columns: Collection[str] = ("prompt", "completion", "messages", "chosen", "rejected")
    """Columns that may hold messages for the chat template."""

    def __init__(
        self,
        data: RowSource,
        *,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None,
        long_rows: LongRows,
        bad_rows: BadRows,
        chat_template_kwargs: Mapping[str, Any] | None,
        processor_kwargs: Mapping[str, Any] | None,
        check_pixels: bool,
    ) -> None:
        super().__init__()
        if long_rows not in get_args(LongRows):
            raise DataError(f"the policy for long rows, {long_rows!r}, must be one of {', '.join(get_args(LongRows))}")
        require_choice("bad_rows", bad_rows, get_args(BadRows), DataError)
        check_template_settings(chat_template_kwargs or {}, type(self).__name__)
        self.data = data
        self.long_rows = long_rows
        self.bad_rows = bad_rows
        self.check_pixels = check_pixels
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._tokenizer = tokenizer
        self._processors = ProcessorOfTokenizer(processor_kwargs or {})

    @abstractmethod
    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the column whose hash selects the held-out rows."""

    def read(self, source: RowSource) -> tuple[Row, ...]:
        """Return all rows of a source, held-out rows included."""
        return self._shaped(read_rows(source), source)

    def table(self, source: RowSource, *, limit: int | None = None) -> Samples:
        """Return the rows of a source as samples; only the first ``limit`` rows, if given."""
        return self._tabulated(self.read(source)[:limit], self.tokenizer)

    def shaped(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Convert rows to the form that :meth:`tabulate` expects; a subclass may accept several forms."""
        return rows

    @abstractmethod
    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return the rows that fit as samples with ids 0, 1, ...; every rank calls it with the same rows.

        Raises:
            NoUsableRowsError: if none of them fits.
        """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The given tokenizer, or else the LightningModule's."""
        if isinstance(self._tokenizer, str | Path):
            self._tokenizer = load_tokenizer(self._tokenizer)
        if isinstance(self._tokenizer, ProcessorMixin):
            self._processors.given, self._tokenizer = self._tokenizer, tokenizer_in(self._tokenizer)
        found = getattr(self._module(), "tokenizer", None) if self._tokenizer is None else self._tokenizer
        if not isinstance(found, PreTrainedTokenizerBase):
            raise DataError(
                f"{type(self).__name__} has no tokenizer and the LightningModule has none; "
                f"pass tokenizer= with a Hugging Face name, folder or tokenizer"
            )
        return found

    @property
    def image_processor(self) -> ImageProcessor | None:
        """The model's processor of images, from where its tokenizer comes from; None for a model of text."""
        return self._processors.find(self.tokenizer, getattr(self._module(), "processor", None))

    def model_context(self) -> int | None:
        """Return the smallest context length of the LightningModule's models, in positions; None if unknown."""
        roles = getattr(self._module(), "roles", None)
        configs = [role.config() for role in roles()] if callable(roles) else []
        contexts = [getattr(c.get_text_config(), "max_position_embeddings", None) for c in configs if c is not None]
        known = [context for context in contexts if isinstance(context, int) and context > 0]
        return min(known, default=None)

    def token_limit(self, max_tokens: int | None, source: str, *, reserved: int = 0) -> TokenLimit | None:
        """Return the smaller one of ``max_tokens`` and the models' context; None if neither is known.

        Args:
            source: Setting that ``max_tokens`` comes from, for error messages.
            reserved: Positions of the context that stay free.
        """
        context = self.model_context()
        limits: list[TokenLimit] = []
        if context is not None:
            limits.append(TokenLimit(context - reserved, f"the models' context of {context} positions"))
        if max_tokens is not None:
            limits.append(TokenLimit(max_tokens, source))
        return min(limits, key=lambda limit: limit.tokens, default=None)

    def data_of(self, rows: Sequence[Row], *, without: Sequence[str] = ()) -> dict[str, tuple[object, ...]]:
        """Return the columns of the rows as Python objects, for reward functions and logs.

        Args:
            without: Columns to leave out, because the samples hold them in another form.
        """
        return {name: tuple(row.values[name] for row in rows) for name in rows[0].values if name not in without}

    def template_of(self, row: Row) -> dict[str, Any]:
        """Return the arguments of the chat template besides the row's messages: its tools, and settings by name."""
        return template_input(row.values, row.place, self.chat_template_kwargs)

    def require(
        self, rows: Sequence[Row], *columns: str, way_out: str = "rename a column or add the missing ones"
    ) -> None:
        """Raise NoUsableRowsError with a ``way_out`` if the rows lack one of the ``columns``."""
        first = rows[0]
        missing = [repr(column) for column in columns if column not in first.values]
        if missing:
            raise NoUsableRowsError(
                f"{first.place} has no column{'s' * (len(missing) > 1)} {' and '.join(missing)}, only "
                f"{sorted(first.values)}; {type(self).__name__} needs {', '.join(columns)}, {way_out}"
            )

    def fitted(self, row: Row, num_tokens: int, limit: TokenLimit | None, setting: str) -> bool:
        """Return whether the row is kept: it fits, or long rows are truncated.

        Args:
            setting: Name of the policy for long rows, for error messages.

        Raises:
            DataError: for a row that does not fit, with ``long_rows='refuse'``.
        """
        if limit is None or num_tokens <= limit.tokens or self.long_rows == "truncate":
            return True
        if self.long_rows == "drop":
            log.debug("dropped %s: %d tokens, %s=%d", row.place, num_tokens, limit.source, limit.tokens)
            return False
        images = row.values.get(IMAGES)
        shown, ways_out = "", f"shorten it, or set {setting} to 'truncate' or 'drop'"
        if isinstance(images, SampleImages) and images:  # which are never cut
            shown = f" with those of its {counted(len(images), 'image')}"
            ways_out = f"show fewer or smaller images, shorten its text, or set {setting} to 'drop'"
        raise DataError(
            f"{row.place} has {num_tokens} tokens{shown}, and {limit.source} allows {limit.tokens}; {ways_out}"
        )

    # ---- inside
    def _shaped(self, rows: Sequence[Row], source: RowSource) -> tuple[Row, ...]:
        """Return the rows as :meth:`tabulate` expects them, with text or images as the content of messages."""
        shows = any(has_images(row.values, self.message_columns) for row in rows)
        processor = self.image_processor if shows or is_stream(self.data) else None  # later rows of a stream may show
        as_messages = shows or not rows[0].values.keys().isdisjoint(IMAGE_COLUMNS)
        whole: set[int] | None = set() if self.check_pixels else None  # rows are read again to find all bad ones

        def shape(some: tuple[Row, ...]) -> tuple[Row, ...]:
            return self.shaped(
                readable_rows(
                    some,
                    self.message_columns,
                    processor,
                    as_messages=as_messages,
                    whole=whole,
                    folder=folder_of(source),
                )
            )

        return self._without_bad_rows(tuple(rows), shape, lambda parts: tuple(chain.from_iterable(parts)))

    def _tabulated(self, rows: tuple[Row, ...], tokenizer: PreTrainedTokenizerBase) -> Samples:
        return self._without_bad_rows(rows, lambda some: self.tabulate(some, tokenizer), all_samples)

    def _without_bad_rows(
        self, rows: tuple[Row, ...], use: Callable[[tuple[Row, ...]], Made], join: Callable[[Sequence[Made]], Made]
    ) -> Made:
        """Return ``use(rows)``, without the rows that it refuses if bad rows are to be dropped."""
        return use_all_rows(rows, use) if self.bad_rows == "refuse" else use_good_rows(rows, use, join)

    @abstractmethod
    def _module(self) -> object:
        """Return the LightningModule; None outside of a Trainer."""


def make_samples(
    columns: Mapping[str, Column], num_rows: int, item_name: str, data: Mapping[str, tuple[object, ...]] | None = None
) -> Samples:
    """Return the columns as samples with ids 0, 1, ...; NoUsableRowsError if there are no rows."""
    if num_rows == 0:
        raise NoUsableRowsError(f"no {item_name} is left to use; raise the token limit or give shorter ones")
    return Samples(torch.arange(num_rows), columns, data or {})
