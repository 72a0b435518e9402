"""Seconds of each step of saving and reading a checkpoint, and the share of checksums.

One process saves random tensors over an earlier checkpoint and reads them again, from the system's cache of files.
Shares are of processor time, which depends little on other load of the machine; elapsed time is that of the disk, too.
Both are those of the fastest repeat.

Run ``python -m benchmarks.checkpoints``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from lightning_realloc.layout.region import Region
from lightning_realloc.layout.sharding import Piece
from lightning_realloc.strategies.checkpoints.checkpoint_files import (
    FORMAT,
    ROLES_FILE,
    check_files,
    file_records,
    read_description,
    write_description,
)
from lightning_realloc.strategies.checkpoints.folders import make_partial, replace_folder, sync_files
from lightning_realloc.strategies.checkpoints.sharded_tensors import ShardedTensor, ShardWriter, files_of, load

TENSOR_SHAPE = (1024, 4096)
SAVE_STEPS = ("write", "checksums", "force to disk", "replace the earlier one")
"""A save computes checksums while files are forced to disk."""
READ_STEPS = ("verify checksums", "read")
COPY = "copy to host memory"
"""The only step that training waits for with ``async_checkpoints=True``."""
MAX_SHARE = 0.05
"""Target for the share of checksums."""


class Clock:
    """Processor time and elapsed time of steps."""

    def __init__(self) -> None:
        self.processor_s: defaultdict[str, list[float]] = defaultdict(list)
        self.elapsed_s: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step."""
        processor, elapsed = time.process_time(), time.perf_counter()
        yield
        self.processor_s[name].append(time.process_time() - processor)
        self.elapsed_s[name].append(time.perf_counter() - elapsed)


def random_state(num_bytes: int) -> dict[str, ShardedTensor]:
    """Return whole tensors of about ``num_bytes``."""
    tensor_bytes = 4 * TENSOR_SHAPE[0] * TENSOR_SHAPE[1]
    whole = (Piece(Region.whole(TENSOR_SHAPE), (0,) * len(TENSOR_SHAPE)),)
    return {
        f"model/actor/{number}": ShardedTensor(TENSOR_SHAPE, torch.float32, whole, torch.randn(TENSOR_SHAPE))
        for number in range(max(1, num_bytes // tensor_bytes))
    }


def save(state: dict[str, ShardedTensor], folder: Path, clock: Clock) -> None:
    """Save a checkpoint, one step after another."""
    unfinished = make_partial(folder)
    writer = ShardWriter(state, unfinished)
    writer.plan_on_all_ranks()
    with clock.step("write"):
        writer.complete([writer.write()])
    files = [*files_of(unfinished, 0), unfinished / ".metadata"]
    with clock.step("checksums"):
        records = file_records(unfinished, files)
    write_description(unfinished, {"format": FORMAT, "algorithm": "none", "roles": {}}, records)
    with clock.step("force to disk"):
        sync_files([*files, unfinished / ROLES_FILE])
    with clock.step("replace the earlier one"):
        replace_folder(unfinished, folder)


def read(state: dict[str, ShardedTensor], folder: Path, clock: Clock) -> None:
    """Read a checkpoint as a run does."""
    with clock.step("verify checksums"):
        check_files(folder, read_description(folder))
    with clock.step("read"):
        load(state, folder)


def copy(state: dict[str, ShardedTensor], folder: Path, clock: Clock) -> None:
    """Begin a save in the background."""
    writer = ShardWriter(state, folder)
    writer.plan_on_all_ranks()
    with clock.step(COPY):
        writer.copy_to_host()


def measure(num_bytes: int, repeats: int, folder: Path | None) -> Clock:
    """Return the times of all steps."""
    state, clock, place = random_state(num_bytes), Clock(), Path(tempfile.mkdtemp(dir=folder))
    try:
        save(state, place / "last.ckpt", Clock())
        for _ in range(repeats):
            save(state, place / "last.ckpt", clock)
            read(state, place / "last.ckpt", clock)
            copy(state, place / "copy", clock)
    finally:
        shutil.rmtree(place)
    return clock


def fill(report: BenchmarkReport, processor_s: Mapping[str, float], elapsed_s: Mapping[str, float]) -> None:
    """Add a row for each step, and the targets of the checksums."""
    for of, steps in (("save", SAVE_STEPS), ("read", READ_STEPS), ("background", (COPY,))):
        for step in steps:
            report.add_row(
                of=of, step=step, processor_s=round(processor_s[step], 3), elapsed_s=round(elapsed_s[step], 3)
            )
    for of, steps, step in (("save", SAVE_STEPS, "checksums"), ("read", READ_STEPS, "verify checksums")):
        share = processor_s[step] / sum(processor_s[other] for other in steps)
        report.require_at_most(f"share of checksums in a {of}", share, MAX_SHARE)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the system's temporary one")
    options = parser.parse_args(arguments)
    be_quiet()
    torch.manual_seed(0)
    settings = {"gigabytes": options.gigabytes, "repeats": options.repeats, "ranks": 1}
    report = BenchmarkReport("checkpoints", settings=settings)
    clock = measure(round(options.gigabytes * 1e9), options.repeats, options.folder)
    fastest = [{step: min(times) for step, times in all_s.items()} for all_s in (clock.processor_s, clock.elapsed_s)]
    fill(report, *fastest)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
