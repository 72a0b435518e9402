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


class ExpectedTensor(NamedTuple):
    """Messages under way, of which one arrives."""

    works: list[dist.Work]
    memory: list[Tensor]
    """Tensors that are sent and that arrive, in this order."""
    device: torch.device
    """Where the arriving tensor is needed."""

    def wait(self) -> Tensor:
        """Wait for the messages, once, and return the tensor that arrives."""
        _wait(self.works)
        return self.memory[-1].to(self.device)


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
        self._posted: deque[tuple[list[dist.Work], Tensor]] = deque()
        """Messages of `post` that may be under way, with their memory."""

    def post(self, outgoing: Tensor) -> None:
        """Send ``outgoing`` without waiting until it is received. It must not change afterwards."""
        if self._rank is None:
            return
        works, memory = self._start(outgoing, None)
        self._posted.append((works, memory[0]))
        if len(self._posted) > _MAX_POSTED:
            _wait(self._posted.popleft()[0])

    def start_receive(self, shape: tuple[int, ...], outgoing: Tensor | None = None) -> ExpectedTensor:
        """Start to receive a tensor of ``shape``, in the same exchange as ``outgoing`` is sent."""
        works, memory = self._start(outgoing, shape)
        return ExpectedTensor(works, memory, self._device)

    def receive(self, shape: tuple[int, ...]) -> Tensor | None:
        """Return the next tensor, of ``shape``; None without a rank."""
        return None if self._rank is None else self.start_receive(shape).wait()

    def settle(self) -> None:
        """Wait until all messages of `post` are received."""
        while self._posted:
            _wait(self._posted.popleft()[0])

    def _start(self, outgoing: Tensor | None, shape: tuple[int, ...] | None) -> tuple[list[dist.Work], list[Tensor]]:
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
        return dist.batch_isend_irecv(operations), memory

    def _agree_on_dtype(self, outgoing: Tensor | None) -> torch.dtype:
        code = torch.zeros(1, dtype=torch.int64, device=self._wire_device)
        if outgoing is not None:
            code.fill_(_DTYPES.index(outgoing.dtype))
        operation = dist.irecv if outgoing is None else dist.isend
        _wait(dist.batch_isend_irecv([dist.P2POp(operation, code, cast(int, self._rank), self._group)]))
        return _DTYPES[int(code.item())]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
