"""Sampling parameters, and checks of numbers that users give to an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from lightning_realloc.errors import GenerationError
from lightning_realloc.setting_hints import SAMPLING_HINTS, suggest_settings

_LEAST_TEMPERATURE = 1e-30
"""Smallest positive temperature: logits over a smaller one leave float32."""


@suggest_settings(SAMPLING_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How responses are sampled and when they end."""

    max_new_tokens: int = 256
    """Most tokens of one response. The model's context may end it earlier."""
    min_new_tokens: int = 0
    """Number of first tokens among which no stop token is drawn and stop strings are ignored."""
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Sample from the k most likely tokens; None: from all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities, after ``top_k``, sum to this."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the most likely one's probability, after ``top_k`` and ``top_p``.

    Source: Nguyen et al., arXiv:2407.01082.
    """
    repetition_penalty: float = 1.0
    """Divisor of the logits of tokens that the sequence holds already; negative logits are multiplied by it."""
    n: int = 1
    """Responses per prompt."""
    seed: int = 0
    """64-bit seed of the random numbers."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the end-of-sequence tokens of model and tokenizer."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response once it contains them; the engine needs a tokenizer for these. A space that the
    tokenizer puts between prompt and response counts as the response's."""
    ignore_eos: bool = False
    """Whether the end-of-sequence tokens of model and tokenizer do not end a response."""

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
        """Whether tokens are dropped by rank, which needs sorted probabilities."""
        return self.top_k is not None or self.top_p < 1.0

    @property
    def penalizes(self) -> bool:
        """Whether a repetition penalty applies."""
        return self.repetition_penalty != 1.0


def check_kind(name: str, given: object, kind: type | tuple[type, ...], wanted: str, *, optional: bool = False) -> None:
    """Raise GenerationError unless ``given`` is of this kind, or None if ``optional``.

    A float such as 2.5 passes every comparison of integers, and would fail in the middle of a batch.
    """
    if not (is_of_kind(given, kind) or (optional and given is None)):
        raise GenerationError(f"{name}={given!r} must be {wanted}{' or None' if optional else ''}")


def is_of_kind(given: object, kind: type | tuple[type, ...]) -> bool:
    """Return whether ``given`` is of a kind; unlike in Python, True and False are not numbers."""
    return isinstance(given, kind) and (not isinstance(given, bool) or kind is bool)


def check_counts(kind: type = Integral, *, optional: bool = False, least: int = 1, **counts: object) -> None:
    """Raise GenerationError for the first that is no finite number of at least ``least``, or None if ``optional``."""
    for name, count in counts.items():
        check_kind(name, count, kind, "a whole number" if kind is Integral else "a number", optional=optional)
        _require(count is None or count >= least, f"{name}={count} must be at least {least}")  # type: ignore[operator]
        way_out = "; use None for no bound" if optional else ""
        _require(count is None or math.isfinite(count), f"{name}={count} must be finite{way_out}")  # type: ignore[arg-type]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise GenerationError(message)


def _as_tuple(name: str, given: object, kind: type, kinds: str) -> tuple[object, ...]:
    """Return a list or tuple of one kind as a tuple; refuse a single string, which would pass as one per letter."""
    if isinstance(given, list | tuple) and all(isinstance(item, kind) for item in given):
        return tuple(given)
    way_out = f"write {(given,)!r}" if isinstance(given, kind) else "use () for none"
    raise GenerationError(f"{name}={given!r} must be a tuple of {kinds}; {way_out}")
