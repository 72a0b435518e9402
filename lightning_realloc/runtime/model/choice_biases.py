"""Biases that are added to scores by which tokens choose experts, and their updates towards equal loads.

Transformers keeps one for each router as a buffer, which no layout divides: a rank has those of all pipeline stages.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2; Wang et al., arXiv:2408.15664, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NAME = "e_score_correction_bias"


def choice_biases(model: nn.Module) -> list[Tensor]:
    """Return the (E,) biases of a model's layers, in their order; none for a model without such buffers."""
    return [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == _NAME]


def update_biases(model: nn.Module, loads: Tensor, rate: float) -> None:
    """Raise the biases of experts below the mean of their layer by ``rate``, and lower those above it.

    Args:
        loads: (L, E) tokens of each expert, integers: so all ranks find the same.
    """
    directions = torch.sign(loads.sum(1, keepdim=True) - loads.shape[1] * loads)
    for bias, direction in zip(choice_biases(model), directions, strict=True):
        bias.add_(direction.to(bias.dtype), alpha=rate)


def copy_biases(source: nn.Module, target: nn.Module, *, rate: float = 1.0) -> None:
    """Move the biases of one module a fraction ``rate`` of the way to those of another one, on the same rank."""
    for theirs, ours in zip(choice_biases(source), choice_biases(target), strict=True):
        ours.lerp_(theirs.to(ours.device), rate)
