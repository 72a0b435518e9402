"""Planning beyond what can be run here: search, simulation, planning and scheduling for 8 to 4,096 ranks.

PPO of Qwen2.5-7B on nodes of eight H100, with 64 responses for each node. Each size runs in a process of its own, and
measures what one rank does: CPU seconds, its messages and process groups, the bytes that enter a node when the actor's
weights move from training to generation, and the peak memory of the process. Two moves are planned: from FSDP over
eight nodes at most to generation under tensor parallelism, and from FSDP over all ranks, whose pieces are the smallest.
Exponents are fitted to the sizes from 64 ranks on: seconds grow by that power of the number of ranks. With
``--search-seconds``, it measures searches that get so many CPU seconds instead, and what their plans take.

Run ``python -m benchmarks.scale``.
"""

from __future__ import annotations

import itertools
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import linear_regression
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from lightning_realloc.layout import ClusterSpec, Layout, ModelLayout, ModelSpec
from lightning_realloc.limits import MAX_STAGING_BYTES
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.realloc.schedule import schedule_transfers
from lightning_realloc.report.model_source import read_roles
from lightning_realloc.report.plan_request import parse_request
from lightning_realloc.runtime.parallel.mesh import MeshRegistry, rank_groups
from lightning_realloc.strategies.pool.memory_check import settings_of_precision
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.pricing import PlanPricer

SIZES = (8, 64, 512, 4096)
DEVICES_PER_NODE = 8
MOST_FSDP = 64
"""Ranks of an FSDP group in the usual move: eight nodes."""
MAX_FLAT = 512
"""Most ranks for which FSDP over all of them is planned; its pieces grow with the square of the ranks."""
MAX_EVALUATIONS = 100
"""Plans that a search scores."""
FITTED_FROM = 64
"""Ranks from which exponents are fitted."""
FITTED = ("search, ms a plan", "simulate, ms", "plan, s", "schedule, s", "messages", "peak memory, MB")


def measure(num_ranks: int) -> dict[str, Any]:
    """Return the figures of one size."""
    be_quiet()
    pricer = make_pricer(num_ranks)
    task = pricer.task
    (best, found), search_s = _timed(
        lambda: pricer.search(seed=0, seconds=1.0, clock=lambda: 0.0, max_evaluations=MAX_EVALUATIONS)
    )
    _, simulate_s = _timed(lambda: pricer.price(best.plan))
    groups = {ranks for _, call in best.plan.calls for ranks in rank_groups(call.layout)}
    row: dict[str, Any] = {
        "ranks": num_ranks,
        "search, ms a plan": 1e3 * search_s / max(1, found.evaluations),
        "simulate, ms": 1e3 * simulate_s,
        "groups of a rank": sum(0 in ranks for ranks in groups),
        "groups": len(groups),
        "create groups, s": create_groups({call.layout for _, call in best.plan.calls}, num_ranks),
    }
    actor = task.roles["actor"].model
    row |= move(actor, f"dp{max(1, num_ranks // MOST_FSDP)}.fsdp{min(num_ranks, MOST_FSDP)}", task.cluster)
    if num_ranks <= MAX_FLAT:
        flat = move(actor, f"fsdp{num_ranks}", task.cluster)
        row |= {f"FSDP over all: {name}": flat[name] for name in ("plan, s", "schedule, s", "messages")}
    return row | {"peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}


def make_pricer(num_ranks: int) -> PlanPricer:
    """Return the pricer of plans for so many ranks."""
    cluster = f"h100:{num_ranks // DEVICES_PER_NODE}x{DEVICES_PER_NODE}"
    sequences = f"--batch={8 * num_ranks}"
    request = parse_request(["--algorithm=ppo", "--actor=Qwen2.5-7B", f"--cluster={cluster}", sequences])
    assert request.cluster is not None and request.memory_budget is not None
    flow, settings = request.dataflow, settings_of_precision(request.flags.precision)
    roles = read_roles(request.sources, flow, is_priced=True)
    estimator = RooflineEstimator(flow, request.cluster, roles, settings, request.workload)
    task = PlanningTask(
        dataflow=flow, roles=roles, cluster=request.cluster, settings=settings, workload=request.workload,
        memory_budget=request.memory_budget, headroom=request.headroom,
    )  # fmt: skip
    return PlanPricer(task, estimator)


def search_for(num_ranks: int, seconds: float) -> dict[str, Any]:
    """Return what a search of so many CPU seconds takes and finds; its last steps are not cut short."""
    be_quiet()
    pricer = make_pricer(num_ranks)
    (best, found), took_s = _timed(lambda: pricer.search(seed=0, seconds=seconds, clock=time.process_time))
    return {
        "ranks": num_ranks,
        "given, s": seconds,
        "took, s": took_s,
        "plans scored": found.evaluations,
        "s an iteration": best.seconds,
    }


def create_groups(layouts: Iterable[Layout], num_ranks: int) -> float:
    """Return the seconds that one rank takes to create its process groups, without the waits for its peers."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    _, seconds = _timed(lambda: MeshRegistry("cpu").create(layouts))
    dist.destroy_process_group()
    return seconds


def move(model: ModelSpec, training: str, cluster: ClusterSpec) -> dict[str, Any]:
    """Return what rank 0 plans, sends and receives for a move from training to generation."""
    generation = f"dp{cluster.num_devices // 4}.tp4"
    source, target = (ModelLayout(model, Layout.parse(text)) for text in (training, generation))
    plan, plan_s = _timed(lambda: plan_reallocation(source, target, cluster, rank=0))
    schedule, schedule_s = _timed(lambda: schedule_transfers(plan, max_staging_bytes=MAX_STAGING_BYTES))
    entering = [0] * cluster.num_nodes
    for (sender, receiver), num_bytes in plan.bytes_by_node_pair().items():
        entering[receiver] += num_bytes if sender != receiver else 0
    return {
        "plan, s": plan_s,
        "schedule, s": schedule_s,
        "messages": sum(map(len, schedule.rounds)),
        "rounds": len(schedule.rounds),
        "GB into a node": max(entering) / 1e9,
        "over minimum": plan.inter_node_bytes / max(1, plan.inter_node_bytes_minimum),
    }


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    result = function()
    return result, time.process_time() - begin


def exponents(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a row with the powers of the number of ranks by which figures grow."""
    fitted = [row for row in rows if row["ranks"] >= FITTED_FROM]
    found: dict[str, Any] = {"ranks": "power"}
    for name in FITTED:
        points = [(math.log(row["ranks"]), math.log(max(row[name], 1e-9))) for row in fitted]
        found[name] = linear_regression(*zip(*points, strict=True)).slope
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure all sizes."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of ranks, multiples of 8")
    parser.add_argument("--search-seconds", type=float, nargs="+", default=[], help="CPU seconds of searches")
    options = parser.parse_args(arguments)
    settings = {"sizes": options.sizes, "evaluations": MAX_EVALUATIONS, "search_seconds": options.search_seconds}
    report = BenchmarkReport("scale", settings=settings)
    rows = []
    searches: list[Callable[[int], dict[str, Any]]] = [
        partial(search_for, seconds=seconds) for seconds in options.search_seconds
    ]
    for num_ranks, function in itertools.product(options.sizes, searches or [measure]):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows.append(pool.submit(function, num_ranks).result())
        report.add_row(**rows[-1])
        report.write(options.json)
    if not searches and len([row for row in rows if row["ranks"] >= FITTED_FROM]) > 1:
        report.add_row(**exponents(rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
