"""Where does a laid-out model keep its weights on this rank, and how does a skeleton get weights from elsewhere?

Facts of FSDP2 that this module stands on (torch 2.13): the sharded storage, and the DTensors over it, stay the same
through forward, backward and optimizer steps, so local tensors may be taken once. But after a forward without gradients
the root module stays gathered, its parameters show as plain full tensors, and what is written into its shards goes
unnoticed until it is resharded. Call `reshard` after writing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_realloc.errors import LayoutError
from lightning_realloc.runtime.model.structure import tied_names


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's part of every parameter as a plain tensor on the same storage, tied ones once.

    The shapes are those of `ModelLayout.local_shape`. Writing into a tensor writes the weight; under FSDP call
    `reshard` afterwards. Reshards the model, so it belongs between steps, not between forward and backward.
    """
    reshard(model)
    return {name: local_tensor(parameter) for name, parameter in model.named_parameters()}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, sharded or not, without its history and on the same storage."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights, so that the next forward gathers what the shards now hold. Local, not collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_storage(model: nn.Module) -> None:
    """Copy weights that lie in memory which torch cannot free, such as a mapped file, into memory which it can."""
    for parameter in model.parameters():
        if not local_tensor(parameter).untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def vacate(model: nn.Module) -> None:
    """Free the weights of a rank that a layout leaves out; parameters keep shape, dtype, device and identity.

    Each is one element seen everywhere, so an optimizer can be made of them, and must not be stepped.
    """
    for parameter in model.parameters():
        parameter.data = torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def bind_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make the parameters of a skeleton these tensors, on the same storage and without gradients; ties stay tied.

    Raises LayoutError, and binds nothing, unless ``tensors`` names exactly the parameters (tied ones by their owner).
    """
    owners = tied_names(model)
    if owners.keys() != tensors.keys():
        missing, unknown = sorted(owners.keys() - tensors.keys()), sorted(tensors.keys() - owners.keys())
        raise LayoutError(
            f"bind_tensors needs one tensor per parameter: missing {missing[:4]}, unknown {unknown[:4]} "
            f"({len(owners)} parameters, {len(tensors)} tensors); pass the tensors of the same model"
        )
    for owner, names in owners.items():
        parameter = nn.Parameter(tensors[owner], requires_grad=False)
        for name in names:
            module_name, _, attribute = name.rpartition(".")
            model.get_submodule(module_name).register_parameter(attribute, parameter)
