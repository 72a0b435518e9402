"""Seconds that ``lightning-realloc plan`` takes for published mixtures of experts on 64 to 1,024 devices, and plans.

Each row is one command in a process of its own, from its start to its last line. Rows without a plan end with the
command's error. Iterations are GRPO of one model without a reference, with the command's defaults for the search.

Run ``python -m benchmarks.large_plans``.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser

MODELS = ("Qwen3-30B-A3B", "gpt-oss-120b", "DeepSeek-V3")
NUM_NODES = (8, 16, 32, 64, 128)
DEVICES_PER_NODE = 8
MAX_WALL_S = 60.0
"""Seconds in which each command must end."""
LENGTHS = {4_096: 2_048, 65_536: 512}
"""Tokens of a response -> samples of an iteration, in groups of 16."""


def measure(model: str, num_nodes: int, response: int) -> dict[str, Any]:
    """Run the command, and return its layouts, the seconds of an iteration, and what the command took."""
    command = [
        *(sys.executable, "-m", "lightning_realloc", "plan", "--algorithm", "grpo", "--actor", model),
        *("--cluster", f"h100:{num_nodes}x{DEVICES_PER_NODE}", "--response-length", str(response)),
        *("--batch", str(LENGTHS[response]), "--responses-per-prompt", "16"),
    ]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        **{"model": model, "devices": num_nodes * DEVICES_PER_NODE, "response": response},
        **dict(_plan_of(done.stdout) if done.returncode == 0 else [("error", done.stderr.strip())]),
        **{"wall_s": round(wall, 1), "cpu_s": round(cpu, 1)},
    }


def _plan_of(output: str) -> Iterator[tuple[str, Any]]:
    """Yield the layouts of both calls without their ranks, and the seconds of an iteration."""
    for call in ("generate", "train"):
        layout = re.search(rf"^  actor\.{call} +(\S+?)@", output, re.MULTILINE)
        assert layout is not None, output
        yield call, layout[1]
    seconds = re.search(r"^([\d,.]+) s an iteration", output, re.MULTILINE)
    assert seconds is not None, output
    yield "iteration_s", float(seconds[1].replace(",", ""))


def main() -> int:
    """Print a row for each model, number of devices and length."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--models", nargs="+", default=MODELS, help="built-in names")
    parser.add_argument("--nodes", nargs="+", type=int, default=NUM_NODES, help="numbers of nodes of eight H100")
    options = parser.parse_args()
    report = BenchmarkReport("large_plans", settings={"samples of an iteration by response": LENGTHS})
    for response in LENGTHS:
        for model in options.models:
            for num_nodes in options.nodes:
                report.add_row(**measure(model, num_nodes, response))
                report.write(options.json)
    report.require_at_most("wall seconds of the longest", max(row["wall_s"] for row in report.rows), MAX_WALL_S)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
