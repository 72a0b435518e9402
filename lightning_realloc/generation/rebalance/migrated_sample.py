"""Encode samples, and spans of their keys and values, as bytes that travel between ranks.

The random numbers of a sample depend on its id and the position alone, so no generator state travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.runtime.messages.codec import decode_message, encode_message


class SampleOrigin(NamedTuple):
    """Rank whose call a sample belongs to, and its place there."""

    rank: int
    place: int
    """Index among the samples of that rank's call."""
    prompt_number: int
    """Number of its prompt on that rank."""


@dataclass(frozen=True, slots=True)
class MigratedSample:
    """A sample that changes its rank or returns to its origin."""

    origin: SampleOrigin
    sample: Sample
    num_sent: int = 0
    """Positions whose keys and values travelled ahead; 0: only the tokens travel."""


class KVSpan(NamedTuple):
    """Keys and values of consecutive positions of one sample."""

    sample_id: int
    begin: int
    end: int
    content: Tensor
    """(bytes,) uint8, as `SlotCache.read` returns it."""


def pack_samples(
    samples: Sequence[MigratedSample] = (), spans: Sequence[KVSpan] = (), shapes: Sequence[LayerShape] = ()
) -> Tensor:
    """Return samples, spans and the shapes of the cache's layers as (bytes,) uint8."""
    states = [(each, each.sample.num_read) for each in samples]
    return encode_message((states, list(spans), list(shapes)))


def unpack_samples(blob: Tensor) -> tuple[list[MigratedSample], list[KVSpan], list[LayerShape]]:
    """Return the arguments of :func:`pack_samples`; samples have the prompt's number on the rank of their origin."""
    states, spans, shapes = decode_message(blob)
    for each, num_read in states:
        each.sample.num_read, each.sample.prompt_number = num_read, each.origin.prompt_number
    return [each for each, _ in states], spans, shapes
