"""``torch.cuda`` for the emulated device."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_GIB = 2**30
_NAME = "Emulated GPU"
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


class CUDAGraph:
    """Operators that are run again on the tensors of their capture."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def replay(self) -> None:
        """Run all operators, and write their results where those of the capture lie."""
        with torch.no_grad():
            for function, args, kwargs, results in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        """Drop all operators."""
        self.calls = []

    def pool(self) -> tuple[int, int]:
        """Return the handle of the memory."""
        return graph_pool_handle()


class _Capture(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs, results))):
            self._graph.calls.append((func, args, kwargs, results))
        return results


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


class _Nothing(contextlib.nullcontext[None]):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _device_functions(capacity: int) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=_NAME, total_memory=capacity, uuid="0", major=9, minor=0, multi_processor_count=132, is_integrated=False
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
        "get_device_name": lambda device=None: _NAME,
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
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
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
    tensor = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (0,), (1,))  # type: ignore[call-overload]
    torch.ops.emulated_cuda.resize_storage(tensor, num_bytes)
    return storage
