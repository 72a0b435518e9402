"""Setup of all tests: one thread per process, no network, no Hypothesis deadlines, and a pool of worker processes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.vllm_environment import vllm_python
from tests.workers import WorkerPool

# Set before anything imports torch or transformers, here and in every process that tests start.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that processes may be forked after a check for GPUs
}.items():
    os.environ.setdefault(_name, _value)

gc.disable()  # until all tests are collected: it would take a sixth of the time of their imports

# No deadline: on a busy machine an example may take long.
hypothesis.settings.register_profile("tests", hypothesis.settings(hypothesis.settings.default, deadline=None))
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run tests marked `exhaustive`, as `make test-all` does")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("vllm") is not None and vllm_python() is None:
        pytest.skip("needs an environment with vLLM: `make vllm-env`, or VLLM_PYTHON with its interpreter")
    if item.get_closest_marker("inductor") is not None and "inductor" not in item.config.option.markexpr:
        pytest.skip("has g++ compile for half a minute: run with -m inductor")
    if item.get_closest_marker("ray") is not None and "ray" not in item.config.option.markexpr:
        pytest.skip("starts a cluster of two machines, and takes minutes: run with -m ray")
    if item.get_closest_marker("real") is not None and "real" not in item.config.option.markexpr:
        pytest.skip("needs the model of `make demo-real`, and minutes: run with -m real")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, leave out files without such tests: they may import packages that a machine with a GPU lacks."""
    if config.option.markexpr != "gpu" or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if "mark.gpu" in text or "tests.devices" in text else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out exhaustive tests, unless asked for; run files with slow tests first.

    With slow files last, an xdist worker would be left alone with one at the end.
    """
    named = any("::" in argument for argument in config.args)
    if not (config.option.all or named or "exhaustive" in config.option.markexpr):
        left_out = [item for item in items if item.get_closest_marker("exhaustive") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Exclude imported objects from every later garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exclude also what a file's tests have imported: collections, of which every fit has some, stay short."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Destroy the process group that a fit in pytest's own process leaves; other tests create their own.

    Its store may listen for longer, so processes that later tests start get a port of their own.
    """
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        from lightning_realloc.strategies.lightning.process_group import end_process_group

        end_process_group()
        os.environ.pop("MASTER_PORT", None)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """``workers.run(function, *args, world_size=4)`` runs a module-level function on that many ranks."""
    pool = WorkerPool()
    yield pool
    pool.close()
