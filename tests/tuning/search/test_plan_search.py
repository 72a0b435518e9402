"""The search finds the plan of an enumeration, returns a valid bound, and stays within its budgets."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_estimator import RandomEstimator
from benchmarks.search_baseline import every_state
from benchmarks.toy_estimator import ToyEstimator, decoder
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec, NodeLink
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.estimate.estimator import Estimator
from lightning_realloc.tuning.estimate.hardware import CPU_EFFICIENCY
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload, usable_bytes
from lightning_realloc.tuning.search.infeasible import NothingFitsError, enough_nodes
from lightning_realloc.tuning.search.options import Pricing
from lightning_realloc.tuning.search.plan_search import SearchResult, search_plan
from lightning_realloc.tuning.search.problem import Problem, Score
from lightning_realloc.tuning.search.space import CallOptions
from lightning_realloc.tuning.timeline.simulator import simulate
from tests.dataflow.test_dataflow import GENERATE, JUDGE, SCORE, TRAIN, call
from tests.matrices import crossed, matrix
from tests.tuning.examples import SMALL, role_of, roles_of
from tests.tuning.search.test_heuristic import PPO_FLOW

GRPO_FLOW = Dataflow((GENERATE, SCORE, JUDGE, TRAIN))
ASKING = {
    name: Dataflow((replace(GENERATE, partners=("actor", name)), SCORE, JUDGE, TRAIN))
    for name in ("seller", "reference")
}
"""Dataflows with a model that environments of the generating call talk to, by its name."""
TWO_COPIES = Dataflow(
    (
        GENERATE,
        call("actor.infer", ("rollout",), ("old_logprobs",)),
        call("actor.train", ("rollout", "old_logprobs")),
    )
)
"""A dataflow whose role has two inference calls next to its training; they may share a replica."""
TWO_TRAINED = Dataflow(
    (
        GENERATE,
        call("critic.infer", ("rollout",), ("values",)),
        call("actor.train", ("rollout", "values")),
        call("critic.train", ("rollout", "values")),
    )
)
MODEL = decoder(2, 4, 4)
HEADED = replace(MODEL, attention_heads=((4, 4),))
FEW = CallOptions(micro_batch_tokens=(1024, 2048), gradient_checkpointing=(False,), max_slots=(64,))


def cluster(num_nodes: int, devices_per_node: int) -> ClusterSpec:
    """Return nodes of CPU devices with a fast link to the host."""
    return replace(ClusterSpec.local(devices_per_node), num_nodes=num_nodes, host_bytes_per_s=1e4)


def found(
    estimator: Estimator, budget: int, *, seconds: float = 60.0, model: ModelSpec = MODEL, **given: object
) -> SearchResult:
    """Return the result of a search with equal models for all roles."""
    models = {role: model for role in estimator.dataflow.roles}
    arguments = {"seed": 0, "options": FEW, "memory_budget": budget} | given
    return search_plan(models, estimator, seconds=seconds, **arguments)  # type: ignore[arg-type]


def best_of_all(
    estimator: Estimator,
    budget: int,
    generation_chunks: int = 1,
    *,
    options: CallOptions = FEW,
    model: ModelSpec = MODEL,
) -> Score:
    """Return the best score of all plans."""
    problem = Problem(
        {role: model for role in estimator.dataflow.roles},
        estimator,
        options=options,
        overlap="iterations",
        memory_budget=budget,
        is_late=lambda: False,
        generation_chunks=generation_chunks,
    )
    return min(problem.score(state, offload) for state, offload in every_state(problem))


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    st.sampled_from([GRPO_FLOW, ASKING["seller"], TWO_COPIES, TWO_TRAINED]),
    st.sampled_from([(1, 2), (2, 1)]),
    st.integers(0, 10_000),
    st.sampled_from([3500, 5000, 7000, 10**6]),
    st.sampled_from([1, 4]),
)
def test_small_spaces_are_searched_exactly_at_any_prices(
    flow: Dataflow, shape: tuple[int, int], seed: int, budget: int, parts: int
) -> None:
    if flow is TWO_TRAINED and shape == (1, 2):
        shape = (2, 1)  # no tp across nodes: a fifth of the combinations
    estimator = RandomEstimator(dataflow=flow, cluster=cluster(*shape), seed=seed)
    best = best_of_all(estimator, budget, parts)
    if not best.is_legal:
        with pytest.raises(PlanError, match="no plan fits"):
            found(estimator, budget, generation_chunks=parts)
        return
    result = found(estimator, budget, generation_chunks=parts)
    assert result.seconds == pytest.approx(best.seconds, rel=1e-6)
    assert result.gap == pytest.approx(0.0, abs=1e-6)


def slow_host(node: int, num_nodes: int, rate: float) -> tuple[NodeLink, ...]:
    """Return slow links between a node and all others."""
    others = (other for other in range(num_nodes) if other != node)
    return tuple(NodeLink(min(node, other), max(node, other), rate, 1e-3) for other in others)


def roofline(flow: Dataflow, machines: ClusterSpec) -> RooflineEstimator:
    """Return estimates of a small model, whose groups and moves depend on the links between their nodes."""
    load = Workload(num_sequences=32, prompt_tokens=64, response_tokens=64)
    return RooflineEstimator(flow, machines, roles_of(SMALL, flow), MemorySettings(), load, efficiency=CPU_EFFICIENCY)


@pytest.mark.parametrize("node", [0, 1])
def test_uneven_links_are_searched_exactly(node: int) -> None:
    machines = replace(cluster(3, 1), node_links=slow_host(node, 3, 1e5))
    estimator = roofline(TWO_COPIES, machines)
    model = role_of(SMALL).model
    best = best_of_all(estimator, 10**9, model=model)
    assert found(estimator, 10**9, model=model).seconds == pytest.approx(best.seconds, rel=1e-6)


@pytest.mark.parametrize("num_nodes", [4, 6])
def test_training_avoids_a_slow_host(num_nodes: int) -> None:
    equal = replace(cluster(num_nodes, 1), inter_node_bytes_per_s=1e8)
    uneven = replace(equal, node_links=slow_host(1, num_nodes, 1e5))
    options = {"model": role_of(SMALL).model, "seconds": 5.0, "max_evaluations": 20_000}
    before, after = (found(roofline(GRPO_FLOW, machines), 10**9, **options) for machines in (equal, uneven))
    assert 1 not in after.plan.layout("actor.train").ranks
    # The plan of equal links is slower there, and no plan is faster on slower links.
    assert before.seconds < after.seconds
    blind = simulate(before.plan, roofline(GRPO_FLOW, uneven))
    assert after.seconds < blind.seconds_per_iteration


@pytest.mark.parametrize("seed", matrix(range(3), 0))
def test_layouts_that_divide_rows_are_searched_exactly(seed: int) -> None:
    estimator = RandomEstimator(dataflow=GRPO_FLOW, cluster=cluster(1, 2), seed=seed)
    options = replace(FEW, row_tokens=4096)
    result = found(estimator, 5000, options=options, model=HEADED)
    assert result.seconds == pytest.approx(best_of_all(estimator, 5000, options=options, model=HEADED).seconds)
    assert result.gap == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("shape", [pytest.param((1, 4), marks=pytest.mark.exhaustive), (2, 2)])
def test_four_ranks_are_searched_exactly(shape: tuple[int, int]) -> None:
    estimator = RandomEstimator(dataflow=TWO_COPIES, cluster=cluster(*shape), seed=1)
    assert found(estimator, 6000).seconds == pytest.approx(best_of_all(estimator, 6000).seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "seed"), crossed([(GRPO_FLOW, (1, 2)), (TWO_COPIES, (1, 2)), (TWO_TRAINED, (2, 1))], range(4))
)
def test_ranks_that_share_cores_are_searched_exactly(case: tuple[Dataflow, tuple[int, int]], seed: int) -> None:
    flow, shape = case
    estimator = RandomEstimator(dataflow=flow, cluster=cluster(*shape), seed=seed, cores_per_node=1)
    best = best_of_all(estimator, 10**6)
    result = found(estimator, 10**6)
    assert result.seconds == pytest.approx(best.seconds, rel=1e-6)
    assert result.lower_bound <= result.seconds * (1 + 1e-9)


SHARED = {"reference": "actor"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [3000, 5000, 10**6])
def test_a_base_that_two_roles_share_is_searched_exactly_and_counted_once(seed: int, budget: int) -> None:
    estimator = RandomEstimator(dataflow=GRPO_FLOW, cluster=cluster(1, 2), seed=seed, sharers=SHARED)
    best = best_of_all(estimator, budget)
    if not best.is_legal:
        with pytest.raises(PlanError, match="no plan fits"):
            found(estimator, budget)
        return
    result = found(estimator, budget)
    assert result.seconds == pytest.approx(best.seconds, rel=1e-6)
    assert max(peaks(estimator, result.plan)) <= budget
    assert not result.plan.offload  # neither the actor, which is trained, nor the role without its own weights


def test_the_bytes_of_a_shared_base_are_those_counted_by_hand() -> None:
    estimator = RandomEstimator(dataflow=GRPO_FLOW, cluster=cluster(1, 2), seed=3, sharers=SHARED)
    problem = Problem(
        {"actor": MODEL, "reference": MODEL},
        estimator,
        options=FEW,
        overlap="iterations",
        memory_budget=1,
        is_late=lambda: False,
    )
    for state, _ in itertools.islice(every_state(problem), 0, None, 53):
        counted = max(peaks(estimator, problem.execution_plan(state)))
        assert problem.score(state).excess_bytes == counted - 1


def peaks(estimator: Estimator, plan: ExecutionPlan) -> list[int]:
    """Return every rank's peak bytes without offload, by hand."""
    flow, most = estimator.dataflow, []
    for rank in range(estimator.cluster.num_devices):
        resident = 0
        for role in {estimator.owner(role) for role in flow.roles}:
            home = plan.layout(flow.home_call(role).name)
            users = [(one, (estimator.owner(str(one.role)), *one.further_roles)) for one in flow.model_calls]
            calls = [one for one, roles in users if role in roles]
            layouts = {plan.layout(one.name) for one in calls} | {home}
            resident += sum(
                estimator.resident_bytes(role, layout, is_home=layout == home) for layout in layouts if rank in layout
            )
            generates = any(one.kind == "generate" and plan.layout(one.name) == home for one in calls)
            if rank in home and generates and estimator.generates_in_copy(role, home):
                resident += estimator.resident_bytes(role, home, is_home=False)
        active = [estimator.active_bytes(name, one) for name, one in plan.calls if rank in one.layout]
        most.append(resident + max(active) if active else 0)  # a rank without calls counts as empty
    return most


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("partner", ["seller", "reference"])
def test_a_partner_counts_on_the_ranks_of_the_call_that_asks_it(seed: int, partner: str) -> None:
    estimator = RandomEstimator(dataflow=ASKING[partner], cluster=cluster(1, 2), seed=seed)
    problem = Problem(
        {role: MODEL for role in ASKING[partner].roles},
        estimator,
        options=FEW,
        overlap="iterations",
        memory_budget=1,
        is_late=lambda: False,
    )
    for state, offload in itertools.islice(every_state(problem), 0, None, 53):
        if not offload:
            plan, counted = problem.execution_plan(state), problem.score(state).excess_bytes + 1
            shares_home = partner == "reference" and plan.layout("actor.generate") == plan.layout("reference.infer")
            needed = max(peaks(estimator, plan))
            assert counted == needed or (shares_home and counted > needed)


@pytest.mark.parametrize("budget", [5500, 7000, 10**6])
def test_no_rank_of_a_plan_exceeds_the_budget(budget: int) -> None:
    estimator = RandomEstimator(dataflow=TWO_TRAINED, cluster=cluster(2, 2), seed=5)
    result = found(estimator, budget, seconds=20.0, max_evaluations=3000)
    assert max(peaks(estimator, result.plan)) <= budget


def toy(text: str = "a100-80g:6x8", **sizes: ModelSpec) -> ToyEstimator:
    """Return PPO with a 13B actor and a 7B critic."""
    large, small = sizes.get("large", decoder(40, 5120, 40)), decoder(32, 4096, 32)
    models = {"actor": large, "reference": large, "critic": small, "reward": small}
    return ToyEstimator(dataflow=PPO_FLOW, cluster=ClusterSpec.parse(text), models=models, num_sequences=512)


def searched(estimator: ToyEstimator, **arguments: object) -> SearchResult:
    """Search a few hundred plans, so that the machine's speed does not matter."""
    few = CallOptions(micro_batch_tokens=(8192,))
    given = {"seed": 0, "seconds": 1000.0, "max_evaluations": 600, "options": few} | arguments
    return search_plan(estimator.models, estimator, **given)  # type: ignore[arg-type]


def test_one_seed_gives_one_plan_and_evaluations_are_limited() -> None:
    first, second = (searched(toy(), seed=3) for _ in range(2))
    assert (first.plan.digest, first.seconds, first.evaluations) == (
        second.plan.digest,
        second.seconds,
        second.evaluations,
    )
    assert first.evaluations <= 600 + 600
    assert [step.seconds for step in first.history] == sorted((s.seconds for s in first.history), reverse=True)
    assert first.history[-1].seconds == first.seconds


def test_the_result_is_a_valid_plan_with_a_valid_bound() -> None:
    estimator = toy()
    result = searched(estimator)
    result.plan.check(PPO_FLOW, estimator.cluster.num_devices)
    assert ExecutionPlan.from_mapping(result.plan.to_mapping()) == result.plan
    assert 0 < result.lower_bound <= result.seconds
    assert result.gap == pytest.approx(1 - result.lower_bound / result.seconds)


@pytest.mark.parametrize("overlap", ["iterations", "calls", "none"])
def test_the_bound_is_below_the_best_plan_under_every_overlap(overlap: str) -> None:
    estimator = RandomEstimator(dataflow=TWO_TRAINED, cluster=cluster(5, 1), seed=2)
    stopped = found(estimator, 10**6, max_evaluations=500, overlap=overlap)
    longer = found(estimator, 10**6, max_evaluations=5000, overlap=overlap)
    assert 0 < stopped.lower_bound <= longer.seconds <= stopped.seconds


def test_a_search_without_time_for_pricing_returns_no_bound() -> None:
    ticks = itertools.count()
    result = searched(toy(), seconds=100.0, clock=lambda: float(next(ticks) * 20))
    assert result.lower_bound == 0.0
    assert result.gap == 1.0


def test_on_the_nodes_that_have_room_for_every_call_a_search_finds_a_plan() -> None:
    # 70B under Adam: 16 bytes for each of 64.4e9 elements exceed eight devices of 80 GiB.
    estimator = toy("a100-80g:1x8", large=decoder(80, 8192, 64))
    with pytest.raises(NothingFitsError, match=r"lacks [\d,]+ bytes.*; use more such devices"):
        searched(estimator)
    pricing = Pricing(
        models=estimator.models,
        estimator=estimator,
        options=CallOptions(micro_batch_tokens=(8192,)),
        memory_budget=usable_bytes(estimator.cluster.device_memory_bytes),
    )
    assert enough_nodes(pricing, lambda: True) is None
    nodes = enough_nodes(pricing, lambda: False)
    assert nodes is not None and nodes > 1
    searched(toy(f"a100-80g:{nodes}x8", large=decoder(80, 8192, 64)))


def test_moves_of_choices_that_are_too_slow_without_them_are_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[int] = []

    def search() -> SearchResult:
        priced.append(0)
        return searched(toy())

    def counted(estimator: ToyEstimator, role: str, source: Layout, target: Layout) -> float:
        priced[-1] += 1
        return move_seconds(estimator, role, source, target)

    move_seconds = ToyEstimator.move_seconds
    monkeypatch.setattr(ToyEstimator, "move_seconds", counted)
    found = search()
    monkeypatch.setattr(Problem, "knows_moves", lambda *_: True)
    assert found.plan == search().plan and priced[0] < 0.8 * priced[1], priced


def test_missing_models_and_no_seconds_are_refused() -> None:
    estimator = toy()
    with pytest.raises(PlanError, match="role 'reward' needs a model"):
        models = {role: MODEL for role in ("actor", "critic", "reference")}
        search_plan(models, estimator, seed=0, seconds=1.0)
    with pytest.raises(PlanError, match="must be positive"):
        searched(estimator, seconds=0.0)
