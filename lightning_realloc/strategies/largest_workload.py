"""The largest workload of an iteration, the longest sequence, and the images that a run's data and sampling allow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_realloc.batch.samples import Samples, extra_inputs, prompt_images
from lightning_realloc.batch.shares import group_name, too_long_for
from lightning_realloc.data.images.sample_images import SampleImages
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import DataError
from lightning_realloc.strategies.algorithm_protocol import RunnableAlgorithm
from lightning_realloc.tuning.memory.parts import Workload
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt
from lightning_realloc.tuning.shapes.tower import Tower

SAMPLED_ROWS = 256
"""Rows whose images are read for a mean. Raising it helps where few rows have most of the images."""


def largest_workload(
    module: RunnableAlgorithm, trainer: Trainer, trained: tuple[str, ...], tower: Tower | None = None
) -> Workload | None:
    """Return the largest workload that data and sampling allow; None if the data's lengths are unknown.

    Args:
        trained: Trained roles, of which the first one sets micro-batches and optimizer steps.
        tower: Tower that reads the rows' images; None leaves images out.
    """
    table = _train_table(trainer)
    num_rows, sampling = rows_per_batch(trainer), getattr(module, "sampling", None)
    if table is None or num_rows is None or not trained:
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
        images=largest_images(trainer, tower),
    )


def _train_table(trainer: Trainer) -> Samples | None:
    """Return the rows to train on; None for streams and other libraries' data."""
    table = getattr(getattr(trainer, "datamodule", None), "tables", {}).get("train")
    return table if isinstance(table, Samples) else None


def mean_images(trainer: Trainer, tower: Tower | None) -> ImagesPerPrompt | None:
    """Return the mean images of rows to train on, from `SAMPLED_ROWS` of them; None without images or such rows."""
    table = _train_table(trainer)
    if table is None or tower is None or not len(table):
        return None
    rows = torch.linspace(0, len(table) - 1, min(len(table), SAMPLED_ROWS)).round().long().tolist()
    found = [images for row in rows if (images := _images_of(table.select([row]), tower)) is not None]
    return ImagesPerPrompt.mean(found, len(rows)) if found else None


def usual_sequence(
    module: RunnableAlgorithm, trainer: Trainer, tower: Tower | None
) -> tuple[ImagesPerPrompt | None, float]:
    """Return the `mean_images`, and the mean tokens of rows with a response that is as long as it may be."""
    table, images = _train_table(trainer), mean_images(trainer, tower)
    if table is None or images is None:
        return None, 1.0
    sampling, columns = getattr(module, "sampling", None), table.columns.keys() & {"prompt_ids", "response_ids"}
    tokens = sum(table.ragged(name).num_tokens for name in columns) / len(table)
    return images, max(1.0, tokens + (0 if sampling is None else sampling.max_new_tokens))


def largest_images(trainer: Trainer, tower: Tower | None) -> ImagesPerPrompt | None:
    """Return the images of the row to train on with the most tokens or pixels of images; None as in `mean_images`."""
    table = _train_table(trainer)
    if table is None or tower is None:
        return None
    sizes = _image_tokens(table)
    return _images_of(table.select([int(sizes.argmax())]), tower) if len(sizes) and int(sizes.max()) else None


def _image_tokens(table: Samples) -> Tensor:
    """Return each row's number of placeholders, or of rows of pixels where rows bring tensors of their own."""
    shown = next((images for images in prompt_images(table) if isinstance(images, SampleImages)), None)
    if shown is None:
        pixels = [one.lengths for name, one in extra_inputs(table).items() if name.startswith("pixel_values")]
        return sum(pixels, start=torch.zeros(len(table), dtype=torch.int64))
    counts = torch.zeros(len(table), dtype=torch.int64)
    for name in table.columns.keys() & {"prompt_ids", "response_ids"}:
        column = table.ragged(name)
        before = torch.nn.functional.pad((column.values == shown.processor.token_id).cumsum(0), (1, 0))
        counts += before[column.offsets[1:]] - before[column.offsets[:-1]]
    return counts


def _images_of(row: Samples, tower: Tower) -> ImagesPerPrompt | None:
    """Return the images of one row, from the inputs that the model gets; None without images."""
    (images,) = prompt_images(row)
    if isinstance(images, SampleImages):
        shapes, known = images.placeholders.shapes, images.placeholders.inputs
    else:
        known = {name: column.values for name, column in extra_inputs(row).items() if len(column.values)}
        shapes = {name: tuple(values.shape) for name, values in known.items()}
    if not any(name.startswith("pixel_values") for name in shapes):
        return None
    about = {name: values.tolist() for name, values in known.items() if not name.startswith("pixel_")}
    parts = tower.parts_of(shapes, about)
    # Of the prompt's length they are counted already; here, as rows of the projector.
    return ImagesPerPrompt.from_parts(parts, (sum(parts) - len(parts) * tower.num_extra) // tower.merge**2)


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
    table = _train_table(trainer)
    if table is None or not len(table) or "prompt_ids" not in table:
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
