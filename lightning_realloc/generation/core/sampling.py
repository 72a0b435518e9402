"""Which token comes next, given logits and one uniform number per row (see `noise`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real

import torch
from torch import Tensor

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.filters import Ranking, rankings
from lightning_realloc.generation.core.noise import gumbel_noise
from lightning_realloc.generation.core.repetition import Repeated, penalized
from lightning_realloc.setting_hints import SAMPLING_HINTS, suggest_settings

Forbidden = tuple[Sequence[int], Sequence[int]]
"""Rows of the logits, and the tokens that may not be drawn in them."""

_BLOCK = 512
_LEAST_TEMPERATURE = 1e-30


@suggest_settings(SAMPLING_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How responses are drawn and when they end."""

    max_new_tokens: int = 256
    """Most tokens in one response. The model's context may end it earlier."""
    min_new_tokens: int = 0
    """This many tokens come before a stop token; a stop string that occurs within them is passed over."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Draw among the k most likely tokens; None: among all."""
    top_p: float = 1.0
    """Draw among the fewest most likely tokens whose probabilities, after ``top_k``, reach this sum."""
    min_p: float = 0.0
    """Draw among tokens whose probability is at least this share of the likeliest one's, after ``top_k`` and ``top_p``.

    Source: Nguyen et al., arXiv:2407.01082."""
    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or response hold already are divided by it, or, where negative, multiplied."""
    n: int = 1
    """Responses per prompt."""
    seed: int = 0
    """Of the noise that tokens are drawn with; of 64 bits."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the end-of-sequence tokens of model and tokenizer."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response once they occur in it. The engine needs a tokenizer for these. The space that some
    tokenizers put between prompt and response is the response's."""
    ignore_eos: bool = False
    """True: the end-of-sequence tokens of model and tokenizer do not end a response."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "n", "seed", "top_k"):
            check_kind(name, getattr(self, name), Integral, "a whole number", optional=name == "top_k")
        check_kind("ignore_eos", self.ignore_eos, bool, "True or False")
        _require(-(1 << 63) <= self.seed < 1 << 64, f"seed={self.seed} must lie between -2**63 and 2**64 - 1, 64 bits")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_kind(name, getattr(self, name), Real, "a number")
        _require(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens} must be at least 1")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens={self.min_new_tokens} must lie between 0 and max_new_tokens={self.max_new_tokens}",
        )
        _require(
            self.temperature >= 0 and math.isfinite(self.temperature),
            f"temperature={self.temperature} must be finite and not negative; use 0 for the most likely token",
        )
        _require(
            self.temperature == 0 or self.temperature >= _LEAST_TEMPERATURE,
            f"temperature={self.temperature} is so small that logits over it leave float32; use 0 for the most likely "
            f"token, or at least {_LEAST_TEMPERATURE}",
        )
        _require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k} must be at least 1; use None for no limit")
        _require(0 < self.top_p <= 1, f"top_p={self.top_p} must lie in (0, 1]; use 1 for no limit")
        _require(0 <= self.min_p <= 1, f"min_p={self.min_p} must lie in [0, 1]; use 0 for no limit")
        _require(
            0 < self.repetition_penalty < math.inf,
            f"repetition_penalty={self.repetition_penalty} must be finite and above 0; use 1 for none",
        )
        _require(self.n >= 1, f"n={self.n} responses per prompt must be at least 1")
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, Integral, "ints"))
        object.__setattr__(self, "stop_strings", _as_tuple("stop_strings", self.stop_strings, str, "strings"))
        _require(all(self.stop_strings), "stop_strings must not hold an empty string; it would end every response")
        halves = [string for string in self.stop_strings if any("\ud800" <= c <= "\udfff" for c in string)]
        _require(
            not halves,
            f"stop_strings {halves!r} can never occur: they hold halves of characters (surrogates), and tokenizers "
            "decode to whole ones; write the characters themselves, or leave them out",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out by their rank, for which their probabilities are sorted."""
        return self.top_k is not None or self.top_p < 1.0

    @property
    def penalizes(self) -> bool:
        """Whether what a sequence holds already makes tokens less, or more, likely to be drawn."""
        return self.repetition_penalty != 1.0


def check_kind(name: str, given: object, kind: type | tuple[type, ...], wanted: str, *, optional: bool = False) -> None:
    """Raise GenerationError where ``given`` is not of this kind, nor None where that is one of the choices.

    2.5 tokens pass every comparison, and fail in the middle of a batch.
    """
    if not (is_of_kind(given, kind) or (optional and given is None)):
        raise GenerationError(f"{name}={given!r} must be {wanted}{' or None' if optional else ''}")


def is_of_kind(given: object, kind: type | tuple[type, ...]) -> bool:
    """Return whether something is of a kind; True and False are no numbers, though Python takes them for 1 and 0."""
    return isinstance(given, kind) and (not isinstance(given, bool) or kind is bool)


def check_counts(kind: type = Integral, *, optional: bool = False, **counts: object) -> None:
    """Raise GenerationError for the first that is no number of at least 1, nor None where it is optional."""
    for name, count in counts.items():
        check_kind(name, count, kind, "a whole number" if kind is Integral else "a number", optional=optional)
        _require(count is None or count >= 1, f"{name}={count} must be at least 1")  # type: ignore[operator]
        way_out = "; use None for no bound" if optional else ""
        _require(count is None or math.isfinite(count), f"{name}={count} must be finite{way_out}")  # type: ignore[arg-type]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise GenerationError(message)


def _as_tuple(name: str, given: object, kind: type, kinds: str) -> tuple[object, ...]:
    """Return a list or tuple of one kind as a tuple; a string alone would pass for one stop string per letter."""
    if isinstance(given, list | tuple) and all(isinstance(item, kind) for item in given):
        return tuple(given)
    way_out = f"write {(given,)!r}" if isinstance(given, kind) else "use () for none"
    raise GenerationError(f"{name}={given!r} must be a tuple of {kinds}; {way_out}")


class Scratch:
    """Memory for numbers of every token, used again in every step: fresh pages cost more than what is computed in them.

    Holds two float32 for every logit of the largest step yet.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor) -> Tensor:
        """Return a float32 tensor in the shape of ``like``, of any content, until the next call with this name."""
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

    The log-probability is that of ``softmax(logits / temperature)`` over the whole vocabulary, which is what a trainer
    recomputes from the same tokens; top-k, top-p, min-p, forbidden and ``repeated`` tokens change what is drawn and not
    what is reported.
    At temperature 0 it is that of ``softmax(logits)``.
    """
    scratch = scratch or Scratch()
    scaled = _tempered(logits, params, scratch)
    if forbidden is None and repeated is None:
        probabilities = torch.softmax(scaled, -1, dtype=torch.float32, out=scratch.take("probabilities", scaled))
        tokens = _draw(probabilities, uniforms, params)
        return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()
    # Without the forbidden tokens the others may be all that is left of a probability that float32 rounds to 0.
    drawn_from = _changed(scaled, params, forbidden, repeated)
    tokens = _draw(torch.softmax(drawn_from, -1, dtype=torch.float32), uniforms, params)
    return tokens, _logprobs_of(scaled, tokens)


def sampling_logprobs(logits: Tensor, tokens: Tensor, params: SamplingParams) -> Tensor:
    """Return what :func:`sample_tokens` reports (N,) for ``tokens`` (N,) of ``logits`` (N, V)."""
    return _logprobs_of(_tempered(logits, params), tokens)


def sampling_weights(
    logits: Tensor, params: SamplingParams, *, forbidden: Forbidden | None = None, repeated: Repeated | None = None
) -> Tensor:
    """Return the distribution (B, V) float32 that tokens are drawn from: all of its mass on one at temperature 0."""
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


def draw_weights(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return a token (B,) per row of ``weights`` (B, V), in proportion to them; ``uniforms`` (B,) float64."""
    return _invert_softmax(weights, uniforms)


def draw_gumbel(weights: Tensor, keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return a token (B,) per row of ``weights`` (B, V), in proportion to them, by the largest noisy logarithm.

    Source: Gumbel-max, as in Maddison, Tarlow, Minka, arXiv:1411.0030, section 2.
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
    """Return what tokens are drawn by; a penalty is the same on logits and on logits over a temperature."""
    if repeated is not None:
        scaled = penalized(scaled, repeated, params.repetition_penalty)
    return scaled if forbidden is None else _without(scaled, forbidden)


def _without(scaled: Tensor, forbidden: Forbidden) -> Tensor:
    rows, banned = (torch.as_tensor(part, device=scaled.device) for part in forbidden)
    return scaled.index_put((rows[:, None], banned), scaled.new_tensor(float("-inf")))


def _logprobs_of(scaled: Tensor, tokens: Tensor) -> Tensor:
    return torch.log_softmax(scaled, -1, dtype=torch.float32).gather(1, tokens[:, None])[:, 0]


def _draw(weights: Tensor, uniforms: Tensor, params: SamplingParams) -> Tensor:
    if params.greedy:
        return weights.argmax(-1)
    if not params.truncates:
        return _invert_softmax(_above_floor(weights, params), uniforms)
    tokens = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
    for ranking in _rankings(weights, params):
        # In the order of the vocabulary: rounding changes the ranks of tokens that weigh about the same.
        candidates, kept = ranking.kept_by_token()
        tokens[ranking.rows] = candidates.gather(1, _invert_softmax(kept, uniforms[ranking.rows])[:, None])[:, 0]
    return tokens


def _rankings(weights: Tensor, params: SamplingParams) -> Iterator[Ranking]:
    return rankings(weights, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def _above_floor(weights: Tensor, params: SamplingParams) -> Tensor:
    """Return the weights, zero below min-p of the largest."""
    if params.min_p == 0.0:
        return weights
    return weights.masked_fill(weights < params.min_p * weights.amax(-1, keepdim=True), 0.0)


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Return per row the first index whose cumulative weight exceeds ``uniform * total``: never one of zero weight.

    There is one: in float64 the product of ``total`` with a number of at most 1 - 2**-53 rounds to less than ``total``.
    """
    point = uniforms * cumulative[:, -1]
    # Of weights that are not finite none exceeds it: their log-probability tells the caller.
    return torch.searchsorted(cumulative, point[:, None], right=True)[:, 0].clamp_max(cumulative.shape[1] - 1)


def _invert_softmax(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return `_invert` of the running sum over the vocabulary, by way of sums over blocks of it where it is large.

    `torch.multinomial` draws V exponentials a row on CPU, ten times the cost of this; a float64 running sum over
    the whole row costs almost as much, unless the row is short.
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
    # What is left of the uniform inside the block, again in [0, 1) up to rounding.
    rest = ((uniforms * ends[:, -1] - begin) / mass).clamp(0.0, 1.0 - 2.0**-53)
    # Behind the last token, only where weights are not finite: such rows end in what filled the last block up.
    return (block * width + _invert(inside, rest)).clamp_max(vocabulary - 1)


@cache
def _block_width(vocabulary: int) -> int:
    """Return a width that divides the vocabulary, since padding copies every row; the preferred one if none does."""
    divisors = [width for width in range(_BLOCK // 4, 4 * _BLOCK + 1) if vocabulary % width == 0]
    return min(divisors, key=lambda width: (abs(math.log(width / _BLOCK)), width), default=_BLOCK)
