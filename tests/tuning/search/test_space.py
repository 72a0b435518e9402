"""The search space has exactly the valid plans, and one of all placements that are equal up to renaming devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.errors import LayoutError
from lightning_realloc.layout.cluster import ClusterSpec, NodeLink
from lightning_realloc.layout.cuts import TensorParallelCut, sharded, sharded_experts
from lightning_realloc.layout.dims import AXES, Layout, ParallelDims
from lightning_realloc.layout.model import ModelLayout, ModelSpec, ParamSpec
from lightning_realloc.tuning.estimate.group_placement import Placement
from lightning_realloc.tuning.search.space import (
    MIN_SLICE_TOKENS,
    RUNS_OF_A_STAGE,
    CallOptions,
    RankSet,
    best_linked_ranks,
    call_dims,
    canonical_sets,
    interleaved,
    legal_dims,
    node_counts,
    node_kinds,
    node_order,
    node_run,
    rank_sets,
    sizes,
)
from tests.dataflow.test_dataflow import GENERATE
from tests.matrices import crossed
from tests.tuning.examples import role_of

KINDS: tuple[CallKind, ...] = ("generate", "infer", "train")
PARAMS = tuple(
    ParamSpec(f"block.{b}", (24, 4), sharded(TensorParallelCut(0, num_units=12)), "block", b) for b in range(3)
)
MODEL = ModelSpec(PARAMS, num_blocks=3)
HEAD = ParamSpec("embedding", (16, 4), sharded(), "input")
TIED = ModelSpec((HEAD, *PARAMS), num_blocks=3, aliases=(("head", "embedding"),))
SCALED = ModelSpec((ParamSpec("scale", (), sharded(), "input"), *PARAMS), num_blocks=3)
UNCUT = ModelSpec(PARAMS, num_blocks=3, tp_refusal="no plan")
HEADED = ModelSpec(PARAMS, num_blocks=3, attention_heads=((12, 6),))
EXPERTS = ModelSpec(
    tuple(ParamSpec(f"block.{b}.experts", (4, 8, 6), sharded_experts(), "block", b) for b in range(3)),
    num_blocks=3,
    tp_refusal="no plan",
    ep_refusal=None,
)
LONG = CallOptions(row_tokens=3 * MIN_SLICE_TOKENS, generates_in_stages=False)


def cluster(num_nodes: int, devices_per_node: int) -> ClusterSpec:
    """Return nodes of CPU devices."""
    return replace(ClusterSpec.local(devices_per_node), num_nodes=num_nodes)


def test_a_call_runs_on_aligned_parts_of_a_node_or_on_whole_nodes() -> None:
    found = {one.ranks for one in rank_sets(cluster(1, 4))}
    assert found == {(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)}
    # Three nodes of six: parts of one and two devices, and all 7 combinations of nodes.
    by_size = [one.size for one in rank_sets(cluster(3, 6))]
    assert {size: by_size.count(size) for size in set(by_size)} == {1: 18, 2: 9, 6: 3, 12: 3, 18: 1}
    assert sizes(cluster(3, 6)) == (1, 2, 6, 12, 18)


def test_large_clusters_offer_only_node_counts_that_divide_well_and_all_nodes() -> None:
    counts = node_counts(cluster(127, 8))
    assert counts[:16] == tuple(range(1, 17))
    assert counts[16:20] == (18, 20, 24, 25)
    assert counts[-1] == 127


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((model, CallOptions()) for model in (MODEL, TIED, SCALED, UNCUT, EXPERTS)),
        (HEADED, LONG),
        (HEADED, CallOptions()),
    ],
)
@pytest.mark.parametrize(("kind", "num_ranks"), crossed(KINDS, [1, 2, 4, 8, 24]))
def test_degrees_are_those_that_model_kind_nodes_and_rows_allow(
    model: ModelSpec, options: CallOptions, kind: CallKind, num_ranks: int
) -> None:
    def is_legal(dims: ParallelDims) -> bool:
        try:
            ModelLayout(model, Layout(dims, tuple(range(num_ranks))))
        except LayoutError:
            return False
        leaves_node = any(len({rank // 8 for rank in group}) > 1 for group in layout_groups(dims))
        slices = options.row_tokens // MIN_SLICE_TOKENS if kind != "generate" else 1
        in_stages = kind != "generate" or options.generates_in_stages
        return not leaves_node and dims.cp <= max(1, slices) and (in_stages or dims.pp == 1)

    def layout_groups(dims: ParallelDims) -> Iterator[tuple[int, ...]]:
        return iter(Layout(dims, tuple(range(num_ranks))).groups("cp", "tp"))

    degrees = [degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0]
    chosen = itertools.product(degrees, repeat=len(AXES))
    products = (ParallelDims(**dict(zip(AXES, each, strict=True))) for each in chosen)
    fitting = (dims for dims in products if dims.size == num_ranks)
    expected = {one for dims in fitting for ep in dims.expert_degrees if is_legal(one := replace(dims, ep=ep))}
    found = legal_dims(model, kind, num_ranks, cluster(3, 8), options)
    assert set(found) == expected
    divides = options is LONG and num_ranks > 1 and kind != "generate"
    assert any(dims.cp > 1 for dims in found) == divides
    assert len(found) == len(expected)


@pytest.mark.parametrize("num_blocks", [3, 8, 9, 16])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_are_interleaved_where_blocks_suffice(num_blocks: int, pp: int) -> None:
    blocks = tuple(ParamSpec(f"block.{b}", (24, 4), sharded(), "block", b) for b in range(num_blocks))
    model = ModelSpec(blocks, num_blocks=num_blocks)
    found = interleaved(model, ParallelDims(pp=pp, fsdp=2)) if pp <= num_blocks else ()
    assert [dims.vpp for dims in found] == [vpp for vpp in RUNS_OF_A_STAGE if pp > 1 and pp * vpp <= num_blocks]
    for dims in found:
        ModelLayout(model, Layout(dims, tuple(range(2 * pp))))  # refuses layouts that no call can run


@pytest.mark.parametrize("kind", KINDS)
def test_groups_span_nodes_of_one_device(kind: CallKind) -> None:
    assert legal_dims(MODEL, kind, 4, cluster(4, 1)) == legal_dims(MODEL, kind, 4, cluster(1, 4))


def test_degrees_that_do_not_divide_the_heads_are_tried() -> None:
    def degrees(name: str, num_ranks: int) -> set[int]:
        model = role_of(name).model
        return {dims.tp for dims in legal_dims(model, "generate", num_ranks, cluster(1, num_ranks))}

    assert degrees("Qwen2.5-0.5B", 4) == {1, 2, 4}  # 14 query heads on 2 key-value heads: 4 + 3, twice
    assert degrees("Qwen2.5-0.5B", 16) == {1, 2, 4, 8}


def test_options_depend_on_the_kind_of_a_call() -> None:
    options = CallOptions(micro_batch_tokens=(1024, 2048), max_slots=(16, 32, 64))
    layout = Layout(ParallelDims(), (0,))
    assert [len(options.plans(kind, layout)) for kind in KINDS] == [3, 2, 4]
    assert not any(plan.gradient_checkpointing for plan in options.plans("infer", layout))


def test_micro_batches_hold_the_longest_row_and_count_whole_rows_under_cp() -> None:
    options = CallOptions(micro_batch_tokens=(None, 1024, 2048, 4096), row_tokens=3000)
    limits = {
        cp: [plan.micro_batch_tokens for plan in options.plans("infer", Layout.parse(f"cp{cp}"))] for cp in (1, 2)
    }
    assert limits == {1: [None, 3000, 4096], 2: [None, 3000, 4096, 8192]}


def test_calls_that_ask_models_gather_nothing() -> None:
    generate = replace(GENERATE, partners=("actor", "seller"))
    models = {"actor": MODEL, "seller": UNCUT}
    whole = (ParallelDims(dp=4), ParallelDims(pp=2, dp=2))
    assert call_dims(generate, models, 4, cluster(1, 4)) == whole
    mixtures = dict.fromkeys(models, EXPERTS)
    assert call_dims(generate, mixtures, 4, cluster(1, 4)) == whole
    alone = CallOptions(generates_in_lockstep=False)
    degrees = legal_dims(EXPERTS, "generate", 4, cluster(1, 4), alone)
    assert set(degrees) == set(whole)
    undivided = CallOptions(generates_in_tensor_parallel=False)
    generates, infers = (legal_dims(MODEL, kind, 4, cluster(1, 4), undivided) for kind in ("generate", "infer"))
    assert set(generates) == {dims for dims in infers if dims.tp == 1} < set(infers)
    assert len(call_dims(replace(generate, partners=()), models, 4, cluster(1, 4))) > 8


def renamings(num_nodes: int, devices: int) -> list[tuple[int, ...]]:
    """Return every permutation of ranks that permutes nodes, halves of nodes, and so on, by brute force."""

    def within(size: int) -> list[tuple[int, ...]]:
        if size == 1:
            return [(0,)]
        half = within(size // 2)
        both = [(*a, *(size // 2 + at for at in b)) for a in half for b in half]
        return both + [(*one[size // 2 :], *one[: size // 2]) for one in both]

    found = []
    for order in itertools.permutations(range(num_nodes)):
        for insides in itertools.product(within(devices), repeat=num_nodes):
            found.append(
                tuple(node * devices + at for node, inside in zip(order, insides, strict=True) for at in inside)
            )
    return found


SLOW_HOST = tuple(NodeLink(min(1, other), max(1, other), 1e8, 1e-3) for other in (0, 2, 3))
RACKS = tuple(NodeLink(*pair, 1e8, 1e-3) for pair in ((0, 1), (0, 3), (1, 2), (2, 3)))


def keeps_links(renaming: tuple[int, ...], machines: ClusterSpec) -> bool:
    """Return whether a permutation of ranks maps links between nodes onto equal ones."""
    devices = machines.devices_per_node
    node_of = [renaming[node * devices] // devices for node in range(machines.num_nodes)]
    known = [link for link in machines.node_links if link.second < machines.num_nodes]
    links = {frozenset((link.first, link.second)): link.bytes_per_s for link in known}
    return links == {frozenset(node_of[node] for node in pair): rate for pair, rate in links.items()}


@pytest.mark.parametrize("links", [(), SLOW_HOST])
@pytest.mark.parametrize(("num_nodes", "devices"), [(1, 4), (2, 2), (3, 2), (4, 1), (2, 4)])
def test_canonical_placements_are_one_of_each_class_of_renamings(
    num_nodes: int, devices: int, links: tuple[NodeLink, ...]
) -> None:
    machines = replace(cluster(num_nodes, devices), node_links=links)
    group = [renaming for renaming in renamings(num_nodes, devices) if keeps_links(renaming, machines)]
    everything = list(rank_sets(machines))
    for placed in [(), *((one,) for one in everything), *itertools.product(everything[::3], repeat=2)]:
        keeping = [p for p in group if all({p[r] for r in one.ranks} == set(one.ranks) for one in placed)]
        classes = {frozenset(frozenset(p[r] for r in one.ranks) for p in keeping) for one in everything}
        found = canonical_sets(everything, placed, machines)
        chosen = [next(c for c in classes if frozenset(one.ranks) in c) for one in found]
        assert len(chosen) == len(classes)
        assert set(chosen) == classes


def test_nodes_with_fast_links_come_first_and_are_next_to_each_other() -> None:
    equal = cluster(4, 2)
    assert node_order(equal) == (0, 1, 2, 3)
    one_slow, racks = (replace(equal, node_links=links) for links in (SLOW_HOST, RACKS))
    assert node_order(one_slow) == (0, 2, 3, 1)
    assert node_order(racks) == (0, 2, 1, 3)
    assert node_run(one_slow, 1, 2, node_order(one_slow)).ranks == (4, 5, 6, 7)
    assert [best_linked_ranks(one_slow, size) for size in (1, 2, 4)] == [(0,), (0, 1), (0, 1, 4, 5)]
    assert node_kinds(one_slow) == (0, 1, 0, 0)
    assert node_kinds(racks) == (0, 1, 0, 1)


def test_the_first_placement_is_canonical_by_size_alone() -> None:
    machines = cluster(3, 4)
    assert [one.ranks for one in canonical_sets(rank_sets(machines), (), machines)] == [
        (0,),
        (0, 1),
        (0, 1, 2, 3),
        tuple(range(8)),
        tuple(range(12)),
    ]
    # After the first node: a part of it or of another node, itself or another, two nodes with or without it, all.
    second = canonical_sets(rank_sets(machines), (RankSet((0, 1, 2, 3)),), machines)
    assert len(second) == 2 + 2 + 2 + 2 + 1


def test_long_rows_are_generated_in_few_slots_too() -> None:
    short, long = (CallOptions(max_slots=(64, 256), row_tokens=tokens) for tokens in (16384, 16385))
    slots = [[plan.max_slots for plan in one.plans("generate", Layout.parse("dp2"))] for one in (short, long)]
    assert slots == [[64, 256], [1, 4, 16, 64, 256]]


def test_stages_may_delay_gradients_of_weights_only_in_training_and_where_blocks_allow_it() -> None:
    usual, compiled = CallOptions(), CallOptions(delays_weight_gradients=False)

    def schedules(options: CallOptions, kind: CallKind, layout: str) -> list[str]:
        return [plan.pipeline_schedule for plan in options.plans(kind, Layout.parse(layout))]

    both = schedules(usual, "train", "pp2.dp2")
    assert both.count("1f1b") == both.count("zero_bubble") == len(both) / 2
    for options, kind, layout in ((usual, "train", "dp4"), (usual, "infer", "pp2"), (compiled, "train", "pp2")):
        assert set(schedules(options, kind, layout)) == {"1f1b"}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_divide_rows_and_experts_share_a_node_where_they_fit(kind: CallKind) -> None:
    model, nodes = replace(EXPERTS, attention_heads=((12, 4),)), cluster(2, 4)
    found = legal_dims(model, kind, 8, nodes, CallOptions(row_tokens=4 * MIN_SLICE_TOKENS))
    places = {dims: Placement.from_layout(Layout(dims, tuple(range(8))), nodes) for dims in found}
    assert all(place.cp.nodes == place.tp.nodes == 1 for place in places.values())
    together = [dims for dims in found if dims.ep > 1 and dims.ep * dims.cp <= 4]
    assert together and all(places[dims].ep.nodes == 1 for dims in together)
    assert all(place.ep.nodes == 2 for dims, place in places.items() if dims.ep * dims.cp == 8)
