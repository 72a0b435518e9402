"""Images in the parts of messages, and the text that stands for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_realloc.batch.stored_objects import StoredObject
from lightning_realloc.errors import DataError, counted


@dataclass(frozen=True, slots=True)
class ShownImage(StoredObject):
    """An image in a message: the value of ``image`` in a part of type ``image``."""

    file: object
    """The image, whose text names it."""
    placeholder: str
    """Text that chat templates write for an image."""
    expansion: str
    """Text that takes its place, with a token for each feature that the model has of the image."""

    def state(self) -> dict[str, Any]:
        """Return plain data, if that of the image is plain."""
        return {"file": self.file, "placeholder": self.placeholder, "expansion": self.expansion}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ShownImage:
        """Restore the result of :meth:`state`."""
        return cls(**state)

    def __str__(self) -> str:
        return str(self.file)

    __repr__ = __str__


def shown_images(messages: Sequence[Mapping[str, Any]]) -> list[ShownImage]:
    """Return the images in the parts of messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    found = (part.get("image") for part in parts if isinstance(part, Mapping))
    return [image for image in found if isinstance(image, ShownImage)]


def with_changed_parts(
    messages: Sequence[Mapping[str, Any]], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages with another part in place of each one of their contents."""

    def changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [change(part) if isinstance(part, Mapping) else part for part in content]}

    return list(map(changed, messages))


def template_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of a message as chat templates read it, without the image itself."""
    return {"type": "image"} if isinstance(part.get("image"), ShownImage) else part


def expanded(text: str, images: Sequence[ShownImage], place: str) -> str:
    """Return a rendered conversation with the expansions of images in place of their placeholders.

    Raises:
        DataError: for other numbers of placeholders than of images.
    """
    if not images:
        return text
    first, *rest = text.split(images[0].placeholder)
    if len(rest) != len(images):
        raise DataError(
            f"{place}: the rendered conversation holds {images[0].placeholder!r} {counted(len(rest), 'time')}, for "
            f"{counted(len(images), 'image')}; leave placeholders to the chat template, and write none in texts"
        )
    return first + "".join(image.expansion + after for image, after in zip(images, rest, strict=True))
