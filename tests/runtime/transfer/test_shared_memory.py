"""Segments, barriers and all-reduces in shared memory, on real processes."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.transfer import shared_memory
from lightning_realloc.runtime.transfer.collectives import SharedMemoryAllReduce
from lightning_realloc.runtime.transfer.shared_memory import (
    DISCARDS_WORD,
    FlagBarrier,
    SharedSegment,
    share_segment,
)
from tests.workers import WorkerPool

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or not shared_memory.stores_stay_in_order(), reason="needs Linux on x86"
)


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_mapped_segment_shows_what_its_maker_wrote_and_leaves_no_file(backing: str) -> None:
    made = SharedSegment.create(1000, backing=backing)
    other = SharedSegment.attach(made.handle)
    made.unlink()
    made.tensor(64, (3, 5), torch.float32).copy_(torch.arange(15.0).view(3, 5))
    assert torch.equal(other.tensor(64, (3, 5), torch.float32), torch.arange(15.0).view(3, 5))
    assert other.tensor(64, (0, 5), torch.bfloat16).shape == (0, 5)
    if backing == "file":
        assert not Path(made.handle.path).exists()


def test_discarding_returns_the_pages_and_keeps_the_mapping() -> None:
    segment = SharedSegment.create(1 << 20, backing="memfd")
    contents = segment.tensor(0, (1 << 18,), torch.float32)
    contents.fill_(7.0)
    segment.words[DISCARDS_WORD] = 3
    assert segment.resident_bytes == 1 << 20
    segment.discard()
    assert segment.resident_bytes == 0
    assert segment.words[DISCARDS_WORD] == 3, "the header outlives the contents"
    segment.reserve()
    assert segment.resident_bytes == 1 << 20
    assert not contents.any()


def test_a_segment_larger_than_memory_is_refused_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_SHARED_MEMORY_FOLDER", tmp_path)  # other tests use the real one meanwhile
    for backing in ("memfd", "file"):
        with pytest.raises(OSError, match=r"MB of shared memory needed"):
            SharedSegment.create(1 << 50, backing=backing)
    assert not list(tmp_path.iterdir())


def test_a_path_with_another_segment_is_refused() -> None:
    made = SharedSegment.create(64, backing="memfd")
    impostor = shared_memory.SegmentHandle(made.handle.path, made.handle.size, b"x" * 16)
    with pytest.raises(OSError, match="not the segment that was announced"):
        SharedSegment.attach(impostor)


def test_the_error_of_a_barrier_names_the_missing_rank() -> None:
    barrier = FlagBarrier(SharedSegment.create(64, backing="memfd"), 0, ["rank 0", "rank 3"], deadline_s=0.05)
    with pytest.raises(ReallocError, match=r"rank 3 did not arrive within 0\.05 s"):
        barrier.wait()


def test_a_process_that_has_ended_is_noticed_long_before_the_deadline() -> None:
    segment = SharedSegment.create(64, backing="memfd")
    child = os.fork()
    if child == 0:
        FlagBarrier(segment, 1, ["rank 0", "rank 1"], deadline_s=60.0)
        os._exit(0)
    barrier = FlagBarrier(segment, 0, ["rank 0", "rank 1"], deadline_s=60.0)
    start = time.monotonic()
    with pytest.raises(ReallocError, match=rf"rank 1 \(process {child}\) ended while"):
        barrier.wait()
    os.waitpid(child, 0)
    assert time.monotonic() - start < 20.0


def _meet_many_times(rounds: int) -> bool:
    """Every rank writes the round into its cell; after the barrier all cells must hold it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    segment, obstacle = share_segment(64 * size)
    assert segment is not None, obstacle
    barrier = FlagBarrier(segment, rank, [f"rank {r}" for r in range(size)], deadline_s=30.0)
    cells = segment.tensor(0, (size, 8), torch.int64)
    for round_ in range(1, rounds + 1):
        cells[rank, 0] = round_
        barrier.wait()
        if not bool((cells[:, 0] == round_).all()):
            return False
        barrier.wait()
    return True


def test_no_rank_passes_the_flag_barrier_before_all_have_arrived(workers: WorkerPool) -> None:
    assert workers.run(_meet_many_times, 300, world_size=4) == [True] * 4


def _share_among(members: tuple[int, ...]) -> tuple[bool, str | None]:
    segment, obstacle = share_segment(4096, members=members)
    return segment is not None, obstacle


def test_only_members_map_the_segment_and_no_rank_has_an_error(workers: WorkerPool) -> None:
    assert workers.run(_share_among, (1, 2), world_size=3) == [(False, None), (True, None), (True, None)]


def _share_with_too_little() -> str | None:
    original = shared_memory.available_bytes
    shared_memory.available_bytes = lambda: 100
    try:
        return share_segment(4096)[1]
    finally:
        shared_memory.available_bytes = original


def test_every_rank_gets_the_reason_if_one_lacks_memory(workers: WorkerPool) -> None:
    reasons = workers.run(_share_with_too_little, world_size=2)
    assert reasons[0] == reasons[1]
    assert "0 MB of shared memory needed" in str(reasons[0])


def _pretend_two_hosts() -> str | None:
    original = shared_memory.host_identity
    shared_memory.host_identity = lambda: f"host{dist.get_rank()}"
    try:
        return share_segment(64)[1]
    finally:
        shared_memory.host_identity = original


def test_ranks_of_two_hosts_do_not_share(workers: WorkerPool) -> None:
    reason = "ranks 0 and 1 are on different hosts, host0 and host1"
    assert workers.run(_pretend_two_hosts, world_size=2) == [reason] * 2


def _sum_both_ways(rounds: int) -> list[tuple[bool, torch.Tensor]]:
    """Compare sums of random tensors with gloo's; return their bits for a comparison between ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reducer = SharedMemoryAllReduce.create(max_bytes=8192, deadline_s=30.0)
    assert reducer is not None
    generator = torch.Generator().manual_seed(rank)
    results = []
    for round_ in range(rounds):
        dtype = (torch.float32, torch.bfloat16)[round_ % 2]
        mine = torch.randn(3, 1 + 37 * (round_ % 5), generator=generator).to(dtype)
        everyone = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(everyone, mine)
        expected = torch.stack(everyone).double().sum(0)
        total = reducer.sum_(mine.clone())
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        close = torch.allclose(total.double(), expected, rtol=tolerance, atol=tolerance * size)
        results.append((close, total))
    back_to_back = torch.ones(16)
    for _ in range(200):
        reducer.sum_(back_to_back)
        back_to_back /= size
    results.append((bool((back_to_back == 1).all()), back_to_back))
    in_pieces = torch.arange(3 * 2048 + 5).float() + rank
    exact = size * torch.arange(3 * 2048 + 5).float() + size * (size - 1) / 2
    results.append((bool((reducer.sum_(in_pieces) == exact).all()), in_pieces))
    pieces_of_transposed = (torch.arange(2 * 2048).view(2, 2048).float() + rank).t()
    exact = size * torch.arange(2 * 2048).view(2, 2048).t().float() + size * (size - 1) / 2
    results.append((bool((reducer.sum_(pieces_of_transposed) == exact).all()), pieces_of_transposed))
    transposed = torch.full((4, 6), float(rank)).t()
    results.append((bool((reducer.sum_(transposed) == size * (size - 1) / 2).all()), transposed))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_in_shared_memory_agree_with_gloo_and_are_the_same_bits_everywhere(
    workers: WorkerPool, world_size: int
) -> None:
    by_rank = workers.run(_sum_both_ways, 10, world_size=world_size)
    assert all(close for results in by_rank for close, _ in results)
    for results in by_rank[1:]:
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(by_rank[0], results, strict=True))


def _sum_what_does_not_fit() -> str:
    reducer = SharedMemoryAllReduce.create(max_bytes=64, deadline_s=30.0)
    assert reducer is not None
    assert reducer.accepts(torch.zeros(64)) and not reducer.accepts(torch.zeros(65))
    assert not reducer.accepts(torch.zeros(2, dtype=torch.float64))
    try:
        reducer.sum_(torch.zeros(65))
    except ReallocError as error:
        return str(error)
    return ""


def test_a_tensor_that_does_not_fit_is_refused_with_the_limit(workers: WorkerPool) -> None:
    assert "at most 256 bytes" in workers.run(_sum_what_does_not_fit, world_size=2)[0]


def _sum_alone() -> str:
    reducer = SharedMemoryAllReduce.create(max_bytes=64, deadline_s=0.2)
    assert reducer is not None
    message = ""
    if dist.get_rank() == 0:
        try:
            reducer.sum_(torch.zeros(1))
        except ReallocError as error:
            message = str(error)
    dist.barrier()
    return message


def test_the_error_of_a_sum_names_the_rank_that_did_not_arrive(workers: WorkerPool) -> None:
    assert "rank 1 did not arrive within 0.2 s" in workers.run(_sum_alone, world_size=2)[0]
