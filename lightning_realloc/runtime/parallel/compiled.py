"""Which parts of a model run through ``torch.compile``? Its blocks, in training calls, and nothing else.

A block's own forward is compiled, behind the hooks that gather its weights or recompute its activations, so those stay
as they are. Attention over packed sequences stays uncompiled: it works by their lengths, which differ from pack to
pack, and each would be a program of its own. Generation and inference use the same modules as they are.
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
    """Run the forward passes of ``model``'s blocks through a backend of ``torch.compile`` inside; None: as they are.

    What was compiled once is found again the next time. Sizes are symbols: other lengths are no other programs.

    Raises:
        ConfigError: for a model without repeated blocks.
    """
    if backend is None:
        yield
        return
    AttentionInterface.register(ATTENTION, _uncompiled_attention())
    # On a pipeline stage the others' blocks are stand-ins without weights.
    blocks = [block for _, block in find_blocks(model) if any(True for _ in block.parameters())]
    if not blocks:
        raise ConfigError(
            f"compile={backend!r}: {type(model).__name__} has no repeated blocks, which are what is compiled; leave "
            f"compile out"
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
    return torch.compiler.disable(segment_attention)  # type: ignore[no-untyped-call]
