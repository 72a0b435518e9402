"""Packed rows of prompts with images: positions and images of tokens, features of a slice, and gradients of towers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.runtime.forward.token_group import RowDivision
from lightning_realloc.runtime.model.image_inputs import (
    has_image_positions,
    image_blocks,
    image_positions,
    placeholder_ids,
    shift_after,
    split_images,
    token_types,
)
from lightning_realloc.runtime.model.structure import vision_parts


def row_positions(model: PreTrainedModel, packed: PackedBatch) -> Tensor:
    """Return the positions (1, N) of a row's tokens; (3, 1, N) in time, height and width if they depend on images."""
    if not packed.extras or not has_image_positions(model):
        return packed.position_ids
    ids, left = packed.input_ids[0].tolist(), packed.extras
    rows: list[Tensor] = []
    start = shift = 0
    for length, response, shared in zip(packed.lengths, packed.response_lengths, packed.shared, strict=True):
        sequence = ids[start : start + length]  # a conversation may show images after its first answer, too
        own, left = split_images(model, sequence, left)
        placed = image_positions(model, sequence, own)
        if not shared:
            shift = shift_after(None if placed is None else placed[:, : length - response])
        of_own = torch.arange(length).repeat(3, 1) if placed is None else placed
        rows.append(of_own + shared + shift if shared else of_own)
        start += length
    return torch.cat(rows, 1)[:, None].to(packed.input_ids.device, non_blocking=True)


def row_blocks(model: PreTrainedModel, packed: PackedBatch) -> Tensor | None:
    """Return the image (N,) that each of a row's tokens belongs to, -1 for text; None if images are read like text."""
    blocks = image_blocks(model, packed.input_ids[0]) if packed.extras else None
    return None if blocks is None else blocks.masked_fill(packed.response_mask, -1)


@contextmanager
def own_images(model: PreTrainedModel, packed: PackedBatch, division: RowDivision | None) -> Iterator[None]:
    """Give a model that runs on a slice of the row the features of the slice's tokens, in place of the images.

    The tower runs on all images of the row, inside the model's forward, where FSDP has gathered its weights.
    """
    if division is None or not packed.extras or not placeholder_ids(model):
        yield
        return

    def replace(_model: nn.Module, arguments: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        images = {name: given.pop(name) for name in packed.extras.keys() & given.keys()}
        outputs = _own_outputs(model, packed, division, images) if images else None
        return arguments, given if outputs is None else {**given, "mm_encoder_outputs": {"image": outputs}}

    handle = model.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _own_outputs(
    model: PreTrainedModel, packed: PackedBatch, division: RowDivision, images: Mapping[str, Tensor]
) -> Any | None:
    """Return the outputs of the tower for the tokens of images in this rank's slice; None if it has none."""
    marked = token_types(model, packed.input_ids)[0] == 1
    numbers = division.cut(torch.where(marked, marked.cumsum(0), 0))  # from 1: the slice may end with padding
    own = numbers[numbers > 0] - 1
    if not len(own):
        return None
    base: Any = model.base_model
    known = inspect.signature(base.get_image_features).parameters.keys()
    outputs = base.get_image_features(**{name: images[name] for name in images.keys() & known}, return_dict=True)
    outputs.pooler_output = _rows(outputs.pooler_output, own)
    if (levels := getattr(outputs, "deepstack_features", None)) is not None:
        outputs.deepstack_features = [_rows(level, own) for level in levels]
    return outputs


def _rows(features: Any, own: Tensor) -> Any:
    """Return some of the rows of the features of all images, as if each were an image."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)[own][:, None]
    return [torch.cat(list(features))[own]]


@contextmanager
def tower_takes_part(model: PreTrainedModel) -> Iterator[None]:
    """Give trained parameters that only images use gradients of zero at least, also in a pack without images.

    Ranks reduce the gradients of the same parameters together, and another rank's pack may have images. Some families
    leave parameters of their tower unused.
    """
    if not torch.is_grad_enabled() or not placeholder_ids(model):
        yield
        return

    def join(_module: nn.Module, _arguments: Any, embedded: Tensor) -> Tensor:
        # FSDP has gathered them by now, as other parameters.
        return cast(Tensor, _Joined.apply(embedded, *_tower(model)))

    handle = model.get_input_embeddings().register_forward_hook(join)
    try:
        yield
    finally:
        handle.remove()


def _tower(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters that only images use."""
    parts = vision_parts(model)
    return [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name in parts]


class _Joined(torch.autograd.Function):
    """The first tensor, which depends on the others as far as autograd knows."""

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(other.shape, other.dtype, other.device) for other in others]
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # One element each: whole ones would be as large as the tower, next to its gradients.
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return gradients[0], *zeros
