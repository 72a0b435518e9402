"""Command ``lightning-realloc doctor``: check versions, devices, memory, extras, and two processes at work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement

from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.commands.parsing import has_bf16
from lightning_realloc.errors import GenerationError
from lightning_realloc.report.formats import gib
from lightning_realloc.runtime.measure.nodes import MAX_USED_SHARE
from lightning_realloc.runtime.transfer.shared_memory import available_bytes
from lightning_realloc.strategies.cluster_check.check import run_cluster_check
from lightning_realloc.strategies.measure.profiling import num_cores
from lightning_realloc.strategies.measure.self_test import TrialResult, run_trials_in_processes

DISTRIBUTION = "lightning-realloc"
DEVELOPERS_EXTRAS = frozenset({"bench", "docs", "parity", "test"})
"""Extras for work on the package itself, which are left out."""
MIN_BYTES_PER_S = 2e8
"""Rate between two processes below which a link is slow, in bytes per second. Loopback usually exceeds 1e9."""
MIN_HOST_BYTES = 4 << 30
"""Available host memory below which it is low."""
MIN_SHARED_BYTES = 1 << 30
"""Free shared memory below which it is low; Docker's default is 64 MiB."""

Verdict = Literal["ok", "slow", "low", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    name: str
    verdict: Verdict
    detail: str
    """Measured values, or what to do; empty for none."""

    def __str__(self) -> str:
        return f"{self.name:<18}{self.verdict}{': ' if self.detail else ''}{self.detail}"


def run_doctor(arguments: Sequence[str], write: Callable[[str], object]) -> int:
    """Run all checks, write a line for each as soon as it is known, and return 1 if one failed, else 0."""
    parser = CommandParser("doctor")
    parser.add_argument(
        "--cluster", action="store_true", help="check the cluster instead: run it on every rank by torchrun or srun"
    )
    if parser.parse(arguments).cluster:
        return run_cluster_check(write)
    has_failed = False
    for result in _results():
        write(f"{result}\n")
        has_failed |= result.verdict == "failed"
    write("Something does not work; see the lines that say failed.\n" if has_failed else "Everything needed works.\n")
    return int(has_failed)


def _results() -> Iterator[CheckResult]:
    requirements = installed_requirements()
    yield check_python()
    yield from check_versions(requirements, installed_version)
    yield from check_devices()
    yield check_cores()
    yield check_host_memory()
    yield check_shared_memory()
    yield from check_extras(requirements, installed_version)
    yield from check_vllm_python(os.environ.get("VLLM_PYTHON"))
    yield from map(judge_trial, run_trials_in_processes())


# ---- versions and extras
def installed_requirements() -> list[Requirement]:
    """Return the requirements in this package's metadata; none if it is not installed."""
    try:
        found = importlib.metadata.requires(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        found = None
    return [Requirement(text) for text in found or ()]


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> CheckResult:
    """Report Python and the operating system."""
    own = installed_version(DISTRIBUTION) or "not installed"
    return CheckResult("python", "ok", f"{platform.python_version()} on {platform.platform()}; {DISTRIBUTION} {own}")


def check_versions(
    requirements: Sequence[Requirement], version_of: Callable[[str], str | None]
) -> Iterator[CheckResult]:
    """Compare the versions of required packages with the metadata."""
    if not requirements:
        yield CheckResult("versions", "missing", f"{DISTRIBUTION} is not installed; pip install -e . in its folder")
        return
    needed = [own for own in requirements if _is_needed(own)]
    faults = _faults(needed, version_of)
    for own, fault in faults:
        yield CheckResult(own.name, "failed", f"{fault}; pip install '{own.name}{own.specifier}'")
    if not faults:
        yield CheckResult("versions", "ok", _versions(needed, version_of))


def check_extras(requirements: Sequence[Requirement], version_of: Callable[[str], str | None]) -> Iterator[CheckResult]:
    """Report for each extra of the metadata whether its packages are installed; none of them is required."""
    names = {name for own in requirements for name in _extras(own)}
    for name in sorted(names - DEVELOPERS_EXTRAS):
        needed = [own for own in requirements if _is_needed(own, name)]
        if faults := _faults(needed, version_of):
            reasons = "; ".join(f"{own.name} {fault}" for own, fault in faults)
            yield CheckResult(f"extra {name}", "missing", f"pip install '{DISTRIBUTION}[{name}]' ({reasons})")
        elif needed:  # else it is not for this operating system
            yield CheckResult(f"extra {name}", "ok", _versions(needed, version_of))


def check_vllm_python(python: str | None) -> Iterator[CheckResult]:
    """Report the vLLM of the interpreter that ``VLLM_PYTHON`` names, if it names one."""
    if not python:
        return
    from lightning_realloc.generation.vllm.start.interpreter import interpreter, vllm_version_of

    try:
        yield CheckResult("vllm", "ok", f"{vllm_version_of(interpreter(python))} of {python}")
    except GenerationError as error:
        yield CheckResult("vllm", "failed", str(error))


def _is_needed(own: Requirement, extra: str = "") -> bool:
    """Return whether an extra needs a requirement on this system; without an extra, whether every installation does."""
    named = _extras(own)
    concerns = extra in named if extra else not named
    return concerns and (own.marker is None or own.marker.evaluate({"extra": extra}))


def _extras(own: Requirement) -> list[str]:
    """Return the extras that a requirement's marker names, as in ``extra == 'peft'``."""
    return re.findall(r"""extra == ["']([\w-]+)""", str(own.marker or ""))


def _faults(needed: Sequence[Requirement], version_of: Callable[[str], str | None]) -> list[tuple[Requirement, str]]:
    """Return the requirements that are not met, each with the reason."""
    faults = []
    for own in needed:
        version = version_of(own.name)
        if version is None:
            faults.append((own, "is not installed"))
        elif not own.specifier.contains(version, prereleases=True):
            faults.append((own, f"is {version}, and {own.specifier} is needed"))
    return faults


def _versions(needed: Sequence[Requirement], version_of: Callable[[str], str | None]) -> str:
    return ", ".join(f"{own.name} {version_of(own.name)}" for own in needed)


# ---- the machine
def check_devices() -> Iterator[CheckResult]:
    """Report every GPU with its memory, and try a product of matrices on it."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda is None else f"; this torch is built for CUDA {torch.version.cuda}"
        yield CheckResult("devices", "ok", f"no GPU, runs use the CPU{built}")
    for index in range(torch.cuda.device_count()):
        yield _check_gpu(index)


def _check_gpu(index: int) -> CheckResult:
    name = f"cuda:{index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(256, 256, device=name)
        if float((ones @ ones)[0, 0]) != 256.0:
            return CheckResult(name, "failed", "a product of matrices is wrong; the device is damaged")
        dtype = "bf16" if has_bf16() else "no bf16: use precision 32-true"
    except RuntimeError as error:
        return CheckResult(name, "failed", next(iter(str(error).splitlines()), type(error).__name__))
    about = f"{torch.cuda.get_device_name(index)}, {dtype}, {gib(free)} of {gib(total)} free"
    if total - free > MAX_USED_SHARE * total:
        return CheckResult(name, "low", f"{about}; end the processes that nvidia-smi lists")
    return CheckResult(name, "ok", about)


def check_cores() -> CheckResult:
    """Report the cores that this process may use."""
    return CheckResult("cores", "ok", f"{num_cores()}, {torch.get_num_threads()} threads of torch")


def check_host_memory() -> CheckResult:
    """Report the available host memory, within the limit of the container."""
    try:
        free = available_bytes()
    except OSError:  # not Linux
        return CheckResult("host memory", "ok", "unknown on this system")
    if free < MIN_HOST_BYTES:
        return CheckResult("host memory", "low", f"{gib(free)} available; models are loaded there first")
    return CheckResult("host memory", "ok", f"{gib(free)} available")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> CheckResult:
    """Report the size of ``/dev/shm``, through which data of loaders and processes goes."""
    if not folder.is_dir():
        return CheckResult("shared memory", "ok", f"no {folder} on this system; weights travel as messages")
    usage = shutil.disk_usage(folder)
    about = f"{gib(usage.free)} of {gib(usage.total)} free in {folder}"
    if usage.free < MIN_SHARED_BYTES:
        return CheckResult("shared memory", "low", f"{about}; start the container with --shm-size=8g or --ipc=host")
    return CheckResult("shared memory", "ok", about)


def judge_trial(trial: TrialResult) -> CheckResult:
    """Return the verdict on a trial of two processes."""
    if not trial.is_ok:
        return CheckResult(trial.name, "failed", trial.detail)
    if trial.bytes_per_s is not None and trial.bytes_per_s < MIN_BYTES_PER_S:
        return CheckResult(trial.name, "slow", f"{trial.detail}; expected at least {MIN_BYTES_PER_S / 1e9:g} GB/s")
    return CheckResult(trial.name, "ok", trial.detail)
