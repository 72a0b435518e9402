"""Encode samples, and spans of their keys and values, as bytes that travel between ranks.

The random numbers of a sample depend on its id and the position alone, so no generator state travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.runtime.messages import codec

_FIELDS = (
    "sample_id", "prompt_index", "max_new_tokens", "key", "token_ids", "logprobs", "model_mask", "finish_reason",
    "error",
)  # fmt: skip
"""Fields of a sample that travel as they are."""


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Rank whose call a sample belongs to, and its place there."""

    rank: int
    index: int
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


@dataclass(frozen=True, slots=True)
class KVSpan:
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
    info = {
        "samples": [_state(each) for each in samples],
        "spans": [[span.begin, span.end] for span in spans],
        "shapes": list(shapes),
    }
    return codec.encode_message(info, _contents(spans))


def unpack_samples(blob: Tensor) -> tuple[list[MigratedSample], list[KVSpan], list[LayerShape]]:
    """Return the arguments of :func:`pack_samples`."""
    info, contents = codec.decode_message(blob)
    samples = [_migrated(state) for state in info["samples"]]
    return samples, _spans(info["spans"], contents), [LayerShape(*shape) for shape in info["shapes"]]


def _contents(spans: Sequence[KVSpan]) -> dict[str, Samples]:
    if not spans:
        return {}
    lengths = torch.tensor([span.content.numel() for span in spans])
    values = torch.cat([span.content for span in spans])
    return {"kv": Samples(torch.tensor([span.sample_id for span in spans]), {"kv": Ragged(values, lengths)})}


def _spans(bounds: Sequence[Sequence[int]], contents: Mapping[str, Samples]) -> list[KVSpan]:
    if not bounds:
        return []
    samples = contents["kv"]
    column = samples.ragged("kv")
    pieces = torch.split(column.values, column.lengths.tolist())
    return [
        KVSpan(sample_id, begin, end, piece)
        for sample_id, (begin, end), piece in zip(samples.ids.tolist(), bounds, pieces, strict=True)
    ]


def _state(migrated: MigratedSample) -> dict[str, Any]:
    sample, origin = migrated.sample, migrated.origin
    return {name: getattr(sample, name) for name in _FIELDS} | {
        "prompt": list(sample.prompt),
        "num_read": sample.num_read,
        "num_sent": migrated.num_sent,
        "origin": [origin.rank, origin.index, origin.prompt_number],
    }


def _migrated(state: Mapping[str, Any]) -> MigratedSample:
    origin = SampleOrigin(*state["origin"])
    known: dict[str, Any] = {name: state[name] for name in _FIELDS}
    sample = Sample(prompt_number=origin.prompt_number, prompt=tuple(state["prompt"]), **known)
    sample.num_read = state["num_read"]
    return MigratedSample(origin, sample, state["num_sent"])
