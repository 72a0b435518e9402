"""Describe a model's parameters as a `ModelSpec`: shapes, places in the model, cuts.

A `ModelSpec` holds no tensors, and every plan and layout starts from one. Works on models on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import ModelSpec, ParamSpec, sharded, sharded_experts
from lightning_realloc.layout.cuts import ExpertCut
from lightning_realloc.layout.model import Section
from lightning_realloc.limits import EXPERT_COUNT_KEYS
from lightning_realloc.runtime.model.image_inputs import blocks_with_image_features
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.runtime.model.stacked_experts import adapter_cuts, stacked_experts, undivided_experts
from lightning_realloc.runtime.model.structure import find_blocks, tied_names, vision_parts
from lightning_realloc.runtime.parallel.tp_check import find_mixed_features
from lightning_realloc.runtime.parallel.tp_plan import count_heads, read_tp_plan

MAX_TENSOR_PARALLEL = 64
"""Largest degree at which ranks are checked to work apart. Slices are smallest at the largest degree."""


def describe_model(
    model: nn.Module, *, tp_plan: Mapping[str, str] | None = None, max_tp: int = MAX_TENSOR_PARALLEL
) -> ModelSpec:
    """Return the description of a model that holds full (or meta) weights.

    Parameters outside the blocks belong to the input if they lie in an embedding or are registered before the blocks,
    otherwise to the output. Embeddings with a tied head belong to both ends. Any other tied parameter has the place of
    its first name.

    Args:
        model: Stays as it is.
        tp_plan: Module names, with ``*`` for a layer number, to tensor-parallel styles. Its entries override those of
            the model's own plan.
        max_tp: Largest tensor-parallel degree of any layout of the model. Above 1, a dry run without weights looks for
            a forward that mixes features of different ranks; ``tp_refusal`` then names it.

    Raises LayoutError for a model without parameters, and for a ``tp_plan`` that names unknown modules.
    """
    owners = tied_names(model)
    if not owners:
        raise LayoutError(f"{type(model).__name__} has no parameters to lay out; pass the model with its modules")
    plan = read_tp_plan(model, tp_plan)
    blocks = [name for name, _ in find_blocks(model)]
    places, undivided = _places(model, blocks), undivided_experts(model)
    experts = stacked_experts(model) if undivided is None else {}
    stacked = {f"{name}.{inner}": ExpertCut() for name, one in experts.items() for inner, _ in one.named_parameters()}
    stacked |= adapter_cuts(model) if experts else {}
    params = []
    for name, names in owners.items():
        section, block = places[name]
        if section == "input" and {places[tied][0] for tied in names[1:]} == {"output"}:
            section = "ends"
        cut, by_expert = plan.cuts.get(name), stacked.get(name)
        cuts = sharded(cut) if by_expert is None else sharded_experts(cut, by_expert=by_expert)
        params.append(ParamSpec(name, tuple(model.get_parameter(name).shape), cuts, section, block))
    aliases = tuple((name, owner) for owner, names in owners.items() for name in names[1:])
    costs = _costs(model, blocks, places)
    spec = ModelSpec(tuple(params), len(blocks), aliases, plan.refusal, undivided, count_heads(model, plan), costs)
    most_ranks = spec.tensor_parallel_degrees(max_tp)[-1]
    mixed = find_mixed_features(model, plan, most_ranks) if most_ranks > 1 else None
    first_blocks = max(1, blocks_with_image_features(model))
    return replace(spec, tp_refusal=spec.tp_refusal or mixed, first_blocks=first_blocks)


def _places(model: nn.Module, blocks: list[str]) -> dict[str, tuple[Section, int | None]]:
    """Return section and block of every parameter name, tied ones included."""
    places: dict[str, tuple[Section, int | None]] = {}
    others: Section = "input"
    for name, _ in model.named_parameters(remove_duplicate=False):
        block = _block_of(name, blocks)
        if block is not None:
            places[name], others = ("block", block), "output"
        else:
            embeds = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
            places[name] = "input" if embeds else others, None
    return places


def _costs(model: nn.Module, blocks: list[str], places: Mapping[str, tuple[Section, int | None]]) -> tuple[int, ...]:
    """Return the multiplications per token in the input, in every block and in the output.

    These are the elements of matrices; of experts, the share that a token is routed to. Embeddings look up rows.
    Attention's scores, which depend on the context, are left out, and so are parts that only images use.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_experts = next((count for key in EXPERT_COUNT_KEYS if (count := getattr(text, key, None))), 0)
    per_token = getattr(text, "num_experts_per_tok", None)
    costs, packed, unused = [0] * (len(blocks) + 2), quantized_layers(model), vision_parts(model)
    for module_name, module in model.named_modules():
        shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}
        if module_name in packed:
            shapes["weight"] = module.in_features, module.out_features
        for own, shape in shapes.items() if not isinstance(module, nn.Embedding) else ():
            name, size = f"{module_name}.{own}".lstrip("."), math.prod(shape) if len(shape) > 1 else 0
            if name in unused or module_name in unused:
                continue
            if num_experts and per_token and (".experts." in name or (len(shape) == 3 and shape[0] == num_experts)):
                size = size * per_token // num_experts
            section, block = places.get(name) or ("block", _block_of(name, blocks))
            costs[block + 1 if block is not None else 0 if section == "input" else -1] += size
    return tuple(costs)


def _block_of(name: str, blocks: list[str]) -> int | None:
    return next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
