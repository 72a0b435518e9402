"""Sizes of the tower of a model of images and text: how its family reads an image, and the bytes of a pass over images.

Pure arithmetic. Images are resized as transformers' processors do with the settings of published models, or as the
inputs say that a processor made. Tests compare patches and tokens with those of the processors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.shapes.experts import read_size
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt, is_of_tower, vision_params
from lightning_realloc.tuning.shapes.model_shape import ACTIVATION_COPIES, ModelShape

_FLOAT32 = 4
_CHANNELS = 3
_PIXEL_BOUNDS = {"qwen2_vl": (3136, 12_845_056), "qwen2_5_vl": (3136, 12_845_056), "qwen3_vl": (65_536, 16_777_216)}
"""Fewest and most pixels that images are resized to, by family. Source: the models' ``preprocessor_config.json``."""
_PIXEL_BOUNDS["qwen3_vl_moe"] = _PIXEL_BOUNDS["qwen3_vl"]
_PARTS_PER_EDGE = 4
"""Parts along the longer edge of an image of Idefics3 and SmolVLM, which enlarge images to them."""
_MAX_TILES = 12
"""Most parts of an image of InternVL, without the whole image, which is another one."""
_ENLARGING = ("idefics3", "smolvlm")
"""Families that enlarge images before they cut them."""
_KEEPS_LAYERS = frozenset({"llava", "llava_onevision", "mistral3"})
"""Families whose features come from the list of the hidden states of all layers."""


VisionPart = Literal["tower", "projector"] | None
"""First part, in the order of a pass, that has gradients; None: all that only images use is frozen."""


class TowerBytes(NamedTuple):
    """Bytes of a tower's pass on a rank of the first pipeline stage; zeros without images."""

    pixels: int = 0
    """Bytes of the pixels, which stay during the whole pass of the model."""
    features: int = 0
    """Bytes of features for later blocks, which stay until these have read them."""
    working: int = 0
    """Peak bytes of the tower's own pass, without those."""
    saved: int = 0
    """Bytes that stay until the backward pass."""
    backward: int = 0
    """Bytes that the backward pass of one of its blocks adds."""

    @property
    def reading(self) -> int:
        """Peak bytes while the tower runs."""
        return self.pixels + self.working


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Vision tower of a model, with its projector. Every rank of the first pipeline stage runs it whole."""

    family: str
    """Type of the model in transformers, by whose rules images are resized and cut."""
    blocks: ModelShape
    """Sizes of its blocks, whose tokens are patches."""
    patch: int
    """Height and width of a patch in pixels."""
    merge: int
    """Patches along each edge of the square that becomes one token."""
    side: int | None = None
    """Height and width of each part, or the longest edge of an image of any size; None: images have any size."""
    frames: int = 1
    """Times that a patch holds each of its pixels, as towers for videos have them."""
    num_extra: int = 0
    """Patches of a part that stand for no pixels, such as the class token."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Heights and widths that images are fitted into before they are cut; () for families without such a list."""
    window: int | None = None
    """Patches that a patch sees in layers with windows; None without such layers."""
    num_windowed: int = 0
    """Layers with windows."""
    num_levels: int = 0
    """Further features of each token, which later blocks of the language model read."""
    projector: int = 0
    """Elements of the matrices between tower and language model."""
    projector_features: int = 0
    """Features of a token that these matrices, and functions between them, have as inputs."""
    outputs: int = 1
    """Features of a token of the language model."""

    @classmethod
    def from_config(cls, config: Any, model: ModelSpec) -> Tower | None:
        """Read a Hugging Face config, and the names of the parameters for details; None without a known tower."""
        family, vision = str(getattr(config, "model_type", "")), getattr(config, "vision_config", None)
        if family not in _READERS or vision is None:
            return None
        params = vision_params(model)
        blocks = _blocks(vision, [param.name for param in params])
        matrices = [param.shape for param in params if len(param.shape) == 2 and not is_of_tower(param)]
        outputs = config.get_text_config().hidden_size
        levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        full = getattr(vision, "fullatt_block_indexes", None)
        patch, window = _edge(vision.patch_size), read_size(vision, "window_size")
        return cls(
            family=family,
            blocks=blocks,
            patch=patch,
            merge=_merge(config, vision),
            side=_edge(getattr(vision, "image_size", None)) if family not in _PIXEL_BOUNDS else None,
            frames=read_size(vision, "temporal_patch_size") or 1,
            num_extra=int(family == "internvl" or getattr(vision, "model_type", None) == "clip_vision_model"),
            sizes=tuple(map(tuple, getattr(config, "image_grid_pinpoints", None) or ())),
            window=None if full is None or window is None else (window // patch) ** 2,
            num_windowed=0 if full is None else blocks.num_layers - len(full),
            num_levels=levels,
            projector=sum(map(math.prod, matrices)),
            projector_features=max(0, sum(map(sum, matrices)) - (1 + levels) * outputs),
            outputs=outputs,
        )

    def read(self, height: int, width: int, *, count: int = 1) -> ImagesPerPrompt:
        """Return how the family reads ``count`` images of so many pixels.

        Raises:
            PlanError: for sizes below 1, and for images that the family refuses.
        """
        if min(height, width, count) < 1:
            raise PlanError(f"{count} images of {width}x{height} pixels: all three must be at least 1")
        parts, patches, tokens = _READERS[self.family](self, height, width)
        return ImagesPerPrompt(num_parts=count * parts, part_patches=patches, tokens=count * tokens)

    def parts_of(
        self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Sequence[Sequence[int]]]
    ) -> tuple[int, ...]:
        """Return the patches of each part of images, from the inputs that an image processor made of them.

        Args:
            shapes: Input of the model -> its shape.
            values: Input that says how images lie in others, such as ``image_grid_thw`` -> its rows.
        """
        grids = [grid for name in ("image_grid_thw", "video_grid_thw") for grid in values.get(name, ())]
        if grids:
            return tuple(rows * columns for times, rows, columns in grids for _ in range(times))
        if self.is_joint:
            return tuple((height // self.patch) * (width // self.patch) for height, width in values["image_sizes"])
        *outer, _, height, width = shapes["pixel_values"]
        return ((height // self.patch) * (width // self.patch) + self.num_extra,) * math.prod(outer)

    def count_tokens(self, parts: Sequence[int], values: Mapping[str, Sequence[Sequence[int]]]) -> int:
        """Return the tokens that a processor writes for one image of such `parts_of` it."""
        each = (parts[0] - self.num_extra) // self.merge**2
        if self.family in _PIXEL_BOUNDS:
            return sum(parts) // self.merge**2
        if self.is_joint:
            ((height, width),) = values["image_sizes"]
            edge = self.patch * self.merge
            return height // edge * (width // edge + 1)
        if self.family == "llava_onevision":
            ((height, width),) = values["image_sizes"]
            return int(self.read(height, width).tokens)
        if self.family in _ENLARGING:
            ((rows,),), ((columns,),) = values["rows"], values["cols"]
            return _grid_tokens(rows, columns, each)
        around = {"internvl": 2, "gemma3": 4 * len(parts)}.get(self.family, 0)
        return len(parts) * each + around

    @property
    def square_patches(self) -> int:
        """Patches of a square part."""
        return self._square**2 + self.num_extra

    @property
    def square_tokens(self) -> int:
        """Tokens of a square part."""
        return (self._square // self.merge) ** 2

    @property
    def _square(self) -> int:
        assert self.side is not None, "families of squares have their size in the config"
        return self.side // self.patch

    @property
    def is_joint(self) -> bool:
        """Whether attention multiplies all patches of a pass with all others, and masks those of other images."""
        return self.family == "mistral3"

    def pixel_bytes(self, num_patches: float) -> float:
        """Return the bytes of the pixels of patches, in fp32."""
        return num_patches * _CHANNELS * self.frames * self.patch**2 * _FLOAT32

    def pass_bytes(
        self, images: ImagesPerPrompt, num_prompts: int, element_bytes: int, *, trained: VisionPart, recomputes: bool
    ) -> TowerBytes:
        """Return the bytes of a pass over the images of some prompts.

        Args:
            images: Images of one prompt.
            element_bytes: Bytes of an activation.
            trained: First part that keeps activations for a backward pass.
            recomputes: Whether the tower's blocks keep only their inputs, and compute the others again.
        """
        patches, tokens, blocks = math.ceil(num_prompts * images.num_patches), num_prompts * images.tokens, self.blocks
        mask = patches**2 * element_bytes if self.is_joint else 0
        read = TowerBytes(
            pixels=int(self.pixel_bytes(patches)),
            working=patches * self._working_bytes(element_bytes) + mask,
            features=int(tokens * self.num_levels * self.outputs * element_bytes),
        )
        if trained is None:
            return read
        # The projector keeps the inputs of a norm, as they are and normalized, and of what follows.
        kept = int((tokens * self.projector_features + 2 * patches * blocks.hidden) * element_bytes)
        if trained == "projector":
            return read._replace(saved=kept)
        saved, inputs = blocks.saved_bytes(1, element_bytes), blocks.hidden * element_bytes
        return read._replace(
            saved=kept + patches * blocks.num_layers * (inputs if recomputes else saved) + mask,
            backward=patches * (blocks.backward_elements(1) * element_bytes + (saved if recomputes else 0)),
        )

    def _working_bytes(self, element_bytes: int) -> int:
        """Return the peak bytes per patch of a pass that keeps nothing.

        The Qwen families rotate queries and keys in fp32: next to a block's input, the normalized one and the joint
        projection there are copies in fp32, unless they are so, rotated queries, and three products.
        """
        each = self.blocks.working_elements(1) * element_bytes
        if self.family in _PIXEL_BOUNDS:
            casts = 2 if element_bytes < _FLOAT32 else 0
            each = max(each, self.blocks.hidden * (5 * element_bytes + (4 + casts) * _FLOAT32))
        if self.family in _KEEPS_LAYERS:
            each += self.blocks.num_layers * self.blocks.hidden * element_bytes
        return each

    def pass_products(self, images: ImagesPerPrompt) -> float:
        """Return the multiplications of a pass over a prompt's images, of attention's scores, too."""
        blocks = self.blocks
        features = blocks.intermediate * (3 if blocks.gated else 2) + 2 * self.mean_context(images.part_patches)
        block = blocks.hidden * (4 * blocks.hidden + features)
        return images.num_patches * blocks.num_layers * block + images.tokens * self.projector

    def mean_context(self, part_patches: float) -> float:
        """Return the mean patches that a patch sees over layers, in parts of so many patches."""
        if self.window is None:
            return part_patches
        share = self.num_windowed / self.blocks.num_layers
        return share * min(self.window, part_patches) + (1 - share) * part_patches


# ---- configs
def _blocks(vision: Any, names: Sequence[str]) -> ModelShape:
    """Return the sizes of a tower's blocks from its config and the names of its parameters."""
    # Of Qwen2-VL's tower, ``hidden_size`` is the width of the language model.
    hidden = read_size(vision, "embed_dim", "hidden_size")
    heads = read_size(vision, "num_attention_heads", "num_heads")
    layers = read_size(vision, "num_hidden_layers", "depth")
    if hidden is None or heads is None or layers is None:
        raise PlanError(
            f"{type(vision).__name__} lacks the width, the heads or the number of layers of a tower; see its config"
        )
    norms = [name for name in names if "norm" in name and re.search(r"\.\d+\.", name)]
    return ModelShape(
        num_layers=layers,
        hidden=hidden,
        intermediate=read_size(vision, "intermediate_size") or hidden * (read_size(vision, "mlp_ratio") or 4),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        num_outputs=1,
        gated=any("gate" in name for name in names),
        rms_norm=not any(name.endswith(".bias") for name in norms),
        qk_norm=any("q_norm" in name for name in names),
        activation_copies=ACTIVATION_COPIES.get(str(getattr(vision, "hidden_act", "")), 0),
    )


def _edge(size: Any) -> int:
    """Return the edge of a square whose size is one number or two."""
    return int(size[0] if isinstance(size, Sequence) else size)


def _merge(config: Any, vision: Any) -> int:
    """Return the patches along each edge of a token's square."""
    if (tokens := read_size(config, "mm_tokens_per_image")) is not None:
        return _edge(vision.image_size) // _edge(vision.patch_size) // math.isqrt(tokens)
    if (ratio := getattr(config, "downsample_ratio", None)) is not None:
        return round(1 / float(ratio))
    return read_size(config, "scale_factor", "spatial_merge_size") or read_size(vision, "spatial_merge_size") or 1


# ---- families: (parts, patches of a part, tokens) of an image
_Read = tuple[int, int, int]


def _read_any_size(tower: Tower, height: int, width: int) -> _Read:
    """Read an image in about its own size, as Qwen2-VL does."""
    least, most = _PIXEL_BOUNDS[tower.family]
    factor = tower.patch * tower.merge
    if max(height, width) > 200 * min(height, width):
        raise PlanError(
            f"{tower.family} refuses images of {width}x{height} pixels: one edge is over 200 times the other"
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(edge / scale / factor)) for edge in (height, width))
    elif rows * columns * factor**2 < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(edge * scale / factor) for edge in (height, width))
    return 1, rows * columns * tower.merge**2, rows * columns


def _read_up_to_side(tower: Tower, height: int, width: int) -> _Read:
    """Read an image in its own size up to a longest edge, with a token at the end of each line, as Pixtral does."""
    assert tower.side is not None, "the config has the longest edge"
    scale, factor = max(1.0, height / tower.side, width / tower.side), tower.patch * tower.merge
    rows, columns = ((math.floor(edge / scale) - 1) // factor + 1 for edge in (height, width))
    return 1, rows * columns * tower.merge**2, rows * (columns + 1)


def _read_square(tower: Tower, height: int, width: int) -> _Read:
    """Read an image as one square."""
    around = 4 if tower.family == "gemma3" else 0  # two tokens of its own, two line breaks
    return 1, tower.square_patches, tower.square_tokens + around


def _read_tiles(tower: Tower, height: int, width: int) -> _Read:
    """Cut an image into the grid of squares closest to its shape, and read it whole, too, as InternVL does."""
    assert tower.side is not None, "the config has the size of a square"
    best, best_gap = (1, 1), math.inf
    grids = [(columns, rows) for columns in range(1, _MAX_TILES + 1) for rows in range(1, _MAX_TILES // columns + 1)]
    for columns, rows in sorted(grids, key=math.prod):
        gap = abs(width / height - columns / rows)
        if gap < best_gap or (gap == best_gap and height * width > 0.5 * tower.side**2 * columns * rows):
            best, best_gap = (columns, rows), gap
    parts = math.prod(best)
    parts += parts > 1
    return parts, tower.square_patches, parts * tower.square_tokens + 2


def _read_enlarged(tower: Tower, height: int, width: int) -> _Read:
    """Enlarge an image until its longer edge has four squares, cut it, and read it whole, too, as Idefics3 does."""
    longer, shorter = max(height, width), min(height, width)
    across = math.ceil(_PARTS_PER_EDGE * shorter / longer - 1e-9)
    rows, columns = (across, _PARTS_PER_EDGE) if width >= height else (_PARTS_PER_EDGE, across)
    return rows * columns + 1, tower.square_patches, _grid_tokens(rows, columns, tower.square_tokens)


def _grid_tokens(rows: int, columns: int, each: int) -> int:
    """Return the tokens of a grid of parts with two tokens around each, and a break after each line.

    The whole image has three further tokens.
    """
    return rows * (columns * (each + 2) + 1) + each + 3


def _read_fitted(tower: Tower, height: int, width: int) -> _Read:
    """Fit an image into the best of some sizes, cut it into squares, and read it whole, too, as LLaVA-OneVision does.

    Padding has no tokens, each line has one at its end, and features beyond nine squares are shrunk.
    """
    assert tower.side is not None, "the config has the size of a square"

    def fit(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[0] / height, size[1] / width)
        used = min(int(height * scale) * int(width * scale), height * width)
        return used, used - size[0] * size[1]

    best = max(tower.sizes, key=fit)
    edge = tower.side // tower.patch
    rows, columns = (edge * (size // tower.side) for size in best)
    parts = 1 + (rows // edge) * (columns // edge)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if (shrink := math.sqrt(rows * columns / (9 * edge**2))) > 1.1:
        rows, columns = int(rows // shrink), int(columns // shrink)
    return parts, tower.square_patches, edge**2 + rows * (columns + 1)


_READERS: Mapping[str, Callable[[Tower, int, int], _Read]] = {
    **dict.fromkeys(_PIXEL_BOUNDS, _read_any_size),
    "mistral3": _read_up_to_side,
    "gemma3": _read_square,
    "llava": _read_square,
    "internvl": _read_tiles,
    **dict.fromkeys(_ENLARGING, _read_enlarged),
    "llava_onevision": _read_fitted,
}
