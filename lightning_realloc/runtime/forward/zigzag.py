"""Deal the tokens of a packed row to groups of ranks so that causal attention costs each group the same (zigzag).

Of every sequence, a group gets one run of tokens from the front, which see few tokens, and one from the back. Pure.

Source: Zhu, https://github.com/zhuzilin/ring-flash-attention/issues/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryPiece:
    """Adjacent tokens of one sequence. All ranges are of places in the row."""

    tokens: range
    """The tokens, which are queries of attention."""
    sequence: range
    """Tokens of the sequence in the row, without a shared prompt."""
    prompt: range = range(0)
    """Shared prompt tokens that the sequence sees."""

    def keys(self, *, window: int | None, is_causal: bool = True) -> tuple[range, range]:
        """Return the tokens that any of these sees: of the shared prompt, and of the sequence itself.

        Args:
            window: Number of last tokens that each token sees, itself included. None means all.
        """
        if not is_causal:
            return self.prompt, self.sequence
        before = len(self.prompt) + self.tokens.start - self.sequence.start
        hidden = 0 if window is None else max(0, before - window + 1)
        start = self.sequence.start + max(0, hidden - len(self.prompt))
        return self.prompt[hidden:], range(start, self.tokens.stop)


def deal_zigzag(lengths: Sequence[int], shared: Sequence[int], num_groups: int) -> tuple[tuple[QueryPiece, ...], ...]:
    """Return the pieces of every group, in the order of the row. Numbers of tokens differ by at most one.

    Sequences that are shorter than the shared prompt they see have no cheap front: a group gets one run of these.

    Args:
        lengths: Tokens of each sequence in the row.
        shared: Shared prompt tokens that each sequence sees. The last sequence before it with a 0 holds them.
    """
    dealt: list[list[QueryPiece]] = [[] for _ in range(num_groups)]
    begin = owner = 0
    for length, num_shared in zip(lengths, shared, strict=True):
        owner = owner if num_shared else begin
        sequence, prompt = range(begin, begin + length), range(owner, owner + num_shared)
        place = begin
        for group, size in _turns(begin, length, num_groups, halved=num_shared < length):
            if size:
                dealt[group].append(QueryPiece(range(place, place + size), sequence, prompt))
            place += size
        begin += length
    return tuple(map(tuple, dealt))


def _turns(begin: int, length: int, num_groups: int, *, halved: bool) -> list[tuple[int, int]]:
    """Return groups and their numbers of tokens along a sequence: 0, 1, …, 1, 0 if ``halved``, else 0, 1, …"""
    groups = range(num_groups)
    sizes = [_dealt(begin + length, group, num_groups) - _dealt(begin, group, num_groups) for group in groups]
    # The last group's runs are neighbours.
    fronts = [size // 2 if halved and group < num_groups - 1 else size for group, size in enumerate(sizes)]
    backs = [(group, size - front) for group, (size, front) in enumerate(zip(sizes, fronts, strict=True))]
    return [*enumerate(fronts), *reversed(backs)]


def _dealt(num_tokens: int, group: int, num_groups: int) -> int:
    """Return how many of the first tokens of a row a group has, as if they were dealt one by one."""
    return (num_tokens + num_groups - 1 - group) // num_groups
