"""Decoding steps as CUDA graphs, whose kernels are launched together.

A forward of a model with a billion weights launches about 700 kernels. The host takes five times as long for that as an
H200 takes to run them (docs/benchmarks/generation_cuda.md). A graph fixes shapes and addresses. So rows are padded to a
few sizes, attended lengths are rounded up, and graphs are captured again when weights or the cache move.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_realloc.generation.cache.kv_cache import CapturableCache
from lightning_realloc.generation.core.step import DecodeRow
from lightning_realloc.generation.forward.attention import IMPLEMENTATION, run_packed
from lightning_realloc.generation.forward.expert_records import ExpertRecords
from lightning_realloc.generation.forward.fused_layers import fused_norms, joined_linears
from lightning_realloc.generation.forward.packed_step import PackedStep
from lightning_realloc.generation.forward.step_shapes import (
    StepShape,
    filled_up,
    rounded_up,
    within_window,
    without_filling,
)
from lightning_realloc.limits import MAX_CAPTURED_TOKENS
from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup
from lightning_realloc.runtime.parallel.compiled import compiled_blocks
from lightning_realloc.runtime.parallel.tensor_parallel import tensor_parallel_group

_log = logging.getLogger(__name__)

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures work on tensors that stay in place, and returns a function that replays it."""

_ROWS_PER_OCTAVE = 4
_LENGTHS_PER_OCTAVE = 2
_LEAST_LENGTH = 128
_MOST_GRAPHS = 128
"""Graphs kept at a time; each takes about 5 MB in addition to the memory that all share."""
_OFTEN = 16
"""Steps of a shape after which it gets a graph of its own, even if a larger one would do."""


ShapeT = TypeVar("ShapeT", bound=Hashable)


@dataclass(slots=True)
class Graph(Generic[ShapeT]):
    """A captured forward."""

    shape: ShapeT
    inputs: Tensor
    """(4, tokens): token ids, their places in their sequences and in the cache, and the model's positions."""
    logits: Tensor
    """(tokens, V)."""
    replay: Callable[[], None]


class CapturedForwards(Generic[ShapeT]):
    """Captures forwards by their shape, for as long as weights and cache stay where they are.

    Args:
        make_record: Returns a function that captures graphs which share memory; None: CUDA's.
        device_type: Type of the devices on which models are captured.
        compile: Backend of ``torch.compile`` for the blocks of captured steps; None: their kernels as they are.
        collective: Whether forwards of tensor-parallel models are captured, too, with NCCL's collectives. All ranks of
            the group make the same calls.
        records: Records the experts of tokens; None: they are not recorded.
    """

    fuses_layers = True
    """Whether layers may run as fewer kernels, which round otherwise."""

    def __init__(
        self,
        model: nn.Module,
        cache: CapturableCache,
        *,
        make_record: Callable[[], Record] | None = None,
        device_type: str = "cuda",
        compile: str | None = None,
        collective: bool = False,
        records: ExpertRecords | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._make_record = make_record
        self._record: Record | None = None
        self._device_type = device_type
        self._compile = compile
        self._is_collective = collective
        self._records = records
        self._group: TensorParallelGroup | None = None
        """Ranks that capture and replay together."""
        self.capture_s = 0.0
        """Seconds of compiling and capturing in this generation."""
        self._graphs: dict[ShapeT, Graph[ShapeT]] = {}
        self._num_runs: Counter[ShapeT] = Counter()
        self._is_possible = True
        self._has_warned = False
        """Whether a warning said that memory ran out in a capture."""
        self._model_state: tuple[object, ...] = ()
        self._num_allocations = 0
        self._set_up: set[ShapeT] = set()
        """Shapes that ran once before their capture, with the weights' current dtypes."""
        self._dtypes: set[torch.dtype] = set()
        self._logits = torch.empty(0)
        """(tokens, V) logits of all graphs: only the last step's are read."""
        self.is_active = False
        """Whether steps of this generation are captured."""
        self.was_usual = True
        """Whether the last step took as long as later ones of its size: no graph was captured or is due."""

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """Let the model's forwards launch fewer kernels, where that is possible."""
        with ExitStack() as fused:
            if self.fuses_layers:
                fused.enter_context(joined_linears(self._model))
                if self._compile is None:  # a compiler fuses norms with what surrounds them
                    fused.enter_context(fused_norms(self._model))
            fused.enter_context(compiled_blocks(self._model, self._compile, attention=[IMPLEMENTATION]))
            yield

    def begin(self) -> bool:
        """Return whether this generation's steps can be captured; drop graphs that no longer hold.

        Collective over the ranks of a tensor-parallel model whose steps are captured.
        """
        self.capture_s = 0.0
        device = next(self._model.parameters()).device
        self._group = tensor_parallel_group(self._model)
        self.is_active = (
            self._is_possible
            and device.type == self._device_type
            and not torch.is_autocast_enabled(device.type)  # a graph would read weights that were cast once
            and (self._group is None or (self._is_collective and self._group.is_in_device_order))
            and not any(hasattr(module, "unshard") for module in self._model.modules())
        )
        state = state_of(self._model) if self.is_active else ()
        if self._on_any_rank(state != self._model_state):
            self.release()
            self._model_state = state
            dtypes = {weight.dtype for weight in self._model.parameters()}
            if dtypes != self._dtypes:  # shapes have to run once more before they are captured
                self._dtypes = dtypes
                self._set_up.clear()
        return self.is_active

    def release(self) -> None:
        """Drop all graphs and their memory.

        The way a step runs affects the rounding of its logits, so nothing stays that a resumed process would not have.
        """
        self._drop_graphs()
        self._num_runs.clear()
        self._logits = self._logits[:0].clone()
        self._model_state = ()

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._record = None  # frees the memory that graphs share

    def _on_any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank: ranks that differ in what they run would wait for each other."""
        if self._group is None or not self.is_active:
            return flag
        return bool(self._group.largest([flag], next(self._model.parameters()).device)[0])

    def _follow_cache(self) -> None:
        """Drop all graphs if the cache has moved."""
        if self._cache.num_allocations != self._num_allocations:
            self._drop_graphs()
            self._num_allocations = self._cache.num_allocations

    def _capture(
        self, shape: ShapeT, inputs: Tensor, forward: Callable[[], Tensor], *, num_logits: int
    ) -> Graph[ShapeT] | None:
        """Return a new graph of a ``forward`` that reads ``inputs`` (3, tokens) and returns logits (num_logits, V).

        None if the model's forward cannot be captured.
        """
        while len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        begin = time.perf_counter()
        if shape not in self._set_up:
            # The first run sets up state such as a product's workspace, which must not be part of the graph.
            self._set_up.add(shape)
            made = self._first_run(forward)
            if (made.shape[1:], made.dtype) != (self._logits.shape[1:], self._logits.dtype):
                self._logits = made[:0].clone()
        logits = self._room_for(num_logits)

        def write_logits() -> None:
            logits.copy_(forward())

        self._record = self._record or (self._make_record or _CudaRecord)()
        replay, reason, has_room = None, "another rank could not", True
        try:
            with self._fused():
                replay = self._record(write_logits)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            # Ending the capture may fail, too, and hide the first error.
            has_room = not any(isinstance(one, torch.OutOfMemoryError) for one in (error, error.__context__))
        if self._on_any_rank(replay is None) or replay is None:
            if has_room or self._group is not None:
                self._give_up(reason)
            else:
                self._pause(reason)
            return None
        self._graphs[shape] = graph = Graph(shape, inputs, logits, replay)
        self.capture_s += time.perf_counter() - begin
        return graph

    def _give_up(self, reason: str) -> None:
        self._is_possible = self.is_active = False
        self.release()
        _log.warning(
            "%s cannot be captured as a CUDA graph, so each of its kernels is launched on its own, which may take "
            "longer than they run: %s",
            type(self._model).__name__,
            reason,
        )

    def _pause(self, reason: str) -> None:
        """Capture nothing until the next generation, which may find more memory."""
        self.is_active = False
        self.release()
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "memory ran out while a decoding step of %s was captured as a CUDA graph, so this generation launches "
                "each kernel on its own; lower max_slots of the call in the plan or max_cache_bytes, offload other "
                "roles, or set cuda_graphs=False: %s",
                type(self._model).__name__,
                reason,
            )

    def _first_run(self, forward: Callable[[], Tensor]) -> Tensor:
        """Return the logits of a first run; if the blocks cannot be compiled, say so once and go on without."""
        try:
            with self._fused():
                return forward()
        except Exception as error:
            if self._compile is None:
                raise
            _log.warning(
                "blocks of %s cannot be compiled by %r, so their captured steps run the kernels as they are: %s",
                type(self._model).__name__,
                self._compile,
                shorten(str(error), width=300),
            )
            self._compile = None
            with self._fused():
                return forward()

    def _room_for(self, num_tokens: int) -> Tensor:
        """Return memory for the logits of ``num_tokens`` tokens; graphs that write to it keep it alive."""
        if len(self._logits) < num_tokens:
            self._logits = self._logits.new_empty(num_tokens, *self._logits.shape[1:])
        return self._logits[:num_tokens]


class StepGraphs(CapturedForwards[StepShape]):
    """Runs steps that read no prompts by CUDA graphs where possible.

    Capturing takes as long as two or three steps without a graph. So a shape is captured in its second step; if the
    graph of a larger shape covers it, later.
    """

    def forward(self, rows: Sequence[DecodeRow], max_length: int) -> Tensor | None:
        """Return the logits (N, V) of the rows' tokens, valid until the next call; None if no graph ran.

        The cache has room for one position more than ``max_length``, the rows' largest.
        """
        self.was_usual = True
        shape = self._shape_of(rows, max_length) if self.is_active and rows else None
        if shape is None:
            return None
        self._follow_cache()
        self._cache.begin_forward()
        self._num_runs[shape] += 1
        graph = self._graph_for(shape)
        self.was_usual = graph is not None
        if graph is None and self._num_runs[shape] > 1:
            graph = self._capture_step(shape)
        if graph is None:
            return None
        graph.inputs.copy_(torch.tensor(filled_up(rows, graph.shape, self._cache)))
        graph.replay()
        return without_filling(graph.logits, rows, graph.shape.width)

    def _graph_for(self, shape: StepShape) -> Graph[StepShape] | None:
        """Return the graph of a shape, or for a rare shape that of a larger one; None if there is none."""
        graph = self._graphs.get(shape)
        if graph is None and self._num_runs[shape] < _OFTEN:
            larger = (other for other in self._graphs.values() if other.shape.covers(shape))
            graph = min(larger, key=lambda other: other.shape.num_tokens * other.shape.length, default=None)
        return graph

    def _shape_of(self, rows: Sequence[DecodeRow], max_length: int) -> StepShape | None:
        width = max(len(row.tokens) for row in rows)
        num_rows = min(rounded_up(len(rows), _ROWS_PER_OCTAVE), self._cache.num_slots)
        length = rounded_up(max(max_length, _LEAST_LENGTH), _LENGTHS_PER_OCTAVE)
        length = within_window(self._model, length, max_length)
        shape = StepShape(num_rows, width, min(length, self._cache.capacity))
        return shape if shape.num_tokens <= MAX_CAPTURED_TOKENS else None

    def _capture_step(self, shape: StepShape) -> Graph[StepShape] | None:
        device = next(self._model.parameters()).device
        inputs = torch.tensor(filled_up((), shape, self._cache), device=device)
        ids, in_sequence, in_cache, positions = inputs[:, None]

        def forward() -> Tensor:
            cached = self._cache.captured_places(in_cache[0], num_rows=shape.rows, attended_length=shape.length)
            counts, lengths = [shape.width] * shape.rows, [shape.length] * shape.rows
            step = PackedStep(cached, in_sequence[0], counts, lengths, shape.length)
            routed = None if self._records is None else self._records.routed_pass()
            return run_packed(self._model, ids, positions, step, kept=shape.num_tokens, routed=routed)

        return self._capture(shape, inputs, forward, num_logits=shape.num_tokens)


class _CudaRecord:
    """Captures CUDA graphs that share memory: only one runs at a time, and none keeps data there."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with _without_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: destroying a graph during the capture of another ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def state_of(model: nn.Module) -> tuple[object, ...]:
    """Return everything that a model's launches depend on besides inputs: addresses of weights, hooks and switches.

    Training mode is left out, because the engine generates in evaluation mode.
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
