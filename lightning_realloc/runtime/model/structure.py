"""Inspect a model without running it (blocks, parts for images, tied parameters), and copy it, also without weights."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from lightning_realloc.errors import ConfigError
from lightning_realloc.limits import PROJECTOR_NAMES
from lightning_realloc.runtime.model.image_inputs import IMAGE_FAMILIES, placeholder_ids
from lightning_realloc.runtime.model.quantized import replacements_in_copy

_OLD_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|\.inv_freq$")
"""Causal masks and rotary frequencies, which older versions of transformers saved with the weights."""

TrainVision = Literal["none", "projector", "all"]
"""Parts that only images use and that are trained: none, the projector to the language model, or also the tower."""
_PROJECTOR = re.compile(PROJECTOR_NAMES)
_UNCHANGING = frozenset({bool, int, float, str, type(None)})
"""Types of attributes that a copy shares with its original."""
_COPY_METHODS = frozenset(
    {"__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__new__", "__setstate__", "__slots__"}
    | {"__reduce__", "__reduce_ex__"}
)
"""Methods by which a class changes how it is copied."""
_combined_classes: WeakKeyDictionary[type[nn.Module], WeakValueDictionary[type[nn.Module], type[nn.Module]]]
_combined_classes = WeakKeyDictionary()
"""Own class -> base -> class of both. Weak, because a class defined in a function may hold models."""


def find_blocks(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Return (name, module) of the repeated blocks of a model, in order; () if it has no module list.

    Blocks are the elements of the outermost module lists with classes in transformers' ``_no_split_modules``. For a
    model without these, they are the elements of the list with the most parameters. A model that also reads images has
    the blocks of its text decoder: all ranks hold the tower's weights at the same time, also those without an image.
    """
    decoder = decoder_name(model)
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.get_submodule(decoder).named_modules(prefix=decoder):
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    whole = set(getattr(model, "_no_split_modules", None) or ())
    named = [(name, blocks) for name, blocks in lists if any(type(block).__name__ in whole for block in blocks)]
    if not named and lists:
        named = [max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))]
    return tuple((f"{name}.{index}", block) for name, blocks in named for index, block in enumerate(blocks))


def decoder_name(model: nn.Module) -> str:
    """Return the name of the module that holds a transformers model's text decoder; "" for the model itself."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
    if text is config:
        return ""
    return next((name for name, module in model.named_modules() if getattr(module, "config", None) is text), "")


def declared_styles(model: nn.Module) -> dict[str, str]:
    """Return transformers' tensor-parallel styles of a model.

    It has none for the blocks of Qwen3-VL, which are those of Qwen3.
    """
    styles = dict(getattr(model, "tp_plan", None) or {})
    text = getattr(getattr(model, "config", None), "text_config", None)
    if getattr(text, "model_type", None) == "qwen3_vl_text":
        plan = Qwen3Config.base_model_tp_plan or {}
        styles |= {f"{decoder_name(model)}.{key}": style for key, style in plan.items()}
    return styles


def vision_parts(model: nn.Module) -> dict[str, Literal["tower", "projector"]]:
    """Return name -> part for the modules and parameters of a model that only images use; {} for a model of text."""
    decoder = decoder_name(model)
    if not decoder or not placeholder_ids(model) or not isinstance(model, PreTrainedModel):
        return {}
    prefix, found = f"{model.base_model_prefix}.", dict[str, Literal["tower", "projector"]]()
    for name, _ in itertools.chain(model.named_modules(), model.named_parameters(remove_duplicate=False)):
        is_text = f"{name}.".startswith(f"{decoder}.") or f"{decoder}.".startswith(f"{name}.")
        if name.startswith(prefix) and not is_text:
            found[name] = "projector" if _PROJECTOR.search(name.removeprefix(prefix)) else "tower"
    return found


def frozen_vision(model: nn.Module, trained: TrainVision) -> frozenset[str]:
    """Return the names of the modules and parameters that only images use and that are not trained."""
    kept = {"none": (), "projector": ("projector",), "all": ("projector", "tower")}[trained]
    return frozenset(name for name, part in vision_parts(model).items() if part not in kept)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model: ``model`` itself, or the one that it wraps (adapters, compile)."""
    if (found := find_transformers_model(model)) is not None:
        return found
    raise ConfigError(
        f"packed sequences need a transformers model; {type(model).__name__} is none and contains none, "
        f"build it from PreTrainedModel or with AutoModelForCausalLM"
    )


def find_transformers_model(model: nn.Module) -> PreTrainedModel | None:
    """Return the model itself, or the transformers model that it wraps; None if there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def check_extra_inputs(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ConfigError for further inputs that the model's ``forward`` does not name; ``**kwargs`` would drop them.

    And for those of a model of images whose family may read images otherwise than the known ones.
    """
    if missing := sorted(set(names) - _inputs(model)):
        raise ConfigError(
            f"{type(model).__name__}.forward has no argument {missing[0]!r}, which the samples bring as a further "
            f"input; use a model that reads it, or leave images, or the column 'input/{missing[0]}', out of the data"
        )
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if placeholder_ids(model) and kind not in IMAGE_FAMILIES:
        raise ConfigError(
            f"{type(model).__name__} is of the family {kind!r}, which may read images in a way of its own; images work "
            f"with {', '.join(sorted(IMAGE_FAMILIES))}, and text with all"
        )


def _inputs(model: nn.Module) -> set[str]:
    """Return the arguments of a model's forward, and of its backbone's if it is known to pass others on."""
    found = set(inspect.signature(type(model).forward).parameters)
    if isinstance(model, GenericForSequenceClassification | GenericForTokenClassification):
        backbone: Any = model.base_model
        found |= inspect.signature(type(backbone).forward).parameters.keys()
    return found


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return owner name -> all names of each parameter. The owner name is the one in ``named_parameters()``."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def unused_weights(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected weights of a checkpoint that belong to modules of the model, sorted.

    These are additional blocks, also of a tower, or additional weights of a module. Ignored are modules that the model
    does not have, such as a value head, the head of another task or a vision tower.
    """
    modules = dict(model.named_modules())
    lists = {block.rpartition(".")[0] for block, _ in find_blocks(model)}
    lists |= {name for name in vision_parts(model) if isinstance(modules.get(name), nn.ModuleList)}

    def is_ours(name: str) -> bool:
        parent = name.rpartition(".")[0]
        return (parent != "" and parent in modules) or any(name.startswith(f"{blocks}.") for blocks in lists)

    prefix = f"{model.base_model_prefix}."  # missing in the checkpoint of a bare backbone
    found = (name for name in unexpected if not _OLD_BUFFERS.search(name))
    return sorted(name for name in found if is_ours(name) or is_ours(prefix + name))


def record_untied_weights(model: nn.Module) -> None:
    """Set ``tie_word_embeddings=False`` in the config of a model whose weights are not tied as the config says.

    ``from_pretrained`` keeps two weights untied if the checkpoint holds different values for them, but does not change
    the config. A model saved with that config would be loaded with one weight in both places.
    """
    if not isinstance(model, PreTrainedModel):
        return
    named = model.named_parameters(remove_duplicate=False)
    weights = {name.replace(".base_layer.", "."): parameter for name, parameter in named}
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    if any(weights.get(target) is not weights.get(source) for target, source in pairs):
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def replace_parameter(model: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    """Register a parameter under all names of a tied one."""
    for name in names:
        module_name, _, attribute = name.rpartition(".")
        model.get_submodule(module_name).register_parameter(attribute, parameter)


def copy_model(model: nn.Module, replacements: Mapping[int, object] | None = None) -> nn.Module:
    """Return a deep copy of a model. ``replacements`` maps the id of an object to its replacement in the copy.

    ``deepcopy`` visits every name, number and empty dict of hooks of every module, of which a model has thousands.
    """
    return _copied(model, dict(replacements or {}))


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy, without calls for values that cannot change; ``memo`` is that of ``copy.deepcopy``."""
    kind: Any = type(module)
    if id(module) in memo or not _is_copied_by_attributes(kind):
        return copy.deepcopy(module, memo)
    duplicate: nn.Module = kind.__new__(kind)
    memo[id(module)] = duplicate
    for name, value in module.__getstate__().items():
        vars(duplicate)[name] = _copied_attribute(name, value, memo)
    return duplicate


def _copied_attribute(name: str, value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is OrderedDict and not value:  # hooks
        return OrderedDict()
    if name == "_modules" and kind in (dict, OrderedDict):
        return kind((key, None if child is None else _copied(child, memo)) for key, child in value.items())
    return copy.deepcopy(value, memo)


@cache
def _is_copied_by_attributes(kind: type[nn.Module]) -> bool:
    """Return whether ``deepcopy`` makes an object of this class without ``__init__``, and copies its attributes."""
    return not any(vars(base).keys() & _COPY_METHODS for base in kind.__mro__ if base not in (nn.Module, object))


def copy_without_weights(model: nn.Module, others: Mapping[int, object] | None = None) -> nn.Module:
    """Return a deep copy whose parameters have shapes but no storage; buffers are real copies, ties are kept.

    4-bit weights that are pinned are shared with the copy. ``others`` maps the id of a further object to its
    replacement in the copy.
    """
    replacements = {**replacements_in_copy(model), **(others or {})}
    for parameter in model.parameters():
        if id(parameter) not in replacements:
            empty = torch.empty_like(parameter, device="meta")
            replacements[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy_model(model, replacements)


def combined_class(base: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Return ``base`` with the forward of ``own`` inside, such as that of Gemma's scaled embedding."""
    if issubclass(base, own):
        return base
    combined_by_base = _combined_classes.setdefault(own, WeakValueDictionary())
    combined = combined_by_base.get(base)
    if combined is None:
        combined = type(f"{base.__name__.strip('_')}{own.__name__}", (base, own), {})
        combined_by_base[base] = combined
    return combined
