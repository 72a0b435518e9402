"""Table of the README with the largest model that fits: ``python -m benchmarks.what_fits`` writes it.

Each cell runs the search of ``lightning-realloc plan`` on one node, from the largest model to the smallest. A model
fits if a plan was found, with the default head-room, that can start and run.
"""

from __future__ import annotations

from pathlib import Path

from lightning_realloc.report.model_source import read_roles
from lightning_realloc.report.plan_request import parse_request
from lightning_realloc.strategies.pool.memory_check import settings_of_precision
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.search.infeasible import NothingFitsError
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.pricing import PlanPricer

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- what fits: start -->\n", "<!-- what fits: end -->"
SIZES = ("72B", "32B", "14B", "7B", "3B", "1.5B", "0.5B")
"""Sizes of Qwen2.5, from the largest."""
MEMORY = {"24": ("l40s", "--memory-per-device=24GiB"), "80": ("h100",), "141": ("h200",)}
"""Column -> preset of the cluster, with its flags."""
NUM_DEVICES = (1, 2, 4, 8)
LORA = "--peft={r: 16, target_modules: all-linear}"
ROWS = {
    "GRPO": ("grpo", "--responses-per-prompt=8"),
    "GRPO, LoRA": ("grpo", "--responses-per-prompt=8", LORA),
    "PPO": ("ppo",),
    "DPO": ("dpo",),
    "DPO, LoRA": ("dpo", LORA),
}
"""Row -> algorithm, with its flags."""
MAX_EVALUATIONS = 3000
"""Plans that a search scores; raising it may find larger models, and takes longer."""


def fits(row: str, memory: str, num_devices: int, size: str) -> bool:
    """Return whether a search finds a plan that can start and run."""
    algorithm, *flags = ROWS[row]
    preset, *device_flags = MEMORY[memory]
    given = (f"--algorithm={algorithm}", f"--actor=Qwen2.5-{size}", f"--cluster={preset}:1x{num_devices}")
    request = parse_request([*given, *flags, *device_flags])
    assert request.cluster is not None and request.memory_budget is not None
    flow, settings = request.dataflow, settings_of_precision(request.flags.precision)
    roles = read_roles(request.sources, flow, is_priced=True, adapters=request.adapters, shares=request.shares)
    estimator = RooflineEstimator(flow, request.cluster, roles, settings, request.workload)
    task = PlanningTask(
        dataflow=flow, roles=roles, cluster=request.cluster, settings=settings, workload=request.workload,
        memory_budget=request.memory_budget, headroom=request.headroom,
    )  # fmt: skip
    try:
        best, _ = PlanPricer(task, estimator).search(
            seed=0, seconds=1.0, clock=lambda: 0.0, max_evaluations=MAX_EVALUATIONS
        )
    except NothingFitsError:
        return False
    return best.can_run


def largest_model(row: str, memory: str, num_devices: int) -> str:
    """Return the largest size that fits; a dash if none does."""
    return next((size for size in SIZES if fits(row, memory, num_devices, size)), "–")


def table() -> str:
    """Return the table in Markdown."""
    columns = [(memory, number) for memory in MEMORY for number in NUM_DEVICES]
    lines = [["", *(f"{number} × {memory} GB" for memory, number in columns)], ["---", *["--:"] * len(columns)]]
    lines += [[row, *(largest_model(row, *column) for column in columns)] for row in ROWS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_table(text: str) -> dict[tuple[str, str, int], str]:
    """Return the cells of the table in a page: (row, memory, number of devices) -> model."""
    lines = text.partition(START)[2].partition(END)[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    columns = [(words[2], int(words[0])) for words in map(str.split, head[1:])]
    return {(row, *column): cell for row, *cells in rows for column, cell in zip(columns, cells, strict=True)}


if __name__ == "__main__":
    before, _, rest = README.read_text().partition(START)
    README.write_text(f"{before}{START}{table()}{END}{rest.partition(END)[2]}")
