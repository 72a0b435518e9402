"""Read a Hugging Face model's configuration, and refuse models and token ids that the engine cannot use."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_realloc.errors import GenerationError, ReallocError
from lightning_realloc.runtime.model.batching_limits import experts_obstacle, generation_obstacle, rotary_bounds

if TYPE_CHECKING:
    from lightning_realloc.generation.core.params import SamplingParams

OTHER_ENGINE = "use HFEngine, or engine='hf' in an algorithm, which calls the model's own generate()"
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PENALTIES: dict[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "exponential_decay_length_penalty": (),
}
"""Settings of transformers' ``GenerationConfig`` that change logits, with their neutral values."""


def vocabulary_of(model: nn.Module) -> int:
    """Return the number of token ids that a model knows."""
    return int(text_config_of(model).vocab_size)


def length_bounds(model: nn.Module, max_length: int | None) -> dict[str, int]:
    """Return the bounds of prompt and response together, in tokens, by their source."""
    context = getattr(text_config_of(model), "max_position_embeddings", None)
    bounds = {"the model's max_position_embeddings": context, "the engine's max_length": max_length}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def eos_ids_of(model: nn.Module) -> frozenset[int]:
    """Return a model's own end-of-sequence tokens."""
    for holder in (getattr(model, "generation_config", None), model.config):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
    return frozenset()


def penalties_of(model: nn.Module, params: SamplingParams) -> dict[str, Any]:
    """Return the settings of a model's ``generation_config`` that change logits and that ``params`` do not have."""
    own = getattr(model, "generation_config", None)
    found = {name: getattr(own, name, None) for name in _PENALTIES}
    ours = {"repetition_penalty": params.repetition_penalty}
    return {name: value for name, value in found.items() if value not in (None, _PENALTIES[name], ours.get(name))}


def text_config_of(model: nn.Module) -> Any:
    """Return the configuration of a model's text decoder."""
    config: Any = model.config
    return config.get_text_config()


def check_supported(model: nn.Module, *, max_length: int) -> None:
    """Raise GenerationError for models that cannot attend through transformers' registry and the slot cache.

    ``max_length`` is the length of the longest sequence that the cache will hold.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        _refuse(model, "it is no Hugging Face model, which has a config", "load one by AutoModelForCausalLM")
    reason = generation_obstacle(model)
    if reason is not None:
        _refuse(model, reason, "use a decoder-only model such as Llama")
    if not getattr(model, "_supports_attention_backend", False):
        _refuse(model, "its attention does not go through transformers' attention registry")
    head = getattr(model, "get_output_embeddings", None)
    if head is not None and head() is None:
        _refuse(model, "it has no head for the next token", "load it by AutoModelForCausalLM")
    foreign = sorted(set(getattr(text_config_of(model), "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if foreign:
        _refuse(model, f"it has layers of type {', '.join(foreign)}")
    failing = experts_obstacle(model)
    if failing is not None:
        _refuse(model, *failing)
    for kind, original in rotary_bounds(config):
        if max_length > original:
            _refuse(
                model,
                f"its {kind} rotary embedding changes with the batch's longest sequence beyond {original} positions "
                f"and this call may reach {max_length}",
                "lower max_new_tokens or max_length to stay within them",
            )


def check_loaded(model: nn.Module) -> None:
    """Raise GenerationError for a model on the meta device."""
    if any(weight.is_meta for weight in model.parameters()):
        reason = "its weights are on the meta device, which holds no numbers"
        _refuse(model, reason, "load it by from_pretrained, with nothing offloaded")


def _refuse(model: nn.Module, reason: str, way_out: str = OTHER_ENGINE) -> None:
    raise GenerationError(f"{type(model).__name__} cannot be generated from in process: {reason}; {way_out}")


def as_token_ids(given: Any) -> tuple[int, ...]:
    """Return a list, tensor or other sequence of integers as a tuple; raise TypeError for anything else."""
    return tuple(_as_token_id(token) for token in (given.tolist() if isinstance(given, Tensor) else given))


def _as_token_id(given: Any) -> int:
    if isinstance(given, bool):  # an int in Python
        raise TypeError(f"{given} is no token id")
    return operator.index(given)


def check_vocabulary(
    name: str,
    tokens: Sequence[int],
    vocabulary: int,
    *,
    model: str = "the model",
    error: type[ReallocError] = GenerationError,
) -> None:
    """Raise ``error`` unless all ``tokens``, at least one, are below ``vocabulary``; ``name`` is for the message."""
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise error(
            f"{name} holds token ids from {min(tokens)} to {max(tokens)}, {model}'s vocabulary has {vocabulary}; use "
            f"the model's own tokenizer, and after adding tokens to it model.resize_token_embeddings(len(tokenizer))"
        )
