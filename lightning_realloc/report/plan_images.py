"""Images of a planned run's prompts: sizes from flags or from rows of its data, patches and tokens as models read them.

Images are read as the model's image processor reads blank ones of these sizes, or else as those of published models do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor

from lightning_realloc.data.images.row_images import image_sizes
from lightning_realloc.data.row_tables import RowTables
from lightning_realloc.data.rows import RowSource, first_rows, folder_of
from lightning_realloc.data.sources import DatasetSource
from lightning_realloc.data.tokenizers import describe_load_error
from lightning_realloc.errors import DataError, PlanError
from lightning_realloc.remote_path import expand_home
from lightning_realloc.report.run_file import RunFile
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.tower import Tower

Size = tuple[int, int]
"""Width and height in pixels."""
SAMPLED_ROWS = 64
"""First rows of a run's data whose images are looked at. Raising it reads more headers, and finds larger images."""
_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that an image processor's settings may lie in."""
_OF_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "internvl": {"crop_to_patches": True},
    "gemma3": {"do_pan_and_scan": False},
    "idefics3": {"return_row_col_info": True},
    "smolvlm": {"return_row_col_info": True},
}
"""Family -> settings with which its processor always calls its image processor."""


class PlannedImages:
    """Images of the prompts of a request, which are looked up when a model reads them.

    Args:
        count: Images of each prompt by flag; None: those of the data.
        size: Width and height of an image by flag; None: as in the data, else ``default_size``.
        default_size: Size for images of which neither flag nor data tell it.
        run: Run of ``--config``; None without one.
        source: Folder or name of the model that reads them.
    """

    def __init__(
        self, count: int | None, size: Size | None, default_size: Size, run: RunFile | None, source: str
    ) -> None:
        self._count, self._size, self._default_size, self._run = count, size, default_size, run
        self._settings: Mapping[str, Any] = {} if run is None else run.data.get("processor_kwargs") or {}
        self._source = source if run is None or run.tokenizer is None else run.tokenizer
        self.note = ""
        """Reason why the data's images are not read; empty if they are, or not asked for."""
        self.read = functools.cache(self._read)
        """Tower -> images as it reads them, their sizes, and a phrase that says by which settings; None: no images."""

    def describe(self, role: RoleMemory) -> str:
        """Return a sentence about the images that a role reads."""
        read = None if role.tower is None else self.read(role.tower)
        assert read is not None, "described where there are images"
        images, sizes, by = read
        names = [f"{width}x{height}" for width, height in sorted(set(sizes), key=math.prod)]
        trained = {"tower": "trained", "projector": "frozen, with a trained projector", None: "frozen"}
        edges = " to ".join(dict.fromkeys((names[0], names[-1])))
        return (
            f"{len(sizes)} image{'s' if len(sizes) > 1 else ''} of {edges} in each prompt: {images.tokens:,.0f} of its "
            f"tokens, and {images.num_patches:,.0f} patches for the tower, which is {trained[role.trained_vision]}; "
            f"resized as by {by}"
        )

    def _read(self, tower: Tower) -> tuple[ImagesPerPrompt, tuple[Size, ...], str] | None:
        """Return the images of the prompt with the most tokens of images.

        Raises:
            PlanError: for images that the family refuses, and for an image processor that cannot be loaded.
        """
        prompts = [sizes for sizes in self._prompts() if sizes]
        if not prompts:
            return None
        chosen = max(prompts, key=lambda sizes: sum(tower.read(height, width).tokens for width, height in sizes))
        processor = _load_processor(self._source, self._settings)
        by = f"the image processor of {self._source}"
        if processor is None:
            by = f"published {tower.family} models, as there is no image processor of {self._source} on this machine"
            by += ", and without processor_kwargs" if self._settings else ""
        read = {size: _read_size(tower, processor, size) for size in set(chosen)}
        return ImagesPerPrompt.mean([read[size] for size in chosen], 1), chosen, by

    def _prompts(self) -> list[tuple[Size, ...]]:
        """Return the sizes of the images of prompts, each combination once."""
        if self._count is not None and self._size is not None:
            return [(self._size,) * self._count]
        found = [] if self._count == 0 else list(self._sampled())
        if self._count is None:
            return [sizes if self._size is None else (self._size,) * len(sizes) for sizes in found]
        several = {size for sizes in found for size in sizes} or {self._default_size}
        return [(size,) * self._count for size in several]

    def _sampled(self) -> Iterator[tuple[Size, ...]]:
        source = None if self._run is None else _source_of(self._run.data.get("data"))
        if source is None or self._run is None:
            return
        columns = {*RowTables.message_columns, str(self._run.data.get("prompt_column") or "prompt")}
        found: dict[tuple[Size, ...], None] = {}
        try:
            for row in first_rows(source, SAMPLED_ROWS):
                found[image_sizes(row.values, columns, row.place, folder=folder_of(source))] = None
        except DataError as error:
            self.note = f"images of the data are not counted: {error}; or give --images-per-prompt and --image-size."
            return
        yield from found


def _source_of(given: Any) -> RowSource | None:
    """Return the rows that a configuration names; None for those that are not on this machine."""
    if isinstance(given, Mapping) and str(given.get("class_path")).rpartition(".")[2] == "DatasetSource":
        source = DatasetSource(**(given.get("init_args") or {}))
        return source if Path(expand_home(source.path)).exists() else None
    return given if isinstance(given, str | list) and given else None


def _load_processor(source: str, settings: Mapping[str, Any]) -> Any:
    """Return the image processor of a folder or name, with further settings; None if there is none here.

    Raises:
        PlanError: for one that cannot be loaded.
    """
    path = Path(expand_home(source))
    folder = path.parent if path.is_file() else path
    if folder.is_dir() and not any((folder / name).is_file() for name in _FILES):
        return None
    place = str(folder) if folder.is_dir() else source
    try:
        return AutoImageProcessor.from_pretrained(place, local_files_only=True, **settings)
    except Exception as error:  # damaged files raise errors of any class
        if isinstance(error, OSError) and not folder.is_dir():  # a name that is not in the cache
            return None
        raise PlanError(
            f"the image processor of {source} cannot be loaded ({describe_load_error(place, error)}); correct its "
            f"files, or name another folder"
        ) from error


def _read_size(tower: Tower, processor: Any, size: Size) -> ImagesPerPrompt:
    """Return how a tower reads one image of so many pixels."""
    width, height = size
    if processor is None:
        return tower.read(height, width)
    from PIL import Image

    settings = dict(_OF_PROCESSORS.get(tower.family, {}))
    if tower.is_joint:
        settings["patch_size"] = tower.patch * tower.merge
    blank = Image.new("RGB", size)
    try:
        made = processor(images=[[blank]], return_tensors="pt", **settings)
    except Exception as error:  # processors raise errors of any class
        raise PlanError(f"{type(processor).__name__} refuses an image of {width}x{height} pixels: {error}") from error
    shapes = {name: tuple(values.shape) for name, values in made.items() if hasattr(values, "shape")}
    values = {
        name: values.tolist() if hasattr(values, "tolist") else values
        for name, values in made.items()
        if not name.startswith("pixel_")
    }
    pinpoints = getattr(processor, "image_grid_pinpoints", None)
    own = tower if pinpoints is None else replace(tower, sizes=tuple(map(tuple, pinpoints)))
    parts = own.parts_of(shapes, values)
    return ImagesPerPrompt.from_parts(parts, own.count_tokens(parts, values))
