"""Check the Trainer's precision, derive dtypes from it, cast parameters, and choose autocast without gradients."""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.batch.samples import Samples

REFUSED_PRECISIONS = {
    "16-mixed": "one gradient scaler cannot serve several optimizers: each would unscale with the other's scale",
    "16-true": "float16 weights lose small updates without a gradient scaler",
    "64-true": "float64 weights would be cast to float32 by collectives and kernels that have no float64 form",
    "transformer-engine": "its layers hide their weights from reallocation",
    "transformer-engine-float16": "its layers hide their weights from reallocation",
}

_ADAPTER_WEIGHT = ".lora_"
"""Part of the names of all adapters' weights."""


def refuse_precision(precision: str) -> None:
    """Raise MisconfigurationException, with the reason, for a precision that cannot work."""
    if precision in REFUSED_PRECISIONS:
        raise MisconfigurationException(
            f"precision={precision!r} cannot be used with strategy='realloc': {REFUSED_PRECISIONS[precision]}; "
            f"use '32-true', 'bf16-mixed' or 'bf16-true'"
        )


def master_dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of weights that training changes."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def copy_dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of frozen weights, and of replicas other than home replicas."""
    return torch.bfloat16 if precision.startswith("bf16") else torch.float32


class SamplesHalfPrecision(HalfPrecision):
    """``bf16-true`` that keeps the dtypes of samples: log-probabilities are float32, whatever the weights are."""

    def convert_input(self, data: Any) -> Any:
        """Cast a batch of tensors; samples stay as they are."""
        return data if isinstance(data, Samples) else super().convert_input(data)


def cast_parameters(module: nn.Module, dtype: torch.dtype, *, names: Set[str] | None = None) -> None:
    """Cast a module's parameters, or those of some ``names``, in place, tied ones staying tied.

    Buffers stay as they are: rotary frequencies rounded to bfloat16 misplace the tokens of long sequences.
    """
    for name, parameter in module.named_parameters():
        if names is None or name in names:
            parameter.data = parameter.data.to(dtype)


def without_gradients(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of forward passes without gradients: none if the model has one dtype.

    Replicas hold the dtype that they are read in, as do weights that FSDP gathers, and adapters cast their inputs.
    Other fp32 weights over frozen bf16 ones, such as a critic's head, need autocast.
    """
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if _ADAPTER_WEIGHT not in name}
    if len(dtypes) > 1 and not isinstance(model, FSDPModule):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def for_samples(plugin: Precision | None) -> Precision | None:
    """Return Lightning's plugin, or one that leaves the dtypes of samples unchanged if Lightning's would cast them."""
    return SamplesHalfPrecision(plugin.precision) if type(plugin) is HalfPrecision else plugin
