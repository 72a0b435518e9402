"""Seconds to send one iteration's data from the ranks that make it to the ranks that need it.

512 samples of 2,048 tokens pass through PPO's calls under a plan, with made-up results, by the strategy's own exchange.
The floor is one message of the same bytes for each pair of ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import gather_from_ranks
from lightning_realloc import ExecutionPlan, ModelFunctionCall
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.strategies.exchange.iteration_data import IterationData
from lightning_realloc.strategies.exchange.routing import CallPlacement, Routes

PROMPT_TOKENS = RESPONSE_TOKENS = 1024
PER_TOKEN = ("behaviour_logprobs", "ref_logprobs", "values", "advantages", "returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTurn:
    """Cost of moving one iteration's data, over all ranks."""

    seconds: float
    """Seconds of the slowest rank, sending and waiting."""
    floor_s: float
    """Seconds of one message for each pair of ranks with the same bytes."""
    bytes_sent: int
    bytes_minimum: int
    """Bytes that ranks needed and did not make, each datum once."""


class CountingMailbox(Mailbox):
    """Counts the bytes of rows sent to each rank."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup) -> None:
        super().__init__(rank, world_size, group)
        self.sent: Counter[int] = Counter()

    def send(self, to: Iterable[int], kind: FrameKind, run: int, call: int, content: Tensor, *, part: int = 0) -> None:
        """Send, and count."""
        to = tuple(to)
        if kind == FrameKind.ROWS:
            self.sent.update(dict.fromkeys(to, content.numel()))
        super().send(to, kind, run, call, content, part=part)


def move_data(
    calls: Sequence[ModelFunctionCall], plan: Mapping[str, Any], *, num_samples: int = 512, turns: int = 5
) -> DataTurn:
    """Pass through the calls ``turns`` times, and return the medians. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    walk = _Walk(calls, ExecutionPlan.from_mapping(plan), num_samples)
    mailbox = CountingMailbox(rank, world_size, dist.new_group(backend="gloo"))
    seconds, floor_s = [], []
    for run in range(turns + 1):  # the first pass connects the ranks
        mailbox.sent.clear()
        dist.barrier()
        walk.take(mailbox, run)
        mailbox.release(run)
        seconds.append(walk.seconds)
        dist.barrier()
        floor_s.append(_send_at_once(mailbox.sent, world_size, rank))
    parts = gather_from_ranks((seconds[1:], floor_s[1:], mailbox.sent.total(), walk.bytes_needed()))
    return DataTurn(
        seconds=median(map(max, zip(*(part[0] for part in parts), strict=True))),
        floor_s=median(map(max, zip(*(part[1] for part in parts), strict=True))),
        bytes_sent=sum(part[2] for part in parts),
        bytes_minimum=sum(part[3] for part in parts),
    )


@dataclass(slots=True)
class _Walk:
    """Pass of one rank through the calls, with made-up results."""

    calls: Sequence[ModelFunctionCall]
    plan: ExecutionPlan
    num_samples: int
    seconds: float = 0.0
    """Seconds spent on data in the last pass."""
    _made: dict[str, set[int]] = field(default_factory=dict)
    """Column -> ids of the samples that this rank made."""
    _used: dict[str, set[int]] = field(default_factory=dict)
    _row_bytes: dict[str, int] = field(default_factory=dict)

    def take(self, mailbox: Mailbox, run: int) -> None:
        """Pass through all calls once."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        places = {
            call.name: CallPlacement(
                layout=self.plan.layout(call.name), micro_batch_tokens=8192, train_options=TrainOptions(),
                order_seeds=(0,),
            )
            for call in self.calls if call.role is not None
        }  # fmt: skip
        data = IterationData(
            _prompts(self.num_samples), Routes(self.calls, places, world_size), mailbox, rank=rank, run=run
        )
        self.seconds = 0.0
        self._made, self._used = {}, {}
        for call in self.calls:
            takes_part = call.kind == "compute" or rank in places[call.name].layout
            begin = time.perf_counter()
            rows = data.inputs(call) if takes_part else None
            self.seconds += time.perf_counter() - begin
            if rows is not None and call.kind != "generate":
                self._note(self._used, rows)
            made = self._make(call, rows)
            begin = time.perf_counter()
            data.record(call, made)
            self.seconds += time.perf_counter() - begin

    def bytes_needed(self) -> int:
        """Return the bytes that this rank needed in the last pass and had not made."""
        return sum(len(ids - self._made.get(name, set())) * self._row_bytes[name] for name, ids in self._used.items())

    def _make(self, call: ModelFunctionCall, rows: Samples | None) -> Samples | None:
        if rows is None or call.kind == "train":
            return None
        count = len(rows)
        lengths = torch.full((count,), RESPONSE_TOKENS)
        columns: dict[str, Column] = {}
        if call.kind == "generate":
            tokens = torch.zeros(count * RESPONSE_TOKENS, dtype=torch.int64)
            columns = {"prompt_id": rows.ids, "prompt_ids": rows["prompt_ids"], "response_ids": Ragged(tokens, lengths)}
        for name in ("behaviour_logprobs",) if call.kind == "generate" else call.produces:
            is_ragged = name in PER_TOKEN
            columns[name] = Ragged(torch.zeros(count * RESPONSE_TOKENS), lengths) if is_ragged else torch.zeros(count)
        made = Samples(rows.ids, columns)
        self._note(self._made, made)
        return made

    def _note(self, noted: dict[str, set[int]], rows: Samples) -> None:
        for name, column in rows.columns.items():
            if isinstance(column, Ragged):  # all ranks receive values per sample at once
                noted.setdefault(name, set()).update(rows.ids.tolist())
                self._row_bytes[name] = column.values.nbytes // len(rows)


def _prompts(count: int) -> Samples:
    tokens = torch.zeros(count * PROMPT_TOKENS, dtype=torch.int64)
    return Samples(torch.arange(count), {"prompt_ids": Ragged(tokens, torch.full((count,), PROMPT_TOKENS))})


def _send_at_once(sent: Mapping[int, int], world_size: int, rank: int) -> float:
    """Return the seconds of this rank's traffic in the last pass, as plain messages."""
    sizes = [torch.zeros(world_size, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([sent.get(other, 0) for other in range(world_size)]))
    outgoing = {other: torch.zeros(sent[other], dtype=torch.uint8) for other in sent if sent[other]}
    coming = {o: torch.zeros(int(sizes[o][rank]), dtype=torch.uint8) for o in range(world_size) if sizes[o][rank]}
    dist.barrier()
    begin = time.perf_counter()
    work = [dist.isend(content, other) for other, content in outgoing.items()]
    work += [dist.irecv(room, other) for other, room in coming.items()]
    for one in work:
        assert one is not None
        one.wait()
    return time.perf_counter() - begin
