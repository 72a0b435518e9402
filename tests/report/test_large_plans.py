"""Plans of mixtures of experts that divide experts, layers and rows, found in less than a minute of CPU time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import pytest

from lightning_realloc.report.plan_command import run_plan
from tests.matrices import matrix

TINY = (
    "layers=8,hidden=1024,intermediate=512,heads=16,kv_heads=4,vocabulary=8000,experts=16,experts_per_token=2,qk_norm"
)
MAX_CPU_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster, and the degrees that its plan has to use."""

    model: str
    cluster: str
    response: int
    axes: str
    options: tuple[str, ...] = ()


SHORT = ("--batch", "64", "--seconds", "2")
STAGES = Case(TINY, "rtx4090:4x2", 8_000, "pp zero_bubble", ("--memory-per-device", "3GiB", *SHORT))
LONG = replace(
    STAGES, model=TINY.replace("experts=16", "experts=32"), response=30_000, axes="cp ep",
    options=("--memory-per-device", "4GiB", *SHORT),
)  # fmt: skip
LARGE = ("--batch", "2048", "--responses-per-prompt", "16")
CASES = (
    LONG,
    STAGES,
    Case("Qwen3-30B-A3B", "h100:8x8", 4096, "pp ep", LARGE),
    Case("gpt-oss-120b", "h100:16x8", 65_536, "pp cp ep", ("--batch", "512")),
    Case("gpt-oss-120b", "h100:64x8", 4096, "ep", LARGE),
    Case("DeepSeek-V3", "h100:128x8", 4096, "pp ep", LARGE),
)


@pytest.mark.parametrize("case", matrix(CASES, LONG), ids=lambda case: f"{case.cluster}-{case.response}")
def test_mixtures_are_planned_over_all_axes_in_a_minute(case: Case) -> None:
    written: list[str] = []
    begin = time.process_time()
    arguments = ("--actor", case.model, "--cluster", case.cluster, "--response-length", str(case.response))
    code = run_plan(["--algorithm", "grpo", *arguments, *case.options], written.append)
    assert code == 0 and time.process_time() - begin < MAX_CPU_S
    calls = re.search(r"  actor.generate .*\n  actor.train .*\n", "".join(written))
    assert calls is not None
    for axis in case.axes.split():
        assert re.search(rf"\b{axis}[0-9]*\b", calls[0]), calls[0]
