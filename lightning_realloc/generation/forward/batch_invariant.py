"""Forwards whose results do not depend, to the last bit, on the other tokens that are computed with them.

The shape of a product decides the order in which a kernel adds, and so how a result rounds. So every forward here has
the same shape: a tile with a fixed number of tokens, the last one repeated where there are fewer. Each token attends to
its sequence in blocks of a fixed number of positions, one after the other. Blocks after a token change nothing about
it: they add exact zeros.

A row of a product must not depend on its place in the tile either. It does not where rows are aligned: on CPU, where
the features of a layer are a multiple of 16. `check_rows` tries each product of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import KVCache, Places, Segment, StepPlaces
from lightning_realloc.generation.forward.attention import Tile
from lightning_realloc.generation.forward.packed_step import DecodeRow, PrefillChunk
from lightning_realloc.generation.forward.runner import ModelRunner, run_packed
from lightning_realloc.limits import INVARIANT_BLOCK, INVARIANT_TILE


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one sequence."""

    tokens: Sequence[int]
    begin: int
    """Position of the first token."""
    slots: tuple[int, ...]
    """Slots that store the keys and values; the first one is read."""
    is_row: bool
    """Whether logits are needed."""


def cut_into_tiles(spans: Iterable[TokenSpan], size: int) -> Iterator[list[TokenSpan]]:
    """Yield the spans in order, cut so that each tile but the last has ``size`` tokens."""
    tile: list[TokenSpan] = []
    room = size
    for span in spans:
        done = 0
        while done < len(span.tokens):
            own = span.tokens[done : done + room]
            tile.append(replace(span, tokens=own, begin=span.begin + done))
            done, room = done + len(own), room - len(own)
            if not room:
                yield tile
                tile, room = [], size
    if tile:
        yield tile


class BatchInvariantRunner(ModelRunner):
    """Runs a model so that each token's logits depend on its sequence alone; see the module.

    It takes no graphs, and does not suit collective forwards, as ranks have different numbers of tiles.

    Args:
        model: Model to run.
        cache: Its keys and values.
        num_slots: Number of slots.
        longest: Most positions that a slot will ever need.

    Raises:
        GenerationError: if a product of the model rounds a row by its place.
    """

    def __init__(self, model: nn.Module, cache: KVCache, *, num_slots: int, longest: int) -> None:
        super().__init__(model, cache, num_slots=num_slots, longest=longest)
        self._size = INVARIANT_TILE.get(self._device.type, INVARIANT_TILE["default"])
        check_rows(model, self._size)

    def forward(self, prefills: Sequence[PrefillChunk], rows: Sequence[DecodeRow]) -> Tensor:
        spans = [TokenSpan(one.tokens, one.begin, one.slots, False) for one in prefills if one.tokens]
        spans += [TokenSpan(row.tokens, row.position, (slot,), True) for slot, row in enumerate(rows)]
        spans = spans or [TokenSpan((0,), 0, (), False)]
        num_slots = max((slot for span in spans for slot in span.slots), default=-1) + 1
        self.make_room(max(span.begin + len(span.tokens) for span in spans), num_slots)
        logits = [self._run_tile(tile) for tile in cut_into_tiles(spans, self._size)]
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _run_tile(self, spans: Sequence[TokenSpan]) -> Tensor:
        """Return the logits (N, V) of the rows' tokens in one tile."""
        tokens = [token for span in spans for token in span.tokens]
        places = [span.begin + offset for span in spans for offset in range(len(span.tokens))]
        read = [(span.slots or (0,))[0] for span in spans for _ in span.tokens]
        num_tokens, longest, spare = len(tokens), max(places) + 1, self._size - len(tokens)
        padded = [[*own, *own[-1:] * spare] for own in (tokens, places, read)]
        ids, positions, slots = torch.tensor(padded, device=self._device)  # (T,) each
        cached = self._places(spans, slots[:num_tokens], positions[:num_tokens])
        is_dummy = not any(span.slots for span in spans)
        tile = Tile(cached, num_tokens, longest, () if is_dummy else tuple(self._blocks(slots, positions, longest)))
        num_rows = sum(len(span.tokens) for span in spans if span.is_row)
        logits = run_packed(self._model, ids[None], positions[None], tile, kept=self._size if num_rows else 1)
        return logits[num_tokens - num_rows : num_tokens] if num_rows else logits[:0]

    def _places(self, spans: Sequence[TokenSpan], slots: Tensor, positions: Tensor) -> StepPlaces:
        """Return the places of a tile's keys and values; prompts come before rows."""
        segments, start = [], 0
        for span in spans:
            stop = start + len(span.tokens)
            if not span.is_row:
                segments.append(Segment(start, stop, span.slots, span.begin))
            start = stop
        num_prefill = segments[-1].stop if segments else 0
        own = slice(num_prefill, None)
        # Nothing is read by slots, so their lengths do not matter.
        return self.cache.places(
            Places(tuple(segments), num_prefill, slots[own], positions[own], start - num_prefill, (), 1)
        )

    def _blocks(self, slots: Tensor, positions: Tensor, longest: int) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, longest, INVARIANT_BLOCK):
            read = torch.arange(begin, begin + INVARIANT_BLOCK, device=self._device)
            # Positions after a token's own may not exist; they are masked.
            existing = torch.minimum(read, positions[:, None])
            yield self.cache.indices(slots[:, None], existing), positions[:, None] - read


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
