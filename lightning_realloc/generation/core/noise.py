"""Counter-based random numbers: pure functions of (seed, sample id, position).

A sample's randomness so does not depend on its batch, slot, rank or drafts. The generator is SplitMix64. Source:
Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_FEW = 20
"""Numbers below which a loop is faster than numpy arrays."""


def sample_key(seed: int, sample_id: int) -> int:
    """Return the 64-bit key of a sample's stream of random numbers."""
    return _mix(_mix(seed & _MASK) ^ (sample_id & _MASK))


def stream_key(key: int, stream: int) -> int:
    """Return the key of another stream of the same sample."""
    return _mix(key ^ _mix(stream))


def keyed_uniform(key: int, position: int) -> float:
    """Return a number in [0, 1), a multiple of 2**-53, that depends on key and position only."""
    return (_mix((key + position * _WEYL) & _MASK) >> 11) * 2.0**-53


def keyed_uniforms(keys: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Return :func:`keyed_uniform` of each key and position."""
    if len(keys) < _FEW:
        return [keyed_uniform(key, position) for key, position in zip(keys, positions, strict=True)]
    states = np.array(keys, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(_WEYL)
    numbers: list[float] = ((_mix_array(states) >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def uniforms_on(device: torch.device, keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return :func:`keyed_uniforms` as (N,) float64 on a device, queued behind its work: the host does not wait."""
    return torch.tensor(keyed_uniforms(keys, positions), dtype=torch.float64).to(device, non_blocking=True)


def gumbel_noise(keys: Sequence[int], positions: Sequence[int], tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise (B, K) float64 for ``tokens`` (B, K), with one key and position per row."""
    states = [_mix((key + position * _WEYL) & _MASK) for key, position in zip(keys, positions, strict=True)]
    places = torch.tensor([_signed(state) for state in states], dtype=torch.int64, device=tokens.device)
    bits = _mix_tensor(places[:, None] + tokens * _signed(_WEYL))
    # The middle of one of 2**53 equal intervals; 0 and 1 would give infinite noise.
    uniforms = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -(-uniforms.log()).log()


def _mix(value: int) -> int:
    value = (value + _WEYL) & _MASK
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `_mix` of each value; products wrap around."""
    values = values + np.uint64(_WEYL)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FACTORS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return values ^ (values >> np.uint64(31))


def _mix_tensor(values: Tensor) -> Tensor:
    """Return `_mix` of unsigned 64-bit values held as int64; products wrap around alike."""
    values = values + _signed(_WEYL)
    values = (values ^ _shifted(values, 30)) * _signed(_FACTORS[0])
    values = (values ^ _shifted(values, 27)) * _signed(_FACTORS[1])
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return int64 values shifted right, filled with zeros like unsigned ones."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
