"""Compare a transformers model with the file that its weights came from: missing weights, unknown ones, untied ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from lightning_realloc.runtime.model.structure import find_blocks

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


def record_untied_weights(model: nn.Module) -> None:
    """Set ``tie_word_embeddings=False`` in the config of a model whose weights are not tied as the config says.

    ``from_pretrained`` keeps two weights apart where a file holds two different ones, and leaves the config as it is.
    A model that is written with such a config would be read back with one of them in place of both.
    """
    if not isinstance(model, PreTrainedModel):
        return
    named = model.named_parameters(remove_duplicate=False)
    weights = {name.replace(".base_layer.", "."): parameter for name, parameter in named}
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    if any(weights.get(target) is not weights.get(source) for target, source in pairs):
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
