"""Sizes, device facts and clock of `benchmarks.one_gpu`, and the recorder by which a part hands on its results."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.llamas import SHAPES, Shape
from lightning_realloc.layout.cluster import PRESETS


class Result(NamedTuple):
    """One message of a part: the name of a method of `BenchmarkReport`, and its arguments."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorder:
    """Hands the rows and targets of one part on as soon as they are measured."""

    part: str
    send: Callable[[Result], object]

    def row(self, case: str, **cells: Any) -> None:
        """Hand on one row of the part's table."""
        self.send(Result("add_row", {"part": self.part, "case": case, **cells}))

    def skip(self, case: str, reason: str) -> None:
        """Hand on that a case cannot be measured here."""
        self.row(case, not_measured=reason)

    def at_least(self, name: str, value: float, target: float) -> None:
        """Hand on a figure that must not be smaller than ``target``."""
        self.send(Result("require_at_least", {"name": f"{self.part}: {name}", "value": value, "target": target}))

    def at_most(self, name: str, value: float, target: float) -> None:
        """Hand on a figure that must not be larger than ``target``."""
        self.send(Result("require_at_most", {"name": f"{self.part}: {name}", "value": value, "target": target}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Models and amounts of work."""

    shapes: dict[str, Shape]
    dtype: torch.dtype
    """Dtype of weights that generate."""
    precision: str
    """Precision of Trainers."""
    batches: tuple[int, ...]
    """Samples of a decoding step."""
    attended: int
    """Positions that each sample of a measured step attends to."""
    prefills: tuple[tuple[int, int], ...]
    """(prompts, tokens of each) that are read at once."""
    num_prompts: int
    num_responses: int
    """Responses per prompt of GRPO."""
    prompt_tokens: int
    response_tokens: int
    micro_batch_tokens: int
    """Tokens of a training pass."""
    trl_micro_batch: int
    """Sequences of a training pass of TRL, whose default is 8."""
    compile_backend: str
    copied_bytes: int
    """Bytes of the copy that measures the bandwidth."""
    matrix_size: int
    """Rows of the square matrices whose product measures the rate of the matrix units."""
    repeats: int


GPU = Scale(
    shapes=SHAPES, dtype=torch.bfloat16, precision="bf16-mixed", batches=(32, 128, 8, 1), attended=512,
    prefills=((16, 512), (4, 2048)), num_prompts=16, num_responses=8, prompt_tokens=64, response_tokens=512,
    micro_batch_tokens=8192, trl_micro_batch=8, compile_backend="inductor", copied_bytes=8 << 30, matrix_size=8192,
    repeats=20,
)  # fmt: skip
TINY = Scale(
    shapes={
        "1b": Shape(64, 128, 2, 4, 16, tied=True, num_kv_heads=2, vocabulary=512, max_length=512),
        "8b": Shape(96, 128, 2, 4, 24, tied=False, num_kv_heads=2, vocabulary=512, max_length=512),
    },
    dtype=torch.float32, precision="32-true", batches=(2, 1), attended=64, prefills=((2, 32),), num_prompts=2,
    num_responses=2, prompt_tokens=8, response_tokens=8, micro_batch_tokens=64, trl_micro_batch=2,
    compile_backend="eager", copied_bytes=32 << 20, matrix_size=256, repeats=3,
)  # fmt: skip
"""The same on a CPU, in a minute: it shows that the parts run."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Device and sizes of a run."""

    scale: Scale
    device_type: str
    folder: Path
    """Folder for models that arms read."""

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device(self.device_type)

    @property
    def is_gpu(self) -> bool:
        """Whether targets apply."""
        return self.device_type == "cuda"

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the wall time of ``work`` until the device has finished it."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def median_seconds(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """Return the median seconds of several runs, after one that is not counted."""
        work()
        return median(self.seconds(work) for _ in range(repeats or self.scale.repeats))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def copy_bytes_per_s(self) -> float:
        """Return the bytes that a copy on the device reads and writes per second."""
        source = torch.randint(0, 255, (self.scale.copied_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.median_seconds(lambda: target.copy_(source))

    def product_flops_per_s(self) -> float:
        """Return the operations per second of a product of random square matrices."""
        size = self.scale.matrix_size
        one, other = (torch.randn(size, size, device=self.device, dtype=self.scale.dtype) for _ in range(2))
        return 2 * size**3 / self.median_seconds(lambda: one @ other)

    def peak_flops_per_s(self) -> float:
        """Return the dense bf16 rate of the data sheet, by which MFU is defined; that of a product without one."""
        name = torch.cuda.get_device_name().lower() if self.is_gpu else ""
        sheets = [preset for text, preset in PRESETS.items() if text.split("-")[0] in name.replace(" ", "-").split("-")]
        return sheets[0].device_flops if sheets else self.product_flops_per_s()


def describe_device(setting: Setting) -> dict[str, Any]:
    """Return the card, its driver, and how busy it is before the run."""
    if not setting.is_gpu:
        return {"card": "none: tiny models on a CPU"}
    free, total = torch.cuda.mem_get_info()
    query = "--query-gpu=driver_version,utilization.gpu,temperature.gpu,clocks.sm"
    try:
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        answer = f"unknown: {error}"
    return {
        "card": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "memory_bytes": total,
        "free_bytes": free,
        "driver, utilization, temperature, clock": answer,
    }
