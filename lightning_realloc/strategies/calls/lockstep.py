"""Keep ranks in step during a generation whose forward passes are collective."""

from __future__ import annotations

import torch
import torch.distributed as dist

_IDLE, _WORKING, _FAILED = range(3)


class PeerFailure(Exception):
    """Another rank of the group failed; it reports the cause."""


class Lockstep:
    """Agrees before every step of a generation, on all ranks of a group, whether any of them still has work.

    Args:
        group: The ranks whose forward passes wait for each other.
        device: A device that the group can communicate from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._others_wait = False

    def begin(self) -> None:
        """Start a generation, in which every rank agrees on at least one step."""
        self._others_wait = True

    def __call__(self, has_work: bool) -> bool:
        """Return whether any rank has work. Raises PeerFailure if another rank gave up. Collective over the group."""
        status = self._agree(_WORKING if has_work else _IDLE)
        self._others_wait = status == _WORKING
        if status == _FAILED:
            raise PeerFailure
        return status == _WORKING

    def give_up(self) -> None:
        """Report a failure to the ranks that wait for this rank's next step."""
        if self._others_wait:
            self._agree(_FAILED)
            self._others_wait = False

    def _agree(self, status: int) -> int:
        self._status.fill_(status)
        dist.all_reduce(self._status, op=dist.ReduceOp.MAX, group=self._group)
        return int(self._status.item())
