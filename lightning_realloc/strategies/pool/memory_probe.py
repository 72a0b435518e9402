"""Probe whether every device has room for the next step, by an allocation: memory is shared and fragmented.

A rank that runs out of memory during a move leaves the others waiting in it. So all ranks allocate before the move
begins. The allocator keeps the block, and the move's tensors come out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_realloc.errors import PlanError
from lightning_realloc.runtime.messages.objects import gather_objects


def allocate_once(num_bytes: int, device: torch.device) -> None:
    """Allocate bytes and free them. Raises torch.cuda.OutOfMemoryError if there is no room."""
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def require_free_memory(
    num_bytes: int,
    device: torch.device,
    *,
    what: str,
    way_out: str = "use a plan that moves fewer roles or cuts them more, or offload",
    take: Callable[[int, torch.device], Any] = allocate_once,
) -> None:
    """Refuse a step that some rank has no room for. Does nothing on CPU. Collective over all ranks.

    Raises:
        PlanError: on every rank, naming the first rank without room.
    """
    if device.type == "cpu":
        return
    has_room = True
    try:
        take(num_bytes, device)
    except torch.cuda.OutOfMemoryError:
        has_room = False
    answers = gather_objects((has_room, num_bytes))
    without = [(rank, size) for rank, (has, size) in enumerate(answers) if not has]
    if without:
        rank, size = without[0]
        raise PlanError(
            f"{what} needs {size / 2**20:.0f} MiB more on rank {rank}, and its device has no room; {way_out}"
        )
