"""Prices of whole plans, and the options that fit."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import HEADROOM, MemorySettings, Workload, usable_bytes
from lightning_realloc.tuning.search.infeasible import NothingFitsError
from lightning_realloc.tuning.search.options import MIN_INTERLEAVING_GAIN, Pricing, searched_calls
from lightning_realloc.tuning.search.plan_search import SearchResult, search_plan
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.search.pricing import PlanPricer, describe_sample_cache
from lightning_realloc.tuning.search.problem import Problem
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.shapes.model_shape import Latent
from tests.matrices import matrix
from tests.tuning.examples import PPO_FLOW, role_of, roles_of, shape_of, with_adapters
from tests.tuning.timeline.test_simulator import SCORED_BY_BASE, plan_of

MODEL = "layers=8,hidden=1024,intermediate=2816,heads=16,vocabulary=8000"
HALF = MemorySettings(copy_bytes=2, gathered_bytes=2)
LOAD = Workload(num_sequences=64, prompt_tokens=128, response_tokens=384)
HOMES = {"actor.train": "fsdp4@0-3", "critic.train": "fsdp4@4-7", "reference.infer": "dp8", "reward.infer": "dp8"}


def pricer(budget: int, *, cluster: str = "a100-80g:2x4", headroom: float = 0.0) -> PlanPricer:
    roles = roles_of(MODEL)
    spec = ClusterSpec.parse(cluster)
    task = PlanningTask(
        dataflow=PPO_FLOW,
        roles=roles,
        cluster=spec,
        settings=HALF,
        workload=LOAD,
        memory_budget=budget,
        headroom=headroom,
    )
    return PlanPricer(task, RooflineEstimator(PPO_FLOW, spec, roles, HALF, LOAD))


def plan() -> ExecutionPlan:
    return plan_of({"actor.generate": "dp8", "critic.infer": "dp4@4-7", **HOMES})


@pytest.mark.parametrize("budget", matrix([80 << 30, 4 << 30, 3 << 30], 3 << 30))
def test_the_chosen_options_are_the_fastest_of_all_that_fit(budget: int) -> None:
    bench = pricer(budget)
    chosen = bench.price(bench.with_best_options(plan()))
    names = [name for name, _ in plan().calls]
    best = min(
        bench.price(replace(plan(), calls=tuple(zip(names, options, strict=True)))).seconds
        for options in _some_options(bench)
    )
    assert chosen.missing_bytes == 0
    assert chosen.seconds <= best * (1 + 1e-9)


def _some_options(bench: PlanPricer) -> list[tuple]:
    """Return all fitting combinations of two calls' options, with the others as chosen."""
    chosen = dict(bench.with_best_options(plan()).calls)
    found = []
    for names in itertools.combinations(("actor.generate", "actor.train", "critic.train"), 2):
        tables = [bench.options.plans(PPO_FLOW.call(name).kind, plan().layout(name)) for name in names]
        for options in itertools.product(*tables):
            calls = {**chosen, **dict(zip(names, options, strict=True))}
            if not bench.price(ExecutionPlan(tuple(calls.items()))).missing_bytes:
                found.append(tuple(calls[name] for name, _ in plan().calls))
    return found


def test_a_plan_that_does_not_fit_has_the_smallest_options_and_its_missing_bytes() -> None:
    bench = pricer(1 << 30)
    priced = bench.price(bench.with_best_options(plan()))
    assert priced.missing_bytes == priced.peak.parts.total - (1 << 30) > 0
    assert dict(priced.plan.calls)["actor.train"].gradient_checkpointing


def test_a_base_that_two_roles_share_counts_once_where_options_are_chosen() -> None:
    actor = with_adapters(role_of(MODEL), rank=4)
    task = PlanningTask(
        dataflow=SCORED_BY_BASE,
        roles={"actor": actor, "reference": replace(actor, frozen_params=frozenset(), shares="actor")},
        cluster=ClusterSpec.parse("a100-80g:1x2"),
        settings=HALF,
        workload=LOAD,
        memory_budget=80 << 30,
    )
    prices = RooflineEstimator(task.dataflow, task.cluster, task.roles, HALF, LOAD)
    static = ExecutionPlan.static(task.dataflow, Layout.parse("dp2"))
    fastest = PlanPricer(task, prices).with_best_options(static)
    needed = PlanPricer(task, prices).price(fastest).peak.parts.total
    tight = replace(task, memory_budget=needed, headroom=0.0)
    assert PlanPricer(tight, prices).with_best_options(static) == fastest


@pytest.mark.parametrize("budget", matrix([1400 << 20, 2 << 30], 1400 << 20))
def test_the_fastest_static_plans_that_fit_are_found_without_pricing_all(budget: int) -> None:
    bench = pricer(budget)
    every = [bench.price(plan) for plan in bench.static_plans()]
    assert {str(priced.plan.layouts[0].dims) for priced in every} >= {"dp8", "fsdp8", "dp2.tp4", "fsdp2.tp4"}
    fitting = sorted(priced.seconds for priced in every if not priced.missing_bytes)
    assert 3 < len(fitting) < len(every)
    assert [priced.seconds for priced in bench.static(3)] == fitting[:3]


def test_without_a_static_plan_that_fits_the_smallest_says_what_is_missing() -> None:
    bench = pricer(300 << 20)
    (found,) = bench.static(3)
    assert found.missing_bytes == min(bench.price(plan).missing_bytes for plan in bench.static_plans()) > 0


def test_the_found_plan_fits_the_forecast_and_beats_plans_without_a_search() -> None:
    bench = pricer(4 << 30, cluster="a100-80g:1x2")
    best, found = bench.search(seed=0, seconds=0.5, clock=time.process_time)
    assert best.missing_bytes == 0
    assert best.seconds == pytest.approx(found.seconds, rel=0.02)
    others = [
        priced.seconds
        for priced in (*bench.heuristic(), *map(bench.price, bench.static_plans()))
        if not priced.missing_bytes
    ]
    assert best.seconds <= min(others) * 1.001
    with pytest.raises(NothingFitsError, match=r"lacks [0-9,]+ bytes"):
        pricer(100 << 20, cluster="a100-80g:1x2").search(seed=0, seconds=1, clock=time.process_time)


def test_a_search_that_finds_nothing_falls_back_to_the_fastest_simple_plan_that_fits() -> None:
    bench = pricer(1200 << 20, cluster="a100-80g:1x4")
    best, found = bench.search(seed=0, seconds=60, clock=time.process_time, max_evaluations=1)
    fitting = [priced for priced in (*bench.heuristic(), *map(bench.price, bench.static_plans())) if priced.can_run]
    assert best.can_run and best.seconds == found.seconds == min(priced.seconds for priced in fitting)
    assert found.plan == best.plan and found.lower_bound == 0


def test_a_search_that_runs_out_of_time_is_no_slower_than_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pricer(80 << 30, cluster="a100-80g:1x8")
    slow = bench.price(bench.with_best_options(ExecutionPlan.static(PPO_FLOW, Layout.parse("tp8"))))
    result = SearchResult(plan=slow.plan, seconds=slow.seconds, lower_bound=0.0, evaluations=1, history=())
    monkeypatch.setattr("lightning_realloc.tuning.search.pricing.search_plan", lambda *_, **__: result)
    best, found = bench.search(seed=0, seconds=1, clock=time.process_time)
    assert best.plan == found.plan and best.seconds == found.seconds < slow.seconds
    assert best.seconds == min(priced.seconds for priced in (*bench.heuristic(), *bench.static(1)))


def test_a_heuristic_plan_without_enough_memory_is_followed_by_the_plan_that_runs_take() -> None:
    roomy = pricer(80 << 30, cluster="a100-80g:1x8")
    assert [priced.missing_bytes for priced in roomy.heuristic()] == [0]
    own, taken = pricer(1400 << 20, cluster="a100-80g:1x8").heuristic()
    assert own.plan == roomy.heuristic()[0].plan
    assert own.missing_bytes and taken.can_run


def test_model_construction_is_priced_separately_from_iterations() -> None:
    bench = pricer(1200 << 20)
    priced = bench.price(
        bench.with_best_options(
            plan_of(dict.fromkeys(HOMES, "fsdp8") | {"actor.generate": "fsdp8", "critic.infer": "fsdp8"})
        )
    )
    assert priced.missing_bytes == 0 and priced.peak.phase != "set-up"
    # An eighth of two trained models in float32 and of two frozen ones in bfloat16, and one whole tensor.
    shards, largest = role_of(MODEL).model.num_elements * (4 + 4 + 2 + 2) / 8, 8000 * 1024 * 4
    assert 0.9 * shards < priced.set_up_bytes < shards + largest


def test_a_plan_that_can_start_is_preferred_to_a_faster_one_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.tuning.search.test_pricing.LOAD", Workload(num_sequences=8, prompt_tokens=16, response_tokens=32)
    )
    # Two whole frozen models on every CPU rank, and the actor's shard: with more ranks for it, a little less.
    limits: dict[str, Any] = {"seed": 0, "seconds": 60, "max_evaluations": 1000}
    task = pricer(938 << 20, cluster="a100-80g:4x8").task
    roles = {name: replace(role, deferred=name not in ("reward", "reference")) for name, role in task.roles.items()}
    task = replace(task, roles=roles, settings=replace(HALF, builds_on_device=True))
    bench = PlanPricer(task, RooflineEstimator(PPO_FLOW, task.cluster, roles, task.settings, task.workload))
    fastest = search_plan(task.models, bench.estimator, memory_budget=task.memory_budget, **limits)
    refused = bench.price(fastest.plan)
    assert not refused.missing_bytes and not refused.can_start
    best, found = bench.search(clock=time.process_time, **limits)
    assert best.can_run and refused.seconds <= best.seconds == found.seconds
    assert found.plan == best.plan and found.gap == pytest.approx(1 - found.lower_bound / best.seconds)
    assert best.seconds <= min(
        other.seconds for other in (*bench.heuristic(), *map(bench.price, bench.static_plans())) if other.can_run
    )


def test_the_chosen_plan_leaves_a_tenth_of_a_device_free() -> None:
    bench = pricer(4 << 30, cluster="a100-80g:1x2", headroom=HEADROOM)
    assert bench.task.usable_bytes == usable_bytes(4 << 30) == int(0.9 * (4 << 30))
    best, _ = bench.search(seed=0, seconds=0.5, clock=time.process_time)
    assert best.peak.parts.total <= 0.9 * (4 << 30) < pricer(4 << 30).task.usable_bytes
    priced = bench.price(bench.with_best_options(plan_of(dict.fromkeys(best.plan.to_mapping()["calls"], "fsdp2"))))
    assert priced.peak.parts.total <= priced.usable_bytes < priced.memory_budget == 4 << 30
    for wrong in (-0.1, 1.0):
        with pytest.raises(PlanError, match=r"is a share of a device's memory; it must lie in \[0, 1\)"):
            usable_bytes(4 << 30, wrong)


def test_rows_too_long_for_a_rank_are_divided_by_the_search_and_by_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Workload(num_sequences=4, prompt_tokens=512, response_tokens=32256)
    monkeypatch.setattr("tests.tuning.search.test_pricing.LOAD", load)
    task = pricer(3200 << 20, cluster="a100-80g:1x4").task
    whole = {name: replace(role, model=replace(role.model, tp_refusal="no plan")) for name, role in task.roles.items()}
    bench = PlanPricer(replace(task, roles=whole), RooflineEstimator(PPO_FLOW, task.cluster, whole, HALF, load))
    best, _ = bench.search(seed=0, seconds=5, clock=time.process_time, max_evaluations=300)
    for priced in (best, bench.heuristic()[-1]):
        trained = [call for name, call in priced.plan.calls if name.endswith("train")]
        assert priced.can_run and any(call.layout.dims.cp > 1 for call in trained), priced.plan
        assert all((call.micro_batch_tokens or load.longest) >= load.longest for _, call in priced.plan.calls)
    with pytest.raises(NothingFitsError):
        search_plan(
            bench.task.models, bench.estimator, seed=0, seconds=5, options=replace(bench.options, divides_rows=False),
            memory_budget=bench.task.usable_bytes, max_evaluations=300,
        )  # fmt: skip


@pytest.mark.parametrize("devices", matrix([1, 2], 2))
def test_a_search_counts_the_replica_for_generation_in_the_training_layout(devices: int) -> None:
    bench = pricer(80 << 30, cluster=f"a100-80g:1x{devices}")
    layout = Layout(ParallelDims(dp=devices), tuple(range(devices)))
    needed = bench.price(bench.with_best_options(ExecutionPlan.static(PPO_FLOW, layout))).peak.parts
    assert needed.copies == 2 * role_of(MODEL).model.num_elements
    for budget in (needed.total, needed.total - 1):
        found = search_plan(
            bench.task.models, bench.estimator, memory_budget=budget, seed=0, seconds=0.5,
            clock=time.process_time,
        )  # fmt: skip
        assert bench.price(found.plan).peak.parts.total <= budget


def test_a_search_delays_gradients_of_weights_where_stages_would_wait_and_blocks_are_not_compiled() -> None:
    # Links so slow that only stages pay, and few micro-batches for them.
    task = pricer(80 << 30, cluster="a100-80g:1x4").task
    slow = replace(task.cluster, intra_node_bytes_per_s=2e9)
    flow = Dataflow((ModelFunctionCall("actor.train", "train", "actor", "loss", ("batch",)),))
    roles, load = {"actor": role_of(MODEL)}, replace(LOAD, num_sequences=32)
    found = {}
    for delays in (True, False):
        one = replace(task, dataflow=flow, roles=roles, cluster=slow, workload=load, delays_weight_gradients=delays)
        bench = PlanPricer(
            one, RooflineEstimator(flow, slow, roles, HALF, load), options=CallOptions(micro_batch_tokens=(2048,))
        )
        found[delays], _ = bench.search(seed=0, seconds=60, clock=time.process_time, max_evaluations=500)
    schedules = {delays: best.plan.call("actor.train").pipeline_schedule for delays, best in found.items()}
    assert schedules == {True: "zero_bubble", False: "1f1b"}
    assert found[True].seconds < 0.97 * found[False].seconds


def _few_micro_batches(flow: Dataflow, *, link_bytes_per_s: float) -> tuple[PlanPricer, Problem]:
    """Return the pricer of a small model with compiled blocks on four devices, and the problem of its search."""
    task = pricer(80 << 30, cluster="a100-80g:1x4").task
    cluster = replace(task.cluster, intra_node_bytes_per_s=link_bytes_per_s)
    roles, load = {"actor": role_of(MODEL)}, replace(LOAD, num_sequences=16)
    task = replace(task, dataflow=flow, roles=roles, cluster=cluster, workload=load, delays_weight_gradients=False)
    prices = RooflineEstimator(flow, cluster, roles, HALF, load)
    bench = PlanPricer(task, prices, options=CallOptions(micro_batch_tokens=(2048,)))
    problem = Problem(
        task.models, prices, options=bench.options, overlap="iterations", memory_budget=80 << 30,
        is_late=lambda: False,
    )  # fmt: skip
    return bench, problem


ACTOR_TRAIN = ModelFunctionCall("actor.train", "train", "actor", "loss", ("batch",))
ACTOR_FLOW = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("actor.infer", "infer", "actor", "score", ("rollout",), ("old_logprobs",)),
        ModelFunctionCall("actor.train", "train", "actor", "loss", ("rollout", "old_logprobs")),
    )
)


@pytest.mark.parametrize(("link_bytes_per_s", "vpp"), [(20e9, 2), (2e9, 1)])
def test_a_search_interleaves_stages_where_messages_take_less_than_waiting(link_bytes_per_s: float, vpp: int) -> None:
    bench, problem = _few_micro_batches(Dataflow((ACTOR_TRAIN,)), link_bytes_per_s=link_bytes_per_s)
    best, _ = bench.search(seed=0, seconds=60, clock=time.process_time, max_evaluations=300)
    chosen = best.plan.layout("actor.train").dims
    assert chosen.pp > 1 and chosen.vpp == vpp
    without = min(option.seconds for option in problem.tables[0][4] if option.dims.vpp == 1)
    assert (best.seconds < 0.99 * without) == (vpp > 1)


def test_only_training_that_gains_is_interleaved_and_inference_that_shares_its_weights() -> None:
    bench, problem = _few_micro_batches(ACTOR_FLOW, link_bytes_per_s=20e9)
    generate, infer, train = (
        {(size, option.dims) for size, row in table.items() for option in row if option.dims.vpp > 1}
        for table in problem.tables
    )
    assert train and infer == train and not generate
    for size, row in problem.tables[2].items():
        for option in (one for one in row if one.dims.vpp > 1):
            ModelLayout(bench.task.models["actor"], Layout(option.dims, tuple(range(size))))  # refuses too few blocks
            alike = [one for one in row if replace(option.dims, vpp=one.dims.vpp) == one.dims]
            fewer = [one.seconds for one in alike if one.dims.vpp < option.dims.vpp]
            assert option.seconds < (1 - MIN_INTERLEAVING_GAIN) * min(fewer)


def test_a_plan_fits_on_the_smallest_number_of_nodes_with_room_for_every_call() -> None:
    budget = 300 << 20
    bench = pricer(budget, cluster="a100-80g:1x4")
    nodes = bench.enough_nodes(lambda: False)
    assert nodes is not None and not bench.static(1)[0].can_run
    fitting = pricer(budget, cluster=f"a100-80g:{nodes}x4").static(1)[0]
    assert not fitting.missing_bytes and fitting.plan.call("actor.train").gradient_checkpointing


def test_the_error_where_nothing_fits_names_call_layout_and_parts_that_add_up() -> None:
    with pytest.raises(NothingFitsError) as caught:
        pricer(300 << 20, cluster="a100-80g:1x4").search(seed=0, seconds=60, clock=time.process_time, max_evaluations=1)
    text = str(caught.value)
    size = r"([0-9.]+) ([MG]iB)"
    found = re.search(
        rf"the closest of the simple plans, (actor|critic|reference|reward)\.\w+: .*?, needs {size} of the {size} in "
        r"\S+ \((.*?)\); ",
        text,
    )
    assert found is not None, text
    mebibytes = {"MiB": 1.0, "GiB": 1024.0}
    total, parts = float(found[2]) * mebibytes[found[3]], re.findall(size, found[6])
    assert float(found[4]) * mebibytes[found[5]] < total and len(parts) >= 3
    summed = sum(float(number) * mebibytes[unit] for number, unit in parts)
    assert summed == pytest.approx(total, abs=0.02 * 1024 if "GiB" in text else 0.1)


def test_a_call_has_no_option_in_a_layout_whose_replica_alone_leaves_too_little_room() -> None:
    bench, layout = pricer(80 << 30), Layout.parse("dp8")
    call = next(call for call in searched_calls(bench.estimator) if call.name == "actor.generate")
    plans = bench.options.plans("generate", layout)
    least = min(bench.estimator.active_bytes("actor.generate", plan) for plan in plans)
    least += bench.estimator.resident_bytes("actor", layout, is_home=False)  # less than those of the trained home
    fitting, none = (
        Pricing(
            models=bench.task.models, estimator=bench.estimator, options=bench.options, memory_budget=budget
        )._priced(call, layout)
        for budget in (least, least - 1)
    )
    assert len(fitting) == 1 and not none


def test_tensor_parallelism_divides_keys_and_values_but_no_latents() -> None:
    latent = Latent(query_rank=None, key_rank=512, query_width=192, value_width=128, rotary=64, is_cached=True)
    shape = shape_of(MODEL)
    assert describe_sample_cache(shape, 9 << 19).endswith("sample are 4.50 MiB, which stages and tp divide")
    keeps_latents = describe_sample_cache(replace(shape, latent=latent), 9 << 19)
    assert keeps_latents == "latents of one sample are 4.50 MiB, which stages divide, but tp does not"


def test_pricing_that_is_late_takes_the_most_promising_layouts_of_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_realloc.tuning.search.options.MIN_LAYOUTS", 4)
    bench = pricer(4 << 30, cluster="a100-80g:2x4")
    calls = searched_calls(bench.estimator)
    pricing = Pricing(
        models=bench.task.models,
        estimator=bench.estimator,
        options=bench.options,
        memory_budget=bench.task.usable_bytes,
    )
    every, is_complete = pricing.tables(calls, lambda: False)
    few, stays_complete = pricing.tables(calls, lambda: True)
    assert is_complete and not stays_complete
    for call, whole, part in zip(calls, every, few, strict=True):
        assert list(part) == [8]
        assert part[8] == [option for option in whole[8] if option.dims in {one.dims for one in part[8]}]
        assert len({replace(option.dims, vpp=1) for option in part[8]}) <= 4
        if call.is_timed:
            assert min(option.seconds for option in part[8]) <= 1.2 * min(option.seconds for option in whole[8])
        sizes = [[option.kept_bytes + option.active_bytes for option in table[8]] for table in (part, whole)]
        assert min(sizes[0]) <= 1.2 * min(sizes[1]), "a fast layout of one call may leave room for small ones alone"
