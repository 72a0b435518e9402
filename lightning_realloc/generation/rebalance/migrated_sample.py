"""Encode samples, and spans of their keys and values, as bytes that travel between ranks.

The random numbers of a sample depend on its id and the position alone, so no generator state travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.runtime.messages import codec

_FIELDS = (
    "sample_id", "prompt_index", "max_new_tokens", "key", "token_ids", "logprobs", "model_mask", "finish_reason",
    "error",
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
        (
            [getattr(each.sample, name) for name in _FIELDS],
            (each.sample.prompt, each.sample.input.prompt_key),
            each.sample.num_read,
            each.num_sent,
            each.origin,
        )
        for each in samples
    ]
    info = {"samples": states, "spans": [span[:3] for span in spans], "shapes": shapes}
    contents = Ragged.from_list([span.content for span in spans], dtype=torch.uint8)
    tensors = {"kv": Samples(torch.arange(len(spans)), {"kv": contents})}
    for place, each in enumerate(samples):
        if each.sample.input.extras:
            tensors[f"extras {place}"] = _as_samples(each.sample.input.extras)
    return codec.encode_message(info, tensors)


def unpack_samples(blob: Tensor) -> tuple[list[MigratedSample], list[KVSpan], list[LayerShape]]:
    """Return the arguments of :func:`pack_samples`."""
    info, contents = codec.decode_message(blob)
    samples = []
    for place, (fields, (tokens, key), num_read, num_sent, origin_fields) in enumerate(info["samples"]):
        origin, extras = SampleOrigin(*origin_fields), contents.get(f"extras {place}")
        given = ModelInput(tuple(tokens), {} if extras is None else _as_tensors(extras), key)
        sample = Sample(prompt_number=origin.prompt_number, input=given, **dict(zip(_FIELDS, fields, strict=True)))
        sample.num_read = num_read
        samples.append(MigratedSample(origin, sample, num_sent))
    pieces = zip(info["spans"], contents["kv"].ragged("kv").split(), strict=True)
    spans = [KVSpan(sample_id, begin, end, piece) for (sample_id, begin, end), piece in pieces]
    return samples, spans, [LayerShape(*shape) for shape in info["shapes"]]


def _as_samples(extras: Mapping[str, Tensor]) -> Samples:
    """Return the further inputs of one sample as columns."""
    columns = {name: Ragged(values, torch.tensor([len(values)])) for name, values in extras.items()}
    return Samples(torch.arange(1), columns)


def _as_tensors(extras: Samples) -> dict[str, Tensor]:
    """Return the argument of `_as_samples`."""
    return {name: extras.ragged(name).values for name in extras.columns}
