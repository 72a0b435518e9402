"""Divide the rows of packs over context-parallel ranks, which exchange tokens for heads and keys inside attention.

Each rank runs the layers of a model on its slice of a row. Where all ranks can divide the heads, slices are contiguous,
and attention itself is that of one rank. Else ranks are dealt tokens in a zigzag, so that causal attention costs each
the same. Values per token are joined to whole rows, and a loss is computed on every rank alike. The gradient of a
parameter is then the part of the rank's tokens; FSDP adds the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.peer_group import PeerGroup, SumOverRanks
from lightning_realloc.runtime.forward.zigzag import QueryPiece, deal_zigzag
from lightning_realloc.runtime.model.batching_limits import rotary_bounds
from lightning_realloc.runtime.model.image_inputs import image_blocks, placeholder_ids


class TokenGroup(PeerGroup):
    """The ranks that divide the tokens of each row, in the layout's order.

    ``head_shares`` neighbours hold the queries of the same tokens in attention, each of other heads. There are
    ``row_shares`` such runs of neighbours, with other tokens' queries. Each rank reads the keys of the whole row.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, *, head_shares: int
    ) -> None:
        super().__init__(process_group, ranks, rank)
        self.head_shares = head_shares
        self._last: tuple[object, RowDivision] | None = None

    @property
    def row_shares(self) -> int:
        """Number of runs of ranks with queries of other tokens."""
        return self.size // self.head_shares

    @property
    def head_share(self) -> int:
        """Share of the heads that this rank attends with."""
        return self.index % self.head_shares

    @property
    def row_share(self) -> int:
        """Share of a row's queries that this rank attends with."""
        return self.index // self.head_shares

    @property
    def row_peers(self) -> range:
        """Positions in the group of the ranks with the same share of the row."""
        first = self.row_share * self.head_shares
        return range(first, first + self.head_shares)

    def divide(self, packed: PackedBatch) -> RowDivision:
        """Return how the ranks divide the row of a pack; the same object as long as the row stays the same."""
        key = packed.lengths, packed.shared, packed.input_ids.device
        if self._last is None or self._last[0] != key:
            self._last = key, RowDivision(self, *key)
        return self._last[1]


@dataclass(frozen=True, slots=True)
class PieceKeys:
    """Keys that the pieces of a rank's queries read, one piece after another."""

    places: Tensor
    """(S,) places in the ranks' slices, one slice after another."""
    counts: list[int]
    """Keys of each piece."""
    firsts: list[int]
    """Position of each piece's first query among its keys."""
    key_ends: Tensor
    """(pieces + 1,) int32 cumulative numbers of keys."""
    query_ends: Tensor
    """(pieces + 1,) int32 cumulative numbers of queries."""


class RowDivision:  # no dataclass, as FSDP copies these
    """The slice of a row that each rank of a group holds. The last slices may end with padding."""

    def __init__(
        self, group: TokenGroup, lengths: tuple[int, ...], shared: tuple[int, ...], device: torch.device
    ) -> None:
        self.group, self.num_tokens = group, sum(lengths)
        self.slice_length = -(-self.num_tokens // group.size)
        """Tokens that each rank runs, padding included."""
        self.pieces: tuple[QueryPiece, ...] = ()
        """Queries of this rank's share of the row, in order. (): all, as ranks divide heads alone."""
        self.num_queries = self.num_tokens
        self._order: Tensor | None = None
        self._places: Tensor | None = None
        self._keys: dict[tuple[int | None, bool], PieceKeys] = {}
        if group.row_shares > 1:
            self._deal(lengths, shared, device)

    def _deal(self, lengths: tuple[int, ...], shared: tuple[int, ...], device: torch.device) -> None:
        dealt = deal_zigzag(lengths, shared, self.group.row_shares)
        places = torch.empty(self.num_tokens, dtype=torch.int64)
        for share, pieces in enumerate(dealt):
            first = share * self.group.head_shares * self.slice_length
            held = _joined([piece.tokens for piece in pieces])
            places[held] = torch.arange(first, first + len(held))
            if share == self.group.row_share:
                start = (self.group.index % self.group.head_shares) * self.slice_length
                self._order = held[start : start + self.slice_length].to(device, non_blocking=True)
        self._places = places.to(device, non_blocking=True)
        # A share without tokens attends with padding, as its ranks take part in exchanges of both passes.
        self.pieces = dealt[self.group.row_share] or (QueryPiece(range(1), range(1)),)
        self.num_queries = sum(len(piece.tokens) for piece in self.pieces)

    def places(self, row: Tensor) -> Tensor:
        """Return places in the slices of all ranks, one after another, for those in the row."""
        return row if self._places is None else self._places[row]

    def keys(self, *, window: int | None, is_causal: bool) -> PieceKeys:
        """Return the keys that this rank's pieces read in a layer."""
        found = self._keys.get((window, is_causal))
        if found is None:
            assert self._places is not None, "heads are divided alone"
            ranges = [piece.keys(window=window, is_causal=is_causal) for piece in self.pieces]
            counts = [len(prompt) + len(own) for prompt, own in ranges]
            queries, device = [len(piece.tokens) for piece in self.pieces], self._places.device
            found = self._keys[window, is_causal] = PieceKeys(
                self.places(_joined(list(itertools.chain.from_iterable(ranges))).to(device)),
                counts,
                [
                    len(prompt) + piece.tokens.start - own.start
                    for piece, (prompt, own) in zip(self.pieces, ranges, strict=True)
                ],
                _ends(counts).to(device),
                _ends(queries).to(device),
            )
        return found

    def cut(self, row: Tensor) -> Tensor:
        """Return this rank's (n, ...) slice of the (N, ...) values of a row, padded with zeros."""
        first = self.group.index * self.slice_length
        own = row[first : first + self.slice_length] if self._order is None else row[self._order]
        return F.pad(own, (0, 0) * (row.ndim - 1) + (0, self.slice_length - len(own)))

    def own(self, row: Tensor) -> Tensor:
        """Return a mask of the places in the row that are in this rank's slice."""
        return self.places(row) // self.slice_length == self.group.index

    def local(self, row: Tensor) -> Tensor:
        """Return the places in this rank's slice of places in the row that are in it."""
        return self.places(row) - self.group.index * self.slice_length

    def join(self, values: Tensor) -> Tensor:
        """Return the (N, ...) values of a row from each rank's (n, ...). A rank gets the gradient of its own values.

        The gradient of the result must be the same on every rank, as that of a loss which all compute.
        """
        return cast(Tensor, _JoinSlices.apply(values, self))

    def gather(self, values: Tensor) -> Tensor:
        """Return the (N, ...) values of a row from each rank's (n, ...), without gradients."""
        every = self.group.gather(values).flatten(0, 1)
        return every[: self.num_tokens] if self._places is None else every[self._places]


def _joined(ranges: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(one.start, one.stop) for one in ranges]) if ranges else torch.empty(0).long()


def _ends(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def token_group(model: PreTrainedModel) -> TokenGroup | None:
    """Return the ranks that divide the tokens of every row; None if the model runs on whole rows."""
    found: TokenGroup | None = vars(model).get("token_group")
    return found


def row_division(model: PreTrainedModel, packed: PackedBatch) -> RowDivision | None:
    """Return how ranks divide the row of a pack; None if the model runs on whole rows."""
    tokens = token_group(model)
    return None if tokens is None else tokens.divide(packed)


def refuse_undivided(model: PreTrainedModel, packed: PackedBatch, tokens: TokenGroup) -> None:
    """Raise ConfigError for inputs of which a layer needs more than a rank's slice outside of attention."""
    name = type(model).__name__
    others = sorted(name for name in packed.extras if "video" in name or not placeholder_ids(model))
    if others:
        raise ConfigError(
            f"{name} gets the further inputs {others}, and cp={tokens.size} divides token ids and images alone; "
            f"give the call a layout with cp=1"
        )
    if packed.extras and tokens.row_shares > 1 and image_blocks(model, packed.input_ids[0]) is not None:
        raise ConfigError(
            f"{name} lets the tokens of an image see later ones, and cp={tokens.size} divides the queries of a row "
            f"over {tokens.row_shares} ranks, which look back only; give the call a layout whose cp and tp together "
            f"divide the heads, or one with cp=1"
        )
    for kind, original in rotary_bounds(model.config):
        if packed.max_length > original:
            raise ConfigError(
                f"{name} has a {kind} rotary embedding whose frequencies depend on the row's longest sequence beyond "
                f"{original} tokens, and cp={tokens.size} divides the row ({packed.max_length} tokens); give the call "
                f"a layout with cp=1, or keep prompt and response within {original} tokens"
            )


def sum_values(values: Tensor, group: TokenGroup) -> Tensor:
    """Return the sum of the ranks' values, of which each has its own and zeros. The gradient is that of
    `RowDivision.join`."""
    return cast(Tensor, SumOverRanks.apply(values, group))


class _JoinSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, division: RowDivision) -> Tensor:
        ctx.division = division
        return division.gather(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return ctx.division.cut(gradient), None
