"""Layers whose weights are adjacent multiply as one, and the model is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_realloc.generation import GenerationEngine, SamplingParams, engine_parts
from lightning_realloc.generation.forward.cuda_graphs import StepGraphs
from lightning_realloc.generation.forward.fused_layers import joined_linears
from lightning_realloc.runtime.transfer.point_to_point import Arena
from tests.generation.test_engine import draw_prompts, tokens_of
from tests.matrices import matrix
from tests.models import tiny_model

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def store_adjacent(model: nn.Module, names: Sequence[str] | None = None) -> nn.Module:
    """Store the model's parameters one after the other, weights before biases, as a reallocation does."""
    arena = Arena(torch.device("cpu"))
    parameters = dict(model.named_parameters())
    for name in names or sorted(parameters, key=lambda name: parameters[name].dim() < 2):
        values = arena.allocate(parameters[name].shape, parameters[name].dtype)
        parameters[name].data = values.copy_(parameters[name].data)
    return model.eval().requires_grad_(False)


def forwards_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(("family", "saved"), [("llama", 3), ("qwen2", 3), ("qwen3", 3), ("gemma2", 3), ("phi3", 0)])
def test_a_block_with_adjacent_weights_makes_three_products_less(family: str, saved: int) -> None:
    model, ids = store_adjacent(tiny_model(family)), torch.arange(7)[None]
    state = [dict(vars(module)) for module in model.modules()]
    with _Products() as plain:
        expected = model(ids).logits
    with joined_linears(model) as num_groups, _Products() as joined:
        torch.testing.assert_close(model(ids).logits, expected)
    num_blocks = model.config.num_hidden_layers  # type: ignore[union-attr]
    assert plain.count - joined.count == saved * num_blocks
    assert num_groups == (2 if saved else 0) * num_blocks
    assert [dict(vars(module)) for module in model.modules()] == state


def test_joined_layers_read_the_weights_as_they_are() -> None:
    model, ids = store_adjacent(tiny_model("qwen2")), torch.arange(7)[None]
    with joined_linears(model):
        model(ids)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        changed = model(ids).logits
    torch.testing.assert_close(changed, model(ids).logits)


def test_layers_that_are_not_adjacent_or_do_more_are_left_alone() -> None:
    apart = tiny_model("llama").eval().requires_grad_(False)
    reverse = tiny_model("llama")
    store_adjacent(reverse, [name for name, _ in reverse.named_parameters()][::-1])
    replaced = store_adjacent(tiny_model("llama", num_hidden_layers=1))
    for name in ("self_attn.k_proj", "mlp.up_proj"):
        layer = replaced.get_submodule(f"model.layers.0.{name}")
        layer.forward = layer.forward
    for model in (apart, reverse, replaced):
        before = forwards_of(model)
        with joined_linears(model) as num_groups:
            assert num_groups == 0
            assert forwards_of(model) == before


def test_layers_of_two_parents_are_joined_once() -> None:
    block = store_adjacent(tiny_model("llama", num_hidden_layers=1))
    attention = block.get_submodule("model.layers.0.self_attn")
    block.other = nn.ModuleDict({name: attention.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")})
    with joined_linears(block) as num_groups:
        assert num_groups == 2
    assert not forwards_of(block)


def test_each_layer_gets_the_product_with_its_own_input() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)

        def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
            return self.up_proj(one), self.gate_proj(other), self.gate_proj(one), self.up_proj(one.add_(1))

    block = store_adjacent(Block())
    inputs = torch.randn(2, 3, 8)
    expected = block(*inputs.clone())
    with joined_linears(block) as num_groups:
        assert num_groups == 1
        torch.testing.assert_close(block(*inputs.clone()), expected)


class FusedGraphs(StepGraphs):
    """Captures on CPU: a capture runs its work, and a replay runs it again, with the same fused layers."""

    num_replayed = 0
    joined: set[int]
    """Numbers of joined layers."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, make_record=lambda: self._record_work, device_type="cpu", **settings)
        self.joined = set()

    def _record_work(self, work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            type(self).num_replayed += 1
            with self._fused():
                self.joined.add(sum("_joined_product" in vars(module) for module in self._model.modules()))
                work()

        return replay


@pytest.mark.parametrize(
    "backend",
    [
        None,
        pytest.param("eager", marks=pytest.mark.exhaustive),  # test_cuda_graphs.py compiles fused layers, too
        pytest.param("inductor", marks=pytest.mark.inductor),
    ],
)
@pytest.mark.parametrize("family", matrix(["qwen2", "qwen3"], "qwen3"))
def test_captured_steps_with_fused_layers_draw_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, family: str, backend: str | None
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(engine_parts, "StepGraphs", FusedGraphs)
    model, params = store_adjacent(tiny_model(family)), SamplingParams(max_new_tokens=20, seed=2, ignore_eos=True)
    plain = GenerationEngine(model, cuda_graphs=False).generate(draw_prompts(5), params)
    engine = GenerationEngine(model, compile=backend)
    for _ in range(3):
        assert tokens_of(engine.generate(draw_prompts(5), params)) == tokens_of(plain)
    graphs = engine._graphs
    assert isinstance(graphs, FusedGraphs)
    assert graphs.num_replayed > 20
    assert graphs.joined == {5 * model.config.num_hidden_layers}  # type: ignore[union-attr]
    assert not forwards_of(model)
    if backend is not None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
