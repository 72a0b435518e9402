"""The largest workload of an iteration that a run's data and sampling allow."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_realloc.batch.samples import Samples
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.tuning.memory.parts import Workload


def largest_workload(module: RunnableAlgorithm, trainer: Trainer, trained: tuple[str, ...]) -> Workload | None:
    """Return the largest workload that data and sampling allow; None if the data's lengths are unknown."""
    table = getattr(getattr(trainer, "datamodule", None), "tables", {}).get("train")
    num_rows, sampling = rows_per_batch(trainer), getattr(module, "sampling", None)
    if not isinstance(table, Samples) or num_rows is None or not trained:
        return None
    prompt = _longest(table, "prompt_ids")
    response = _longest(table, "response_ids") if sampling is None else sampling.max_new_tokens
    if prompt is None or response is None:
        return None
    options, num_responses = module.train_options_of(trained[0]), 1 if sampling is None else sampling.n
    return Workload(
        num_sequences=num_rows * num_responses,
        prompt_tokens=max(1, prompt),
        response_tokens=max(1, response),
        micro_batch_tokens=options.micro_batch_tokens_on(trainer.strategy.root_device.type),
        num_minibatches=options.num_minibatches,
        num_epochs=options.num_epochs,
        samples_per_prompt=num_responses,
    )


def _longest(table: Samples, column: str) -> int | None:
    return int(table.ragged(column).lengths.max()) if column in table and len(table) else None


def rows_per_batch(trainer: Trainer) -> int | None:
    """Return the samples of a loader's batch, with both sides of pairs; None for another library's loader."""
    loader = trainer.train_dataloader
    size, group_size = getattr(loader, "batch_size", None), getattr(loader, "group_size", None)
    return size * group_size if isinstance(size, int) and isinstance(group_size, int) else None
