"""Liger's fused kernels in a model's norms, rotary embeddings and gated layers, where they can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_realloc.errors import ConfigError

# Losses are ours, of log-probabilities and in parts: Liger's cross entropies would replace a forward that nobody calls.
_KERNELS = {
    "rope": True, "rms_norm": True, "layer_norm": True, "swiglu": True, "geglu": True, "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}  # fmt: skip


def use_liger_kernels(model: nn.Module, role: str, device: torch.device) -> None:
    """Let a model's modules run Liger's kernels, in place. They also stay in copies that are made of it.

    Raises:
        ConfigError: on a device that is not CUDA, without the package, and for models that it has no kernels for.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"liger_kernels=True: they are programs for CUDA, and {role} runs on {device.type}; leave liger_kernels out"
        )
    try:
        from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found, unused-ignore]
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ConfigError(
            f"liger_kernels=True needs the package liger-kernel, which cannot be imported here ({error}); install it, "
            f"or leave liger_kernels out"
        ) from error
    # Transformers' own integration leaves a model that it does not know as it is, and says so in the log alone.
    family: Any = getattr(getattr(model, "config", None), "model_type", None)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"liger_kernels=True: liger-kernel has none for {role}, a {family or type(model).__name__}; it knows "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    _apply_liger_kernel_to_instance(model=model, **_KERNELS)
