"""Is a completion right? Ready-made answers to that, for what can be checked without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_realloc.rewards.texts import completion_texts


def exact_match(
    prompts: Sequence[object], completions: Sequence[Any], answer: Sequence[object], **columns: object
) -> list[float]:
    """Return 1 where the completion is the ``answer``, apart from white space around it, and 0 elsewhere."""
    texts = completion_texts(completions)
    return [float(text.strip() == str(right).strip()) for text, right in zip(texts, answer, strict=True)]
