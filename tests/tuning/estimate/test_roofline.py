"""Estimates grow with their inputs, and equal values computed by hand where one term dominates."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec, NodeLink
from lightning_realloc.layout.dims import Layout
from lightning_realloc.tuning.estimate.estimator import CallSeconds, Estimator
from lightning_realloc.tuning.estimate.hardware import Device, Efficiency
from lightning_realloc.tuning.estimate.kernels import Kernels
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.parts import EngineMemory, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_elements import RoleElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from tests.tuning.estimate.test_hardware import IDEAL
from tests.tuning.examples import PPO_FLOW, SMALL, role_of, roles_of, shape_of, with_adapters
from tests.tuning.timeline.test_simulator import SCORED_BY_BASE, plan_of

LLAMA = "layers=32,hidden=4096,intermediate=11008,heads=32,vocabulary=32000"
CLUSTER = ClusterSpec.parse("a100-80g:4x8")
HALF = MemorySettings(copy_bytes=2, gathered_bytes=2)
LOAD = Workload(num_sequences=512, prompt_tokens=128, response_tokens=384, micro_batch_tokens=8192)
EXPERTS = "experts=16,experts_per_token=4"
MIXTURE = f"layers=2,hidden=1024,intermediate=512,heads=8,vocabulary=1000,{EXPERTS}"
CALLS = ("actor.generate", "reference.infer", "actor.train")


def estimator(
    model: str = LLAMA,
    cluster: ClusterSpec = CLUSTER,
    load: Workload = LOAD,
    efficiency: Efficiency | None = None,
    settings: MemorySettings = HALF,
    **options: tuple[int, ...],
) -> RooflineEstimator:
    roles = roles_of(model)
    return RooflineEstimator(PPO_FLOW, cluster, roles, settings, load, efficiency=efficiency, **options)


def seconds(call: str, layout: str = "dp8", answers: Estimator | None = None, **options: bool | int) -> CallSeconds:
    return (answers or estimator()).call_seconds(call, CallPlan(Layout.parse(layout), **options))


@pytest.mark.parametrize("call", CALLS)
def test_more_tokens_more_layers_and_less_bandwidth_take_longer(call: str) -> None:
    base = seconds(call, "fsdp2.tp4").total
    longer = estimator(load=replace(LOAD, response_tokens=768))
    more = estimator(load=replace(LOAD, num_sequences=1024))
    deeper = estimator(LLAMA.replace("layers=32", "layers=64"))
    for other in (longer, more, deeper):
        assert seconds(call, "fsdp2.tp4", other).total > 1.3 * base
    slower = replace(CLUSTER, intra_node_bytes_per_s=CLUSTER.intra_node_bytes_per_s / 10)
    thinner = replace(CLUSTER, device_memory_bytes_per_s=CLUSTER.device_memory_bytes_per_s / 10)
    assert seconds(call, "fsdp2.tp4", estimator(cluster=slower)).total > base
    assert seconds(call, "fsdp2.tp4", estimator(cluster=thinner)).total > base


def test_without_overheads_inference_takes_flops_over_the_device_rate() -> None:
    answers = estimator(cluster=replace(CLUSTER, device_memory_bytes_per_s=1e18), efficiency=IDEAL)
    tokens = 512 * 512 / 8  # on each of 8 replicas
    products = 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) * tokens
    attention = 4 * 32 * 4096 * tokens * 256  # a token attends to half a sequence of 512
    head = 2 * 4096 * 32000 * tokens * 384 / 512  # of response tokens only
    assert seconds("reference.infer", "dp8", answers).total == pytest.approx(
        (products + attention + head) / CLUSTER.device_flops, rel=1e-3
    )
    # Backward has twice the products and 2.5 times the attention; checkpointing repeats the forward pass of the blocks.
    trained = (3 * (products + head) + 3.5 * attention) / CLUSTER.device_flops
    assert seconds("actor.train", "dp8", answers).compute == pytest.approx(trained, rel=1e-3)
    again = seconds("actor.train", "dp8", answers, gradient_checkpointing=True).compute
    assert again == pytest.approx(trained + (products + attention) / CLUSTER.device_flops, rel=1e-3)


def test_without_overheads_decoding_reads_weights_and_cache_in_every_step() -> None:
    load = replace(LOAD, num_sequences=8, response_tokens=101)
    answers = estimator(
        cluster=replace(CLUSTER, device_flops=1e30),
        load=load,
        efficiency=replace(IDEAL, memory_share=0.5, cache_share=0.5),
    )
    read = 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 4096 * 32000
    cache = 2 * 2 * 32 * 4096 * (128 + 50)  # per sequence: keys and values of 178 tokens on average
    steps = 100 * (read + cache) / (0.5 * CLUSTER.device_memory_bytes_per_s)
    prefill = seconds("actor.generate", "dp8", estimator(load=replace(load, response_tokens=1), efficiency=IDEAL))
    assert seconds("actor.generate", "dp8", answers).total - prefill.total == pytest.approx(steps, rel=0.03)


def test_tensor_parallel_ranks_divide_the_work_and_pay_for_all_reduces() -> None:
    answers = estimator(efficiency=replace(IDEAL, layer_launch_s=0.0))
    whole, halved = seconds("reference.infer", "dp1", answers), seconds("reference.infer", "tp2", answers)
    assert halved.compute == pytest.approx(whole.compute / 2, rel=0.15)
    # Two sums of hidden states per block, each twice half of 2 * 4096 bytes a token; and the other rank's three fp32
    # numbers for every response token.
    tokens = 512 * 512
    sums = 32 * 2 * tokens * 2 * 4096 / CLUSTER.intra_node_bytes_per_s
    numbers = tokens * 384 / 512 * 12 / CLUSTER.intra_node_bytes_per_s
    # For each of 32 micro-batches; the latency of a sum is two hops.
    latency = 32 * (32 * 2 * 2 + 1) * CLUSTER.intra_node_latency_s
    assert halved.tensor_parallel == pytest.approx(sums + numbers + latency)


def test_data_parallel_ranks_divide_the_batch_and_sum_gradients() -> None:
    answers = estimator(efficiency=replace(IDEAL, hides_communication=False))
    one, eight = seconds("actor.train", "dp1", answers), seconds("actor.train", "dp8", answers)
    assert eight.compute == pytest.approx(one.compute / 8, rel=0.01)
    gradients = 2 * 7 / 8 * 2 * 6.738e9 / CLUSTER.intra_node_bytes_per_s
    assert eight.data_parallel == pytest.approx(gradients, rel=0.01)
    assert one.data_parallel == one.sharding == 0
    assert eight.optimizer == pytest.approx(one.optimizer)
    assert seconds("actor.train", "fsdp8", answers).optimizer == pytest.approx(one.optimizer / 8)


def test_fsdp_gathers_in_every_pass_and_scatters_gradients_once() -> None:
    answers = estimator(efficiency=replace(IDEAL, hides_communication=False))
    one_way = 7 / 8 * 2 * 6.738e9 / CLUSTER.intra_node_bytes_per_s
    passes = 512 * 512 / 8 / 8192
    assert seconds("actor.train", "fsdp8", answers).sharding == pytest.approx((2 * passes + 1) * one_way, rel=0.01)
    assert seconds("reference.infer", "fsdp8", answers).sharding == pytest.approx(passes * one_way, rel=0.01)
    assert seconds("actor.train", "fsdp8", estimator()).sharding < one_way  # hidden except for one block
    for call in CALLS[1:]:  # ranks that divide rows gather as often for as many tokens of a rank
        for cp, text in ((2, "fsdp4.cp2"), (8, "cp8")):
            divided = seconds(call, text, answers, micro_batch_tokens=cp * 8192)
            assert divided.sharding == pytest.approx(seconds(call, "fsdp8", answers).sharding)


def test_context_parallel_ranks_exchange_heads_and_where_these_do_not_suffice_the_keys_of_rows() -> None:
    cluster, tokens = replace(CLUSTER, intra_node_latency_s=1e-15), 512 * 512 / 8
    # Queries and outputs leave a rank to the others that divide heads; keys and values go to all that read them.
    for heads, away, copies in ((8, 7 / 8, 1), (2, 1 / 2, 4), (3, 0, 8)):
        width = 128 * heads
        model = f"layers=2,hidden={width},intermediate=512,heads={heads},vocabulary=1000"
        answers = estimator(model, cluster, efficiency=replace(IDEAL, hides_communication=False))
        moved = 2 * (2 * tokens * width * away + 2 * tokens * width * copies * 7 / 8) * 2  # two layers, two bytes
        scored = seconds("reference.infer", "cp8", answers).tensor_parallel
        assert scored == pytest.approx(moved / CLUSTER.intra_node_bytes_per_s, rel=1e-3)


def test_expert_parallel_ranks_exchange_tokens_and_gather_fewer_weights() -> None:
    answers = estimator(MIXTURE, efficiency=replace(IDEAL, hides_communication=False))
    # Each of 8,192 tokens of 4 micro-batches has 4 experts in each of 2 blocks, seven of eight on other ranks.
    away = 8192 * 4 * 1024 * 2 * 7 / 8 / CLUSTER.intra_node_bytes_per_s + 3 * CLUSTER.intra_node_latency_s
    scored = seconds("reference.infer", "dp8.ep8", answers)
    assert scored.tensor_parallel == pytest.approx(4 * 2 * 2 * away)
    trained = {text: seconds("actor.train", text, answers) for text in ("fsdp8", "fsdp8.ep2", "fsdp8.ep8")}
    assert trained["fsdp8.ep8"].tensor_parallel == pytest.approx(2 * scored.tensor_parallel)
    experts, others = 2 * 16 * 3 * 1024 * 512, 2 * (4 * 1024**2 + 16 * 1024) + 2 * 1000 * 1024
    # Nine times: in both passes of four micro-batches, and once for gradients. Half of the experts are on four ranks.
    moved = {"fsdp8": (experts + others) * 7 / 8, "fsdp8.ep2": others * 7 / 8 + experts / 2 * 3 / 4}
    for text, num_hops in (("fsdp8", 3), ("fsdp8.ep2", 3 + 2), ("fsdp8.ep8", 3)):
        sent = 2 * moved.get(text, others * 7 / 8) / CLUSTER.intra_node_bytes_per_s
        assert trained[text].sharding == pytest.approx(9 * (sent + num_hops * CLUSTER.intra_node_latency_s), rel=0.01)


def test_a_loss_that_balances_experts_adds_forward_passes_to_several_micro_batches() -> None:
    answers = estimator(MIXTURE, efficiency=IDEAL)
    roles = {
        name: replace(role, shape=replace(role.shape, experts=replace(role.shape.experts, is_balanced=True)))
        for name, role in roles_of(MIXTURE).items()
        if role.shape is not None and role.shape.experts is not None
    }
    balanced = RooflineEstimator(PPO_FLOW, CLUSTER, roles, HALF, LOAD, efficiency=IDEAL)
    for layout, num_forward in (("dp1", 1), ("pp2", 1), ("dp8", 1)):
        plain, counted = (seconds("actor.train", layout, each).compute for each in (answers, balanced))
        forward = seconds("reference.infer", layout, answers).compute
        assert plain + 0.5 * forward < counted <= plain + num_forward * forward
    whole = {"micro_batch_tokens": 10**6}
    assert seconds("actor.train", "dp8", balanced, **whole) == seconds("actor.train", "dp8", answers, **whole)


def test_ranks_that_divide_experts_read_fewer_of_them_in_a_decoding_step() -> None:
    load = replace(LOAD, num_sequences=8)
    at_once = replace(IDEAL, experts_launch_s=0)
    answers = estimator(MIXTURE, efficiency=at_once, load=load, cluster=replace(CLUSTER, device_flops=1e30))
    whole, divided = (seconds("actor.generate", text, answers).compute for text in ("dp8", "dp8.ep8"))
    # One token reaches four experts of sixteen; eight tokens reach 16 (1 - 0.75^8) = 14.4, of which a rank has 1.8.
    fewer = 2 * (4 - 16 * (1 - 0.75**8) / 8) * 3 * 1024 * 512 * 2 / CLUSTER.device_memory_bytes_per_s
    assert whole - divided == pytest.approx(383 * fewer, rel=0.05)


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    answers = estimator(LLAMA.replace("vocabulary=32000", "vocabulary=32"), efficiency=IDEAL)
    one, four = seconds("actor.train", "dp1", answers), seconds("actor.train", "pp4", answers)
    count = 512 * 512 // 8192
    assert four.compute == pytest.approx(one.compute / 4, rel=0.01)
    assert four.pipeline == pytest.approx(four.compute * 3 / count, rel=0.03)
    few = seconds("actor.train", "pp4", answers, micro_batch_tokens=2 * 8192)
    assert few.pipeline > 1.9 * four.pipeline


@pytest.mark.parametrize(
    ("model", "waiting"),
    [
        (LLAMA, 4 * 4096**2 + 3 * 4096 * 11008),
        (f"{LLAMA.replace('11008', '512')},experts=16,experts_per_token=4", 4 * 4096**2),  # those of experts do not
    ],
)
def test_gradients_of_weights_that_wait_fill_idle_turns_at_both_ends(model: str, waiting: int) -> None:
    answers = estimator(
        model.replace("vocabulary=32000", "vocabulary=32"),
        cluster=replace(CLUSTER, device_memory_bytes_per_s=1e18, intra_node_bytes_per_s=1e18),
        efficiency=IDEAL,
    )
    usual = seconds("actor.train", "pp4", answers).pipeline
    less = seconds("actor.train", "pp4", answers, pipeline_schedule="zero_bubble").pipeline
    # A stage's products of one micro-batch, which the gradients of its weights take as well. Three turns of idle time
    # lose them, and three more have them.
    weights = 2 * 8 * waiting * 8192 / CLUSTER.device_flops
    assert usual - less == pytest.approx(6 * weights, rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["pp2.dp4", "pp4.fsdp2", "pp8", "pp2.tp4"])
def test_delayed_gradients_of_weights_take_at_least_the_bytes_of_1f1b(layout: str, checkpointing: bool) -> None:
    answers, least = estimator(), 0
    for tokens in (4096, 16384, 65536):
        plan = CallPlan(Layout.parse(layout), tokens, checkpointing)
        usual, delayed = (
            answers.active_bytes("actor.train", one) for one in (plan, replace(plan, pipeline_schedule="zero_bubble"))
        )
        assert least < usual <= delayed
        least = usual


@pytest.mark.parametrize(("call", "num_ways"), [("reference.infer", 1), ("actor.train", 2)])
def test_a_pipeline_sends_hidden_states_forward_and_their_gradients_back(call: str, num_ways: int) -> None:
    thin, wide = (
        seconds(call, "pp4", estimator(cluster=replace(CLUSTER, intra_node_bytes_per_s=rate), efficiency=IDEAL))
        for rate in (1e9, 1e18)
    )
    # 2 bytes of 4096 features for each of 8192 tokens, in 32 micro-batches and 3 turns that fill and drain.
    assert thin.pipeline - wide.pipeline == pytest.approx(num_ways * (32 + 3) * 8192 * 4096 * 2 / 1e9, rel=1e-3)


def test_shards_across_nodes_cost_more_than_inside_one() -> None:
    answers = estimator(efficiency=replace(Efficiency(), hides_communication=False))
    inside = seconds("actor.train", "fsdp4@0-3", answers)
    across = seconds("actor.train", "fsdp4@0,8,16,24", answers)
    assert across.sharding > 5 * inside.sharding
    assert across.compute == inside.compute


def test_a_launch_bound_generation_takes_the_seconds_of_its_launches() -> None:
    slow = replace(Efficiency(), decode_launch_s=4e-3, collective_launch_s=0.5e-3, step_s=0.0, row_s=0.0)
    generated = seconds("actor.generate", "tp8", estimator(efficiency=slow), max_slots=512)
    assert generated.total == pytest.approx(383 * 32 * 5e-3, rel=0.05)
    assert seconds("actor.generate", "tp8", estimator(efficiency=slow), max_slots=64).total > 7 * generated.total


def test_fewer_key_heads_read_less_cache_but_at_least_one_head_per_rank() -> None:
    load = replace(LOAD, num_sequences=64, prompt_tokens=4096)
    ideal = {"load": load, "efficiency": IDEAL}
    heads = (32, 8, 4)
    whole, grouped, few = (
        estimator(f"{LLAMA},kv_heads={n}", **ideal)
        for n in heads  # type: ignore[arg-type]
    )
    prefill = seconds("actor.generate", "dp1", estimator(load=replace(load, response_tokens=1), efficiency=IDEAL))
    decoding = [seconds("actor.generate", "dp1", one).total - prefill.total for one in (whole, grouped)]
    cache = 2 * 2 * 32 * 4096 * 64 * (4096 + 191.5) / CLUSTER.device_memory_bytes_per_s
    assert decoding[0] - decoding[1] >= 0.75 * 383 * cache  # and the projections to keys and values are smaller
    assert decoding[0] - decoding[1] <= 0.9 * 383 * cache
    # Eight ranks with one key head each read as much as eight ranks that share four heads.
    assert seconds("actor.generate", "tp8", grouped).total == pytest.approx(
        seconds("actor.generate", "tp8", few).total, rel=1e-6
    )


@pytest.mark.parametrize("tp", [1, 32])
def test_heads_that_read_the_same_latents_take_the_longer_of_reading_and_computing(tp: int) -> None:
    kernels = Kernels(shape_of("DeepSeek-V3"), tp, Device(CLUSTER, IDEAL), element_bytes=2)
    attention = kernels.decode(8, 10_000) - kernels.decode(8, 0)
    read = 8 * 10_000 * 576 * 2 / CLUSTER.device_memory_bytes_per_s
    computed = 4 * 8 * 10_000 * (128 // tp) * 576 / CLUSTER.device_flops
    assert attention == pytest.approx(max(read, computed)) and (read < computed) == (tp == 1)


def decoding_step_s(layout: str, efficiency: Efficiency | None = None, settings: MemorySettings = HALF,
                    **load: int) -> float:  # fmt: skip
    """Return the seconds that the second of two decoding steps takes, for a capture costs none here."""
    efficiency = replace(efficiency or Efficiency(), capture_steps=0)

    def generation_s(response_tokens: int) -> float:
        roles = roles_of(LLAMA)
        work = replace(LOAD, response_tokens=response_tokens, **load)
        answers = RooflineEstimator(PPO_FLOW, CLUSTER, roles, settings, work, efficiency=efficiency)
        return seconds("actor.generate", layout, answers, max_slots=1024).total

    return generation_s(3) - generation_s(2)


def test_a_captured_step_takes_less_than_the_launches_of_its_kernels() -> None:
    captured, launched = (
        decoding_step_s("dp8", Efficiency(captures_steps=is_on), num_sequences=8) for is_on in (True, False)
    )
    assert launched > 32 * Efficiency().decode_launch_s  # the host is the limit
    assert captured < launched / 2
    # Weights are read, and the kernels of 32 blocks run one after the other.
    read = 2 * 6.738e9 / CLUSTER.device_memory_bytes_per_s
    assert captured > read + 32 * Efficiency().captured_block_s


@pytest.mark.parametrize("layout", ["tp2", "fsdp8", "pp2"])
def test_steps_that_communicate_are_not_captured(layout: str) -> None:
    captured, launched = (decoding_step_s(layout, Efficiency(captures_steps=is_on)) for is_on in (True, False))
    assert captured == launched


@pytest.mark.parametrize(("layout", "is_captured"), [("tp2", True), ("fsdp2.tp2", False), ("pp2.tp2", False)])
def test_steps_of_tensor_parallelism_are_captured_where_collectives_are(layout: str, is_captured: bool) -> None:
    collective = replace(HALF, engine=EngineMemory(captures_collectives=True))
    captured, launched = (
        decoding_step_s(layout, Efficiency(captures_steps=is_on), settings=collective, num_sequences=8)
        for is_on in (True, False)
    )
    assert (captured < launched) == is_captured
    exchange = 32 * 2 * 2 * CLUSTER.intra_node_latency_s  # two all-reduces of two messages in each block
    assert captured > 6.738e9 / CLUSTER.device_memory_bytes_per_s + exchange


def test_steps_of_a_bounded_cache_are_captured_and_those_of_many_tokens_are_not() -> None:
    launched = decoding_step_s("dp8", Efficiency(captures_steps=False))
    bounded = replace(HALF, engine=EngineMemory(max_cache_bytes=10**10))
    assert decoding_step_s("dp8", settings=bounded) == decoding_step_s("dp8") < launched
    drafting = replace(HALF, engine=EngineMemory(num_ahead=7))
    assert decoding_step_s("dp8", settings=drafting, num_sequences=8 * 64) < launched  # 512 tokens
    assert decoding_step_s("dp8", settings=drafting, num_sequences=8 * 65) >= launched


def test_a_captured_step_takes_longer_with_more_sequences_and_longer_contexts() -> None:
    sizes = [decoding_step_s("dp1", num_sequences=count) for count in (1, 8, 32, 128, 512, 513)]
    contexts = [decoding_step_s("dp1", num_sequences=32, prompt_tokens=count) for count in (16, 128, 1024, 8192)]
    for times in (sizes, contexts):
        assert all(more > less for less, more in pairwise(times))


def test_graphs_are_captured_anew_in_every_generation_if_they_are_always_freed() -> None:
    few, many = (Efficiency(capture_steps=count) for count in (1, 2))
    long = replace(LOAD, response_tokens=1024)
    freed, kept = (replace(HALF, engine=EngineMemory(captures_anew=anew)) for anew in (True, False))
    once, twice, never = (
        seconds("actor.generate", "dp8", estimator(load=long, efficiency=one, settings=settings)).total
        for one, settings in ((few, freed), (many, freed), (many, kept))
    )
    assert twice - once == pytest.approx(once - never)
    shapes = (once - never) / (32 * Efficiency().decode_launch_s)
    assert 4 <= shapes <= 8  # two lengths to an octave, from 128 + 1 to 128 + 1024 tokens


def test_a_generating_pipeline_takes_one_turn_per_stage() -> None:
    load = replace(LOAD, num_sequences=8, response_tokens=101)
    answers = estimator(
        LLAMA.replace("vocabulary=32000", "vocabulary=32"), load=load, efficiency=replace(IDEAL, decode_launch_s=1e-2)
    )
    one, four = seconds("actor.generate", "dp1", answers), seconds("actor.generate", "pp4", answers)
    assert one.compute == pytest.approx(100 * 32 * 1e-2, rel=0.02)  # launches dominate
    assert four.compute == pytest.approx(one.compute, rel=0.02)  # a quarter of the blocks for each of four groups
    assert four.pipeline >= 400 * CLUSTER.intra_node_latency_s


def test_short_responses_finish_before_the_longest() -> None:
    mixed = seconds("actor.generate", answers=estimator(responses=(16, 32, 64, 384)), max_slots=16).total
    assert mixed < 0.6 * seconds("actor.generate", max_slots=16).total


def test_frozen_weights_need_no_gradients_and_no_optimizer() -> None:
    role = role_of(LLAMA)
    frozen = frozenset(param.name for param in role.model.params if param.name != "lm_head.weight")
    adapted = RoleMemory(model=role.model, shape=role.shape, frozen_params=frozen)
    roles = {name: adapted for name in PPO_FLOW.roles}
    lora = RooflineEstimator(PPO_FLOW, CLUSTER, roles, HALF, LOAD)
    full, few = seconds("actor.train"), seconds("actor.train", answers=lora)
    assert few.compute == pytest.approx(full.compute * 2 / 3, rel=0.1)
    assert few.optimizer < 0.05 * full.optimizer


def test_a_move_takes_its_bytes_over_the_slowest_link() -> None:
    answers = estimator(efficiency=replace(IDEAL, memory_share=1.0))
    shards, copies, far = Layout.parse("fsdp4@0-3"), Layout.parse("dp4@0-3"), Layout.parse("dp4@8-11")
    model = 2 * 6.738e9
    assert answers.move_seconds("actor", shards, shards) == 0
    inside = answers.move_seconds("actor", shards, copies)
    assert inside == pytest.approx(0.75 * model / CLUSTER.intra_node_bytes_per_s, rel=0.01)
    # The weights enter the other node once, a quarter through each adapter, and are distributed there.
    between = answers.move_seconds("actor", shards, far)
    assert between == pytest.approx(model / 4 / CLUSTER.inter_node_bytes_per_s, rel=0.01)
    # Nothing is sent, but a quarter is read in fp32 and written in 2 bytes.
    cast = 6 * 6.738e9 / 4 / CLUSTER.device_memory_bytes_per_s
    assert answers.move_seconds("actor", copies, Layout.parse("tp4@0-3")) == pytest.approx(cast, rel=0.01)


def test_groups_and_moves_over_a_slow_link_take_longer_and_others_do_not() -> None:
    slow = (NodeLink(0, 1, CLUSTER.inter_node_bytes_per_s / 10, 1e-3), NodeLink(5, 9, 1.0, 1.0))
    usual, uneven = (
        estimator(cluster=replace(CLUSTER, num_nodes=3, node_links=links), efficiency=IDEAL) for links in ((), slow)
    )
    for layout, part in (("fsdp16@0-15", "sharding"), ("dp24@0-23", "data_parallel"), ("pp2.fsdp8@0-15", "pipeline")):
        plan = CallPlan(Layout.parse(layout))
        before, after = (getattr(one.call_seconds("actor.train", plan), part) for one in (usual, uneven))
        assert after > before + 1e-3
    for layout in ("fsdp8@0-7", "fsdp16@8-23", "pp2.fsdp8@0-7,16-23"):
        plan = CallPlan(Layout.parse(layout))
        assert uneven.call_seconds("actor.train", plan) == usual.call_seconds("actor.train", plan)
    home, near, far = (Layout.parse(f"dp8@{ranks}") for ranks in ("0-7", "16-23", "8-15"))
    assert uneven.move_seconds("actor", home, near) == usual.move_seconds("actor", home, near)
    assert uneven.move_seconds("actor", home, far) == pytest.approx(
        10 * usual.move_seconds("actor", home, far), rel=0.02
    )


LAYOUTS = {
    "actor.generate": "dp2.tp2@0-3",
    "reward.infer": "tp4@0-3",
    "reference.infer": "pp2.dp2@0-3",
    "critic.infer": "dp4@0-3",
    "actor.train": "pp2.fsdp2@0-3",
    "critic.train": "fsdp2.tp2@0-3",
}


EXPERT_LAYOUTS = {
    "actor.generate": "dp4.ep4@0-3",
    "reward.infer": "dp4@0-3",
    "reference.infer": "dp2.fsdp2.ep4@0-3",
    "critic.infer": "dp4.ep2@0-3",
    "actor.train": "fsdp4.ep2@0-3",
    "critic.train": "pp2.fsdp2.ep2@0-3",
}


@pytest.mark.parametrize(("model", "layouts"), [(SMALL, LAYOUTS), (f"{SMALL},{EXPERTS}", EXPERT_LAYOUTS)])
def test_bytes_equal_those_of_the_forecast(model: str, layouts: dict[str, str]) -> None:
    load = Workload(num_sequences=16, prompt_tokens=4, response_tokens=12, micro_batch_tokens=64)
    answers = estimator(model, load=load)
    plan = plan_of(layouts)
    forecast = forecast_memory(PPO_FLOW, plan, answers.roles, HALF, load, ranks=range(4))
    for name, call in plan.calls:
        during = max(
            forecast.at(name, rank).total - forecast.at("reward.infer", rank).total for rank in range(4)
        ) + answers.active_bytes("reward.infer", plan.call("reward.infer"))
        assert answers.active_bytes(name, call) == pytest.approx(during, rel=0.15), name
    homes = [("actor", "actor.train"), ("critic", "critic.train"), ("reward", "reward.infer")]
    homes.append(("reference", "reference.infer"))
    kept = sum(answers.resident_bytes(role, plan.layout(call), is_home=True) for role, call in homes)
    first = [forecast.at("reward.infer", rank) for rank in range(4)]
    fullest = max(parts.weights + parts.optimizer for parts in first)
    assert fullest <= kept <= 1.2 * fullest  # stages of several roles may be the fullest on different ranks


@pytest.mark.parametrize("copy_bytes", [2, 4], ids=["bf16-mixed", "32-true"])
def test_bytes_of_a_shared_base_equal_those_of_the_forecast(copy_bytes: int) -> None:
    half = replace(HALF, copy_bytes=copy_bytes, gathered_bytes=copy_bytes)
    actor = with_adapters(role_of(SMALL), rank=4)
    roles = {"actor": actor, "reference": replace(actor, frozen_params=frozenset(), shares="actor")}
    load = Workload(num_sequences=16, prompt_tokens=4, response_tokens=12, micro_batch_tokens=64)
    answers = RooflineEstimator(SCORED_BY_BASE, CLUSTER, roles, half, load)
    plan = plan_of({"actor.generate": "dp4@0-3", "reference.infer": "tp4@0-3", "actor.train": "dp2.tp2@0-3"})
    forecast = forecast_memory(SCORED_BY_BASE, plan, roles, half, load, ranks=range(4))
    home = answers.resident_bytes("actor", plan.layout("actor.train"), is_home=True)
    copies = [
        answers.resident_bytes(role, plan.layout(call), is_home=False)
        for role, call in (("actor", "actor.generate"), ("reference", "reference.infer"))
    ]
    for name, call in plan.calls:
        counted = home + sum(copies) + answers.active_bytes(name, call)
        parts = [forecast.at(name, rank) for rank in range(4)]
        predicted = max(one.total - one.staging for one in parts)  # a search does not count the staging of moves
        assert counted == pytest.approx(predicted, rel=0.1), name  # nor tensors that a replica shares with the home
    # By hand: the base once, in 2 or 4 bytes, with half of each cut parameter; fp32 adapters with two moments.
    weights = forecast.at("reference.infer", 0).weights
    sizes = RoleElements(actor).on_rank(plan.layout("actor.train"), 0)
    trained = sizes.num_trained_sharded
    assert weights == (sizes.num_sharded - trained) * copy_bytes + trained * 4
    assert home == weights + trained * 8


def test_bytes_do_not_depend_on_the_calls_that_were_estimated_before() -> None:
    load, model = replace(LOAD, num_sequences=48), SMALL.replace("layers=4", "layers=7")
    shared = estimator(model, load=load)
    for text in (
        "dp4",
        "dp2.fsdp2",
        "fsdp4",
        "pp2.dp2",
        "pp4",
        "dp2.cp2",
        "fsdp2.cp2",
        "cp2.tp2",
        "pp2.tp2",
        "dp8",
        "pp4.dp2",
    ):
        for call in CALLS:
            kind = PPO_FLOW.call(call).kind
            for tokens, slots in ((1024, 2), (2048, 6), (8192, 64)):
                plan = CallPlan(Layout.parse(text), tokens, kind == "train" and tokens == 1024, slots)
                if kind != "generate" or plan.layout.dims.cp == 1:
                    assert shared.active_bytes(call, plan) == estimator(model, load=load).active_bytes(call, plan)


def test_bytes_of_a_frozen_or_copied_role_are_those_of_its_weights() -> None:
    answers = estimator(SMALL)
    elements = role_of(SMALL).model.num_elements
    layout = Layout.parse("dp2")
    assert answers.resident_bytes("actor", layout, is_home=True) == elements * (4 + 8)
    assert answers.resident_bytes("actor", layout, is_home=False) == elements * 2
    assert answers.resident_bytes("reference", layout, is_home=True) == elements * 2


def test_ten_thousand_distinct_calls_are_estimated_in_seconds() -> None:
    answers = estimator(cluster=ClusterSpec.parse("a100-80g:16x8"))
    plans = [
        CallPlan(Layout.parse(layout), micro_batch_tokens=512 * n, max_slots=n)
        for layout in ("fsdp8", "dp2.tp4", "fsdp4.tp8", "pp2.fsdp2.tp4", "dp16.tp8")
        for n in range(1, 41)
    ]
    begin = time.process_time()
    for plan in plans:
        for call in CALLS[1:]:
            answers.call_seconds(call, plan)
    assert time.process_time() - begin < 5 * len(plans) * 2 / 10_000 + 0.5  # five times the intended rate, plus a start


def test_inputs_that_cannot_be_estimated_are_refused() -> None:
    with pytest.raises(PlanError, match="role 'reward' has no model to estimate; there are actor"):
        RooflineEstimator(PPO_FLOW, CLUSTER, {"actor": role_of(LLAMA)}, HALF, LOAD)
    shapeless = {name: RoleMemory(model=role_of(SMALL).model) for name in PPO_FLOW.roles}
    with pytest.raises(PlanError, match="role 'actor' has no shape"):
        RooflineEstimator(PPO_FLOW, CLUSTER, shapeless, HALF, LOAD)
    with pytest.raises(PlanError, match="must lie between 1 and response_tokens=384"):
        estimator(responses=(1, 500))


def test_ranks_that_share_cores_take_proportionally_longer() -> None:
    four = ClusterSpec.parse("cpu:1x4")
    roles = roles_of(SMALL)
    load = Workload(num_sequences=8, prompt_tokens=8, response_tokens=8)
    alone, shared = (
        RooflineEstimator(PPO_FLOW, four, roles, MemorySettings(), load, cores_per_node=cores) for cores in (None, 2)
    )
    for layout, factor in (("dp1@3", 1), ("dp2@0-1", 1), ("tp4", 2)):
        plan = CallPlan(Layout.parse(layout))
        ratio = shared.call_seconds("actor.train", plan).total / alone.call_seconds("actor.train", plan).total
        assert ratio == pytest.approx(factor)
    assert [shared.slowdown(busy) for busy in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
