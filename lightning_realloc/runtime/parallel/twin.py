"""How does one model exist in two layouts at once?

By a second module without weights of its own: a skeleton, whose parameters are bound to storage that a reallocation
fills. Calling the first module with other weights instead (``functional_call``) is silently wrong under FSDP.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup
from lightning_realloc.runtime.model.structure import copy_without_weights


def weightless_copy(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode whose parameters have shapes but no storage; buffers are real copies, ties are kept.

    Take it before the model is laid out: afterwards its shapes and forwards belong to one layout.
    Raises LayoutError when that has happened.
    """
    if any(isinstance(module, FSDPModule) or isinstance(vars(module).get("tp_group"), TensorParallelGroup)
           for module in model.modules()):  # fmt: skip
        raise LayoutError("a skeleton is a copy of an undivided model; call weightless_copy before parallelize")
    return copy_without_weights(model).requires_grad_(False).eval()
