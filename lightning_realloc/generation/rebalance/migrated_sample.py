"""Samples on their way between ranks, as bytes: first the bulk of their keys and values, then what came since.

A sample's randomness needs no state: it is keyed by sample and position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.generation.cache.kv_cache import LayerShape
from lightning_realloc.generation.core.sample import FinishReason, Sample
from lightning_realloc.runtime.messages.codec import decode_message, encode_message


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Where a sample was asked for."""

    rank: int
    index: int
    """Its place in that rank's call."""
    prompt_number: int
    """Of its prompt, there."""


@dataclass(frozen=True, slots=True)
class MigratedSample:
    """A sample that changes its rank, or comes back to its origin."""

    origin: SampleOrigin
    sample: Sample
    num_sent: int = 0
    """KVSpan whose keys and values the bulk holds; 0: its tokens alone travel."""


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Keys and values of some positions of one sample."""

    sample_id: int
    begin: int
    end: int
    content: Tensor
    """(bytes,) uint8, as `SlotCache.read` returns them."""


def encode_kv_span(parts: Sequence[KVSpan], shapes: Sequence[LayerShape]) -> Tensor:
    """Return the bulk of a shipment."""
    return encode_message({"shapes": list(shapes), "spans": _spans(parts)}, _contents(parts))


def decode_kv_span(blob: Tensor) -> tuple[list[KVSpan], list[LayerShape]]:
    """Return what :func:`encode_kv_span` was given."""
    info, contents = decode_message(blob)
    return _positions(info["spans"], contents), [LayerShape(*shape) for shape in info["shapes"]]


def encode_samples(travellers: Sequence[MigratedSample], parts: Sequence[KVSpan] = ()) -> Tensor:
    """Return the samples and the positions that came since the bulk."""
    states = [_state(traveller) for traveller in travellers]
    return encode_message({"samples": states, "spans": _spans(parts)}, _contents(parts))


def decode_samples(blob: Tensor) -> tuple[list[MigratedSample], list[KVSpan]]:
    """Return what :func:`encode_samples` was given."""
    info, contents = decode_message(blob)
    return [_traveller(state) for state in info["samples"]], _positions(info["spans"], contents)


def _spans(parts: Sequence[KVSpan]) -> list[list[int]]:
    return [[part.begin, part.end] for part in parts]


def _contents(parts: Sequence[KVSpan]) -> dict[str, Samples]:
    if not parts:
        return {}
    lengths = torch.tensor([part.content.numel() for part in parts])
    values = torch.cat([part.content for part in parts])
    return {"kv": Samples(torch.tensor([part.sample_id for part in parts]), {"kv": Ragged(values, lengths)})}


def _positions(spans: Sequence[Sequence[int]], contents: Mapping[str, Samples]) -> list[KVSpan]:
    if not spans:
        return []
    samples = contents["kv"]
    column = samples.ragged("kv")
    pieces = torch.split(column.values, column.lengths.tolist())
    return [
        KVSpan(sample_id, begin, end, piece)
        for sample_id, (begin, end), piece in zip(samples.ids.tolist(), spans, pieces, strict=True)
    ]


def _state(traveller: MigratedSample) -> dict[str, Any]:
    sample, origin = traveller.sample, traveller.origin
    return {
        "origin": [origin.rank, origin.index, origin.prompt_number],
        "num_sent": traveller.num_sent,
        "sample_id": sample.sample_id,
        "prompt_index": sample.prompt_index,
        "prompt": list(sample.prompt),
        "max_new_tokens": sample.max_new_tokens,
        "key": sample.key,
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "model_mask": sample.model_mask,
        "num_read": sample.num_read,
        "finish_reason": sample.finish_reason,
        "error": sample.error,
    }


def _traveller(state: Mapping[str, Any]) -> MigratedSample:
    origin = SampleOrigin(*state["origin"])
    reason: FinishReason | None = state["finish_reason"]
    sample = Sample(
        state["sample_id"], origin.prompt_number, tuple(state["prompt"]), state["max_new_tokens"], state["key"],
        state["token_ids"], state["logprobs"], state["model_mask"], finish_reason=reason, error=state["error"],
        prompt_index=state["prompt_index"],
    )  # fmt: skip
    sample.num_read = state["num_read"]
    return MigratedSample(origin, sample, state["num_sent"])
