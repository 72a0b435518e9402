"""Check token ids and their range, for prompts, answers of environments, and data."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_realloc.errors import GenerationError, ReallocError


def as_token_ids(given: Any) -> tuple[int, ...]:
    """Return a list, tensor or other sequence of whole numbers as a tuple; TypeError for anything else."""
    return tuple(_as_token_id(token) for token in (given.tolist() if isinstance(given, Tensor) else given))


def _as_token_id(given: Any) -> int:
    if isinstance(given, bool):  # which Python takes for 1 and 0
        raise TypeError(f"{given} is no token id")
    return operator.index(given)


def check_vocabulary(
    name: str,
    tokens: Sequence[int],
    vocabulary: int,
    *,
    model: str = "the model",
    error: type[ReallocError] = GenerationError,
) -> None:
    """Raise ``error`` where ``tokens``, at least one, are not all below ``vocabulary``; ``name`` says whose."""
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise error(
            f"{name} holds token ids from {min(tokens)} to {max(tokens)}, {model}'s vocabulary has {vocabulary}; use "
            f"the model's own tokenizer, and after adding tokens to it model.resize_token_embeddings(len(tokenizer))"
        )
