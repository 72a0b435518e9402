"""The images of a sample, and a model's processor, which makes placeholders in the text and pixel values of them."""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast, overload

from torch import Tensor
from transformers import AutoProcessor, ProcessorMixin

from lightning_realloc.batch.model_input import ModelInput, prompt_digest
from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.batch.stored_objects import StoredObject
from lightning_realloc.data.chat import Message
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.data.shown_images import shown_images
from lightning_realloc.data.tokenizers import describe_load_error
from lightning_realloc.errors import DataError
from lightning_realloc.remote_path import expand_home

if TYPE_CHECKING:
    from PIL.Image import Image

CACHED_BYTES = 1 << 28
"""Bytes of pixel values that a process keeps, for the next pass over the same samples."""
READ_AHEAD = 8
"""Samples whose images are read, or were read and not yet asked for. A photo of 12 megapixels takes about 0.2 s."""
_SIZES_REMEMBERED = 4096
"""Combinations of image sizes whose placeholders are remembered."""
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"})
"""Outputs of a processor that are about its text."""
_PIXELS = "pixel_"
"""Beginning of the names of outputs that depend on what an image shows; others follow from its size."""
_NESTED = ("Idefics3", "SmolVLM")
"""Classes of processors, by the beginning of their names, whose pixels have a dim of samples before that of images."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """What a processor makes of images of some sizes, whatever they show."""

    texts: tuple[str, ...]
    """Text that takes the place of each image's placeholder."""
    inputs: Mapping[str, Tensor]
    """Further inputs of the model besides pixels, such as the grid of an image's patches."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all further inputs."""
    num_tokens: int
    """Number of `ImageProcessor.token_id` in the texts."""


class ImageProcessor:
    """A processor of transformers, for the images of one sample at a time. Threads may share it.

    Args:
        processor: For example, what `AutoProcessor.from_pretrained` returns for a vision-language model.

    Raises:
        DataError: for a processor without images.
    """

    in_use: ClassVar[ImageProcessor | None] = None
    """The last one that was made in this process."""

    def __init__(self, processor: ProcessorMixin) -> None:
        placeholder = getattr(processor, "image_token", None)
        if not isinstance(placeholder, str) or not hasattr(processor, "image_processor"):
            raise DataError(f"{type(processor).__name__} reads no images; give the processor of a model that does")
        self.placeholder = placeholder
        ImageProcessor.in_use = self
        self._processor = cast("Any", processor)
        # With a tokenizer of its own: the user's has no padding changed while a thread reads.
        self._reader = copy.deepcopy(self._processor)
        self.token_id: int = self._processor.image_token_id
        """A token that every image has some of."""
        self.backend: str = getattr(self._processor.image_processor, "backend", "pil")
        """Library by which transformers makes pixels: "pil" or "torchvision"."""
        self.chat_template = getattr(processor, "chat_template", None)
        self._is_nested = type(processor).__name__.startswith(_NESTED)
        self._cache: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._ahead = _ReadAhead(lambda images: self._cached(images) or self._read(images))
        self.placeholders = lru_cache(_SIZES_REMEMBERED)(self._placeholders)

    @classmethod
    def load(cls, source: str, settings: Mapping[str, Any]) -> ImageProcessor | None:
        """Return the processor of a Hugging Face name or folder; None if there is only a tokenizer, or no such place.

        Raises:
            DataError: if it cannot be loaded.
        """
        if not str(source):
            return None
        try:
            processor = AutoProcessor.from_pretrained(expand_home(source), **settings)
        except Exception as error:  # damaged files raise errors of any class
            raise DataError(
                f"no processor of images could be loaded from {str(source)!r} ({describe_load_error(source, error)}); "
                f"give tokenizer= a processor, or a folder with the files of one"
            ) from error
        return cls(processor) if hasattr(processor, "image_processor") else None

    def inputs(self, images: SampleImages) -> Mapping[str, Tensor]:
        """Return the further inputs (rows, ...) of a model for a sample's images, from the cache if they are there."""
        begun = self._ahead.take(images)
        made = self._cached(images) or (self._read(images) if begun is None else begun.result())
        with self._lock:
            if images.key not in self._cache:  # of another thread
                self._cache[images.key] = made
                self._cached_bytes += _num_bytes(made)
            while len(self._cache) > 1 and self._cached_bytes > CACHED_BYTES:
                self._cached_bytes -= _num_bytes(self._cache.popitem(last=False)[1])
        return made

    def read_ahead(self, order: Sequence[SampleImages]) -> None:
        """Read samples in the background, in this order and in place of any earlier one, as `inputs` is called."""
        self._ahead.expect({images.key: images for images in order})

    def read_next(self, images: SampleImages) -> None:
        """Read a sample in the background, before others that are waiting."""
        self._ahead.put_first(images)

    def save(self, folder: Path) -> None:
        """Write the files that `load` reads, tokenizer included."""
        self._processor.save_pretrained(str(folder))

    def _placeholders(self, sizes: tuple[tuple[int, int], ...]) -> Placeholders:
        """Return the texts and inputs of images of these widths and heights.

        Raises:
            ValueError, or another error of the processor: for sizes that it refuses.
        """
        from PIL import Image

        blanks = [Image.new("RGB", size) for size in sizes]
        made = self._called(blanks, return_text_replacement_offsets=True)
        replaced = made["text_replacement_offsets"][0]
        inputs = self._inputs_in(made)
        return Placeholders(
            texts=tuple(part["replacement"] for part in replaced),
            inputs={name: values for name, values in inputs.items() if not name.startswith(_PIXELS)},
            shapes={name: tuple(values.shape) for name, values in inputs.items()},
            num_tokens=int((made["input_ids"] == self.token_id).sum()),
        )

    def _cached(self, images: SampleImages) -> Mapping[str, Tensor] | None:
        with self._lock:
            found = self._cache.get(images.key)
            if found is not None:
                self._cache.move_to_end(images.key)
            return found

    def _read(self, images: SampleImages) -> Mapping[str, Tensor]:
        try:
            return self._inputs_in(self._called(list(images)))
        except DataError:
            raise
        except Exception as error:  # processors raise errors of any class
            place = images.files[0].place
            raise DataError(f"{place}: {type(self._processor).__name__} cannot read its images: {error}") from error

    def _called(self, images: Sequence[Image], **settings: Any) -> Mapping[str, Any]:
        text = self.placeholder * len(images)
        made: Mapping[str, Any] = self._reader(images=[list(images)], text=[text], return_tensors="pt", **settings)
        return made

    def _inputs_in(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        inputs = {name: values for name, values in made.items() if name not in _OF_TEXT}
        if self._is_nested:
            inputs = {name: values[0].unsqueeze(1) for name, values in inputs.items()}
        return inputs


class _ReadAhead:
    """Reads samples in threads, a few ahead of those that were taken.

    Args:
        read: Makes the inputs of a sample.
    """

    def __init__(self, read: Callable[[SampleImages], Mapping[str, Tensor]]) -> None:
        self._read = read
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[int, SampleImages] = {}
        self._begun: dict[int, Future[Mapping[str, Tensor]]] = {}
        self._lock = threading.Lock()

    def expect(self, order: dict[int, SampleImages]) -> None:
        """Read these samples, by their keys, in place of others that are waiting."""
        with self._lock:
            for key in self._begun.keys() - order.keys():
                self._begun.pop(key).cancel()
            self._waiting = {key: images for key, images in order.items() if key not in self._begun}
            self._begin()

    def put_first(self, images: SampleImages) -> None:
        """Read a sample before those that are waiting."""
        with self._lock:
            if images.key not in self._begun:
                self._waiting = {images.key: images} | self._waiting
            self._begin()

    def take(self, images: SampleImages) -> Future[Mapping[str, Tensor]] | None:
        """Return the inputs of a sample whose reading was begun; None for another one. The next one is begun."""
        with self._lock:
            self._waiting.pop(images.key, None)
            begun = self._begun.pop(images.key, None)
            self._begin()
        return begun

    def _begin(self) -> None:
        while self._waiting and len(self._begun) < READ_AHEAD:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(READ_AHEAD, os.cpu_count() or 1), "images")
            key = next(iter(self._waiting))
            self._begun[key] = self._pool.submit(self._read, self._waiting.pop(key))


class SampleImages(Sequence["Image"], PromptImages):
    """The images of a sample: a sequence of images of Pillow, each decoded when it is asked for.

    Reward functions get it as ``images``. Copies of a sample share it, and nothing of it is sent between ranks.
    """

    def __init__(self, files: Sequence[ImageFile], processor: ImageProcessor | None) -> None:
        self.files = tuple(files)
        self._processor = processor
        digest = blake2b(b"".join(file.key.to_bytes(8, "little") for file in self.files), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> list[Image]: ...
    def __getitem__(self, index: int | slice) -> Image | list[Image]:
        if isinstance(index, slice):
            return [file.open() for file in self.files[index]]
        return self.files[index].open()

    def __repr__(self) -> str:
        return f"[{', '.join(map(str, self.files))}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleImages) and self.key == other.key

    def __hash__(self) -> int:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files, None)

    def state(self) -> dict[str, Any]:
        """Return plain data."""
        return {"files": list(self.files)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SampleImages:
        """Restore the result of :meth:`state`."""
        return cls(state["files"], None)

    @property
    def key(self) -> int:
        """64 bits that tell the images of samples apart."""
        return self._key

    @property
    def processor(self) -> ImageProcessor:
        """The model's processor; of images from a checkpoint or another process, the one in use here.

        Raises:
            DataError: if there is none.
        """
        found = ImageProcessor.in_use if self._processor is None else self._processor
        if found is None:
            raise DataError(
                "images of a checkpoint need a data module whose rows have images; give the one of that run"
            )
        return found

    def addresses(self) -> list[str]:
        """Return the images as ``data:`` addresses, for JSON."""
        return [file.address() for file in self.files]

    def read_ahead(self, order: Sequence[SampleImages]) -> None:
        """Read the inputs of samples in the background; see `ImageProcessor.read_ahead`."""
        self.processor.read_ahead(order)

    def read_next(self) -> None:
        """Read the inputs in the background; see `ImageProcessor.read_next`."""
        self.processor.read_next(self)

    def paths(self, folder: Path) -> list[Path]:
        """Return a file of each image with its encoded bytes; for images in no file of their own, one in ``folder``."""
        return [file.path(folder) for file in self.files]

    @property
    def backend(self) -> str:
        """Library by which transformers makes pixels: "pil" or "torchvision"."""
        return self.processor.backend

    def save_processor(self, folder: Path) -> None:
        """Write the files of the model's processor, and of its tokenizer."""
        self.processor.save(folder)

    @property
    def placeholders(self) -> Placeholders:
        """What the processor makes of images of these sizes. Raises errors of the processor."""
        return self.processor.placeholders(tuple(file.size for file in self.files))

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Further inputs of the model, each (rows, ...) and on the host; pixel values are made when they are read."""
        return ImageInputs(self) if self.files else {}


def shown_files(
    messages: Sequence[Message], find_processor: Callable[[], ImageProcessor | None]
) -> SampleImages | None:
    """Return the images that messages show; None for none."""
    files: list[Any] = [image.file for image in shown_images(messages)]
    return SampleImages(files, find_processor()) if files else None


def shown_input(
    token_ids: Sequence[int], messages: Sequence[Message], find_processor: Callable[[], ImageProcessor | None]
) -> ModelInput:
    """Return tokens of messages as the model reads them, with the images that the messages show."""
    images = shown_files(messages, find_processor)
    if images is None:
        return ModelInput(tuple(token_ids))
    return ModelInput(tuple(token_ids), images.inputs, prompt_digest(token_ids, {}, of_inputs=images.key))


class ImageInputs(Mapping[str, Tensor], StoredObject):
    """Further inputs of a model, of which those that depend on pixels are made when they are read.

    Messages and checkpoints hold the images.
    """

    def __init__(self, images: SampleImages) -> None:
        self.images = images
        """The images that they are made of."""
        self._known = images.placeholders

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known.shapes:
            raise KeyError(name)
        known = self._known.inputs.get(name)
        return self.images.processor.inputs(self.images)[name] if known is None else known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known.shapes)

    def state(self) -> dict[str, Any]:
        """Return plain data."""
        return self.images.state()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ImageInputs:
        """Restore the result of :meth:`state`."""
        return cls(SampleImages.from_state(state))

    def __len__(self) -> int:
        return len(self._known.shapes)


def _num_bytes(inputs: Mapping[str, Tensor]) -> int:
    return sum(values.nbytes for values in inputs.values())
