"""All-reduce of small CPU tensors in shared memory, for ranks of one host.

Decoding under tensor parallelism sums a few kilobytes twice per layer and token, where gloo's latency dominates. Shared
memory takes at most a tenth of the time. Callers use the process group for tensors that are not accepted.
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
MAX_CHUNKS = 4
"""Most slot-sized chunks of a tensor. For larger ones sockets are as fast, and ring algorithms send less."""


class SharedMemoryAllReduce:
    """Sums small CPU tensors over the ranks of a group on one host; results are bitwise equal on every rank.

    Every rank writes into its own slot, sets a flag, waits for the others' flags and adds all slots in rank order. Two
    sets of slots alternate. When a rank writes into a set, all ranks have started the sum after the set's last use, so
    none still reads it. bfloat16 is added in float32 and rounded once.
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
        """Return an all-reduce over ``group``, or None if its ranks cannot share memory. Collective over the group.

        The reason for None is logged. ``deadline_s`` limits the wait for another rank, in seconds.
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
        """Return whether `sum_` accepts this tensor; equal on all ranks for equal shape and dtype."""
        return (
            tensor.dtype in _DTYPES
            and tensor.device.type == "cpu"
            and tensor.numel() * tensor.dtype.itemsize <= MAX_CHUNKS * self.max_bytes
        )

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over the group and return it. Every rank passes the same shape and dtype.

        Raises ReallocError for a tensor that `accepts` rejects, and if a rank does not call before the deadline.
        """
        if not self.accepts(tensor):
            raise ReallocError(
                f"sums in shared memory take float32 or bfloat16 CPU tensors of at most {MAX_CHUNKS * self.max_bytes} "
                f"bytes, got {tensor.dtype} on {tensor.device} with {tensor.numel()} elements; use the process group"
            )
        size = self.max_bytes // tensor.dtype.itemsize
        if tensor.numel() <= size:
            return self._sum_chunk(tensor)
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        for chunk in torch.split(whole.view(-1), size):
            self._sum_chunk(chunk)
        return whole if whole is tensor else tensor.copy_(whole)

    def _sum_chunk(self, tensor: Tensor) -> Tensor:
        count = tensor.numel()
        self._turn ^= 1
        slots = [slot[:count].view(tensor.shape) for slot in self._slots[tensor.dtype][self._turn]]
        slots[self._index].copy_(tensor)
        self._barrier.wait()
        with torch.no_grad():
            total = tensor.copy_(slots[0]) if tensor.dtype == torch.float32 else slots[0].float()
            for slot in slots[1:]:  # from first to last, so that all ranks round alike
                total.add_(slot)
            return total if total is tensor else tensor.copy_(total)
