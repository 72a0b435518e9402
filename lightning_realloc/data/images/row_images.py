"""Find the images of a row, in columns and in the parts of messages, and give each its place in a message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_realloc.batch.samples import IMAGES
from lightning_realloc.data.chat import Message, is_conversation, is_image_part, is_text_part, readable_values
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.data.images.sample_images import ImageProcessor, SampleImages
from lightning_realloc.data.rows import Row
from lightning_realloc.data.shown_images import ShownImage, with_changed_parts
from lightning_realloc.errors import DataError, counted

IMAGE_COLUMNS = ("image", "images")
"""Columns with the images of a row; TRL has the same."""
_WAY_OUT = (
    "correct it, or give check_pixels=True, which finds such images at the start, with bad_rows='drop', which leaves "
    "their rows out"
)
"""Advice during a run about an image whose pixels cannot be decoded."""
_CONTINUING = ("completion", "chosen", "rejected")
"""Columns whose messages continue those of ``prompt``, each on its own."""


def readable_rows(
    rows: Sequence[Row],
    message_columns: Collection[str],
    processor: ImageProcessor | None,
    *,
    as_messages: bool = False,
    whole: set[int] | None = None,
    folder: Path | None = None,
) -> tuple[Row, ...]:
    """Return rows with text as the content of messages, or with their images as by :func:`with_images`.

    Args:
        processor: The model's processor of images; None for a model of text, and for data without images.
        as_messages: Whether a prompt that is text becomes a message also without images, because those of other rows
            do: reward functions then get one kind of prompt.
        whole: Keys of images that could be decoded, to which others are added; None: none is decoded here.
    """
    read = () if processor is None else IMAGE_COLUMNS
    read_file = partial(ImageFile.read, folder=folder, **({"way_out": _WAY_OUT} if whole is None else {}))
    made: list[Row] = []
    for row in rows:
        values: Mapping[str, Any] = row.values
        if processor is not None:
            if has_images(values, message_columns):
                shown = with_images(values, message_columns, row.place, processor, read=read_file)
            else:
                opened = _with_message(values, message_columns) if as_messages else values
                shown = {**opened, IMAGES: SampleImages((), processor)}
            values = {name: value for name, value in shown.items() if name == IMAGES or name not in IMAGE_COLUMNS}
            if whole is not None:
                for file in shown[IMAGES].files:
                    if file.key not in whole:
                        file.open()
                        whole.add(file.key)
        made.append(Row(row.place, readable_values(values, message_columns, row.place, read=read)))
    return tuple(made)


def has_images(values: Mapping[str, Any], message_columns: Collection[str]) -> bool:
    """Return whether a row holds images."""
    if any(_listed(values.get(name)) for name in IMAGE_COLUMNS):
        return True
    conversations = (values[name] for name in message_columns if is_conversation(values.get(name)))
    return any(is_image_part(part) for messages in conversations for _, part in _parts(messages))


def with_images(
    values: Mapping[str, Any],
    message_columns: Collection[str],
    place: str,
    processor: ImageProcessor,
    *,
    read: Callable[[object, str], ImageFile] = ImageFile.read,
) -> dict[str, Any]:
    """Return the columns of a row, with its images in the column ``images`` and in its messages.

    Images of columns take the places of image parts without one, in order. If messages have no such parts, images come
    before the text of the first message of the user, as in TRL. A prompt that is text becomes a message for that.

    Args:
        message_columns: Columns that may hold messages.
        place: Location of the row, for error messages.
        read: Returns the image that a value names at a place.

    Raises:
        DataError: for images that cannot be used, and for other numbers of images than of parts.
    """
    shown, given, places, files = _found_images(values, message_columns, place, read)
    return {**shown, **_with_parts(given, places, files, processor, place), IMAGES: SampleImages(files, processor)}


def image_sizes(
    values: Mapping[str, Any], message_columns: Collection[str], place: str, *, folder: Path | None = None
) -> tuple[tuple[int, int], ...]:
    """Return width and height of a row's images, from their headers. Raises DataError as :func:`with_images`."""
    if not has_images(values, message_columns):
        return ()
    read_file = partial(ImageFile.read, folder=folder)
    *_, files = _found_images(values, message_columns, place, read_file)
    return tuple(file.size for file in files)


def _found_images(
    values: Mapping[str, Any],
    message_columns: Collection[str],
    place: str,
    read: Callable[[object, str], ImageFile],
) -> tuple[dict[str, Any], dict[str, list[Message]], dict[str, list[Any]], list[ImageFile]]:
    """Return the columns of a row with images, its conversations, the images that their parts name, and all images."""
    both = [name for name in IMAGE_COLUMNS if _listed(values.get(name))]
    if len(both) > 1:
        raise DataError(f"{place} has images in both columns, {' and '.join(both)}; give one of them")
    listed = [value for name in both for value in _listed(values[name])]
    opening = _opening(values, message_columns)
    shown = _with_message(values, message_columns) if listed else dict(values)
    given = {name: shown[name] for name in message_columns if is_conversation(shown.get(name))}
    if listed and not any(map(_places, given.values())):
        for name in given if opening not in given or opening in _CONTINUING else (opening,):
            given[name] = _opened_by(len(listed), given[name], place)
    places = {name: _places(messages) for name, messages in given.items()}
    of_prompt = places.get("prompt", [])
    files: list[ImageFile] | None = None
    for name, own in places.items():
        if name == "prompt" and any(other in given for other in _CONTINUING):
            continue
        whole = of_prompt + own if name in _CONTINUING else own
        found = _files(whole, listed, place, read)
        if files is not None and found != files:
            raise DataError(f"{place}: chosen and rejected show other images; both need the same ones")
        files = found
    if files is None:  # no messages: text of which no part shows an image
        raise DataError(
            f"{place} has images, and no message that shows them; give the text as messages with roles and contents"
        )
    return shown, given, places, files


def with_placed_images(messages: Sequence[Message], images: Sequence[Any], place: str) -> list[Message]:
    """Return messages whose image parts without an image hold one of ``images`` each, in order.

    If messages have no image parts, images come before the text of the first one. Without messages, one of the user
    shows them.

    Raises:
        DataError: for other numbers of images than of such parts.
    """
    opened = list(messages)
    if images and not _places(opened):
        first, *rest = opened or [{"role": "user", "content": ""}]
        opened = [_opened(first, len(images)), *rest]
    _check_number(_places(opened), images, place)
    left = iter(images)
    return [_filled(message, left) for message in opened]


def check_whole_images(row: Row, ids: Sequence[int]) -> None:
    """Raise DataError if the tokens of a row do not show its images whole, such as after a cut."""
    images = row.values.get(IMAGES)
    if not isinstance(images, SampleImages):
        return
    expected, found = images.placeholders.num_tokens if images else 0, list(ids).count(images.processor.token_id)
    if found > expected:
        raise DataError(
            f"{row.place}: its text holds placeholders of images besides those of its {counted(len(images), 'image')}; "
            f"leave them to the chat template, and write none in texts"
        )
    if found < expected:
        raise DataError(
            f"{row.place}: its tokens show {found} of {counted(expected, 'part')} of its "
            f"{counted(len(images), 'image')}; rows with images are not cut to fewer tokens, so drop long rows, and "
            f"messages after the last answer are not read"
        )


class PillowImages:
    """Images of Pillow for the messages of a batch, decoded when they are used; repeated prompts share theirs."""

    def __init__(self) -> None:
        self._known: dict[int, object] = {}

    def put_in(self, conversation: Any) -> Any:
        """Return messages with images of Pillow in their parts; text as it is."""
        return with_changed_parts(conversation, self._changed) if is_conversation(conversation) else conversation

    def _changed(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        shown = part.get("image")
        file = shown.file if isinstance(shown, ShownImage) else shown
        if not isinstance(file, ImageFile):
            return part
        if id(file) not in self._known:
            from lightning_realloc.data.images.lazy_images import LazyImage  # needs Pillow, which text does without

            self._known[id(file)] = LazyImage(file)
        return {**part, "image": self._known[id(file)]}


# ---- prompts
def _opening(values: Mapping[str, Any], message_columns: Collection[str]) -> str | None:
    """Return the column that a row's conversation begins with."""
    return next((name for name in ("prompt", *message_columns) if name in values and name in message_columns), None)


def _with_message(values: Mapping[str, Any], message_columns: Collection[str]) -> dict[str, Any]:
    """Return a row whose prompt, if it is text, is a message of the user, unless another column repeats it as one."""
    opening = _opening(values, message_columns)
    repeats = any(is_conversation(values.get(name)) and values[name][0]["role"] != "assistant" for name in _CONTINUING)
    if opening is None or opening in _CONTINUING or not isinstance(values[opening], str) or repeats:
        return dict(values)
    return {**values, opening: [{"role": "user", "content": values[opening]}]}


# ---- parts of messages
def _parts(messages: Sequence[Message]) -> Iterator[tuple[Message, Any]]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from ((message, part) for part in message["content"])


def _places(messages: Sequence[Message]) -> list[Any]:
    """Return the image that each image part of messages names, None for one of the columns."""
    return [_named(part) for _, part in _parts(messages) if is_image_part(part)]


def _named(part: Mapping[str, Any]) -> Any:
    for name in ("image", "image_url", "path", "url", "base64"):
        if part.get(name) is not None:
            return {"base64": part[name]} if name == "base64" else part[name]
    return None


def _listed(value: object) -> list[Any]:
    """Return the images of a column: of one, of several, or of none."""
    if isinstance(value, Mapping):  # tables hold a mapping of nulls where other rows have a file
        return [value] if any(held is not None for held in value.values()) else []
    return (
        list(value)
        if isinstance(value, list | tuple)
        else []
        if value is None or (isinstance(value, str) and not value)
        else [value]
    )


def _opened_by(count: int, messages: list[Message], place: str) -> list[Message]:
    """Return messages with parts for images before the text of the first message of the user."""
    first = next((turn for turn, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise DataError(f"{place} has images, and no message of the user that could show them; add one")
    return [*messages[:first], _opened(messages[first], count), *messages[first + 1 :]]


def _opened(message: Message, count: int) -> Message:
    """Return a message with parts for images before its text."""
    content = message.get("content") or []
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return {**message, "content": [*({"type": "image"} for _ in range(count)), *texts]}


def _filled(message: Message, left: Iterator[Any]) -> Message:
    """Return a message with the next images in its image parts without one."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    is_open = [is_image_part(part) and _named(part) is None for part in content]
    parts = [
        {"type": "image", "image": next(left)} if wants else part for part, wants in zip(content, is_open, strict=True)
    ]
    return {**message, "content": parts}


def _check_number(named: Sequence[Any], listed: Sequence[Any], place: str) -> None:
    num_open = sum(value is None for value in named)
    if num_open != len(listed):
        raise DataError(
            f"{place}: its messages have {counted(num_open, 'part')} of type 'image' without an image, for "
            f"{counted(len(listed), 'image')}; write a part for each, or none at all to show them before the first text"
        )


def _files(
    named: Sequence[Any], listed: Sequence[Any], place: str, read: Callable[[object, str], ImageFile]
) -> list[ImageFile]:
    """Return the images that parts show, those without a name in the order of the column."""
    _check_number(named, listed, place)
    left = iter(listed)
    values: list[Any] = [next(left) if value is None else value for value in named]
    files: list[Any] = [value.file if isinstance(value, ShownImage) else read(value, place) for value in values]
    return files


def _with_parts(
    given: Mapping[str, list[Message]],
    places: Mapping[str, list[Any]],
    files: Sequence[ImageFile],
    processor: ImageProcessor,
    place: str,
) -> dict[str, list[Message]]:
    """Return messages whose parts hold images and the text that stands for them."""
    try:
        expansions = SampleImages(files, processor).placeholders.texts
    except Exception as error:  # processors raise errors of any class
        sizes = ", ".join(f"{file.width} x {file.height}" for file in files)
        raise DataError(f"{place}: the model's processor refuses images of {sizes} pixels: {error}") from error
    all_shown = [
        ShownImage(*each) for each in zip(files, [processor.placeholder] * len(files), expansions, strict=True)
    ]
    made: dict[str, list[Message]] = {}
    for name, messages in given.items():
        begin = len(places.get("prompt", [])) if name in _CONTINUING else 0
        shown = iter(all_shown[begin : begin + len(places[name])])
        made[name] = [_shown_message(message, shown, place) for message in messages]
    return made


def _shown_message(message: Message, shown: Iterator[ShownImage], place: str) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if not isinstance(content, list):
        return message
    parts: list[Mapping[str, Any]] = []
    for part in content:
        if is_image_part(part):
            parts.append({"type": "image", "image": next(shown)})
        elif is_text_part(part):
            parts.append({"type": "text", "text": part["text"]})
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(
                f"{place}: a message of role {message['role']!r} holds {kind!r} beside images; its parts are texts and "
                f"images"
            )
    return {**message, "content": parts}
