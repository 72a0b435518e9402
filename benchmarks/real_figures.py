"""Predicted iteration times next to those that ReaL's authors published, for machines that were not at hand.

Seconds per PPO iteration are decoded from a figure of ReaL's documentation (Mei et al., arXiv:2406.14088, version 1;
`docs/source/images/vws.svg` of openpsi-project/ReaLHF). Decoding errs by up to 0.5 %. A column's name has the size of
actor and reference, or that of critic and reward; the other two are 7B. The runs have fp16, gradient checkpointing,
four PPO minibatches and 131,072 tokens an iteration, on A800 nodes of eight. Prompts have 128 tokens, responses are
forced to g tokens.

- `baseline`: one layout for all calls, tp 8, a pipeline stage per node, no replicas.
- `searched`: the plan of ReaL's search. The plan of each cell is not published. The prediction uses the pattern that
  its documentation calls near-optimal and installs without a search. These cells have no target.
- `found`: the plan of this package's search, with their checkpointing. It was not measured. Its predicted gain over the
  predicted baseline is compared with the gain that they measured for their search.

Columns of larger critics are held out: no constant is fitted to them.

Two constants are fitted, both to the baseline of the 7B column. The host's cost of a collective in a decoding step
follows from the column's growth with g; their engine ran without CUDA graphs. The share of peak flops in large matrix
products follows from its level. All other constants are the a800-80g preset.

Run ``python -m benchmarks.real_figures``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import NamedTuple

from benchmarks.harness import BenchmarkReport, make_parser
from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan, ExecutionPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.report.model_source import read_roles
from lightning_realloc.tuning.estimate.hardware import Efficiency
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.search.plan_search import SearchResult
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.pricing import PlanPricer
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.timeline.simulator import simulate

PROMPT_TOKENS = 128
TOKENS = 131_072
MINIBATCHES = 4
FITTED = "actor 7B"
ENGINE = Efficiency(captures_steps=False, decode_launch_s=0.5e-3, cache_share=0.8, step_s=1e-3, row_s=0.0)
"""Their engine, before the fit. It ran without CUDA graphs, reads the cache by flash-attention's kernel, and draws the
tokens of all sequences together. The times are nominal."""
CELL_TOLERANCE = 0.3
MEDIAN_TOLERANCE = 0.2
MOST_SEARCH_S = 10.0
EVALUATIONS = 20_000
"""Evaluations of each cell's search. No clock ends a search, so plans are the same on every machine."""

FLOW = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("reference.infer", "infer", "reference", "score", ("rollout",), ("ref_logprobs",)),
        ModelFunctionCall("reward.infer", "infer", "reward", "judge", ("rollout",), ("scores",)),
        ModelFunctionCall("critic.infer", "infer", "critic", "value", ("rollout",), ("values",)),
        ModelFunctionCall(
            "actor.train", "train", "actor", "actor_loss", ("rollout", "scores", "ref_logprobs", "values")
        ),
        ModelFunctionCall(
            "critic.train", "train", "critic", "critic_loss", ("rollout", "scores", "ref_logprobs", "values")
        ),
    )
)  # fmt: skip
SETTINGS = MemorySettings(master_bytes=4, copy_bytes=2, gathered_bytes=2)


class Cell(NamedTuple):
    """Measured seconds of an iteration."""

    response_tokens: int
    baseline: float
    searched: float


MODELS = {"7B": "Llama-2-7b-hf", "13B": "Llama-2-13b-hf", "34B": "CodeLlama-34b-hf", "70B": "Llama-2-70b-hf"}


@dataclass(frozen=True, slots=True)
class Column:
    """One size of the actor or of the critic."""

    name: str
    nodes: int
    training_nodes: int
    """Nodes on which the searched plan trains the actor; the critic is trained on the others."""
    cells: tuple[Cell, ...]

    @property
    def is_held_out(self) -> bool:
        """Whether the column only tests what was fitted to others."""
        return self.name.startswith("critic")

    def model(self, role: str) -> str:
        """Return the model of "actor" or "critic"."""
        named, size = self.name.split()
        return MODELS[size if role == named else "7B"]


COLUMNS = (
    Column("actor 7B", 1, 0, (Cell(128, 31.3, 23.3), Cell(384, 42.3, 28.0), Cell(896, 63.3, 37.4))),
    Column("actor 13B", 2, 1, (Cell(128, 30.1, 24.3), Cell(384, 42.6, 31.3), Cell(896, 69.1, 44.2))),
    Column("actor 34B", 4, 3, (Cell(128, 34.0, 29.2), Cell(384, 50.5, 46.7), Cell(896, 84.7, 77.4))),
    Column("actor 70B", 8, 7, (Cell(128, 43.7, 41.6), Cell(384, 71.6, 65.9), Cell(896, 129.0, 123.8))),
    Column("critic 13B", 2, 1, (Cell(128, 28.5, 20.8), Cell(384, 37.9, 24.6), Cell(896, 57.5, 34.3))),
    Column("critic 34B", 4, 1, (Cell(128, 30.7, 26.7), Cell(384, 41.9, 29.4), Cell(896, 67.9, 43.4))),
    Column("critic 70B", 8, 1, (Cell(128, 33.0, 29.8), Cell(384, 49.8, 37.8), Cell(896, 77.9, 43.4))),
)


def estimator(column: Column, response_tokens: int, efficiency: Efficiency) -> RooflineEstimator:
    """Return the estimator of one cell."""
    roles = _roles(column.model("actor"), column.model("critic"))
    workload = Workload(
        num_sequences=TOKENS // (PROMPT_TOKENS + response_tokens), prompt_tokens=PROMPT_TOKENS,
        response_tokens=response_tokens, num_minibatches=MINIBATCHES,
    )  # fmt: skip
    cluster = ClusterSpec.parse(f"a800-80g:{column.nodes}x8")
    return RooflineEstimator(FLOW, cluster, roles, SETTINGS, workload, efficiency=efficiency)


@cache
def _roles(actor: str, critic: str) -> dict[str, RoleMemory]:
    """Return all roles, whose models take most of the time of an estimate."""
    return read_roles({"actor": actor, "critic": critic, "reference": actor, "reward": critic}, FLOW, is_priced=True)


def baseline_plan(column: Column) -> ExecutionPlan:
    """Return ReaL's baseline: a pipeline stage per node, tensor parallelism inside."""
    layout = f"pp{column.nodes}.tp8"
    return _plan(dict.fromkeys((call.name for call in FLOW.model_calls), layout))


def searched_plan(column: Column) -> ExecutionPlan:
    """Return the pattern of searched plans in ReaL's documentation, for this number of nodes."""
    nodes, devices = column.nodes, 8 * column.nodes
    if nodes == 1:
        return _plan(
            {
                "actor.generate": "pp2.dp4", "reference.infer": "dp2.tp4", "reward.infer": "dp2.tp2@0-3",
                "critic.infer": "dp2.tp2@4-7", "actor.train": "dp2.tp2@0-3", "critic.train": "dp2.tp2@4-7",
            }
        )  # fmt: skip
    half, trained = (nodes + 1) // 2, column.training_nodes
    return _plan(
        {
            "actor.generate": f"pp{nodes}.dp8",
            "reference.infer": f"pp{nodes}.dp2.tp4",
            "reward.infer": f"pp{half}.dp2.tp4@0-{8 * half - 1}",
            "critic.infer": f"pp{nodes - half}.dp2.tp4@{8 * half}-{devices - 1}",
            "actor.train": f"pp{trained}.dp2.tp4@0-{8 * trained - 1}",
            "critic.train": f"pp{nodes - trained}.dp2.tp4@{8 * trained}-{devices - 1}",
        }
    )


def _plan(layouts: dict[str, str]) -> ExecutionPlan:
    """Return a plan with ReaL's micro-batches: one without a pipeline, else one per stage, and two per stage in
    training."""
    calls = []
    for name, text in layouts.items():
        layout, trains = Layout.parse(text), FLOW.call(name).kind == "train"
        share = TOKENS // layout.data_parallel_size // (MINIBATCHES if trains else 1)
        stages = layout.dims.pp
        tokens = share // (2 * stages if trains and stages > 1 else stages)
        options = {"micro_batch_tokens": tokens, "gradient_checkpointing": trains, "max_slots": TOKENS}
        calls.append((name, CallPlan(layout, **options)))
    return ExecutionPlan(tuple(calls), offload=("reference", "reward"))


PLANS = {"baseline": baseline_plan, "searched": searched_plan}


def predict(column: Column, response_tokens: int, efficiency: Efficiency, plan: str = "baseline") -> float:
    """Return the seconds of an iteration."""
    answers = estimator(column, response_tokens, efficiency)
    return simulate(PLANS[plan](column), answers, iterations=4).seconds_per_iteration


def fit() -> Efficiency:
    """Fit two constants to the 7B column: its slope over response lengths, then its mean."""
    column = next(column for column in COLUMNS if column.name == FITTED)
    short, *_, long = column.cells
    efficiency = ENGINE

    def slope(value: float) -> float:
        candidate = replace(efficiency, collective_launch_s=value)
        return predict(column, long.response_tokens, candidate) - predict(column, short.response_tokens, candidate)

    def level(value: float) -> float:
        candidate = replace(efficiency, matmul_share=value)
        return -sum(predict(column, cell.response_tokens, candidate) for cell in column.cells)

    wanted = -sum(cell.baseline for cell in column.cells)
    for _ in range(2):  # the two constants hardly depend on each other
        launch = _solve(slope, long.baseline - short.baseline, 0.0, 1e-2)
        efficiency = replace(efficiency, collective_launch_s=launch)
        efficiency = replace(efficiency, matmul_share=_solve(level, wanted, 0.05, 1.0))
    return efficiency


def _solve(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return the argument at which a growing function has a value, or the nearer end.

    Regula falsi: the end that stays twice counts half (Illinois), so that a bent function takes few evaluations, too.
    """
    below, above = function(low) - wanted, function(high) - wanted
    if below >= 0 or above <= 0:
        return low if below >= 0 else high
    middle, last = low, 0.0
    for _ in range(25):
        middle = low + (high - low) * below / (below - above)
        value = function(middle) - wanted
        if abs(value) < 1e-7 * abs(wanted):
            break
        if value < 0:
            low, below, above = middle, value, above / 2 if last < 0 else above
        else:
            high, above, below = middle, value, below / 2 if last > 0 else below
        last = value
    return middle


def find_plan(column: Column, response_tokens: int, efficiency: Efficiency, evaluations: int) -> SearchResult:
    """Search a plan for one cell that fits by the memory forecast of every rank."""
    prices = estimator(column, response_tokens, efficiency)
    task = PlanningTask(
        dataflow=FLOW, roles=prices.roles, cluster=prices.cluster, settings=SETTINGS, workload=prices.tokens.workload,
        memory_budget=prices.cluster.device_memory_bytes, headroom=0.0,
    )  # fmt: skip
    pricer = PlanPricer(task, prices, options=CallOptions(gradient_checkpointing=(True,)))
    return pricer.search(seed=0, seconds=math.inf, clock=time.process_time, max_evaluations=evaluations)[1]


class Prediction(NamedTuple):
    """Predicted seconds of a cell under a plan, next to the measured ones."""

    column: Column
    cell: Cell
    plan: str
    seconds: float
    baseline: float
    """Predicted seconds of the baseline."""

    @property
    def measured(self) -> float:
        """Measured seconds."""
        return self.cell.baseline if self.plan == "baseline" else self.cell.searched

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        return self.seconds / self.measured - 1

    @property
    def gain(self) -> float:
        """Measured gain over the baseline."""
        return self.cell.baseline / self.measured - 1

    @property
    def predicted_gain(self) -> float:
        """Predicted gain over the baseline."""
        return self.baseline / self.seconds - 1

    @property
    def use(self) -> str:
        """Return "fitted", "held out" or, for other predictions, ""."""
        if self.column.is_held_out:
            return "held out"
        return "fitted" if (self.column.name, self.plan) == (FITTED, "baseline") else ""


def predictions(efficiency: Efficiency) -> list[Prediction]:
    """Predict every cell under both plans."""
    found = []
    for column in COLUMNS:
        for cell in column.cells:
            seconds = {plan: predict(column, cell.response_tokens, efficiency, plan) for plan in PLANS}
            found += [Prediction(column, cell, plan, value, seconds["baseline"]) for plan, value in seconds.items()]
    return found


def largest_optimism(searched: Iterable[Prediction]) -> float:
    """Return the largest predicted speed-up over its measured value."""
    return max((1 + one.predicted_gain) / (1 + one.gain) for one in searched)


def compare_gains(
    report: BenchmarkReport, efficiency: Efficiency, evaluations: int, searched: list[Prediction]
) -> None:
    """Search every cell, and require that the predicted gain reaches the measured gain of ReaL's search.

    ``careful_gain`` is that of a predicted speed-up which is divided by the largest factor by which one of the columns
    that are not held out was predicted too large.
    """
    optimism = largest_optimism(one for one in searched if not one.column.is_held_out)
    report.settings |= {"evaluations": evaluations, "optimism": optimism}
    longest_s = 0.0
    for pattern in searched:
        column, cell = pattern.column, pattern.cell
        begin = time.process_time()
        found = find_plan(column, cell.response_tokens, efficiency, evaluations)
        longest_s = max(longest_s, time.process_time() - begin)
        predicted = pattern.baseline / found.seconds - 1
        report.add_row(
            plan="found", column=column.name, devices=8 * column.nodes, response=cell.response_tokens,
            predicted_s=f"{found.seconds:.1f}", gain=f"{pattern.gain:.0%}", predicted_gain=f"{predicted:.0%}",
            careful_gain=f"{(1 + predicted) / optimism - 1:.0%}",
            pattern_s=f"{pattern.seconds:.1f}", bound_s=f"{found.lower_bound:.1f}",
        )  # fmt: skip
        report.require_at_least(f"gain of {column.name}, {cell.response_tokens} tokens", predicted, pattern.gain)
        sys.stderr.write(f"{column.name}, {cell.response_tokens} tokens\n{found.plan.table()}\n")
    report.require_at_most("CPU seconds of the longest search", longest_s, MOST_SEARCH_S)


def main(argv: list[str] | None = None) -> int:
    """Fit, predict and compare."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS, help="evaluations of each search; 0: no search")
    options: argparse.Namespace = parser.parse_args(argv)
    report = BenchmarkReport("seconds of an iteration, measured by ReaL's authors")
    efficiency = fit()
    report.settings = {
        "fitted_to": FITTED, "collective_launch_s": efficiency.collective_launch_s,
        "matmul_share": efficiency.matmul_share,
    }  # fmt: skip
    found = sorted(predictions(efficiency), key=lambda one: one.plan)
    for one in found:
        report.add_row(
            plan=one.plan, column=one.column.name, devices=8 * one.column.nodes, response=one.cell.response_tokens,
            measured_s=f"{one.measured:.1f}", predicted_s=f"{one.seconds:.1f}", error=f"{one.error:+.1%}",
            gain=f"{one.gain:.0%}", predicted_gain=f"{one.predicted_gain:.0%}", use=one.use,
        )  # fmt: skip
    _require(report, found)
    if options.evaluations:
        compare_gains(report, efficiency, options.evaluations, [one for one in found if one.plan == "searched"])
    return report.finish(options)


def _require(report: BenchmarkReport, found: list[Prediction]) -> None:
    """Add the targets of errors, and report the median error of searched plans."""
    for use, text in (("", "larger actors"), ("held out", "larger critics")):
        baseline = [abs(one.error) for one in found if (one.plan, one.use) == ("baseline", use)]
        report.require_at_most(f"baseline, {text}: largest error", max(baseline), CELL_TOLERANCE)
        report.require_at_most(f"baseline, {text}: median error", median(baseline), MEDIAN_TOLERANCE)
        searched = [one for one in found if (one.plan, one.use) == ("searched", use)]
        report.settings[f"median_error_searched, {text}"] = median(abs(one.error) for one in searched)
    held_out = largest_optimism(one for one in found if one.plan == "searched" and one.use == "held out")
    others = largest_optimism(one for one in found if one.plan == "searched" and one.use != "held out")
    report.require_at_most("searched, larger critics: largest predicted speed-up over measured", held_out, others)


if __name__ == "__main__":
    sys.exit(main())
