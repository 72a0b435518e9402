"""Tiny vision-language models of transformers' families, and random images as their processors would give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from tests.models import SIZES

IMAGE, VIDEO, BEGIN, END = 120, 121, 122, 123
"""Tokens that stand for parts of images and videos, and those around an image."""
SIDE = 16
"""Height and width of images of families that resize them to squares, in pixels."""
_TOWER: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 4,
}  # fmt: skip
_QWEN_TOWER: Mapping[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_THREE_PARTS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_FRAMES = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END
}  # fmt: skip


def _text(kind: str, **further: Any) -> dict[str, Any]:
    return {"model_type": kind, **SIZES, **further}


VISION_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": _text("qwen2_5_vl_text", rope_parameters=_THREE_PARTS),
        "vision_config": {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        **_FRAMES,
    },
    "qwen2_vl": {
        "text_config": _text("qwen2_vl_text", rope_parameters=_THREE_PARTS),
        "vision_config": {
            "depth": 2, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        **_FRAMES,
    },
    "qwen3_vl": {
        "text_config": _text("qwen3_vl_text", head_dim=16, rope_parameters=_THREE_PARTS),
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        **_FRAMES,
    },
    "llava": {
        "text_config": _text("llama"),
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "patch_size": 8, "projection_dim": 32},
        "image_token_id": IMAGE,
        "vision_feature_layer": -1,
    },
    "llava_onevision": {
        "text_config": _text("qwen2"),
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "patch_size": 8},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_grid_pinpoints": [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
        "vision_feature_layer": -1,
    },
    "internvl": {
        "text_config": _text("qwen2"),
        "vision_config": {**_TOWER, "image_size": [SIDE, SIDE], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
    },
    "gemma3": {
        "text_config": _text(
            "gemma3_text", head_dim=16, sliding_window=12, query_pre_attn_scalar=16, tie_word_embeddings=False
        ),
        "tie_word_embeddings": False,
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
    },
    "mistral3": {
        "text_config": _text("mistral"),
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 2 * SIDE},
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "smolvlm": {
        "text_config": _text("llama"), "vision_config": _TOWER, "scale_factor": 2, "image_token_id": IMAGE
    },
    "idefics3": {
        "text_config": _text("llama"), "vision_config": _TOWER, "scale_factor": 2, "image_token_id": IMAGE
    },
}  # fmt: skip


def vision_config(family: str, **of_text: Any) -> PreTrainedConfig:
    """Return the family's configuration of a tiny model, with changed settings of its text decoder."""
    sizes = VISION_FAMILIES[family]
    config: PreTrainedConfig = AutoConfig.for_model(
        family, **{**sizes, "text_config": {**sizes["text_config"], **of_text}}
    )
    for own in (config, config.get_text_config()):
        own.bos_token_id, own.eos_token_id, own.pad_token_id = 1, 2, 0
    return config


def tiny_vision_model(family: str, *, seed: int = 0, **of_text: Any) -> PreTrainedModel:
    """Build the family's model of images and text: fp32, eval mode, weights that tell images clearly apart."""
    config = vision_config(family, **of_text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model: PreTrainedModel = made.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            elif not parameter.any():  # Gemma 3's projection
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(3.0)
    return model


def image_inputs(family: str, seed: int, *, height: int = SIDE, width: int = SIDE) -> tuple[dict[str, Tensor], int]:
    """Return the inputs of one random image, each (rows, ...), and the number of its tokens."""
    generator = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=generator)

    if family.startswith("qwen"):
        rows, columns = height // 4, width // 4
        grid = torch.tensor([[1, rows, columns]])
        return {"pixel_values": pixels(rows * columns, 3 * 2 * 4 * 4), "image_grid_thw": grid}, rows * columns // 4
    sizes = torch.tensor([[height, width]])
    if family == "mistral3":
        whole = pixels(1, 3, 2 * SIDE, 2 * SIDE)
        return {"pixel_values": whole, "image_sizes": sizes}, (height // 8) * (width // 8)
    if family == "llava_onevision":  # the whole image, and one part of it with a token at the end of each line
        return {"pixel_values": pixels(1, 2, 3, SIDE, SIDE), "image_sizes": torch.tensor([[SIDE, SIDE]])}, 4 + 4 + 2
    shape = (1, 1, 3, SIDE, SIDE) if family in ("smolvlm", "idefics3") else (1, 3, SIDE, SIDE)
    return {"pixel_values": pixels(*shape)}, 4


def prompt_with_images(
    family: str, seeds: Sequence[int], *, first: Sequence[int] = (5, 6)
) -> tuple[list[int], dict[str, Tensor]]:
    """Return the tokens of a prompt with an image for each seed, of different sizes where the family has them."""
    tokens, parts = list(first), dict[str, list[Tensor]]()
    for number, seed in enumerate(seeds):
        sizes = [(SIDE, SIDE), (SIDE, 2 * SIDE), (2 * SIDE, SIDE)][number % 3]
        inputs, count = image_inputs(family, seed, height=sizes[0], width=sizes[1])
        tokens += [BEGIN, *[IMAGE] * count, END, 7]
        for name, values in inputs.items():
            parts.setdefault(name, []).append(values)
    return [*tokens, 8], {name: torch.cat(values) for name, values in parts.items()}


def forward_arguments(family: str, tokens: Sequence[int], extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arguments with which transformers' own forward reads one sequence."""
    ids = torch.tensor([list(tokens)])
    arguments = {"input_ids": ids, **extras}
    if not extras:
        return arguments
    if family.startswith("qwen"):
        arguments["mm_token_type_ids"] = (ids == IMAGE).int()
    if family == "gemma3":
        arguments["token_type_ids"] = (ids == IMAGE).int()
    if family in ("smolvlm", "idefics3"):
        arguments["pixel_values"] = extras["pixel_values"].flatten(0, 1)[None]
    return arguments
