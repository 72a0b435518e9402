"""Logits computed in tiles equal whole logits in values and gradients, and are never all held at once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from lightning_realloc import limits
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.runtime.forward import tiled_logits
from lightning_realloc.runtime.parallel.packed_forward import predicting_logits, token_logprobs
from tests.models import SIZES

VOCABULARY = 160
TILE_ROWS = 3


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return made


@contextmanager
def tiles(rows: int = TILE_ROWS) -> Iterator[None]:
    """Compute logits in tiles of some rows, each converted in chunks of two."""
    with (
        mock.patch.object(limits, "TILE_ELEMENTS", rows * VOCABULARY),
        mock.patch.object(limits, "TILED_ROWS_PER_WIDTH", 0),
        mock.patch.object(tiled_logits, "TILE_ELEMENTS", rows * VOCABULARY),
        mock.patch.object(tiled_logits, "CHUNK_ELEMENTS", 2 * VOCABULARY),
    ):
        yield


def a_pack(num_tokens: int = 9) -> PackedBatch:
    """Return two sequences."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCABULARY, (size,), generator=generator).tolist() for size in (num_tokens, 4)]
    columns = {"prompt_ids": Ragged.from_list([[5, 6], [7]]), "response_ids": Ragged.from_list(rows)}
    return pack(Samples(torch.arange(2), columns))


def outcome(model: nn.Module, packed: PackedBatch) -> list[Tensor]:
    """Return log-probabilities, entropies and collisions of all tokens, and the gradient of a weighted sum."""
    said = token_logprobs(model, packed, temperature=0.7, with_entropy=True, with_collision=True)
    assert said.entropy is not None and said.collision is not None
    model.zero_grad()
    weights = torch.linspace(-1, 2, packed.num_tokens)
    (weights * (said.logprobs + 0.3 * said.entropy)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [said.logprobs, said.entropy, said.collision, *gradients]


def with_adapters(model: PreTrainedModel) -> nn.Module:
    """Return the model with adapters on its head."""
    config = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def a_model(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """Return a tiny model with random weights."""
    config = AutoConfig.for_model(family, **{**SIZES, "vocab_size": VOCABULARY, **settings})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


class Clamped(LlamaForCausalLM):
    """Cuts off large logits, which is neither a scale nor tanh."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits, cut off."""
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.clamp(max=0.1)
        return output


MODELS: dict[str, Callable[[], Any]] = {
    "llama": a_model,
    "tied": lambda: a_model("qwen2", tie_word_embeddings=True),
    "bias": lambda: a_model("phi"),
    "scale": lambda: a_model("cohere", logit_scale=0.3),
    "divisor": lambda: a_model("granite", logits_scaling=3.0),
    "soft cap": lambda: a_model("gemma2", final_logit_softcapping=0.5),
    "other name": lambda: a_model("gpt_neox"),
    "adapters": lambda: with_adapters(a_model()),
    "frozen": lambda: a_model().requires_grad_(False),
}


@pytest.mark.parametrize("name", MODELS)
def test_tiles_give_the_values_and_gradients_of_whole_logits(name: str) -> None:
    model, packed = MODELS[name](), a_pack()
    model.get_input_embeddings().weight.requires_grad_()  # for the frozen model
    expected = outcome(model, packed)
    with tiles():
        found = outcome(model, packed)
    assert len(found) == len(expected) > 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6 * max(1.0, float(theirs.detach().abs().max())), rtol=0)


def test_no_tensor_has_as_many_elements_as_all_logits() -> None:
    model, packed = a_model(), a_pack(num_tokens=200)
    weights = max(parameter.numel() for parameter in model.parameters())
    activations = packed.num_tokens * model.config.intermediate_size
    with tiles(), LargestTensor() as largest:
        outcome(model, packed)
    assert largest.num_elements <= max(weights, activations) < packed.num_tokens * VOCABULARY


def test_deferred_logits_are_printed_without_being_computed() -> None:
    model, seen = a_model(), []
    packed = a_pack()
    with tiles(), torch.no_grad():
        deferred = predicting_logits(model, packed, torch.tensor([3, 4, 5, 6]))
        model.get_output_embeddings().register_forward_pre_hook(lambda *_: seen.append(1))
        assert repr(deferred) == f"DeferredLogits((4, {VOCABULARY}), computed: False)"
    assert not seen


@pytest.mark.parametrize(("trains_head", "num_tokens"), [(True, 200), (False, 60)])
def test_a_trained_head_is_computed_in_tiles_for_many_tokens_only(trains_head: bool, num_tokens: int) -> None:
    # Its weight's gradients, of a tile and summed, take as much memory as logits of twice its width, 128 tokens.
    model = a_model()
    model.get_output_embeddings().requires_grad_(trains_head)
    with tiles(), mock.patch.object(limits, "TILED_ROWS_PER_WIDTH", 2):
        for count, is_deferred in ((60, not trains_head), (num_tokens, True)):
            found = predicting_logits(model, a_pack(count), torch.arange(2, count))
            assert isinstance(found, tiled_logits.DeferredLogits) == is_deferred


def test_few_logits_are_computed_once() -> None:
    model, packed = a_model(), a_pack()
    with mock.patch.object(tiled_logits.TiledLogits, "__init__", side_effect=AssertionError):
        outcome(model, packed)


@pytest.mark.parametrize("name", ["llama", "tied", "adapters"])
def test_tiles_under_autocast_have_the_gradients_of_whole_logits(name: str) -> None:
    model, packed = MODELS[name](), a_pack()
    with torch.autocast("cpu", torch.bfloat16):
        expected = outcome(model, packed)
        with tiles():
            found = outcome(model, packed)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


def test_many_tiles_in_half_precision_sum_to_a_gradient_as_exact_as_one() -> None:
    model, packed = a_model().bfloat16(), a_pack(num_tokens=400)
    head = model.get_output_embeddings().weight
    exact = copy.deepcopy(model).float()
    outcome(exact, packed)
    errors = []
    for rows in (packed.num_tokens, 1):
        with tiles(rows):
            outcome(model, packed)
        errors.append(float((head.grad.float() - exact.get_output_embeddings().weight.grad).norm()))
    assert errors[1] < 1.2 * errors[0]


def test_inference_in_tiles_has_no_graph() -> None:
    model, packed = a_model(), a_pack()
    with torch.no_grad():
        expected = token_logprobs(model, packed).logprobs
        with tiles():
            found = token_logprobs(model, packed).logprobs
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


def test_logits_that_other_operations_need_are_whole_with_a_warning() -> None:
    model, packed = a_model(), a_pack()
    model.__class__ = Clamped
    expected = outcome(model, packed)
    with tiles(), pytest.warns(UserWarning, match="clamp needs all logits at once"):
        found = outcome(model, packed)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "forward" not in vars(model.get_output_embeddings())
    model.__class__ = LlamaForCausalLM
    with tiles(), warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome(model, packed)
