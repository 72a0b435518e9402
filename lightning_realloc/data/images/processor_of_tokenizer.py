"""Find the processor of images that belongs to a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lightning_realloc.data.images.sample_images import ImageProcessor


class ProcessorOfTokenizer:
    """Finds the processor of images that belongs to a tokenizer, and keeps it.

    Args:
        settings: Settings by name with which it is loaded.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.given: ProcessorMixin | None = None
        """Processor that the user gave in place of a tokenizer."""
        self._found: tuple[PreTrainedTokenizerBase, ImageProcessor | None] | None = None

    def find(self, tokenizer: PreTrainedTokenizerBase, given: ProcessorMixin | None) -> ImageProcessor | None:
        """Return the given processor, or the one of the tokenizer's name or folder; None for a model of text.

        A tokenizer without a chat template gets the processor's.

        Raises:
            DataError: if the processor cannot be loaded.
        """
        if self._found is None or self._found[0] is not tokenizer:
            given = given if self.given is None else self.given
            load = ImageProcessor.load
            found = load(tokenizer.name_or_path, self.settings) if given is None else ImageProcessor(given)
            if found is not None and tokenizer.chat_template is None:
                tokenizer.chat_template = found.chat_template
            self._found = tokenizer, found
        return self._found[1]
