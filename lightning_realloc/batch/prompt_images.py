"""The images of a sample, as batches and engines see them: opaque, until a model or another program needs them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lightning_realloc.batch.stored_objects import StoredObject

if TYPE_CHECKING:
    from torch import Tensor


class PromptImages(StoredObject):
    """The images of a sample, whose pixels are read when a model needs them. An empty one is False."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @property
    @abstractmethod
    def key(self) -> int:
        """64 bits that tell the images of samples apart."""

    @abstractmethod
    def addresses(self) -> list[str]:
        """Return the images as ``data:`` addresses, for JSON."""

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, Tensor]:
        """Further inputs by the keyword that the model's ``forward`` expects, each (rows, ...); read when asked for."""

    @abstractmethod
    def read_ahead(self, order: Sequence[Self]) -> None:
        """Read the ``inputs`` of samples in the background, in this order, shortly before they are asked for."""

    @abstractmethod
    def read_next(self) -> None:
        """Read ``inputs`` in the background, before those of other samples whose reading has not begun."""

    @abstractmethod
    def paths(self, folder: Path) -> list[Path]:
        """Return a file of each image with its encoded bytes; for images in no file of their own, one in ``folder``."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """Library by which transformers makes pixels: "pil" or "torchvision"."""

    @abstractmethod
    def save_processor(self, folder: Path) -> None:
        """Write the files of the processor that makes ``inputs``, and of its tokenizer."""
