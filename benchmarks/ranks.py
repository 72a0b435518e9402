"""Start the ranks of a benchmark on this host, and receive their results while they work.

Ranks are separate processes, so that nothing else runs in them. The process that prints the figures is not a rank.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

from benchmarks.harness import be_quiet

Work = TypeVar("Work")
Answer = TypeVar("Answer")
LEAVE_S = 60.0
"""Seconds that ranks have to exit after they closed their pipes."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


def answers_of_ranks(
    work: Callable[..., None], *args: Any, world_size: int, preload: Sequence[str] = ()
) -> Iterator[Any]:
    """Run ``work(rank, *args, answers)`` on all ranks of a gloo group, and yield the results as they arrive.

    ``work`` and its arguments must be picklable; ``answers`` is the sending end of a pipe. Ranks that still run when
    the iteration ends are killed. Ranks are forked from a process that has imported the modules ``preload``, if any.

    Raises:
        RuntimeError: if a rank fails; the other ranks, which may wait for it, are killed.
    """
    from torch.distributed import TCPStore

    os.environ |= _ENVIRONMENT  # before ranks start: torch reads the number of threads when it is imported
    context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
    if preload:
        context.set_forkserver_preload(list(preload))
    receiving, sending = context.Pipe(duplex=False)
    # The store lives in this process, as under torchrun: another process could take a free port before rank 0 listens.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_be_rank, args=(rank, world_size, store.port, work, args, sending))
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        sending.close()
        yield from _answers(receiving, ranks)
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if failed:
        raise RuntimeError(f"ranks {failed} of {world_size} ended with an error, which is printed above")


def answer_of_first_rank(run: Callable[[Work], Answer], work: Work, *, world_size: int) -> Answer:
    """Return what ``run(work)`` returns on rank 0; all ranks of a gloo group run it.

    Raises RuntimeError as `answers_of_ranks` does.
    """
    (answer,) = answers_of_ranks(_answer_once, run, work, world_size=world_size)
    return cast(Answer, answer)


def turns_within(num_turns: int, limit_s: float) -> Iterator[int]:
    """Yield the numbers of turns, until the next turn would exceed the limit on any rank. Collective.

    The next turn is expected to take as long as the mean of the turns before it.
    """
    begin = time.monotonic()
    for number in range(num_turns):
        if number and max_over_ranks((time.monotonic() - begin) * (number + 1) / number - limit_s) > 0:
            return
        yield number


def max_over_ranks(value: float) -> float:
    """Return the largest of all ranks' values. Collective."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def gather_from_ranks(value: Any) -> list[Any]:
    """Return all ranks' values by rank. Collective."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _answer_once(rank: int, run: Callable[[Work], Answer], work: Work, answers: Connection) -> None:
    answer = run(work)
    if rank == 0:
        answers.send(answer)


def _answers(receiving: Connection, ranks: Sequence[BaseProcess]) -> Iterator[Any]:
    """Yield results until a rank has failed, or all ranks have closed their pipes and exited."""
    while not any(process.exitcode for process in ranks):
        wait([receiving, *(process.sentinel for process in ranks if process.exitcode is None)])
        while receiving.poll():
            try:
                answer = receiving.recv()
            except EOFError:
                for process in ranks:
                    process.join(timeout=LEAVE_S)
                return
            yield answer


def _be_rank(
    rank: int, world_size: int, port: int, work: Callable[..., None], args: tuple[Any, ...], answers: Connection
) -> None:
    import torch.distributed as dist

    # The variables that torchrun sets; Trainer reads them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    be_quiet()
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    work(rank, *args, answers)
    dist.barrier()
    dist.destroy_process_group()
