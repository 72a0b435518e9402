"""Forward passes over packed sequences: logits, scores, hidden states and log-probabilities of tokens.

Every function makes the model keep the sequences of a pack apart (see ``packed_attention``). It raises ConfigError if
the model's output does not have the expected form.
"""

from __future__ import annotations

import contextlib
import inspect
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError
from lightning_realloc.limits import is_tiled
from lightning_realloc.runtime.forward.attention.packed_attention import packed_attention
from lightning_realloc.runtime.forward.tiled_logits import deferred_head, select_rows
from lightning_realloc.runtime.forward.token_group import row_division, sum_values, token_group
from lightning_realloc.runtime.forward.token_logprobs import TokenStatistics, collision_logprobs, selected_logprobs
from lightning_realloc.runtime.model.structure import transformers_model
from lightning_realloc.runtime.parallel.tensor_parallel import num_vocabulary_shards, vocab_parallel_output


def packed_logits(model: nn.Module, packed: PackedBatch) -> Tensor:
    """Return the (N, V) logits of a language model, or the (N, labels) scores of a token classifier."""
    with packed_attention(model, packed) as inputs:
        logits: Tensor = model(**inputs).logits
    if logits.shape[:2] != inputs["input_ids"].shape:
        raise ConfigError(
            f"a packed forward pass needs a value per token; {type(transformers_model(model)).__name__} gave "
            f"{tuple(logits.shape)} for {inputs['input_ids'].shape[1]} tokens; use a language model or token "
            f"classification head"
        )
    return _joined(model, logits[0], packed)


def sequence_scores(model: nn.Module, packed: PackedBatch) -> Tensor:
    """Return the (B,) scores of a sequence classifier with one label, at the last token of every sequence.

    The model's own pooling assumes one sequence per row, so a hook reads the scores of all tokens before it.
    """
    head = getattr(transformers_model(model), "score", None)
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"{type(transformers_model(model)).__name__} has no module 'score' to read packed sequences' scores "
            f"from; use a model of AutoModelForSequenceClassification whose head scores every token"
        )
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        with packed_attention(model, packed) as inputs:
            model(**inputs)
    finally:
        handle.remove()
    num_tokens = inputs["input_ids"].shape[1]
    if len(seen) != 1 or seen[0].shape != (1, num_tokens, 1):
        raise ConfigError(
            f"{type(transformers_model(model)).__name__} scored {[tuple(scores.shape) for scores in seen]} and not "
            f"each of {num_tokens} tokens once; use a model of AutoModelForSequenceClassification, num_labels=1"
        )
    return _joined(model, seen[0][0], packed)[packed.cu_seqlens[1:].long() - 1, 0]


def token_logprobs(
    model: nn.Module,
    packed: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_collision: bool = False,
    only_responses: bool = False,
) -> TokenStatistics:
    """Return for every token its log-probability given the tokens of its sequence before it.

    The value is zero for the first token of a sequence. With ``only_responses`` it is zero for every token outside
    ``response_mask``. The model computes no logits for those if its class supports ``logits_to_keep``.

    Args:
        temperature: Divisor of the logits, as in sampling.
        with_entropy: Whether to also return the entropy (nats) of each token's distribution.
        with_collision: Whether to also return the log-probability that two draws from it are equal.
    """
    targets = own_targets(model, packed, packed.counted_places if only_responses else packed.predicted_places)
    logits = predicting_logits(model, packed, targets)
    chosen = selected_logprobs(logits, packed.input_ids[0, targets], temperature=temperature, with_entropy=with_entropy)
    collision = collision_logprobs(logits, temperature=temperature) if with_collision else None
    found = (chosen.logprobs, chosen.entropy, collision)
    logprobs, *optional = (None if v is None else scatter_values(model, packed, targets, v) for v in found)
    assert logprobs is not None, "they are always computed"
    return TokenStatistics(logprobs, *optional)


def own_targets(model: nn.Module, packed: PackedBatch, targets: Tensor) -> Tensor:
    """Return the (K,) positions ``targets`` of tokens, without those that other context-parallel ranks predict."""
    division = row_division(transformers_model(model), packed)
    # A rank waits here for its device once per pack: only there is it known how many tokens the rank predicts.
    return targets if division is None else targets[division.own(packed.predecessors[targets])]


def scatter_values(model: nn.Module, packed: PackedBatch, targets: Tensor, values: Tensor) -> Tensor:
    """Return (N,) values from those of the tokens at (K,) `own_targets`, of all ranks; zero elsewhere."""
    tokens = token_group(transformers_model(model))
    row = values.new_zeros(packed.num_tokens).index_copy(0, targets, values)
    return row if tokens is None else sum_values(row, tokens)


def _joined(model: nn.Module, values: Tensor, packed: PackedBatch) -> Tensor:
    """Return the (N, ...) values of all tokens from the (n, ...) of those that this rank runs."""
    division = row_division(transformers_model(model), packed)
    return values if division is None else division.join(values)


def predicting_logits(model: nn.Module, packed: PackedBatch, targets: Tensor) -> Tensor:
    """Return the (K, V) logits that predict the tokens at the (K,) positions ``targets``, see `own_targets`.

    A model whose class supports ``logits_to_keep`` computes no others. More than `TILE_ELEMENTS` are `DeferredLogits`,
    which are computed in tiles. If tensor parallelism cuts the head over the vocabulary, the result is
    `VocabParallelLogits`.
    """
    hf_model, places = transformers_model(model), packed.predecessors[targets]
    if (division := row_division(hf_model, packed)) is not None:
        places = division.local(places)
    head: nn.Module | None = hf_model.get_output_embeddings()
    with packed_attention(model, packed) as inputs, _memory_saving_head(head, len(places)):
        if _keeps_logits(hf_model):
            return select_rows(model(**inputs, logits_to_keep=places).logits, 0)
        return select_rows(select_rows(model(**inputs).logits, 0), places)


def _memory_saving_head(head: nn.Module | None, num_rows: int) -> contextlib.AbstractContextManager[None]:
    """Make a head return `DeferredLogits` if they are many, and `VocabParallelLogits` if it is cut over them."""
    if head is None or not is_tiled(num_rows, _num_columns(head), _trained_width(head)):
        return vocab_parallel_output(head)

    def call(states: Tensor) -> Tensor:
        with vocab_parallel_output(head):
            logits: Tensor = head(states)
        return logits

    return deferred_head(head, call, num_columns=_num_columns(head))


def _num_columns(head: nn.Module) -> int:
    """Return the logits per token that a rank computes, at most; 0 for a head of unknown size or without weights."""
    num_tokens = getattr(head, "out_features", None)
    has_weights = any(True for _ in head.parameters())  # not a placeholder for another pipeline stage's head
    return math.ceil(num_tokens / num_vocabulary_shards(head)) if isinstance(num_tokens, int) and has_weights else 0


def _trained_width(head: nn.Module) -> int:
    """Return the width of a head's input if a backward pass needs gradients of its whole weight, else 0."""
    weight = getattr(head, "weight", None)
    is_trained = torch.is_grad_enabled() and isinstance(weight, Tensor) and weight.requires_grad
    return int(weight.shape[-1]) if is_trained and isinstance(weight, Tensor) else 0


def predicting_states(model: nn.Module, packed: PackedBatch) -> Tensor:
    """Return the (N, D) last hidden states that predict each token; zero for the first token of a sequence.

    The head itself runs on one token only, if the model's class supports ``logits_to_keep``.
    """
    hf_model = transformers_model(model)
    head: nn.Module = hf_model.get_output_embeddings()
    seen: list[Tensor] = []
    read: list[Tensor] = []
    handles = (
        hf_model.base_model.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0])),
        head.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0])),
    )
    try:
        with packed_attention(model, packed) as inputs:
            last = packed.predecessors.new_tensor([inputs["input_ids"].shape[1] - 1])
            if _keeps_logits(hf_model):
                model(**inputs, logits_to_keep=last)
            else:
                model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != 1 or len(read) != 1 or not torch.equal(seen[0][0, -1], read[0][0, -1]):
        raise ConfigError(
            f"{type(hf_model).__name__} does not pass its last hidden states to its head unchanged; use a model that "
            f"does, or log-probabilities of sampled tokens (divergence='sampled')"
        )
    states = _joined(model, seen[0][0], packed)
    has_predecessor = packed.predecessors != torch.arange(packed.num_tokens, device=states.device)
    return torch.where(has_predecessor[:, None], states[packed.predecessors], 0.0)


def route_tokens(model: nn.Module, packed: PackedBatch) -> None:
    """Run a pack for what its routers count: the head runs on one token only, if the model's class supports it."""
    hf_model = transformers_model(model)
    with packed_attention(model, packed) as inputs:
        last = packed.predecessors.new_tensor([inputs["input_ids"].shape[1] - 1])
        model(**inputs, **({"logits_to_keep": last} if _keeps_logits(hf_model) else {}))


def _keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters
