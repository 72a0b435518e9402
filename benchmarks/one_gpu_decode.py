"""Decoding and prefill of `benchmarks.one_gpu`, next to the device's bandwidth and Hugging Face's `generate`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from benchmarks.generation import Workload, checked, draw_workload, run_engine, run_generate
from benchmarks.harness import interleave, paired_ratio
from benchmarks.llamas import Shape, build_llama
from benchmarks.one_gpu_setting import Recorder, Scale, Setting
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.generation.cache.kv_cache import SlotCache
from lightning_realloc.generation.core.step import DecodeRow
from lightning_realloc.generation.forward.attention import slot_attention
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.runtime.transfer.point_to_point import Arena

ROOF_SHARES = {"1b": {32: 0.45, 128: 0.45}, "8b": {1: 0.6, 8: 0.6, 32: 0.6, 128: 0.6}}
"""Model -> batch -> share of the bandwidth that a step has to reach."""
OVER_GENERATE = {"1b": 6.0, "8b": 5.0}
"""Model -> how many times as fast as `generate` a whole call has to be."""


# --- one step ---------------------------------------------------------------------------------------------------------


def decode_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_decode`."""
    return tuple(f"{model} B={batch}" for model in scale.shapes for batch in scale.batches)


def measure_decode(setting: Setting, recorder: Recorder) -> None:
    """Time a decoding step alone, by the share of the bandwidth at which it reads weights, keys and values."""
    bandwidth = setting.copy_bytes_per_s()
    for name, shape in setting.scale.shapes.items():
        with _model(shape, setting) as model:
            for batch in setting.scale.batches:
                unfused, _ = time_step(model, batch, setting, fuses_layers=False)
                seconds, is_captured = time_step(model, batch, setting)
                num_bytes = step_bytes(shape, batch, setting.scale)
                share = num_bytes / seconds / bandwidth
                recorder.row(
                    f"{name} B={batch}", ms_per_step=1e3 * seconds, captured=is_captured, gigabytes=num_bytes / 1e9,
                    roof_ms=1e3 * num_bytes / bandwidth, roof_share=share, copy_gb_per_s=bandwidth / 1e9,
                    ms_unfused=1e3 * unfused,
                )  # fmt: skip
                if batch in ROOF_SHARES[name]:
                    recorder.at_least(f"{name} B={batch}, share of the roof", share, ROOF_SHARES[name][batch])


def compiled_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_compiled`."""
    return tuple(f"{case}, blocks compiled" for case in decode_cases(scale))


def measure_compiled(setting: Setting, recorder: Recorder) -> None:
    """Time the same steps with compiled blocks, and the first one with its compilation."""
    bandwidth, backend = setting.copy_bytes_per_s(), setting.scale.compile_backend
    for name, shape in setting.scale.shapes.items():
        with _model(shape, setting) as model:
            for batch in setting.scale.batches:
                begin = time.perf_counter()
                seconds, is_captured = time_step(model, batch, setting, compile_backend=backend)
                num_bytes = step_bytes(shape, batch, setting.scale)
                recorder.row(
                    f"{name} B={batch}, blocks compiled", ms_per_step=1e3 * seconds, captured=is_captured,
                    roof_share=num_bytes / seconds / bandwidth, all_s=time.perf_counter() - begin,
                )  # fmt: skip


def step_bytes(shape: Shape, batch: int, scale: Scale) -> int:
    """Return the bytes of weights, keys and values that one step reads."""
    return shape.read_weights * scale.dtype.itemsize + shape.cache_bytes(batch * scale.attended, scale.dtype)


@torch.no_grad()
def time_step(
    model: PreTrainedModel, batch: int, setting: Setting, *, fuses_layers: bool = True,
    compile_backend: str | None = None,
) -> tuple[float, bool]:  # fmt: skip
    """Return the seconds of a step of ``batch`` samples at the same position, and whether a graph replays it.

    Args:
        model: Model to run.
        batch: Number of samples.
        setting: Device and sizes.
        fuses_layers: Whether layers run as fewer kernels.
        compile_backend: Backend of ``torch.compile`` for the blocks; None: none.
    """
    attended = setting.scale.attended
    cache = SlotCache()
    graphs = StepGraphs(model, cache, compile=compile_backend)
    graphs.fuses_layers = fuses_layers
    runner = ModelRunner(model, cache, num_slots=batch, longest=attended, graphs=graphs)
    rows = [DecodeRow([5], attended - 1)] * batch
    with slot_attention(model):
        for _ in range(3):  # the second step is captured
            runner.forward([], rows)
        repeats = setting.scale.repeats
        seconds = setting.seconds(lambda: [runner.forward([], rows) for _ in range(repeats)]) / repeats
        is_captured = runner.replays_steps
    graphs.release()
    cache.release()
    return seconds, is_captured


# --- whole calls ------------------------------------------------------------------------------------------------------


def generate_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_generate`."""
    return decode_cases(scale)


def measure_generate(setting: Setting, recorder: Recorder) -> None:
    """Time whole calls for prompts and responses of ragged lengths, next to `generate` in padded batches."""
    bandwidth = setting.copy_bytes_per_s()
    for name, shape in setting.scale.shapes.items():
        with _model(shape, setting) as model:
            for batch in setting.scale.batches:
                _compare_calls(f"{name} B={batch}", name, model, batch, setting, recorder, bandwidth)


def _compare_calls(
    case: str, name: str, model: PreTrainedModel, batch: int, setting: Setting, recorder: Recorder, bandwidth: float
) -> None:
    shape = setting.scale.shapes[name]
    work = draw_workload(2 * batch, shape.vocabulary, seed=0)
    engine = GenerationEngine(model, max_slots=batch)
    total = sum(work.lengths)
    arms = {
        "generate": checked(lambda: _until_done(setting, run_generate(model, work, batch)), total),
        "engine": checked(lambda: _until_done(setting, run_engine(engine, work, 0)), total),
    }
    run_generate(model, Workload(work.prompts[:1], (2,)), 1)  # loads kernels
    for _ in range(2):  # the second call captures shapes that occur once per call
        arms["engine"]()
    times = interleave(arms, repeats=1, clock=time.perf_counter)
    over = paired_ratio(times["generate"], times["engine"])
    num_steps, seconds = engine.stats.num_steps, times["engine"][0]
    num_bytes = call_bytes(shape, work, num_steps, setting.scale)
    recorder.row(
        case, tokens=total, generate_s=times["generate"][0], engine_s=seconds, over_generate=over,
        tokens_per_s=total / seconds, steps=num_steps, ms_per_step=1e3 * seconds / num_steps,
        roof_share=num_bytes / seconds / bandwidth,
    )  # fmt: skip
    recorder.at_least(f"{case}, over generate", over, OVER_GENERATE[name])
    engine.release()


def call_bytes(shape: Shape, work: Workload, num_steps: int, scale: Scale) -> int:
    """Return the bytes that the steps of a whole call read: weights once a step, and every sample's keys and values."""
    positions = sum(
        length * len(prompt) + length * (length + 1) // 2
        for prompt, length in zip(work.prompts, work.lengths, strict=True)
    )
    return num_steps * shape.read_weights * scale.dtype.itemsize + shape.cache_bytes(positions, scale.dtype)


def _until_done(setting: Setting, made: int) -> int:
    setting.synchronize()
    return made


# --- prompts ----------------------------------------------------------------------------------------------------------


def prefill_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_prefill`."""
    return tuple(f"{model} {count} x {length}" for model in scale.shapes for count, length in scale.prefills)


def measure_prefill(setting: Setting, recorder: Recorder) -> None:
    """Time the prefill of many prompts, each followed by one token."""
    peak = setting.peak_flops_per_s()
    for name, shape in setting.scale.shapes.items():
        with _model(shape, setting) as model:
            for count, length in setting.scale.prefills:
                generator = torch.Generator().manual_seed(0)
                prompts = torch.randint(3, shape.vocabulary, (count, length), generator=generator).tolist()
                engine = GenerationEngine(model, max_slots=count)
                params = SamplingParams(max_new_tokens=1, temperature=0)
                seconds = setting.median_seconds(lambda: engine.generate(prompts, params), repeats=3)  # noqa: B023
                flops = shape.forward_flops([length] * count, num_outputs=count)
                recorder.row(
                    f"{name} {count} x {length}", ms=1e3 * seconds, tokens_per_s=count * length / seconds,
                    teraflops_per_s=flops / seconds / 1e12, mfu=flops / seconds / peak,
                )  # fmt: skip
                engine.release()


@contextmanager
def _model(shape: Shape, setting: Setting) -> Iterator[PreTrainedModel]:
    """Yield a model on the device with its weights stored as a reallocation does; it is freed afterwards."""
    model = build_llama(shape, setting.device, setting.scale.dtype)
    _store_adjacent(model, setting)
    yield model
    model.to("meta")
    gc.collect()
    if setting.is_gpu:
        torch.cuda.empty_cache()


def _store_adjacent(model: PreTrainedModel, setting: Setting) -> None:
    """Store the weights one after the other, matrices first, as a reallocation does."""
    arena = Arena(setting.device)
    for parameter in sorted(model.parameters(), key=lambda parameter: parameter.dim() < 2):
        parameter.data = arena.allocate(parameter.shape, parameter.dtype).copy_(parameter.data)
    arena.restore()  # exactly as large as the weights
