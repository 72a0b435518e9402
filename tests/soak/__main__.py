"""Trial of long runs: do memory, open files, threads and memory maps of the ranks grow?

    python -m tests.soak --iterations 2000

Tiny GRPO and PPO runs on two ranks change their plan every ten iterations and save a checkpoint every hundred. After
a warm-up, a line is fitted to each rank's figures; the table has its slope per 1,000 iterations, with its error.
A change of plans leaves some kilobytes of the C library's heap in pieces (the bytes in use do not grow, and without
changes of plans resident memory does not grow either), so that up to `FRAGMENTED_MB` for 100 changes count as flat.
Then ten fits of a larger model run one after the other in one process: no model may stay alive after a fit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence

from tests.soak.long_runs import NAMES, fit_repeatedly, soak
from tests.workers import WorkerPool

WARM_UP = 0.2
"""Share of the iterations before the first figure that counts."""
FRAGMENTED_MB = 1.0
"""Most growth of resident memory per 1,000 iterations."""
OTHERS = 0.5
"""Most growth of any other figure per 1,000 iterations."""


def slope(rows: Sequence[tuple[float, ...]], column: int) -> tuple[float, float]:
    """Return the slope of a figure per 1,000 iterations, and its standard error (least squares)."""
    xs, ys = [row[0] / 1000 for row in rows], [row[column] for row in rows]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    found = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return found, (rest / (len(xs) - 2) / spread) ** 0.5


def main() -> int:
    """Run the trial, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000, help="iterations of each algorithm")
    parser.add_argument("--fits", type=int, default=10, help="fits one after the other")
    parser.add_argument("--width", type=int, default=640, help="width of their model: 640 has 50 million weights")
    options = parser.parse_args()
    pool = WorkerPool(max_workers=2)
    grows = False
    try:
        for algorithm in ("grpo", "ppo"):
            with tempfile.TemporaryDirectory() as folder:
                ranks = pool.run(
                    soak, algorithm, options.iterations, folder, world_size=2, init_process_group=False,
                    deadline_s=options.iterations * 2.0 + 120,
                )  # fmt: skip
            for rank, rows in enumerate(ranks):
                rows = rows[int(len(rows) * WARM_UP) :]
                found = {name: slope(rows, column) for column, name in enumerate(NAMES, start=1)}
                text = ", ".join(f"{name} {value:+.2f} ± {error:.2f}" for name, (value, error) in found.items())
                print(f"{algorithm} rank {rank}, per 1,000 iterations: {text}", flush=True)
                limits = {name: FRAGMENTED_MB if name == "MB resident" else OTHERS for name in NAMES}
                grows |= any(value > 3 * error and value > limits[name] for name, (value, error) in found.items())
        fits = pool.run(
            fit_repeatedly, options.fits, options.width, world_size=1, init_process_group=False, deadline_s=900.0
        )
        for number, (living, resident) in enumerate(fits[0], start=1):
            print(f"fit {number}: {living} models alive, {resident:.0f} MB resident")
            grows |= living > 0
    finally:
        pool.close()
    print("grows" if grows else "flat")
    return grows


if __name__ == "__main__":
    sys.exit(main())
