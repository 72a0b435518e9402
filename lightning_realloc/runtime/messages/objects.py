"""What does every rank of a group hold of some small thing, a plan's digest or a problem?"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

_LENGTH_BYTES = 8
_FRAME_BYTES = 4096 - _LENGTH_BYTES
"""What the first message carries of a value; most are shorter."""


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every rank of the group passed, in the group's order. Collective over ``group``.

    Over gloo, small values take one message each where ``all_gather_object`` sends their lengths first.
    """
    if not dist.is_initialized():
        return [value]
    if dist.get_backend(group) != "gloo":
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values
    packed = pickle.dumps(value)
    frames = _gather_bytes(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed[:_FRAME_BYTES], group, _FRAME_BYTES)
    lengths = [int.from_bytes(frame[:_LENGTH_BYTES], "big") for frame in frames]
    rest = max(lengths) - _FRAME_BYTES
    tails = _gather_bytes(packed[_FRAME_BYTES:], group, rest) if rest > 0 else [b""] * len(frames)
    return [pickle.loads((frame[_LENGTH_BYTES:] + tail)[:length])
            for frame, tail, length in zip(frames, tails, lengths, strict=True)]  # fmt: skip


def _gather_bytes(content: bytes, group: dist.ProcessGroup | None, size: int) -> list[bytes]:
    """Return every rank's bytes, padded to ``size``, with room for a length before them."""
    mine = torch.zeros(_LENGTH_BYTES + size, dtype=torch.uint8)
    if content:
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(row.numpy()) for row in everyone]
