"""The largest workload of an iteration, and the longest sequence, that a run's data and sampling allow."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_realloc.batch.packing import too_long_for
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import group_name
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import DataError
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
        group_size=module.group_size,
    )


def _longest(table: Samples, column: str) -> int | None:
    return int(table.ragged(column).lengths.max()) if column in table and len(table) else None


def rows_per_batch(trainer: Trainer) -> int | None:
    """Return the samples of a batch, with both sides of pairs; None for another library's loader.

    Before there is a loader, the data module tells.
    """
    loader = trainer.train_dataloader
    loader = getattr(trainer, "datamodule", None) if loader is None else loader
    size, group_size = getattr(loader, "batch_size", None), getattr(loader, "group_size", None)
    return size * group_size if isinstance(size, int) and isinstance(group_size, int) else None


def check_longest_sequences(
    module: RunnableAlgorithm, trainer: Trainer, plan: ExecutionPlan, calls: Iterable[ModelFunctionCall]
) -> None:
    """Compare the smallest ``micro_batch_tokens`` of all calls with the longest sequence that data and sampling allow.

    Raises:
        DataError: if a row of the data is too long. Responses that may become too long are warned about.
    """
    table = getattr(getattr(trainer, "datamodule", None), "tables", {}).get("train")
    if not isinstance(table, Samples) or not len(table) or "prompt_ids" not in table:
        return
    known = table.ragged("prompt_ids").lengths
    if "response_ids" in table:
        known = known + table.ragged("response_ids").lengths
    sampling, group_size, device = getattr(module, "sampling", None), 1, trainer.strategy.root_device.type
    if sampling is None and len(table) % module.group_size == 0:
        group_size = module.group_size
    longest = int(known.reshape(-1, group_size).sum(dim=1).max())
    possible = longest if sampling is None else (longest + sampling.max_new_tokens) * module.group_size
    limits = {
        call.name: plan.call(call.name).micro_batch_tokens
        or module.train_options_of(call.role).micro_batch_tokens_on(device)
        for call in calls
        if call.role is not None and call.kind != "generate"
    }
    if not limits:
        return
    name = min(limits, key=limits.__getitem__)
    if longest > limits[name]:
        raise DataError(too_long_for(name, limits[name], longest, item_name=group_name(group_size)))
    if sampling is not None and possible > limits[name]:
        rank_zero_warn(
            f"micro_batch_tokens={limits[name]} of {name} is less than the {possible} tokens of the longest prompt "
            f"with max_new_tokens={sampling.max_new_tokens}: the run ends when there is such a "
            f"{group_name(module.group_size)}; raise it, or lower max_new_tokens"
        )
