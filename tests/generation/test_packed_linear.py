"""Do packed weights multiply as the layers do, and is a model as it was afterwards?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.generation.packed_linear import packed_linears, packs
from tests.models import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
LONG = {"num_slots": 16, "num_steps": 64}


class _Scaled(nn.Linear):
    """A layer that is more than a product."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def require_packing(dtype: torch.dtype) -> None:
    if not packs(dtype):
        pytest.skip(f"this torch packs no {dtype} weights on this processor")


def draw_layer(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(1024, 1024).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_a_packed_layer_multiplies_as_the_layer_does_and_is_itself_again_afterwards(
    dtype: torch.dtype, num_rows: int
) -> None:
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
def test_weights_are_packed_anew_in_every_generation(dtype: torch.dtype) -> None:
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


def test_layers_are_left_alone_that_packing_would_slow_down_or_change() -> None:
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
    with packed_linears(plain, num_slots=16, num_steps=4):  # packing costs more than four steps save
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


def test_the_output_layer_gets_rows_without_gaps_behind_new_prompts() -> None:
    model, strides = tiny_model("llama"), []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: strides.append((inputs[0].stride(0), inputs[0].shape[1] * inputs[0].shape[2]))
    )
    GenerationEngine(model, max_slots=2).generate([[5] * 9, [6] * 4, [7] * 3], SamplingParams(max_new_tokens=3))
    assert strides and all(stride == rows for stride, rows in strides)
