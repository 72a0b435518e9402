"""Names of torch's dtypes in messages, configurations and errors: ``bfloat16`` for ``torch.bfloat16``."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of a name, with or without ``torch.``; None for the name of anything else."""
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None
