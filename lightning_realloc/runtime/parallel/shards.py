"""Access the local weights of a distributed model, and bind tensors to copies without weights.

A copy lets one model exist in two layouts: a reallocation fills the storage to which its parameters are bound. Calling
the first module with other weights (``functional_call``) would be silently wrong under FSDP.

This module relies on two properties of FSDP2 (torch 2.13). The sharded storage and its DTensors stay the same through
forward, backward and optimizer steps, so local tensors can be cached. After a forward without gradients the root stays
gathered: its parameters are plain full tensors, and writes into its shards take effect only once it is resharded. Call
`reshard` after writing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup
from lightning_realloc.runtime.model.structure import copy_without_weights, replace_parameter, tied_names


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shard of every parameter as a plain tensor on the same storage; tied parameters once.

    The shapes are those of `ModelLayout.local_shape`. Writing into a tensor changes the weight; under FSDP call
    `reshard` afterwards. This function reshards the model, so call it between steps, not between forward and backward.
    """
    reshard(model)
    return {name: local_tensor(parameter) for name, parameter in model.named_parameters()}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor (or the tensor itself), detached and on the same storage."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the next forward gathers the current shards. Local, not collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def move_to_own_storage(model: nn.Module) -> None:
    """Copy weights from memory that torch cannot free, such as a mapped file, into memory that it can free."""
    for parameter in model.parameters():
        if not local_tensor(parameter).untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def free_weights(model: nn.Module) -> None:
    """Free the weights on a rank outside the layout; parameters keep shape, dtype, device and identity.

    Each parameter becomes one expanded element. An optimizer can be created for it but must not step.
    """
    for parameter in model.parameters():
        parameter.data = torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def weightless_copy(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode whose parameters have shapes but no storage; buffers are real copies, ties are kept.

    Raises LayoutError for a model that `parallelize` has distributed, whose shapes and forwards belong to one layout.
    """
    if any(
        isinstance(module, FSDPModule) or isinstance(vars(module).get("tp_group"), TensorParallelGroup)
        for module in model.modules()
    ):
        raise LayoutError("the model must be undivided; call weightless_copy before parallelize")
    return copy_without_weights(model).requires_grad_(False).eval()


def bind_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the parameters of a model by these tensors, on the same storage and without gradients; ties are kept.

    Raises LayoutError and binds nothing unless ``tensors`` names exactly the parameters, tied ones by their owner.
    """
    owners = tied_names(model)
    if owners.keys() != tensors.keys():
        missing, unknown = sorted(owners.keys() - tensors.keys()), sorted(tensors.keys() - owners.keys())
        raise LayoutError(
            f"bind_tensors needs one tensor per parameter: missing {missing[:4]}, unknown {unknown[:4]} "
            f"({len(owners)} parameters, {len(tensors)} tensors); pass the tensors of the same model"
        )
    for owner, names in owners.items():
        replace_parameter(model, names, nn.Parameter(tensors[owner], requires_grad=False))
