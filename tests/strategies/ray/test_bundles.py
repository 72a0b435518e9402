"""Bundles of a placement group by plan, options and machines: pure, so it needs no Ray."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.ray_options import RayOptions
from lightning_realloc.strategies.ray.bundles import (
    PlacementRequest,
    RayMachine,
    RayPlacement,
    WaitLimits,
    choose_request,
    choose_spread,
    describe_machines,
    has_labels,
    labels_by_node,
    rank_options,
)

PLAN = ExecutionPlan.from_mapping(
    {"calls": {"actor.generate": "dp2@0-1", "actor.train": "fsdp2@2-3", "critic.train": "fsdp2@2-3"}}
)


# ---- resources
def test_a_node_of_the_plan_needs_what_its_ranks_need() -> None:
    assert RayPlacement(2, 4, uses_gpus=False).needed == {"CPU": 4}
    assert RayPlacement(2, 8, uses_gpus=True).needed == {"CPU": 8, "GPU": 8}
    options = RayOptions(num_cpus=0.5, memory="2GiB", resources={"nic": 1}, accelerator_type="H100")
    placement = RayPlacement(1, 4, uses_gpus=True, options=options)
    assert placement.needed == {"CPU": 2, "GPU": 4, "memory": 8 * 2**30, "nic": 4, "accelerator_type:H100": 0.001}
    assert str(placement) == "1 x (2 CPU, 4 GPU, 8 GiB memory, 4 nic, accelerator_type:H100)"


def test_actors_get_the_options_and_variables_of_the_user_win() -> None:
    environment = {"pip": ["x"], "env_vars": {"A": "mine"}}
    options = RayOptions(name="run", namespace="team", runtime_env=environment, memory="1GiB", resources={"nic": 1})
    given = rank_options(RayPlacement(1, 2, True, options), rank=1, attempt=3, variables={"A": "theirs", "B": "b"})
    assert given == {
        "num_cpus": 1.0,
        "num_gpus": 1,
        "memory": 2**30,
        "resources": {"nic": 1},
        "max_restarts": 0,
        "runtime_env": {"pip": ["x"], "env_vars": {"A": "mine", "B": "b"}},
        "name": "run.3.rank1",
        "namespace": "team",
    }
    assert "name" not in rank_options(RayPlacement(1, 2, True), rank=1, attempt=3, variables={})


# ---- machines
def machine(cpus: float, gpus: float = 0.0, **labels: str) -> RayMachine:
    """Return a machine."""
    return RayMachine({"CPU": cpus, "GPU": gpus}, labels)


def test_nodes_of_the_plan_share_machines_only_where_there_are_too_few() -> None:
    small, large, without_gpu = machine(4, 2), machine(16, 8), RayMachine({"CPU": 64.0})

    def spread(num_nodes: int, *machines: RayMachine) -> str | None:
        return choose_spread(RayPlacement(num_nodes, 2, uses_gpus=True), machines)

    assert spread(2, small, large) == "STRICT_SPREAD"
    assert spread(2, small, without_gpu) is None
    assert spread(3, large, without_gpu) == "PACK"  # 8 // 2 = 4 nodes fit on the large one
    assert spread(5, large) is None
    assert spread(1) is None


KINDS = st.sampled_from([(), (("kind", "a"),), (("kind", "b"),), (("kind", "!a"),), (("kind", "in(a,b)"),)])


@given(
    nodes=st.lists(KINDS, min_size=1, max_size=4),
    machines=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", "c"])), max_size=4),
)
def test_a_placement_exists_exactly_where_trying_all_of_them_finds_one(
    nodes: list[tuple[tuple[str, str], ...]], machines: list[tuple[int, str]]
) -> None:
    found = [machine(cpus, kind=kind) for cpus, kind in machines]
    best = None
    for choice in product(range(len(found)), repeat=len(nodes)):
        fits = all(choice.count(index) <= found[index].resources["CPU"] for index in set(choice))
        if fits and all(has_labels(dict(node), found[index].labels) for node, index in zip(nodes, choice, strict=True)):
            best = "STRICT_SPREAD" if len(set(choice)) == len(nodes) else best or "PACK"
    placement = RayPlacement(len(nodes), 1, uses_gpus=False, labels=tuple(nodes))
    assert choose_spread(placement, found) == best


def test_selectors_of_labels_are_those_of_ray() -> None:
    spot = {"market": "spot", "zone": "b"}
    for selector, expected in (("spot", True), ("!spot", False), ("in(spot, on-demand)", True), ("!in(a,b)", True)):
        assert has_labels({"market": selector}, spot) is expected
    assert not has_labels({"market": "spot", "zone": "a"}, spot)
    assert has_labels({"other": "!x"}, spot) and not has_labels({"other": "x"}, spot)


# ---- labels by plan
def test_a_node_gets_the_labels_of_every_call_on_its_ranks() -> None:
    labels = {"*": {"zone": "b"}, "actor.generate": {"kind": "small"}, "critic": {"kind": "large"}}
    assert labels_by_node(labels, PLAN, num_nodes=2, per_node=2) == (
        (("kind", "small"), ("zone", "b")),
        (("kind", "large"), ("zone", "b")),
    )
    assert labels_by_node({"*": {"zone": "b"}}, "heuristic", 2, 1) == ((("zone", "b"),),) * 2
    assert labels_by_node({}, "heuristic", 2, 1) == ()


def test_labels_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no call or role 'critik' \(did you mean critic\?\); it has actor, "):
        labels_by_node({"critik": {"kind": "large"}}, PLAN, 2, 2)
    with pytest.raises(ConfigError, match=r"'critic' have ranks only in a plan with layouts, and plan='heuristic'"):
        labels_by_node({"critic": {"kind": "large"}}, "heuristic", 2, 2)
    both = {"actor": {"kind": "small"}, "critic": {"kind": "large"}}
    with pytest.raises(ConfigError, match=r"'actor' wants .* kind=small and 'critic' .* on node 1 \(ranks 2-3\)"):
        labels_by_node(both, PLAN, 2, 2)


# ---- waiting
def test_all_nodes_are_asked_for_until_fewer_are_allowed() -> None:
    placement = RayPlacement(3, 2, False, RayOptions(min_nodes=1))
    limits = WaitLimits.of(placement.options, is_first=False)
    one, two = [machine(2)], [machine(2), machine(3)]
    assert choose_request(placement, two, 119.0, limits) == PlacementRequest(3, "SPREAD")
    assert choose_request(placement, two, 120.0, limits) == PlacementRequest(2, "STRICT_SPREAD")
    assert choose_request(placement, one, 120.0, limits) == PlacementRequest(1, "STRICT_SPREAD")
    assert choose_request(placement, [], 1e6, limits) == PlacementRequest(3, "SPREAD")  # and the autoscaler sees it
    fixed = RayPlacement(3, 2, False)
    assert choose_request(fixed, two, 1e6, WaitLimits.of(fixed.options, is_first=False)).num_nodes == 3


def test_waiting_ends_at_the_first_start_only_unless_it_is_set() -> None:
    def ends(first: bool, **options: float) -> float:
        return WaitLimits.of(RayOptions(**options), is_first=first).end_s  # type: ignore[arg-type]

    assert [ends(True), ends(False)] == [120.0, math.inf]
    assert [ends(True, placement_timeout=5.0), ends(False, placement_timeout=5.0)] == [5.0, 5.0]


def test_a_pending_request_stays_while_it_serves() -> None:
    pending = PlacementRequest(2, "SPREAD")
    assert pending.serves(PlacementRequest(2, "STRICT_SPREAD")) and not pending.serves(PlacementRequest(1, "SPREAD"))
    assert not PlacementRequest(2, "STRICT_SPREAD").serves(PlacementRequest(2, "PACK"))


def test_what_no_machine_has_is_named() -> None:
    options = RayOptions(resources={"nics": 1}, accelerator_type="H100")
    labels = ((("kynd", "a"),), (("zone", "q"),))
    placement = RayPlacement(2, 1, True, options, labels)
    there = [
        RayMachine({"CPU": 8.0, "GPU": 2.0, "nic": 1.0, "accelerator_type:A100": 1.0}, {"kind": "a", "zone": "b"}),
        RayMachine({"CPU": 8.0}, {"zone": "c"}),
    ]
    text = describe_machines(placement, there)
    assert text.startswith("Ray has 2 machines: 1 with 8 CPU, 2 GPU")
    assert "; no machine has nics (did you mean nic?); no machine has accelerator_type:H100 (did you" in text
    assert text.endswith(
        "no machine has the label kynd=a (did you mean kind?); no machine has the label zone=q (zone is b, c)"
    )
    assert describe_machines(RayPlacement(1, 1, False), []) == "Ray has 0 machines"


# ---- settings
def test_settings_that_cannot_work_are_refused() -> None:
    cases = (
        ({"num_cpus": 0}, r"num_cpus=0 must be positive"),
        ({"placement_timeout": 0.0}, r"placement_timeout=0\.0 must be positive seconds"),
        ({"min_nodes": 0}, r"min_nodes=0 must be at least 1"),
        ({"resources": {"GPU": 1}}, r"resources has GPU; set use_gpus instead"),
        ({"resources": {"nic": 0}}, r"resources: nic=0 must be positive"),
        ({"labels": {"kind": "a"}}, r"labels: 'kind' has 'a'; write a mapping"),
    )
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            RayOptions(**settings)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no amount of memory"):
        RayOptions(memory="much")


def test_fewer_nodes_need_a_plan_for_any_number_of_ranks() -> None:
    launcher = RayOptions(min_nodes=1)
    with pytest.raises(ConfigError, match=r"^min_nodes=1 lets a run go on .* the given plan is for 4 ranks; use plan="):
        ReallocStrategy(PLAN, launcher=launcher)
    with pytest.raises(ConfigError, match=r"^min_nodes=1 .* cluster= describes one number of nodes; leave cluster out"):
        ReallocStrategy(cluster="h100:2x8", launcher=launcher)
    ReallocStrategy(launcher=launcher, max_failures=1)
