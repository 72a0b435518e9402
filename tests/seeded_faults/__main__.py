"""Trial of the test suite: does a test fail for each of fifty faults, put one by one into a copy of the package?

    python -m tests.seeded_faults

A fault is caught by `make test` if a test of its files in ``faults.yaml`` fails, and passes without the fault.
Otherwise the exhaustive tests of these files run, too, as in `make test-all`. With ``--whole``, the whole suite runs
in both forms for a fault that is still not caught. Prints a line for each fault, with the test that caught it, and the
counts at the end. Fails if `make test` catches less than 9 in 10, or if nothing catches a fault. Needs Linux and git.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue

from tests.seeded_faults.faults import Fault, FaultError, load_faults
from tests.seeded_faults.runs import FaultyCopy, kill_processes

LEAST_CAUGHT = 0.9
"""Share of the faults that `make test` must catch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one fault."""

    fault: Fault
    test: str | None
    """Test that fails; None if none does."""
    is_exhaustive: bool
    """Whether only `make test-all` runs that test."""
    seconds: float

    def __str__(self) -> str:
        by = "SURVIVES" if self.test is None else f"{'test-all' if self.is_exhaustive else 'test'}: {self.test}"
        return f"{self.fault.name:36s} {self.seconds:4.0f} s  {by}"


def try_fault(fault: Fault, copy: FaultyCopy, *, whole: bool) -> Outcome:
    """Put a fault into the copy, and run tests until one fails."""
    began = time.monotonic()
    for files, with_all in product((fault.tests, ()) if whole else (fault.tests,), (False, True)):
        test = _catching_test(fault, copy, files, with_all=with_all)
        if test is not None:
            return Outcome(fault, test, with_all, time.monotonic() - began)
    return Outcome(fault, None, False, time.monotonic() - began)


def _catching_test(fault: Fault, copy: FaultyCopy, files: Sequence[str], *, with_all: bool) -> str | None:
    """Return the first test that fails with the fault and passes without it, None if there is none."""
    failing_anyway: list[str] = []
    while True:
        with copy.having(fault):
            test = copy.first_failure(files, with_all=with_all, passing=failing_anyway)
        if test is None or copy.first_failure([test], with_all=True) is None:
            return test
        failing_anyway.append(test)


def main() -> int:
    """Run the trial, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="try faults whose name contains a text")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at the same time")
    parser.add_argument("--whole", action="store_true", help="run the whole suite where the files of a fault pass")
    options = parser.parse_args()
    faults = [f for f in load_faults() if not options.only or any(text in f.name for text in options.only)]
    if not faults:
        parser.error(f"no fault's name contains {' or '.join(options.only)}; the names are in faults.yaml")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as name:
        copies = [FaultyCopy(Path(name) / str(number)) for number in range(options.jobs)]
        free: SimpleQueue[FaultyCopy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def attempt(fault: Fault) -> Outcome:
            copy = free.get()
            try:
                return try_fault(fault, copy, whole=options.whole)
            finally:
                free.put(copy)

        pool = ThreadPoolExecutor(options.jobs)
        try:
            for future in as_completed([pool.submit(attempt, fault) for fault in faults]):
                outcomes.append(future.result())
                print(outcomes[-1], flush=True)
        except FaultError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:  # else the threads would wait for the tests that run
                kill_processes(copy.folder)
            pool.shutdown()
    return conclude(outcomes, time.monotonic() - began)


def conclude(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print the counts, and return the exit code."""
    survivors = [outcome.fault for outcome in outcomes if outcome.test is None]
    num_caught = len(outcomes) - len(survivors)
    num_soon = num_caught - sum(outcome.is_exhaustive for outcome in outcomes)
    for fault in survivors:
        print(f"survives: {fault.name} ({fault.file}): {fault.wrong}")
    print(f"caught by make test: {num_soon}/{len(outcomes)} ({seconds:.0f} s)")
    print(f"caught by make test-all: {num_caught}/{len(outcomes)}")
    return 1 if survivors or num_soon < LEAST_CAUGHT * len(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
