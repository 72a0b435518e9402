"""Versions that arrive in the background are the sender's weights of that moment, in every pair of layouts."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import WeightMismatch
from lightning_realloc.layout import ClusterSpec, ModelLayout
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.runtime.transfer.point_to_point import CopyList
from lightning_realloc.runtime.transfer.shared_memory import share_segment
from lightning_realloc.runtime.transfer.version_frames import HostFrames
from lightning_realloc.runtime.transfer.version_stream import VersionReceiver, VersionSender
from lightning_realloc.runtime.transfer.weight_check import WeightSubject
from tests.matrices import matrix
from tests.runtime.transfer.reallocation_cases import full_tensors, lay_out, local_reference
from tests.workers import WorkerFailure, WorkerPool

PAIRS = [
    ("dp2@0-1", "tp2@2-3"), ("fsdp2@0-1", "dp2@2-3"), ("tp2@1,0", "tp2@3,2"), ("pp2@0-1", "dp1@3"), ("dp1@2", "dp1@0"),
    ("tp2@2-3", "dp2@0-1"), ("fsdp3@0-2", "dp1@3"),
]  # fmt: skip


def _ends(
    source_text: str, target_text: str, dtype: torch.dtype, ranks_per_host: int | None = None
) -> tuple[ModelLayout, dict[str, torch.Tensor], VersionSender | VersionReceiver | None]:
    """Return the target layout, this rank's tensors and its end of a stream. None: hosts share nothing."""
    rank, source, target = dist.get_rank(), lay_out(source_text), lay_out(target_text)
    hosts = None if ranks_per_host is None else ClusterSpec.parse(f"cpu:8x{ranks_per_host}")
    plan = plan_reallocation(source, target, hosts, element_bytes=dtype.itemsize, rank=rank)
    frames = HostFrames(plan, rank, dtype, "sampled") if rank in target.layout else None
    group, segment = dist.new_group(backend="gloo"), None
    if hosts is not None:
        readers, size = ((), 0) if frames is None else (frames.readers, frames.required_bytes)
        segment, obstacle = share_segment(size, members=readers)
        assert obstacle is None
    if frames is not None:
        tensors = {name: torch.zeros(target.local_shape(name, rank)) for name in target.names(rank)}
        subject = WeightSubject("the model", source.layout, target.layout, rank, "stream")
        return target, tensors, VersionReceiver(frames, tensors, group=group, tag=2, segment=segment, subject=subject)
    if rank in source.layout:
        tensors = local_reference(full_tensors(source.model), source, rank)
        return target, tensors, VersionSender(plan, tensors, dtype=dtype, group=group, tag=2)
    return target, {}, None


def _send_three_versions(
    source_text: str, target_text: str, dtype: torch.dtype, ranks_per_host: int | None = None
) -> tuple[int, ...]:
    """Change the weights right after each version was sent: each arrives as it was. Return the senders of this rank."""
    target, tensors, end = _ends(source_text, target_text, dtype, ranks_per_host)
    rank = dist.get_rank()
    full = full_tensors(target.model)
    if isinstance(end, VersionSender):
        for version in range(3):
            end.send(version)
            for tensor in tensors.values():
                tensor.mul_(2)
        end.close()
    elif end is not None:
        for version in range(3):
            deadline = time.monotonic() + 20
            while not end.has_arrived() and time.monotonic() < deadline:
                time.sleep(0.001)
            assert end.has_version() and end.receive() == version
            for name, expected in local_reference(full, target, rank).items():
                assert torch.equal(tensors[name], (expected * 2**version).to(dtype).float()), (version, name)
        end.wait()
        assert end.has_arrived() and not end.has_version() and end.receive() is None
    return end.senders if isinstance(end, VersionReceiver) else ()


@pytest.mark.parametrize(("source", "target"), matrix(PAIRS, PAIRS[0], PAIRS[2], PAIRS[3], PAIRS[6]))
def test_every_version_arrives_as_it_was_sent(workers: WorkerPool, source: str, target: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        workers.run(_send_three_versions, source, target, dtype, deadline_s=60.0)


HOSTS = [
    ("dp1@0", "dp2@2-3", 2), ("fsdp2@0-1", "dp2.tp2@2-5", 2), ("tp2@0-1", "dp2.tp2@4-7", 4), ("pp2@0-1", "dp4@3-6", 3),
    ("fsdp2@0-1", "dp5@3-7", 1), ("dp2@0-1", "dp2.pp2@2-5", 4), ("fsdp2@0,4", "dp6@1-3,5-7", 4),
]  # fmt: skip
"""Layouts, and ranks of each host."""


@pytest.mark.parametrize(("source", "target", "ranks_per_host"), matrix(HOSTS, HOSTS[0], HOSTS[2]))
def test_ranks_of_a_host_read_what_landed_there_once(
    workers: WorkerPool, source: str, target: str, ranks_per_host: int
) -> None:
    world_size = 1 + max(max(lay_out(text).layout.ranks) for text in (source, target))
    for dtype in (torch.float32, torch.bfloat16):
        workers.run(_send_three_versions, source, target, dtype, ranks_per_host, world_size=world_size, deadline_s=60.0)


def _wait_for_a_busy_receiver(target: str, ranks_per_host: int | None) -> list[float]:
    """Send versions to ranks of which the last does not take any for a while; return the seconds of each `send`."""
    _, _, end = _ends("dp1@0", target, torch.float32, ranks_per_host)
    seconds = []
    if isinstance(end, VersionSender):
        for version in range(4):
            begin = time.monotonic()
            end.send(version)
            seconds.append(time.monotonic() - begin)
        end.close()
    elif end is not None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1.0)
        assert [end.receive() for _ in range(5)] == [0, 1, 2, 3, None]
    return seconds


@pytest.mark.parametrize(("target", "ranks_per_host", "num_slots"), [("dp1@1", None, 1), ("dp2@2-3", 2, 2)])
def test_a_sender_waits_while_a_receiver_has_not_taken_what_has_landed(
    workers: WorkerPool, target: str, ranks_per_host: int | None, num_slots: int
) -> None:
    world_size = 2 if ranks_per_host is None else 4
    seconds = workers.run(_wait_for_a_busy_receiver, target, ranks_per_host, world_size=world_size, deadline_s=60.0)[0]
    # Versions that fill the slots land at once, and one more is on its way.
    assert max(seconds[: num_slots + 1]) < 0.5 < seconds[num_slots + 1]


def _lose_the_sender() -> None:
    _, _, end = _ends("dp1@0", "dp1@1", torch.float32)
    dist.barrier()  # else the receiver may still be connecting
    if isinstance(end, VersionReceiver):
        end.receive()
    elif end is not None:
        dist.destroy_process_group()


def test_a_lost_sender_is_an_error(workers: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match=r"RankLost.*ended while weights were on their way"):
        workers.run(_lose_the_sender, world_size=2, deadline_s=60.0)


FAULTS = {
    "sends old pieces": r"version 1 of .* 'embed' differs",
    "sends an old frame": "a source rank sent version 0",
    "does not write a piece": "differs from the source's",
    "writes half a piece": "'layers.0.down' differs",
    "swaps two layers": "'layers.0.gate_up' differs from the source's, and so do 1 other parameter",
    "rounds values": "differs from the source's",
}


def _spoil(source_text: str, target_text: str, fault: str) -> str:
    """Send version 0 in order and version 1 with a fault; return the error of the receiving rank."""
    _, tensors, end = _ends(source_text, target_text, torch.float32)
    if isinstance(end, VersionSender):
        end.send(0)
        end.wait()
        for tensor in tensors.values():
            tensor.mul_(1.01)
        before = [frame.clone() for frame in end._frames.values()]
        if fault == "sends old pieces":
            end._copies = CopyList()
        if fault == "sends an old frame":
            start = end._start
            for frame, old in zip(end._frames.values(), before, strict=True):
                end._start = lambda header, f=frame, o=old: (f.copy_(o), start(header))  # type: ignore
        end.send(1)
        end.wait()
    elif end is not None:
        assert end.receive() == 0
        end.wait()
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        (slot,) = end._slots
        if fault == "does not write a piece":
            slot.copies.targets.pop(), slot.copies.sources.pop()
        copy = slot.copies.run

        def write() -> None:
            copy()
            if fault == "writes half a piece":
                held, before = tensors["layers.0.down"].view(-1), kept["layers.0.down"].view(-1)
                held[len(held) // 2 :] = before[len(held) // 2 :]
            if fault == "swaps two layers":
                one, two = (tensors[f"layers.{block}.gate_up"] for block in range(2))
                one.copy_(two.clone()), two.copy_(kept["layers.0.gate_up"] * 1.01)
            if fault == "rounds values":
                tensors["head"].copy_(tensors["head"].bfloat16())

        end._slots = [slot._replace(copies=SimpleNamespace(run=write))]  # type: ignore[arg-type]
        try:
            end.receive()
        except WeightMismatch as error:
            return str(error)
    return ""


def _spoil_in_turn() -> dict[str, str]:
    return {fault: _spoil("fsdp2@0-1", "dp1@2", fault) for fault in FAULTS}


def test_a_fault_at_any_stage_of_a_stream_is_found_before_the_version_is_used(workers: WorkerPool) -> None:
    errors = workers.run(_spoil_in_turn, world_size=3, deadline_s=60.0)[2]
    for fault, words in FAULTS.items():
        assert re.search(words, errors[fault]), (fault, errors[fault])
