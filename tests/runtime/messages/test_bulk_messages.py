"""Large messages of any size arrive complete and in any order, in the background."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_realloc.runtime.messages import bulk_messages
from lightning_realloc.runtime.messages.bulk_messages import BulkChannel
from tests.workers import WorkerPool

SIZES = (
    0,
    1,
    bulk_messages._FIRST_CONTENT_BYTES - 1,
    bulk_messages._FIRST_CONTENT_BYTES,
    bulk_messages._FIRST_CONTENT_BYTES + 1,
    3_000_000,
)


def _content(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(0, 256, (SIZES[number],), dtype=torch.uint8, generator=generator)


def _exchange() -> list[bool]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours = BulkChannel(dist.new_group(backend="gloo"))
    others = [other for other in range(world_size) if other != rank]
    numbers = range(len(SIZES))
    for other in others:
        for number in numbers:
            ours.send(other, number, _content(rank, number))
    dist.barrier()
    # These allocations overwrite memory that was freed too early.
    junk = [
        torch.full((size,), 7, dtype=torch.uint8) for size in (*SIZES, 16_384) for _ in range(20)
    ]  # in freed memory
    parcels = {(other, number): ours.receive(other, number) for number in reversed(numbers) for other in others}
    whole = [torch.equal(parcel.wait(), _content(*name)) for name, parcel in parcels.items()]
    whole += [torch.equal(parcel.wait(), _content(*name)) for name, parcel in parcels.items()]  # and once more
    dist.barrier()
    assert junk
    return whole


def test_messages_of_every_size_are_identified_by_their_numbers(workers: WorkerPool) -> None:
    assert workers.run(_exchange, world_size=3) == [[True] * (2 * 2 * len(SIZES))] * 3


def _ask_for_it() -> tuple[bool, bool, bool]:
    ours = BulkChannel(dist.new_group(backend="gloo"))
    if dist.get_rank() == 0:
        dist.barrier()
        ours.send(1, 7, _content(0, 5))
        dist.barrier()
        return True, True, True
    parcel = ours.receive(0, 7)
    early = parcel.has_arrived()
    dist.barrier()
    deadline = time.monotonic() + 20.0
    while not parcel.has_arrived() and time.monotonic() < deadline:
        time.sleep(0.001)  # arrives without a wait on this rank
    arrived = parcel.has_arrived()
    whole = torch.equal(parcel.wait(), _content(0, 5))
    dist.barrier()
    return early, arrived, whole


def test_has_arrived_reports_whether_a_message_is_complete(workers: WorkerPool) -> None:
    assert workers.run(_ask_for_it, world_size=2)[1] == (False, True, True)
