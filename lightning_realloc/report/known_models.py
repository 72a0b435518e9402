"""Configurations of common public models, and of shapes that the user writes out, so that planning needs no network.

`find_known_model` looks a shape up by its Hugging Face name; `parse_shape` reads one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml
from transformers import AutoConfig, PreTrainedConfig

from lightning_realloc.errors import PlanError
from lightning_realloc.tuning.shapes.experts import Experts

_FAMILIES: Mapping[tuple[str, ...], str] = {
    (): "mistral",
    ("qkv_bias",): "qwen2",
    ("qk_norm",): "qwen3",
    ("experts",): "mixtral",
    ("experts", "qk_norm"): "qwen3_moe",
}
"""Properties of a shape -> family of transformers that has them. Mistral's parameters are those of Llama."""
_CONFIG_KEYS: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
"""Key of a shape -> key of a config. The first five are required."""
_NEEDED_KEYS = tuple(_CONFIG_KEYS)[:5]
_SHAPE_FLAGS = ("tied", "qkv_bias", "qk_norm")
_SHAPE_EXAMPLE = "layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=128256,tied"


@lru_cache(maxsize=1)
def known_models() -> Mapping[str, str | dict[str, Any]]:
    """Return shapes or configurations of built-in models by Hugging Face name. The file is read once."""
    return MappingProxyType(yaml.safe_load(files(__package__).joinpath("known_models.yaml").read_text("utf-8")))


def find_known_model(name: str) -> PreTrainedConfig:
    """Return a configuration by its Hugging Face name, case-insensitive, with or without the owner.

    Raises:
        PlanError: for an unknown name; the message lists the nearest ones.
    """
    models = known_models()
    names = {key.lower(): key for key in models} | {key.split("/")[1].lower(): key for key in models}
    wanted = name.strip().lower()
    if wanted in names:
        known = models[names[wanted]]
        return parse_shape(known) if isinstance(known, str) else AutoConfig.for_model(**known)
    near = dict.fromkeys(names[match] for match in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5))
    offer = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(models)}"
    raise PlanError(f"model {name!r} is not built in ({offer}); or give a folder with its config.json")


def is_shape(text: str) -> bool:
    """Whether a text is a written-out shape rather than the name of a model."""
    return "=" in text


def parse_shape(text: str) -> PreTrainedConfig:
    """Read a shape such as ``"layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=128256,tied"``.

    ``kv_heads`` defaults to ``heads``, and ``head_dim`` to ``hidden / heads``. The flags ``tied``, ``qkv_bias`` and
    ``qk_norm`` take no value. With ``experts`` and ``experts_per_token``, ``intermediate`` is the size of one expert.

    Raises:
        PlanError: for an unknown, repeated or missing key, and for sizes or flags that contradict each other.
    """
    sizes, flags = _read_parts(text)
    pair = ("experts", "experts_per_token")
    needed = (*_NEEDED_KEYS, *(pair if any(key in sizes for key in pair) else ()))
    missing = [key for key in needed if key not in sizes]
    if missing:
        raise PlanError(f"the shape {text!r} lacks {', '.join(missing)}; as in {_SHAPE_EXAMPLE}")
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    if sizes["heads"] % sizes["kv_heads"] or not sizes["head_dim"]:
        raise PlanError(
            f"heads={sizes['heads']} of the shape {text!r} must be a multiple of kv_heads={sizes['kv_heads']} and at "
            f"most hidden={sizes['hidden']}; see the model's config.json"
        )
    config: dict[str, int | None] = {_CONFIG_KEYS[key]: size for key, size in sizes.items()}
    config |= {"tie_word_embeddings": "tied" in flags, "sliding_window": None}
    if "experts" in sizes:
        Experts(count=sizes["experts"], per_token=sizes["experts_per_token"], features=sizes["intermediate"])  # checks
        config["moe_intermediate_size"] = sizes["intermediate"]
    properties = tuple(sorted(flags - {"tied"} | ({"experts"} & sizes.keys())))
    if properties not in _FAMILIES:
        raise PlanError(
            f"no family of models has {' and '.join(properties)}, as the shape {text!r} does; leave qkv_bias out, or "
            f"give a folder with a config.json"
        )
    try:
        return AutoConfig.for_model(_FAMILIES[properties], **config)
    except Exception as error:  # transformers raises errors of several packages for sizes that cannot be
        reason = " ".join(str(error).split())
        raise PlanError(f"transformers refuses the shape {text!r}: {reason}; see the model's config.json") from None


def _read_parts(text: str) -> tuple[dict[str, int], set[str]]:
    """Return the sizes and the flags of a shape."""
    sizes, flags = {}, set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator and key in _SHAPE_FLAGS and key not in flags:
            flags.add(key)
        elif key in _CONFIG_KEYS and key not in sizes and value.isdecimal() and int(value):
            sizes[key] = int(value)
        else:
            known = ", ".join((*(f"{key}=NUMBER" for key in _CONFIG_KEYS), *_SHAPE_FLAGS))
            raise PlanError(f"{part!r} of the shape {text!r} is none of {known}, each once; as in {_SHAPE_EXAMPLE}")
    return sizes, flags
