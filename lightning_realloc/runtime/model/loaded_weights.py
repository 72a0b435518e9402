"""Compare a transformers model with the checkpoint that it was loaded from: unused and untied weights."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from lightning_realloc.runtime.model.structure import find_blocks

_OLD_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|\.inv_freq$")
"""Causal masks and rotary frequencies, which older versions of transformers saved with the weights."""


def unused_weights(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected weights of a checkpoint that belong to modules of the model, sorted.

    These are additional blocks, or additional weights of a module. Ignored are modules that the model does not have,
    such as a value head, the head of another task or a vision tower.
    """
    modules = {name for name, _ in model.named_modules() if name}
    lists = {block.rpartition(".")[0] for block, _ in find_blocks(model)}

    def is_ours(name: str) -> bool:
        return name.rpartition(".")[0] in modules or any(name.startswith(f"{blocks}.") for blocks in lists)

    prefix = f"{model.base_model_prefix}."  # missing in the checkpoint of a bare backbone
    found = (name for name in unexpected if not _OLD_BUFFERS.search(name))
    return sorted(name for name in found if is_ours(name) or is_ours(prefix + name))


def record_untied_weights(model: nn.Module) -> None:
    """Set ``tie_word_embeddings=False`` in the config of a model whose weights are not tied as the config says.

    ``from_pretrained`` keeps two weights untied if the checkpoint holds different values for them, but does not change
    the config. A model saved with that config would be loaded with one weight in both places.
    """
    if not isinstance(model, PreTrainedModel):
        return
    named = model.named_parameters(remove_duplicate=False)
    weights = {name.replace(".base_layer.", "."): parameter for name, parameter in named}
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    if any(weights.get(target) is not weights.get(source) for target, source in pairs):
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
