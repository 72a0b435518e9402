"""The emulated device acts like a device of its own, and a fit of it runs as on a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or not sys.platform.startswith("linux") or shutil.which("g++") is None,
    reason="needs Linux, a C++ compiler, and torch built without CUDA",
)

SEPARATE = """
x, w = torch.randn(4, 3), torch.randn(3, 2)
on_device, weights = x.to("cuda"), w.to("cuda").requires_grad_()
(on_device @ weights).square().sum().backward()
w.requires_grad_()
(x @ w).square().sum().backward()
torch.testing.assert_close(weights.grad.cpu(), w.grad)
assert weights.grad.device == torch.device("cuda", 0)
fails("same device", lambda: on_device + x)
view = on_device[1:]
view.zero_()
assert on_device[1:].abs().sum().item() == 0 and view.data_ptr() == on_device.data_ptr() + 12
before = torch.cuda.memory_allocated()
big = torch.empty(1 << 20, device="cuda")
assert torch.cuda.memory_allocated() - before == 4 << 20
big.untyped_storage().resize_(0)
assert torch.cuda.memory_allocated() == before
import copy
held = torch.nn.Parameter(on_device.clone())
copied = copy.deepcopy(held)
assert torch.equal(copied, held) and copied.data_ptr() != held.data_ptr() and copied.device == held.device
fails("out of memory", lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"), torch.cuda.OutOfMemoryError)
state = torch.cuda.get_rng_state()
drawn = torch.rand(3, device="cuda")
torch.rand(3)  # the host's numbers are others
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3, device="cuda"), drawn)
"""

GRAPHS = """
inputs, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
before = torch.cuda.memory_allocated()
with torch.cuda.graph(graph):
    doubled = (inputs * 2).add_(1)
assert torch.cuda.memory_allocated() - before == doubled.nbytes
for value in (5, 7):
    inputs.fill_(value)
    graph.replay()
    assert doubled.tolist() == [2 * value + 1] * 3
for waiting in (lambda: inputs.sum().item(), lambda: inputs + torch.ones(3).to("cuda"), lambda: inputs.nonzero()):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fails("stream is capturing", waiting)
torch.cuda.set_sync_debug_mode("error")
fails("synchronizing", lambda: inputs.tolist())
torch.ones(3).to("cuda", non_blocking=True)
"""

FAILS = """
import torch
def fails(words, call, error=RuntimeError):
    try:
        call()
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(f"no error with {words!r}")
"""


def run(*arguments: str) -> str:
    """Run Python with the emulated device; return what it printed."""
    command = [sys.executable, "-m", "tests.emulated_cuda", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.exhaustive  # compiles C++ for half a minute; test_kernels.py needs no compiler
def test_the_device_is_one_of_its_own_and_captures_graphs() -> None:
    run("-c", FAILS + SEPARATE + GRAPHS)


@pytest.mark.exhaustive
def test_a_fit_on_the_device_has_the_losses_of_the_cpu_and_replays_graphs() -> None:
    output = run(
        "-m", "pytest", "-m", "gpu", "--all", "-q", "-p", "no:cacheprovider", "tests/strategies/test_devices.py"
    )
    assert "7 passed" in output
    assert "skipped" not in output
