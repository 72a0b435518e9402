"""Draw the next token from logits and one uniform number per row (see `noise`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from lightning_realloc.generation.core.filters import Ranking, rankings
from lightning_realloc.generation.core.noise import gumbel_noise
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.step import Forbidden

Repeated = tuple[Tensor, Tensor]
"""Rows of the logits (M,), and tokens (M,) that the sequences before them hold."""

_BLOCK = 512
"""Preferred width of the blocks that a row's running sum is split into."""


class Scratch:
    """Reusable float32 buffers: writing to fresh pages costs more than the computation.

    Holds two float32 for each logit of the largest step so far.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor) -> Tensor:
        """Return a float32 tensor of the shape of ``like``, uninitialized and valid until the next call with this
        name."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < like.numel() or kept.device != like.device:
            kept = self._kept[name] = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return kept[: like.numel()].view(like.shape)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    params: SamplingParams,
    *,
    forbidden: Forbidden | None = None,
    repeated: Repeated | None = None,
    scratch: Scratch | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row (B,) int64 and its log-probability (B,) float32.

    ``logits`` is (B, V) in any floating dtype, ``uniforms`` (B,) float64 in [0, 1).

    The log-probability is that of ``softmax(logits / temperature)`` over the whole vocabulary, which a trainer
    recomputes from the same tokens. At temperature 0 it is that of ``softmax(logits)``. Filters, ``forbidden`` and
    ``repeated`` change which tokens are drawn, but not the log-probability.
    """
    scratch = scratch or Scratch()
    scaled = _tempered(logits, params, scratch)
    if forbidden is None and repeated is None:
        probabilities = torch.softmax(scaled, -1, dtype=torch.float32, out=scratch.take("probabilities", scaled))
        tokens = _draw(probabilities, uniforms, params)
        return tokens, _log_of(probabilities, tokens)
    # Mask before the softmax: float32 may round the remaining tokens' probabilities to 0.
    drawn_from = _changed(scaled, params, forbidden, repeated)
    probabilities = torch.softmax(drawn_from, -1, dtype=torch.float32)
    tokens = _draw(probabilities, uniforms, params)
    logprobs = _logprobs_of(scaled, tokens)
    if forbidden is not None and repeated is None:
        # Other rows keep the bits that they have without this one.
        is_free = torch.ones_like(tokens, dtype=torch.bool)
        is_free[torch.as_tensor(forbidden[0], device=tokens.device)] = False
        logprobs = torch.where(is_free, _log_of(probabilities, tokens), logprobs)
    return tokens, logprobs


def sampling_logprobs(logits: Tensor, tokens: Tensor, params: SamplingParams) -> Tensor:
    """Return the log-probabilities (N,) as `sample_tokens` reports them, for ``tokens`` (N,) and ``logits`` (N, V)."""
    return _logprobs_of(_tempered(logits, params), tokens)


def sampling_weights(
    logits: Tensor, params: SamplingParams, *, forbidden: Forbidden | None = None, repeated: Repeated | None = None
) -> Tensor:
    """Return the distribution (B, V) float32 that tokens are drawn from; at temperature 0 it is one-hot."""
    drawn_from = _changed(_tempered(logits, params), params, forbidden, repeated)
    weights = torch.softmax(drawn_from, -1, dtype=torch.float32)
    if params.greedy:
        return torch.zeros_like(weights).scatter_(1, weights.argmax(-1, keepdim=True), 1.0)
    if not params.truncates:
        weights = _above_floor(weights, params)
        return weights / weights.sum(-1, keepdim=True) if params.min_p > 0.0 else weights
    law = torch.empty_like(weights)
    for ranking in _rankings(weights, params):
        kept = ranking.kept_weights()
        law[ranking.rows] = kept / kept.sum(-1, keepdim=True)
    return law


def draw_gumbel(weights: Tensor, keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return a token (B,) per row in proportion to ``weights`` (B, V), by the Gumbel-max trick.

    Source: Maddison, Tarlow, Minka, arXiv:1411.0030, section 2.
    """
    tokens = torch.arange(weights.shape[1], device=weights.device).expand(len(keys), -1)
    return (weights.double().log() + gumbel_noise(keys, positions, tokens)).argmax(-1)


def _tempered(logits: Tensor, params: SamplingParams, scratch: Scratch | None = None) -> Tensor:
    if params.temperature in (0.0, 1.0):
        return logits
    if scratch is None:
        return logits.float() / params.temperature
    return scratch.take("tempered", logits).copy_(logits).div_(params.temperature)


def _changed(scaled: Tensor, params: SamplingParams, forbidden: Forbidden | None, repeated: Repeated | None) -> Tensor:
    """Return the logits that tokens are drawn by; dividing by a temperature commutes with the penalty."""
    if repeated is not None:
        scaled = _penalized(scaled, repeated, params.repetition_penalty)
    if forbidden is None:
        return scaled
    rows, banned = (torch.as_tensor(part, device=scaled.device) for part in forbidden)
    return scaled.index_put((rows, banned), scaled.new_tensor(float("-inf")))


def _penalized(logits: Tensor, repeated: Repeated, penalty: float) -> Tensor:
    """Return the logits (B, V) in float32; repeated tokens' are divided by ``penalty`` if positive, else multiplied.

    Source: Keskar et al., arXiv:1909.05858, section 4.1, as in transformers' ``RepetitionPenaltyLogitsProcessor``.
    """
    rows, tokens = repeated
    values = logits[rows, tokens].float()
    values = torch.where(values < 0, values * penalty, values / penalty)
    return logits.float().index_put((rows, tokens), values)


def _log_of(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return the logarithm (B,) of each row's token; in float64, since float32 rounds by the place in the batch."""
    return probabilities.gather(1, tokens[:, None])[:, 0].double().log().float()


def _logprobs_of(scaled: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(scaled, -1, dtype=torch.float32).gather(1, tokens[:, None])[:, 0]


def _draw(weights: Tensor, uniforms: Tensor, params: SamplingParams) -> Tensor:
    if params.greedy:
        return weights.argmax(-1)
    if not params.truncates:
        return draw_weights(_above_floor(weights, params), uniforms)
    tokens = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
    for ranking in _rankings(weights, params):
        # In the order of the vocabulary, because rounding changes the ranks of tokens of nearly equal weight.
        candidates, kept = ranking.kept_by_token()
        tokens[ranking.rows] = candidates.gather(1, draw_weights(kept, uniforms[ranking.rows])[:, None])[:, 0]
    return tokens


def _rankings(weights: Tensor, params: SamplingParams) -> Iterator[Ranking]:
    return rankings(weights, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def _above_floor(weights: Tensor, params: SamplingParams) -> Tensor:
    """Return the weights, zero where they are below min-p times the largest."""
    if params.min_p == 0.0:
        return weights
    return weights.masked_fill(weights < params.min_p * weights.amax(-1, keepdim=True), 0.0)


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Return per row the first index whose cumulative weight exceeds ``uniform * total``; its weight is never zero.

    Such an index exists: in float64, ``total`` times at most 1 - 2**-53 rounds to less than ``total``.
    """
    point = uniforms * cumulative[:, -1]
    # No weight exceeds it if weights are not finite; the log-probability then shows the caller.
    return torch.searchsorted(cumulative, point[:, None], right=True)[:, 0].clamp_max(cumulative.shape[1] - 1)


def draw_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return a token (B,) per row in proportion to ``weights`` (B, V); ``uniforms`` (B,) is float64.

    Long rows are summed by blocks first. On CPU `torch.multinomial` takes ten times as long, because it draws V
    exponentials per row. A float64 running sum over a whole row takes almost as long.
    """
    if weights.shape[1] <= _BLOCK:
        return _invert(weights.cumsum(-1, dtype=torch.float64), uniforms)
    vocabulary = weights.shape[1]
    width = _block_width(vocabulary)
    if vocabulary % width:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % width))
    blocks = weights.view(weights.shape[0], -1, width)
    ends = blocks.sum(-1).double().cumsum(-1)
    block = _invert(ends, uniforms)
    inside = blocks[torch.arange(blocks.shape[0], device=blocks.device), block].double().cumsum(-1)
    begin = ends.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0].where(block > 0, 0.0)
    mass = ends.gather(1, block[:, None])[:, 0] - begin
    # The uniform number's remainder inside the block, again in [0, 1) up to rounding.
    rest = ((uniforms * ends[:, -1] - begin) / mass).clamp(0.0, 1.0 - 2.0**-53)
    # Rows whose weights are not finite may end in the last block's padding.
    return (block * width + _invert(inside, rest)).clamp_max(vocabulary - 1)


@cache
def _block_width(vocabulary: int) -> int:
    """Return the block width that divides the vocabulary and is nearest to the preferred one.

    Other widths would copy every row to pad it.
    """
    divisors = [width for width in range(_BLOCK // 4, 4 * _BLOCK + 1) if vocabulary % width == 0]
    return min(divisors, key=lambda width: (abs(math.log(width / _BLOCK)), width), default=_BLOCK)
