"""Compare a transformers model with the file that its weights came from: which have no place in it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedModel

from lightning_realloc.runtime.structure import find_blocks

_OLD_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|\.inv_freq$")
"""Causal masks and rotary frequencies, which older versions of transformers saved next to the weights."""


def unused_weights(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Return which of a file's unexpected weights belong to modules that the model has, sorted.

    That is a further block, or a weight more in a module. Modules that the model lacks altogether are left out: a value
    head, the head of another task, a vision tower.
    """
    modules = {name for name, _ in model.named_modules() if name}
    lists = {block.rpartition(".")[0] for block, _ in find_blocks(model)}

    def is_ours(name: str) -> bool:
        return name.rpartition(".")[0] in modules or any(name.startswith(f"{blocks}.") for blocks in lists)

    prefix = f"{model.base_model_prefix}."  # which the file of a bare backbone lacks
    found = (name for name in unexpected if not _OLD_BUFFERS.search(name))
    return sorted(name for name in found if is_ours(name) or is_ours(prefix + name))
