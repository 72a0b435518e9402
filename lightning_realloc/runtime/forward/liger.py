"""Apply Liger's fused kernels to a model's norms, rotary embeddings and gated layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_realloc.errors import ConfigError

# Losses here work on log-probabilities, in chunks. Liger's cross entropies would replace a forward that is not called.
_KERNELS = dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), True) | dict.fromkeys(
    ("cross_entropy", "fused_linear_cross_entropy"), False
)


def use_liger_kernels(model: nn.Module, role: str, device: torch.device) -> None:
    """Replace the forwards of a model's modules by Liger's kernels, in place. Copies of the model keep them.

    Raises:
        ConfigError: on a device other than CUDA, without the package, and for a model without kernels.
    """
    if device.type != "cuda":
        raise ConfigError(f"liger_kernels=True needs CUDA, and {role} runs on {device.type}; leave liger_kernels out")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ConfigError(
            f"liger_kernels=True needs the package liger-kernel, which cannot be imported here ({error}); install it, "
            f"or leave liger_kernels out"
        ) from error
    # Transformers' own integration leaves an unknown model unchanged and only logs it.
    family: Any = getattr(getattr(model, "config", None), "model_type", None)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"liger_kernels=True: liger-kernel has no kernels for {role}, a {family or type(model).__name__}; leave "
            f"liger_kernels out, or use one of {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    _apply_liger_kernel_to_instance(model=model, **_KERNELS)
