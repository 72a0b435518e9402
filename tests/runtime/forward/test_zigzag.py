"""Tokens of packed rows that groups of ranks are dealt."""

from __future__ import annotations

import itertools

import pytest

from lightning_realloc.runtime.forward.zigzag import QueryPiece, deal_zigzag

ROWS = {
    "one long sequence": ((4_001,), (0,)),
    "two of one token": ((1, 1), (0, 0)),
    "many lengths": ((700, 1, 33, 512, 2, 90), (0,) * 6),
    "responses to shared prompts": ((600, 900, 40, 300, 350), (0, 400, 400, 0, 280)),
}
GROUPS = (1, 2, 3, 5)


@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("row", ROWS)
def test_every_token_is_dealt_once_and_groups_get_as_many(row: str, num_groups: int) -> None:
    lengths, shared = ROWS[row]
    dealt = deal_zigzag(lengths, shared, num_groups)
    tokens = [[token for piece in pieces for token in piece.tokens] for pieces in dealt]
    assert sorted(itertools.chain.from_iterable(tokens)) == list(range(sum(lengths)))
    assert all(own == sorted(own) for own in tokens)
    assert max(map(len, tokens)) - min(map(len, tokens)) <= 1
    assert max(map(len, tokens)) == -(-sum(lengths) // num_groups)


@pytest.mark.parametrize(("window", "bound"), [(None, 1.1), (300, 1.3)])  # a window half as long as a sequence: worst
@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("row", ["one long sequence", "many lengths", "responses to shared prompts"])
def test_causal_attention_costs_each_group_the_same(
    row: str, num_groups: int, window: int | None, bound: float
) -> None:
    costs = [sum(seen_by(piece, window) for piece in pieces) for pieces in deal_zigzag(*ROWS[row], num_groups)]
    assert max(costs) <= bound * sum(costs) / num_groups


def seen_by(piece: QueryPiece, window: int | None) -> int:
    """Return the number of keys that all tokens of a piece see."""
    positions = (len(piece.prompt) + token - piece.sequence.start for token in piece.tokens)
    return sum(min(position + 1, window or position + 1) for position in positions)


def test_keys_are_those_that_a_piece_sees() -> None:
    piece = QueryPiece(range(26, 29), range(24, 30), range(10, 14))  # positions 6, 7 and 8 of ten
    assert piece.keys(window=None) == (range(10, 14), range(24, 29))
    assert piece.keys(window=4) == (range(13, 14), range(24, 29))  # positions 3 to 8
    assert piece.keys(window=2) == (range(14, 14), range(25, 29))  # positions 5 to 8
    assert piece.keys(window=2, is_causal=False) == (range(10, 14), range(24, 30))
