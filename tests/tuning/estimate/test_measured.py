"""Seconds of calls from measured passes, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.tuning.estimate.hardware import CPU_EFFICIENCY
from lightning_realloc.tuning.estimate.measured import UNMEASURED_FACTOR, MeasuredEstimator
from lightning_realloc.tuning.estimate.profile import Curve, PassKey, PassKind, PassTimes, ProfileTable, Surface
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt
from tests.tuning.examples import PPO_FLOW, SMALL, role_of, roles_of, with_adapters

CLUSTER = ClusterSpec.parse("cpu:1x4")
LOAD = Workload(num_sequences=8, prompt_tokens=8, response_tokens=8, micro_batch_tokens=32)
CALL_S = 0.25
"""Fixed cost of every call."""


def passes(block: float, rest: float) -> PassTimes:
    """Return seconds per token, or per decoded sequence, for any second size."""
    return PassTimes(Surface(((16.0, Curve(((1.0, block),))),)), Surface(((16.0, Curve(((1.0, rest),))),)))


def estimator(
    known: dict[tuple[PassKind, ParallelDims], PassTimes],
    moves: dict[str, Curve] | None = None,
    *,
    settings: MemorySettings | None = None,
    factors: dict[str, float] | None = None,
    adapted: bool = False,
    cluster: ClusterSpec = CLUSTER,
    model: str = SMALL,
) -> MeasuredEstimator:
    """Return an estimator of four blocks; 2 of 4 ranks run at full speed, clipping and stepping takes 1 ms a weight."""
    roles = roles_of(model)
    if adapted:
        roles["actor"] = with_adapters(roles["actor"], rank=4)
        roles["reference"] = replace(roles["actor"], frozen_params=frozenset(), shares="actor")
    roofline = RooflineEstimator(
        PPO_FLOW,
        cluster,
        roles,
        settings or MemorySettings(),
        LOAD,
        factors=factors,
        efficiency=replace(CPU_EFFICIENCY, call_s=CALL_S),
    )
    table = ProfileTable(
        machine={},
        passes={PassKey("small", kind, dims): times for (kind, dims), times in known.items()},
        optimizer={"small": Curve(((1.0, 1e-3),))},
        moves=moves or {},
        crowding={1: Curve(((1.0, 1.0), (2.0, 1.0), (4.0, 2.0)))},
    )
    return MeasuredEstimator(roofline, table, dict.fromkeys(PPO_FLOW.roles, "small"))


def seconds(answers: MeasuredEstimator, call: str, layout: str) -> float:
    return answers.call_seconds(call, CallPlan(Layout.parse(layout))).total


ALONE = ParallelDims()


def test_inference_takes_the_seconds_of_blocks_and_the_rest_per_micro_batch() -> None:
    answers = estimator({("infer", ALONE): passes(0.01, 0.02)})
    # 8 sequences of 16 tokens in micro-batches of 32: 128 tokens at 4 x 0.01 + 0.02.
    assert seconds(answers, "reference.infer", "dp1@0") == pytest.approx(128 * 0.06 + CALL_S)
    # Two ranks have a core each; four ranks on two cores take twice as long for a quarter of the tokens.
    assert seconds(answers, "reference.infer", "dp2@0-1") == pytest.approx(64 * 0.06 + CALL_S)
    assert seconds(answers, "reference.infer", "dp4") == pytest.approx(2 * 32 * 0.06 + CALL_S)


def test_training_reduces_gradients_last_and_updates_each_shard() -> None:
    dims = ParallelDims(fsdp=2)
    known = {("train", dims): passes(0.03, 0.0), ("train_last", dims): passes(0.05, 0.0), ("infer", dims): passes(1, 0)}
    answers = estimator(known)  # type: ignore[arg-type]
    weights = role_of(SMALL).model.num_elements
    # 64 tokens a rank; the 32 of the last micro-batch take 0.02 longer for each of 4 blocks.
    by_hand = 64 * 4 * 0.03 + 32 * 4 * 0.02 + weights / 2 * 1e-3 + CALL_S
    assert seconds(answers, "actor.train", "fsdp2@0-1") == pytest.approx(by_hand)


def test_generation_reads_prompts_and_then_decodes_step_by_step() -> None:
    answers = estimator({("infer", ALONE): passes(0.01, 0.02), ("decode", ALONE): passes(0.1, 0.2)})
    # Prompts without their last tokens and without logits; 8 steps of 8 sequences at 4 x 0.1 + 0.2.
    by_hand = 8 * 7 * 4 * 0.01 + 8 * 8 * 0.6 + CALL_S
    assert seconds(answers, "actor.generate", "dp1@0") == pytest.approx(by_hand)


def test_towers_are_estimated_and_scaled_as_blocks_are() -> None:
    known = {("infer", ALONE): passes(0.01, 0.02), ("decode", ALONE): passes(0.1, 0.2)}
    known |= {("train", ALONE): passes(0.03, 0.0), ("train_last", ALONE): passes(0.03, 0.0)}
    model = role_of("HuggingFaceTB/SmolVLM2-500M-Video-Instruct")
    images = ImagesPerPrompt(num_parts=1, part_patches=1024, tokens=4)

    def estimators(*, images: ImagesPerPrompt | None) -> tuple[MeasuredEstimator, RooflineEstimator]:
        roles, load = dict.fromkeys(PPO_FLOW.roles, model), replace(LOAD, images=images)
        roofline = RooflineEstimator(PPO_FLOW, CLUSTER, roles, MemorySettings(), load, efficiency=CPU_EFFICIENCY)
        table = ProfileTable(machine={}, passes={PassKey("one", *key): times for key, times in known.items()})
        return MeasuredEstimator(roofline, table, dict.fromkeys(PPO_FLOW.roles, "one")), roofline

    (measured, roofline), (plain, _) = estimators(images=images), estimators(images=None)
    cost = roofline.cost("actor", CallPlan(Layout.parse("dp1@0")))
    assert cost.tower is not None
    # Micro-batches of two sequences, 16 tokens each; all prompts of a generation are read at once: 8 of 7 tokens.
    ratios = {tokens: tokens * 0.01 / cost.kernels.forward(tokens, cost.tokens.context) for tokens in (32, 56)}
    for call, tokens, forward, backward in (
        ("reference.infer", 32, 4 * cost.tower.forward(2), 0.0),
        ("actor.generate", 56, cost.tower.forward(8), 0.0),
        ("actor.train", 32, 4 * cost.tower.forward(2), 4 * cost.tower.backward(2, recomputes=False)),
    ):
        more = seconds(measured, call, "dp1@0") - seconds(plain, call, "dp1@0")
        assert more == pytest.approx(ratios[tokens] * (forward + backward)), call


def test_replies_of_other_models_take_their_share_in_every_layout() -> None:
    known = {("infer", ALONE): passes(0.01, 0.0), ("decode", ALONE): passes(0.1, 0.2)}
    plain, asking = (
        estimator(known, factors=factors)  # type: ignore[arg-type]
        for factors in (None, {"actor.generate": 1.5})
    )
    for layout in ("dp1@0", "dp2@0-1", "tp2@0-1"):  # passes of the last one were not measured
        assert seconds(asking, "actor.generate", layout) == pytest.approx(
            1.5 * seconds(plain, "actor.generate", layout)
        )
    assert seconds(asking, "reference.infer", "dp1@0") == seconds(plain, "reference.infer", "dp1@0")


@pytest.mark.parametrize(
    ("layout", "turns", "sends"), [("pp2@0-1", 4 + 1, 4 + 1), ("pp2.vpp2@0-1", 4 + 1 / 2, 2 * 4 + 1)]
)
def test_a_pipeline_waits_for_its_first_and_last_micro_batch(layout: str, turns: float, sends: int) -> None:
    answers = estimator({("infer", ALONE): passes(0.01, 0.0)})
    stage = 32 * 2 * 0.01  # a micro-batch through two of four blocks
    send = answers.roofline.cost("reference", CallPlan(Layout.parse(layout)))._send(32)
    assert seconds(answers, "reference.infer", layout) == pytest.approx(turns * stage + sends * send + CALL_S)


def test_unmeasured_calls_are_estimated_and_scaled_by_measured_ones() -> None:
    answers = estimator({("infer", ALONE): passes(0.01, 0.0)})
    worked_out = answers.roofline
    off_by = (
        seconds(answers, "reference.infer", "dp1@0")
        / worked_out.call_seconds("reference.infer", CallPlan(Layout.parse("dp1@0"))).total
    )
    cut = CallPlan(Layout.parse("tp2@0-1"))
    assert not answers.is_measured("reference.infer", cut.layout.dims)
    assert answers.call_seconds("reference.infer", cut).total == pytest.approx(
        UNMEASURED_FACTOR * off_by * worked_out.call_seconds("reference.infer", cut).total
    )
    nothing = estimator({})
    assert nothing.call_seconds("actor.train", cut) == worked_out.call_seconds("actor.train", cut)


def test_experts_on_other_ranks_are_compared_with_measured_passes_that_exchange_tokens_too() -> None:
    dims = [ALONE, ParallelDims(fsdp=4), ParallelDims(dp=2, ep=2)]
    known: dict[tuple[PassKind, ParallelDims], PassTimes] = {
        ("infer", one): passes(0.01 * one.size + (0.02 if one.ep > 1 else 0.0), 0.0) for one in dims
    }
    answers = estimator(known, model=f"{SMALL},experts=4,experts_per_token=2")
    worked_out = answers.roofline.call_seconds
    measured = seconds(answers, "reference.infer", "dp2.ep2@0-1")
    assert measured == pytest.approx(64 * 4 * 0.04 + CALL_S)  # two ranks of four blocks each, as it was measured
    off_by = measured / worked_out("reference.infer", CallPlan(Layout.parse("dp2.ep2@0-1"))).total
    for layout in ("dp4.ep4", "fsdp4.ep2"):  # fsdp4 has the same shards, and sends no tokens
        estimated = worked_out("reference.infer", CallPlan(Layout.parse(layout))).total
        assert seconds(answers, "reference.infer", layout) == pytest.approx(UNMEASURED_FACTOR * off_by * estimated)


@pytest.mark.parametrize(("layout", "shape"), [("tp2@0-1", "2x1"), ("fsdp2@0,2", "2x2"), ("dp2@0,2", "2x2")])
def test_communication_between_nodes_is_that_of_their_links(layout: str, shape: str) -> None:
    two_nodes = replace(ClusterSpec.parse(f"cpu:{shape}"), inter_node_bytes_per_s=1e6, inter_node_latency_s=1e-3)
    kinds: tuple[PassKind, ...] = ("train", "train_last", "infer")
    # Passes of fsdp2 are those of one node, and so do not hold for ranks 0 and 2.
    answers = estimator(
        {(kind, dims): passes(0.01, 0.0) for kind in kinds for dims in (ALONE, ParallelDims(fsdp=2))}, cluster=two_nodes
    )
    plan, worked_out = CallPlan(Layout.parse(layout)), answers.roofline.call_seconds
    inside = estimator({}).call_seconds("actor.train", CallPlan(Layout.parse(layout))).total  # on one node of four
    between = worked_out("actor.train", plan).total - inside
    nearest = CallPlan(Layout.parse("fsdp2@0-1" if plan.layout.dims.fsdp == 2 else "dp1@0"))
    off_by = answers.call_seconds("actor.train", nearest).total / worked_out("actor.train", nearest).total
    assert between > inside
    assert answers.call_seconds("actor.train", plan).total == pytest.approx(off_by * inside + between)


def test_replicas_on_other_nodes_infer_as_on_one() -> None:
    answers = estimator({("infer", ALONE): passes(0.01, 0.02)}, cluster=ClusterSpec.parse("cpu:2x1"))
    assert seconds(answers, "reference.infer", "dp2@0-1") == pytest.approx(64 * 0.06 + CALL_S)


def test_weights_are_written_by_each_source_rank_or_sent_to_shards() -> None:
    answers = estimator({}, {"push": Curve(((4.0, 1.0),)), "direct": Curve(((4.0, 100.0),))})
    weights = role_of(SMALL).model.num_elements
    source, copies, shards = map(Layout.parse, ("fsdp2@0-1", "dp4", "fsdp4"))
    # One replica of fp32 weights, written half by each of two ranks.
    assert answers.move_seconds("actor", source, copies) == pytest.approx(weights / 2)
    # Three ranks receive a quarter each, sent by two ranks.
    assert answers.move_seconds("actor", source, shards) == pytest.approx(100 * weights * 3 / 8, rel=0.01)
    assert answers.move_seconds("actor", source, source) == 0.0


def test_after_the_first_time_only_adapters_are_written_and_sent() -> None:
    moves = {"push": Curve(((4.0, 1.0),)), "direct": Curve(((4.0, 100.0),))}
    source, copies, shards = map(Layout.parse, ("fsdp2@0-1", "dp4", "fsdp4"))
    answers, trained = estimator(moves=moves, known={}, settings=MemorySettings(), adapted=True), 4 * 2 * 64 * 4
    assert answers.move_seconds("actor", source, copies) == pytest.approx(trained / 2)
    assert answers.move_seconds("actor", source, shards) == pytest.approx(100 * trained * 3 / 8, rel=0.01)
    # Replicas that are freed need their base again.
    freed = estimator(moves=moves, known={}, settings=MemorySettings(frees_copies=True), adapted=True)
    everything = role_of(SMALL).model.num_elements + trained
    assert freed.move_seconds("actor", source, copies) == pytest.approx(everything / 2)
    assert freed.owner("reference") == "actor"
