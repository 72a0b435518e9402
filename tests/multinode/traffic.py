"""Script of one rank: move weights between layouts over several hosts, and write the bytes that the plan sends.

Its argument is a folder. Before and after every move, the ranks wait until a file appears there: meanwhile, the trial
reads the counters of the hosts' interfaces.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout, ModelSpec, ParamSpec, TensorParallelCut, sharded
from lightning_realloc.runtime.transfer.executor import Reallocation
from tests.runtime.reference import local_part

MOVES = (("fsdp4", "dp4"), ("fsdp4", "dp2.tp2"), ("tp2@0-1", "tp2@2-3"), ("dp2@0-1", "dp2@2-3"))
"""Layouts before and after each move, over four ranks."""
_WIDTH, _NUM_BLOCKS = 1024, 2


def model() -> ModelSpec:
    """Return a model of four matrices, 16 MB in float32."""
    params = [
        ParamSpec(f"blocks.{block}.{name}", (_WIDTH, _WIDTH), block=block, cuts=sharded(TensorParallelCut(dim)))
        for block in range(_NUM_BLOCKS)
        for name, dim in (("up", 0), ("down", 1))
    ]
    return ModelSpec(tuple(params), num_blocks=_NUM_BLOCKS)


def main(folder: Path) -> None:
    """Carry out all moves."""
    dist.init_process_group("gloo")
    rank, per_node = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    cluster = ClusterSpec.parse(f"cpu:{dist.get_world_size() // per_node}x{per_node}")
    for number, texts in enumerate(MOVES):
        source, target = (ModelLayout(model(), Layout.parse(text)) for text in texts)
        full = {
            param.name: torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            for param in model().params
        }
        tensors = {name: local_part(full[name], source, name, rank) for name in source.names(rank)}
        move = Reallocation(
            source, tensors, target, rank=rank, world_size=4, dtype=torch.float32, device="cpu", cluster=cluster
        )
        move.run()  # opens the connections
        _wait_for(folder / f"go{number}", folder / f"ready{number}.{rank}")
        move.run()
        wanted = {name: local_part(full[name], target, name, rank) for name in target.names(rank)}
        right = all(torch.equal(move.target_tensors[name], part) for name, part in wanted.items())
        result = {
            "minimum": move.plan.inter_node_bytes_minimum, "planned": move.plan.inter_node_bytes, "right": right,
            "transport": move.transport,
        }  # fmt: skip
        (folder / f"move{number}.{rank}.json").write_text(json.dumps(result))
        _wait_for(folder / f"read{number}", folder / f"done{number}.{rank}")
    dist.destroy_process_group()


def _wait_for(file: Path, announcement: Path) -> None:
    announcement.touch()
    while not file.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
