"""How does a Hugging Face model run with its weights cut over tensor-parallel ranks?

Weights are plain local tensors, cut as `TensorParallelCut` says. Modules change class, keeping the forward of their own
class where it has one, so a model can be copied and wrapped by FSDP afterwards. Weights and forwards are separate
steps: a skeleton on the meta device gets its forwards here and its weights later.

DTensor was measured three times slower in training and in decoding, and cannot replicate key-value heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import Layout, ModelLayout, ParallelDims
from lightning_realloc.runtime.forward.tp_group import (
    TensorParallelGroup,
    copy_to_ranks,
    gather_last_dim,
    split_last_dim,
    sum_from_ranks,
    sum_gradient_over,
)
from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabParallelLogits
from lightning_realloc.runtime.model.structure import tied_names
from lightning_realloc.runtime.parallel.tp_plan import (
    PARTIAL_GRADIENT,
    REPLICATE,
    AttentionHeads,
    TensorParallelPlan,
    read_tp_plan,
)


def slice_parameters(model: nn.Module, model_layout: ModelLayout, rank: int) -> None:
    """Replace every full parameter by this rank's tensor-parallel share, a copy of its own; ties stay tied.

    Only ``tp`` of the layout counts: sharding over ``fsdp`` is FSDP's work.
    """
    layout = model_layout.layout
    across = Layout(ParallelDims(tp=layout.dims.tp), layout.group(rank, "tp"))
    tensor_parallel = ModelLayout(model_layout.model, across)
    for owner, names in tied_names(model).items():
        parameter = model.get_parameter(owner)
        spec = model_layout.model.param(owner)
        if tuple(parameter.shape) != spec.shape:
            raise LayoutError(
                f"{owner}: the model holds shape {tuple(parameter.shape)} and its description {spec.shape}; "
                "slice a model with full weights, once"
            )
        if spec.tp is None:
            continue
        share = parameter.new_empty(tensor_parallel.local_shape(owner, rank), requires_grad=False)
        for piece in tensor_parallel.pieces(owner, rank):
            source = tuple(slice(a, b) for a, b in zip(piece.region.starts, piece.region.stops, strict=True))
            target = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.region.shape, strict=True))
            share[target] = parameter.detach()[source]
        replacement = nn.Parameter(share, parameter.requires_grad)
        for name in names:
            module_name, _, attribute = name.rpartition(".")
            model.get_submodule(module_name).register_parameter(attribute, replacement)


def install_tensor_parallel(
    model: nn.Module,
    layout: Layout,
    group: dist.ProcessGroup,
    rank: int,
    *,
    tp_plan: Mapping[str, str] | None = None,
) -> TensorParallelGroup:
    """Make the model's modules compute on this rank's share of the weights, and exchange activations over ``group``.

    Touches no weights, but reads from their shapes where heads lie: they are still whole, or on the meta device.
    Returns the group, on which a quicker sum for decoding can be set. Raises LayoutError when the model's plan does
    not allow tensor parallelism or was installed before.
    """
    if any(isinstance(module, _TensorParallelModule) for module in model.modules()):
        raise LayoutError("tensor parallelism is already installed in this model; install it once, in a fresh copy")
    plan = read_tp_plan(model, tp_plan)
    if plan.refusal is not None:
        raise LayoutError(f"tp={layout.dims.tp} is impossible for this model: {plan.refusal}; use tp=1")
    tensor_parallel = TensorParallelGroup(group, layout.group(rank, "tp"), rank)
    for name, style in plan.styles.items():
        if style != REPLICATE:
            _convert(model.get_submodule(name), name, style, plan, tensor_parallel)
    for name, heads in plan.attention.items():
        _divide_heads(model.get_submodule(name), heads, tensor_parallel.size)
    _tell_generate(model, plan, tensor_parallel.size)
    return tensor_parallel


@contextlib.contextmanager
def vocab_parallel_output(head: nn.Module | None) -> Iterator[None]:
    """Make a language model's head that is cut over its outputs, and its adapters, return `VocabParallelLogits`.

    Heads that are whole or cut over their inputs return all logits.
    """
    cut = (
        [module for module in head.modules() if isinstance(module, _GatheredColwiseLinear)] if head is not None else []
    )
    for module in cut:
        module.returns_share = True
    try:
        yield
    finally:
        for module in cut:
            module.returns_share = False


class _TensorParallelModule(nn.Module):
    """What converted modules have in common."""

    tp_group: TensorParallelGroup


class _ColwiseLinear(_TensorParallelModule, nn.Linear):
    """Holds a share of the output features; the input is replicated."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copy_to_ranks(input, self.tp_group))


class _GatheredColwiseLinear(_ColwiseLinear):
    """Holds a share of the output features, and returns all of them."""

    returns_share = False
    """Whether its share stands for all of them, see `vocab_parallel_output`."""

    def forward(self, input: Tensor) -> Tensor:
        share = super().forward(input)
        if self.returns_share:
            return VocabParallelLogits.from_local(share, self.tp_group, self.out_features)
        return gather_last_dim(share, self.tp_group, self.out_features)


class _SharedHeadLinear(_ColwiseLinear):
    """Holds a key-value head that several ranks hold: their gradients of it belong together."""

    holders: tuple[int, int]
    """The first of the ranks' indices in the group, and how many hold the head."""

    def forward(self, input: Tensor) -> Tensor:
        with _gradients_summed(self, self.tp_group, *self.holders):
            return super().forward(input)


class _RowwiseLinear(_TensorParallelModule, nn.Linear):
    """Holds a share of the input features and gets that share of the input; the bias is added once, after the sum."""

    def forward(self, input: Tensor) -> Tensor:
        output = sum_from_ranks(F.linear(input, self.weight), self.tp_group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _SplitRowwiseLinear(_RowwiseLinear):
    """Holds a share of the input features and takes that share of a replicated input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(split_last_dim(input, self.tp_group))


def multiplies_alone(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether, without gradients, the module multiplies with the weight it holds and does nothing else."""
    return type(module) in (nn.Linear, _ColwiseLinear, _SharedHeadLinear) and "forward" not in vars(module)


class _VocabularyEmbedding(_TensorParallelModule, nn.Embedding):
    """Holds a share of the vocabulary; tokens of others contribute zero to the sum."""

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
    """Holds a share of every token's features."""

    def forward(self, input: Tensor) -> Tensor:
        return gather_last_dim(super().forward(input), self.tp_group, self.embedding_dim)


class _PartialGradientModule(_TensorParallelModule):
    """Is replicated but sees only this rank's heads, so its parameters' gradients are summed over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _gradients_summed(self, self.tp_group, 0, self.tp_group.size):
            return super().forward(*args, **kwargs)


_CLASSES: dict[str, type[_TensorParallelModule]] = {
    "colwise": _ColwiseLinear,
    "packed_colwise": _ColwiseLinear,
    "colwise_gather_output": _GatheredColwiseLinear,
    "rowwise": _RowwiseLinear,
    "packed_rowwise": _RowwiseLinear,
    "rowwise_split_input": _SplitRowwiseLinear,
    "embedding_rowwise": _VocabularyEmbedding,
    "embedding_colwise": _FeatureEmbedding,
    PARTIAL_GRADIENT: _PartialGradientModule,
}
_COMBINED: WeakKeyDictionary[type[nn.Module], WeakValueDictionary[type[nn.Module], type[nn.Module]]] = (
    WeakKeyDictionary()
)
"""Classes made by `_with_own_forward`: own -> ours -> both. Weak, since a class made in a function may hold models."""


@contextlib.contextmanager
def _gradients_summed(module: nn.Module, group: TensorParallelGroup, first: int, count: int) -> Iterator[None]:
    """Let the module's forward see its parameters through a sum of their gradients.

    Inside the graph rather than as a hook on the parameter: right under gradient accumulation and FSDP alike.
    """
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in own.values())):
        yield
        return
    for name, parameter in own.items():
        if parameter.requires_grad:
            module._parameters[name] = sum_gradient_over(parameter, group, first, count)  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(own)


def _convert(module: nn.Module, name: str, style: str, plan: TensorParallelPlan, group: TensorParallelGroup) -> None:
    if "forward" in vars(module):
        raise LayoutError(
            f"{name}: its forward was replaced on the instance, which tensor parallelism would bypass; "
            "lay the model out before anything wraps its modules"
        )
    base: type[nn.Module] = _CLASSES[style]
    cut = plan.cuts.get(f"{name}.weight")
    if cut is not None and cut.replicate_units and cut.num_units is not None and group.size > cut.num_units:
        base = _SharedHeadLinear
        count = group.size // cut.num_units
        vars(module)["holders"] = (group.index // count * count, count)
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        first, length = group.local_slice(module.num_embeddings)
        vars(module)["first_token"] = first
        if module.padding_idx is not None:  # an index into the local weight, which may not hold it
            local = module.padding_idx - first
            module.padding_idx = local if 0 <= local < length else None
    module.__class__ = _with_own_forward(base, type(module))
    vars(module)["tp_group"] = group


def _with_own_forward(base: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Return ``base`` with the forward of ``own`` inside, such as Gemma's scaled embedding."""
    if issubclass(base, own):
        return base
    made = _COMBINED.setdefault(own, WeakValueDictionary())
    combined = made.get(base)
    if combined is None:
        made[base] = combined = type(f"{base.__name__.strip('_')}{own.__name__}", (base, own), {})
    return combined


def _divide_heads(attention: nn.Module, heads: AttentionHeads, tp: int) -> None:
    """Set what an attention module knows about its heads to this rank's share."""
    query, key_value = heads.query // tp, max(1, heads.key_value // tp)
    for names, whole, share in (
        (("num_heads", "num_attention_heads"), heads.query, query),
        (("num_key_value_heads", "num_kv_heads"), heads.key_value, key_value),
        (("num_key_value_groups",), heads.query // heads.key_value, query // key_value),
    ):
        for name in names:
            if vars(attention).get(name) == whole:
                setattr(attention, name, share)


def _tell_generate(model: nn.Module, plan: TensorParallelPlan, tp: int) -> None:
    """Set the private degree by which ``generate`` divides the key-value heads of a static cache."""
    base = getattr(model, "get_base_model", lambda: model)()  # inside PEFT's wrapper
    if hasattr(base, "_tp_size") and plan.attention:
        vars(base)["_tp_size"] = min(tp, *(heads.key_value for heads in plan.attention.values()))
