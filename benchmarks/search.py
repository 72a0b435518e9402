"""Plan search: distance from the best plan, and speed, with a toy estimator and without devices.

Parts:

- (a) In spaces small enough to try all plans, the search must find the best plan in each of 50 seeded instances.
- (b) For PPO of a 70B and a 7B model on 128 devices, ten seconds must come within 2 % of a longer search.
- (c) A search for 1,024 devices must take at most one minute of one core and 2 GiB.
- (d) Plain Metropolis-Hastings with the same problem and seconds must not find a better plan.

Seconds of searches are CPU seconds of one process with one thread, since wall time on a shared machine depends on other
processes. The results hold for the estimators used here.

Run ``python -m benchmarks.search``.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from dataclasses import replace

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.random_estimator import RandomEstimator
from benchmarks.search_baseline import every_state, metropolis_hastings
from benchmarks.toy_estimator import ToyEstimator, decoder
from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.search.local import SearchProgress
from lightning_realloc.tuning.search.plan_search import SearchResult, search_plan
from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.search.space import CallOptions

ROUNDING = 1e-6
"""Relative difference of seconds up to which plans count as equal."""
MAX_RATIO = 1.02
"""Largest seconds of a ten-second search relative to those of the best known plan."""
MAX_BYTES = 2 << 30
"""Most bytes of the process."""
LARGE_SPACE_PERIOD = 24
"""One space in this many has eight devices, whose 10^5 plans take long to try."""


def _call(name: str, needs: str, produces: str = "") -> ModelFunctionCall:
    role, kind = name.split(".")
    return ModelFunctionCall(name, kind, role, kind, tuple(needs.split()), tuple(produces.split()))  # type: ignore[arg-type]


PPO = Dataflow(
    (
        _call("actor.generate", "batch", "rollout"),
        _call("reference.infer", "rollout", "ref_logprobs"),
        _call("reward.infer", "rollout", "rewards"),
        _call("critic.infer", "rollout", "values"),
        _call("actor.train", "rollout ref_logprobs rewards values"),
        _call("critic.train", "rollout ref_logprobs rewards values"),
    )
)
GRPO = Dataflow(
    (
        _call("actor.generate", "batch", "rollout"),
        _call("reference.infer", "rollout", "ref_logprobs"),
        _call("actor.train", "rollout ref_logprobs"),
    )
)
PROXIMAL = Dataflow(
    (
        _call("actor.generate", "batch", "rollout"),
        _call("actor.infer", "rollout", "old_logprobs"),
        _call("actor.train", "rollout old_logprobs"),
    )
)
SMALL = (
    *((GRPO, shape) for shape in ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1))),
    *((PROXIMAL, shape) for shape in ((1, 4), (2, 2), (4, 1))),
    *((PPO, shape) for shape in ((1, 2), (2, 1))),
)
"""Dataflow, number of nodes and devices per node of the spaces in which all plans are tried."""


# --- (a) small spaces -------------------------------------------------------------------------------------------------


def small_instance(seed: int) -> tuple[Estimator, CallOptions, int]:
    """Return an estimator, options and a memory budget; odd seeds have random prices."""
    rng = random.Random(seed)
    flow, (nodes, devices) = SMALL[seed % len(SMALL)]
    if seed % LARGE_SPACE_PERIOD >= LARGE_SPACE_PERIOD - 2:
        flow, (nodes, devices) = GRPO, ((1, 8), (2, 4))[seed % 2]
    tokens = (1024, 4096) if flow is not PPO and nodes * devices <= 2 else (1024,)
    options = CallOptions(micro_batch_tokens=tokens, gradient_checkpointing=(False,), max_slots=(64,))
    cluster = replace(ClusterSpec.local(devices, "a100-80g"), num_nodes=nodes)
    if seed % 2:
        slow_host = replace(cluster, host_bytes_per_s=1e4)
        return RandomEstimator(dataflow=flow, cluster=slow_host, seed=seed), options, rng.choice((4500, 7000, 10**6))
    cluster = replace(cluster, intra_node_bytes_per_s=10 ** rng.uniform(10, 12))
    models = {role: decoder(2, rng.choice((1024, 2048, 4096)), 4) for role in flow.roles}
    estimator = ToyEstimator(
        dataflow=flow,
        cluster=cluster,
        models=models,
        num_sequences=rng.choice((8, 32, 256)),
        prompt_tokens=rng.choice((64, 512)),
        response_tokens=rng.choice((64, 512)),
    )
    return estimator, options, rng.choice((4 << 30, 80 << 30))


def run_small(report: BenchmarkReport, instances: int) -> None:
    """Search and enumerate each space; add a row for each kind of space."""
    optimal, seconds = 0, {}
    for seed in range(instances):
        estimator, options, budget = small_instance(seed)
        models = {role: decoder(2, 8, 4) for role in estimator.dataflow.roles}
        models |= getattr(estimator, "models", {})
        problem = _problem(estimator, models, options, budget)
        begin = time.monotonic()
        tried, best = 0, None
        for state, offload in every_state(problem):
            tried += 1
            score = problem.score(state, offload)
            best = score if best is None or score < best else best
        assert best is not None, "every space has plans"
        middle = time.monotonic()
        try:
            found = search_plan(
                models,
                estimator,
                seed=seed,
                seconds=30.0,
                options=options,
                memory_budget=budget,
            ).seconds
        except PlanError:
            found = float("inf")
        is_best = found <= best.seconds * (1 + ROUNDING) if best.is_legal else found == float("inf")
        optimal += is_best
        sys.stderr.write(f"(a) {seed}: {tried} plans, {'the best' if is_best else 'NOT THE BEST'}\n")
        took = (tried, middle - begin, time.monotonic() - middle)
        name = (len(problem.calls), f"{estimator.cluster.num_nodes}x{estimator.cluster.devices_per_node}")
        seconds.setdefault(name, []).append((*took, is_best))
    for (calls, shape), rows in seconds.items():
        report.add_row(
            part="a",
            problem=f"{calls} calls, {shape}",
            arm="branch and bound",
            runs=len(rows),
            plans=max(row[0] for row in rows),
            everything_s=round(max(row[1] for row in rows), 2),
            search_s=round(max(row[2] for row in rows), 2),
            optimal=sum(row[3] for row in rows),
        )
    report.require_at_least(f"(a) optimal, of {instances}", optimal, instances)


def _problem(estimator: Estimator, models: dict, options: CallOptions, budget: int) -> Problem:
    return Problem(
        models,
        estimator,
        options=options,
        overlap="iterations",
        memory_budget=budget,
        is_late=lambda: False,
    )


# --- (b), (c), (d) large spaces ---------------------------------------------------------------------------------------


def ppo(num_nodes: int, *, large: str = "70B") -> ToyEstimator:
    """Return PPO on nodes of eight A100: a large actor and reference, a 7B critic and reward model."""
    actor = {"70B": decoder(80, 8192, 64), "13B": decoder(40, 5120, 40), "7B": decoder(32, 4096, 32)}[large]
    small = decoder(32, 4096, 32)
    return ToyEstimator(
        dataflow=PPO,
        cluster=ClusterSpec.parse(f"a100-80g:{num_nodes}x8"),
        num_sequences=512,
        prompt_tokens=1024,
        response_tokens=1024,
        models={"actor": actor, "reference": actor, "critic": small, "reward": small},
    )


def search(report: BenchmarkReport, part: str, estimator: ToyEstimator, seconds: float, seed: int) -> SearchResult:
    """Run a search, and add a row."""
    begin, cpu = time.monotonic(), time.process_time()
    result = search_plan(estimator.models, estimator, seed=seed, seconds=seconds, clock=time.process_time)
    report.add_row(
        part=part,
        problem=_name(estimator),
        arm="ours",
        seed=seed,
        wall_s=round(time.monotonic() - begin, 1),
        search_s=round(time.process_time() - cpu, 1),
        plans=result.evaluations,
        iteration_s=round(result.seconds, 4),
        bound_s=round(result.lower_bound, 4),
        gap=round(result.gap, 3),
        last_better_s=round(result.history[-1].after_s, 1),
    )
    sys.stderr.write(f"({part}) {_name(estimator)} seed {seed}: {result.seconds:.4f} s\n{result.plan.table()}\n")
    return result


def _name(estimator: ToyEstimator) -> str:
    blocks = estimator.models["actor"].num_blocks
    return f"{blocks} blocks + 32, {estimator.cluster.num_nodes}x8"


def random_walk(report: BenchmarkReport, estimator: ToyEstimator, seconds: float, seed: int) -> float:
    """Run Metropolis-Hastings, and add a row; return the seconds of an iteration."""
    progress = SearchProgress(time.process_time, seconds)
    problem = _problem(estimator, estimator.models, CallOptions(), estimator.cluster.device_memory_bytes)
    metropolis_hastings(problem, random.Random(seed), progress)
    best = progress.best
    found = best.seconds if best is not None and best.is_legal else float("inf")
    report.add_row(
        part="d",
        problem=_name(estimator),
        arm="Metropolis-Hastings",
        seed=seed,
        search_s=round(progress.elapsed_s, 1),
        plans=progress.evaluations,
        iteration_s=round(found, 4),
    )
    return found


def run_large(report: BenchmarkReport, options: argparse.Namespace) -> None:
    """Compare short searches with a long one and with the random walk; search on 1,024 devices."""
    short: list[float] = []
    if {"b", "d"} & set(options.parts):
        short = [search(report, "b", ppo(16), 10.0, seed).seconds for seed in range(options.seeds)]
    if "b" in options.parts:
        long = search(report, "b", ppo(16), options.long_s, options.seeds).seconds
        report.require_at_most("(b) ten seconds over the best found", max(short) / min(long, *short), MAX_RATIO)
    if "d" in options.parts:
        ratios = [ours / random_walk(report, ppo(16), 10.0, seed) for seed, ours in enumerate(short)]
        for large, nodes in (("7B", 1), ("7B", 2), ("13B", 4), ("70B", 8)):
            ours = search(report, "d", ppo(nodes, large=large), 5.0, 0).seconds
            ratios.append(ours / random_walk(report, ppo(nodes, large=large), 5.0, 0))
        report.require_at_most("(d) ours over Metropolis-Hastings, at worst", max(ratios), 1 + ROUNDING)
    if "c" in options.parts:
        begin = time.process_time()
        search(report, "c", ppo(128), 58.0, 0)
        report.require_at_most("(c) CPU seconds for 1,024 devices", time.process_time() - begin, 60.0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report.require_at_most("(c) peak bytes of the process", peak, MAX_BYTES)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--parts", default="abcd", help="letters of the parts to run")
    parser.add_argument("--instances", type=int, default=50, help="small spaces of (a)")
    parser.add_argument("--seeds", type=int, default=3, help="short searches of (b) and (d)")
    parser.add_argument("--long-s", type=float, default=60.0, help="seconds of the long search of (b); 600 in full")
    options = parser.parse_args(arguments)
    report = BenchmarkReport("search", seeds=tuple(range(options.seeds)), settings=vars(options) | {"json": None})
    if "a" in options.parts:
        run_small(report, options.instances)
    run_large(report, options)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
