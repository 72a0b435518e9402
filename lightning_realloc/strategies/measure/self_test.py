"""Start two processes on this machine and try the package's parts in them: messages, reallocation, generation.

The processes use random weights and no network beyond this machine. With two GPUs or more each process takes one, and
messages go through NCCL; otherwise the CPU and gloo are tested.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import ReallocError
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.layout import Layout, ModelLayout, ModelSpec, ParamSpec, TensorParallelCut, sharded
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.strategies.measure.profiling import num_cores

WORLD_SIZE = 2
DEADLINE_S = 30.0
"""Longest wait of a process for the other one."""
LINK_BYTES = 16 << 20
"""Size of the message whose seconds are measured."""
_WEIGHT_SHAPE = (1024, 2048)
_NUM_WEIGHTS = 4
_NUM_PROMPTS, _RESPONSE_TOKENS = 4, 32


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of one trial in both processes."""

    name: str
    detail: str
    """Measured rates in words, or the reason of the failure."""
    is_ok: bool = True
    bytes_per_s: float | None = None
    """Rate of the messages; None if the trial has none."""


def run_trials_in_processes() -> list[TrialResult]:
    """Run all trials in two new processes, and return their results up to the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(WORLD_SIZE, mp_context=context) as pool:
            store = str(Path(folder) / "store")
            futures = [pool.submit(_run_rank, rank, store, num_cores()) for rank in range(WORLD_SIZE)]
            try:
                by_rank = [future.result() for future in futures]
            except Exception as error:  # a process that ended, or the start of its group
                return [TrialResult("two processes", _reason(error), is_ok=False)]
    # The rank that failed first has the cause; its peer knows a closed connection.
    return min(by_rank, key=lambda results: (len(results), results[-1].is_ok))


def _run_rank(rank: int, store: str, cores: int) -> list[TrialResult]:
    """Run the trials on one rank."""
    torch.set_num_threads(max(1, cores // WORLD_SIZE))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= WORLD_SIZE:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    try:
        return run_trials_here(device)
    finally:
        dist.destroy_process_group()


def run_trials_here(device: torch.device) -> list[TrialResult]:
    """Run the trials on this rank of the default group, up to the first failure. Collective over two ranks."""
    results: list[TrialResult] = []
    for name, trial in _TRIALS.items():
        results.append(_tried(name, trial, device))
        if not results[-1].is_ok:
            break
    return results


def _tried(name: str, trial: Callable[[torch.device], TrialResult], device: torch.device) -> TrialResult:
    try:
        return trial(device)
    except Exception as error:
        return TrialResult(name, _reason(error), is_ok=False)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'without a message')}"


# ---- the trials; collective over both ranks
def _all_reduce(device: torch.device) -> TrialResult:
    total = torch.full((1024,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    if float(total.min()) != 3.0 or float(total.max()) != 3.0:
        raise ReallocError(f"the sum of 1 and 2 over both processes is {float(total[0])}; the network is broken")
    seconds = min(_seconds(lambda: dist.all_reduce(total), device) for _ in range(5))
    return TrialResult("all-reduce", f"{seconds * 1e6:.0f} microseconds, {_path(device)}")


def _link(device: torch.device) -> TrialResult:
    message = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    turn = dist.send if dist.get_rank() == 0 else dist.recv
    seconds = min(_seconds(lambda: turn(message, 1 - dist.get_rank()), device) for _ in range(3))
    seconds = max(gather_objects(seconds))
    rate = LINK_BYTES / seconds
    return TrialResult("link", f"{rate / 1e9:.2f} GB/s, {_path(device)}", bytes_per_s=rate)


def _reallocate(device: torch.device) -> TrialResult:
    names = [f"weight_{number}" for number in range(_NUM_WEIGHTS)]
    spec = ModelSpec(
        tuple(ParamSpec(name, _WEIGHT_SHAPE, sharded(TensorParallelCut(1)), block=0) for name in names), num_blocks=1
    )
    source, target = (ModelLayout(spec, Layout.parse(f"{degree}@0-1")) for degree in ("fsdp2", "tp2"))
    values = torch.arange(math.prod(_WEIGHT_SHAPE), dtype=torch.float32, device=device).view(_WEIGHT_SHAPE)
    move = Reallocation(
        source,
        {name: _held(values, source, name) for name in names},
        target,
        rank=dist.get_rank(),
        world_size=WORLD_SIZE,
        dtype=torch.float32,
        device=device,
        deadline_s=DEADLINE_S,
    )
    move.run()
    report = move.run()
    wrong = [name for name in names if not torch.equal(move.target_tensors[name], _held(values, target, name))]
    if any(gather_objects(bool(wrong))):
        raise ReallocError(f"weights differ after a reallocation from {source.layout} to {target.layout}; report this")
    rate = report.bytes_moved / max(gather_objects(report.seconds))
    way = "through shared memory" if report.transport == "push" else "as messages"
    return TrialResult("reallocation", f"{rate / 1e9:.2f} GB/s {way}", bytes_per_s=rate)


def _held(values: Tensor, layout: ModelLayout, name: str) -> Tensor:
    """Return this rank's part of a parameter that is one region in this layout."""
    (piece,) = layout.pieces(name, dist.get_rank())
    return values[tuple(map(slice, piece.region.starts, piece.region.stops))].clone()


def _generate(device: torch.device) -> TrialResult:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    engine = GenerationEngine(LlamaForCausalLM(config).eval().to(device))
    params = SamplingParams(max_new_tokens=_RESPONSE_TOKENS, ignore_eos=True)
    prompts = [[3 + number, 7, 11] for number in range(_NUM_PROMPTS)]
    engine.generate(prompts, params)
    begin = time.perf_counter()
    answers = [completion.token_ids for completion in engine.generate(prompts, params)]
    rate = _NUM_PROMPTS * _RESPONSE_TOKENS / (time.perf_counter() - begin)
    first, second = gather_objects(answers)
    if first != second:
        raise ReallocError("both processes have the same weights and prompts, and generate different tokens")
    return TrialResult("generation", f"{rate:.0f} tokens/s of a tiny random model, the same in both processes")


_TRIALS: dict[str, Callable[[torch.device], TrialResult]] = {
    "all-reduce": _all_reduce,
    "link": _link,
    "reallocation": _reallocate,
    "generation": _generate,
}


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _path(device: torch.device) -> str:
    return "NCCL between two GPUs" if device.type == "cuda" else "gloo between two CPU processes"
