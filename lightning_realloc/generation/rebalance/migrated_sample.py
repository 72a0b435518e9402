"""Encode samples, and spans of their keys and values, as bytes that travel between ranks.

The random numbers of a sample depend on its id and the position alone, so no generator state travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.runtime.messages import codec

_FIELDS = (
    "sample_id", "prompt", "prompt_index", "max_new_tokens", "key", "token_ids", "logprobs", "model_mask",
    "finish_reason", "error",
)  # fmt: skip
"""Fields of a sample that travel as they are."""


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
    states = [
        ([getattr(each.sample, name) for name in _FIELDS], each.sample.num_read, each.num_sent, each.origin)
        for each in samples
    ]
    info = {"samples": states, "spans": [span[:3] for span in spans], "shapes": shapes}
    contents = Ragged.from_list([span.content for span in spans], dtype=torch.uint8)
    return codec.encode_message(info, {"kv": Samples(torch.arange(len(spans)), {"kv": contents})})


def unpack_samples(blob: Tensor) -> tuple[list[MigratedSample], list[KVSpan], list[LayerShape]]:
    """Return the arguments of :func:`pack_samples`."""
    info, contents = codec.decode_message(blob)
    samples = []
    for fields, num_read, num_sent, origin_fields in info["samples"]:
        origin = SampleOrigin(*origin_fields)
        sample = Sample(prompt_number=origin.prompt_number, **dict(zip(_FIELDS, fields, strict=True)))
        sample.prompt, sample.num_read = tuple(sample.prompt), num_read
        samples.append(MigratedSample(origin, sample, num_sent))
    pieces = zip(info["spans"], contents["kv"].ragged("kv").split(), strict=True)
    spans = [KVSpan(sample_id, begin, end, piece) for (sample_id, begin, end), piece in pieces]
    return samples, spans, [LayerShape(*shape) for shape in info["shapes"]]
