"""Measure one GPU: decoding, prefill, GRPO next to TRL, PPO with four models, switches, and the first iteration.

At most eight minutes on one H200. Each part runs in a process of its own with a limit in seconds; time that a part
leaves is given to later ones. A part that is over its limit is ended, and cases without a figure are listed as not
measured. The JSON is written after every figure.

Models are Llamas with random weights in the shapes of Llama 3.2 1B and 3.1 8B, so nothing is downloaded. Without a GPU
the parts run with tiny models, in a minute or two, and without targets.

Run ``python -m benchmarks.one_gpu``. TRL's arms need TRL, datasets and accelerate; ``--wheels`` names a folder of
pure-Python wheels for a machine that lacks them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.batch_invariant import batch_invariant_cases, measure_batch_invariant
from benchmarks.harness import BenchmarkReport, load_average, make_parser
from benchmarks.one_gpu_decode import (
    compiled_cases,
    decode_cases,
    generate_cases,
    measure_compiled,
    measure_decode,
    measure_generate,
    measure_prefill,
    prefill_cases,
)
from benchmarks.one_gpu_grpo import grpo_cases, measure_grpo, measure_trl, measure_trl_batching, trl_cases
from benchmarks.one_gpu_iterations import measure_ppo, measure_start_up, ppo_cases, start_up_cases
from benchmarks.one_gpu_setting import GPU, TINY, Recorder, Result, Scale, Setting, describe_device
from benchmarks.one_gpu_switch import measure_switch, switch_cases

LIMIT_S = 480.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks no driver, so that processes may be forked afterwards
}  # fmt: skip

_PRELOADED = ["benchmarks.one_gpu_decode", "benchmarks.one_gpu_grpo", "benchmarks.one_gpu_switch"]
"""Imported once, by the process from which those of the parts are forked."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the benchmark."""

    measure: Callable[[Setting, Recorder], None]
    cases: Callable[[Scale], tuple[str, ...]]
    """Cases that have a row when the part is complete."""
    budget_s: float
    """Seconds on an H200, with the start of its process."""


PARTS = {
    "decode": Part(measure_decode, decode_cases, 45.0),
    "decode_compiled": Part(measure_compiled, compiled_cases, 40.0),
    "prefill": Part(measure_prefill, prefill_cases, 30.0),
    "switch": Part(measure_switch, switch_cases, 15.0),
    "grpo": Part(measure_grpo, grpo_cases, 55.0),
    "trl": Part(measure_trl, trl_cases, 60.0),
    "trl_batching": Part(measure_trl_batching, trl_cases, 45.0),
    "ppo": Part(measure_ppo, ppo_cases, 55.0),
    "start_up": Part(measure_start_up, start_up_cases, 75.0),
    "batch_invariant": Part(measure_batch_invariant, batch_invariant_cases, 25.0),
    "generate": Part(measure_generate, generate_cases, 35.0),
}
"""Parts in the order in which they run. The last one has most cases, and gets the time that the others leave."""


def run_parts(
    parts: dict[str, Part], setting: Setting, report: BenchmarkReport, *, limit_s: float, path: Path | None = None,
    start_method: str = "forkserver",
) -> None:  # fmt: skip
    """Run all parts within the limit, add their rows and targets, and write the report to ``path`` after each of them.

    Targets are those of a GPU, and left out on a CPU.
    """
    context: Any = multiprocessing.get_context(start_method)
    give_up_at = time.monotonic() + limit_s
    report.settings["parts"] = {}
    names = list(parts)
    for number, (name, part) in enumerate(parts.items()):
        later_s = sum(parts[other].budget_s for other in names[number + 1 :])
        begin, left_s = time.monotonic(), max(give_up_at - time.monotonic(), 0.0)
        share = part.budget_s / (part.budget_s + later_s)  # where time is short, it is so for all parts
        run = _PartRun(name, part, setting, report, path)
        end = run.until_end(context, max(left_s - later_s, left_s * share))
        report.settings["parts"][name] = {
            "end": end, "seconds": round(time.monotonic() - begin, 1), "load_after": load_average()
        }  # fmt: skip
        run.list_missing(end)
        report.write(path)
        sys.stderr.write(f"{name}: {end} after {time.monotonic() - begin:.0f} s\n")


@dataclass(frozen=True, slots=True)
class _PartRun:
    """One part, whose results go into the report."""

    name: str
    part: Part
    setting: Setting
    report: BenchmarkReport
    path: Path | None

    def until_end(self, context: Any, limit_s: float) -> str:
        """Run the part in a process of its own until it ends or is over its limit; return how it ended."""
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(self.part.measure, self.name, self.setting, sending))
        process.start()
        sending.close()
        try:
            for result in _results(receiving, limit_s):
                if result is None:
                    return "complete"
                self._add(result)
            if not receiving.poll(0):
                return f"over its limit of {limit_s:.0f} s"
            process.join(timeout=10.0)
            return f"failed with exit code {process.exitcode}, see the log"
        finally:
            process.kill()
            process.join()

    def _add(self, result: Result) -> None:
        if self.setting.is_gpu or result.method == "add_row":
            getattr(self.report, result.method)(**result.arguments)
            self.report.write(self.path)

    def list_missing(self, end: str) -> None:
        """Add a row for each case that has none."""
        present = {row["case"] for row in self.report.rows if row["part"] == self.name}
        for case in self.part.cases(self.setting.scale):
            if case not in present:
                self.report.add_row(part=self.name, case=case, not_measured=f"part {end}")


def _results(receiving: Connection, limit_s: float) -> Iterator[Result | None]:
    """Yield results until the part has closed its end or the limit is over; None after the last one."""
    give_up_at = time.monotonic() + limit_s
    while receiving.poll(max(0.0, give_up_at - time.monotonic())):
        try:
            result = receiving.recv()
        except EOFError:
            return
        yield result


def _work(measure: Callable[[Setting, Recorder], None], name: str, setting: Setting, sending: Connection) -> None:
    """Measure one part in this process."""
    if not setting.is_gpu:
        torch.set_num_threads(1)
    _hide_progress()
    try:
        measure(setting, Recorder(name, sending.send))
        sending.send(None)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sending.close()


def _hide_progress() -> None:
    """Hide messages below warnings, and progress bars; the package's warnings name what does not run as it should."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()


def choose_start_method(device_type: str) -> str:
    """Return ``"forkserver"``, or ``"spawn"`` where an import has called CUDA's driver, which survives no fork.

    Processes of ``"spawn"`` import everything anew, which takes ten seconds for each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=torch.zeros, args=(1,), kwargs={"device": device_type})
    process.start()
    process.join()
    return "spawn" if process.exitcode else "forkserver"


def _leave(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts and report."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _leave)  # so that the part that runs is ended, too
    os.environ |= {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()}
    is_gpu = torch.cuda.is_available()
    parts = {name: part for name, part in PARTS.items() if not options.only or name in options.only}
    report = BenchmarkReport("one_gpu", group_by="part")
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as folder:
        if options.wheels is not None:
            unpack_wheels(options.wheels, Path(folder) / "wheels")
        setting = Setting(_scale(is_gpu, options.tiny), "cuda" if is_gpu else "cpu", Path(folder))
        give_up_at = time.monotonic() + options.limit_s
        method = choose_start_method(setting.device_type)
        report.settings |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "start_method": method}
        report.settings["device"] = describe_device(setting)
        left_s = give_up_at - time.monotonic()
        run_parts(parts, setting, report, limit_s=left_s, path=options.json, start_method=method)
    return report.finish(options)


def unpack_wheels(wheels: Path, into: Path) -> None:
    """Make pure-Python wheels importable, here and in processes that start later, without installing them."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    sys.path.insert(0, str(into))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(into), os.environ.get("PYTHONPATH")]))


def _scale(is_gpu: bool, is_tiny: bool) -> Scale:
    if not is_gpu:
        return TINY
    return dataclasses.replace(TINY, dtype=GPU.dtype, precision=GPU.precision) if is_tiny else GPU


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a GPU: whether all parts run")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of all parts together")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="folder of pure-Python wheels to unpack and use")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
