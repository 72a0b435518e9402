"""Create a copy of a model without weights, so that one model can exist in two layouts.

A reallocation fills storage to which the copy's parameters are bound. Calling the first module with other weights
(``functional_call``) would be silently wrong under FSDP.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup
from lightning_realloc.runtime.model.structure import copy_without_weights


def weightless_copy(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode whose parameters have shapes but no storage; buffers are real copies, ties are kept.

    Raises LayoutError for a model that `parallelize` has distributed, whose shapes and forwards belong to one layout.
    """
    if any(_is_distributed(module) for module in model.modules()):
        raise LayoutError("the model must be undivided; call weightless_copy before parallelize")
    return copy_without_weights(model).requires_grad_(False).eval()


def _is_distributed(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule) or isinstance(vars(module).get("tp_group"), TensorParallelGroup)
