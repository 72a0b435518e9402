"""Compile the blocks of a model with ``torch.compile`` in training calls.

Only a block's own forward is compiled, so hooks that gather weights or recompute activations stay as they are.
Attention over packed sequences stays uncompiled, because each pack has other lengths and would need its own program.
Generation and inference run the same modules uncompiled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.packed_attention import ATTENTION, segment_attention
from lightning_realloc.runtime.model.structure import find_blocks


@contextmanager
def compiled_blocks(model: nn.Module, backend: str | None) -> Iterator[None]:
    """Compile the forwards of the model's blocks with a backend of ``torch.compile`` inside the block.

    ``backend=None`` compiles nothing. Programs are cached across uses. Sizes are dynamic, so other lengths need no
    recompilation.

    Raises:
        ConfigError: for a model without repeated blocks.
    """
    if backend is None:
        yield
        return
    AttentionInterface.register(ATTENTION, _uncompiled_attention())
    # On a pipeline stage the blocks of other stages are placeholders without weights.
    blocks = [block for _, block in find_blocks(model) if any(True for _ in block.parameters())]
    if not blocks:
        raise ConfigError(
            f"compile={backend!r} compiles repeated blocks, and {type(model).__name__} has none; leave compile out"
        )
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@functools.cache  # one object: programs are bound to it
def _uncompiled_attention() -> Any:
    return torch.compiler.disable(segment_attention)
