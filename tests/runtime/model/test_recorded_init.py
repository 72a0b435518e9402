"""Models that are initialized without memory: the same weights, buffers and random numbers as in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightning_realloc.runtime.measure.memory_stats import StorageMeter
from lightning_realloc.runtime.model.recorded_init import defer_init, weight_values
from lightning_realloc.runtime.model.structure import tied_names
from tests.models import EXPERT_FAMILIES, FAMILIES, tiny_model


def policy(config: PreTrainedConfig) -> nn.Module:
    """Build a language model."""
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def scorer(config: PreTrainedConfig) -> nn.Module:
    """Build a classifier."""
    model: nn.Module = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    return model


@pytest.mark.parametrize("construct", [policy, scorer], ids=["policy", "scorer"])
@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
def test_recipes_make_the_weights_of_the_same_construction_in_memory(
    family: str, construct: Callable[[PreTrainedConfig], nn.Module]
) -> None:
    config = tiny_model(family).config
    torch.manual_seed(4)
    whole, after = construct(config), torch.rand(3)
    torch.manual_seed(4)
    deferred = defer_init(construct, config)
    assert torch.equal(torch.rand(3), after)
    assert tied_names(deferred) == tied_names(whole)
    state = torch.get_rng_state()
    for name, parameter in deferred.named_parameters():
        assert parameter.is_meta and parameter.requires_grad
        assert torch.equal(weight_values(parameter), whole.get_parameter(name)), name
    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in whole.named_buffers():
        assert torch.equal(deferred.get_buffer(name), buffer), name


def test_deferred_weights_take_the_memory_of_one_of_them() -> None:
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    meter = StorageMeter()
    meter.start()
    before = meter.current_bytes
    model = defer_init(policy, config)
    meter.stop()
    largest = 4 * max(parameter.numel() for parameter in model.parameters())
    # A weight as it is constructed, its copy, a block for random numbers, and what recipes hold.
    assert meter.take_peak() - before < 4 * largest
    assert 4 * largest < sum(parameter.nbytes for parameter in model.parameters()) / 5


class _Steps(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(8, 4, padding_idx=1)
        nn.init.xavier_uniform_(self.embedding.weight)
        with torch.no_grad():
            self.embedding.weight[2:4].mul_(3)
        self.scale = nn.Parameter(torch.full((3, 2), 7.0))


def test_initialization_of_parts_in_several_steps_is_repeated() -> None:
    torch.manual_seed(1)
    whole = _Steps(LlamaConfig())
    torch.manual_seed(1)
    other = defer_init(_Steps, LlamaConfig())
    for name, parameter in other.named_parameters():
        assert parameter.is_meta
        assert torch.equal(weight_values(parameter), whole.get_parameter(name)), name


class _Computes(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        config.fill(self)


def _orthogonal(model: _Computes) -> None:
    nn.init.orthogonal_(model.layer.weight)


def _truncated(model: _Computes) -> None:
    nn.init.trunc_normal_(model.layer.weight)


def _copied(model: _Computes) -> None:
    model.second.weight.data.copy_(model.layer.weight)


def _normed(model: _Computes) -> None:
    model.second.weight.data /= model.layer.weight.data.norm()


def _large(model: _Computes) -> None:
    model.large = nn.Parameter(torch.arange(2.0**20 + 2).view(2, -1))


@pytest.mark.parametrize("fill", [_orthogonal, _truncated, _copied, _normed, _large])
def test_an_initialization_that_computes_with_weights_is_done_in_memory(fill: Callable[[_Computes], None]) -> None:
    config = LlamaConfig()
    config.fill = fill
    torch.manual_seed(1)
    whole = _Computes(config)
    torch.manual_seed(1)
    other = defer_init(_Computes, config)
    for name, parameter in whole.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
