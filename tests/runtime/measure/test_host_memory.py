"""Does a process reuse what it freed?"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

from lightning_realloc.runtime.measure import host_memory

# Run by path, in a process that imports nothing else: the setting cannot be taken back.
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
def test_a_step_that_repeats_takes_no_new_pages() -> None:
    faults = {}
    for mode in ("default", "keep"):
        command = [sys.executable, "-c", FAULTS, mode, host_memory.__file__]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        faults[mode] = int(ended.stdout)
    pages_of_one_step = 10 * (4 << 20) // resource.getpagesize()
    assert faults["keep"] < pages_of_one_step / 20
    assert faults["default"] > pages_of_one_step


def test_settings_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not host_memory.keep_freed_memory()
