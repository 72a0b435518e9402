"""Images of a prompt as a tower reads them (parts, patches, tokens), and the parameters that only images use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.limits import PROJECTOR_NAMES

_PROJECTOR = re.compile(PROJECTOR_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesPerPrompt:
    """Images of a prompt, as a tower reads them; of several prompts, the mean."""

    num_parts: float
    """Images, or parts of images that are read apart: patches see those of their own part."""
    part_patches: float
    """Patches of one part."""
    tokens: float
    """Tokens of the prompt that the processor writes for the images."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise PlanError(f"{item.name}={getattr(self, item.name)} of a prompt's images must be positive")

    @classmethod
    def from_parts(cls, parts: Sequence[int], tokens: int) -> ImagesPerPrompt:
        """Return images whose parts have so many patches, which may differ."""
        return cls.mean([cls(num_parts=1, part_patches=patches, tokens=tokens / len(parts)) for patches in parts], 1)

    @classmethod
    def mean(cls, images: Iterable[ImagesPerPrompt], num_prompts: int) -> ImagesPerPrompt:
        """Return the mean of ``num_prompts`` prompts, of which those with images are given.

        Parts have the size with which they have as many patches, and pairs of patches that see each other.
        """
        listed = list(images)
        patches = sum(one.num_patches for one in listed)
        size = sum(one.num_patches * one.part_patches for one in listed) / patches
        tokens = sum(one.tokens for one in listed) / num_prompts
        return cls(num_parts=patches / size / num_prompts, part_patches=size, tokens=tokens)

    @property
    def num_patches(self) -> float:
        """Patches of all images."""
        return self.num_parts * self.part_patches


def vision_params(model: ModelSpec) -> tuple[ParamSpec, ...]:
    """Return the parameters of a model of images and text that only images use: those before the decoder's own."""
    first = next((param for param in model.params if param.block is not None), None)
    decoder = "" if first is None else first.name.partition(f".{first.block}.")[0].rpartition(".")[0]
    return tuple(p for p in model.params if p.section == "input" and not p.name.startswith(f"{decoder}."))


def is_of_tower(param: ParamSpec) -> bool:
    """Return whether one of the `vision_params` belongs to the tower itself, and not to the projector."""
    return _PROJECTOR.search(param.name) is None
