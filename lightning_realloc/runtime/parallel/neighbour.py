"""Exchange of hidden states and their gradients with the rank of another pipeline stage."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_POSTED = 4
"""Messages under way before `Neighbour.post` waits for the oldest. More: more memory."""


class _Exchange(NamedTuple):
    """Messages under way."""

    works: list[dist.Work]
    memory: list[Tensor]
    """Tensors that are sent and that arrive, in this order."""


class Neighbour:
    """The rank of another stage. Without a rank, exchanges do nothing.

    Neighbours make matching exchanges in the same order, so none waits forever. One exchange launches its send and
    receive together, as NCCL requires of a pair of ranks.
    """

    def __init__(self, rank: int | None, group: dist.ProcessGroup, device_type: str) -> None:
        self._rank = rank
        self._group = group
        self._device = torch.device(device_type)
        is_gloo = dist.get_backend(group) == "gloo"
        self._wire_device = torch.device("cpu") if is_gloo else self._device  # gloo sends from host memory only
        self.dtype: torch.dtype | None = None
        """Dtype of all messages of the run; None before the first message, which sends it."""
        self._posted: deque[_Exchange] = deque()
        """Messages of `post` that may be under way."""
        self._expected: _Exchange | None = None
        """The exchange in which a tensor arrives; not in `_posted`, since gloo waits forever for a work twice."""

    def post(self, outgoing: Tensor, expected: tuple[int, ...] | None = None) -> None:
        """Send ``outgoing`` without waiting until it is received. It must not change afterwards.

        In the same exchange a tensor of the shape ``expected`` starts to arrive, for the next `receive`.
        """
        if self._rank is None:
            return
        exchange = self._start(outgoing, expected)
        if expected is not None:
            self._expected = exchange
            return
        self._posted.append(exchange)
        if len(self._posted) > _MAX_POSTED:
            self._wait(self._posted.popleft().works)

    def receive(self, shape: tuple[int, ...]) -> Tensor | None:
        """Return the next tensor, of ``shape``; None without a rank. Waits for the one that `post` expects."""
        if self._rank is None:
            return None
        exchange = self._expected or self._start(None, shape)
        self._expected = None
        self._wait(exchange.works)
        return exchange.memory[-1].to(self._device)

    def settle(self) -> None:
        """Wait until all messages of `post` are received."""
        while self._posted:
            self._wait(self._posted.popleft().works)

    def _start(self, outgoing: Tensor | None, shape: tuple[int, ...] | None) -> _Exchange:
        """Start to send, to receive a tensor of ``shape``, or both. None: no message in that direction."""
        if self.dtype is None:
            self.dtype = self._agree_on_dtype(outgoing)
        memory, operations = [], []
        if outgoing is not None:
            memory.append(outgoing.to(self._wire_device).contiguous())
            operations.append(dist.P2POp(dist.isend, memory[-1], self._rank, self._group))
        if shape is not None:
            memory.append(torch.empty(shape, dtype=self.dtype, device=self._wire_device))
            operations.append(dist.P2POp(dist.irecv, memory[-1], self._rank, self._group))
        return _Exchange(dist.batch_isend_irecv(operations), memory)

    def _agree_on_dtype(self, outgoing: Tensor | None) -> torch.dtype:
        code = torch.zeros(1, dtype=torch.int64, device=self._wire_device)
        if outgoing is not None:
            code.fill_(_DTYPES.index(outgoing.dtype))
        operation = dist.irecv if outgoing is None else dist.isend
        self._wait(dist.batch_isend_irecv([dist.P2POp(operation, code, cast(int, self._rank), self._group)]))
        return _DTYPES[int(code.item())]

    @staticmethod
    def _wait(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()
