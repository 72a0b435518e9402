"""Set activation checkpointing and dropout independently; transformers ties both to one flag."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn
from transformers import PreTrainedModel

from lightning_realloc.errors import PlanError


def can_recompute(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Return whether blocks of a model can recompute their activations in the backward pass."""
    return isinstance(model, PreTrainedModel) and model.supports_gradient_checkpointing


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Make every block recompute its activations in the backward pass.

    Raises:
        PlanError: for a model that does not support it.
    """
    if not can_recompute(model):
        raise PlanError(
            f"gradient_checkpointing: {type(model).__name__} does not support it in transformers; "
            f"leave the option out, or lower micro_batch_tokens instead"
        )
    # transformers 5.21 renamed this method and deprecated the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def set_training_mode(model: nn.Module, *, dropout: bool) -> None:
    """Prepare a model for training, with or without dropout, and keep activation checkpointing enabled.

    A checkpointed block reads its own ``training`` flag. Dropout reads the flag of the module around it.
    """
    model.train(dropout)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
