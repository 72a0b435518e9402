"""Liger's kernels replace norms, rotary embeddings and gated layers, but no losses, and need CUDA."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.liger import use_liger_kernels
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

CUDA = torch.device("cuda")


class FakeLiger(ModuleType):
    """Supports llamas only, and records its calls."""

    def __init__(self) -> None:
        super().__init__("liger_kernel.transformers.monkey_patch")
        self.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
        self.asked: list[tuple[nn.Module, dict[str, bool]]] = []

    def _apply_liger_kernel_to_instance(self, model: nn.Module, **kernels: bool) -> None:
        self.asked.append((model, kernels))


def test_kernels_replace_layers_and_no_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLiger()
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    model = tiny_model("llama")
    use_liger_kernels(model, "actor", CUDA)
    ((given, kernels),) = fake.asked
    assert given is model
    assert {name for name, wanted in kernels.items() if wanted} == {"rope", "rms_norm", "layer_norm", "swiglu", "geglu"}
    assert {name for name, wanted in kernels.items() if not wanted} == {"cross_entropy", "fused_linear_cross_entropy"}
    with pytest.raises(ConfigError, match="no kernels for critic, a opt; leave liger_kernels out, or use one of llama"):
        use_liger_kernels(tiny_model("opt"), "critic", CUDA)
    assert len(fake.asked) == 1


def test_kernels_are_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match="needs the package liger-kernel, which cannot be imported here"):
        use_liger_kernels(tiny_model("llama"), "actor", CUDA)


def _fit() -> str:
    module: Any = runs.sft(liger_kernels=True)
    with pytest.raises(ConfigError) as caught:
        runs.train(module, "heuristic", 1, Batches(1, responses=True))
    return str(caught.value)


def test_kernels_are_refused_on_cpu_before_a_run_begins(workers: WorkerPool) -> None:
    (message,) = workers.run(_fit, world_size=1, init_process_group=False)
    assert message.startswith("liger_kernels=True needs CUDA, and actor runs on cpu; leave")
