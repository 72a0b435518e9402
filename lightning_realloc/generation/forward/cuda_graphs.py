"""Steps of decoding as CUDA graphs, whose kernels are launched all at once.

A forward of a model with a billion weights launches about 700 kernels, which takes the host five times as long as it
takes an H200 to run them (docs/benchmarks/generation_cuda.md). A graph fixes shapes and addresses: rows are filled up
to a few sizes, what they attend to is rounded up, and graphs are made anew where weights or the cache lie elsewhere.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_realloc.generation.cache.kv_cache import SlotCache, SlotPlaces
from lightning_realloc.generation.forward.attention import PackedStep
from lightning_realloc.generation.forward.packed_rows import DecodeRow, run_packed

_log = logging.getLogger(__name__)

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on tensors that stay where they are, and returns what does the same again."""

_MOST_TOKENS = 512
"""Of a captured step, with those that fill it up: larger ones keep the device busy for longer than launching takes."""
_ROWS_PER_OCTAVE = 4
_LENGTHS_PER_OCTAVE = 2
_LEAST_LENGTH = 128
_MOST_GRAPHS = 128
"""Each takes about 5 MB beside what all share."""
_OFTEN = 16
"""Steps of a shape from which on it gets a graph of its own, though a larger one would do."""
_READING_IN_TOKENS = 256
"""Tokens whose products take as long as reading the weights: on H100 and H200, and about so many on others."""
_MOST_DETOUR = 1.25
"""How much longer a step may take by a larger shape's graph."""


class StepShape(NamedTuple):
    """What a graph is made for."""

    rows: int
    width: int
    """Tokens of each row."""
    length: int
    """Positions that each row attends to."""

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.width

    def covers(self, other: StepShape) -> bool:
        """Whether a step of the other shape may run as one of this shape, and hardly takes longer."""
        is_larger = all(ours >= theirs for ours, theirs in zip(self, other, strict=True))
        detour = (_READING_IN_TOKENS + self.num_tokens) / (_READING_IN_TOKENS + other.num_tokens)
        return is_larger and detour <= _MOST_DETOUR and self.length <= 2 * other.length


@dataclass(slots=True)
class _Graph:
    shape: StepShape
    inputs: Tensor
    """(3, rows * width) token ids, their positions, and where in the cache they are written."""
    logits: Tensor
    """(rows * width, V)."""
    replay: Callable[[], None]


class StepGraphs:
    """Runs steps that read no prompts, by graphs where that is possible.

    A shape is captured when it comes for the second time, since capturing takes as long as two or three steps without a
    graph; or, where the graph of a larger one will do, once it came often.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: SlotCache,
        *,
        make_record: Callable[[], Record] | None = None,
        device_type: str = "cuda",
    ) -> None:
        """Capture nothing yet.

        Args:
            model: Whose steps they are.
            cache: The one that they read and write.
            make_record: Returns what makes graphs that share their memory; by default, CUDA's.
            device_type: Where models are captured.
        """
        self._model = model
        self._cache = cache
        self._make_record = make_record
        self._record: Record | None = None
        self._device_type = device_type
        self._graphs: dict[StepShape, _Graph] = {}
        self._num_steps: Counter[StepShape] = Counter()
        self._is_possible = True
        self._model_state: tuple[object, ...] = ()
        self._num_allocations = 0
        self._set_up: set[StepShape] = set()
        """Shapes that were run as they are captured, in the weights' dtypes of now."""
        self._dtypes: set[torch.dtype] = set()
        self._logits = torch.empty(0)
        """(tokens, V) What all graphs write their logits to: only the last step's are read."""
        self._window = getattr(getattr(model, "config", None), "sliding_window", None)
        self.is_active = False
        """Whether steps of this generation are captured."""
        self.was_usual = True
        """Whether the last step took as long as its like will: not where a graph is still to be made, or was."""

    def begin(self) -> None:
        """Look whether this generation's steps can be captured, and whether earlier graphs still hold."""
        device = next(self._model.parameters()).device
        self.is_active = (
            self._is_possible
            and device.type == self._device_type
            and not torch.is_autocast_enabled(device.type)  # a graph would read the weights as they were cast once
            and not any(hasattr(module, "tp_group") or hasattr(module, "unshard") for module in self._model.modules())
        )
        state = _state_of(self._model) if self.is_active else ()
        if state != self._model_state:
            self.release()
            self._model_state = state
            self._forget_other_dtypes()

    def release(self) -> None:
        """Drop all graphs, and the memory that they work in.

        What a step is run by rounds its logits, so nothing of it is left that a process begun here would not know.
        """
        self._drop_graphs()
        self._num_steps.clear()
        self._logits = self._logits[:0].clone()
        self._model_state = ()

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._record = None  # the memory that graphs share goes with the last of them

    def _forget_other_dtypes(self) -> None:
        """Let shapes be set up anew where weights have other dtypes than those that they were set up for."""
        dtypes = {weight.dtype for weight in self._model.parameters()}
        if dtypes != self._dtypes:
            self._dtypes = dtypes
            self._set_up.clear()

    def forward(self, rows: Sequence[DecodeRow], max_length: int) -> Tensor | None:
        """Return the logits (N, V) of the rows' tokens, valid until the next call; None: not by a graph, this time.

        The cache has room for one position more than ``max_length``, the rows' most.
        """
        self.was_usual = True
        shape = self._shape_of(rows, max_length) if self.is_active and rows else None
        if shape is None:
            return None
        if self._cache.num_allocations != self._num_allocations:
            self._drop_graphs()
            self._num_allocations = self._cache.num_allocations
        self._num_steps[shape] += 1
        graph = self._graph_for(shape)
        self.was_usual = graph is not None
        if graph is None and self._num_steps[shape] > 1:
            graph = self._capture(shape)
        if graph is None:
            return None
        graph.inputs.copy_(torch.tensor(filled_up(rows, graph.shape, self._cache.capacity)))
        graph.replay()
        return _without_filling(graph.logits, rows, graph.shape.width)

    def _graph_for(self, shape: StepShape) -> _Graph | None:
        """Return the graph of a shape; until it came often, perhaps that of a larger one."""
        graph = self._graphs.get(shape)
        if graph is None and self._num_steps[shape] < _OFTEN:
            larger = (other for other in self._graphs.values() if other.shape.covers(shape))
            graph = min(larger, key=lambda other: other.shape.num_tokens * other.shape.length, default=None)
        return graph

    def _shape_of(self, rows: Sequence[DecodeRow], max_length: int) -> StepShape | None:
        width = max(len(row.tokens) for row in rows)
        num_rows = min(rounded_up(len(rows), _ROWS_PER_OCTAVE), self._cache.num_slots)
        length = rounded_up(max(max_length, _LEAST_LENGTH), _LENGTHS_PER_OCTAVE)
        if self._window and max_length <= self._window:
            length = min(length, self._window)  # some models are refused beyond it
        shape = StepShape(num_rows, width, min(length, self._cache.capacity))
        return shape if shape.num_tokens <= _MOST_TOKENS else None

    def _capture(self, shape: StepShape) -> _Graph | None:
        """Return a graph of this shape; None where the model's forward is more than launches."""
        while len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        device = next(self._model.parameters()).device
        inputs = torch.tensor(filled_up((), shape, self._cache.capacity), device=device)
        ids, positions, places = inputs[:, None]

        def forward() -> Tensor:
            cached = SlotPlaces(self._cache, places[0], num_rows=shape.rows, attended_length=shape.length)
            counts, lengths = [shape.width] * shape.rows, [shape.length] * shape.rows
            step = PackedStep(cached, positions[0], counts, lengths, shape.length)
            return run_packed(self._model, ids, positions, step, kept=shape.num_tokens)

        if shape not in self._set_up:
            # What the first run sets up, such as a product's workspace, must not be part of the graph.
            self._set_up.add(shape)
            made = forward()
            if (made.shape[1:], made.dtype) != (self._logits.shape[1:], self._logits.dtype):
                self._logits = made[:0].clone()
        logits = self._room_for(shape.num_tokens)

        def write_logits() -> None:
            logits.copy_(forward())

        self._record = self._record or (self._make_record or _CudaRecord)()
        try:
            graph = _Graph(shape, inputs, logits, self._record(write_logits))
        except RuntimeError as error:
            self._is_possible = self.is_active = False
            self.release()
            _log.warning(
                "%s cannot be captured as a CUDA graph, so each of its kernels is launched on its own, which may take "
                "longer than they run: %s",
                type(self._model).__name__, str(error).splitlines()[0],
            )  # fmt: skip
            return None
        self._graphs[shape] = graph
        return graph

    def _room_for(self, num_tokens: int) -> Tensor:
        """Return memory for so many tokens' logits, which stays while a graph writes to it."""
        if len(self._logits) < num_tokens:
            self._logits = self._logits.new_empty(num_tokens, *self._logits.shape[1:])
        return self._logits[:num_tokens]


class _CudaRecord:
    """Makes CUDA graphs that share their memory: one runs at a time, and none leaves anything in it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with _without_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Let no garbage be collected: a graph that is destroyed while another is captured ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rounded_up(number: int, per_octave: int) -> int:
    """Return the next of so many numbers between a power of two and the next one; small numbers are all there."""
    step = max(1, (1 << number.bit_length() - 1) // per_octave)
    return -(-number // step) * step


def filled_up(rows: Sequence[DecodeRow], shape: StepShape, capacity: int) -> tuple[list[int], list[int], list[int]]:
    """Return ids, positions and places in the cache of the rows' tokens, and of those that fill the shape up.

    What fills up reads position 0 and is written to the last position of its slot, which no sample has.
    """
    ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    for slot in range(shape.rows):
        begin, own = slot * capacity, 0
        if slot < len(rows):
            row = rows[slot]
            own = len(row.tokens)
            ids.extend(row.tokens)
            positions.extend(range(row.position, row.end))
            places.extend(range(begin + row.position, begin + row.end))
        rest = shape.width - own
        ids.extend([0] * rest)
        positions.extend([0] * rest)
        places.extend([begin + capacity - 1] * rest)
    return ids, positions, places


def _without_filling(logits: Tensor, rows: Sequence[DecodeRow], width: int) -> Tensor:
    """Return the logits (N, V) of the rows' own tokens."""
    if all(len(row.tokens) == width for row in rows):
        return logits[: len(rows) * width]
    kept = [slot * width + place for slot, row in enumerate(rows) for place in range(len(row.tokens))]
    return logits[torch.tensor(kept, device=logits.device)]


def _state_of(model: nn.Module) -> tuple[object, ...]:
    """Return what a model's launches depend on, besides its inputs: where its weights lie, its hooks, its switches.

    Whether modules are in training mode is left out: none is, while the engine generates.
    """
    return tuple(
        _frozen({name: value for name, value in vars(module).items() if name != "training"})
        for module in model.modules()
    )


def _frozen(value: object) -> object:
    if type(value) in (Tensor, nn.Parameter):
        return value.data_ptr(), value.dtype, value.shape  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(map(_frozen, value))
    return value if isinstance(value, str | int | float | None) else id(value)
