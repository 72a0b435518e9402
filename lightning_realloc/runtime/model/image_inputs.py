"""Positions of tokens in models whose positions have parts for time, height and width, as in Qwen2-VL.

An image's tokens share a time and lie on a grid, so they take up fewer positions than tokens: text after an image
continues from the largest position before it. Transformers' models compute positions of whole sequences by
``get_rope_index``. Here a prompt has its positions from there, and the tokens of a response follow one by one, at a
distance from their places that is the prompt's shift. Source: Qwen2-VL, arXiv:2409.12191, section 2.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import DataError, counted

_KINDS = (("image", 1, "image_grid_thw"), ("video", 2, "video_grid_thw"))
"""What a placeholder stands for, its number among transformers' types of tokens, and the input with its grids."""
IMAGE_FAMILIES = {
    *("gemma3", "idefics3", "internvl", "llava", "llava_onevision", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"),
}
"""Types of models whose images are read as here; tests compare each with transformers."""
_BIDIRECTIONAL = frozenset({"gemma3"})
"""Types of models whose images' tokens see later ones of the same image."""
IMAGE_PARAMETERS = frozenset({"image_newline"})
"""Names of parameters that a model reads only for images and holds outside its tower, as LLaVA-OneVision does."""


def has_image_positions(model: nn.Module) -> bool:
    """Return whether positions of a transformers model have parts for time, height and width."""
    return hasattr(getattr(model, "base_model", None), "get_rope_index")


def image_positions(model: nn.Module, token_ids: Sequence[int], extras: Mapping[str, Tensor]) -> Tensor | None:
    """Return the positions (3, P) int64, on the host, of a prompt's tokens; None if they are their places.

    Raises:
        DataError: for other numbers of images than of their placeholders.
    """
    grids = {name: extras[name].cpu() for _, _, name in _KINDS if name in extras and len(extras[name])}
    if not grids or not has_image_positions(model):
        return None
    base: Any = model.base_model
    ids = torch.tensor([token_ids])
    types = token_types(model, ids)
    for kind, number, name in _KINDS:
        expected, found = len(grids.get(name, ())), _num_runs(types[0] == number)
        if name == "image_grid_thw" and expected != found:
            raise DataError(
                f"a prompt has {counted(found, 'run')} of {kind} tokens and {counted(expected, kind)}; "
                f"the processor of the model writes "
                f"one run for each, from one placeholder in the text"
            )
    taken = inspect.signature(base.get_rope_index).parameters
    further = {name: extras[name].cpu() for name in extras.keys() & taken.keys() if name not in grids}
    positions: Tensor = base.get_rope_index(input_ids=ids, mm_token_type_ids=types, **grids, **further)[0]
    return positions[:, 0]


def split_images(
    model: nn.Module, token_ids: Sequence[int], extras: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the grids of a prompt's images among those of several prompts, and those of the prompts after it."""
    types = token_types(model, torch.tensor(token_ids))
    first, rest = {}, {}
    for _, number, name in _KINDS:
        if name in extras:
            count = _num_runs(types == number)
            first[name], rest[name] = extras[name][:count], extras[name][count:]
    return first, rest


def placeholder_ids(model: nn.Module) -> frozenset[int]:
    """Return the tokens that stand for parts of images and videos; a model without such inputs has none."""
    found = (getattr(getattr(model, "config", None), f"{kind}_token_id", None) for kind, _, _ in _KINDS)
    return frozenset(token for token in found if isinstance(token, int))


def present_inputs(model: nn.Module, extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the further inputs that a model reads.

    A model of images gets none without images, as its tower reads no empty ones, and no stage of a pipeline after the
    first, which alone has the tower.
    """
    if not placeholder_ids(model):
        return dict(extras)
    stage = vars(model).get("stage_io")
    return {name: values for name, values in extras.items() if len(values) and (stage is None or stage.index == 0)}


def token_types(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the types (B, N) int of tokens (B, N): 0 for text, 1 for an image's, 2 for a video's."""
    config: Any = model.config
    types = torch.zeros_like(ids, dtype=torch.int32)
    for kind, number, _ in _KINDS:
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None:
            types[ids == token] = number
    return types


def image_blocks(model: nn.Module, ids: Tensor) -> Tensor | None:
    """Return the image (N,) that each token (N,) belongs to, -1 for text; None if images are read like text.

    In Gemma 3, the tokens of an image see each other, also those after them. Source: Gemma 3, arXiv:2503.19786.
    """
    if getattr(model.config, "model_type", None) not in _BIDIRECTIONAL:
        return None
    marked = token_types(model, ids) == 1
    begins = marked & ~torch.nn.functional.pad(marked[:-1], (1, 0))
    return torch.where(marked, begins.cumsum(0) - 1, -1)


def blocks_with_image_features(model: nn.Module) -> int:
    """Return the number of first blocks after which features of images are added to hidden states, as in Qwen3-VL.

    After the last block they change nothing that predicts text. Source: DeepStack, arXiv:2406.04334.
    """
    config = getattr(model, "config", None)
    levels = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    if not isinstance(config, PreTrainedConfig) or not levels:
        return 0
    num_blocks: int = config.get_text_config().num_hidden_layers
    return min(len(levels), num_blocks - 1)


def shift_after(positions: Tensor | None) -> int:
    """Return the distance of a token's position from its place, after a prompt with ``positions`` (3, P)."""
    return 0 if positions is None else int(positions.max()) + 1 - positions.shape[-1]


def placed_input(model: nn.Module, given: ModelInput) -> ModelInput:
    """Return a prompt with the positions of its tokens, if those depend on its images."""
    positions = image_positions(model, given.token_ids, given.extras) if given.extras else None
    return given if positions is None else replace(given, positions=positions, shift=shift_after(positions))


def _num_runs(marked: Tensor) -> int:
    """Return the number of runs of True in (N,) bool."""
    return int((marked & ~torch.nn.functional.pad(marked[:-1], (1, 0))).sum())
