"""All ranks get the values of every rank, of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_realloc.errors import DataError
from lightning_realloc.runtime.messages.objects import (
    broadcast_object,
    gather_objects,
    gather_on_first,
    scatter_objects,
)
from tests.workers import WorkerPool


def _gather(sizes: list[int]) -> tuple[list[Any], list[Any] | None]:
    rank = dist.get_rank()
    group = dist.new_group([3, 1], sort_ranks=False)
    everyone = gather_objects((rank, "x" * sizes[rank], torch.bfloat16))
    return everyone, gather_objects(rank, group) if rank in (1, 3) else None


def _gather_all(cases: Sequence[list[int]]) -> list[tuple[list[Any], list[Any] | None]]:
    return [_gather(sizes) for sizes in cases]


def test_values_of_any_length_arrive_in_the_order_of_ranks(workers: WorkerPool) -> None:
    cases = ([0, 0, 0, 0], [0, 10_000, 1, 0], [4000, 4088, 4089, 4096], [100_000, 5, 200_000, 70_000])
    for sizes, answers in zip(cases, zip(*workers.run(_gather_all, cases), strict=True), strict=True):
        expected = [(rank, "x" * size, torch.bfloat16) for rank, size in enumerate(sizes)]
        assert [everyone for everyone, _ in answers] == [expected] * 4
        assert answers[1][1] == [3, 1]


def test_a_single_process_gets_its_own_value() -> None:
    assert gather_objects({"a": 1}) == gather_on_first({"a": 1}) == [{"a": 1}]


def _gather_on_first() -> list[Any]:
    return gather_on_first("x" * 5000 * dist.get_rank())


def test_the_first_rank_alone_gets_values_that_it_alone_needs(workers: WorkerPool) -> None:
    assert workers.run(_gather_on_first, world_size=3) == [["", "x" * 5000, "x" * 10_000], [], []]


def _send_and_refuse() -> tuple[list[Any], list[str]]:
    rank, refusals = dist.get_rank(), list[str]()
    values = [{"rank": number, "text": "x" * 3000 * number} for number in range(3)]
    received = [broadcast_object(values[rank], 2), scatter_objects(values if rank == 0 else ())]
    foreign = (lambda: gather_objects(object() if rank == 1 else 1), lambda: broadcast_object(object(), 0))
    for attempt in foreign:
        try:
            attempt()
        except DataError as error:
            refusals.append(str(error))
    return received, refusals


def test_one_rank_sends_to_all_and_an_object_that_is_no_data_is_refused_on_all(workers: WorkerPool) -> None:
    values = [{"rank": number, "text": "x" * 3000 * number} for number in range(3)]
    for rank, (received, refusals) in enumerate(workers.run(_send_and_refuse, world_size=3)):
        assert received == [values[2], values[rank]]
        assert len(refusals) == 2 and all("a builtins.object is none" in refusal for refusal in refusals)
