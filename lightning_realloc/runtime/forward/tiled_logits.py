"""Read logits in pieces: those that exist, and those that are computed from hidden states one tile of rows at a time.

Whole logits of 8,192 tokens and 151,936 entries take 5 GB in fp32, and their gradient as much again. `deferred_head`
makes a language model return its last hidden states as `DeferredLogits`, which record the scales and soft caps that
follow the head. `TiledLogits` computes a tile of logits in the forward pass, and again in the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_realloc.limits import CHUNK_ELEMENTS, TILE_ELEMENTS
from lightning_realloc.runtime.forward.vocab_parallel_logits import (
    ELEMENTWISE,
    PartialLogits,
    VocabParallelLogits,
    VocabShard,
    local_logits,
)

Slope = Callable[[slice, Tensor], Tensor]
"""Returns the gradient by some rows' (n, v) logits, given these rows and logits, which it must not change."""


LogitStep = Callable[[Tensor], Tensor]
"""An elementwise operation on logits: a scale, tanh or cast."""


class LogitReader(Protocol):
    """Reads the columns of (N, V) logits that this rank holds, and returns gradients by what they come from."""

    shard: VocabShard | None
    """Columns that are read; None: all."""
    inputs: tuple[Tensor, ...]
    """Tensors that the logits are computed from: arguments of an autograd function."""
    num_rows: int
    """N."""

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows with their (n, v) logits, which must not be changed."""
        ...

    def gradients(self, inputs: Sequence[Tensor], slope: Slope) -> tuple[Tensor | None, ...]:
        """Return the gradients by ``inputs``; None for those that need none."""
        ...


def read_logits(logits: Tensor) -> LogitReader:
    """Return a reader of logits, whole or deferred."""
    if isinstance(logits, DeferredLogits) and logits.is_deferred:
        return TiledLogits(logits)
    return WholeLogits(logits.whole() if isinstance(logits, DeferredLogits) else logits)


class WholeLogits:
    """Reads logits that exist."""

    def __init__(self, logits: Tensor) -> None:
        values, self.shard = local_logits(logits)
        self.inputs: tuple[Tensor, ...] = (values,)
        self.num_rows = len(values)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """See `LogitReader`."""
        (values,) = self.inputs
        for rows in _slices(values.shape, CHUNK_ELEMENTS):
            yield rows, values[rows]

    def gradients(self, inputs: Sequence[Tensor], slope: Slope) -> tuple[Tensor | None, ...]:
        """See `LogitReader`."""
        (values,) = inputs
        return (_slopes(values, 0, slope),)


class TiledLogits:
    """Computes logits from hidden states a tile of rows at a time, the same number of tiles on all ranks."""

    def __init__(self, deferred: DeferredLogits) -> None:
        states = deferred.plain()
        self._deferred = deferred
        self._has_graph = torch.is_grad_enabled()
        self._autocast = _current_autocast(states.device.type)
        self.inputs: tuple[Tensor, ...] = (states, *self._trained_parameters())
        self.num_rows = len(states)
        with torch.no_grad():
            _, self.shard = deferred.compute(states[:0])

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """See `LogitReader`."""
        states = self.inputs[0].detach()
        for tile in self._tiles():
            # Without a graph, autocast would keep a cast weight that has no gradient, and hand it to later layers.
            with torch.set_grad_enabled(self._has_graph):
                values = self._deferred.compute(states[tile])[0].detach()
            for rows in _slices(values.shape, CHUNK_ELEMENTS):
                yield slice(tile.start + rows.start, tile.start + rows.stop), values[rows]
            del values  # before the next tile

    def gradients(self, inputs: Sequence[Tensor], slope: Slope) -> tuple[Tensor | None, ...]:
        """See `LogitReader`."""
        states, trained = inputs[0], self._trained_parameters()
        by_states = torch.zeros_like(states) if states.requires_grad else None
        by_parameters = [_zeros_to_add_to(parameter) for parameter in trained]
        with self._autocast(), torch.enable_grad():
            for tile in self._tiles():
                part = states[tile].detach().requires_grad_(states.requires_grad)
                values, _ = self._deferred.compute(part)
                slopes = _slopes(values.detach(), tile.start, slope)
                sources = trained if by_states is None else [*trained, part]
                found = torch.autograd.grad(values, sources, slopes, allow_unused=True)
                _add(by_parameters, found)
                if by_states is not None and found[-1] is not None:
                    by_states[tile] = found[-1]
                del values, slopes, found  # before the next tile
        sums = (by_states, *by_parameters)
        return tuple(None if t is None else t.to(tensor.dtype) for t, tensor in zip(sums, inputs, strict=True))

    def _trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._deferred.head.parameters() if parameter.requires_grad]

    def _tiles(self) -> list[slice]:
        return _slices((self.num_rows, self._deferred.num_columns), TILE_ELEMENTS)


class DeferredLogits(PartialLogits):
    """(..., V) logits of (..., D) hidden states, not computed yet.

    Scales, soft caps and casts are recorded. Any other operation computes all logits first, with a warning.
    """

    head: nn.Module
    num_columns: int
    """Columns that a rank computes, at most."""
    steps: tuple[LogitStep, ...]
    """What follows the head, in order."""
    _call: Callable[[Tensor], Tensor]

    @classmethod
    def from_states(
        cls, states: Tensor, head: nn.Module, call: Callable[[Tensor], Tensor], *, num_tokens: int, num_columns: int
    ) -> DeferredLogits:
        """Return the logits that ``call`` computes with ``head``: (..., D) states to (..., ``num_tokens``) logits."""
        logits = states.as_subclass(cls)
        logits.head, logits.num_columns, logits._call = head, num_columns, call
        logits._num_tokens, logits.steps, logits._whole = num_tokens, (), None
        return logits

    @property
    def is_deferred(self) -> bool:
        """Whether no operation has computed all logits."""
        return self._whole is None

    def compute(self, states: Tensor) -> tuple[Tensor, VocabShard | None]:
        """Return the logits of (n, D) states: the columns that this rank holds, and their shard. Collective."""
        logits = self._call(states)
        for step in self.steps:
            logits = step(logits)
        return local_logits(logits)

    def whole(self) -> Tensor:
        """Return all logits, `VocabParallelLogits` if the head is cut over the vocabulary. The first call computes."""
        if self._whole is None:
            self._whole = self._call(self.plain())
            for step in self.steps:
                self._whole = step(self._whole)
        return self._whole

    def derived(self, states: Tensor, *steps: LogitStep) -> DeferredLogits:
        """Return the logits of other states, with further steps."""
        made = DeferredLogits.from_states(
            states, self.head, self._call, num_tokens=self._num_tokens, num_columns=self.num_columns
        )
        made.steps = (*self.steps, *steps)
        return made

    @classmethod
    def apply(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a scale, soft cap or cast, and apply any other operation to all logits."""
        if func is Tensor.__repr__:  # debuggers must not compute
            return f"DeferredLogits({tuple(args[0].shape)}, computed: {not args[0].is_deferred})"
        owner = next(value for value in (*args, *kwargs.values()) if isinstance(value, cls))
        if owner.is_deferred and _is_step(func, args, kwargs):
            return owner.derived(owner.plain(), lambda values: _call_with(func, args, kwargs, owner, values))
        if owner.is_deferred:
            rank_zero_warn(
                f"{getattr(func, '__name__', func)} needs all logits at once, which take more memory than tiles of "
                f"them; a model whose head is followed by scales, tanh and casts alone is computed in tiles"
            )
        return _call_with(func, args, kwargs, owner, owner.whole())


@contextlib.contextmanager
def deferred_head(head: nn.Module, call: Callable[[Tensor], Tensor], *, num_columns: int) -> Iterator[None]:
    """Make a language model's head return `DeferredLogits` of its input, which ``call`` computes later.

    Args:
        head: A module with ``out_features``.
        call: Computes logits with the head.
        num_columns: Columns that a rank computes, at most.
    """

    own = vars(head).get("forward")  # quantised and offloaded modules may have one

    def compute(states: Tensor) -> Tensor:
        with replaced_forward(head, own):
            return call(states)

    def defer(states: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not states.requires_grad:
            return compute(states)  # FSDP would not see that the model's output has a gradient
        num_tokens: Any = head.out_features
        return DeferredLogits.from_states(states, head, compute, num_tokens=num_tokens, num_columns=num_columns)

    with replaced_forward(head, defer):
        yield


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Replace a module's own forward; None: leave it to its class."""
    attributes = vars(module)
    before = attributes.pop("forward", None)
    if forward is not None:
        attributes["forward"] = forward
    try:
        yield
    finally:
        attributes.pop("forward", None)
        if before is not None:
            attributes["forward"] = before


def select_rows(logits: Tensor, rows: int | Tensor) -> Tensor:
    """Return ``logits[rows]``, deferred or vocabulary-parallel if ``logits`` are. Do not write into it."""
    if isinstance(logits, DeferredLogits):
        if logits.is_deferred:
            return logits.derived(logits.plain()[rows])
        logits = logits.whole()
    return logits.select_rows(rows) if isinstance(logits, VocabParallelLogits) else logits[rows]


def _slices(shape: Sequence[int], num_elements: int) -> list[slice]:
    """Return slices over the rows of a matrix with at most ``num_elements`` elements each, or one row."""
    step = max(1, num_elements // max(1, shape[1]))
    return [slice(begin, min(begin + step, shape[0])) for begin in range(0, shape[0], step)]


def _slopes(values: Tensor, first: int, slope: Slope) -> Tensor:
    """Return the gradient by (n, v) logits, of which ``first`` is the number of the first row."""
    gradient = torch.empty_like(values)
    for rows in _slices(values.shape, CHUNK_ELEMENTS):
        gradient[rows] = slope(slice(first + rows.start, first + rows.stop), values[rows])
    return gradient


def _add(totals: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Add the first of the found gradients to their totals."""
    for total, gradient in zip(totals, found, strict=False):
        if gradient is not None:
            total.add_(gradient)


def _zeros_to_add_to(tensor: Tensor) -> Tensor:
    """Return zeros for a sum of gradients: in fp32, since a sum of many tiles in half precision would round off."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _current_autocast(device_type: str) -> Callable[[], torch.autocast]:
    """Return a constructor of contexts with the autocast of now."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype, enabled=enabled)


def _is_step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function of logits can be applied to each tile: elementwise, without weights of its own."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    others = [tensor for tensor in tensors if not isinstance(tensor, DeferredLogits)]
    is_elementwise = getattr(func, "__name__", "") in ELEMENTWISE and len(tensors) - len(others) == 1
    return is_elementwise and all(other.ndim == 0 and not other.requires_grad for other in others)


def _call_with(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor) -> Any:
    """Call a function with ``new`` in place of its argument ``old``."""
    replaced = [new if value is old else value for value in args]
    return func(*replaced, **{name: new if value is old else value for name, value in kwargs.items()})
