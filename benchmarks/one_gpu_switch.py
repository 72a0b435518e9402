"""Switches of `benchmarks.one_gpu`: weights of one device for the next call, cast to bf16 or in the same memory."""

from __future__ import annotations

import time

import torch

from benchmarks.llamas import build_llama
from benchmarks.one_gpu_iterations import MODEL
from benchmarks.one_gpu_setting import Recorder, Scale, Setting
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.transfer.executor import Reallocation

CAST, ALIAS = "fp32 master to bf16 replica", "alias"
LEAST_SHARE = 0.7
"""Share of the copy bandwidth that a cast has to reach."""
MAX_ALIAS_S = 1e-3


def switch_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_switch`."""
    return (CAST, ALIAS)


def measure_switch(setting: Setting, recorder: Recorder) -> None:
    """Time switches of fp32 weights between two layouts of one device."""
    bandwidth = setting.copy_bytes_per_s()
    model = build_llama(setting.scale.shapes[MODEL], setting.device, torch.float32)
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layout = ModelLayout(describe_model(model), Layout.parse("dp1@0"))
    num_weights = sum(tensor.numel() for tensor in held.values())
    for case, dtype in ((CAST, torch.bfloat16), (ALIAS, torch.float32)):
        before = _allocated(setting)
        begin = time.perf_counter()
        move = Reallocation(
            layout, held, layout, rank=0, world_size=1, dtype=dtype, device=setting.device, transport="direct"
        )
        bound_s = time.perf_counter() - begin
        seconds = setting.median_seconds(move.run)
        num_bytes = num_weights * (4 + dtype.itemsize) if case == CAST else 0
        recorder.row(
            case, seconds=seconds, first_s=bound_s, gigabytes=num_bytes / 1e9, gb_per_s=num_bytes / seconds / 1e9,
            share=num_bytes / seconds / bandwidth, copy_gb_per_s=bandwidth / 1e9,
            added_gb=(_allocated(setting) - before) / 1e9,
        )  # fmt: skip
        if case == CAST:
            recorder.at_least("cast, share of the copy bandwidth", num_bytes / seconds / bandwidth, LEAST_SHARE)
        else:
            recorder.at_most("alias, seconds", seconds, MAX_ALIAS_S)


def _allocated(setting: Setting) -> int:
    """Return the bytes that CUDA's allocator has handed out; 0 on a CPU."""
    return torch.cuda.memory_allocated() if setting.is_gpu else 0
