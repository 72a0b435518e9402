"""Tuning while training: speed of the committed plan, cost of tuning, and equality of the losses.

PPO with four models runs on four CPU ranks from three start plans: all calls sharded, all calls replicated, and the
heuristic plan. Models have two sizes; responses are short and equal, or longer with different lengths. In every setting
each start plan is tuned until the tuner commits, for a run of 200 iterations. A run without tuning has the expected
losses. Then all static, start and committed plans take turns in one run, in blocks of a few iterations.

Overhead is the tuner's cost (profiles, searches, changes of plans, and extra seconds of slower plans) over all seconds
of the tuned run. A faster plan makes the same cost a larger fraction.

Run ``python -m benchmarks.autotune``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.autotune_runs import Setting, Tuned, take_turns, tiny, train_untuned, tune
from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.plan_turn import CALLS, WORLD_SIZE, Workload
from benchmarks.ranks import answers_of_ranks
from lightning_realloc.tuning.tuner import COUNTED_ITERATIONS, WARM_UP_ITERATIONS

ITERATIONS = 200
"""Iterations of the run that the overhead is computed for."""
MEASURED = WARM_UP_ITERATIONS + COUNTED_ITERATIONS
"""Iterations under the start plan before tuning."""
SPEED_OF_BEST_STATIC, OVERHEAD, TOLERANCE = 0.98, 0.05, 1e-5
STATIC_LAYOUTS = ("fsdp4", "dp4", "tp4", "dp2.tp2", "fsdp2.tp2", "dp2.fsdp2")
STATIC: dict[str, Any] = {name: {"calls": dict.fromkeys(CALLS, f"{name}@0-3")} for name in STATIC_LAYOUTS}
STARTS: dict[str, Any] = {"fsdp4": STATIC["fsdp4"], "dp4": STATIC["dp4"], "heuristic": "heuristic"}
SMALL = Workload(hidden_size=128, intermediate_size=352, num_layers=4, vocabulary=4096, num_prompts=8, new_tokens=8)
LARGE = Workload(hidden_size=256, intermediate_size=704, num_layers=6, vocabulary=4096, num_prompts=8, new_tokens=8)
SETTINGS = tuple(
    Setting(name=f"{size}, {kind}", work=Workload(**(asdict(work) | {"new_tokens": tokens})), share_of_stops=stops)
    for kind, tokens, stops in (("short", 8, 0.0), ("ragged", 24, 1 / 16))
    for size, work in (("small", SMALL), ("large", LARGE))
)


@dataclass(frozen=True, slots=True)
class Found:
    """Measurements of all runs of one setting."""

    setting: Setting
    tuned: Mapping[str, Tuned]
    """Name of the start plan -> its tuned run."""
    seconds: Mapping[str, Sequence[float]]
    """Plan as text -> seconds of its iterations."""
    losses: Mapping[tuple[str, int], float]
    """Losses of the run without tuning."""
    scores: Sequence[Sequence[float]]

    def median_s(self, plan: Mapping[str, Any]) -> float:
        """Return the median seconds of a plan."""
        return median(self.seconds[key(plan)])

    @property
    def best_static(self) -> str:
        """Name of the fastest static plan."""
        return min(STATIC, key=lambda name: self.median_s(STATIC[name]))

    def difference(self, start: str) -> float:
        """Return the largest difference of losses and scores between a tuned run and the untuned one."""
        run = self.tuned[start]
        both = run.losses.keys() & self.losses.keys()
        return max([*(abs(run.losses[one] - self.losses[one]) for one in both), *self.score_differences(start)])

    def score_differences(self, start: str) -> list[float]:
        """Return the difference of every sample's score between a tuned run and the untuned one."""
        pairs = zip(self.tuned[start].scores, self.scores, strict=False)
        return [abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]

    def num_scores_apart(self, start: str) -> int:
        """Return the number of samples of a tuned run with another score, since rounding changed a drawn token."""
        return sum(difference > TOLERANCE for difference in self.score_differences(start))


def key(plan: Mapping[str, Any]) -> str:
    """Return a plan as text."""
    return json.dumps(plan, sort_keys=True)


# --- four ranks -------------------------------------------------------------------------------------------------------


def work_on(rank: int, options: argparse.Namespace, answers: Connection) -> None:
    """Run the settings on this rank; rank 0 sends the results."""
    left = options.cells
    for setting in SETTINGS:
        starts = list(STARTS)[:left]
        left -= len(starts)
        if starts:
            found = measure(tiny(setting) if options.tiny else setting, starts, options)
            if rank == 0:
                answers.send(found)


def measure(setting: Setting, starts: Sequence[str], options: argparse.Namespace) -> Found:
    """Tune every start plan, train without tuning, and run all plans in turns. Collective."""
    settings = {"max_overhead": 1.0, "search_seconds": 0.3} if options.tiny else {}
    tuned = {name: tune(setting, STARTS[name], iterations=ITERATIONS, settings=settings) for name in starts}
    longest = max(run.iterations for run in tuned.values())
    losses, scores = train_untuned(setting, STATIC["dp4"], longest)
    plans = {key(plan): plan for plan in STATIC.values()}
    plans |= {key(plan): plan for run in tuned.values() for plan in (run.start, run.committed)}
    seconds = take_turns(setting, list(plans.values()), rounds=options.rounds)
    return Found(setting, tuned, dict(zip(plans, seconds, strict=True)), losses, scores)


# --- judging ----------------------------------------------------------------------------------------------------------


def fill(report: BenchmarkReport, found: Found) -> None:
    """Add a row for every start plan of a setting."""
    best = found.best_static
    for start, run in found.tuned.items():
        seconds = found.median_s(run.committed)
        report.add_row(
            setting=found.setting.name,
            start=start,
            start_s=round(found.median_s(run.start), 3),
            committed_s=round(seconds, 3),
            best_static=best,
            best_static_s=round(found.median_s(STATIC[best]), 3),
            gain=round(found.median_s(run.start) / seconds, 2),
            tried=run.num_tried,
            search_s=round(run.costs["search"], 2),
            switch_s=round(run.costs["switch"], 2),
            slower_s=round(run.costs["slower"], 2),
            overhead=round(overhead(found, start), 4),
            difference=found.difference(start),
            scores_apart=found.num_scores_apart(start),
            plan=describe(run.committed),
        )


def overhead(found: Found, start: str) -> float:
    """Return the cost of tuning as a fraction of a run of 200 iterations, most of them under the committed plan."""
    run = found.tuned[start]
    cost = sum(run.costs.values())
    before = MEASURED * found.median_s(run.start)
    return cost / (cost + before + (ITERATIONS - MEASURED) * found.median_s(run.committed))


def describe(plan: Mapping[str, Any]) -> str:
    """Return a plan's layouts as short text, with calls of one layout together."""
    calls: dict[str, list[str]] = {}
    for name, entry in plan["calls"].items():
        layout = entry if isinstance(entry, str) else " ".join(map(str, entry.values()))
        calls.setdefault(layout, []).append(CALLS[name])
    if len(calls) == 1:
        return next(iter(calls))
    return "; ".join(f"{layout}: {', '.join(names)}" for layout, names in calls.items())


def judge(report: BenchmarkReport, everything: Sequence[Found]) -> None:
    """Check the targets by the worst cell."""
    cells = [(found, start) for found in everything for start in found.tuned]
    committed = {(f.setting.name, s): f.median_s(f.tuned[s].committed) for f, s in cells}
    of_static = [f.median_s(STATIC[f.best_static]) / committed[f.setting.name, s] for f, s in cells]
    of_start = [f.median_s(f.tuned[s].start) / committed[f.setting.name, s] for f, s in cells]
    report.require_at_least("speed over the best static plan, worst cell", min(of_static), SPEED_OF_BEST_STATIC)
    report.require_at_least("speed over the start, worst cell", min(of_start), 1.0)
    worst = max(overhead(found, start) for found, start in cells)
    report.require_at_most("overhead in 200 iterations, worst cell", worst, OVERHEAD)
    apart = max(found.difference(start) for found, start in cells)
    report.require_at_most("largest difference of losses and scores", apart, TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Run the settings and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--cells", type=int, default=len(SETTINGS) * len(STARTS), help="starts tuned, over all settings"
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of every plan that is not clearly slower")
    parser.add_argument("--tiny", action="store_true", help="models of 100,000 weights, for a quick look")
    options = parser.parse_args(arguments)
    settings = {"world_size": WORLD_SIZE, "iterations": ITERATIONS} | {s.name: asdict(s) for s in SETTINGS}
    report = BenchmarkReport("autotune", settings=settings)
    everything: list[Found] = []
    begin = time.monotonic()
    for found in answers_of_ranks(work_on, options, world_size=WORLD_SIZE):
        everything.append(found)
        fill(report, found)
        sys.stderr.write(f"{found.setting.name}: done after {time.monotonic() - begin:.0f} s\n")
    judge(report, everything)
    report.settings["trials"] = {f"{f.setting.name}, {s}": f.tuned[s].trials for f in everything for s in f.tuned}
    report.settings["seconds"] = {f.setting.name: {plan: list(s) for plan, s in f.seconds.items()} for f in everything}
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
