"""Prompts with images in vLLM's process: `child` loads this file when the first ones come.

Like `child`, this file imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any


class ImagesRefused(Exception):
    """Images or a model that would fail again; the message says why, and the way out."""

    fails_again = True


class ImagePrompts:
    """Prompts in which a token stands for each part of an image already, as training reads them.

    vLLM itself takes prompts with one placeholder for an image, and would expand the first token of each again.

    Args:
        llm: `vllm.LLM`.
        placeholders: Tokens that stand for parts of images.
        backend: Library by which transformers makes pixels for training, "pil" or "torchvision". They resize otherwise.
    """

    def __init__(self, llm: Any, placeholders: Collection[int], backend: str) -> None:
        self._renderer, self._placeholders = llm.renderer, frozenset(placeholders)
        processor: Any = self._renderer.mm_processor
        if processor is None:
            config = llm.model_config.hf_config
            raise ImagesRefused(
                f"vLLM reads no images with {config.architectures[0]}; use engine='native' or engine='hf'"
            )
        if llm.model_config.is_mm_prefix_lm and llm.llm_engine.vllm_config.device_config.device_type == "cpu":
            raise ImagesRefused(
                f"tokens of an image see each other in {llm.model_config.hf_config.architectures[0]}, and vLLM's "
                f"attention on CPU hides later ones; use engine='native' or engine='hf', or a GPU"
            )
        _use_backend(processor.info.get_hf_processor(), llm.model_config.model, backend)
        processor._apply_prompt_updates = lambda token_ids, updates: (
            token_ids,
            processor._find_mm_placeholders(token_ids, updates),
        )
        processor._validate_mm_placeholders = lambda found, counts: None  # `prompt` does, and names the places

    def prompt(self, token_ids: Sequence[int], paths: Sequence[str]) -> Any:
        """Return a prompt with the images in these files, as vLLM's engine takes it.

        Raises:
            ImagesRefused: if vLLM gives features of images to other tokens than training does.
        """
        given = {"prompt_token_ids": list(token_ids), "multi_modal_data": {"image": _opened(tuple(paths))}}
        (made,) = self._renderer.render_cmpl([given])
        ranges = made["mm_placeholders"].get("image", ())
        found = [place for each in ranges for place in places_in(each)]
        expected = [place for place, token in enumerate(token_ids) if token in self._placeholders]
        if found != expected or list(made["prompt_token_ids"]) != list(token_ids):
            raise ImagesRefused(
                f"vLLM finds {len(ranges)} images of a prompt's {len(paths)}, whose parts are {_spans(found)}, and the "
                f"run's processor put them at {_spans(expected)}; give the run and vLLM the same version of "
                f"transformers and one processor, or use engine='native' or engine='hf'"
            )
        return made


def _use_backend(processor: Any, folder: str, backend: str) -> None:
    """Make pixels by a library; vLLM shares the processor between all prompts."""
    from transformers import AutoImageProcessor

    if getattr(processor.image_processor, "backend", "pil") != backend:
        processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend=backend)
    if getattr(processor.image_processor, "backend", "pil") != backend:
        raise ImagesRefused(
            f"training makes pixels by {backend}, which vLLM's environment lacks; install it there, or in neither"
        )


def places_in(found: Any) -> list[int]:
    """Return the tokens of a range of vLLM's that get features of an image."""
    marks = [True] * found.length if found.is_embed is None else found.is_embed.tolist()
    return [found.offset + place for place, marked in enumerate(marks) if marked]


def _spans(places: Sequence[int]) -> str:
    """Return the first and last of some tokens, and how many there are."""
    return f"{len(places)} tokens from {places[0]} to {places[-1]}" if places else "no tokens"


@lru_cache(maxsize=1)  # the responses to a prompt are requests one after another
def _opened(paths: tuple[str, ...]) -> list[Any]:
    """Return images as training reads them: upright, and in RGB without transparency."""
    from PIL import Image, ImageOps

    try:
        return [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in paths]
    except OSError as error:
        raise ImagesRefused(f"vLLM cannot read an image: {error}; leave images as they are during a run") from error
