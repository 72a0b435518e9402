"""Keep activations in pinned host memory from a model's forward pass to its backward pass, on a CUDA device.

Copies run on a stream of their own: out while later layers compute, and back before the backward pass needs them.
torch's ``save_on_cpu`` makes the device wait for each copy. Weights stay on the device, and so do small tensors.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_realloc.limits import MAX_MOVING_BYTES
from lightning_realloc.runtime.model.structure import transformers_model

MIN_OFFLOADED_BYTES = 1 << 20
"""Smallest activation that leaves the device. Raising it keeps more tensors whose copies take long for their size."""


class ActivationOffload:
    """Moves what layers save for their backward pass to the host, and back in reverse order.

    Args:
        min_bytes: See `MIN_OFFLOADED_BYTES`.
    """

    def __init__(self, device: torch.device, *, min_bytes: int = MIN_OFFLOADED_BYTES) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self.stream = torch.cuda.Stream(device)
        self.num_offloaded = 0
        """Tensors that have left the device so far."""

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Offload what the body of a transformers model saves: all but its head and what follows it.

        Blocks that recompute their activations save their input alone, which moves.
        """
        body = transformers_model(model).base_model
        own, forward = vars(body).get("forward"), body.forward

        def offloading(*args: Any, **kwargs: Any) -> Any:
            one = _Pass(self)
            try:
                with torch.autograd.graph.saved_tensors_hooks(one.pack, one.unpack):
                    return forward(*args, **kwargs)
            finally:
                one.wait_for_copies()

        vars(body)["forward"] = offloading
        try:
            yield
        finally:
            del vars(body)["forward"]
            if own is not None:
                vars(body)["forward"] = own


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Saved:
    """One activation."""

    number: int
    """Its place in the order of saving."""
    host: Tensor
    num_uses: int
    """Layers that saved it and have not asked for it."""
    on_device: Tensor | None = None
    """Its copy on the device; None while it is only on the host."""
    is_back: torch.cuda.Event | None = None


@dataclass(eq=False)
class _Pass:
    """One forward pass and its backward pass."""

    offload: ActivationOffload
    _saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    _leaving: deque[tuple[Tensor, torch.cuda.Event]] = field(default_factory=deque)
    """Tensors whose copies may be under way: their memory must not be used again."""
    _known: dict[tuple[object, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = field(default_factory=dict)
    """Several layers may save one tensor."""

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Start to copy an activation to the host."""
        if tensor.nbytes < self.offload.min_bytes or tensor.device != self.offload.device or _is_weight(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        storage, found = self._known.get(key, (None, None))
        known = None if found is None or storage is None or storage.expired() else found()
        if known is not None:
            known.num_uses += 1
            return known
        saved = _Saved(len(self._saved), self._copied_out(tensor), num_uses=1)
        self._saved.append(weakref.ref(saved))
        self._known[key] = StorageWeakRef(tensor.untyped_storage()), self._saved[-1]
        return saved

    def unpack(self, packed: Tensor | _Saved) -> Tensor:
        """Return an activation on the device, and start to copy back those that were saved before it."""
        if isinstance(packed, Tensor):
            return packed
        self._start_back(packed)
        moving = 0
        for reference in reversed(self._saved[: packed.number]):
            if moving >= MAX_MOVING_BYTES:
                break
            if (earlier := reference()) is not None and earlier.num_uses > 0:
                self._start_back(earlier)
                moving += earlier.host.nbytes
        assert packed.on_device is not None and packed.is_back is not None, "its copy was started"
        torch.cuda.current_stream(self.offload.device).wait_event(packed.is_back)
        tensor = packed.on_device
        packed.num_uses -= 1
        if packed.num_uses <= 0:
            packed.on_device = packed.is_back = None
        return tensor

    def wait_for_copies(self, num_bytes: int = 0) -> None:
        """Make the device wait until copies of at most ``num_bytes`` are under way; then their memory is free."""
        current = torch.cuda.current_stream(self.offload.device)
        while sum(leaving.nbytes for leaving, _ in self._leaving) > num_bytes:
            _, is_copied = self._leaving.popleft()
            current.wait_event(is_copied)

    def _copied_out(self, tensor: Tensor) -> Tensor:
        stream = self.offload.stream
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.offload.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        self._leaving.append((tensor, stream.record_event()))
        self.offload.num_offloaded += 1
        self.wait_for_copies(MAX_MOVING_BYTES)
        return host

    def _start_back(self, saved: _Saved) -> None:
        if saved.on_device is not None:
            return
        # Memory of the copying stream: it is used again only by later copies, which wait for work queued until then.
        stream = self.offload.stream
        stream.wait_stream(torch.cuda.current_stream(self.offload.device))
        with torch.cuda.stream(stream):
            saved.on_device = saved.host.to(self.offload.device, non_blocking=True)
        saved.is_back = stream.record_event()


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, a view of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    sources = () if base.grad_fn is None else base.grad_fn.next_functions
    return any(hasattr(function, "variable") for function, _ in sources) and type(base.grad_fn).__name__.startswith(
        "To"
    )
