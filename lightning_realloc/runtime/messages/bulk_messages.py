"""How do large messages travel while both ends do something else?

Either end is told of the message by other means, such as a plan that both of them made; it names the message by a
number. Receiving begins at once, and gloo's own threads go on with it. Whether a message is there can be asked: work on
gloo only tells by being waited for, so the last byte of every part is a mark, and a buffer begins without it. Where
memory were to be filled in another order, the mark would come early and `PendingReceive.wait` would take a moment
longer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import RankLost

_FIRST_TAG = 16
"""Those below belong to the mailbox, which has the same group."""
_FIRST_BYTES = 16_384
"""Of a message's first part: 8 for the size of its content, the content's first bytes, and the mark."""
_IN_FIRST = _FIRST_BYTES - 9
_MARK = 0xA5


class PendingReceive:
    """A message on its way to this rank."""

    def __init__(self, group: dist.ProcessGroup, source: int, tag: int) -> None:
        self._group = group
        self._source = source
        self._tag = tag
        self._first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._first_work = self._receive(self._first)
        self._rest_work: dist.Work | None = None
        self._is_open = False
        """Whether the first part was looked into."""

    def has_arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        if not self._is_open:
            if self._first[-1] != _MARK:
                return False
            self._open()
        return self._rest_work is None or bool(self._rest[-1] == _MARK)

    def wait(self) -> Tensor:
        """Return the content, a (bytes,) uint8 tensor on the host, once it has arrived.

        Raises:
            RankLost: if the other end is gone.
        """
        if not self._is_open:
            self._open()
        if self._rest_work is not None:
            _wait(self._rest_work)
            self._rest_work = None  # who waits twice for work on gloo waits for ever
        size = self._size
        head = self._first[8 : 8 + min(size, _IN_FIRST)]
        return torch.cat([head, self._rest[:-1]]) if size > _IN_FIRST else head

    @property
    def _size(self) -> int:
        return int(self._first[:8].view(torch.int64))

    def _open(self) -> None:
        _wait(self._first_work)
        self._is_open = True
        if self._size > _IN_FIRST:
            self._rest = torch.zeros(self._size - _IN_FIRST + 1, dtype=torch.uint8)
            self._rest_work = self._receive(self._rest)

    def _receive(self, part: Tensor) -> dist.Work:
        work = dist.irecv(part, self._source, group=self._group, tag=self._tag)
        assert work is not None, "this rank is part of the group"
        return work


class PendingSend:
    """A message on its way from this rank; it is kept until :meth:`wait` was called."""

    def __init__(self, works: list[dist.Work], parts: list[Tensor], under_way: set[PendingSend]) -> None:
        self._works = works
        self._parts = parts  # work on gloo does not hold the memory that it sends from
        self._under_way = under_way
        under_way.add(self)

    def wait(self) -> None:
        """Return once the message has left for good.

        Raises:
            RankLost: if the other end is gone.
        """
        while self._works:
            _wait(self._works.pop(0))
        self._under_way.discard(self)


class BulkChannel:
    """One rank's large messages; each end names a message by a number that its pair of ranks uses once.

    Args:
        group: All ranks, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: set[PendingSend] = set()

    def send(self, to: int, number: int, content: Tensor) -> PendingSend:
        """Begin to send a (bytes,) uint8 tensor on the host; it must not change any more."""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        first[:8] = torch.tensor([content.numel()]).view(torch.uint8)
        head, tail = content[:_IN_FIRST], content[_IN_FIRST:]
        first[8 : 8 + len(head)] = head
        first[-1] = _MARK
        parts = [first]
        if len(tail):
            parts.append(torch.cat([tail, torch.tensor([_MARK], dtype=torch.uint8)]))
        works = [dist.isend(part, to, group=self._group, tag=_FIRST_TAG + number) for part in parts]
        return PendingSend([work for work in works if work is not None], parts, self._under_way)

    def receive(self, source: int, number: int) -> PendingReceive:
        """Begin to receive what ``source`` sends under this number."""
        return PendingReceive(self._group, source, _FIRST_TAG + number)


def _wait(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RankLost(
            f"a rank ended while something was on its way from or to it ({error}); see its own log"
        ) from error
