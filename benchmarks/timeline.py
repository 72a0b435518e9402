"""Cost of `Timeline` as a share of an iteration's processor time, and share of the wall time that it records.

Two ranks train GRPO with a layout for every call, as in `benchmarks.watching`, whose short iterations make fixed costs
large. On rank 0 the processor time of the callback's hooks is summed. On every rank the recorded pieces are summed, and
compared with a clock that runs from the first hook of the training to the last one.

Images for loggers are drawn from the record: one of the two ranks in TensorBoard, as an image, and one of 64 ranks. The
cost of the record has the image at the default interval.

Run ``python -m benchmarks.timeline``.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks
from benchmarks.watching import Clock, Workload, train, watch_iterations

HOOKS = (
    "on_train_batch_start", "on_phase_start", "on_phase_end", "on_reallocate", "on_train_batch_end"
)  # fmt: skip
"""Hooks of the callback that run in every iteration. The listener of the flight record appends to a list."""


def work_on(rank: int, work: tuple[Workload, str], answers: Connection) -> None:
    """Train on this rank with a record; every rank sends its wall time, rank 0 also the processor times."""
    from lightning.pytorch.callbacks import Callback

    from lightning_realloc.callbacks import Timeline

    load, folder = work
    clock = Clock(defaultdict(float))
    for hook in HOOKS:
        clock.watch(hook, f"callbacks.timeline:Timeline.{hook}")
    clock.watch("activities", "runtime.messages.flight_record:FlightRecord.insert")

    class Stopwatch(Callback):
        """Measures the training loop."""

        seconds = 0.0

        def on_train_start(self, *_: Any) -> None:
            self.seconds = -time.perf_counter()

        def on_train_end(self, *_: Any) -> None:
            self.seconds += time.perf_counter()

    meter, stopwatch = watch_iterations(clock), Stopwatch()
    # The stopwatch is first at the start, and the record ends before it.
    train(load, [Timeline(folder), stopwatch, meter])
    if rank == 0:
        answers.send((dict(clock.seconds), meter.cpu_s, meter.wall_s))
    Path(folder, f"wall_{rank}").write_text(str(stopwatch.seconds))


def coverage(folder: Path) -> dict[int, float]:
    """Return rank -> seconds of all recorded pieces over the wall time of its training."""
    from lightning_realloc.recording.reader import read_run

    found = {}
    for rank, iterations in read_run(folder).last.ranks.items():
        recorded = sum(sum(sum(named.values()) for named in one.seconds.values()) for one in iterations)
        found[rank] = recorded / float((folder / f"wall_{rank}").read_text())
    return found


def image_seconds(folder: Path, *, num_ranks: int, images: int = 6) -> list[float]:
    """Return the processor seconds of some equal images in TensorBoard; lanes of further ranks repeat the recorded."""
    from lightning.pytorch.loggers import TensorBoardLogger

    from lightning_realloc.callbacks.loggers.writers import LoggerOutput, Picture
    from lightning_realloc.recording.iteration_picture import detailed_steps, draw_iteration
    from lightning_realloc.recording.reader import read_run

    session = read_run(folder).last
    last = detailed_steps(session)[-1]
    recorded = [one.pieces or () for made in session.ranks.values() for one in made if one.step == last]
    pieces = {rank: recorded[rank % len(recorded)] for rank in range(num_ranks)}
    logger, output, seconds = TensorBoardLogger(folder, name=f"{num_ranks} ranks"), LoggerOutput(), []
    assert logger.experiment is not None, "opens the file"
    for step in range(images):
        began = time.process_time()
        drawing = draw_iteration(pieces, num_ranks=num_ranks)
        output.write_picture([logger], Picture("timeline", drawing, step))
        seconds.append(time.process_time() - began)
    logger.experiment.close()
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Measure, and report the shares."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--iterations", type=int, default=Workload().iterations, help="measured iterations")
    options = parser.parse_args(arguments)
    from lightning_realloc.callbacks import Timeline

    work = Workload(iterations=options.iterations)
    report = BenchmarkReport("timeline", settings=asdict(work))
    with tempfile.TemporaryDirectory() as folder:
        ((seconds, cpu_s, wall_s),) = answers_of_ranks(work_on, (work, folder), world_size=2)
        covered = coverage(Path(folder))
        first, *small = image_seconds(Path(folder), num_ranks=2)
        large = image_seconds(Path(folder), num_ranks=64)
        size = sum(path.stat().st_size for path in Path(folder).glob("rank_*.jsonl"))
    for part in (*HOOKS, "activities"):
        report.add_row(part=part, ms_per_iteration=1e3 * seconds[part] / work.iterations, share=seconds[part] / cpu_s)
    report.add_row(part="iteration", ms_per_iteration=1e3 * cpu_s / work.iterations, share=1.0)
    interval = inspect.signature(Timeline).parameters["image_every_n_steps"].default
    image_s = median(small)
    report.settings["image_ms"] = {"first": 1e3 * first, "2 ranks": 1e3 * image_s, "64 ranks": 1e3 * median(large)}
    share = (sum(seconds.values()) + image_s * work.iterations / interval) / cpu_s
    report.settings["wall_s_per_iteration"] = wall_s / work.iterations
    report.settings["bytes_per_rank_and_iteration"] = size / 2 / (work.iterations + 1)
    report.require_at_most("the record with images, as a share of an iteration", share, 0.01)
    report.require_at_least("recorded share of the wall time, least of the ranks", min(covered.values()), 0.98)
    report.require_at_most("recorded share of the wall time, most of the ranks", max(covered.values()), 1.02)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
