"""Connections of a pipeline stage that generates: commands of the last stage, and hidden states from stage to stage.

The last stage decides what all stages run. Its commands are plain data and go to the host memory of the others; hidden
states go to the next stage as in `pipeline`. Nothing waits for a receiver, so several steps can be under way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_realloc.runtime.messages.bulk_messages import wait_for
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value
from lightning_realloc.runtime.parallel.pipeline import PipelineStage
from lightning_realloc.runtime.parallel.stage import StageIO

_TAG = 3
"""Tag of commands in the host group, whose lower tags belong to the mailbox, and higher ones to bulk messages."""
_FRAME_BYTES = 8192
"""Size of a command's first frame: 8 bytes for the content's size, and its beginning. Most commands are shorter."""
_LENGTH_BYTES = 8
_MAX_COMMANDS = 32
"""Commands whose memory is kept before the oldest is waited for. A stage has received all but the last few."""


class StageLink:
    """Connects a stage with the others of its pipeline during generations.

    Args:
        stage: This rank's stage.
        host_group: All ranks, over gloo.
        record: Gets the seconds of waiting for commands; None: nothing reads them.
    """

    def __init__(self, stage: PipelineStage, host_group: dist.ProcessGroup, record: FlightRecord | None = None) -> None:
        self._stage, self._group = stage, host_group
        self._record = record or FlightRecord()
        self._sent: deque[tuple[list[dist.Work], Tensor]] = deque()

    @property
    def io(self) -> StageIO:
        """Input and output of the stage's forward passes."""
        return self._stage.io

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return self._stage.count

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which commands the others."""
        return self._stage.is_last

    def begin(self) -> None:
        """Start a generation, on all stages."""
        self._stage.begin()

    def end(self) -> None:
        """Wait until the other stages have received everything."""
        self._stage.after.settle()
        while self._sent:
            self._wait(self._sent.popleft()[0])

    def command(self, value: Any) -> None:
        """Send plain data to all other stages without waiting."""
        content = encode_value(value)
        first = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        framed = len(content).to_bytes(_LENGTH_BYTES, "big") + content[: _FRAME_BYTES - _LENGTH_BYTES]
        first[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        frames = [first]
        if rest := content[_FRAME_BYTES - _LENGTH_BYTES :]:
            frames.append(torch.frombuffer(rest, dtype=torch.uint8))
        for frame in frames:
            works = [self._isend(frame, rank) for rank in self._stage.ranks[:-1]]
            self._sent.append((works, frame))
        while len(self._sent) > _MAX_COMMANDS:
            self._wait(self._sent.popleft()[0])

    def receive_command(self) -> Any:
        """Wait for the next command of the last stage. Raises RankLost if that rank has ended."""
        begin, source = time.monotonic(), self._stage.ranks[-1]
        first = self._receive(_FRAME_BYTES, source)
        size = int.from_bytes(first[:_LENGTH_BYTES], "big")
        rest = size - (_FRAME_BYTES - _LENGTH_BYTES)
        content = first[_LENGTH_BYTES : _LENGTH_BYTES + size]
        if rest > 0:
            content += self._receive(rest, source)
        self._record.add_wait(time.monotonic() - begin)
        return decode_value(content)

    def receive_states(self, num_tokens: int) -> Tensor | None:
        """Return the (1, N, D) hidden states of the previous stage; None on the first stage."""
        return self._stage.before.receive((1, num_tokens, self.io.width))

    def send_states(self, num_tokens: int) -> None:
        """Send the hidden states of the last forward to the next stage, if there is one."""
        if not self.is_last:
            self._stage.after.post(self._stage.take_output((1, num_tokens, self.io.width)))

    def receive_bytes(self, like: Tensor) -> Tensor:
        """Return a tensor like this one from the previous stage, after hidden states; ``like`` on the first stage."""
        dtype = self._stage.before.dtype
        if dtype is None:
            return like
        received = self._stage.before.receive((-(-like.nbytes // dtype.itemsize),))
        assert received is not None, "a stage whose messages have a dtype has one before it"
        return received.view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)

    def send_bytes(self, values: Tensor) -> None:
        """Send a tensor to the next stage, if there is one, after the hidden states of the same tokens."""
        dtype = self._stage.after.dtype
        if dtype is not None:
            content = values.contiguous().view(-1).view(torch.uint8)
            self._stage.after.post(F.pad(content, (0, -len(content) % dtype.itemsize)).view(dtype))

    def largest(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Return the largest value over this stage and those before it of each number; after a forward of all stages.

        So the last stage gets those of all.
        """
        own = torch.tensor(numbers, device=device)
        largest = torch.maximum(own, self.receive_bytes(own))
        self.send_bytes(largest)
        found: list[int] = largest.tolist()
        return found

    def _isend(self, frame: Tensor, rank: int) -> dist.Work:
        return cast(dist.Work, dist.isend(frame, rank, group=self._group, tag=_TAG))

    def _receive(self, size: int, source: int) -> bytes:
        frame = torch.empty(size, dtype=torch.uint8)
        self._wait([cast(dist.Work, dist.irecv(frame, source, group=self._group, tag=_TAG))])
        return frame.numpy().tobytes()

    @staticmethod
    def _wait(works: list[dist.Work]) -> None:
        for work in works:
            wait_for(work, meanwhile="the stages of a pipeline exchanged commands")
