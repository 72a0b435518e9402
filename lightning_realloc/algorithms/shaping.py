"""What do rewards say about length? That a response comes too close to the most tokens it may have."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_realloc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """A penalty that grows with every token beyond a length, instead of a sudden end.

    Source: Yu et al., arXiv:2503.14476, eq. 13.
    """

    max_tokens: int
    """Tokens from which on the penalty is whole; at most ``sampling.max_new_tokens``, or it is never whole."""
    margin: int
    """Tokens before that in which it grows from 0."""
    weight: float = 1.0
    """The whole penalty."""

    def __post_init__(self) -> None:
        if not 0 < self.margin <= self.max_tokens:
            raise ConfigError(f"margin={self.margin} must lie above 0 and up to max_tokens={self.max_tokens}")
        if not self.weight > 0:
            raise ConfigError(f"weight={self.weight} must be positive; leave the penalty out instead")

    def rewards(self, num_tokens: Tensor) -> Tensor:
        """Return (B,) float32 between ``-weight`` and 0 for responses of (B,) tokens."""
        beyond = num_tokens.float() - (self.max_tokens - self.margin)
        return -self.weight * (beyond / self.margin).clamp(0.0, 1.0)
