"""Costs of experts: arithmetic of a token's experts, weights read by few tokens, and memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.tuning.estimate.hardware import Device, Efficiency
from lightning_realloc.tuning.estimate.kernels import Kernels
from lightning_realloc.tuning.shapes.experts import Experts
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from tests.tuning.estimate.test_hardware import IDEAL
from tests.tuning.estimate.test_roofline import CLUSTER, estimator, seconds
from tests.tuning.examples import shape_of

MIXTRAL, QWEN = "Mixtral-8x7B-v0.1", "Qwen3-30B-A3B"
DENSE = "layers=32,hidden=4096,intermediate=14336,heads=32,kv_heads=8,vocabulary=32000"
"""Mixtral with one expert, and without a router."""
ATTENTION = 2 * 4096**2 + 2 * 4096 * 1024
"""Weights of a Mixtral block's attention."""
EXPERT = 3 * 4096 * 14336


def kernels(shape: ModelShape, cluster: ClusterSpec, efficiency: Efficiency = IDEAL, tp: int = 1) -> Kernels:
    return Kernels(shape, tp, Device(cluster, efficiency), 2)


def test_many_tokens_take_the_arithmetic_of_their_experts_and_the_router() -> None:
    fast_memory = replace(CLUSTER, device_memory_bytes_per_s=1e18)
    flops = 2 * 4096 * (ATTENTION + 2 * EXPERT + 4096 * 8)  # 4096 tokens, each in two of eight experts
    assert kernels(shape_of(MIXTRAL), fast_memory).products(4096) == pytest.approx(
        flops / CLUSTER.device_flops, rel=1e-3
    )


@pytest.mark.parametrize(("tokens", "reached"), [(1, 2.0), (2, 3.5), (4, 5.46875), (64, 8.0)])
def test_few_tokens_read_only_the_experts_that_they_reach(tokens: int, reached: float) -> None:
    # One token misses an expert with probability 3/4 and two tokens with 9/16, so two reach 8 * 7/16 experts.
    experts = shape_of(MIXTRAL).experts
    assert experts is not None and experts.num_reached(tokens) == pytest.approx(reached, rel=1e-6)
    read = 2 * (ATTENTION + reached * EXPERT + 4096 * 8)
    took = kernels(shape_of(MIXTRAL), replace(CLUSTER, device_flops=1e30)).products(tokens)
    assert took == pytest.approx(read / CLUSTER.device_memory_bytes_per_s, rel=0.02)


def test_an_expert_with_few_tokens_takes_a_whole_tile() -> None:
    """128 tokens with eight of 128 experts each: eight rows per expert, and a thin tile has sixteen."""
    fast_memory = replace(CLUSTER, device_memory_bytes_per_s=1e18)
    coarse, fine = (
        kernels(shape_of(QWEN), fast_memory, replace(IDEAL, tile=128, thin_tile=rows)).products(128) for rows in (16, 1)
    )
    extra = coarse - fine
    experts = shape_of(QWEN).experts
    assert experts is not None
    reached = experts.num_reached(128)
    rows = math.ceil(128 * 8 / reached)  # 8.002 are rounded to nine
    wasted = 2 * 3 * 2048 * 768 * reached * (16 - rows)
    assert extra == pytest.approx(wasted / CLUSTER.device_flops, rel=0.01)


def test_products_of_all_experts_fill_the_device_together() -> None:
    device = Device(CLUSTER, Efficiency())
    alone = device.matmul(256, 2048, 768, 2)
    assert device.matmul(256, 2048, 768, 2, num_products=128) < 0.5 * 128 * alone
    assert device.matmul(256, 2048, 768, 2, num_products=1) == alone


def test_experts_that_are_not_cut_are_not_faster_under_tensor_parallelism() -> None:
    fast_memory = replace(CLUSTER, device_memory_bytes_per_s=1e18)
    mixtral = shape_of(MIXTRAL)
    assert mixtral.experts is not None
    uncut = replace(mixtral, experts=replace(mixtral.experts, are_cut=False))
    whole, halved = (kernels(model, fast_memory, tp=2).products(4096) for model in (uncut, mixtral))
    saved = 2 * 4096 * 2 * EXPERT / 2
    assert whole - halved == pytest.approx(saved / CLUSTER.device_flops, rel=1e-3)


def test_a_mixture_costs_more_than_its_active_weights_and_less_than_all() -> None:
    """Compare Mixtral with dense models that have a fourth or all of its experts' features."""
    active, everything = (DENSE.replace("14336", str(count * 14336)) for count in (2, 8))
    models = (active, MIXTRAL, everything)
    for call in ("reference.infer", "actor.train"):
        least, mixture, most = (seconds(call, "dp8", estimator(m)).total for m in models)
        assert least < mixture < 0.5 * most
    # 64 sequences reach all experts in every step, so all weights are read, as in the large model.
    least, mixture, most = (seconds("actor.generate", "dp8", estimator(m)).total for m in models)
    assert 2 * least < mixture and mixture == pytest.approx(most, rel=0.2)


def test_activations_are_those_of_a_tokens_own_experts() -> None:
    dense, mixtral = shape_of(DENSE), shape_of(MIXTRAL)
    # Fp16: 8 scores of the router, and for each of two experts four tensors of features, its input and its output.
    mlp, mixture = 2 * 4 * 14336, 2 * (2 * (4 * 14336 + 2 * 4096) + 8)
    assert mixtral.saved_bytes(1, 2) - dense.saved_bytes(1, 2) == mixture - mlp
    assert mixtral.working_elements(1) > dense.working_elements(1)


def test_tokens_of_other_ranks_arrive_next_to_those_that_experts_sort() -> None:
    # Eight of 128 experts for each token: its hidden state as received and as sorted, and four tensors of features,
    # since both projections are one tensor until their product exists. At the end live four hidden states instead.
    qwen, mixtral = shape_of(QWEN), shape_of(MIXTRAL)
    alone, among_eight = qwen.working_elements(1), qwen.working_elements(1, ep=8)
    assert alone == 4 * 2048 + 8 * max(2048 + 4 * 768, 4 * 2048)
    assert among_eight == alone  # narrow experts
    assert mixtral.working_elements(1, ep=2) - mixtral.working_elements(1) == 2 * 4096


def test_invalid_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="experts_per_token=9 must lie between 1 and experts=8"):
        Experts(count=8, per_token=9, features=1)
    with pytest.raises(PlanError, match="features=0 of experts must be at least 1"):
        Experts(count=8, per_token=2, features=0)
