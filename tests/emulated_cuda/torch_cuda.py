"""``torch.cuda`` for the emulated device."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from tests.emulated_cuda import EMULATED

_GIB = 2**30
_MODES = {"default": 0, "warn": 1, "error": 2}


class Stream:
    """A stream, in whose order everything runs anyway."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        """Wait for another stream."""

    def wait_event(self, event: Event) -> None:
        """Wait for an event."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event."""
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for the stream."""

    def query(self) -> bool:
        """Return whether all work is done."""
        return True


class Event:
    """A point in time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Take the time."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""

    def query(self) -> bool:
        """Return whether it has passed."""
        return True

    def synchronize(self) -> None:
        """Wait for it."""

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds until another event."""
        return (other._time - self._time) * 1e3


class _Made(NamedTuple):
    """A tensor that an operator of the capture made, among the arguments of a later one."""

    number: int


class _Call(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, weakref.ref[Tensor]]]
    """Number of each result, and the result of the capture while the program keeps it."""


class CUDAGraph:
    """Operators that are run again on the tensors of their capture."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[_Call] = []

    def replay(self) -> None:
        """Run all operators, and write results where those lie that the program has kept since the capture."""
        values: dict[int, Tensor] = {}

        def value_of(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, _Made) else argument

        last_use = {leaf.number: place for place, call in enumerate(self.calls) for leaf in _made_among(call)}
        with torch.no_grad():
            for place, (function, args, kwargs, made) in enumerate(self.calls):
                results = function(*_map(value_of, args), **_map(value_of, kwargs))
                for leaf in tree_leaves(results):
                    if hasattr(leaf, "wait"):  # the work of a collective
                        leaf.wait()
                for (number, kept), new in zip(made, _tensors(results), strict=True):
                    values[number] = new
                    old = kept()
                    if old is not None and old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
                for number in [number for number in values if last_use.get(number, -1) <= place]:
                    del values[number]  # its memory is free for other operators, as in a graph's pool

    def reset(self) -> None:
        """Drop all operators."""
        self.calls = []

    def pool(self) -> tuple[int, int]:
        """Return the handle of the memory."""
        return graph_pool_handle()


def _map(function: Any, tree: Any) -> Any:
    return tree_map(function, tree, is_leaf=lambda leaf: isinstance(leaf, _Made))


def _made_among(call: _Call) -> list[_Made]:
    leaves = tree_leaves((call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, _Made))
    return [leaf for leaf in leaves if isinstance(leaf, _Made)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Capture(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._count = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if any(tensor.is_cuda for tensor in _tensors((args, kwargs, results))):
            of_capture = _map(self._reference, args), _map(self._reference, kwargs)
            made = [(self._number(tensor), weakref.ref(tensor)) for tensor in _tensors(results)]
            self._graph.calls.append(_Call(func, *of_capture, made))
        return results

    def _reference(self, argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument in self._numbers:
            return _Made(self._numbers[argument])
        return argument

    def _number(self, result: Tensor) -> int:
        """Return the number of a result: an own one, or that of the argument which the operator has changed."""
        if result not in self._numbers:
            self._numbers[result] = next(self._count)
        return int(self._numbers[result])


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    """Capture the operators of the block; fail where the host would wait for the device."""
    torch.ops.emulated_cuda.set_capturing(True)
    try:
        with _Capture(cuda_graph):
            yield
    finally:
        torch.ops.emulated_cuda.set_capturing(False)


def graph_pool_handle() -> tuple[int, int]:
    """Return a handle."""
    return (0, 1)


def install() -> None:
    """Replace the functions of ``torch.cuda`` that need a driver."""
    capacity = int(float(os.environ.get("EMULATED_CUDA_GIB", "8")) * _GIB)
    torch.ops.emulated_cuda.set_capacity(capacity)
    generator = torch.ops.emulated_cuda.default_generator()
    for name, replacement in (
        *_device_functions(capacity).items(),
        *_memory_functions(capacity).items(),
        *_random_functions(generator).items(),
        *_stream_functions().items(),
    ):
        setattr(torch.cuda, name, replacement)
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.clone = _clone  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.to = _storage_to  # type: ignore[method-assign, assignment]


class _Nothing(contextlib.nullcontext[None]):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _device_functions(capacity: int) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=EMULATED, total_memory=capacity, uuid="0", major=9, minor=0, multi_processor_count=132, is_integrated=False
    )
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": _Nothing,
        "device_of": _Nothing,
        "get_device_name": lambda device=None: EMULATED,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "set_sync_debug_mode": lambda mode: torch.ops.emulated_cuda.set_wait_mode(_MODES.get(mode, mode)),
        "get_sync_debug_mode": torch.ops.emulated_cuda.get_wait_mode,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
    }


def _memory_functions(capacity: int) -> dict[str, Any]:
    ops = torch.ops.emulated_cuda

    def memory_stats(device: Any = None) -> dict[str, int]:
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        stats = {f"{name}.all.current": ops.allocated() for name in names}
        stats |= {f"{name}.all.peak": ops.peak() for name in names}
        return stats | {"num_alloc_retries": 0, "num_ooms": 0}

    return {
        "mem_get_info": lambda device=None: (capacity - ops.allocated(), capacity),
        "memory_allocated": lambda device=None: ops.allocated(),
        "memory_reserved": lambda device=None: ops.allocated(),
        "max_memory_allocated": lambda device=None: ops.peak(),
        "max_memory_reserved": lambda device=None: ops.peak(),
        "reset_peak_memory_stats": lambda device=None: ops.reset_peak(),
        "memory_stats": memory_stats,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _random_functions(generator: torch.Generator) -> dict[str, Any]:
    return {
        "default_generators": (generator,),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: [generator.set_state(state) for state in states[:1]],
    }


def _stream_functions() -> dict[str, Any]:
    default = Stream()
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: default,
        "default_stream": lambda device=None: default,
        "stream": _Nothing,
        "is_current_stream_capturing": lambda: False,
    }


_resize_on_host = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    """Give a storage another size; torch built without CUDA refuses this for CUDA's."""
    if storage.device.type != "cuda":
        return _resize_on_host(storage, num_bytes)  # type: ignore[return-value]
    torch.ops.emulated_cuda.resize_storage(_bytes_of(storage, 0), num_bytes)
    return storage


_clone_on_host = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage; torch built without CUDA makes no storage of CUDA's."""
    if storage.device.type != "cuda":
        return _clone_on_host(storage)
    return _bytes_of(storage, storage.nbytes()).clone().untyped_storage()


def _storage_to(storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
    """Return the storage on a device, itself if it is there."""
    if storage.device.type == torch.device(device).type:
        return storage
    return _bytes_of(storage, storage.nbytes()).to(device).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage, count: int) -> Tensor:
    """Return the first bytes of a storage as a tensor."""
    bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return bytes_.set_(storage, 0, (count,), (1,))  # type: ignore[call-overload, no-any-return]
