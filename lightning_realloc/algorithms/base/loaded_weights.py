"""Refuse a folder of weights that does not match its config, naming the weights; log weights that fill memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from transformers import PreTrainedModel

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.model.mapped_weights import is_mapped

_MOST_NAMED = 4
"""Number of weights that an error names; it counts the others."""


def require_shapes(where: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raise ConfigError for the first weight of another shape than in the config.

    Args:
        where: Role and source, for the message.
        mismatched: Name, shape in the file, and shape in the model.
    """
    for name, in_file, in_model in sorted(mismatched):
        raise ConfigError(
            f"{where} holds {name} with the shape {list(in_file)}, and its config.json (for a classifier: one label) "
            f"asks for {list(in_model)}; give the config that it was saved with"
        )


def require_complete(where: str, missing: list[str]) -> None:
    """Raise ConfigError for weights that the file lacks."""
    if missing:
        raise ConfigError(
            f"{where} has no weights for {_listed(missing)}, which would be random; give the complete model, or set "
            f"allow_missing=True"
        )


def require_known(where: str, unused: list[str]) -> None:
    """Raise ConfigError for weights that the model has no place for."""
    if unused:
        raise ConfigError(
            f"{where} has weights that its config.json has no place for: {_listed(unused)}; give the config that they "
            f"were saved with, or set allow_missing=True to leave them out"
        )


def require_output(where: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Raise ConfigError for a language model whose file lacks weights of the head."""
    head = model.get_output_embeddings()
    outputs = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    if random := sorted(name for name in missing if name.startswith(outputs)):
        raise ConfigError(
            f"{where} brings no weights for {', '.join(random)}, and random ones say nothing; give a model that was "
            f"saved as {type(model).__name__}, no classifier and no bare backbone"
        )


def require_head(role: str, kind: str, missing: list[str]) -> None:
    """Raise ConfigError for a classifier that is not trained, of the class ``kind``, whose file lacks its head."""
    if missing:
        raise ConfigError(
            f"{role} is not trained here and brings no weights for {', '.join(missing)}: random ones say nothing; give "
            f"a model that was saved as {kind} with num_labels=1"
        )


def log_whole(where: str, model: nn.Module, missing: Collection[str]) -> None:
    """Log the bytes of weights from files that are in memory, whole on every rank until they are divided."""
    merged = [p for name, p in model.named_parameters() if name not in missing and not is_mapped(p)]
    if merged:
        rank_zero_info(
            f"{where}: every rank holds {len(merged)} of its weights ({sum(p.nbytes for p in merged) / 2**30:.2f} GiB) "
            f"whole before it divides them, since loading merges them or cannot map their files; files that "
            f"save_pretrained writes can be mapped"
        )


def _listed(names: list[str]) -> str:
    further = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {further} more" if further > 0 else "")
