"""Prompts to generate from, with whatever reward functions need beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.chat import Text, begun_answer, conversation_text, prompt_text, prompt_token_ids
from lightning_realloc.data.data_module import LongRows, RowDataModule, tabulated
from lightning_realloc.data.rows import Row, RowSource
from lightning_realloc.errors import DataError

_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""What reward functions are given besides the columns of the data, by name."""


class PromptDataModule(RowDataModule):
    """Batches of prompts for generation, the same on every rank.

    A batch is :class:`Samples` with ``prompt_ids`` (token ids), ``prompt`` (the text, or the messages) and every other
    column of the data as python objects.

    Args:
        prompt_column: Holds text, or a list of messages for the chat template. A last
            message from the assistant is gone on with.
        max_prompt_tokens: The longest prompt that is accepted; by default one less than the models have positions.
        long_prompts: What happens to longer ones: ``refuse`` them all with an error, ``truncate`` them to their last
            tokens, or ``drop`` their rows.
        settings: Of :class:`RowDataModule` but ``long_rows``: data, batch size, held-out rows, tokenizer, seed, order.

    Raises:
        DataError: in ``setup``, for anything in the data that cannot be used, with its file and line.
    """

    def __init__(
        self,
        data: RowSource,
        *,
        batch_size: int,
        prompt_column: str = "prompt",
        max_prompt_tokens: int | None = None,
        long_prompts: LongRows = "refuse",
        **settings: Any,
    ) -> None:
        super().__init__(data, batch_size=batch_size, long_rows=long_prompts, **settings)
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise DataError(f"max_prompt_tokens={max_prompt_tokens} must be at least 1; use None for the models' limit")
        self.prompt_column = prompt_column
        self.max_prompt_tokens = max_prompt_tokens

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the prompts' column: equal prompts are never on both sides."""
        return self.prompt_column

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return ``prompt_ids``, ``prompt`` and the other columns of the rows that fit."""
        self.require(rows, self.prompt_column)
        taken = sorted(_ARGUMENTS & rows[0].values.keys())
        if taken:
            raise DataError(
                f"{rows[0].place}: reward functions are given columns by name, beside their arguments "
                f"{sorted(_ARGUMENTS)}; rename the columns {taken}"
            )
        if self.prompt_column != "prompt" and "prompt" in rows[0].values:
            raise DataError(
                f"{rows[0].place} has a column 'prompt' beside prompt_column={self.prompt_column!r}, and both would be "
                f"the samples' prompt; rename one"
            )
        # One position is left for the first token that is generated.
        limit = self.token_limit(self.max_prompt_tokens, "max_prompt_tokens", reserved=1)
        kept: list[Row] = []
        prompts: list[list[int]] = []
        texts = [_opening(tokenizer, row, self.prompt_column, self.template_of(row)) for row in rows]
        for row, ids in zip(rows, prompt_token_ids(tokenizer, texts), strict=True):
            if self.fitted(row, len(ids), limit, "shorten it, or set long_prompts to 'truncate' or 'drop'"):
                kept.append(row)
                prompts.append(ids if limit is None else ids[-limit.tokens :])
        if not kept:
            return tabulated({}, 0, "prompt")
        data = self.data_of(kept)
        data["prompt"] = data[self.prompt_column]
        return tabulated({"prompt_ids": Ragged.from_list(prompts)}, len(kept), "prompt", data)


def _opening(tokenizer: PreTrainedTokenizerBase, row: Row, column: str, template: Mapping[str, Any]) -> Text:
    """Return what a response goes on from: the assistant's own words, where it has begun already."""
    prompt = row.values[column]
    if begun_answer(prompt) is None:
        return prompt_text(tokenizer, prompt, row.place, template=template)
    if prompt[-1].get("tool_calls"):
        raise DataError(
            f"{row.place}: its last message calls tools, and nothing answers; add the tool's message, or leave the "
            f"call out"
        )
    return conversation_text(
        tokenizer, prompt, row.place, add_generation_prompt=False, continue_final_message=True, template=template
    )
