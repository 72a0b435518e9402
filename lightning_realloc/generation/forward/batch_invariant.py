"""Forwards whose results do not depend, to the last bit, on the other tokens that are computed with them.

The shape of a product decides the order in which a kernel adds, and so how a result rounds. So every forward here has
the same shape: a tile with a fixed number of tokens, the last one repeated where there are fewer. Each token attends to
its sequence in blocks of a fixed number of positions, one after the other. Blocks after a token change nothing about
it: they add exact zeros.

A row of a product must not depend on its place in the tile either. It does not where rows are aligned: on CPU, where
the features of a layer are a multiple of 16. `check_rows` tries each product of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import KVCache, Places
from lightning_realloc.generation.forward.attention import Tile
from lightning_realloc.generation.forward.cuda_graphs import CapturedForwards
from lightning_realloc.generation.forward.packed_step import DecodeRow, PrefillChunk
from lightning_realloc.generation.forward.runner import ModelRunner, run_packed
from lightning_realloc.limits import INVARIANT_BLOCK, INVARIANT_TILE


class PlacedToken(NamedTuple):
    """A token with its place in the cache."""

    token: int
    position: int
    slot: int


class TileShape(NamedTuple):
    """Shape of a tile's forward."""

    length: int
    """Positions that each token reads, in blocks."""
    kept: int
    """Tokens with logits."""


class TileGraphs(CapturedForwards[TileShape]):
    """Runs tiles by CUDA graphs where possible, with lengths rounded up to powers of two.

    A shape is captured before its first use, so that all of its results come from the same launches.
    """

    def forward(self, tile: Tensor, shape: TileShape, forward: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return the logits (kept, V) of ``forward`` for a tile (3, T) on the host; None if no graph can run it."""
        self.was_usual = True
        if not self.is_active:
            return None
        self._follow_cache()
        graph = self._graphs.get(shape)
        if graph is None:
            self.was_usual = False
            inputs = tile.to(next(self._model.parameters()).device)
            graph = self._capture(shape, inputs, lambda: forward(inputs), num_logits=shape.kept)
            self._num_allocations = self._cache.num_allocations  # the first run of all allocates it
        if graph is None:
            return None
        graph.inputs.copy_(tile)
        graph.replay()
        return graph.logits.clone()


class BatchInvariantRunner(ModelRunner):
    """Runs a model so that each token's logits depend on its sequence alone; see the module.

    It does not suit collective forwards, as ranks have different numbers of tiles.

    Args:
        model: Model to run.
        cache: Its keys and values.
        num_slots: Number of slots.
        longest: Most positions that a slot will ever need.
        graphs: Replay tiles; None: never.

    Raises:
        GenerationError: if a product of the model rounds a row by its place.
    """

    def __init__(
        self, model: nn.Module, cache: KVCache, *, num_slots: int, longest: int, graphs: TileGraphs | None = None
    ) -> None:
        super().__init__(model, cache, num_slots=num_slots, longest=longest)
        self._captured = self._tile_graphs = graphs if graphs is not None and graphs.begin() else None
        self._size = INVARIANT_TILE.get(self._device.type, INVARIANT_TILE["default"])
        self._window = getattr(getattr(model, "config", None), "sliding_window", None)
        check_rows(model, self._size)

    def forward(self, prefills: Sequence[PrefillChunk], rows: Sequence[DecodeRow]) -> Tensor:
        slots = [len(rows), *(1 + max(one.slots, default=-1) for one in prefills)]
        ends = [1, *(row.end for row in rows), *(one.begin + len(one.tokens) for one in prefills)]
        self.make_room(max(ends), max(slots))
        read = [placed for one in prefills for placed in _placed(one.tokens, one.begin, one.slots[0])]
        drawn = [placed for slot, row in enumerate(rows) for placed in _placed(row.tokens, row.position, slot)]
        logits = [self._run_tile(tile, kept=1)[:0] for tile in self._tiles(read)]
        for one in prefills:
            self.cache.copy(one.slots[0], one.slots[1:], one.begin + len(one.tokens))
        logits += [self._run_tile(tile, kept=self._size)[: len(tile)] for tile in self._tiles(drawn)]
        return torch.cat(logits) if logits else self._run_dummy()

    def _tiles(self, tokens: Sequence[PlacedToken]) -> list[Sequence[PlacedToken]]:
        return [tokens[begin : begin + self._size] for begin in range(0, len(tokens), self._size)]

    def _run_tile(self, tokens: Sequence[PlacedToken], *, kept: int) -> Tensor:
        """Return the logits (kept, V) of the last ``kept`` tokens of a tile, which the last of ``tokens`` fills up."""
        filled = [*tokens, *[tokens[-1]] * (self._size - len(tokens))]
        tile = torch.tensor(filled).T.contiguous()  # (3, T)
        longest = 1 + max(token.position for token in tokens)
        if self._tile_graphs is not None:
            shape = TileShape(self._rounded(longest), kept)
            replayed = self._tile_graphs.forward(tile, shape, lambda placed: self._forward(placed, *shape))
            if replayed is not None:
                return replayed
        return self._forward(tile.to(self._device), longest, kept)

    def _rounded(self, longest: int) -> int:
        """Return a length that few graphs serve."""
        length = INVARIANT_BLOCK << ((longest - 1) // INVARIANT_BLOCK).bit_length()
        # Attention refuses some models beyond their window.
        return min(length, self._window) if self._window and longest <= self._window else length

    def _forward(self, tile: Tensor, longest: int, kept: int) -> Tensor:
        ids, positions, slots = tile
        # Nothing is read by slots, so their lengths do not matter. The last token may be stored several times.
        cached = self.cache.places(Places((), 0, slots, positions, self._size, row_lengths=(), max_length=1))
        step = Tile(cached, longest, tuple(self._blocks(slots, positions, longest)))
        return run_packed(self._model, ids[None], positions[None], step, kept=kept)

    def _run_dummy(self) -> Tensor:
        """Return no logits after a forward that reads and stores nothing."""
        none = torch.zeros(self._size, dtype=torch.long, device=self._device)
        cached = self.cache.places(Places((), 0, none[:0], none[:0], 0, row_lengths=(), max_length=1))
        return run_packed(self._model, none[None], none[None], Tile(cached, 1, ()), kept=1)[:0]

    def _blocks(self, slots: Tensor, positions: Tensor, longest: int) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, longest, INVARIANT_BLOCK):
            read = torch.arange(begin, begin + INVARIANT_BLOCK, device=self._device)
            # Positions after a token's own may not exist; they are masked.
            existing = torch.minimum(read, positions[:, None])
            yield self.cache.indices(slots[:, None], existing), positions[:, None] - read


def _placed(tokens: Sequence[int], begin: int, slot: int) -> list[PlacedToken]:
    return [PlacedToken(token, begin + offset, slot) for offset, token in enumerate(tokens)]


def check_invariant(model: nn.Module, *, is_collective: bool) -> None:
    """Raise GenerationError for models whose products have other shapes in another batch."""
    if is_collective:
        raise GenerationError(
            "batch_invariant=True needs other numbers of forwards on each rank, and this layout's forwards are "
            "collective; generate in a layout with fsdp=1"
        )
    experts = next((type(module).__name__ for module in model.modules() if hasattr(module, "_apply_gate")), None)
    if experts is not None:
        raise GenerationError(
            f"batch_invariant=True needs products of a fixed shape, and {experts} multiplies as many rows as tokens "
            "choose an expert; leave batch_invariant out"
        )


def check_rows(model: nn.Module, num_rows: int) -> None:
    """Raise GenerationError if a matrix of the model gives a row of ``num_rows`` other bits in another place."""
    tried = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_table = isinstance(module, nn.Embedding)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or is_table or (weight.shape, weight.dtype) in tried:
            continue
        tried.add((weight.shape, weight.dtype))
        matrix = weight.detach() if isinstance(module, nn.Linear) else weight.detach().T  # Conv1D of GPT-2
        rows = torch.randn(num_rows, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        expected = linear(rows, matrix)
        if any(not torch.equal(linear(rows.roll(by, 0), matrix), expected.roll(by, 0)) for by in (1, num_rows // 2)):
            raise GenerationError(
                f"batch_invariant=True needs products that round a row alike in each place, and {name} with "
                f"{matrix.shape[1]} input features in {str(weight.dtype).removeprefix('torch.')} does not; leave "
                "batch_invariant out, or use a model whose sizes are multiples of 16"
            )
