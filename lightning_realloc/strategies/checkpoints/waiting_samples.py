"""Results of batches that wait to be trained on, in checkpoints: every rank writes its own to a file of its own.

``meta.pt`` has the batches themselves, which every rank knows. A run with the same plan and ranks reads of these files
what its ranks need; any other run reads all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.retries.attempts import retried
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value
from lightning_realloc.strategies.checkpoints.checkpoint_files import content_folder, name_read_errors
from lightning_realloc.strategies.checkpoints.sharded_tensors import SHARD_SUFFIX
from lightning_realloc.strategies.exchange.waiting_batches import (
    Results,
    WaitingBatches,
    joined_results,
    results_from_plain,
)
from lightning_realloc.strategies.pool.pool_options import RunFacts

WAITING_BATCHES = "waiting_batches"
"""Key of ``meta.pt`` for the batches."""
_EARLIER_KEY, _EARLIER_RESULTS = "waiting_batch", "made"
"""Keys of earlier versions: of one batch at most, and of the results of all ranks within a batch."""


def results_file(rank: int) -> str:
    """Return the name of a rank's file, which is one of its shards."""
    return f"__{rank}_waiting{SHARD_SUFFIX}"


def encode_results(waiting: WaitingBatches) -> bytes | None:
    """Return the content of this rank's file; None if no batch waits."""
    return bytes(encode_value(waiting.plain_results())) if waiting else None


def read_waiting(
    folder: AnyPath,
    description: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    plan: ExecutionPlan,
    facts: RunFacts,
) -> WaitingBatches:
    """Return the batches that waited, with the results that this rank needs, or with more.

    Args:
        folder: Checkpoint.
        description: Content of its ``realloc.json``.
        meta: Content of its ``meta.pt``.
        plan: Plan of this run.
        facts: This rank among those of this run.

    Raises:
        CheckpointError: for a file that cannot be read.
    """
    earlier = [meta[_EARLIER_KEY]] if _EARLIER_KEY in meta else []
    batches = meta.get(WAITING_BATCHES, earlier)
    if not batches or _EARLIER_RESULTS in batches[0]:
        return WaitingBatches(batches, results_from_plain(batch[_EARLIER_RESULTS] for batch in batches))
    num_ranks = int(description["world_size"])
    is_same = num_ranks == facts.world_size and description["plan"] == plan.to_mapping()
    ranks = _ranks_with_results_for(facts.rank, plan) if is_same else range(num_ranks)
    content = content_folder(folder, description)
    by_rank = [_read_file(content / results_file(rank)) for rank in ranks]
    return WaitingBatches(batches, [joined_results(results) for results in zip(*by_rank, strict=True)])


def _ranks_with_results_for(rank: int, plan: ExecutionPlan) -> list[int]:
    """Return this rank and those that hold results of the same samples: of its data-parallel share of any call."""
    found = {rank}
    for _, call in plan.calls:
        layout = call.layout
        if rank in layout:
            own = layout.data_parallel_index(rank)
            found |= {other for other in layout.ranks if layout.data_parallel_index(other) == own}
    return sorted(found)


def _read_file(file: AnyPath) -> list[Results]:
    with name_read_errors(file):
        return results_from_plain(decode_value(retried(file.read_bytes, file)))
