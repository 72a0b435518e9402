"""Check that nothing between cut layers mixes the features of different tensor-parallel ranks.

A rank computes its slice of a layer's inputs from its slices of earlier outputs alone. A forward that reduces over all
features there, as a norm does, gives other tokens in every layout. So a copy without weights runs twice in one process.
Its linear layers return fixed random numbers, and the second time other ones for features of other ranks.

The copy has one block of each kind, and all of its weights share the storage of one row. So the check of a large model
takes little time and memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_realloc.layout import TensorParallelCut
from lightning_realloc.runtime.model.dry_run import ForwardFailed, Placeholder, dry_run
from lightning_realloc.runtime.model.stacked_experts import parameter_adapters, stacked_experts
from lightning_realloc.runtime.model.structure import copy_without_weights, find_blocks, replace_parameter, tied_names
from lightning_realloc.runtime.parallel.tp_plan import ROWWISE, TensorParallelPlan

_NUM_TOKENS = 3
_TOLERANCE = 1e-4
"""Largest relative difference that counts as rounding."""


def find_mixed_features(model: nn.Module, plan: TensorParallelPlan, tp: int) -> str | None:
    """Return a refusal that names a layer whose inputs on one rank depend on features of others; None without one.

    The result is the same on every rank. Warns for a model that cannot run without its weights, or takes no
    ``input_ids``.
    """
    failure = None
    for replaced in (_repeated_blocks(model, plan), {}):  # placeholders do not suit every model
        try:
            layer = _mixed_layer(copy_without_weights(model, replaced), plan, tp)
        except ForwardFailed as error:
            failure = error
            continue
        if layer is None:
            return None
        block, _, child = layer.rpartition(".")
        return (
            f"in {block}, a {type(model.get_submodule(block)).__name__}, the inputs of {child} on one rank depend on "
            f"features that other ranks hold; pass a tp_plan that says 'replicate' for its layers"
        )
    rank_zero_warn(
        f"whether tensor-parallel ranks of {type(model).__name__} work apart could not be tried without its weights "
        f"({failure}); if they do not, results depend on tp"
    )
    return None


def _repeated_blocks(model: nn.Module, plan: TensorParallelPlan) -> dict[int, object]:
    """Return id of a block -> its placeholder, for all blocks but the first of each kind."""
    kinds: set[object] = set()
    replaced: dict[int, object] = {}
    for prefix, block in find_blocks(model):
        kind = tuple(
            (name, type(module), plan.styles.get(f"{prefix}.{name}"), *(p.shape for p in module.parameters(False)))
            for name, module in block.named_modules()
        )
        if kind in kinds:
            replaced[id(block)] = Placeholder(block)
        kinds.add(kind)
    return replaced


def _mixed_layer(copy: nn.Module, plan: TensorParallelPlan, tp: int) -> str | None:
    """Return the first layer whose inputs on the first rank depend on features of the others."""
    _prepare_for_cpu(copy)
    before, after = (_inputs_of_cut_layers(copy, plan, tp, varies=varies) for varies in (False, True))
    return next((name for name, inputs in before.items() if _differ(inputs, after.get(name))), None)


def _differ(before: Tensor, after: Tensor | None) -> bool:
    if after is None or after.shape != before.shape:  # experts that got other tokens
        return True
    return bool((after - before).norm() > _TOLERANCE * before.norm())


def _prepare_for_cpu(copy: nn.Module) -> None:
    """Give values to modules that are neither linear layers nor embeddings, and let them run on the CPU.

    All rows of a weight are one row in memory: a layer's experts may have gigabytes.
    """
    for adapter in parameter_adapters(copy).values():  # their factors have no values, and are cut as experts are
        adapter._disable_adapters = True
    generator = torch.Generator().manual_seed(0)
    for owner, names in tied_names(copy).items():
        parent = copy.get_submodule(owner.rpartition(".")[0])
        if not isinstance(parent, nn.Linear | nn.Embedding):
            shape = copy.get_parameter(owner).shape
            row = torch.rand(shape[-1:], generator=generator, dtype=torch.float32, device="cpu") + 0.5
            replace_parameter(copy, names, nn.Parameter(row.expand(shape)))
    for module in copy.modules():
        if isinstance(module, PreTrainedModel):  # kernels for other devices do not run here
            module.config._attn_implementation = module.config._experts_implementation = "eager"
        for name, buffer in module.named_buffers(recurse=False):
            # Those of a model without weights may have no values either.
            module._buffers[name] = torch.ones_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu()


def _inputs_of_cut_layers(copy: nn.Module, plan: TensorParallelPlan, tp: int, *, varies: bool) -> Mapping[str, Tensor]:
    """Return layer -> the first rank's slice of its inputs; ``varies``: outputs of other ranks have other values.

    Raises ForwardFailed if the copy cannot run, and for values that are not finite: no comparison holds for them.
    """
    seen: dict[str, Tensor] = {}

    def forward(name: str, layer: nn.Linear | nn.Embedding, given: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        randn = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        weight = layer.weight
        cut = plan.cuts.get(f"{name}.weight")
        if plan.styles.get(name) in ROWWISE and plan.styles[name] != "rowwise_split_input" and cut is not None:
            seen[name] = given[..., _first_slice(weight, cut, tp)]
        size = weight.shape[0] if isinstance(layer, nn.Linear) else weight.shape[1]
        leading = given.shape[:-1] if isinstance(layer, nn.Linear) else given.shape
        output: Tensor = randn(*leading, size)
        if varies and cut is not None and plan.styles[name] in ("colwise", "packed_colwise"):
            others = torch.ones(size, dtype=torch.bool, device="cpu")
            others[_first_slice(weight, cut, tp)] = False
            output[..., others] += randn(*leading, int(others.sum()))
        return output

    for name, layer in copy.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            vars(layer)["forward"] = partial(forward, name, layer)
    for experts in stacked_experts(copy).values():
        vars(experts)["forward"] = _mix_features
    dry_run(copy, input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device="cpu"))
    if not all(bool(inputs.isfinite().all()) for inputs in seen.values()):
        raise ForwardFailed("its layers get values that are not finite")
    return seen


def _mix_features(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return outputs of stacked experts that depend on each feature of a token, on its experts and their weights.

    Their products would take seconds for a large model, and no layer's inputs are recorded inside.
    """
    return tokens + (tokens.sum(-1, keepdim=True) + (chosen * weights).sum(-1, keepdim=True)).to(tokens.dtype)


def _first_slice(weight: Tensor, cut: TensorParallelCut, tp: int) -> Tensor:
    """Return the features that the first rank holds, of the dim of a layer's weight that is cut."""
    spans = cut.split(((0, weight.shape[cut.dim]),), tp, 0)
    return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in spans])
