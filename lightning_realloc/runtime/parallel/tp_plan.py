"""Which tensor-parallel style does every module of a model follow, and how does that cut its parameters?

Read from transformers' own ``tp_plan`` (or a plan that the caller gives) and from shapes: attention heads are found by
the sizes that a model's config declares, never by its family. Only reads the model; works on meta tensors.
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
from lightning_realloc.layout import TensorParallelCut
from lightning_realloc.runtime.model.structure import find_blocks, tied_names

COLWISE = ("colwise", "colwise_gather_output", "packed_colwise")
ROWWISE = ("rowwise", "rowwise_split_input", "packed_rowwise")
EMBEDDING = ("embedding_rowwise", "embedding_colwise")
PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
REPLICATE = "replicate"
STYLES = (*COLWISE, *ROWWISE, *EMBEDDING, PARTIAL_GRADIENT, REPLICATE)
"""The styles that are understood, under transformers' names."""

_SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_ATTENTION_ATTRIBUTES = ("num_key_value_groups", "head_dim", "head_size")
_PEFT_PREFIX, _PEFT_SUFFIX = "base_model.model.", ".base_layer"
"""What PEFT adds to the names of the modules that it wraps."""
_NUM_PACKED = 2
"""Transformers' packed styles fuse two blocks, gate and up."""


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """How many heads an attention module has, over all tensor-parallel ranks."""

    query: int
    key_value: int
    head_dims: tuple[int, ...]
    """Features of one head: of keys, and of values where they differ."""

    @property
    def key_value_sizes(self) -> tuple[int, ...]:
        """The output features of a key or value projection."""
        return tuple(self.key_value * head_dim for head_dim in self.head_dims)


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """What tensor parallelism does to every module and parameter of one model."""

    styles: Mapping[str, str]
    """Module name -> style, for every module that has one."""
    cuts: Mapping[str, TensorParallelCut]
    """Parameter name (tied ones under all their names) -> cut, for every parameter that is cut."""
    attention: Mapping[str, AttentionHeads]
    """Attention modules whose heads are divided over the ranks, by name."""
    refusal: str | None = None
    """Why the model cannot run tensor parallel, None when it can."""


def read_tp_plan(model: nn.Module, tp_plan: Mapping[str, str] | None = None) -> TensorParallelPlan:
    """Return what the model's own plan, with the entries of ``tp_plan`` over it, means for this model.

    ``tp_plan`` maps module names, ``*`` standing for a layer number, to styles; "replicate" undoes an entry.
    What cannot be followed becomes ``refusal``. Raises LayoutError when ``tp_plan`` names modules that do not exist.
    """
    known = _known_names(model)
    if unknown := sorted((tp_plan or {}).keys() - known):
        raise LayoutError(
            f"tp_plan names {unknown}, which match no module of {type(model).__name__}; "
            'write module names with "*" for layer numbers, such as "model.layers.*.mlp.up_proj"'
        )
    # Transformers' own plans have entries for modules that only some variants of a model have.
    patterns = {key: style for key, style in (getattr(model, "tp_plan", None) or {}).items() if key in known}
    patterns.update(tp_plan or {})
    try:
        return _plan_for(model, _styles_by_module(model, patterns))
    except LayoutError as refusal:
        return TensorParallelPlan({}, {}, {}, refusal=str(refusal))


def with_wildcards(name: str) -> str:
    """Replace the layer numbers in a dotted name by ``*``, as the keys of a plan are written."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _known_names(model: nn.Module) -> set[str]:
    named = itertools.chain(model.named_modules(), model.named_parameters())
    return {spelling for name, _ in named for spelling in _spellings(name)}


@functools.lru_cache(maxsize=1 << 16)  # each of a model's names is asked about several times, and by every role
def _spellings(name: str) -> tuple[str, ...]:
    """Return the keys by which a plan may mean a module: as it is, as PEFT found it, and both with wildcards."""
    before_peft = name.removeprefix(_PEFT_PREFIX).removesuffix(_PEFT_SUFFIX)
    return name, with_wildcards(name), before_peft, with_wildcards(before_peft)


def _style(name: str, patterns: Mapping[str, str]) -> str | None:
    return next((patterns[spelling] for spelling in _spellings(name) if spelling in patterns), None)


def _styles_by_module(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    styles = {}
    for name, module in model.named_modules():
        style = _style(name, patterns)
        if style is not None and not isinstance(getattr(module, "base_layer", None), nn.Module):
            styles[name] = _supported(_SYNONYMS.get(style, style), name)
    for name, _ in model.named_parameters():
        style = _style(name, patterns)
        if style not in (None, REPLICATE):
            raise LayoutError(
                f"{name}: the plan gives the style {style!r} to a bare parameter, and only modules can be cut; "
                'pass a tp_plan that says "replicate" for it'
            )
    styles.update(_styles_of_adapters(model, styles))
    if not any(style != REPLICATE for style in styles.values()):
        raise LayoutError(
            f"{type(model).__name__} has no tensor-parallel plan; pass one that maps module names to styles, as in "
            'tp_plan={"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}'
        )
    return styles


def _styles_of_adapters(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Cut the LoRA pair of every cut layer as the layer: B where its output is cut, A where its input is."""
    adapters = {}
    for name, module in model.named_modules():
        layer, _, kind = name.rpartition(".")
        style = styles.get(f"{layer}{_PEFT_SUFFIX}")
        if kind == "lora_magnitude_vector" and any(module.children()) and style in (*COLWISE, *ROWWISE):
            raise LayoutError(
                f"{name}: DoRA divides by the norms of whole weights, and {layer} is cut ({style}); leave use_dora out"
            )
        if kind in ("lora_A", "lora_B") and style in (*COLWISE, *ROWWISE):
            cut_here = (style in COLWISE) == (kind == "lora_B")
            adapters.update(
                {f"{name}.{adapter}": style if cut_here else REPLICATE for adapter, _ in module.named_children()}
            )
    return adapters


def _supported(style: str, name: str) -> str:
    if style not in STYLES:
        raise LayoutError(
            f"{name}: the tensor-parallel style {style!r} is not supported, only {', '.join(STYLES)}; "
            'pass a tp_plan that says "replicate" for it'
        )
    return style


def _plan_for(model: nn.Module, styles: dict[str, str]) -> TensorParallelPlan:
    _agree_on_tied(model, styles)
    cuts: dict[str, TensorParallelCut] = {}
    attention: dict[str, AttentionHeads] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        _check_module(module, name, style)
        heads = None
        if style in ("colwise", "rowwise") and (around := _attention_around(model, name)) is not None:
            attention_name, heads = around
            attention[attention_name] = heads
        for parameter_name, parameter in module.named_parameters(recurse=False):
            cut = _cut(tuple(parameter.shape), style, heads, f"{name}.{parameter_name}")
            if cut is not None:
                cuts[f"{name}.{parameter_name}"] = cut
    _check_tied_cuts(model, cuts)
    _check_between_cuts(model, styles)
    return TensorParallelPlan(styles, cuts, attention)


def _check_module(module: nn.Module, name: str, style: str) -> None:
    wanted: type[nn.Module] = nn.Module
    if style in EMBEDDING:
        wanted = nn.Embedding
    elif style in (*COLWISE, *ROWWISE):
        wanted = nn.Linear
    if not isinstance(module, wanted):
        raise LayoutError(
            f"{name}: the tensor-parallel style {style!r} cuts {wanted.__name__} modules and this is a "
            f"{type(module).__name__}; pass a tp_plan that says 'replicate' for it"
        )
    if style in ROWWISE and type(module).forward is not nn.Linear.forward:
        raise LayoutError(
            f"{name}: the tensor-parallel style {style!r} adds the bias after the sum over ranks, which "
            f"{type(module).__name__} with its own forward does not allow; pass a tp_plan that says 'replicate' for it"
        )


def _cut(shape: tuple[int, ...], style: str, heads: AttentionHeads | None, name: str) -> TensorParallelCut | None:
    """Return the cut of one parameter of a module with ``style``; biases of rowwise modules stay whole."""
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
        if size % _NUM_PACKED:
            raise LayoutError(f"{name}: the style {style!r} needs an even size along dim {dim}; it is {size}")
        return TensorParallelCut(dim, block_sizes=(size // _NUM_PACKED,) * _NUM_PACKED)
    return TensorParallelCut(dim) if heads is None else _cut_by_heads(dim, size, heads, name)


def _cut_by_heads(dim: int, size: int, heads: AttentionHeads, name: str) -> TensorParallelCut:
    """Cut a projection between heads.

    Keys and values are told by their size, one head dim per key-value head. Everything else inside attention lists its
    features by query head: queries, gpt_neox's fused q, k and v, gates, and the input of the output projection.
    """
    if heads.key_value < heads.query and size in heads.key_value_sizes:
        # What reads keys or values (dim 1) would need to know which ranks share a head: tp may not exceed the heads.
        return TensorParallelCut(dim, num_units=heads.key_value, replicate_units=dim == 0)
    if size % heads.query:
        raise LayoutError(
            f"{name}: dim {dim} of size {size} holds neither {heads.query} query heads nor {heads.key_value} key-value "
            f"heads of {heads.head_dims}, so where to cut is unknown; pass a tp_plan that says 'replicate' for all "
            "projections of this module"
        )
    return TensorParallelCut(dim, num_units=heads.query)


def _attention_around(model: nn.Module, name: str) -> tuple[str, AttentionHeads] | None:
    """Return the attention module that the module ``name`` belongs to, None when it belongs to none."""
    while "." in name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        says_so = any(hasattr(module, attribute) for attribute in _ATTENTION_ATTRIBUTES)
        if says_so or type(module).__name__.endswith("Attention"):
            return name, _heads_of(module, getattr(model, "config", None), name)
    return None


def _heads_of(attention: nn.Module, model_config: Any, name: str) -> AttentionHeads:
    config = getattr(attention, "config", None) or model_config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    query = _first_int(attention, ("num_heads", "num_attention_heads")) or _first_int(config, ("num_attention_heads",))
    if query is None:
        raise LayoutError(
            f"{name}: the number of attention heads is in neither the module nor its config (num_attention_heads), so "
            "where to cut is unknown; pass a tp_plan that says 'replicate' for its projections"
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
    """Give tied embeddings and heads styles that cut their one parameter along the same dim.

    The output head decides where the plan names it, because only the embedding can be cut either way and still be
    used whole.
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


def _check_between_cuts(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Refuse parameters beside a column-cut layer that the plan forgets, such as those of a learned activation.

    They see only this rank's features, and would silently keep only this rank's part of their gradient.
    """
    repeated = {name for name, _ in find_blocks(model)}
    cut_names = [name for name, style in styles.items() if style in ("colwise", "packed_colwise")]
    divided = {name.removesuffix(_PEFT_SUFFIX).rpartition(".")[0] for name in cut_names}
    divided |= {name.removesuffix(_PEFT_SUFFIX) for name in styles if name.endswith(_PEFT_SUFFIX)}
    divided = {name for name in divided - repeated if not any(block.startswith(f"{name}.") for block in repeated)}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        parts = module.split(".")
        around = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if module not in styles and not divided.isdisjoint(around):
            raise LayoutError(
                f"{name}: the plan cuts its neighbours and does not say whether its gradient is whole on every rank; "
                f"pass a tp_plan that names {with_wildcards(module)!r} as {REPLICATE!r} or {PARTIAL_GRADIENT!r}"
            )
