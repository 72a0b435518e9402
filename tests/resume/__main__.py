"""Trial of resuming: does a resumed run end with the same bits as one that was never interrupted?

    python -m tests.resume

Each case trains six iterations on two ranks, in epochs of three, and keeps checkpoints of three moments: within an
epoch, between two epochs, and within the second. A run resumed from each of them must end with a bitwise equal
checkpoint, and every metric that it logs must be equal. (Where iterations overlap, a step may log the training metrics
of the one before; the first step after resuming then has none.)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.resume.cases import CASES, MOMENTS, NUM_STEPS, Case, fit
from tests.strategies.checkpoints.checkpoint_runs import contents, differences
from tests.workers import WorkerPool


def run(case: Case, pool: WorkerPool, folder: Path, moments: Sequence[int] = MOMENTS) -> list[str]:
    """Return what differs after each moment; nothing if the runs are alike."""

    def launched(resume: int | None, seed: int) -> list[dict[str, float]]:
        if case.launcher == "spawn":
            fit(case, str(folder), resume, seed)
            return []
        ranks = pool.run(fit, case, str(folder), resume, seed, world_size=2, init_process_group=False, deadline_s=120.0)
        return list(ranks[0])

    straight, found = launched(None, 0), []
    expected = contents(folder / "straight" / str(NUM_STEPS))
    for moment in moments:
        logged = launched(moment, 99 + moment)
        different = differences(contents(folder / f"from{moment}" / str(NUM_STEPS)), expected)
        if different:
            found.append(f"after step {moment}: {len(different)} tensors differ, {next(iter(different.items()))}")
        wrong = {
            name
            for ours, theirs in zip(logged, straight[moment:], strict=True)
            for name, value in ours.items()
            if repr(value) != repr(theirs.get(name))  # NaN equals itself there
        }
        if wrong:
            found.append(f"after step {moment}: other values of {', '.join(sorted(wrong))}")
    return found


def main() -> int:
    """Run the trial, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    options = parser.parse_args()
    pool, num_good, num_all, begin = WorkerPool(max_workers=2), 0, 0, time.perf_counter()
    try:
        for name, case in CASES.items():
            if options.only not in name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                problems = run(case, pool, Path(folder))
            num_all += len(MOMENTS)
            num_good += len(MOMENTS) - len({problem.partition(":")[0] for problem in problems})
            print(f"{name}: {'; '.join(problems) or 'equal'}", flush=True)
    finally:
        pool.close()
    print(f"resumed runs equal: {num_good}/{num_all} ({time.perf_counter() - begin:.0f} s)")
    return 0 if num_good == num_all else 1


if __name__ == "__main__":
    sys.exit(main())
