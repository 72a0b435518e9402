"""One image of a row: where it is, what its header says, and its pixels when they are needed."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

from lightning_realloc.batch.stored_objects import StoredObject
from lightning_realloc.errors import DataError, described
from lightning_realloc.remote_path import expand_home

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 89_478_485
"""Pixels of the largest image, as Pillow's own limit: a gibibyte of 24-bit pixels would take a quarter of it."""
_ROTATED = frozenset({5, 6, 7, 8})
"""Values of the EXIF tag for orientation with which height and width are exchanged."""
_ORIENTATION = 0x0112
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"})
"""Modes of Pillow with eight bits or fewer for a channel, which become RGB."""
_WIDE_CHANNEL = re.compile(r";16[BLN]")
"""In a raw mode of Pillow: channels of 16 bits, of which it keeps eight. `BGR;16` has 16 bits for a pixel."""
_BASE64 = re.compile(r"[A-Za-z0-9+/]{60,}={0,2}")
_LONGEST_PATH = 240
"""Characters of a path that an error repeats whole. Raising it makes errors longer if paths are base64 text."""
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
_ENDS = {"JPEG": (b"\xff\xd9", 1 << 16), "PNG": (b"IEND", 16)}
"""Format -> what the last bytes of a whole file hold, and how many bytes those are."""


@dataclass(frozen=True, slots=True)
class ImageFile(StoredObject):
    """An image that stays where it is until it is opened.

    Example:
        >>> from PIL import Image
        >>> ImageFile.read(Image.new("L", (30, 20)), "row 0").open().size
        (30, 20)
    """

    source: Any
    """A path, encoded bytes, a function that returns such bytes, or an image of Pillow."""
    place: str
    """Row of the data, for error messages."""
    width: int
    """In pixels, after the rotation that the file asks for."""
    height: int
    key: int = field(repr=False)
    """64 bits that tell images apart: a hash of bytes or pixels; of a path, of its name and size."""
    way_out: str = field(default="correct it", repr=False, compare=False)
    """Advice of the error about pixels that cannot be decoded."""

    @classmethod
    def read(cls, value: object, place: str, *, folder: Path | None = None, way_out: str = "correct it") -> ImageFile:
        """Return the image that a column or a part of a message names. Of files, only the header is read.

        Args:
            value: A path, a ``data:`` address, bytes, an image of Pillow, or a mapping with ``bytes`` or ``path``, as
                `datasets` has undecoded images.
            place: Location of the row, for error messages.
            folder: Folder of relative paths that do not exist in the working directory.
            way_out: Advice of the error of `open` about pixels that cannot be decoded.

        Raises:
            DataError: for a value that is no image, a file that is missing, damaged or cut off, and images with more
                than ``MAX_PIXELS``, several frames, or more than eight bits for a channel.
        """
        source, key = _located(value, place, folder)
        image = source if is_pillow_image(source) else _opened(source, place)
        _check_header(image, source, place)
        width, height = image.size
        if _is_turned(image, source, place):
            width, height = height, width
        if not is_pillow_image(source):
            _check_end(source, image.format, place)
        try:
            return cls(source, place, width, height, _key(source) if key is None else key, way_out)
        except Exception as error:  # Pillow's images may be closed, or decode their file here
            raise _damaged(source, place, error) from error

    @classmethod
    def copy_of(cls, value: object, place: str) -> ImageFile:
        """Return the same as `read` with bytes of its own, whatever becomes of the file or the object afterwards.

        Raises:
            DataError: also for pixels that cannot be decoded.
        """
        found = cls.read(value, place)
        if isinstance(found.source, Path):
            found = cls.read(found.source.read_bytes(), place)
        pixels = found.open()
        if isinstance(found.source, bytes):
            return found
        stream = BytesIO()
        pixels.save(stream, "PNG")
        return cls.read(stream.getvalue(), place)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height

    def open(self) -> Image:
        """Return the image in RGB, upright, as transformers and TRL read it: without transparency.

        Raises:
            DataError: for pixels that cannot be decoded, or a file that is not the one that was checked.
        """
        from PIL import ImageOps

        image = self.source if is_pillow_image(self.source) else _opened(self.source, self.place)
        try:
            upright: Image = ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # damaged files raise errors of any class
            raise DataError(
                f"{self.place}: {_name(self.source)} is damaged inside its pixels ({type(error).__name__}: {error}); "
                f"{self.way_out}"
            ) from error
        if upright.size != self.size:
            raise DataError(
                f"{self.place}: {_name(self.source)} has {upright.width} x {upright.height} pixels, and had "
                f"{self.width} x {self.height} when the data was read; leave images as they are during a run"
            )
        return upright

    def state(self) -> dict[str, Any]:
        """Return plain data: the path, or the bytes of the image."""
        source: str | bytes = str(self.source) if isinstance(self.source, Path) else _encoded(self.source)
        sizes = {"width": self.width, "height": self.height}
        return {"source": source, "place": self.place, **sizes, "key": self.key, "way_out": self.way_out}

    def address(self) -> str:
        """Return the image with its bytes as a ``data:`` address, for JSON."""
        content = self.source.read_bytes() if isinstance(self.source, Path) else _encoded(self.source)
        return f"data:;base64,{base64.b64encode(content).decode()}"

    def path(self, folder: Path) -> Path:
        """Return the image's file; for one that is in no file of its own, a file of its bytes in ``folder``."""
        if isinstance(self.source, Path):
            return self.source.absolute()
        path = folder / f"{self.key:016x}"
        if not path.exists():
            path.write_bytes(_encoded(self.source))
        return path

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ImageFile:
        """Restore the result of :meth:`state`."""
        source = state["source"]
        return cls(**{**state, "source": Path(source) if isinstance(source, str) else source})

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageFile.from_state, (self.state(),)  # not the table that holds it

    def __str__(self) -> str:
        """Return the same text on every rank: of bytes, size and key."""
        name = self.source if isinstance(self.source, Path) else f"image {self.key:016x}"
        return f"<{name}, {self.width} x {self.height}>"


# ---- places
def _located(value: object, place: str, folder: Path | None) -> tuple[Any, int | None]:
    """Return the place of an image, and its key if that does not depend on its bytes."""
    if isinstance(value, Mapping):
        value = _in_mapping(value, place)
    if isinstance(value, str):
        value = _addressed(value, place)
    if isinstance(value, Path):
        path = _existing(value, place, folder)
        return path, _digest(f"{path} {os.path.getsize(path)}".encode())
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), None
    if is_pillow_image(value) or callable(value):
        return value, None
    raise DataError(
        f"{place}: an image is a path, bytes, an image of Pillow or a mapping with 'bytes' or 'path'; got "
        f"{described(value)}; correct it"
    )


def _in_mapping(value: Mapping[str, Any], place: str) -> object:
    """Return the bytes or the path of an undecoded image of ``datasets``, or the address of OpenAI's form."""
    for name in ("bytes", "path", "url", "base64"):
        if value.get(name) is not None:
            found = value[name]
            return f"data:;base64,{found}" if name == "base64" else found
    raise DataError(
        f"{place}: an image that is a mapping needs 'bytes' or 'path'; it has {', '.join(map(str, value)) or 'nothing'}"
    )


def _addressed(value: str, place: str) -> Path | bytes:
    kind = urlsplit(value).scheme if ":" in value[:10] else ""
    if kind == "data":
        try:
            return base64.b64decode(value.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"{place}: the image's data: address is not base64: {error}; encode it again") from error
    if kind != "file" and value[len(kind) :].startswith("://"):
        raise DataError(
            f"{place}: the image {value[:80]} is on another machine, and every rank would load it; download images "
            f"before the run, and name their files"
        )
    return expand_home(Path(unquote(urlsplit(value).path) if kind == "file" else value))


def _existing(path: Path, place: str, folder: Path | None) -> Path:
    candidates = [path] if path.is_absolute() or folder is None else [path, folder / path]
    for candidate in candidates:
        if os.path.isfile(candidate):
            return candidate
    if len(str(path)) > _LONGEST_PATH or _BASE64.fullmatch(str(path)):
        raise DataError(
            f"{place}: there is no image {str(path)[:40] + '...'!r}, of {len(str(path)):,} characters; correct the "
            f"path, or give an image that is base64 text as 'data:image/png;base64,...'"
        )
    where = " nor in ".join(dict.fromkeys(str(candidate.parent.absolute()) for candidate in candidates))
    found = "only a folder" if any(map(os.path.isdir, candidates)) else "no image"
    raise DataError(f"{place}: there is {found} {path.name!r} in {where}; correct the path")


# ---- content
def _opened(source: Path | bytes | Callable[[], bytes], place: str) -> Image:
    """Return an image of which only the header is read. Raises DataError for one that cannot be used."""
    require_pillow(place)
    from PIL import Image, UnidentifiedImageError

    file: Path | BinaryIO = source if isinstance(source, Path) else BytesIO(_bytes_of(source))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file)
    except UnidentifiedImageError as error:
        raise DataError(f"{place}: {_name(source)} is not an image that Pillow reads; correct it") from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{place}: {_name(source)} has more than the {MAX_PIXELS:,} pixels that are read; shrink it"
        ) from error
    except Exception as error:  # damaged files raise errors of any class
        raise _damaged(source, place, error) from error
    return image


def require_pillow(place: str) -> None:
    """Raise DataError if Pillow is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise DataError(f"{place} has images, and reading them needs Pillow: pip install 'lightning-realloc[vision]'")


def _check_header(image: Image, source: object, place: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"{place}: {_name(source)} has {image.width} x {image.height} pixels, and at most {MAX_PIXELS:,} are read; "
            f"shrink it"
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # of a camera: one picture, and previews
        raise DataError(
            f"{place}: {_name(source)} has {frames} frames or pages; give one, or each as an image of its own"
        )
    mode = image.mode if image.mode not in _MODES else _wide_mode(image)
    if mode is not None:
        raise DataError(
            f"{place}: {_name(source)} has pixels of more than eight bits (Pillow's mode {mode!r}), whose scale is "
            f"unknown; save it with eight bits for a channel"
        )


def _wide_mode(image: Image) -> str | None:
    """Return the mode of an undecoded file with 16 bits for a channel, which Pillow opens with eight."""
    settings = [tile[3] for tile in getattr(image, "tile", ())]
    modes = [one if isinstance(one, str) else str(one[0]) for one in settings if one]
    return next((mode for mode in modes if _WIDE_CHANNEL.search(mode)), None)


def _is_turned(image: Image, source: object, place: str) -> bool:
    """Return whether a file asks for height and width to be exchanged."""
    if image.format == "PNG" and "exif" not in image.info:  # Pillow would decode it, to look after the pixels
        return False
    try:
        return image.getexif().get(_ORIENTATION) in _ROTATED
    except Exception as error:  # damaged files raise errors of any class
        raise _damaged(source, place, error) from error


def _check_end(source: Path | bytes | Callable[[], bytes], kind: str | None, place: str) -> None:
    """Raise DataError for a file that is cut off, as downloads are, without decoding it."""
    if kind not in _ENDS:
        return
    mark, length = _ENDS[kind]
    if isinstance(source, Path):
        with source.open("rb") as file:
            file.seek(max(0, os.path.getsize(source) - length))
            last = file.read()
    else:
        last = _bytes_of(source)[-length:]
    if mark not in last:
        raise DataError(f"{place}: {_name(source)} is cut off: its {kind} data has no end; load it again")


def _damaged(source: object, place: str, error: Exception) -> DataError:
    return DataError(f"{place}: {_name(source)} is damaged ({type(error).__name__}: {error}); correct it")


def _bytes_of(source: bytes | Callable[[], bytes]) -> bytes:
    return source() if callable(source) else source


def _encoded(source: Any) -> bytes:
    """Return bytes of an image that is not in a file of its own; those of an image of Pillow lose nothing."""
    if not is_pillow_image(source):
        return _bytes_of(source)
    stream = BytesIO()
    source.save(stream, "PNG" if source.mode in _PNG_MODES else "TIFF")
    return stream.getvalue()


def _key(source: Any) -> int:
    if is_pillow_image(source):
        return _digest(f"{source.mode} {source.size} ".encode() + source.tobytes())
    return _digest(_bytes_of(source))


def _digest(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def is_pillow_image(value: object) -> bool:
    """Return whether an object is an image of Pillow. Imports nothing."""
    return hasattr(value, "convert") and hasattr(value, "getexif")


def _name(source: object) -> str:
    return str(source) if isinstance(source, Path) else "its image"
