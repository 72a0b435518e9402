"""Base class of data modules with given responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.data.assistant_spans import TokensOfRow
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.images.row_images import check_whole_images
from lightning_realloc.data.row_tables import TokenLimit, make_samples
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.data.sources import is_stream
from lightning_realloc.errors import DataError


class ResponseDataModule(RowDataModule):
    """Base class of data modules whose rows hold prompts with responses.

    Args:
        max_tokens: Maximum number of tokens of prompt and response together; by default the models' context.
        settings: Arguments of :class:`RowDataModule`: data, batch size, held-out rows, tokenizer, seed, order, and long
            rows. ``long_rows="truncate"`` cuts the responses.
    """

    def __init__(self, data: RowSource, *, batch_size: int, max_tokens: int | None = None, **settings: Any) -> None:
        super().__init__(data, batch_size=batch_size, **settings)
        if max_tokens is not None and max_tokens < 1:
            raise DataError(f"max_tokens={max_tokens} must be at least 1; use None for the models' limit")
        self.max_tokens = max_tokens

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the prompts' column, so that equal prompts are never in both training and held-out rows."""
        return "prompt"

    def limit(self) -> TokenLimit | None:
        """Return the smaller one of the models' context and ``max_tokens``; None if neither is known."""
        return self.token_limit(self.max_tokens, "max_tokens")

    def fits(self, row: Row, num_tokens: int, limit: TokenLimit | None) -> bool:
        """Return whether the row is kept; DataError if it is too long and long rows are refused."""
        return self.fitted(row, num_tokens, limit, "long_rows")

    def table_of(
        self, rows: Sequence[Row], tokens: Sequence[TokensOfRow], labels: Sequence[bool] | None = None
    ) -> Samples:
        """Return ``prompt_ids``, ``response_ids``, ``label`` if given, and the columns of the rows that fit.

        ``model_mask`` is among them if some response tokens are not learnt.
        """
        limit = self.limit()
        kept = [
            place
            for place, (row, (prompt, response, _)) in enumerate(zip(rows, tokens, strict=True))
            if self.fits(row, len(prompt) + len(response), limit)
        ]
        if not kept:
            return make_samples({}, 0, "row")
        prompts = [tokens[place][0] for place in kept]
        responses = [cut(rows[place].place, *tokens[place][:2], limit) for place in kept]
        for place, prompt, response in zip(kept, prompts, responses, strict=True):
            check_whole_images(rows[place], prompt + response)
        learnt = [tokens[place][2][: len(response)] for place, response in zip(kept, responses, strict=True)]
        made: dict[str, Column] = {} if labels is None else {"label": torch.tensor([labels[place] for place in kept])}
        made |= self.mask_columns(learnt)
        ids = {"prompt_ids": Ragged.from_list(prompts), "response_ids": Ragged.from_list(responses)}
        data = self.data_of([rows[place] for place in kept], without=[] if labels is None else ["label"])
        return make_samples({**ids, **made}, len(kept), "row", data)

    def mask_columns(self, learnt: Sequence[Sequence[bool]]) -> dict[str, Column]:
        """Return the mask of response tokens to learn and their number, unless all are learnt.

        Blocks of a stream, and parts between bad rows, always have both: a batch may hold rows of two of them.
        """
        if all(map(all, learnt)) and not is_stream(self.data) and self.bad_rows == "refuse":
            return {}
        counts = torch.tensor([sum(mask) for mask in learnt])
        return {"model_mask": Ragged.from_list(learnt, dtype=torch.bool), "num_model_tokens": counts}


def cut(place: str, prompt: list[int], response: list[int], limit: TokenLimit | None) -> list[int]:
    """Return the response, cut to the tokens that the limit leaves after the prompt."""
    if limit is None or len(prompt) + len(response) <= limit.tokens:
        return response
    room = limit.tokens - len(prompt)
    if room < 1:
        raise DataError(
            f"{place}: its prompt alone has {len(prompt)} tokens, and {limit.source} allows {limit.tokens}, so "
            f"no token of the response is left to learn; set long_rows='drop' or shorten the prompt"
        )
    return response[:room]
