"""Results and failures of a benchmark's ranks."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import pytest

from benchmarks.ranks import answers_of_ranks
from tests.workers import PRELOADED

LIMIT_S = 60.0


def add_up(rank: int, first: int, answers: Connection) -> None:
    """Send the sum over ranks twice, from rank 0."""
    import torch
    import torch.distributed as dist

    for number in (first, first + 1):
        total = torch.tensor(number * (rank + 1))
        dist.all_reduce(total)
        if rank == 0:
            answers.send(int(total))


def fail_alone(rank: int, answers: Connection) -> None:
    """Fail on one rank, while the other waits for it."""
    import torch.distributed as dist

    answers.send(rank)
    if rank == 1:
        raise ArithmeticError("overflow")
    dist.barrier()


@pytest.mark.exhaustive
def test_results_come_from_a_group_of_ranks() -> None:
    # 3 * (1 + 2) and 4 * (1 + 2)
    assert list(answers_of_ranks(add_up, 3, world_size=2)) == [9, 12]


def test_a_rank_that_fails_ends_the_others() -> None:
    begin = time.monotonic()
    received = []
    with pytest.raises(RuntimeError, match=r"ranks \[.*1\] of 2 ended with an error"):
        for answer in answers_of_ranks(fail_alone, world_size=2, preload=PRELOADED):
            received.append(answer)
    assert 1 in received
    assert time.monotonic() - begin < LIMIT_S
