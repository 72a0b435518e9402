"""Starting a benchmark's ranks on this host, and hearing from them while they work.

Processes of their own rather than a launcher's: the figures are for ranks that do nothing else, and the process that
prints them is none.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

LEAVE_S = 60.0
"""How long ranks may take to end once they have nothing more to say."""


def answers_of_ranks(work: Callable[..., None], *args: Any, world_size: int) -> Iterator[Any]:
    """Run ``work(rank, *args, answers)`` on every rank of one gloo group; yield what they send, as it comes.

    ``work`` and its arguments can be pickled, ``answers`` is the end of a pipe to send through. Whatever is left of the
    ranks when the iteration ends is ended with it.

    Raises:
        RuntimeError: when a rank fails; the others, which may wait for it, are ended.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    # Here, as torchrun has it: a port that were looked for, and left to rank 0, could be another's until it listens.
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


def outlasts(begin: float, turns_done: int, limit_s: float) -> bool:
    """Return whether one more turn would end after the limit, on the slowest rank's clock. Collective.

    ``begin`` is this rank's ``time.monotonic()`` when the first turn began.
    """
    import torch
    import torch.distributed as dist

    spent = torch.tensor([time.monotonic() - begin], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent) * (turns_done + 1) / turns_done > limit_s


def _answers(receiving: Connection, ranks: Sequence[BaseProcess]) -> Iterator[Any]:
    """Yield answers until one rank has failed, or all have closed their ends and left."""
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
    import torch
    import torch.distributed as dist

    # As torchrun would set it, for a Trainer too.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    work(rank, *args, answers)
    dist.barrier()
    dist.destroy_process_group()
