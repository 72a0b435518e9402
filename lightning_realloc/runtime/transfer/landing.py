"""Memory of a host in which versions of weights land, counters of its ranks, and the thread that receives.

Each rank lands its own messages, and reads those that it needs, also other ranks'. A slot holds one version, and is
filled again once all readers have taken that.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from threading import Thread
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import RankLost
from lightning_realloc.runtime.messages.bulk_messages import wait_for
from lightning_realloc.runtime.messages.failure_store import CHECK_S, raise_failure_elsewhere
from lightning_realloc.runtime.transfer.shared_memory import HEADER_BYTES, SharedSegment, member_word, process_exists
from lightning_realloc.runtime.transfer.version_frames import HostFrames

_log = logging.getLogger(__name__)

MOVING = "weights were on their way to or from it"
"""What was under way, for the message about a lost rank."""
FOLLOWS, ENDS = 1, 0
"""Values of the header before each message: a version follows, or the stream ends."""
_LANDED, _TAKEN, _STATE, _PROCESS = range(4)
_OPEN, _ENDED, _FAILED = range(3)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 2e-3
_ANY_TIME = timedelta(days=365)
"""Gloo's own timeout would end a stream on which no version comes for long."""


class HostMemory:
    """Slots for versions, and counters of the ranks that read them.

    Args:
        frames: What lands in a slot, and its readers, of which this rank is one.
        segment: Memory of `HostFrames.required_bytes` that all readers have mapped; None: this rank is alone.
    """

    def __init__(self, frames: HostFrames, segment: SharedSegment | None) -> None:
        assert segment is not None or len(frames.readers) == 1, "several ranks share a segment"
        shape = (frames.required_bytes,)
        memory = torch.zeros(shape, dtype=torch.uint8) if segment is None else segment.tensor(0, shape, torch.uint8)
        self.slots = memory.split(frames.num_bytes)
        """(bytes,) uint8 tensors, each for one version."""
        self._words = memoryview(bytearray(HEADER_BYTES)).cast("q") if segment is None else segment.words
        self._lines = {reader: member_word(index) for index, reader in enumerate(frames.readers)}
        self._mine = self._lines[frames.rank]
        self._words[self._mine + _PROCESS] = os.getpid()

    def has_landed(self, count: int, receivers: Sequence[int]) -> bool:
        """Return whether ``count`` versions, or the stream's end, have reached these ranks. Raises RankLost."""
        states = [self._words[self._lines[receiver] + _STATE] for receiver in receivers]
        if _FAILED in states:
            raise RankLost(f"a rank ended while {MOVING}: rank {receivers[states.index(_FAILED)]} cannot receive them")
        landed = (self._words[self._lines[receiver] + _LANDED] for receiver in receivers)
        return all(number >= count or state == _ENDED for number, state in zip(landed, states, strict=True))

    def has_ended(self, count: int, receivers: Sequence[int]) -> bool:
        """Return whether the stream ended on one of these ranks before it had ``count`` versions."""
        lines = [self._lines[receiver] for receiver in receivers]
        return any(self._words[line + _STATE] == _ENDED and self._words[line + _LANDED] < count for line in lines)

    def record_landed(self) -> None:
        """Let the readers read one more version of this rank's messages."""
        self._words[self._mine + _LANDED] += 1

    def record_taken(self) -> None:
        """Say that this rank reads no more in the oldest version that it had not taken."""
        self._words[self._mine + _TAKEN] += 1

    def record_end(self, *, has_failed: bool) -> None:
        """Say that no version follows on this rank."""
        self._words[self._mine + _STATE] = _FAILED if has_failed else _ENDED

    def await_taken(self, count: int) -> None:
        """Return once all readers have taken this many versions. Raises as `wait_until`."""
        lines = self._lines.values()
        self.wait_until(
            lambda: all(self._words[line + _TAKEN] >= count for line in lines), what="ranks that take the last weights"
        )

    def wait_until(self, is_met: Callable[[], bool], *, what: str) -> None:
        """Return once a condition is met that depends on other ranks.

        Raises:
            RankLost: if one has failed or ended; ``what`` says what was waited for.
        """
        pause_s, next_check = _FIRST_PAUSE_S, time.monotonic() + CHECK_S
        while not is_met():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if time.monotonic() > next_check:
                self._require_processes(what)
                raise_failure_elsewhere(what)
                next_check = time.monotonic() + CHECK_S

    def _require_processes(self, what: str) -> None:
        for rank, line in self._lines.items():
            process = self._words[line + _PROCESS]  # 0 until it has begun
            if process and not process_exists(process):
                raise RankLost(f"rank {rank} was lost; this rank waited for {what}")


class Landing:
    """Receives this rank's messages into the host's memory, in a thread: whatever the rank computes, weights arrive.

    Other ranks may wait for them, for example to repeat a run from its log, while this one waits for those.

    Args:
        frames: Sender -> the memory of its message in each slot.
        group: All ranks, over gloo.
        tag: Number that no other messages of the group have.
    """

    def __init__(
        self, memory: HostMemory, frames: Mapping[int, Sequence[Tensor]], group: dist.ProcessGroup, tag: int
    ) -> None:
        self._memory, self._frames, self._group, self._tag = memory, frames, group, tag
        self._thread = Thread(target=self._run, name="landing of weights", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return once the thread has ended, after the stream."""
        self._thread.join()

    def _run(self) -> None:
        has_failed = True
        try:
            self._land_all()
            has_failed = False
        except (RankLost, RuntimeError) as error:
            _log.info("no more weights land here: %s", error)  # every reader raises RankLost, also this rank
        finally:
            self._memory.record_end(has_failed=has_failed)

    def _land_all(self) -> None:
        num_slots = len(self._memory.slots)
        for number in itertools.count():
            headers = {sender: torch.zeros(1, dtype=torch.int64) for sender in self._frames}
            self._receive(headers)
            if all(int(header) == ENDS for header in headers.values()):
                return
            self._memory.await_taken(number + 1 - num_slots)
            self._receive({sender: slots[number % num_slots] for sender, slots in self._frames.items()})
            self._memory.record_landed()

    def _receive(self, messages: Mapping[int, Tensor]) -> None:
        works = [
            cast(dist.Work, dist.irecv(memory, sender, group=self._group, tag=self._tag))
            for sender, memory in messages.items()
        ]
        for work in works:
            wait_for(work, _ANY_TIME, meanwhile=MOVING)
