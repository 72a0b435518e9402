"""Tensor-parallel ranks as threads of one process, which exchange tensors through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup

Result = TypeVar("Result")
_DEADLINE_S = 30.0


class SimulatedGroup(TensorParallelGroup):
    """One rank's view of the group."""

    def __init__(self, index: int, barrier: threading.Barrier, board: list[Tensor | None]) -> None:
        self.size, self.index = len(board), index
        self.shared_copy = None
        self.num_gathered = 0
        """Number of elements that this rank has received."""
        self._barrier, self._board = barrier, board

    def gather(self, tensor: Tensor) -> Tensor:
        self._board[self.index] = tensor.detach()
        self._barrier.wait()
        gathered = torch.stack([part for part in self._board if part is not None])
        self._barrier.wait()
        self.num_gathered += gathered.numel()
        return gathered


def run_ranks(size: int, function: Callable[[SimulatedGroup], Result]) -> list[Result]:
    """Return ``function(group)`` of every rank."""
    barrier = threading.Barrier(size, timeout=_DEADLINE_S)
    board: list[Tensor | None] = [None] * size
    groups = [SimulatedGroup(index, barrier, board) for index in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(function, groups))
