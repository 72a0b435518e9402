"""How do ranks of one host add up small tensors faster than sockets can?

Decoding under tensor parallelism adds a few kilobytes twice per layer and token, where gloo's latency is all the cost:
shared memory does it in a tenth of the time or less. Whoever calls falls back to the process group where this refuses.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.transfer.shared_memory import FlagBarrier, SharedSegment, share_segment

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
MOST_PIECES = 4
"""Slots' worth of a tensor that is summed piece by piece; beyond, sockets are as fast, and rings send less."""


class SharedMemoryAllReduce:
    """Sums small CPU tensors over the ranks of a group that share a host, to the same bits on every rank.

    Every rank writes into a slot of its own, raises a flag, waits for the others' flags and adds all slots in order of
    rank. There are two sets of slots, used in turn: who writes into a set has seen all ranks begin the sum after the
    one that used this set last, hence nobody still reads it. bfloat16 is added in float32 and rounded once.
    """

    def __init__(
        self, segment: SharedSegment, index: int, names: list[str], *, max_bytes: int, deadline_s: float
    ) -> None:
        self.max_bytes = max_bytes
        self._barrier = FlagBarrier(segment, index, names, deadline_s=deadline_s)
        self._index, self._size = index, len(names)
        self._slots = {
            dtype: [
                [
                    segment.tensor((turn * self._size + member) * max_bytes, (max_bytes // dtype.itemsize,), dtype)
                    for member in range(self._size)
                ]
                for turn in range(2)
            ]
            for dtype in _DTYPES
        }
        self._turn = 0

    @classmethod
    def create(
        cls, group: dist.ProcessGroup | None = None, *, max_bytes: int = 1 << 20, deadline_s: float = 600.0
    ) -> SharedMemoryAllReduce | None:
        """Return the sum over ``group``, None where its ranks cannot share memory. Collective over the group.

        The reason for None is logged. ``deadline_s`` bounds the wait for a rank that does not come.
        """
        max_bytes = -(-max_bytes // 64) * 64
        size = dist.get_world_size(group)
        shared, obstacle = share_segment(2 * size * max_bytes, group=group)
        if shared is None:
            logger.info("small sums go through the process group: %s", obstacle)
            return None
        names = [f"rank {rank}" for rank in dist.get_process_group_ranks(group or dist.group.WORLD)]
        return cls(shared, dist.get_rank(group), names, max_bytes=max_bytes, deadline_s=deadline_s)

    def accepts(self, tensor: Tensor) -> bool:
        """Tell whether `sum_` can add this tensor; the answer is the same on all ranks for the same shape and dtype."""
        return (
            tensor.dtype in _DTYPES
            and tensor.device.type == "cpu"
            and tensor.numel() * tensor.dtype.itemsize <= MOST_PIECES * self.max_bytes
        )

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over the group and return it. Every rank passes the same shape and dtype.

        Raises ReallocError for a tensor that `accepts` refuses and when a rank does not come before the deadline.
        """
        if not self.accepts(tensor):
            raise ReallocError(
                f"sums in shared memory take float32 or bfloat16 CPU tensors of at most {MOST_PIECES * self.max_bytes} "
                f"bytes; got "
                f"{tensor.dtype} on {tensor.device} with {tensor.numel()} elements: use the process group for it"
            )
        size = self.max_bytes // tensor.dtype.itemsize
        if tensor.numel() <= size:
            return self._sum_piece(tensor)
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        for piece in torch.split(whole.view(-1), size):
            self._sum_piece(piece)
        return whole if whole is tensor else tensor.copy_(whole)

    def _sum_piece(self, tensor: Tensor) -> Tensor:
        count = tensor.numel()
        self._turn ^= 1
        slots = [slot[:count].view(tensor.shape) for slot in self._slots[tensor.dtype][self._turn]]
        slots[self._index].copy_(tensor)
        self._barrier.wait()
        return _add_in_order(slots, tensor)


def _add_in_order(slots: list[Tensor], out: Tensor) -> Tensor:
    """Write the sum of ``slots`` into ``out``, first to last: the order, and so the rounding, is everybody's."""
    with torch.no_grad():
        if out.dtype == torch.float32:
            out.copy_(slots[0])
            for slot in slots[1:]:
                out.add_(slot)
            return out
        total = slots[0].float()
        for slot in slots[1:]:
            total.add_(slot)
        return out.copy_(total)
