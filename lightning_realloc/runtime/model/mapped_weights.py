"""Load a model whose weights stay in their files: mapped, in the files' dtype, and read when they are copied.

A rank then reads only the regions that it copies. ``from_pretrained`` maps files by itself. Casts of narrow weights to
float32 would read them, so `weights_left_in_files` leaves these casts out. They lose nothing, whenever they are made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_realloc.runtime.model.adapter_layers import head_names
from lightning_realloc.runtime.model.merged_weights import MergedWeight, is_merged, with_values
from lightning_realloc.runtime.model.recorded_init import weight_values
from lightning_realloc.runtime.model.structure import replace_parameter, tied_names

_ONE_AFTER_ANOTHER = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable with which transformers loads in this thread, the only one that a function mode sees."""


@contextmanager
def weights_left_in_files() -> Iterator[None]:
    """Make ``from_pretrained`` inside the block leave weights in the memory-mapped files, in the files' dtype.

    Weights that it concatenates are read when they are needed: see `merged_weights`. Others that it computes are in
    memory. Buffers may have the files' dtype, too: see `widen`.
    """
    before = os.environ.get(_ONE_AFTER_ANOTHER)
    os.environ[_ONE_AFTER_ANOTHER] = "1"
    try:
        with _LeftInFiles():
            yield
    finally:
        if before is None:
            del os.environ[_ONE_AFTER_ANOTHER]
        else:
            os.environ[_ONE_AFTER_ANOTHER] = before


class _LeftInFiles(TorchFunctionMode):
    """Leaves out casts to a wider floating dtype on the same device, and concatenations of mapped tensors."""

    def __torch_function__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func == Tensor.to and len(args) == 1 and _only_widens(args[0], **options):
            return args[0]
        if func in (torch.stack, torch.cat) and all(is_merged(part) or is_mapped(part) for part in args[0]):
            return MergedWeight.from_call(func, *args, **options).parameter()
        if getattr(func, "__name__", None) != "__get__":  # shapes and other attributes need no values
            args, options = with_values(args), with_values(options)
        return func(*args, **options)


def _only_widens(
    tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None, **others: object
) -> bool:
    if dtype is None or others or not (dtype.is_floating_point and tensor.is_floating_point()):
        return False
    return dtype.itemsize > tensor.dtype.itemsize and (device is None or torch.device(device) == tensor.device)


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory that torch did not allocate, such as a mapped file."""
    return not tensor.untyped_storage().resizable()


def widen(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    """Cast narrow buffers, and parameters whose names begin with one of ``prefixes``, to float32, in place."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _is_narrow(tensor) and (name.startswith(prefixes) or not isinstance(tensor, nn.Parameter)):
            tensor.data = tensor.data.float()


@contextmanager
def shown_as_float32(model: nn.Module) -> Iterator[None]:
    """Replace narrow parameters, and those on the meta device, inside the block by float32 ones that take no memory.

    PEFT creates adapters in the dtype and on the device of the weights around them. What the block sets in
    ``requires_grad`` stays. Heads get their values, since files of adapters may replace them.
    """
    heads = head_names(model)
    for owner, names in tied_names(model).items():
        parameter = model.get_parameter(owner)
        if owner.startswith(heads) and parameter.is_meta:
            replace_parameter(model, names, nn.Parameter(weight_values(parameter), parameter.requires_grad))
    held = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    stand_ins: dict[int, nn.Parameter] = {}
    for module, name, parameter in held:
        if _is_narrow(parameter) or parameter.is_meta:
            shown = nn.Parameter(torch.zeros(1).expand(parameter.shape), parameter.requires_grad)
            module._parameters[name] = stand_ins.setdefault(id(parameter), shown)
    yield
    for module, name, parameter in held:
        if id(parameter) in stand_ins:
            parameter.requires_grad_(stand_ins[id(parameter)].requires_grad)
            module._parameters[name] = parameter


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
