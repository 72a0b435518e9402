"""How does a model with full weights become this rank's part of a layout?

Tensor parallelism first, on plain tensors; then what lies on other pipeline stages goes; then FSDP2 over each block
that is left and the root. The layout of every parameter that results is the one `ModelLayout` computes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.model.structure import find_blocks
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.stage import cut_stage
from lightning_realloc.runtime.parallel.tensor_parallel import install_tensor_parallel, slice_parameters
from lightning_realloc.runtime.transfer.collectives import SharedMemoryAllReduce


def parallelize(
    model: nn.Module,
    model_layout: ModelLayout,
    meshes: MeshRegistry,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> nn.Module:
    """Lay ``model``, which holds the same full weights on every rank of the layout, out in place, and return it.

    ``meshes`` knows the layout already. ``mixed_precision`` is FSDP's. ``tp_plan`` is what the description of the model
    was made with. Where :func:`needs_fsdp` says no, the model stays unwrapped. The gradients of a backward pass are
    complete: summed over ``tp`` where ranks hold only part of them, averaged over ``dp`` and ``fsdp``.

    Under pp > 1 a stage is left, which `pipeline` runs. Raises LayoutError when this rank is not part of the layout,
    for a model that cannot be divided into stages, and for ``mixed_precision`` where FSDP takes no part.
    """
    layout = model_layout.layout
    wraps = needs_fsdp(model, layout)
    if mixed_precision is not None and not wraps:
        raise LayoutError(
            f"mixed_precision is applied by FSDP, which this model in layout {layout} does not use; "
            "pass None and run the model under torch.autocast"
        )
    is_cut = tensor_parallelize(model, layout, meshes, tp_plan=tp_plan)
    if layout.dims.pp > 1:
        cut_stage(model, model_layout, meshes.rank)
    if is_cut:
        slice_parameters(model, model_layout, meshes.rank)
    if wraps:
        mesh, policy = meshes.fsdp_mesh(layout), mixed_precision or MixedPrecisionPolicy()
        for _, block in find_blocks(model):
            if any(True for _ in block.parameters()):  # not in the place of another stage's block
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def tensor_parallelize(
    model: nn.Module, layout: Layout, meshes: MeshRegistry, *, tp_plan: Mapping[str, str] | None = None
) -> bool:
    """Let the modules of ``model`` work on slices of their parameters; False where the layout cuts nothing.

    Collective over the tensor-parallel ranks. On CPU they add up activations in shared memory where no gradient is
    recorded: two sums of a few kilobytes per layer and token would cost more over sockets than the layers.
    """
    group = meshes.group(layout, "tp")
    if group is None:
        return False
    peers = install_tensor_parallel(model, layout, group, meshes.rank, tp_plan=tp_plan)
    if meshes.device_type == "cpu":
        peers.inference_sum = SharedMemoryAllReduce.create(group)
    return True


def needs_fsdp(model: nn.Module, layout: Layout) -> bool:
    """Return whether a layout takes FSDP2: to hold shards, or to average gradients over replicas that are trained."""
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    return layout.dims.fsdp > 1 or (layout.dims.dp > 1 and is_trained)
