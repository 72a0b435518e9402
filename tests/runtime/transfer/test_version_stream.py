"""Versions that arrive in the background are the sender's weights of that moment, in every pair of layouts."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import WeightMismatch
from lightning_realloc.layout import ModelLayout
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.runtime.transfer.point_to_point import CopyList
from lightning_realloc.runtime.transfer.version_stream import VersionReceiver, VersionSender
from tests.matrices import matrix
from tests.runtime.transfer.reallocation_cases import full_tensors, lay_out, local_reference
from tests.workers import WorkerFailure, WorkerPool

PAIRS = [
    ("dp2@0-1", "tp2@2-3"), ("fsdp2@0-1", "dp2@2-3"), ("tp2@1,0", "tp2@3,2"), ("pp2@0-1", "dp1@3"), ("dp1@2", "dp1@0"),
    ("tp2@2-3", "dp2@0-1"), ("fsdp3@0-2", "dp1@3"),
]  # fmt: skip


def _ends(
    source_text: str, target_text: str, dtype: torch.dtype
) -> tuple[ModelLayout, dict[str, torch.Tensor], VersionSender | VersionReceiver | None]:
    """Return the target layout, this rank's tensors and its end of a stream."""
    rank, source, target = dist.get_rank(), lay_out(source_text), lay_out(target_text)
    plan = plan_reallocation(source, target, element_bytes=dtype.itemsize, rank=rank)
    group = dist.new_group(backend="gloo")
    if rank in source.layout:
        tensors = local_reference(full_tensors(source.model), source, rank)
        return target, tensors, VersionSender(plan, tensors, dtype=dtype, group=group, tag=2)
    if rank in target.layout:
        tensors = {name: torch.zeros(target.local_shape(name, rank)) for name in target.names(rank)}
        return target, tensors, VersionReceiver(plan, tensors, dtype=dtype, group=group, tag=2)
    return target, {}, None


def _send_three_versions(source_text: str, target_text: str, dtype: torch.dtype) -> None:
    """Change the weights right after each version was sent: each arrives as it was."""
    target, tensors, end = _ends(source_text, target_text, dtype)
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


@pytest.mark.parametrize(("source", "target"), matrix(PAIRS, PAIRS[0], PAIRS[2], PAIRS[3], PAIRS[6]))
def test_every_version_arrives_as_it_was_sent(workers: WorkerPool, source: str, target: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        workers.run(_send_three_versions, source, target, dtype, deadline_s=60.0)


def _wait_for_a_busy_receiver() -> float:
    """Send two versions to a rank that does not ask for a while; return the seconds that the second one waited."""
    _, _, end = _ends("dp1@0", "dp1@1", torch.float32)
    if isinstance(end, VersionSender):
        end.send(0)
        begin = time.monotonic()
        end.send(1)
        seconds = time.monotonic() - begin
        end.close()
        return seconds
    if end is not None:
        time.sleep(0.5)
        assert [end.receive(), end.receive(), end.receive()] == [0, 1, None]
    return 0.0


def test_a_sender_waits_until_the_version_before_was_received(workers: WorkerPool) -> None:
    waited = workers.run(_wait_for_a_busy_receiver, world_size=2, deadline_s=60.0)[0]
    assert waited > 0.3


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
    "announces an old version": "a source rank sent version 0",
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
        if fault in ("sends an old frame", "announces an old version"):
            start = end._start
            for frame, old in zip(end._frames.values(), before, strict=True):
                if fault == "sends an old frame":
                    end._start = lambda v, frames, f=frame, o=old: (f.copy_(o), start(v, frames))  # type: ignore
                else:
                    end._start = lambda v, frames: start(0, frames)  # type: ignore[method-assign]
        end.send(1)
        end.wait()
    elif end is not None:
        assert end.receive() == 0
        end.wait()
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        if fault == "does not write a piece":
            end._copies.targets.pop(), end._copies.sources.pop()
        copy = end._copies.run

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

        end._copies = SimpleNamespace(run=write)
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
