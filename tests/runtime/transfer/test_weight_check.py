"""Every rank that does not hold the source's weights after they moved raises an error, and no other rank does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import WeightMismatch
from lightning_realloc.layout import ModelLayout
from lightning_realloc.realloc.planner import plan_reallocation
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.runtime.transfer.weight_check import WeightCheck, WeightSubject
from tests.matrices import matrix
from tests.runtime.transfer.reallocation_cases import full_tensors, lay_out, local_reference
from tests.workers import WorkerPool

LAYOUTS = (
    "fsdp4", "fsdp2.tp2", "dp2.fsdp2", "dp2.tp2@0,2,1,3", "dp4", "tp4", "tp2@2-3", "dp1@1", "fsdp2@0-1", "pp2.dp2",
    "pp2.fsdp2@3,1,2,0", "pp2.tp2", "tp2@1,0", "fsdp3@1-3",
)  # fmt: skip
Tensors = dict[str, Tensor]
Fault = Callable[[Tensors, Tensors, Tensors, random.Random], None]
"""Spoils the first tensors, which replaced the second ones; the third are another rank's."""


def after_a_step(full: Tensors, version: int) -> Tensors:
    """Return weights after an optimizer step that changes every element, also in bfloat16."""
    generator = torch.Generator().manual_seed(100 + version)
    return {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in full.items()}


# --- faults: of one rank's target -------------------------------------------------------------------------------------


def keep_all(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    for name, tensor in held.items():
        tensor.copy_(before[name])


def keep_one(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(held))
    held[name].copy_(before[name])


def keep_second_half(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(held))
    middle = held[name].numel() // 2
    held[name].view(-1)[middle:] = before[name].reshape(-1)[middle:]


def keep_first_row(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(held))
    held[name][:1] = before[name][:1]


def keep_last_column(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(held))
    held[name][..., -1:] = before[name][..., -1:]


def hold_those_of_another_rank(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    names = [n for n in sorted(held) if n in other and other[n].shape == held[n].shape and held[n].numel()]
    names = [name for name in names if not torch.equal(other[name].to(held[name].dtype), held[name])]
    for name in names[:1]:
        held[name].copy_(other[name])


def round_values(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(held))
    rounded = held[name].bfloat16().to(held[name].dtype)
    held[name].copy_(rounded)


def swap_layers(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    pairs = [(name, name.replace("layers.0", "layers.1")) for name in sorted(held) if name.startswith("layers.0")]
    pairs = [(one, two) for one, two in pairs if two in held and held[one].numel()]
    for one, two in rng.sample(pairs, min(1, len(pairs))):
        first = held[one].clone()
        held[one].copy_(held[two])
        held[two].copy_(first)


def zero(held: Tensors, before: Tensors, other: Tensors, rng: random.Random) -> None:
    name = rng.choice(sorted(held))
    held[name].zero_()


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        keep_all, keep_one, keep_second_half, keep_first_row, keep_last_column, hold_those_of_another_rank,
        round_values, swap_layers, zero,
    )
}  # fmt: skip


# --- simulated ranks: any two layouts ---------------------------------------------------------------------------------


class Ranks:
    """The checks of all ranks of a reallocation in one process."""

    def __init__(self, source: ModelLayout, target: ModelLayout, dtype: torch.dtype, *, is_sampled: bool) -> None:
        plan = plan_reallocation(source, target)
        self.before = full_tensors(source.model)
        self.after = after_a_step(self.before, 1)
        self.target, self.dtype = target, dtype
        self.held = {rank: self.shards(self.after, rank) for rank in plan.ranks}
        self.checks = {
            rank: WeightCheck(
                plan, local_reference(self.after, source, rank), self.held[rank], (),
                subject=WeightSubject("actor", source.layout, target.layout, rank, "push"),
                dtype=dtype, device=torch.device("cpu"), is_sampled=is_sampled,
            )
            for rank in plan.ranks
        }  # fmt: skip

    def shards(self, full: Tensors, rank: int) -> Tensors:
        return {name: t.to(self.dtype) for name, t in local_reference(full, self.target, rank).items()}

    def run(self, version: int = 1, *, stale: int | None = None) -> dict[int, str]:
        """Return rank -> its error; ``stale`` has the version before."""
        versions = {rank: version - (rank == stale) for rank in self.checks}
        sent = {rank: check.messages(versions[rank]) for rank, check in self.checks.items()}
        errors = {}
        for rank, check in self.checks.items():
            arrived = {sender: messages[rank] for sender, messages in sent.items() if rank in messages}
            try:
                check.compare(versions[rank], arrived)
            except WeightMismatch as error:
                errors[rank] = str(error)
        return errors


@pytest.mark.parametrize("seed", matrix(range(30), 0, 1))
def test_every_fault_between_any_two_layouts_is_found_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    source, target = rng.choice(LAYOUTS), rng.choice(LAYOUTS)
    dtype = rng.choice((torch.bfloat16, torch.float32))
    ranks = Ranks(lay_out(source), lay_out(target), dtype, is_sampled=seed % 2 == 0)
    assert ranks.run(1) == {}
    for name, fault in FAULTS.items():
        victim, other = rng.choice(ranks.target.layout.ranks), rng.choice(ranks.target.layout.ranks)
        held, right = ranks.held[victim], {key: tensor.clone() for key, tensor in ranks.held[victim].items()}
        fault(held, ranks.shards(ranks.before, victim), ranks.shards(ranks.after, other), rng)
        wrong = [key for key in right if not torch.equal(held[key], right[key])]
        errors = ranks.run(2)
        assert set(errors) == ({victim} if wrong else set()), (name, victim)
        for message in errors.values():
            assert any(repr(key) in message for key in wrong)
            for words in (f"rank {victim} ", "version 2 ", "of actor", str(ranks.target.layout), "transport='direct'"):
                assert words in message
        for key, tensor in right.items():
            held[key].copy_(tensor)
    assert ranks.run(3) == {}


@pytest.mark.parametrize(("source", "target"), [("fsdp4", "tp4"), ("tp2@0-1", "pp2.dp2"), ("dp4", "fsdp2.tp2")])
def test_a_stale_version_is_an_error_though_the_values_are_equal(source: str, target: str) -> None:
    ranks = Ranks(lay_out(source), lay_out(target), torch.float32, is_sampled=True)
    for stale in ranks.checks:
        errors = ranks.run(7, stale=stale)
        peers = {peer for peer in ranks.checks if peer != stale}
        needs_others = set(ranks.checks[stale]._received) - {stale}
        assert (stale in errors) == bool(needs_others)
        assert set(errors) - {stale} == {peer for peer in peers if stale in ranks.checks[peer]._received}
        assert all("version 6" in message and "version 7" in message for message in errors.values())
    assert ranks.run(8) == {}


def test_weights_that_are_no_numbers_are_no_false_alarm() -> None:
    source, target = lay_out("fsdp2@0-1"), lay_out("tp2@2-3")
    ranks = Ranks(source, target, torch.bfloat16, is_sampled=False)
    for rank in (0, 1):
        for _, tensors in ranks.checks[rank]._given._families:
            torch._foreach_mul_(tensors, float("nan"))
    for held in ranks.held.values():
        for tensor in held.values():
            tensor.copy_(torch.full(tensor.shape, 0x7FC1, dtype=torch.int16).view(torch.bfloat16))
    assert ranks.run() == {}


# --- real ranks: at every stage of both transports --------------------------------------------------------------------


def _spoil_stages(source_text: str, target_text: str, transport: str, dtype: torch.dtype) -> dict[str, str]:
    """Leave out each copy and each message of a run on each rank, one at a time; return problems by stage."""
    rank, source, target = dist.get_rank(), lay_out(source_text), lay_out(target_text)
    full = full_tensors(source.model)
    held = local_reference(full, source, rank)
    there = Reallocation(
        source, held, target, rank=rank, world_size=4, dtype=dtype, device="cpu", deadline_s=30.0,
        transport=transport, pack_below_bytes=100, role="actor",
    )  # fmt: skip
    there.run(0)
    problems, version = {}, 0

    def step() -> None:
        nonlocal version
        version += 1
        for name, tensor in local_reference(after_a_step(full, version), source, rank).items():
            held[name].copy_(tensor)

    for victim in range(4):
        lists = _copy_lists(there) if rank == victim else {}
        for stage in _names_on(victim, lists):
            step()
            undo = lists[stage]() if rank == victim else None
            found = _run(there, version)
            if undo is not None:
                undo()
            if not any(found):
                problems[f"rank {victim}, {stage}"] = "not found"
            step()
            if any(found := _run(there, version)):
                problems[f"rank {victim}, {stage}, later"] = str(found)
    return problems


def _run(there: Reallocation, version: int) -> list[bool]:
    """Return which ranks raise a mismatch."""
    try:
        there.run(version)
        mine = False
    except WeightMismatch:
        mine = True
    answers = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(answers, torch.tensor([float(mine)]))
    return [bool(answer) for answer in answers]


def _names_on(victim: int, lists: dict[str, Any]) -> list[str]:
    names: list[Any] = [list(lists)]
    dist.broadcast_object_list(names, victim)
    return list(names[0])


def _copy_lists(there: Reallocation) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return stage -> function that leaves out its last copy, or diverts its last message, and returns how to undo."""
    bound: Any = there._transport
    if bound is None:
        return {}
    stages: dict[str, Any] = {}
    for name in ("_copies", "_kept", "_forwards"):
        if getattr(bound, name, None) is not None:
            stages[name] = getattr(bound, name)
    for number, round_ in enumerate(bound._messages._rounds if bound._messages else ()):
        stages |= {f"before {number}": round_.before, f"after {number}": round_.after}
    found = {name: (lambda copies=copies: _leave_out(copies)) for name, copies in stages.items() if copies.targets}
    for number, round_ in enumerate(bound._messages._rounds if bound._messages else ()):
        if round_.receives:
            found[f"receive {number}"] = lambda round_=round_: _divert(round_.receives)
        if round_.sends:
            found[f"send {number}"] = lambda round_=round_: _divert(round_.sends)
    return found


def _leave_out(copies: Any) -> Callable[[], None]:
    target, source = copies.targets.pop(), copies.sources.pop()
    return lambda: copies.add(target, source)


def _divert(messages: list[tuple[Tensor, int]]) -> Callable[[], None]:
    """Use another buffer with the same content: a message that arrives elsewhere, or is sent as it was before."""
    tensor, peer = messages[-1]
    messages[-1] = (tensor.clone(), peer)

    def undo() -> None:
        messages[-1] = (tensor, peer)

    return undo


STAGES = [
    ("fsdp4", "tp4", "push", torch.bfloat16), ("fsdp4", "dp2.tp2@0,2,1,3", "direct", torch.bfloat16),
    ("tp2@0-1", "pp2@2-3", "direct", torch.float32), ("tp4", "pp2.dp2", "push", torch.float32),
    ("dp4", "dp4", "push", torch.bfloat16), ("dp4", "dp4", "direct", torch.bfloat16),
    ("pp2.fsdp2@3,1,2,0", "fsdp2.tp2", "direct", torch.float32), ("dp1@1", "dp4", "push", torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "transport", "dtype"), matrix(STAGES, *STAGES[:2]))
def test_a_copy_or_message_left_out_at_any_stage_is_found(
    workers: WorkerPool, source: str, target: str, transport: str, dtype: torch.dtype
) -> None:
    for problems in workers.run(_spoil_stages, source, target, transport, dtype, deadline_s=120.0):
        assert problems == {}
