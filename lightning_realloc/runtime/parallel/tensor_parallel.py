"""Run a Hugging Face model with its weights cut over tensor-parallel ranks.

Weights are plain local tensors, cut as `TensorParallelCut` describes. Modules change class and keep the forward of
their own class, so a model can be copied and wrapped by FSDP afterwards. Slicing weights and changing forwards are
separate steps: a copy on the meta device gets its forwards here and its weights later.

DTensor was measured to be three times slower in training and in decoding, and cannot replicate key-value heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout, TensorParallelCut
from lightning_realloc.layout.cuts import total_length
from lightning_realloc.runtime.forward.tp_group import (
    TensorParallelGroup,
    copy_to_ranks,
    gather_last_dim,
    on_first_rank,
    split_last_dim,
    sum_from_ranks,
    sum_gradient_over,
)
from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabParallelLogits
from lightning_realloc.runtime.model.stacked_experts import OUTPUT_BIAS, expert_adapters
from lightning_realloc.runtime.model.structure import combined_class, find_blocks, replace_parameter, tied_names
from lightning_realloc.runtime.parallel.latent_attention import LATENT, num_rotary
from lightning_realloc.runtime.parallel.tp_plan import (
    EXPERTS,
    PARTIAL_GRADIENT,
    REPLICATE,
    ROWWISE,
    AttentionHeads,
    TensorParallelPlan,
    read_tp_plan,
)
from lightning_realloc.runtime.transfer.point_to_point import region_view


def slice_parameters(model: nn.Module, model_layout: ModelLayout, rank: int) -> None:
    """Replace every full parameter by a copy of the slice that this rank computes with; ties are kept.

    FSDP shards the slices later.
    """
    for owner, names in tied_names(model).items():
        parameter = model.get_parameter(owner)
        spec = model_layout.model.param(owner)
        if tuple(parameter.shape) != spec.shape:
            raise LayoutError(
                f"{owner}: the model holds shape {tuple(parameter.shape)} and its description {spec.shape}; "
                "slice a model with full weights, once"
            )
        shard = model_layout.gathered_shard(owner, rank)
        assert shard is not None, "a model holds the parameters of its stage"
        if shard.shape == spec.shape:
            continue
        local = parameter.new_empty(shard.shape, requires_grad=False)
        for piece in shard.pieces:
            source = region_view(parameter.detach(), piece.region.starts, piece.region.shape)
            region_view(local, piece.offset, piece.region.shape).copy_(source)
        replace_parameter(model, names, nn.Parameter(local, parameter.requires_grad))


def install_tensor_parallel(
    model: nn.Module,
    layout: Layout,
    group: dist.ProcessGroup,
    rank: int,
    *,
    tp_plan: Mapping[str, str] | None = None,
) -> TensorParallelGroup:
    """Make the model's modules compute on this rank's slice of the weights, and exchange activations over ``group``.

    Does not change weights, which must be whole or on the meta device: their shapes show the position of heads.
    Returns the group, on which a faster sum for decoding can be set. Raises LayoutError if the model's plan does not
    allow tensor parallelism, or if it is installed already.
    """
    if any(isinstance(module, _TensorParallelModule) for module in model.modules()):
        raise LayoutError("tensor parallelism is already installed in this model; install it once, in a fresh copy")
    plan = read_tp_plan(model, tp_plan)
    if plan.refusal is not None:
        raise LayoutError(f"tp={layout.dims.tp} is impossible for this model: {plan.refusal}; use tp=1")
    tensor_parallel = TensorParallelGroup(group, layout.tensor_group(rank), rank)
    tensor_parallel.has_uneven_features = any(
        plan.styles[name] in ROWWISE and _is_uneven(model.get_submodule(name), plan.cuts[f"{name}.weight"], layout)
        for name in plan.styles
    )
    for name, style in plan.styles.items():
        if style == LATENT:
            vars(model.get_submodule(name))["num_rotary"] = num_rotary(model, name)
        if style != REPLICATE:
            _convert(model.get_submodule(name), name, style, plan, tensor_parallel)
    for name, adapter in expert_adapters(model).items():
        _cut_adapter(adapter, name, plan, tensor_parallel)
    for name, heads in plan.attention.items():
        _divide_heads(model.get_submodule(name), heads, tensor_parallel)
    _set_generate_degree(model, plan, tensor_parallel.size)
    return tensor_parallel


def tensor_parallel_group(model: nn.Module) -> TensorParallelGroup | None:
    """Return the ranks that share the model's weights; None for a model without tensor parallelism."""
    modules = (module for module in model.modules() if isinstance(module, _TensorParallelModule))
    return next((module.tp_group for module in modules), None)


@contextlib.contextmanager
def vocab_parallel_output(head: nn.Module | None) -> Iterator[None]:
    """Make a language model's head that is cut over its outputs, and its adapters, return `VocabParallelLogits`.

    Heads that are whole or cut over their inputs return all logits.
    """
    modules = () if head is None else head.modules()
    cut = [module for module in modules if isinstance(module, _GatheredColwiseLinear)]
    for module in cut:
        module.keeps_local = True
    try:
        yield
    finally:
        for module in cut:
            module.keeps_local = False


def num_vocabulary_shards(head: nn.Module) -> int:
    """Return over how many ranks a language model's head, or its adapters, is cut by `vocab_parallel_output`."""
    cut = (module.tp_group.size for module in head.modules() if isinstance(module, _GatheredColwiseLinear))
    return next(cut, 1)


class _TensorParallelModule(nn.Module):
    """Base of all converted modules."""

    tp_group: TensorParallelGroup


class _ColwiseLinear(_TensorParallelModule, nn.Linear):
    """Holds a slice of the output features; the input is replicated."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copy_to_ranks(input, self.tp_group))


class _GatheredColwiseLinear(_ColwiseLinear):
    """Holds a slice of the output features and gathers all of them."""

    keeps_local = False
    """Whether to return `VocabParallelLogits` instead of gathering; see `vocab_parallel_output`."""

    def forward(self, input: Tensor) -> Tensor:
        local = super().forward(input)
        if self.keeps_local:
            return VocabParallelLogits.from_local(local, self.tp_group, self.out_features)
        return gather_last_dim(local, self.tp_group, self.out_features)


class _SharedHeadLinear(_ColwiseLinear):
    """Holds one of fewer key-value heads than ranks, and sums its gradient over the ranks that hold the same head."""

    holders: tuple[int, int]
    """Index in the group of the first rank with the head, and the number of ranks with it."""

    def forward(self, input: Tensor) -> Tensor:
        with _gradients_summed(self, self.tp_group, *self.holders):
            return super().forward(input)


class _RowwiseLinear(_TensorParallelModule, nn.Linear):
    """Holds a slice of the input features and gets that slice of the input; adds the bias once, after the sum.

    What follows is replicated, so all ranks must draw the same random numbers from there on.
    """

    def forward(self, input: Tensor) -> Tensor:
        output = sum_from_ranks(F.linear(input, self.weight), self.tp_group)
        if self.training and self.tp_group.has_uneven_features:
            self.tp_group.align_random_numbers(output.device)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _SplitRowwiseLinear(_RowwiseLinear):
    """Holds a slice of the input features and selects that slice of a replicated input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(split_last_dim(input, self.tp_group))


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether the module, without gradients, only multiplies with its local weight and adds its bias."""
    return type(module) in (nn.Linear, _ColwiseLinear, _SharedHeadLinear) and "forward" not in vars(module)


def local_products(model: nn.Module) -> list[nn.Linear]:
    """Return the blocks' linear layers whose output has the gradient of their local product of input and weight."""
    inside = (module for _, block in find_blocks(model) for module in block.modules())
    linear = (module for module in inside if isinstance(module, nn.Linear) and "forward" not in vars(module))
    return [module for module in linear if type(module) in (nn.Linear, _ColwiseLinear, _RowwiseLinear)]


class _VocabularyEmbedding(_TensorParallelModule, nn.Embedding):
    """Holds a slice of the vocabulary; tokens of other ranks contribute zero to the sum."""

    first_token: int

    def forward(self, input: Tensor) -> Tensor:
        local = input - self.first_token
        others = (local < 0) | (local >= self.weight.shape[0])
        if self.weight.shape[0] == 0:
            partial = self.weight.new_zeros(*input.shape, self.weight.shape[1])
        else:
            partial = super().forward(local.masked_fill(others, 0)).masked_fill(others.unsqueeze(-1), 0)
        return sum_from_ranks(partial, self.tp_group)


class _FeatureEmbedding(_TensorParallelModule, nn.Embedding):
    """Holds a slice of every token's features."""

    def forward(self, input: Tensor) -> Tensor:
        return gather_last_dim(super().forward(input), self.tp_group, self.embedding_dim)


class _PartialGradientModule(_TensorParallelModule):
    """Is replicated but reads only this rank's heads, so its parameters' gradients are summed over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _gradients_summed(self, self.tp_group, 0, self.tp_group.size):
            return super().forward(*args, **kwargs)


class _LatentProjection(_TensorParallelModule):
    """Is replicated; of its output, the last features go to this rank's heads directly, and others through cut layers.

    So the gradient of the last ones is summed over the ranks, as cut layers sum that of the others.
    """

    num_rotary: int

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        latents, rotary = output.split([output.shape[-1] - self.num_rotary, self.num_rotary], -1)
        return torch.cat((latents, copy_to_ranks(rotary, self.tp_group)), -1)


class _FeatureCutExperts(_TensorParallelModule):
    """Stacked experts that hold a slice of each expert's intermediate features; the input is replicated.

    Outputs are weighted and added over experts first, so that ranks sum as many features as one expert has.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        states = copy_to_ranks(hidden_states, self.tp_group)
        # Each rank's output gives only a part of the gradient of the router's weights.
        if torch.is_grad_enabled() and top_k_weights.requires_grad:
            top_k_weights = sum_gradient_over(top_k_weights, self.tp_group, 0, self.tp_group.size)
        with _used_through(self, [OUTPUT_BIAS], lambda bias: on_first_rank(bias, self.tp_group)):
            partial = super().forward(states, top_k_index, top_k_weights)
        return sum_from_ranks(partial, self.tp_group)


class _FeatureCutAdapter(_TensorParallelModule):
    """Adapter of experts that hold a slice of features, as one of its factors does; the other factor is whole."""

    whole_factor: str
    """The factor of which each rank's features give a part of the gradient: "lora_A" or "lora_B"."""

    def get_delta_factors(self, adapter_name: str) -> Any:
        """Return PEFT's factors, the whole one with a gradient that is summed over the ranks."""
        factor: nn.Module = getattr(self, self.whole_factor)[adapter_name]
        with _gradients_summed(factor, self.tp_group, 0, self.tp_group.size):
            return cast(Any, super()).get_delta_factors(adapter_name)


_CLASS_BY_STYLE: dict[str, type[_TensorParallelModule]] = {
    "colwise": _ColwiseLinear,
    "packed_colwise": _ColwiseLinear,
    "colwise_gather_output": _GatheredColwiseLinear,
    "rowwise": _RowwiseLinear,
    "packed_rowwise": _RowwiseLinear,
    "rowwise_split_input": _SplitRowwiseLinear,
    "embedding_rowwise": _VocabularyEmbedding,
    "embedding_colwise": _FeatureEmbedding,
    PARTIAL_GRADIENT: _PartialGradientModule,
    LATENT: _LatentProjection,
    EXPERTS: _FeatureCutExperts,
}


@contextlib.contextmanager
def _gradients_summed(module: nn.Module, group: TensorParallelGroup, first: int, count: int) -> Iterator[None]:
    """Make the module's forward use its parameters through a function that sums their gradients over ranks.

    The sum is part of the graph instead of a parameter hook, so it is correct with gradient accumulation and FSDP.
    """
    own = module.named_parameters(recurse=False) if torch.is_grad_enabled() else ()
    trained = [name for name, parameter in own if parameter.requires_grad]
    with _used_through(module, trained, lambda parameter: sum_gradient_over(parameter, group, first, count)):
        yield


@contextlib.contextmanager
def _used_through(module: nn.Module, names: Sequence[str], function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make the module's forward use those of its parameters that it has of these names through a function."""
    parameters: dict[str, Any] = module._parameters
    own = {name: parameters[name] for name in names if parameters.get(name) is not None}
    parameters.update({name: function(parameter) for name, parameter in own.items()})
    try:
        yield
    finally:
        parameters.update(own)


def _convert(module: nn.Module, name: str, style: str, plan: TensorParallelPlan, group: TensorParallelGroup) -> None:
    if "forward" in vars(module):
        raise LayoutError(
            f"{name}: its forward was replaced on the instance, which tensor parallelism would bypass; "
            "lay the model out before anything wraps its modules"
        )
    base: type[nn.Module] = _CLASS_BY_STYLE[style]
    cut = plan.cuts.get(f"{name}.weight")
    holders = None if cut is None else cut.shared_by(group.size, group.index)
    if holders is not None:
        base = _SharedHeadLinear
        vars(module)["holders"] = (holders.start, len(holders))
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        first, length = group.local_slice(module.num_embeddings)
        vars(module)["first_token"] = first
        if module.padding_idx is not None:  # must be an index into the local weight
            local = module.padding_idx - first
            module.padding_idx = local if 0 <= local < length else None
    module.__class__ = combined_class(base, type(module))
    vars(module)["tp_group"] = group


def _cut_adapter(adapter: Any, name: str, plan: TensorParallelPlan, group: TensorParallelGroup) -> None:
    """Let an adapter of experts work on a slice of their features, if the plan cuts them."""
    for cut, whole in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
        if any(f"{name}.{cut}.{one}.weight" in plan.cuts for one in adapter.r):
            adapter.__class__ = combined_class(_FeatureCutAdapter, type(adapter))
            vars(adapter).update(tp_group=group, whole_factor=whole)


def _is_uneven(layer: nn.Module, cut: TensorParallelCut, layout: Layout) -> bool:
    """Return whether ranks hold different numbers of the layer's input features."""
    tp, held = layout.dims.tp, ((0, layer.get_parameter("weight").shape[cut.dim]),)
    return len({total_length(cut.split(held, tp, index)) for index in range(tp)}) > 1


def _divide_heads(attention: nn.Module, heads: AttentionHeads, group: TensorParallelGroup) -> None:
    """Set the head counts of an attention module to those of this rank."""
    query, key_value = heads.on_rank(group.size, group.index)
    for names, whole, local in (
        (("num_heads", "num_attention_heads"), heads.query, query),
        (("num_key_value_heads", "num_kv_heads"), heads.key_value, key_value),
        (("num_key_value_groups",), heads.query // heads.key_value, query // key_value),
    ):
        for name in names:
            if vars(attention).get(name) == whole:
                setattr(attention, name, local)


def _set_generate_degree(model: nn.Module, plan: TensorParallelPlan, tp: int) -> None:
    """Set the private degree by which ``generate`` divides the key-value heads of a static cache."""
    base = getattr(model, "get_base_model", lambda: model)()  # inside PEFT's wrapper
    if hasattr(base, "_tp_size") and plan.attention:
        vars(base)["_tp_size"] = min(tp, *(heads.key_value for heads in plan.attention.values()))
