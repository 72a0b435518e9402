"""Images of sampled rollouts as thumbnails: small files next to a table, which names them.

A table's cell has the names of its sample's files, and no bytes of images.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning_realloc.errors import ReallocError

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_SIDE = 160
"""Longest side of a thumbnail in pixels; a longer one shows more, and makes larger pages."""
MAX_THUMBNAIL_BYTES = 12_000
"""Largest thumbnail; larger ones lose details."""
MAX_IMAGES_PER_SAMPLE = 4
"""Thumbnails of a sample, of its first images; more take longer to write."""
THUMBNAIL_NAMES = f"{16 * '[0-9a-f]'}-*.jpg"
"""Pattern of the names of files: a key of images, and the number of one among them."""
_QUALITIES = (85, 60, 35)
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, MemoryError, ReallocError)
"""Errors of images that cannot be decoded."""


@runtime_checkable
class KeyedImages(Protocol):
    """The images of a sample, decoded when they are read."""

    key: int
    """Key of equal images, 0 to 2^63 - 1."""

    def __len__(self) -> int:
        """Return the number of images."""

    def __getitem__(self, index: int, /) -> Image:
        """Return an image."""


@dataclass(frozen=True, slots=True)
class RowImages:
    """Thumbnails of the samples of a table."""

    names: tuple[tuple[str, ...], ...]
    """Names of each sample's files."""
    files: Mapping[str, bytes]
    """Name -> content; images that cannot be read have none."""


def thumbnail(image: Image, longest: int = LONGEST_SIDE) -> bytes:
    """Return an image as JPEG with sides of at most ``longest`` pixels, in at most `MAX_THUMBNAIL_BYTES`.

    Transparent parts become white, and an animation its current frame. The image itself stays as it is.
    """
    small = _opaque(image, longest)
    for quality in _QUALITIES:
        content = io.BytesIO()
        small.save(content, "JPEG", quality=quality)
        if content.tell() <= MAX_THUMBNAIL_BYTES:
            return content.getvalue()
    return thumbnail(small, max(1, longest // 2))


def _opaque(image: Image, longest: int) -> Image:
    """Return a small copy in RGB."""
    from PIL import Image as images

    if image.mode.startswith("I") or image.mode == "F":  # 16 bits and more, which a conversion would cut off
        bounds: Any = image.getextrema()
        low, high = map(float, bounds)
        scale = 255.0 / (high - low) if high > low else 0.0
        image = image.convert("F").point(lambda value: (value - low) * scale).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
    small = image.convert("RGB")  # a copy, unless the image is in RGB
    small = small.copy() if small is image else small
    small.thumbnail((longest, longest))
    return small


def row_images(column: Sequence[Sequence[object]]) -> RowImages | None:
    """Return the thumbnails of samples, each with groups of images; None if some group holds something else.

    Equal groups share files.
    """
    if not all(isinstance(images, KeyedImages) for groups in column for images in groups) or not any(column):
        return None
    names: list[tuple[str, ...]] = []
    files: dict[str, bytes] = {}
    for groups in column:
        shown = [
            (images, index) for images in groups if isinstance(images, KeyedImages) for index in range(len(images))
        ]
        own = [(f"{images.key:016x}-{index}.jpg", images, index) for images, index in shown[:MAX_IMAGES_PER_SAMPLE]]
        for name, images, index in own:
            if name not in files:
                with suppress(*_UNREADABLE):  # training reports it, and the table goes on without it
                    files[name] = thumbnail(images[index])
        names.append(tuple(name for name, *_ in own))
    return RowImages(tuple(names), files)
