"""Data modules in several runs: each run reads, orders and checks rows as with a new data module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig

from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.errors import DataError
from tests.models import byte_tokenizer

ROWS = [{"prompt": f"<{number}>", "answer": number} for number in range(23)]
HELD_OUT = [{"prompt": "<held out>", "answer": 0}]


class Model(L.LightningModule):
    """A module with one parameter, a tokenizer and a context length, that records its prompts."""

    def __init__(self, *, bos: bool = False, context: int = 64) -> None:
        super().__init__()
        self.tokenizer = byte_tokenizer()
        self.tokenizer.chat_template = "<s>{{ messages[0].content }}" if bos else None
        self.role = SimpleNamespace(config=lambda: LlamaConfig(max_position_embeddings=context))
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def roles(self) -> list[Any]:
        """Return the one whose context limits prompts."""
        return [self.role]

    def training_step(self, batch: Samples, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch.ids.tolist(), batch.ragged("prompt_ids").to_lists()))
        return self.weight.sum()

    def validation_step(self, batch: Samples, batch_idx: int) -> None:
        self.seen.append(batch.ragged("prompt_ids").to_lists())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(max_steps: int = 8, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=max_steps,
        num_sanity_val_steps=0, **{"enable_checkpointing": False, **options},
    )  # fmt: skip


def fit(data: RowDataModule, module: Model, **options: Any) -> list[Any]:
    trainer(**options).fit(module, data)
    return module.seen


def rows(**options: Any) -> PromptDataModule:
    return PromptDataModule(ROWS, batch_size=4, val_data=HELD_OUT, text_prompts="auto", **options)


def stream(**options: Any) -> PromptDataModule:
    table = Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)
    return PromptDataModule(
        table, batch_size=4, val_data=HELD_OUT, text_prompts="auto", shuffle_buffer=6, **options
    )  # fmt: skip


@pytest.mark.parametrize("new", [rows, stream])
def test_each_run_gets_the_batches_of_a_new_data_module(new: Callable[[], PromptDataModule]) -> None:
    """A sweep over learning rates compares runs on the same rows, each with its own model's token ids."""
    data = new()
    first = fit(data, Model())
    assert first == fit(data, Model()) == fit(new(), Model())
    module = Model(bos=True)
    with_bos = fit(data, module)
    assert with_bos == fit(new(), Model(bos=True)) != first
    trainer().validate(module, data, verbose=False)
    plain = Model()
    trainer().validate(plain, data, verbose=False)
    assert [len(prompts[0]) for prompts in (module.seen[-1], plain.seen[-1])] == [
        len("<s><held out>"),
        len("<held out>"),
    ]
    with pytest.raises(DataError, match="the models' context of 4 positions allows 3"):
        fit(data, Model(context=4))
    assert fit(data, Model()) == first


@pytest.mark.parametrize("new", [rows, stream])
def test_a_run_resumes_with_a_data_module_that_served_another_one(
    tmp_path: Path, new: Callable[[], PromptDataModule]
) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"limit_val_batches": 0, "max_steps": 13}
    data = new()
    whole = fit(data, Model(), callbacks=[saver], enable_checkpointing=True, **options)
    for stop in (3, 8):
        resumed = Model()
        trainer(**options).fit(resumed, data, ckpt_path=tmp_path / f"step={stop}.ckpt")
        assert whole[:stop] + resumed.seen == whole


def test_a_trainer_that_fits_again_continues_the_stream() -> None:
    module, data, first = Model(), stream(), trainer(3, limit_val_batches=0)
    first.fit(module, data)
    first.fit_loop.epoch_loop.max_steps = 8
    first.fit_loop.epoch_progress.reset()
    first.fit(module, data)
    assert module.seen == fit(stream(), Model(), max_steps=8, limit_val_batches=0)


def test_rows_of_a_generator_serve_several_runs() -> None:
    def generated() -> Iterator[dict[str, Any]]:
        yield from ROWS

    data = PromptDataModule(generated(), batch_size=4, val_data=iter(HELD_OUT), text_prompts="auto")
    for _ in range(2):
        assert fit(data, Model()) == fit(rows(), Model())
