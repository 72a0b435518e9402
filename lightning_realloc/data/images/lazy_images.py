"""Images of Pillow that are decoded when their pixels are asked for. Pillow is imported: import this on use."""

from __future__ import annotations

from typing import Any

from PIL import Image

from lightning_realloc.data.images.image_files import ImageFile


class LazyImage(Image.Image):
    """The image that `ImageFile.open` returns, decoded at the first use of its pixels and kept from then on.

    Copies in other processes, too, are decoded there.
    """

    def __init__(self, file: ImageFile) -> None:
        super().__init__()
        self._mode, self._size = "RGB", file.size
        self.file = file

    def load(self) -> Any:
        """Decode the image, as methods of Pillow ask before they read pixels.

        Raises:
            DataError: for pixels that cannot be decoded.
        """
        own: Any = self
        own.im = self.file.open().im
        own.__class__ = Image.Image  # functions may change it from now on; Pillow's StubImageFile does the same
        return own.load()

    def __eq__(self, other: object) -> bool:
        self.load()  # Pillow compares classes
        return self == other

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyImage, (self.file,)


def image_address(image: Image.Image) -> str:
    """Return an image as a ``data:`` address, with the bytes of its file unless it was decoded."""
    file = image.file if isinstance(image, LazyImage) else ImageFile.read(image, "an image")
    return file.address()
