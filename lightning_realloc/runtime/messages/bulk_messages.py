"""Send and receive large messages in the background.

Both ends identify a message by a number that they know, for example from a common plan. Gloo's threads transfer it. A
message has one or two frames. Gloo's work objects cannot tell whether they are done, so the last element of each frame
is a mark: a frame has arrived once its buffer ends with the mark. If gloo filled the buffer in another order, the mark
would appear early, and waiting for the frame would take a little longer.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import RankLost

_FIRST_TAG = 16
"""First tag of bulk messages. Lower tags belong to the mailbox, which uses the same group."""
_FIRST_FRAME_BYTES = 16_384
"""Size of a message's first frame: 8 bytes for the content's size, the start of the content, and the mark."""
_FIRST_CONTENT_BYTES = _FIRST_FRAME_BYTES - 9
MARK = 0xA5
"""Last element of a frame that has arrived."""
_EXCHANGING = "this one exchanged a message with it"


class FrameReceiver:
    """Receives a first frame and, if that one says so, a second one.

    Args:
        group: All ranks, over gloo.
        source: Rank that sends.
        tag: Tag of both frames.
        meanwhile: What is under way, for the message about a lost rank.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, tag: int, *, meanwhile: str) -> None:
        self._group, self._source, self._tag, self._meanwhile = group, source, tag, meanwhile

    def second_frame(self) -> Tensor | None:
        """Return the memory of the second frame, without a mark, once the first has arrived; None if none follows."""
        raise NotImplementedError

    def start(self, first: Tensor) -> None:
        """Start to receive a message, whose first frame goes into ``first``, a tensor without a mark."""
        self._first, self._second, self._is_open = first, cast(Tensor | None, None), False
        self._works = [self._receive(first)]

    def has_arrived(self) -> bool:
        """Return whether `wait_for_frames` would return at once."""
        if not self._is_open:
            if self._first[-1] != MARK:
                return False
            self._open()
        return self._second is None or bool(self._second[-1] == MARK)

    def wait_for_frames(self) -> None:
        """Return once the message has arrived. Raises RankLost if the other end is gone."""
        if not self._is_open:
            self._open()
        while self._works:  # waiting twice for gloo's work never returns
            wait_for(self._works.pop(), meanwhile=self._meanwhile)

    def _open(self) -> None:
        """Read the first frame, and start to receive the second one."""
        wait_for(self._works.pop(), meanwhile=self._meanwhile)
        self._is_open, self._second = True, self.second_frame()
        if self._second is not None:
            self._works.append(self._receive(self._second))

    def _receive(self, frame: Tensor) -> dist.Work:
        return cast(dist.Work, dist.irecv(frame, self._source, group=self._group, tag=self._tag))


class PendingReceive(FrameReceiver):
    """A message that this rank is receiving."""

    def __init__(self, group: dist.ProcessGroup, source: int, tag: int) -> None:
        super().__init__(group, source, tag, meanwhile=_EXCHANGING)
        self.start(torch.zeros(_FIRST_FRAME_BYTES, dtype=torch.uint8))

    def second_frame(self) -> Tensor | None:
        """See `FrameReceiver`."""
        num_bytes = self._size - _FIRST_CONTENT_BYTES
        return torch.zeros(num_bytes + 1, dtype=torch.uint8) if num_bytes > 0 else None

    def wait(self) -> Tensor:
        """Return the content, a (bytes,) uint8 tensor on the host, once it has arrived.

        Raises:
            RankLost: if the other end is gone.
        """
        self.wait_for_frames()
        head = self._first[8 : 8 + min(self._size, _FIRST_CONTENT_BYTES)]
        return head if self._second is None else torch.cat([head, self._second[:-1]])

    @property
    def _size(self) -> int:
        return int(self._first[:8].view(torch.int64))


class PendingSend:
    """A message that this rank is sending; its memory is kept until `wait` returns."""

    def __init__(self, works: list[dist.Work], frames: list[Tensor], pending: set[PendingSend]) -> None:
        self._works = works
        self._frames = frames  # gloo's work does not keep the memory that it sends from alive
        self._pending = pending
        pending.add(self)

    def wait(self) -> None:
        """Return once the message was sent.

        Raises:
            RankLost: if the other end is gone.
        """
        while self._works:
            wait_for(self._works.pop(0), meanwhile=_EXCHANGING)
        self._pending.discard(self)


class BulkChannel:
    """Sends and receives one rank's large messages. A pair of ranks uses each message number once.

    Args:
        group: All ranks, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: set[PendingSend] = set()

    def send(self, to: int, number: int, content: Tensor) -> PendingSend:
        """Start to send a (bytes,) uint8 tensor on the host, which must not change afterwards."""
        first = torch.zeros(_FIRST_FRAME_BYTES, dtype=torch.uint8)
        first[:8] = torch.tensor([content.numel()]).view(torch.uint8)
        head, tail = content[:_FIRST_CONTENT_BYTES], content[_FIRST_CONTENT_BYTES:]
        first[8 : 8 + len(head)] = head
        first[-1] = MARK
        frames = [first]
        if len(tail):
            frames.append(torch.cat([tail, torch.tensor([MARK], dtype=torch.uint8)]))
        works = [dist.isend(frame, to, group=self._group, tag=_FIRST_TAG + number) for frame in frames]
        return PendingSend([work for work in works if work is not None], frames, self._pending)

    def receive(self, source: int, number: int) -> PendingReceive:
        """Start to receive the message that ``source`` sends under this number."""
        return PendingReceive(self._group, source, _FIRST_TAG + number)


def wait_for(work: dist.Work, timeout: timedelta | None = None, *, meanwhile: str) -> None:
    """Wait for a message. Raises RankLost if the other end is gone; ``meanwhile`` says what was under way."""
    try:
        work.wait(timeout) if timeout is not None else work.wait()
    except RuntimeError as error:
        raise RankLost(f"a rank ended while {meanwhile} ({error}); see its own log") from error
