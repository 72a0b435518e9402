"""Find the tensor-parallel style of every module, and the resulting cut of its parameters.

Styles come from transformers' own ``tp_plan`` or from a plan that the caller gives. Attention heads are found by the
sizes in the model's config, never by its family. Only reads the model, which may be on the meta device.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_realloc.errors import LayoutError
from lightning_realloc.layout import TensorParallelCut, group_bounds, head_bounds
from lightning_realloc.runtime.model.quantized import quantized_layers
from lightning_realloc.runtime.model.stacked_experts import cut_factor, expert_adapters, feature_cuts, stacked_experts
from lightning_realloc.runtime.model.structure import declared_styles, find_blocks, tied_names
from lightning_realloc.runtime.parallel.latent_attention import LATENT, layers_of_latents

COLWISE = ("colwise", "colwise_gather_output", "packed_colwise")
ROWWISE = ("rowwise", "rowwise_split_input", "packed_rowwise")
EMBEDDING = ("embedding_rowwise", "embedding_colwise")
PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
REPLICATE = "replicate"
UNCUT = (PARTIAL_GRADIENT, REPLICATE)
EXPERTS = "moe_tp_experts"
STYLES = (*COLWISE, *ROWWISE, *EMBEDDING, EXPERTS, LATENT, PARTIAL_GRADIENT, REPLICATE)
"""Supported styles, by transformers' names."""

_SINKS = "sinks"
"""Name that transformers gives to the scores of attention sinks, one for each query head. They follow the heads."""
_PLAN_OF_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
"""Styles of attention's projections in a mixture whose own plan leaves out its blocks, such as gpt-oss."""
_SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_ATTENTION_ATTRIBUTES = ("num_key_value_groups", "head_dim", "head_size")
_PEFT_PREFIX, _PEFT_SUFFIX = "base_model.model.", ".base_layer"
"""Prefix and suffix that PEFT adds to the names of the modules that it wraps."""
_NUM_PACKED_BLOCKS = 2
"""Number of blocks that transformers' packed styles fuse: gate and up."""


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Head counts of an attention module, over all tensor-parallel ranks."""

    query: int
    """Number of query heads."""
    key_value: int
    """Number of key-value heads."""
    head_dims: tuple[int, ...]
    """Features of one head: of keys, and of values if they differ."""

    def on_rank(self, tp: int, index: int) -> tuple[int, int]:
        """Return the number of query heads and of key-value heads of one of ``tp`` ranks."""
        queries, keys = head_bounds(self.query, self.key_value, tp, index), group_bounds(self.key_value, tp, index)
        return queries[1] - queries[0], keys[1] - keys[0]


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """Tensor-parallel styles and cuts of one model."""

    styles: Mapping[str, str]
    """Module name -> style, for every module with a style."""
    cuts: Mapping[str, TensorParallelCut]
    """Parameter name -> cut, for every cut parameter. Tied parameters appear under all their names."""
    attention: Mapping[str, AttentionHeads]
    """Module name -> heads, for attention modules whose heads are divided over the ranks."""
    refusal: str | None = None
    """Reason why the model cannot run with tensor parallelism; None if it can."""


def read_tp_plan(model: nn.Module, tp_plan: Mapping[str, str] | None = None) -> TensorParallelPlan:
    """Resolve the model's own plan, overridden by the entries of ``tp_plan``. Stacked experts are cut without an entry.

    ``tp_plan`` maps module names, with ``*`` for a layer number, to styles; "replicate" removes an entry. If the plan
    cannot be applied, ``refusal`` says why. Raises LayoutError if ``tp_plan`` names modules that do not exist.
    """
    known = _known_names(model)
    if unknown := sorted((tp_plan or {}).keys() - known):
        raise LayoutError(
            f"tp_plan names {unknown}, which match no module of {type(model).__name__}; "
            'write module names with "*" for layer numbers, such as "model.layers.*.mlp.up_proj"'
        )
    patterns = {**_own_patterns(model, known), **(tp_plan or {})}
    if quantized_layers(model):
        refusal = "its 4-bit weights are packed in blocks, which a cut would break"
        return TensorParallelPlan({}, {}, {}, refusal=refusal)
    try:
        return _plan_for(model, _styles_by_module(model, patterns))
    except LayoutError as refusal:
        return TensorParallelPlan({}, {}, {}, refusal=str(refusal))


def count_heads(model: nn.Module, plan: TensorParallelPlan) -> tuple[tuple[int, int], ...]:
    """Return the numbers of query and key-value heads that attention layers of the model have; () if unknown."""
    config: Any = getattr(model, "config", None)
    found = {(heads.query, heads.key_value) for heads in plan.attention.values()}
    if not found and hasattr(config, "get_text_config"):
        text = config.get_text_config()
        query = _first_int(text, ("num_attention_heads",))
        found = {(query, _first_int(text, ("num_key_value_heads",)) or query)} if query else set()
    return tuple(sorted(found))


def with_wildcards(name: str) -> str:
    """Replace the layer numbers in a dotted name by ``*``, as in the keys of a plan."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _own_patterns(model: nn.Module, known: set[str]) -> dict[str, str]:
    """Return the entries of the model's own plan that apply to it, with our style for its stacked experts."""
    experts = stacked_experts(model)
    own = declared_styles(model)
    if experts and not any("*" in key for key in own):  # none for blocks
        keys = {_spellings(name)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        own |= {key: style for key in sorted(keys) if (style := _PLAN_OF_ATTENTION.get(key.rpartition(".")[2]))}
    weights = {
        _spellings(f"{name}.{inner}")[-1] for name, module in experts.items() for inner, _ in module.named_parameters()
    }
    # Transformers' own plans have entries for modules that only some variants of a model have.
    found = {key: style for key, style in own.items() if key in known - weights and not _is_of_sinks(key, style)}
    return found | {_spellings(name)[-1]: EXPERTS for name in experts}


def _is_of_sinks(key: str, style: str) -> bool:
    """Return whether an entry of transformers' plan says how sinks are cut, or that an attention module has them."""
    return key.endswith(f".{_SINKS}") or style == "local_params"


def _known_names(model: nn.Module) -> set[str]:
    named = itertools.chain(model.named_modules(), model.named_parameters())
    return {spelling for name, _ in named for spelling in _spellings(name)}


@functools.lru_cache(maxsize=1 << 16)  # every role looks up each name of its model several times
def _spellings(name: str) -> tuple[str, ...]:
    """Return a plan's possible keys for a module: its name with and without PEFT's additions, and with wildcards."""
    before_peft = name.removeprefix(_PEFT_PREFIX)
    while before_peft.endswith(_PEFT_SUFFIX):  # several layers around the same experts
        before_peft = before_peft.removesuffix(_PEFT_SUFFIX)
    return name, with_wildcards(name), before_peft, with_wildcards(before_peft)


def _style(name: str, patterns: Mapping[str, str]) -> str | None:
    return next((patterns[spelling] for spelling in _spellings(name) if spelling in patterns), None)


def _styles_by_module(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    styles = {}
    for name, module in model.named_modules():
        style = _style(name, patterns)
        # PEFT's outer layer adds to the output of a linear one, which the style LATENT changes.
        is_left_out = name.endswith(_PEFT_SUFFIX) if style == LATENT else hasattr(module, "base_layer")
        if style is not None and not is_left_out:
            styles[name] = style = _SYNONYMS.get(style, style)
            if style not in STYLES:
                raise LayoutError(
                    f"{name}: the tensor-parallel style {style!r} is not supported, only {', '.join(STYLES)}; "
                    'pass a tp_plan that says "replicate" for it'
                )
    for name, _ in model.named_parameters():
        style = _style(name, patterns)
        if style not in (None, REPLICATE):
            raise LayoutError(
                f"{name}: the plan gives the style {style!r} to a bare parameter, and only modules can be cut; "
                'pass a tp_plan that says "replicate" for it'
            )
    styles.update(_styles_of_adapters(model, styles))
    whole = layers_of_latents(model, [name for name, style in styles.items() if style == LATENT])
    styles = {**dict.fromkeys(whole, REPLICATE), **styles}
    if not any(style != REPLICATE for style in styles.values()):
        raise LayoutError(
            f"{type(model).__name__} has no tensor-parallel plan; pass one that maps module names to styles, as in "
            'tp_plan={"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}'
        )
    return styles


def _styles_of_adapters(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of the LoRA pair of every cut layer: B is cut like its output, A like its input."""
    adapters = {}
    for name, module in model.named_modules():
        layer, _, kind = name.rpartition(".")
        style = styles.get(f"{layer}{_PEFT_SUFFIX}")
        if kind == "lora_magnitude_vector" and any(module.children()) and style in (*COLWISE, *ROWWISE):
            raise LayoutError(
                f"{name}: DoRA divides by the norms of whole weights, and {layer} is cut ({style}); leave use_dora out"
            )
        if kind in ("lora_A", "lora_B") and style in (*COLWISE, *ROWWISE):
            is_cut = (style in COLWISE) == (kind == "lora_B")
            for adapter, _ in module.named_children():
                adapters[f"{name}.{adapter}"] = style if is_cut else REPLICATE
    return adapters


def _plan_for(model: nn.Module, styles: dict[str, str]) -> TensorParallelPlan:
    _agree_on_tied(model, styles)
    cuts: dict[str, TensorParallelCut] = {}
    attention: dict[str, AttentionHeads] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == EXPERTS:
            cuts |= _cuts_of_experts(model, name)
            continue
        _check_module(module, name, style)
        heads = None
        if style in ("colwise", "rowwise") and (found := _find_attention(model, name)) is not None:
            attention_name, heads = found
            attention[attention_name] = heads
        for parameter_name, parameter in module.named_parameters(recurse=False):
            cut = _cut(tuple(parameter.shape), style, heads, f"{name}.{parameter_name}")
            if cut is not None:
                cuts[f"{name}.{parameter_name}"] = cut
    for name, heads in attention.items():
        if isinstance(getattr(model.get_submodule(name), _SINKS, None), nn.Parameter):
            cuts[f"{name}.{_SINKS}"] = TensorParallelCut(0, num_units=heads.query, num_groups=heads.key_value)
    _check_tied_cuts(model, cuts)
    _check_between_cuts(model, styles, cuts)
    return TensorParallelPlan(styles, cuts, attention)


def _cuts_of_experts(model: nn.Module, name: str) -> dict[str, TensorParallelCut]:
    """Return the cuts of stacked experts and of their adapters, by the names of parameters."""
    experts = model.get_submodule(name)
    own = feature_cuts(experts, name)
    cuts = {f"{name}.{inner}": cut for inner, cut in own.items()}
    for layer_name, layer in expert_adapters(model).items():
        if layer.get_base_layer() is experts:
            factor, cut = cut_factor(layer, own)
            cuts |= {f"{layer_name}.{factor}.{adapter}.weight": cut for adapter in layer.r}
    return cuts


def _check_module(module: nn.Module, name: str, style: str) -> None:
    wanted: type[nn.Module] = nn.Module
    if style in EMBEDDING:
        wanted = nn.Embedding
    elif style in (*COLWISE, *ROWWISE):
        wanted = nn.Linear
    if not isinstance(module, wanted):
        raise LayoutError(
            f"{name}: the tensor-parallel style {style!r} cuts {wanted.__name__} modules, but this is a "
            f"{type(module).__name__}; pass a tp_plan that says 'replicate' for it"
        )
    if style in ROWWISE and type(module).forward is not nn.Linear.forward:
        raise LayoutError(
            f"{name}: the tensor-parallel style {style!r} adds the bias after the sum over ranks, which "
            f"{type(module).__name__} with its own forward does not allow; pass a tp_plan that says 'replicate' for it"
        )


def _cut(shape: tuple[int, ...], style: str, heads: AttentionHeads | None, name: str) -> TensorParallelCut | None:
    """Return the cut of one parameter of a module with ``style``; None if it stays whole, like a rowwise bias."""
    if style in COLWISE or style == "embedding_rowwise":
        dim = 0
    elif style in ROWWISE or style == "embedding_colwise":
        dim = 1
    else:
        return None
    if dim >= len(shape):
        return None
    size = shape[dim]
    if style.startswith("packed"):
        if size % _NUM_PACKED_BLOCKS:
            raise LayoutError(f"{name}: the style {style!r} needs an even size along dim {dim}; it is {size}")
        return TensorParallelCut(dim, block_sizes=(size // _NUM_PACKED_BLOCKS,) * _NUM_PACKED_BLOCKS)
    return TensorParallelCut(dim) if heads is None else _cut_by_heads(dim, size, heads, name)


def _cut_by_heads(dim: int, size: int, heads: AttentionHeads, name: str) -> TensorParallelCut:
    """Return a cut between the heads of a projection.

    Key and value projections are recognised by their size, one head dim per key-value head. All other parameters of
    attention order their features by query head: queries, gpt_neox's fused q, k and v, gates, and the input of the
    output projection. Their heads stay with the key-value head that they read.
    """
    if heads.key_value < heads.query and size in [heads.key_value * head_dim for head_dim in heads.head_dims]:
        # A module that reads keys or values (dim 1) does not know which ranks share a head, so there tp must not
        # exceed the number of heads.
        return TensorParallelCut(dim, num_units=heads.key_value, replicate_units=dim == 0)
    if size % heads.query or heads.query % heads.key_value:
        raise LayoutError(
            f"{name}: dim {dim} of size {size} holds neither {heads.query} query heads nor {heads.key_value} key-value "
            f"heads of {heads.head_dims}, so its cut is unknown; pass a tp_plan that says 'replicate' for all "
            "projections of this module"
        )
    return TensorParallelCut(dim, num_units=heads.query, num_groups=heads.key_value)


def _find_attention(model: nn.Module, name: str) -> tuple[str, AttentionHeads] | None:
    """Return name and heads of the attention module that contains the module ``name``; None if there is none."""
    while "." in name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        has_heads = any(hasattr(module, attribute) for attribute in _ATTENTION_ATTRIBUTES)
        if has_heads or type(module).__name__.endswith("Attention"):
            return name, _read_heads(module, getattr(model, "config", None), name)
    return None


def _read_heads(attention: nn.Module, model_config: Any, name: str) -> AttentionHeads:
    config = getattr(attention, "config", None) or model_config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    query = _first_int(attention, ("num_heads", "num_attention_heads")) or _first_int(config, ("num_attention_heads",))
    if query is None:
        raise LayoutError(
            f"{name}: the number of attention heads is in neither the module nor its config (num_attention_heads), so "
            "the cut is unknown; pass a tp_plan that says 'replicate' for its projections"
        )
    groups = _first_int(attention, ("num_key_value_groups",))
    key_value = query // groups if groups else _first_int(attention, ("num_key_value_heads",))
    key_value = key_value or _first_int(config, ("num_key_value_heads",)) or query
    head_dim = _first_int(attention, ("head_dim", "head_size")) or _first_int(config, ("head_dim",))
    head_dim = head_dim or (_first_int(config, ("hidden_size",)) or 0) // query
    value_dim = _first_int(attention, ("v_head_dim",)) or head_dim
    return AttentionHeads(query, key_value, tuple(dict.fromkeys((head_dim, value_dim))))


def _first_int(source: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _agree_on_tied(model: nn.Module, styles: dict[str, str]) -> None:
    """Give tied embeddings and heads styles that cut their common parameter along the same dim.

    If the plan names the output head, its style decides, because the embedding supports both cuts.
    """
    for names in tied_names(model).values():
        modules = [name.rpartition(".")[0] for name in names]
        if len(modules) < 2 or not any(module in styles for module in modules):
            continue
        heads = [name for name in modules if isinstance(model.get_submodule(name), nn.Linear)]
        embeddings = [name for name in modules if isinstance(model.get_submodule(name), nn.Embedding)]
        planned = [styles[name] for name in (*heads, *embeddings) if name in styles]
        along_rows = planned and (planned[0] in COLWISE or planned[0] == "embedding_rowwise")
        if planned and planned[0] != REPLICATE:
            for name in heads:
                styles.setdefault(name, "colwise_gather_output" if along_rows else "rowwise_split_input")
            for name in embeddings:
                styles[name] = "embedding_rowwise" if along_rows else "embedding_colwise"


def _check_tied_cuts(model: nn.Module, cuts: Mapping[str, TensorParallelCut]) -> None:
    for names in tied_names(model).values():
        if len({cuts.get(name) for name in names}) > 1:
            raise LayoutError(
                f"{' and '.join(names)} are one tied parameter, but the plan cuts them differently "
                f"({', '.join(str(cuts.get(name)) for name in names)}); pass a tp_plan that cuts them alike"
            )


def _check_between_cuts(model: nn.Module, styles: Mapping[str, str], cuts: Mapping[str, TensorParallelCut]) -> None:
    """Raise LayoutError for parameters next to a column-cut layer that the plan does not name, or cannot divide.

    Parameters of a learned activation, for example, read only this rank's features. Their gradient would silently
    lack the contributions of the other ranks. Parameters with a row per head, as norms of Cohere's queries, would have
    to be cut, and no style does it.
    """
    repeated = {name for name, _ in find_blocks(model)}
    cut_names = [name for name, style in styles.items() if style in ("colwise", "packed_colwise")]
    divided = {name.removesuffix(_PEFT_SUFFIX).rpartition(".")[0] for name in cut_names}
    adapted = [name for name, style in styles.items() if name.endswith(_PEFT_SUFFIX) and style != EXPERTS]
    divided |= {name.removesuffix(_PEFT_SUFFIX) for name in adapted}
    divided = {name for name in divided - repeated if not any(block.startswith(f"{name}.") for block in repeated)}
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        names = module.split(".")
        prefixes = {".".join(names[:length]) for length in range(1, len(names) + 1)}
        if divided.isdisjoint(prefixes) or name in cuts:
            continue
        if _has_row_per_head(model, module, parameter) and styles.get(module, REPLICATE) in UNCUT:
            raise LayoutError(
                f"{name}: it has a row for each attention head ({parameter.shape[0]}), and no tensor-parallel style "
                f"divides such a parameter"
            )
        if module not in styles:
            raise LayoutError(
                f"{name}: the plan cuts its neighbours and does not say whether its gradient is whole on every rank; "
                f"pass a tp_plan that names {with_wildcards(module)!r} as {PARTIAL_GRADIENT!r} if it reads a rank's "
                f"own features, or as {REPLICATE!r} if it reads all of them"
            )


def _has_row_per_head(model: nn.Module, module: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter inside attention, of another module than a projection, has one row per head."""
    if parameter.ndim < 2 or isinstance(model.get_submodule(module), nn.Linear):
        return False
    found = _find_attention(model, module)
    return found is not None and parameter.shape[0] in (found[1].query, found[1].key_value)
