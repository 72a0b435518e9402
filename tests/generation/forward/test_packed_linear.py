"""Packed weights multiply like the layers, and the model is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.generation.forward.packed_linear import packed_linears, packs
from tests.models import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
_Change = Callable[[Tensor], Tensor]
LONG = {"num_steps": 64}


class _Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _Products(TorchDispatchMode):
    """Counts products with packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


class _Block(nn.Module):
    """Layers that read the same tensor. Weights and inputs are small integers, so that float32 products are exact."""

    def __init__(self, *, biases: tuple[bool, bool] = (True, True)) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(1024, 768, bias=biases[0])
        self.up_proj = nn.Linear(1024, 640, bias=biases[1])
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(torch.randint(-4, 5, parameter.shape, generator=generator))

    def forward(
        self, input: Tensor, between: Callable[[Tensor], Tensor] = lambda input: input
    ) -> tuple[Tensor, Tensor]:
        first = self.gate_proj(input)
        return first, self.up_proj(input if between is None else between(input))


def integers(num_rows: int) -> Tensor:
    return torch.randint(-4, 5, (1, num_rows, 1024), generator=torch.Generator().manual_seed(1)).float()


def require_packing(dtype: torch.dtype) -> None:
    if not packs(dtype):
        pytest.skip(f"this torch packs no {dtype} weights on this processor")


def draw_layer(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(1024, 1024).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_a_packed_layer_multiplies_like_the_layer_and_is_restored_afterwards(dtype: torch.dtype, num_rows: int) -> None:
    require_packing(dtype)
    layer, rows = draw_layer(dtype), torch.randn(1, num_rows, 1024).to(dtype)
    expected = layer(rows)
    with pytest.raises(KeyError), packed_linears(nn.Sequential(layer), **LONG):
        assert "forward" in vars(layer)
        torch.testing.assert_close(layer(rows), expected)
        raise KeyError
    assert "forward" not in vars(layer)
    assert torch.equal(layer(rows), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_packed_again_in_every_generation(dtype: torch.dtype) -> None:
    require_packing(dtype)
    layer, rows = draw_layer(dtype), torch.randn(8, 1024).to(dtype)
    for _ in range(2):
        layer.weight.mul_(-1).add_(0.01)
        with packed_linears(layer, **LONG):
            torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))


def test_a_layer_multiplies_in_the_dtype_of_autocast() -> None:
    require_packing(torch.bfloat16)
    layer, rows = draw_layer(torch.float32), torch.randn(8, 1024)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(rows)
        with packed_linears(layer, **LONG):
            assert "forward" in vars(layer)
            torch.testing.assert_close(layer(rows), expected)
    assert expected.dtype is torch.bfloat16


def test_layers_that_packing_would_slow_down_or_change_are_not_packed() -> None:
    replaced = draw_layer(torch.float32)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    own = vars(replaced)["forward"]
    small, double = nn.Linear(16, 16), nn.Linear(1024, 1024).double()
    layers = nn.ModuleList([replaced, _Scaled(1024, 1024), small, double])
    with packed_linears(layers, **LONG):
        assert vars(replaced)["forward"] is own
        assert not any("forward" in vars(layer) for layer in layers[1:])
    assert vars(replaced)["forward"] is own
    plain = draw_layer(torch.bfloat16)
    with packed_linears(plain, num_steps=4):  # packing costs more than four steps save
        assert "forward" not in vars(plain)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_the_engine_reports_the_logprobs_of_a_full_forward_with_packed_weights(family: str) -> None:
    require_packing(torch.bfloat16)
    model = tiny_model(family).to(torch.bfloat16)
    engine = GenerationEngine(model, max_slots=4)
    completions = engine.generate([[5, 9, 7]] * 6, SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert not any("forward" in vars(module) for module in model.modules())
    for completion in completions:
        with torch.no_grad():
            logits = model(torch.tensor([[5, 9, 7, *completion.token_ids]]), use_cache=False).logits[0, 2:-1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=0.05, rtol=0)


def test_packing_changes_no_token_in_float64() -> None:
    model = tiny_model("llama").double()
    made = [
        GenerationEngine(model, max_slots=9, pack_weights=packed).generate(
            [[5, 6], [7]], SamplingParams(max_new_tokens=40, n=5)
        )
        for packed in (False, True)
    ]
    assert made[0] == made[1]


def test_the_output_layer_gets_rows_without_gaps_after_new_prompts() -> None:
    model, strides = tiny_model("llama"), []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: strides.append((inputs[0].stride(0), inputs[0].shape[1] * inputs[0].shape[2]))
    )
    GenerationEngine(model, max_slots=2).generate([[5] * 9, [6] * 4, [7] * 3], SamplingParams(max_new_tokens=3))
    assert strides and all(stride == rows for stride, rows in strides)


@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_layers_that_read_the_same_tensor_share_one_product(num_rows: int) -> None:
    require_packing(torch.float32)
    block, rows = _Block(), integers(num_rows)
    for _ in range(2):
        block.gate_proj.weight.mul_(-1)  # shared weights are packed again, too
        expected = block(rows)
        with packed_linears(block, **LONG), _Products() as products:
            for made, own in zip(block(rows), expected, strict=True):
                assert torch.equal(made, own)
        assert products.count == 1


@pytest.mark.parametrize(("num_rows", "num_products"), [(1, 0), (2, 1)])
def test_one_row_of_a_smaller_layer_is_multiplied_without_packed_weights(num_rows: int, num_products: int) -> None:
    require_packing(torch.float32)
    layer, rows = nn.Linear(1024, 512).requires_grad_(False), torch.randn(num_rows, 1024)
    expected = layer(rows)
    with packed_linears(layer, **LONG), _Products() as products:
        torch.testing.assert_close(layer(rows), expected)
    assert products.count == num_products


@pytest.mark.parametrize("between", [torch.neg, Tensor.neg_, torch.clone], ids=["another", "changed", "copy"])
def test_layers_that_read_different_tensors_share_no_product(between: _Change) -> None:
    require_packing(torch.float32)
    block = _Block()
    expected = block(integers(8), between)
    with packed_linears(block, **LONG):
        for _ in range(2):
            for made, own in zip(block(integers(8), between), expected, strict=True):
                assert torch.equal(made, own)
        assert torch.equal(block.up_proj(integers(8)), block(integers(8))[1])  # in another order, and alone


@pytest.mark.parametrize("biases", [(True, False), (False, False)])
def test_layers_share_a_product_only_where_all_or_none_have_a_bias(biases: tuple[bool, bool]) -> None:
    require_packing(torch.float32)
    block, rows = _Block(biases=biases), integers(8)
    expected = block(rows)
    with packed_linears(block, **LONG), _Products() as products:
        for made, own in zip(block(rows), expected, strict=True):
            assert torch.equal(made, own)
    assert products.count == (2 if any(biases) else 1)


# In each of two blocks: queries, keys and values; attention's output; gate and up; down. Once: the head.
@pytest.mark.parametrize(
    ("family", "num_products"),
    [("llama", 9), ("qwen2", 9), ("qwen3", 9), ("gemma", 9), ("phi3", 9), ("gpt_neox", 9), ("opt", 9), ("gpt2", 1)],
)
def test_families_share_products_where_their_layers_read_the_same_tensor(family: str, num_products: int) -> None:
    require_packing(torch.bfloat16)
    model, ids = tiny_model(family).to(torch.bfloat16), torch.tensor([[5, 9, 7, 3]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with packed_linears(model, **LONG), _Products() as products:
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=0.05, rtol=0.02)
    assert products.count == num_products


def test_layers_share_no_product_in_inference_mode() -> None:
    require_packing(torch.float32)
    with torch.inference_mode():
        block, rows = _Block(), integers(8)
        expected = block(rows)
        with packed_linears(block, **LONG), _Products() as products:
            assert all(map(torch.equal, block(rows), expected))
        assert products.count == 2
