"""Deliver the weights of a plan to each host once: messages into memory that its ranks share, and the readers of each.

A plan between nodes sends each box to one rank of a node, which sends it on to others. Ranks that generate have no time
for that. So the box lands in the node's memory, and the others read it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_realloc.realloc.plan import ReallocationPlan, Transfer


@dataclass(frozen=True, slots=True)
class Message:
    """The boxes that one rank sends to another one."""

    sender: int
    receiver: int
    transfers: tuple[Transfer, ...] = field(repr=False)
    """In an order that both ranks know."""


@dataclass(frozen=True, slots=True)
class HostDelivery:
    """Messages to the ranks of one node, and the boxes of them that each rank reads."""

    readers: tuple[int, ...]
    """Ranks that read in the same memory, ascending."""
    messages: tuple[Message, ...]
    """Messages into this memory, by receiver and sender."""
    reads: tuple[dict[int, tuple[int, ...]], ...]
    """For each message: index of a transfer -> first index of its box in this rank's tensor."""


def plan_delivery(plan: ReallocationPlan, rank: int) -> HostDelivery:
    """Return the messages to the node of ``rank``, a rank of the target and not of the source.

    Each rank reads alone, only its own messages, on a node inside which nothing is sent on.
    """
    node_of = dict(plan.nodes)
    near = tuple(other for other in sorted(plan.target.layout.ranks) if node_of[other] == node_of[rank])
    received = [each for other in near for each in plan.share(other).transfers if each.receiver == other]
    readers = near if any(each.hop for each in received) else (rank,)
    by_pair: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in received:
        if transfer.hop == 0 and transfer.receiver in readers:
            by_pair.setdefault((transfer.receiver, transfer.sender), []).append(transfer)
    messages = tuple(
        Message(sender, receiver, tuple(transfers)) for (receiver, sender), transfers in sorted(by_pair.items())
    )
    # A box is known by its place in the tensor of the rank that receives it.
    passed_on = {
        (each.sender, each.param, each.sender_offset): each.receiver_offset
        for each in received
        if each.hop == 1 and each.receiver == rank
    }

    def read(message: Message) -> dict[int, tuple[int, ...]]:
        if message.receiver == rank:
            return {index: each.receiver_offset for index, each in enumerate(message.transfers)}
        keys = ((message.receiver, each.param, each.receiver_offset) for each in message.transfers)
        return {index: passed_on[key] for index, key in enumerate(keys) if key in passed_on}

    return HostDelivery(readers, messages, tuple(map(read, messages)))


def messages_from(plan: ReallocationPlan, rank: int) -> tuple[Message, ...]:
    """Return the messages that ``rank``, whose transfers the plan lists, sends from its source tensors, by receiver."""
    by_receiver: dict[int, list[Transfer]] = {}
    for transfer in plan.transfers:
        if transfer.sender == rank != transfer.receiver and transfer.hop == 0:
            by_receiver.setdefault(transfer.receiver, []).append(transfer)
    return tuple(Message(rank, receiver, tuple(sent)) for receiver, sent in sorted(by_receiver.items()))


def sends_on(plan: ReallocationPlan) -> bool:
    """Return whether ranks of a node need boxes that another one of its ranks receives."""
    return any(route.hop for family in plan.families for route, _ in family.moves())
