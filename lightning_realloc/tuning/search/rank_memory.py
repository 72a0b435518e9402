"""Peak bytes of the fullest rank under a joint choice of plans, from the bytes of each call's option.

Ranks that run the same calls form a group, and have the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from lightning_realloc.tuning.search.options import SearchedCall, State


def peak_and_idle(
    calls: Sequence[SearchedCall], state: State, num_devices: int, offload: frozenset[str]
) -> tuple[int, int]:
    """Return the peak bytes of the fullest rank, and the number of ranks without a call.

    For an incomplete state, the bytes are a lower bound.
    """
    groups, idle = _call_groups(tuple(0 if chosen is None else chosen.ranks.mask for chosen in state), num_devices)
    resident = _resident_bytes(calls, state)
    most = 0
    for group in groups:
        if offload:
            most = max(most, _peak_with_offload(calls, group, state, resident, offload))
        else:
            active = max(chosen.option.active_bytes for i in group if (chosen := state[i]) is not None)
            most = max(most, sum(resident[i] for i in group) + active)
    return most, idle


@lru_cache(maxsize=20_000)
def _call_groups(masks: tuple[int, ...], num_devices: int) -> tuple[list[tuple[int, ...]], int]:
    """Return the calls of each group of ranks that run the same calls, and the number of ranks without a call.

    Args:
        masks: The ranks of every call as bits.
    """
    atoms: list[tuple[int, tuple[int, ...]]] = [((1 << num_devices) - 1, ())]
    for i, mask in enumerate(masks):
        inside = [(atom & mask, (*calls, i)) for atom, calls in atoms if atom & mask]
        atoms = inside + [(atom & ~mask, calls) for atom, calls in atoms if atom & ~mask]
    return [calls for _, calls in atoms if calls], sum(atom.bit_count() for atom, calls in atoms if not calls)


def _resident_bytes(calls: Sequence[SearchedCall], state: State) -> list[int]:
    """Return the bytes that each call's layout keeps between calls; a replica that several calls use counts once."""
    resident: list[int] = []
    copies: set[tuple[str, int]] = set()
    for call, chosen in zip(calls, state, strict=True):
        home = state[call.home]
        if chosen is None or home is None:
            resident.append(0)
        elif home is chosen:
            resident.append(chosen.option.resident_bytes)
        else:
            place = (call.owner, chosen.layout)
            is_copied = chosen.layout != home.layout or chosen.option.is_copied
            resident.append(chosen.option.resident_bytes if is_copied and place not in copies else 0)
            if is_copied:
                copies.add(place)
    further = (0 if chosen is None else chosen.option.further_bytes for chosen in state)
    return [own + more for own, more in zip(resident, further, strict=True)]


def _peak_with_offload(
    calls: Sequence[SearchedCall], group: Sequence[int], state: State, resident: Sequence[int], offload: frozenset[str]
) -> int:
    """Return a rank's peak if offloaded roles are on the device only in their calls and in the call before each."""
    roles = [calls[i].role for i in group]
    stays = sum(resident[i] for i, role in zip(group, roles, strict=True) if role not in offload)
    most = 0
    for index, i in enumerate(group):
        present = {roles[index]}
        if None not in state:  # in an incomplete state other calls may come in between
            present.add(roles[(index + 1) % len(group)])
        back = sum(resident[j] for j, role in zip(group, roles, strict=True) if role in offload and role in present)
        chosen = state[i]
        most = max(most, stays + back + (0 if chosen is None else chosen.option.active_bytes))
    return most
