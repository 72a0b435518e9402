"""Forwards whose results do not depend, to the last bit, on the other tokens that are computed with them.

The shape of a product decides the order in which a kernel adds, and so how a result rounds. So every forward here has
the same shape: a tile with a fixed number of tokens, the last token repeated where there are fewer. Each token attends
to its sequence in blocks of a fixed number of positions, one after the other. Blocks after a token add exact zeros.

Nor must a token's place in its tile matter. CPU kernels compute 16 values at a time, and what is left over in another
way. So sizes must be multiples of 16, and no more threads are used than divide all values at such multiples. The first
token of a call is tried in all places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.cache.kv_cache import KVCache, Places
from lightning_realloc.generation.core.model_config import text_config_of
from lightning_realloc.generation.core.step import DecodeRow, PrefillChunk
from lightning_realloc.generation.forward.attention import Tile, run_packed
from lightning_realloc.generation.forward.cuda_graphs import CapturedForwards
from lightning_realloc.generation.forward.latents import latent_modules
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.forward.step_shapes import within_window
from lightning_realloc.limits import INVARIANT_BLOCK, INVARIANT_TILE, THREAD_VALUES, VECTOR_VALUES
from lightning_realloc.runtime.model.batching_limits import has_experts


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

    fuses_layers = False

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

    It does not suit collective forwards, as ranks have different numbers of tiles. `forward` raises GenerationError if
    a token gets other bits in another place of a tile.
    """

    def __init__(self, model: nn.Module, cache: KVCache, **options: Any) -> None:
        """Take the arguments of `ModelRunner`; ``graphs`` are `TileGraphs`."""
        super().__init__(model, cache, **options)
        self._size = INVARIANT_TILE.get(self._device.type, INVARIANT_TILE["default"])
        self._is_tried = False
        self._threads = torch.get_num_threads()
        if self._device.type == "cpu":
            heads = int(getattr(text_config_of(model), "num_attention_heads", 1))
            of_heads = {INVARIANT_BLOCK, *_latent_widths(model)}
            widths = {size for _, size in _sizes(model)} | {heads * width for width in of_heads}
            self._threads = fitting_threads(widths, self._size, self._threads)

    def forward(self, prefills: Sequence[PrefillChunk], rows: Sequence[DecodeRow]) -> Tensor:
        slots = [len(rows), *(1 + max(one.slots, default=-1) for one in prefills)]
        ends = [1, *(row.end for row in rows), *(one.begin + len(one.tokens) for one in prefills)]
        self.make_room(max(ends), max(slots))
        read = [placed for one in prefills for placed in _placed(one.tokens, one.begin, one.slots[0])]
        drawn = [placed for slot, row in enumerate(rows) for placed in _placed(row.tokens, row.position, slot)]
        if not self._is_tried and (read or drawn):
            self._is_tried = True
            self._try_places((read or drawn)[0])
        logits = [self._run_tile(tile, kept=1)[:0] for tile in self._tiles(read)]
        for one in prefills:
            self.cache.copy(one.slots[0], one.slots[1:], one.begin + len(one.tokens))
        logits += [self._run_tile(tile, kept=self._size)[: len(tile)] for tile in self._tiles(drawn)]
        return torch.cat(logits) if logits else self._run_dummy()

    def _tiles(self, tokens: Sequence[PlacedToken]) -> list[Sequence[PlacedToken]]:
        return [tokens[begin : begin + self._size] for begin in range(0, len(tokens), self._size)]

    def _run_tile(self, tokens: Sequence[PlacedToken], *, kept: int) -> Tensor:
        """Return the logits (kept, V) of the last ``kept`` tokens of a tile, filled up with the last of ``tokens``."""
        filled = [*tokens, *[tokens[-1]] * (self._size - len(tokens))]
        tile = torch.tensor(filled).T.contiguous()  # (3, T)
        longest = 1 + max(token.position for token in tokens)
        if self._graphs is not None:
            shape = TileShape(self._rounded(longest), kept)
            replayed: Tensor | None = self._graphs.forward(tile, shape, lambda placed: self._forward(placed, *shape))
            if replayed is not None:
                return replayed
        return self._forward(tile.to(self._device), longest, kept)

    def _rounded(self, longest: int) -> int:
        """Return a length that few graphs serve."""
        length = INVARIANT_BLOCK << ((longest - 1) // INVARIANT_BLOCK).bit_length()
        return within_window(self._model, length, longest)

    def _forward(self, tile: Tensor, longest: int, kept: int) -> Tensor:
        ids, positions, slots = tile
        # Nothing is read by slots, so their lengths do not matter. The last token may be stored several times.
        cached = self.cache.places(Places((), 0, slots, positions, self._size, row_lengths=(), max_length=1))
        step = Tile(cached, longest, tuple(self._blocks(slots, positions, longest)))
        with _at_most_threads(self._threads):
            return run_packed(self._model, ids[None], positions[None], step, kept=kept)

    def _try_places(self, token: PlacedToken) -> None:
        """Raise GenerationError if a token has other bits in another place of a tile."""
        tile = torch.tensor([token] * self._size).T.contiguous().to(self._device)
        bits = self._forward(tile, token.position + 1, self._size).contiguous().view(torch.uint8)
        if not torch.equal(bits, bits[:1].expand_as(bits)):
            raise GenerationError(
                f"batch_invariant=True needs kernels that compute a token alike in each place, and "
                f"{type(self._model).__name__} on {self._device} gets other bits in another place; leave "
                "batch_invariant out"
            )

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


def check_invariant(model: nn.Module, *, is_collective: bool, compile: str | None) -> None:
    """Raise GenerationError for models and settings under which other tokens of a batch change a result."""
    if compile is not None:
        raise GenerationError(f"batch_invariant=True compiles no blocks; leave compile={compile!r} out")
    if is_collective:
        raise GenerationError(
            "batch_invariant=True needs other numbers of forwards on each rank, and this layout's forwards are "
            "collective; generate in a layout with fsdp=1"
        )
    if has_experts(model):
        raise GenerationError(
            f"batch_invariant=True needs products of a fixed shape, and {type(model).__name__} multiplies as many rows "
            "as tokens choose an expert; leave batch_invariant out"
        )
    device = next(model.parameters()).device
    for name, size in _sizes(model) if device.type == "cpu" else ():
        if size % VECTOR_VALUES:
            raise GenerationError(
                f"batch_invariant=True needs layers whose sizes are multiples of {VECTOR_VALUES} on CPU, which "
                f"computes what is left over by other kernels, and {name} has {size}; leave batch_invariant out"
            )


def _sizes(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the inputs and outputs of linear layers by name, without adapters and without the head's outputs.

    Heads that attend to latents have a layer each, whose outputs are their values.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding) or "lora_" in name:
            continue
        yield from ((name, size) for size in (weight.shape[1:] if module is head else weight.shape))
    for attention in latent_modules(model):  # outputs of a product for each head
        yield f"v_head_dim of {type(attention).__name__}", cast(Any, attention).v_head_dim


def _latent_widths(model: nn.Module) -> Iterator[int]:
    """Yield the features of a head's query and output in attention to latents."""
    for attention in cast(list[Any], latent_modules(model)):
        yield attention.kv_lora_rank + attention.qk_rope_head_dim
        yield attention.kv_lora_rank


def fitting_threads(widths: Iterable[int], num_rows: int, threads: int) -> int:
    """Return the most threads, at most ``threads``, that divide (num_rows, width) values at multiples of 16.

    torch divides the values of an elementwise function evenly among threads, at least 32,768 for each. Each thread
    computes what is left over after its last vector by another kernel.
    """
    sizes = {num_rows * width for width in widths}

    def fits(count: int) -> bool:
        return all(-(-size // min(count, -(-size // THREAD_VALUES))) % VECTOR_VALUES == 0 for size in sizes)

    return next(count for count in range(threads, 0, -1) if count == 1 or fits(count))


@contextmanager
def _at_most_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count < before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count < before:
            torch.set_num_threads(before)
