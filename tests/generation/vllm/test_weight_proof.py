"""Weights that vLLM was handed are found to differ before a token is drawn, at each stage of the hand-over."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.errors import WeightMismatch
from lightning_realloc.generation import SamplingParams, VLLMEngine, VLLMOptions
from lightning_realloc.generation.vllm.hand_over import weights_of
from lightning_realloc.generation.vllm.hand_over_proof import HandedModel, HandOverProof
from lightning_realloc.generation.vllm.inside.worker_proof import WorkerProof, _Place
from tests.generation.vllm.stand_in import stand_in
from tests.models import tiny_model

DOWN = "model.layers.1.mlp.down_proj.weight"
Weights = list[tuple[str, Tensor]]


class Loading(nn.Module):
    """Keeps the weights that it is given in parameters of its own, but for those that a fault leaves out."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.held = nn.ParameterDict({name.replace(".", "|"): torch.zeros_like(one) for name, one in weights.items()})
        self.kept_old: set[str] = set()

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        """Copy them."""
        for name, weight in weights:
            if name not in self.kept_old and name.replace(".", "|") in self.held:
                self.held[name.replace(".", "|")].copy_(weight)


def every_element(model: Any, announced: Any) -> dict[str, list[_Place]]:
    """Return all elements of each parameter, which lie there as in the weight."""
    found = {}
    for name in announced:
        held = model.held[name.replace(".", "|")]
        at = torch.arange(held.numel())
        found[name] = [_Place(model.held, name.replace(".", "|"), held.shape, at, at)]
    return found


def replaced(weights: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    """Return weights of which one is changed."""
    return [(name, change(weight.clone()) if name == DOWN else weight) for name, weight in weights]


def half_zero(weight: Tensor) -> Tensor:
    """Return a weight whose second half was not written."""
    weight[len(weight) // 2 :] = 0
    return weight


FAULTS: dict[str, tuple[Callable[[Weights, Weights], Weights], str]] = {
    "dropped": (lambda now, old: [one for one in now if one[0] != DOWN], "arrived 0 times"),
    "twice": (lambda now, old: [*now, now[3]], "arrived 2 times"),
    "stale": (lambda now, old: replaced(now, lambda _: dict(old)[DOWN]), "arrived with other elements"),
    "half-written": (lambda now, old: replaced(now, half_zero), "arrived with other elements"),
    "swapped rows": (lambda now, old: replaced(now, lambda one: one.flip(0)), "arrived with other elements"),
    "another dtype": (lambda now, old: replaced(now, Tensor.half), r"arrived as float16 \[\d+, \d+\] in place of"),
    "another shape": (lambda now, old: replaced(now, lambda one: one.T), "arrived as"),
    "unknown": (lambda now, old: [*now, ("other.weight", torch.ones(3))], "arrived, and was not handed over"),
}


def updated(
    extent: Any, model: Any, worker: WorkerProof, loading: Loading, proof: HandOverProof, fault: Any = None
) -> None:
    """Run one update of a worker without vLLM, in JSON, and judge it."""
    weights = weights_of(model)
    worker.begin(json.loads(json.dumps(proof.opening(weights, "7"))))
    now = [(name, weight.clone()) for name, weight in weights.items()]
    old = [(name, loading.held[name.replace(".", "|")].clone()) for name in weights]
    given = now if fault is None else fault(now, old)
    for one in range(0, len(given), 5):
        loading.load_weights(given[one : one + 5])
    faults = worker.arrived("7", json.loads(json.dumps(proof.expected(weights, "weights"))))
    early = {"faults": faults, "uncompared": [], "seconds": 0.0}
    proof.judge([early if faults else worker.in_use()])


@pytest.mark.parametrize("extent", ["sampled", "all"])
def test_a_weight_that_is_not_delivered_is_named_with_role_layout_worker_and_version(extent: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for kind, (fault, words) in FAULTS.items():
            model = tiny_model("llama").to(dtype)
            loading = Loading(weights_of(model))
            worker = WorkerProof(loading, every_element)
            proof = HandOverProof(extent, HandedModel(role="actor", layout="dp2@0-1", rank=1))
            for proof.version in (1, 2, 3):
                updated(extent, model, worker, loading, proof)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.02 * torch.randn_like(parameter))
            proof.version = 4
            with pytest.raises(WeightMismatch, match=words) as caught:
                updated(extent, model, worker, loading, proof, fault)
            named = "other.weight" if kind == "unknown" else (DOWN if kind != "twice" else "'")
            for part in ("vLLM of rank 1 ", "version 4 of the weights of actor", "dp2@0-1", "worker 0", named):
                assert part in str(caught.value), (kind, part)


def test_a_parameter_that_keeps_its_old_elements_after_new_ones_arrived_is_named() -> None:
    model = tiny_model("llama")
    loading = Loading(weights_of(model))
    worker, proof = WorkerProof(loading, every_element), HandOverProof("sampled", HandedModel(role="actor"))
    updated("sampled", model, worker, loading, proof)
    with torch.no_grad():
        model.get_parameter(DOWN).mul_(1.01)
    loading.kept_old.add(DOWN)
    with pytest.raises(WeightMismatch, match=f"'{DOWN}' arrived, and vLLM computes with other elements"):
        updated("sampled", model, worker, loading, proof)


def test_weights_of_another_update_are_found() -> None:
    model = tiny_model("llama")
    loading = Loading(weights_of(model))
    worker, proof = WorkerProof(loading, every_element), HandOverProof("sampled", HandedModel())
    updated("sampled", model, worker, loading, proof)
    faults = worker.arrived("8", proof.expected(weights_of(model), "weights") or {})
    assert any("arrived for 7 in place of 8" in what for _, what in faults)


def test_faults_that_a_worker_reports_end_the_call_unless_weights_are_not_compared(tmp_path: Path) -> None:
    program, params = stand_in(tmp_path, "finds other weights"), SamplingParams(max_new_tokens=3, temperature=0)
    model, options = tiny_model("llama"), VLLMOptions(python=program, restarts=0)
    handed = HandedModel(role="actor", layout="dp1@0")
    with pytest.raises(WeightMismatch, match=r"actor: .* dp1@0, in vLLM's worker 1, 'model\.norm\.weight' arrived"):
        VLLMEngine(model, options=options, handed=handed).generate([[5]], params)
    engine = VLLMEngine(copy.deepcopy(model), options=options, handed=handed, verify_weights="off")
    (made,) = engine.generate([[5]], params)
    assert made.token_ids == (6, 7, 8) and engine.given_weights.check_s == 0.0
    engine.service.close()
