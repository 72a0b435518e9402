"""Fill and access the local weights of a distributed model, and bind tensors to copies without weights.

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
from lightning_realloc.layout import ModelLayout
from lightning_realloc.runtime.forward.peer_group import PeerGroup
from lightning_realloc.runtime.model.merged_weights import is_merged, read_region
from lightning_realloc.runtime.model.recorded_init import weight_values
from lightning_realloc.runtime.model.structure import copy_without_weights, replace_parameter, tied_names
from lightning_realloc.runtime.transfer.point_to_point import region_view


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


def take_weights(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, nn.Parameter]:
    """Replace the parameters of an undivided model by ones on the meta device, and return them by owner name.

    Args:
        model: The model; ties are kept.
        dtypes: Dtype of every parameter from now on, by owner name.
    """
    taken = {}
    for owner, names in tied_names(model).items():
        taken[owner] = parameter = model.get_parameter(owner)
        empty = torch.empty(parameter.shape, dtype=dtypes[owner], device="meta")
        replace_parameter(model, names, nn.Parameter(empty, parameter.requires_grad))
    return taken


def allocate_weights(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of a laid-out model on the meta device memory on ``device``, and move its buffers there."""
    if isinstance(model, FSDPModule):
        move_buffers(model, device)
        buffers = [(module, dict(module._buffers)) for module in model.modules()]
        model.to_empty(device=device)
        for module, kept in buffers:  # to_empty leaves them undefined, and not shared with other replicas
            module._buffers.update(kept)
        return
    for owner, names in tied_names(model).items():
        parameter = model.get_parameter(owner)
        replace_parameter(
            model, names, nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        )
    model.to(device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the model's buffers to ``device``, such as rotary frequencies, which every forward would copy there."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def fill_weights(model: nn.Module, model_layout: ModelLayout, rank: int, taken: dict[str, nn.Parameter]) -> None:
    """Copy this rank's regions of whole weights into a laid-out model, and drop each whole weight after its copy.

    Args:
        model: The model that `allocate_weights` gave memory.
        model_layout: Its layout.
        rank: This rank, inside the layout.
        taken: The parameters that `take_weights` returned.
    """
    for name, local in local_tensors(model).items():
        whole = taken.pop(name)
        values: Tensor = whole if is_merged(whole) else weight_values(whole)  # random values are made once
        for piece in model_layout.pieces(name, rank):
            source = read_region(values, piece.region.starts, piece.region.shape)
            region_view(local, piece.offset, piece.region.shape).copy_(source)
    reshard(model)


def free_weights(model: nn.Module, device: torch.device) -> None:
    """Leave the model without memory for weights on ``device``, as on a rank outside its layout.

    Each parameter becomes one expanded element. An optimizer can be created for it but must not step.
    """
    for owner, names in tied_names(model).items():
        parameter = model.get_parameter(owner)
        element = torch.zeros(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
        replace_parameter(model, names, nn.Parameter(element, parameter.requires_grad))
    model.to(device)


def weightless_copy(model: nn.Module) -> nn.Module:
    """Return a copy in eval mode whose parameters have shapes but no storage; buffers are real copies, ties are kept.

    Raises LayoutError for a model that `parallelize` has distributed, whose shapes and forwards belong to one layout.
    """
    if any(
        isinstance(module, FSDPModule) or any(isinstance(value, PeerGroup) for value in vars(module).values())
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
