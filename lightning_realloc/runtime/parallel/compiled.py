"""Compile the blocks of a model with ``torch.compile``, in training calls and in captured decoding steps.

Only a block's own forward is compiled, so hooks that gather weights or recompute activations stay as they are.
Attention over packed sequences stays uncompiled, because each pack has other lengths and would need its own program.
Other calls run the same modules uncompiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.attention.packable import ATTENTION
from lightning_realloc.runtime.forward.attention.packed_attention import ATTENTION_OF_PACKS
from lightning_realloc.runtime.model.structure import find_blocks


@contextmanager
def compiled_blocks(
    model: nn.Module, backend: str | None, *, attention: Sequence[str] = (ATTENTION, ATTENTION_OF_PACKS)
) -> Iterator[None]:
    """Compile the forwards of the model's blocks with a backend of ``torch.compile`` inside the block.

    ``backend=None`` compiles nothing. Programs are cached across uses. Sizes are dynamic, so other lengths need no
    recompilation. ``attention`` has the registered names of the attention that stays uncompiled.

    Blocks that recompute their activations stay uncompiled, with a warning: inside of torch's checkpoint, nothing is
    compiled after the break that uncompiled attention makes (https://github.com/pytorch/pytorch/issues/166926).

    Raises:
        ConfigError: for a model without repeated blocks.
    """
    if backend is None:
        yield
        return
    for name in attention:
        AttentionInterface.register(name, _uncompiled(ALL_ATTENTION_FUNCTIONS[name]))
    # On a pipeline stage the blocks of other stages are placeholders without weights.
    blocks = [block for _, block in find_blocks(model) if any(True for _ in block.parameters())]
    if not blocks:
        raise ConfigError(
            f"compile={backend!r} compiles repeated blocks, and {type(model).__name__} has none; leave compile out"
        )
    # In evaluation mode, as in generation, a block does not recompute, whatever its flag says.
    if any(getattr(block, "gradient_checkpointing", False) and block.training for block in blocks):
        rank_zero_warn(
            f"compile={backend!r} has no effect where activations are recomputed; leave out compile, or "
            f"gradient_checkpointing of the call in the plan"
        )
        blocks = []
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@functools.cache  # one object: programs are bound to it
def _uncompiled(attention: Callable[..., Any]) -> Any:
    already = getattr(attention, "_torchdynamo_disable", False)
    return attention if already else torch.compiler.disable(attention)
