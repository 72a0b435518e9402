"""Reallocations between real ranks give the slices of the full tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import PlanError, ReallocError
from lightning_realloc.layout import ClusterSpec, ModelLayout, ModelSpec, ParamSpec, TensorParallelCut, sharded
from lightning_realloc.runtime.transfer import shared_memory, transport
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.tuning.shapes.role_elements import RoleElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.traffic import staging_bytes
from tests.matrices import matrix
from tests.runtime.transfer.reallocation_cases import full_tensors, lay_out, local_reference, odd_model
from tests.workers import WorkerPool

LAYOUTS = (
    "fsdp4", "fsdp2.tp2", "dp2.fsdp2", "dp2.tp2@0,2,1,3", "dp4", "tp4", "tp2@2-3", "dp1@1", "fsdp2@0-1", "pp2.dp2",
    "pp2.fsdp2@3,1,2,0",
)  # fmt: skip


def _make(source: ModelLayout, target: ModelLayout, tensors: dict[str, Tensor], **options: Any) -> Reallocation:
    options = {"dtype": torch.float32, "device": "cpu", "deadline_s": 30.0} | options
    return Reallocation(source, tensors, target, rank=dist.get_rank(), world_size=dist.get_world_size(), **options)


def _assert_holds(realloc: Reallocation, expected: dict[str, Tensor], what: str) -> None:
    assert realloc.target_tensors.keys() == expected.keys(), what
    for name, tensor in expected.items():
        actual = realloc.target_tensors[name]
        assert actual.dtype == tensor.dtype and torch.equal(actual, tensor), f"{what}: {name}"


def _cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


OVER_NODES = ("fsdp4", "dp2.tp2@0,2,1,3", "tp4", "tp2@2-3", "pp2.fsdp2@3,1,2,0")


def _half(source: str, layouts: Sequence[str]) -> Sequence[str]:
    """Return layouts to reallocate to and back from, so that all sources together reach every pair of layouts."""
    first = layouts.index(source)
    return [layouts[(first + step) % len(layouts)] for step in range(len(layouts) // 2 + 1)]


def _go_and_come_back(source_text: str, targets: Sequence[str], pack_below_bytes: int, num_nodes: int) -> None:
    """Reallocate to other layouts: push and direct equal the reference, and direct restores it in place."""
    rank, source = dist.get_rank(), lay_out(source_text)
    cluster = None if num_nodes == 1 else ClusterSpec(**_local_cluster(num_nodes, 4 // num_nodes))
    options: dict[str, Any] = {"pack_below_bytes": pack_below_bytes, "cluster": cluster}
    full = full_tensors(source.model)
    held = local_reference(full, source, rank)
    for index, target_text in enumerate(targets):
        target = lay_out(target_text)
        dtype = (torch.bfloat16, torch.float32)[index % 2]
        expected = _cast(local_reference(full, target, rank), dtype)
        reports = []
        for name in ("push", "direct"):
            there = _make(source, target, held, dtype=dtype, transport=name, **options)
            reports.append(there.run())
            _assert_holds(there, expected, f"{source_text} -> {target_text} {dtype} {name}")
            assert there.run().transport == name
        pushed, sent = reports
        assert pushed.bytes_moved == sent.bytes_moved == sent.bytes_minimum == pushed.bytes_minimum
        assert sent.bytes_written == 0
        home = {name: torch.full_like(tensor, float("nan")) for name, tensor in held.items()}
        given = home if rank in source.layout else None
        back = _make(target, source, there.target_tensors, target_tensors=given, **options)
        report = back.run()
        assert report.transport == "direct"
        if rank in source.layout:
            _assert_holds(back, _cast(_cast(held, dtype), torch.float32), f"{target_text} -> {source_text} back")
            assert all(back.target_tensors[name].data_ptr() == home[name].data_ptr() for name in home)


@pytest.mark.parametrize("source", matrix(LAYOUTS, *LAYOUTS[::4]))
def test_every_layout_reaches_every_other_and_comes_back_bit_by_bit(workers: WorkerPool, source: str) -> None:
    small = 100 if LAYOUTS.index(source) % 2 else 1 << 16
    workers.run(_go_and_come_back, source, _half(source, LAYOUTS), small, 1, deadline_s=120.0)


@pytest.mark.parametrize(
    ("source", "num_nodes"),
    matrix(product(OVER_NODES, [2, 4]), ("fsdp4", 2), ("dp2.tp2@0,2,1,3", 4)),
)
def test_layouts_over_several_nodes_reach_every_other_bit_by_bit(
    workers: WorkerPool, source: str, num_nodes: int
) -> None:
    workers.run(_go_and_come_back, source, _half(source, OVER_NODES), 100, num_nodes, deadline_s=120.0)


def _go_over_two_nodes(transport_name: str) -> list[int]:
    """fsdp2 on node 0 to replicas on both nodes: node 1 receives each piece once and distributes it."""
    rank, source, target = dist.get_rank(), lay_out("fsdp2@0-1"), lay_out("dp4")
    full = full_tensors(source.model)
    two_nodes = ClusterSpec(**_local_cluster(2, 2))
    there = _make(
        source, target, local_reference(full, source, rank),
        cluster=two_nodes, transport=transport_name, pack_below_bytes=64,
    )  # fmt: skip
    report = there.run()
    _assert_holds(there, local_reference(full, target, rank), transport_name)
    assert report.bytes_moved == report.bytes_minimum
    return [transfer.hop for transfer in there.plan.transfers]


def _local_cluster(num_nodes: int, devices_per_node: int) -> dict[str, Any]:
    spec = ClusterSpec.local(devices_per_node)
    return {name: getattr(spec, name) for name in spec.__slots__} | {
        "num_nodes": num_nodes,
        "devices_per_node": devices_per_node,
    }


def test_a_piece_crosses_between_nodes_once_and_is_distributed_inside(workers: WorkerPool) -> None:
    for transport_name in ("direct", "push"):
        hops = workers.run(_go_over_two_nodes, transport_name)
        assert {1} <= set(hops[2]) | set(hops[3])


def _stay_small(limit: int) -> tuple[int, int, int]:
    rank, source, target = dist.get_rank(), lay_out("dp2.tp2"), lay_out("fsdp4")
    full = full_tensors(source.model)
    there = _make(
        source, target, local_reference(full, source, rank),
        dtype=torch.bfloat16, transport="direct", max_staging_bytes=limit, pack_below_bytes=64,
    )  # fmt: skip
    there.run()
    _assert_holds(there, _cast(local_reference(full, target, rank), torch.bfloat16), "bounded")
    report = there.run()
    return there.staging_bytes, report.bytes_moved, report.bytes_minimum


@pytest.mark.parametrize("limit", [50, 400, 1 << 26])
def test_staging_stays_within_one_bucket_per_direction(workers: WorkerPool, limit: int) -> None:
    results = workers.run(_stay_small, limit)
    assert all(moved == minimum for _, moved, minimum in results)
    assert all(staging <= 2 * limit for staging, _, _ in results)
    assert any(staging > 0 for staging, _, _ in results)


def _alias(name: str) -> tuple[int, int]:
    """tp2 on ranks 0-1 to dp2.tp2: ranks 0 and 1 keep their tensors, ranks 2 and 3 get copies."""
    rank, source, target = dist.get_rank(), lay_out("tp2@0-1"), lay_out("dp2.tp2")
    full = full_tensors(source.model)
    held = local_reference(full, source, rank)
    there = _make(source, target, held, transport=name)
    assert all((there.target_tensors[key] is not None) for key in held)
    for key, tensor in held.items():
        assert there.target_tensors[key].data_ptr() == tensor.data_ptr() or not tensor.numel()
        tensor.add_(1.0)
    report = there.run()
    _assert_holds(there, {key: v + 1.0 for key, v in local_reference(full, target, rank).items()}, name)
    assert report.bytes_moved == report.bytes_minimum
    return report.bytes_moved, report.bytes_written


@pytest.mark.parametrize("name", ["push", "direct"])
def test_unchanged_tensors_share_storage_with_the_source(workers: WorkerPool, name: str) -> None:
    moved, written = workers.run(_alias, name)[0]
    # Ranks 2 and 3 receive all they hold. Tensors that tp does not split (both norms and scale) are written once.
    assert moved - written == (4 * (2 * 10 + 3) if name == "push" else moved)


def _same_layout() -> str:
    rank, layout = dist.get_rank(), lay_out("fsdp2.tp2")
    held = local_reference(full_tensors(layout.model), layout, rank)
    there = _make(layout, layout, held)
    report = there.run()
    assert report.bytes_moved == report.bytes_minimum == report.bytes_written == 0
    assert all(there.target_tensors[key].data_ptr() == held[key].data_ptr() for key in held)
    return report.transport


def test_the_same_layout_and_dtype_costs_nothing(workers: WorkerPool) -> None:
    assert workers.run(_same_layout) == ["direct"] * 4


def _copy_what_is_not_contiguous(name: str) -> None:
    rank, layout = dist.get_rank(), lay_out("dp2", odd_model())
    full = full_tensors(layout.model)
    held = dict(full)
    if rank == 0:
        held["head"] = full["head"].t().contiguous().t()
    there = _make(layout, layout, held, transport=name)
    there.run()
    _assert_holds(there, full, name)
    assert there.target_tensors["head"].data_ptr() != held["head"].data_ptr()
    assert there.target_tensors["embed"].data_ptr() == held["embed"].data_ptr()


@pytest.mark.parametrize("name", ["push", "direct"])
def test_a_source_that_is_not_contiguous_is_copied_on_every_rank(workers: WorkerPool, name: str) -> None:
    workers.run(_copy_what_is_not_contiguous, name, world_size=2)


def _widen(name: str) -> int:
    """A bfloat16 source is sent as bfloat16 to a float32 target."""
    rank, source, target = dist.get_rank(), lay_out("fsdp4"), lay_out("tp4")
    full = _cast(full_tensors(source.model), torch.bfloat16)
    there = _make(source, target, local_reference(full, source, rank), transport=name, pack_below_bytes=64)
    report = there.run()
    _assert_holds(there, _cast(local_reference(full, target, rank), torch.float32), name)
    assert report.bytes_moved == report.bytes_minimum
    return report.bytes_minimum


def test_a_bfloat16_source_is_cast_after_the_transfer(workers: WorkerPool) -> None:
    assert workers.run(_widen, "push") == workers.run(_widen, "direct")


def _release_and_run_again(name: str) -> tuple[int, int]:
    rank, source, target = dist.get_rank(), lay_out("fsdp4"), lay_out("dp2.tp2")
    full = full_tensors(source.model)
    held = local_reference(full, source, rank)
    there = _make(source, target, held, dtype=torch.bfloat16, transport=name)
    expected = _cast(local_reference(full, target, rank), torch.bfloat16)
    resident = []
    for _ in range(3):
        there.run()
        _assert_holds(there, expected, name)
        resident.append(_memory_of(there))
        there.release()
        dist.barrier()
        resident.append(_memory_of(there))
    assert resident == resident[:2] * 3
    return resident[0], resident[1]


def _memory_of(realloc: Reallocation) -> int:
    bound = realloc._transport
    if isinstance(bound, transport.PushTransport):
        return bound._segment.resident_bytes
    return sum(tensor.untyped_storage().nbytes() for tensor in realloc.target_tensors.values())


@pytest.mark.parametrize("name", ["push", "direct"])
def test_released_memory_is_freed_and_the_next_run_allocates_it_again(workers: WorkerPool, name: str) -> None:
    for before, after in workers.run(_release_and_run_again, name):
        assert before > 0
        assert after == 0


def _release_on_some() -> None:
    rank, source, target = dist.get_rank(), lay_out("fsdp4"), lay_out("dp4")
    full = full_tensors(source.model)
    there = _make(source, target, local_reference(full, source, rank), transport="push")
    there.run()
    if rank % 2:
        there.release()
    dist.barrier()
    _assert_holds(there, full, "ranks that have not released still read")
    there.run()
    if rank % 2 == 0:
        there.release()  # the same number of releases as the others, but not after the same run
    dist.barrier()
    if rank % 2:
        _assert_holds(there, full, "after a run")


def test_shared_memory_stays_while_some_rank_may_still_read_it(workers: WorkerPool) -> None:
    workers.run(_release_on_some)


def _disagree() -> str:
    rank = dist.get_rank()
    source, target = lay_out("fsdp4"), lay_out("dp4" if rank != 2 else "dp2.tp2")
    held = local_reference(full_tensors(source.model), source, rank)
    try:
        _make(source, target, held)
    except PlanError as error:
        return str(error)
    return ""


def test_the_error_of_different_plans_names_the_ranks_on_all_of_them(workers: WorkerPool) -> None:
    messages = workers.run(_disagree)
    assert len(set(messages)) == 1
    assert "plan digest differs" in messages[0]
    assert "on ranks 0-1,3" in messages[0] and "on ranks 2" in messages[0]


def _hand_in_wrong(fault: str) -> str:
    rank, source, target = dist.get_rank(), lay_out("fsdp2"), lay_out("tp2")
    held = local_reference(full_tensors(source.model), source, rank)
    options: dict[str, Any] = {}
    if fault == "missing" and rank == 1:
        held.pop("head")
    if fault == "shape" and rank == 1:
        held["head"] = held["head"][1:]
    if fault == "extra" and rank == 1:
        held["adapter"] = torch.zeros(1)
    if fault == "dtype":
        options = {"dtype": (torch.float32, torch.bfloat16)[rank]}
    if fault == "packing":
        options = {"pack_below_bytes": (64, 1 << 16)[rank]}
    if fault == "in place":
        options = {"transport": "push", "target_tensors": local_reference({}, lay_out("dp1@5"), rank)}
    if fault == "name":
        options = {"transport": "teleport"}
    if fault == "model" and rank == 1:
        target = lay_out("tp2", odd_model(num_blocks=3))
    try:
        _make(source, target, held, **options)
    except PlanError as error:
        return str(error)
    return ""


FAULTS = {
    "missing": "rank 1: source_tensors lack 'head'",
    "shape": "rank 1: source_tensors['head'] is (14, 10)",
    "extra": "rank 1: source_tensors have, beyond the layout, 'adapter'",
    "dtype": "torch.bfloat16",
    "packing": "pack_below_bytes, world_size) differs",
    "in place": "cannot fill target_tensors",
    "name": "transport='teleport' must be",
    "model": "only the target has 'layers.2.down'",
}


def _hand_in_all() -> dict[str, str]:
    return {fault: _hand_in_wrong(fault) for fault in FAULTS}


def test_a_fault_on_one_rank_is_an_error_on_every_rank(workers: WorkerPool) -> None:
    first, second = workers.run(_hand_in_all, world_size=2)
    assert first == second
    for fault, words in FAULTS.items():
        assert words in first[fault], fault


def _without_shared_memory(name: str) -> tuple[str, str]:
    """Two simulated hosts: "push" is refused with the way out, "auto" chooses "direct" and gives the reason."""
    original = shared_memory.host_identity
    shared_memory.host_identity = lambda: f"host{dist.get_rank()}"
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_realloc.runtime.transfer.executor")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    source, target = lay_out("fsdp2"), lay_out("dp2")
    full = full_tensors(source.model)
    try:
        there = _make(source, target, local_reference(full, source, dist.get_rank()), transport=name)
        there.run()
        _assert_holds(there, full, name)
        return there.transport, "".join(records)
    except ReallocError as error:
        return "refused", str(error)
    finally:
        shared_memory.host_identity = original
        logger.removeHandler(handler)


def test_auto_chooses_direct_between_hosts_and_gives_the_reason(workers: WorkerPool) -> None:
    answers = workers.run(_without_shared_memory, "auto", world_size=2)
    assert [choice for choice, _ in answers] == ["direct"] * 2
    assert "direct, because ranks 0 and 1 are on different hosts" in answers[0][1]


def test_push_between_hosts_is_refused_with_the_way_out(workers: WorkerPool) -> None:
    for choice, message in workers.run(_without_shared_memory, "push", world_size=2):
        assert choice == "refused"
        assert "use transport='auto' or 'direct'" in message


def _alone() -> None:
    """One process without a process group: everything is a local copy or needs no copy."""
    model = odd_model()
    layout, full = lay_out("dp1", model), full_tensors(model)
    there = Reallocation(layout, full, layout, rank=0, world_size=1, dtype=torch.bfloat16, device="cpu")
    report = there.run()
    assert report.bytes_moved == 0 and report.transport == "direct"
    assert all(torch.equal(there.target_tensors[name], full[name].bfloat16()) for name in full)


def test_a_single_process_needs_no_process_group() -> None:
    _alone()


def _large_pieces() -> int:
    """Pieces above the packing limit with the real constants: in place where contiguous, staged where strided."""
    model = ModelSpec(
        (
            ParamSpec("column", (512, 300), sharded(TensorParallelCut(0)), "output"),
            ParamSpec("row", (300, 512), sharded(TensorParallelCut(1)), "output"),
        ),
        0,
    )
    rank, source, target = dist.get_rank(), lay_out("fsdp2", model), lay_out("tp2", model)
    full = full_tensors(model)
    there = _make(source, target, local_reference(full, source, rank), transport="direct")
    there.run()
    _assert_holds(there, local_reference(full, target, rank), "large")
    return there.staging_bytes


def test_only_strided_pieces_are_staged(workers: WorkerPool) -> None:
    # column: fsdp2 and tp2 split alike, nothing moves. row: each rank sends (150, 256) floats from rows of 512, which
    # must be copied first, and receives as many into whole rows of 256, in place.
    piece = 150 * 256 * 4
    assert workers.run(_large_pieces, world_size=2) == [piece] * 2


STAGED = ("fsdp4 dp4", "fsdp4 tp4", "fsdp2.tp2 dp2.tp2", "dp4 tp4", "tp4 dp4", "fsdp2@0-1 dp4", "fsdp2@0-1 dp1@3")
"""Pairs of layouts."""


def _staged_bytes() -> list[tuple[int, int]]:
    """Return this rank's staged bytes and their forecast for every pair of layouts, in both dtypes."""
    cut = [("column", (512, 300), 0), ("row", (300, 512), 1), ("small", (64, 12), 1)]
    params = tuple(ParamSpec(name, shape, sharded(TensorParallelCut(dim)), "output") for name, shape, dim in cut)
    model = ModelSpec((*params, ParamSpec("bias", (300,), section="output")), 0)
    full, elements, found = full_tensors(model), RoleElements(RoleMemory(model=model)), []
    for pair in STAGED:
        source, target = (lay_out(text, model) for text in pair.split())
        held = local_reference(full, source, dist.get_rank())
        for dtype in (torch.float32, torch.bfloat16):
            there = _make(source, target, held, transport="direct", dtype=dtype)
            casts, size = dtype != torch.float32, dtype.itemsize
            forecast = staging_bytes(elements, source.layout, target.layout, element_bytes=size, casts_trained=casts)
            found.append((there.staging_bytes, forecast[dist.get_rank()]))
    return found


def test_forecasts_count_the_staged_bytes(workers: WorkerPool) -> None:
    for number, case in enumerate(zip(*workers.run(_staged_bytes), strict=True)):
        staged, forecast = map(sum, zip(*case, strict=True))  # a replica's holders may divide the sending unequally
        assert forecast == pytest.approx(staged, rel=0.05), (STAGED[number // 2], case)


def _one_rank_stays_away() -> str:
    rank, source, target = dist.get_rank(), lay_out("fsdp2"), lay_out("dp2")
    held = local_reference(full_tensors(source.model), source, rank)
    there = _make(source, target, held, transport="push", deadline_s=0.3)
    message = ""
    if rank == 0:
        try:
            there.run()
        except ReallocError as error:
            message = str(error)
    dist.barrier()
    return message


def test_the_error_of_a_push_names_the_rank_that_did_not_arrive(workers: WorkerPool) -> None:
    assert "rank 1 did not arrive within 0.3 s" in workers.run(_one_rank_stays_away, world_size=2)[0]
