"""Check that nothing between cut layers mixes the features of different tensor-parallel ranks.

A rank computes its slice of a layer's inputs from its slices of earlier outputs alone. A forward that reduces over all
features there, as a norm does, gives other tokens in every layout. So a copy without weights runs twice in one process.
Its linear layers return fixed random numbers, and the second time other ones for features of other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import TensorParallelCut, local_shard
from lightning_realloc.runtime.model.structure import copy_without_weights, replace_parameter, tied_names
from lightning_realloc.runtime.parallel.tp_plan import ROWWISE, TensorParallelPlan

_log = logging.getLogger(__name__)
_NUM_TOKENS = 3
_TOLERANCE = 1e-4
"""Largest relative difference that counts as rounding."""


def check_slices_stay_apart(model: nn.Module, plan: TensorParallelPlan, tp: int) -> None:
    """Raise LayoutError for a layer whose inputs on the first rank depend on features of the others.

    A model that cannot run without its weights, or takes no ``input_ids``, is not checked.
    """
    copy = copy_without_weights(model).eval()
    try:
        _fill_small_weights(copy)
        before, after = (_inputs_of_cut_layers(copy, plan, tp, varies=varies) for varies in (False, True))
    except Exception as error:  # of any class: a model's code may need what a copy does not have
        _log.debug("%s cannot run without weights: %s", type(model).__name__, error)
        return
    for name, expected in before.items():
        if (after[name] - expected).abs().max() > _TOLERANCE * expected.abs().max():
            block, _, layer = name.rpartition(".")
            raise LayoutError(
                f"tp={tp} is impossible for this model: in {block}, a {type(model.get_submodule(block)).__name__}, the "
                f"inputs of {layer} on one rank depend on features that other ranks hold; use tp=1, or pass a tp_plan "
                f"that says 'replicate' for its layers"
            )


def _fill_small_weights(copy: nn.Module) -> None:
    """Give real weights to modules that are neither linear layers nor embeddings, and buffers on the CPU."""
    generator = torch.Generator().manual_seed(0)
    for owner, names in tied_names(copy).items():
        parent = copy.get_submodule(owner.rpartition(".")[0])
        if not isinstance(parent, nn.Linear | nn.Embedding):
            shape = copy.get_parameter(owner).shape
            replace_parameter(copy, names, nn.Parameter(torch.rand(shape, generator=generator) + 0.5))
    for module in copy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Those of a model without weights may have no values either.
            module._buffers[name] = torch.ones_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu()


@torch.no_grad()
def _inputs_of_cut_layers(copy: nn.Module, plan: TensorParallelPlan, tp: int, *, varies: bool) -> Mapping[str, Tensor]:
    """Return layer -> the first rank's slice of its inputs; ``varies``: outputs of other ranks have other values."""
    seen: dict[str, Tensor] = {}

    def forward(name: str, layer: nn.Linear | nn.Embedding, given: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(name))
        weight = layer.weight
        cut = plan.cuts.get(f"{name}.weight")
        if plan.styles.get(name) in ROWWISE and plan.styles[name] != "rowwise_split_input" and cut is not None:
            seen[name] = given[..., _first_slice(weight, cut, tp)]
        size = weight.shape[0] if isinstance(layer, nn.Linear) else weight.shape[1]
        leading = given.shape[:-1] if isinstance(layer, nn.Linear) else given.shape
        output = torch.randn(*leading, size, generator=generator)
        if varies and cut is not None and plan.styles[name] in ("colwise", "packed_colwise"):
            others = torch.ones(size, dtype=torch.bool)
            others[_first_slice(weight, cut, tp)] = False
            output[..., others] += torch.randn(*leading, int(others.sum()), generator=generator)
        return output

    for name, layer in copy.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            vars(layer)["forward"] = partial(forward, name, layer)
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long)
    copy(input_ids=ids, use_cache=False)
    return seen


def _first_slice(weight: Tensor, cut: TensorParallelCut, tp: int) -> Tensor:
    """Return the features that the first rank holds, of the dim of a layer's weight that is cut."""
    pieces = local_shard(tuple(weight.shape), cut, tp, 0, 1, 0).pieces
    spans = [(piece.region.starts[cut.dim], piece.region.shape[cut.dim]) for piece in pieces]
    return torch.cat([torch.arange(start, start + length) for start, length in spans])
