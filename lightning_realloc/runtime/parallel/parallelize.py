"""Apply a layout to a model with full weights or none: tensor, expert and context parallelism, stages, then FSDP2.

Tensor and expert parallelism slice plain tensors. Context parallelism slices rows of tokens, and no weights. Modules of
other pipeline stages are removed. FSDP2 wraps each remaining block, its experts if ranks divide them, and the root. The
resulting shard of every parameter is the one that `ModelLayout` computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.layout.cuts import num_head_shares
from lightning_realloc.runtime.forward.attention.packed_attention import install_packed_attention
from lightning_realloc.runtime.forward.expert_parallel import divide_experts
from lightning_realloc.runtime.forward.peer_group import PeerGroup
from lightning_realloc.runtime.forward.token_group import TokenGroup
from lightning_realloc.runtime.model.stacked_experts import expert_adapters, stacked_experts, with_adapters
from lightning_realloc.runtime.model.structure import find_blocks, transformers_model
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
    """Distribute ``model`` in place, and return it.

    It holds the same full weights on every rank of the layout, or none: parameters on the meta device stay there, with
    the shapes of shards, until `allocate_weights`.

    If `needs_fsdp` is False, the model is not wrapped. With pp > 1 the model becomes a stage, which `pipeline` runs.
    Gradients of a backward pass are complete: summed over ``tp`` where needed, averaged over
    `Layout.replica_axes` and `Layout.shard_axes`.

    Args:
        meshes: ``create`` was called with the layout.
        mixed_precision: FSDP's policy.
        tp_plan: The one that `describe_model` was called with.

    Raises:
        LayoutError: if this rank is not part of the layout, for a model that cannot be divided into stages, and for
            ``mixed_precision`` without FSDP.
    """
    layout = model_layout.layout
    wraps = needs_fsdp(model, layout)
    if mixed_precision is not None and not wraps:
        raise LayoutError(
            f"mixed_precision is applied by FSDP, which this model in layout {layout} does not use; "
            "pass None and run the model under torch.autocast"
        )
    is_cut = divide_modules(model, layout, meshes, tp_plan=tp_plan)
    context_parallelize(model, model_layout, meshes)
    if layout.dims.pp > 1:
        cut_stage(model, model_layout, meshes.rank)
    if is_cut:
        slice_parameters(model, model_layout, meshes.rank)
    if wraps:
        _wrap(model, layout, meshes, mixed_precision or MixedPrecisionPolicy())
    return model


def _wrap(model: nn.Module, layout: Layout, meshes: MeshRegistry, policy: MixedPrecisionPolicy) -> None:
    """Let FSDP shard and average each block and the root, and divided experts over the ranks that hold the same."""
    mesh = meshes.fsdp_mesh(layout)
    for _, block in find_blocks(model):
        if not any(True for _ in block.parameters()):  # a placeholder for another stage's block
            continue
        if layout.dims.ep > 1:
            for experts in {with_adapters(block, name) for name in stacked_experts(block)}:
                # The router's weights keep their dtype, as inside of a block that casts its own inputs alone.
                own = replace(policy, cast_forward_inputs=False)
                fully_shard(experts, mesh=meshes.expert_mesh(layout), mp_policy=own)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def divide_modules(
    model: nn.Module, layout: Layout, meshes: MeshRegistry, *, tp_plan: Mapping[str, str] | None = None
) -> bool:
    """Make the modules of ``model`` work on this rank's slices of their parameters, along ``ep`` and ``tp``.

    Returns whether the layout has such an axis. Collective over the tensor-parallel ranks.
    """
    # In this order, tensor-parallel ranks sum the outputs of experts after these came home and were added up.
    is_cut = _expert_parallelize(model, layout, meshes)
    return _tensor_parallelize(model, layout, meshes, tp_plan) or is_cut


def _tensor_parallelize(
    model: nn.Module, layout: Layout, meshes: MeshRegistry, tp_plan: Mapping[str, str] | None
) -> bool:
    """Make modules run on slices of their parameters; return False if the layout has tp=1.

    On CPU without gradients, ranks sum activations in shared memory: over sockets, two sums of a few kilobytes per
    layer and token would take longer than the layers.
    """
    group = meshes.tensor_group(layout)
    if group is None:
        return False
    peers = install_tensor_parallel(model, layout, group, meshes.rank, tp_plan=tp_plan)
    if meshes.device_type == "cpu":
        peers.inference_sum = SharedMemoryAllReduce.create(group)
    return True


def _expert_parallelize(model: nn.Module, layout: Layout, meshes: MeshRegistry) -> bool:
    """Make stacked experts run on this rank's share of them; return False if the layout has ep=1."""
    group = meshes.group(layout, *layout.expert_axes)
    if group is None:
        return False
    peers = PeerGroup(group, layout.group(meshes.rank, *layout.expert_axes), meshes.rank)
    for experts in stacked_experts(model).values():
        divide_experts(experts, peers)
    for adapter in expert_adapters(model).values():
        adapter.num_experts //= peers.size
    return True


def context_parallelize(model: nn.Module, model_layout: ModelLayout, meshes: MeshRegistry) -> None:
    """Make forwards of packs run on this rank's tokens of every row, unless the layout has cp=1."""
    layout, dims = model_layout.layout, model_layout.layout.dims
    group = meshes.token_group(layout)
    if group is not None:
        ranks = layout.group(meshes.rank, *layout.token_axes)
        head_shares = num_head_shares(model_layout.model.attention_heads, dims.cp, dims.tp)
        divide_tokens(model, TokenGroup(group, ranks, meshes.rank, head_shares=head_shares))


def divide_tokens(model: nn.Module, tokens: TokenGroup) -> None:
    """Make forwards of packs run on this rank's slice of every row, and refuse all others.

    Raises ConfigError if the model cannot run packed sequences.
    """
    install_packed_attention(model)
    vars(transformers_model(model))["token_group"] = tokens
    model.register_forward_pre_hook(_refuse_whole_row, with_kwargs=True)


def _refuse_whole_row(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise LayoutError for a call on whole rows: every rank would add the gradients of all tokens."""
    if "packed_segments" not in kwargs:
        raise LayoutError(
            f"{type(model).__name__} runs on a slice of each row, and was called on whole rows; call it by "
            f"token_logprobs, packed_logits or sequence_scores, or give the call a layout with cp=1"
        )


def needs_fsdp(model: nn.Module, layout: Layout) -> bool:
    """Return whether a layout needs FSDP2: to hold shards, or to average gradients over trained replicas."""
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    return layout.is_sharded or (layout.has_replicas and is_trained)
