"""Exchange of hidden states and their gradients with the rank of another pipeline stage."""

from __future__ import annotations

from collections import deque
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_POSTED = 4
"""Messages under way before `Neighbour.post` waits for the oldest. More: more memory."""


class Neighbour:
    """The rank of another stage. Without a rank, exchanges do nothing.

    Every exchange waits until it is done. Neighbours make matching exchanges in this schedule, so none waits forever.
    One exchange launches its send and receive together, as NCCL requires of a pair of ranks.
    """

    def __init__(self, rank: int | None, group: dist.ProcessGroup, device_type: str) -> None:
        self._rank = rank
        self._group = group
        self._device = torch.device(device_type)
        is_gloo = dist.get_backend(group) == "gloo"
        self._wire_device = torch.device("cpu") if is_gloo else self._device  # gloo sends from host memory only
        self.dtype: torch.dtype | None = None
        """Dtype of all messages of the run; None before the first message, which sends it."""
        self._posted: deque[tuple[list[dist.Work], Tensor]] = deque()
        """Messages of `post` that may be under way, with their memory."""

    def exchange(self, outgoing: Tensor | None, shape: tuple[int, ...] | None) -> Tensor | None:
        """Send ``outgoing`` and return a received tensor of ``shape``. None means no message in that direction."""
        if self._rank is None or (outgoing is None and shape is None):
            return None
        if self.dtype is None:
            self.dtype = self._agree_on_dtype(outgoing)
        incoming = None
        operations = []
        if outgoing is not None:
            sent = outgoing.to(self._wire_device).contiguous()
            operations.append(dist.P2POp(dist.isend, sent, self._rank, self._group))
        if shape is not None:
            incoming = torch.empty(shape, dtype=self.dtype, device=self._wire_device)
            operations.append(dist.P2POp(dist.irecv, incoming, self._rank, self._group))
        self._run(operations)
        return None if incoming is None else incoming.to(self._device)

    def post(self, outgoing: Tensor) -> None:
        """Send ``outgoing`` without waiting until it is received. It must not change afterwards."""
        if self._rank is None:
            return
        if self.dtype is None:
            self.dtype = self._agree_on_dtype(outgoing)
        sent = outgoing.to(self._wire_device).contiguous()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, self._rank, self._group)])
        self._posted.append((works, sent))
        if len(self._posted) > _MAX_POSTED:
            self._wait(self._posted.popleft()[0])

    def settle(self) -> None:
        """Wait until all messages of `post` are received."""
        while self._posted:
            self._wait(self._posted.popleft()[0])

    def _agree_on_dtype(self, outgoing: Tensor | None) -> torch.dtype:
        code = torch.zeros(1, dtype=torch.int64, device=self._wire_device)
        if outgoing is not None:
            code.fill_(_DTYPES.index(outgoing.dtype))
        operation = dist.irecv if outgoing is None else dist.isend
        self._run([dist.P2POp(operation, code, cast(int, self._rank), self._group)])
        return _DTYPES[int(code.item())]

    def _run(self, operations: list[dist.P2POp]) -> None:
        self._wait(dist.batch_isend_irecv(operations))

    @staticmethod
    def _wait(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()
