"""How do large messages travel while both ends do something else?

Either end is told of the message by other means, such as a plan that both of them made; it names the message by a tag.
A thread waits for every message, since work on gloo cannot be asked whether it is over, only waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import ReallocError

_FIRST_TAG = 16
"""Those below belong to the mailbox, which has the same group."""


class Journey:
    """One message on its way."""

    def __init__(self, carry: Callable[[], Tensor]) -> None:
        """Let ``carry`` run in a thread until it returns what travelled."""
        self._carry = carry
        self._over = threading.Event()
        self._content: Tensor | None = None
        self._error: RuntimeError | None = None
        self.seconds = 0.0
        """From its begin to its end, once it is over."""
        threading.Thread(target=self._run, name="freight", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set()

    def wait(self) -> Tensor:
        """Return the content, a (bytes,) uint8 tensor on the host, once it has arrived, or has left for good.

        Raises:
            ReallocError: if the other end is gone.
        """
        self._over.wait()
        if self._error is not None:
            raise ReallocError(
                f"a rank ended while samples were on their way ({self._error}); see its own log"
            ) from self._error
        assert self._content is not None, "a journey ends with its content or with an error"
        return self._content

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            self._content = self._carry()
        except RuntimeError as error:
            self._error = error
        self.seconds = time.perf_counter() - begin
        self._over.set()


class Freight:
    """One rank's large messages; each end names a message by a number that its pair of ranks uses once.

    Args:
        group: All ranks, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, to: int, number: int, content: Tensor) -> Journey:
        """Begin to send a (bytes,) uint8 tensor on the host; it must not change any more."""
        size = torch.tensor([content.numel()])
        parts = [size, content] if content.numel() else [size]
        works = [dist.isend(part, to, group=self._group, tag=_FIRST_TAG + number) for part in parts]

        def carry() -> Tensor:
            for work in works:
                assert work is not None, "this rank is part of the group"
                work.wait()
            return content

        return Journey(carry)

    def receive(self, source: int, number: int) -> Journey:
        """Begin to receive what ``source`` sends under this number."""
        size = torch.empty(1, dtype=torch.int64)
        work = dist.irecv(size, source, group=self._group, tag=_FIRST_TAG + number)

        def carry() -> Tensor:
            assert work is not None, "this rank is part of the group"
            work.wait()
            content = torch.empty(int(size), dtype=torch.uint8)
            if content.numel():
                dist.recv(content, source, group=self._group, tag=_FIRST_TAG + number)
            return content

        return Journey(carry)
