"""What the engines ask of a Hugging Face model's configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_realloc.generation.core.sampling import SamplingParams

_PENALTIES: dict[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "exponential_decay_length_penalty": (),
}
"""Settings of transformers' ``GenerationConfig`` -> what leaves every token as likely as it is."""


def vocabulary_of(model: nn.Module) -> int:
    """Return the number of token ids that a model knows."""
    return int(text_config_of(model).vocab_size)


def length_bounds(model: nn.Module, max_length: int | None) -> dict[str, int]:
    """Return what bounds prompt and response together, and to how many tokens."""
    context = getattr(text_config_of(model), "max_position_embeddings", None)
    bounds = {"the model's max_position_embeddings": context, "the engine's max_length": max_length}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def eos_ids_of(model: nn.Module) -> frozenset[int]:
    """Return the tokens by which a model ends a response of its own."""
    for holder in (getattr(model, "generation_config", None), model.config):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
    return frozenset()


def penalties_of(model: nn.Module, params: SamplingParams) -> dict[str, Any]:
    """Return what a model's own ``generation_config`` makes tokens less or more likely by, and ``params`` do not."""
    own = getattr(model, "generation_config", None)
    found = {name: getattr(own, name, None) for name in _PENALTIES}
    ours = {"repetition_penalty": params.repetition_penalty}
    return {name: value for name, value in found.items() if value not in (None, _PENALTIES[name], ours.get(name))}


def text_config_of(model: nn.Module) -> Any:
    """Return the configuration of the part of a model that reads text."""
    config: Any = model.config
    return config.get_text_config()
