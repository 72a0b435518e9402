"""A process reuses memory that it freed, and collects garbage less often while models train."""

from __future__ import annotations

import gc
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lightning_realloc.runtime.measure import allocators

# Run by path, in a process that imports nothing else: the setting cannot be undone.
FAULTS = """
import resource, runpy, sys
if sys.argv[1] == "keep":
    assert runpy.run_path(sys.argv[2])["keep_freed_memory"]()
def step():
    blocks = [bytearray(b"x") * (4 << 20) for _ in range(10)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told to keep memory")
def test_a_repeated_step_takes_no_new_pages() -> None:
    faults = {}
    for mode in ("default", "keep"):
        command = [sys.executable, "-c", FAULTS, mode, allocators.__file__]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        faults[mode] = int(ended.stdout)
    pages_of_one_step = 10 * (4 << 20) // resource.getpagesize()
    assert faults["keep"] < pages_of_one_step / 20
    assert faults["default"] > pages_of_one_step


def test_malloc_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not allocators.keep_freed_memory()


def test_cudas_segments_are_expandable_unless_the_environment_configures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert allocators.expand_cuda_segments()
    assert given == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert not allocators.expand_cuda_segments()
    assert len(given) == 1


@pytest.fixture
def _default_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_default_threshold")
def test_garbage_is_collected_less_often_between_start_and_stop() -> None:
    collection = allocators.InfrequentCollection()
    collection.start()
    collection.start()  # by a fit that follows a failed one
    assert gc.get_threshold()[0] == allocators.MIN_NEW_OBJECTS
    collection.stop()
    collection.stop()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.usefixtures("_default_threshold")
@pytest.mark.parametrize("chosen", [0, 50_000])
def test_a_threshold_that_was_set_before_start_is_kept(chosen: int) -> None:
    gc.set_threshold(chosen, 10, 10)
    collection = allocators.InfrequentCollection()
    collection.start()
    collection.stop()
    assert gc.get_threshold() == (chosen, 10, 10)


@pytest.mark.usefixtures("_default_threshold")
def test_a_threshold_that_is_set_after_start_is_kept() -> None:
    collection = allocators.InfrequentCollection()
    collection.start()
    gc.set_threshold(5_000, 10, 10)
    collection.stop()
    assert gc.get_threshold() == (5_000, 10, 10)
