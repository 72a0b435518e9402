"""Data module of prompts for generation, with further columns for reward functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.chat import (
    Text,
    as_message,
    conversation_text,
    partial_answer,
    prompt_text,
    prompt_token_ids,
)
from lightning_realloc.data.data_module import USE_WITHOUT_STREAMING, RowDataModule
from lightning_realloc.data.images.row_images import check_whole_images
from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.data.row_tables import LongRows, make_samples
from lightning_realloc.data.rows import Row, RowSource, RowSources, is_named
from lightning_realloc.data.sampling.curriculum import Curriculum, CurriculumName, resolve_curriculum
from lightning_realloc.data.sampling.drawn_loader import DrawnLoader
from lightning_realloc.data.sampling.mixture import Mix, Mixture
from lightning_realloc.data.sources import is_stream
from lightning_realloc.errors import DataError, require_choice

_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""Argument names that reward functions receive in addition to the data's columns."""

EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""Prompt of rows without one, to which an environment's ``reset`` appends, as in TRL."""
TextPrompts = Literal["plain", "user", "auto"]
"""Treatment of prompts that are text."""
DATA_SET = "data_set"
"""Column with the name of a row's data set, where ``data`` names several."""


class PromptDataModule(RowDataModule):
    """Batches of prompts for generation, the same on every rank.

    A batch is :class:`Samples` with ``prompt_ids`` (token ids), ``prompt`` (the text or the messages) and every other
    column of the data as Python objects.

    Rows may lack the column ``prompt`` if an environment writes prompts. Without ``data``, each has a number of its own
    in the column ``seed``, and ``Trainer(max_steps=...)`` says how many there are.

    Args:
        data: Rows, see :class:`RowDataModule`; or several data sets by name, whose rows get their set's name in the
            column ``data_set``, and None where only other sets have a column; None: the environment owns the tasks.
        val_data: Held-out rows, in the same forms; None: none but those of ``val_fraction``.
        prompt_column: Column with text, or with a list of messages for the chat template. A final assistant message is
            continued.
        max_prompt_tokens: Maximum length of a prompt; by default one less than the models' context.
        long_prompts: Policy for longer prompts: ``refuse`` raises an error, ``truncate`` keeps their last tokens,
            ``drop`` skips their rows.
        text_prompts: Treatment of prompts that are text: ``"plain"`` encodes them as they are; ``"user"`` makes each a
            user message for the chat template, which an instruction-tuned model expects; ``"auto"`` does so if the
            tokenizer has a template. Reward functions receive text in any case.
        curriculum: Choice of prompts by their measured difficulty: ``"balanced"`` prefers prompts of which half the
            responses are right, ``"rest"`` only lets solved and hopeless ones rest; or a :class:`Curriculum`. None: all
            equally often.
        mix: Weight of each named data set, such as ``{"gsm": 0.7, "code": 0.3}``, in rows of every batch; or a list of
            these, each with the batch from which it holds: ``[(0, {...}), (100, {...})]``. None: by their rows.
        settings: Arguments of :class:`RowDataModule` except ``long_rows``: batch size, held-out rows, tokenizer,
            seed, order.

    Raises:
        DataError: in ``setup``, for data that cannot be used, with file and line.

    Example:
        >>> rows = [{"prompt": "2 + 2 =", "answer": "4"}]
        >>> data = PromptDataModule(rows, batch_size=1, tokenizer="gpt2", max_prompt_tokens=128)
    """

    def __init__(
        self,
        data: RowSources | None = None,
        *,
        batch_size: int,
        val_data: RowSources | None = None,
        prompt_column: str = "prompt",
        max_prompt_tokens: int | None = None,
        long_prompts: LongRows = "refuse",
        text_prompts: TextPrompts = "plain",
        curriculum: Curriculum | CurriculumName | None = None,
        mix: Mix | None = None,
        **settings: Any,
    ) -> None:
        source: Any = [] if data is None else data
        held_out: Any = val_data
        super().__init__(source, batch_size=batch_size, val_data=held_out, long_rows=long_prompts, **settings)
        self._has_data = data is not None
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise DataError(f"max_prompt_tokens={max_prompt_tokens} must be at least 1; use None for the models' limit")
        require_choice("text_prompts", text_prompts, get_args(TextPrompts), DataError)
        for setting, one in (("data", data), ("val_data", val_data)):
            _check_names(setting, one)
        self.prompt_column = prompt_column
        self.message_columns = (prompt_column,)
        self.text_prompts = text_prompts
        self.max_prompt_tokens = max_prompt_tokens
        self.curriculum = resolve_curriculum(curriculum)
        self.mix = mix
        self._check_drawing()

    def _check_drawing(self) -> None:
        """Raise DataError for settings that do not go with a curriculum or several data sets."""
        if self.mix is not None:
            if not is_named(self.data):
                raise DataError(
                    f"mix={self.mix!r} weighs data sets by name, and data has no names; give data={{'gsm': ..., "
                    f"'code': ...}}"
                )
            Mixture(self.mix, list(self.data))
        if not self._is_drawn:
            return
        setting = "data with names" if self.curriculum is None else "a curriculum"
        if is_stream(self.data):
            raise DataError(
                f"{setting} draws batches from all rows, which a stream does not have yet; {USE_WITHOUT_STREAMING}"
            )
        if not self._has_data:
            raise DataError(
                "a curriculum needs prompts that come again, and without data each row is new; leave curriculum out, "
                "or give data="
            )
        if self.bucket_batches is not None:
            raise DataError(
                f"bucket_batches={self.bucket_batches} orders the rows of an epoch by length, and {setting} draws each "
                f"batch by itself; leave one of them out"
            )

    @property
    def _is_drawn(self) -> bool:
        """Whether batches are drawn one by one, in place of epochs."""
        return self.curriculum is not None or is_named(self.data)

    def setup(self, stage: str | None = None) -> None:
        """Read all rows; also refuse an algorithm or a Trainer that a curriculum cannot work with."""
        module = self._module()
        if self.curriculum is not None and module is not None and not getattr(module, "reports_rewards", False):
            raise DataError(
                f"a curriculum measures difficulty by the rewards of training, and {type(module).__name__} reports "
                f"none; leave curriculum out"
            )
        if self._is_drawn and self._overfits:
            raise DataError(
                "overfit_batches trains on the same batches in every epoch, and a curriculum or data with names draws "
                "others; leave one of them out"
            )
        super().setup(stage)

    def make_loader(self) -> BatchLoader:
        """Return the loader of training batches; one that draws them with a curriculum or named data sets."""
        if not self._is_drawn:
            return super().make_loader()
        table = self._table("train")
        sets = {"data": len(table)}
        if is_named(self.data):
            found = Counter(map(str, table.objects(DATA_SET)))
            sets = {name: found[name] for name in self.data}
        empty = [name for name, size in sets.items() if not size]
        if empty:
            raise DataError(
                f"no row of {', '.join(empty)} is left to train on; hold out fewer rows, raise the token limit, or "
                f"leave the data set out"
            )
        return DrawnLoader(
            table,
            batch_size=self.batch_size,
            sets=sets,
            mixture=Mixture(self.mix or sets, list(sets)),
            curriculum=self.curriculum,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )

    def record_rewards(self, prompt_ids: Tensor, rewards: Tensor) -> dict[str, float]:
        """Record the rewards of an iteration, and return metrics of its difficulty and data sets.

        Args:
            prompt_ids: (B,) ids of the samples that the responses belong to.
            rewards: (B,) rewards of all ranks' responses, NaN where one is missing.
        """
        loader = self._train_loader
        return loader.record(prompt_ids, rewards) if isinstance(loader, DrawnLoader) else {}

    def split_column(self, rows: Sequence[Row]) -> str:
        """Return the prompts' column, so that equal prompts are never in both training and held-out rows."""
        return self.prompt_column

    def read(self, source: RowSource) -> tuple[Row, ...]:
        """Return all rows of a source; numbered ones of the whole run without data.

        Raises:
            DataError: also without data, if there is no environment that writes prompts, or no number of steps.
        """
        if is_named(source):
            return self._read_sets(source)
        if self._has_data or source is not self.data:
            return super().read(source)
        steps = getattr(self.trainer, "max_steps", -1)
        if not self._has_written_prompts or steps < 1:
            raise DataError(
                f"without data, an environment of messages writes the prompts, and Trainer(max_steps=...) bounds the "
                f"run; the algorithm has {'one' if self._has_written_prompts else 'none'}, and max_steps={steps}; "
                f"give both, or data="
            )
        return super().read([{"seed": seed} for seed in range(steps * self.batch_size)])

    def _read_sets(self, sources: Mapping[str, RowSource]) -> tuple[Row, ...]:
        """Return the rows of all data sets, with the same columns and their set's name."""
        rows: list[Row] = []
        for name, source in sources.items():
            found = super().read(source)
            if DATA_SET in found[0].values:
                raise DataError(f"{found[0].place} has a column {DATA_SET!r}, which names the data set; rename it")
            self.require(found, self.prompt_column, way_out=f"rename a column of the data set {name!r}")
            rows += (Row(row.place, {**row.values, DATA_SET: name}) for row in found)
        columns = dict.fromkeys(column for row in rows for column in row.values)
        return tuple(Row(row.place, {column: row.values.get(column) for column in columns}) for row in rows)

    def shaped(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Return the rows, with empty prompts where they have none and an environment writes them."""
        if self.prompt_column != "prompt" or not self._has_written_prompts or "prompt" in rows[0].values:
            return rows
        return tuple(Row(row.place, {**row.values, "prompt": EMPTY_PROMPT}) for row in rows)

    @property
    def _has_written_prompts(self) -> bool:
        return bool(getattr(self._module(), "has_written_prompts", False))

    def makes_messages(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether prompts that are text become a user message."""
        return self.text_prompts == "user" or (self.text_prompts == "auto" and tokenizer.chat_template is not None)

    def tabulate(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Samples:
        """Return ``prompt_ids``, ``prompt`` and the other columns of the rows that fit."""
        self.require(rows, self.prompt_column, way_out="set prompt_column to one of them")
        taken = sorted(_ARGUMENTS & rows[0].values.keys())
        if taken:
            raise DataError(
                f"{rows[0].place}: reward functions receive columns by name, next to their arguments "
                f"{sorted(_ARGUMENTS)}; rename the columns {taken}"
            )
        if self.prompt_column != "prompt" and "prompt" in rows[0].values:
            raise DataError(
                f"{rows[0].place} has a column 'prompt' as well as prompt_column={self.prompt_column!r}, and both "
                f"would be the samples' prompt; rename one"
            )
        # One position is reserved for the first generated token.
        limit = self.token_limit(self.max_prompt_tokens, "max_prompt_tokens", reserved=1)
        kept: list[Row] = []
        prompts: list[list[int]] = []
        makes_messages = self.makes_messages(tokenizer)
        given = [as_message(row.values[self.prompt_column], makes_messages) for row in rows]
        texts = [
            _opening(tokenizer, prompt, row.place, self.template_of(row))
            for prompt, row in zip(given, rows, strict=True)
        ]
        for row, ids in zip(rows, prompt_token_ids(tokenizer, texts), strict=True):
            if self.fitted(row, len(ids), limit, "long_prompts"):
                kept.append(row)
                prompts.append(ids if limit is None else ids[-limit.tokens :])
                check_whole_images(row, prompts[-1])
        if not kept:
            return make_samples({}, 0, "prompt")
        data = self.data_of(kept)
        data["prompt"] = data[self.prompt_column]
        return make_samples({"prompt_ids": Ragged.from_list(prompts)}, len(kept), "prompt", data)


def _opening(tokenizer: PreTrainedTokenizerBase, prompt: Any, place: str, template: Mapping[str, Any]) -> Text:
    """Return the text to generate from; a final assistant message is continued."""
    if partial_answer(prompt) is None:
        return prompt_text(tokenizer, prompt, place, template=template)
    if prompt[-1].get("tool_calls"):
        raise DataError(
            f"{place}: its last message calls tools without a result; add the tool's message, or remove the call"
        )
    return conversation_text(
        tokenizer, prompt, place, add_generation_prompt=False, continue_final_message=True, template=template
    )


def _check_names(setting: str, source: object) -> None:
    """Raise DataError for several data sets of which one has no name, and for none of them."""
    if type(source) is dict and not source:
        raise DataError(f"{setting}={{}} names no data set; give each a name, as in {{'gsm': 'gsm8k.jsonl'}}")
    unnamed = [name for name in source if not isinstance(name, str) or not name] if is_named(source) else []
    if unnamed:
        raise DataError(f"{setting} names a data set {unnamed[0]!r}, and names are text; write one such as 'gsm'")
