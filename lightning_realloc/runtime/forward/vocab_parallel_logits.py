"""Tensor subclass for logits whose columns are divided over the tensor-parallel ranks.

Gathering all columns would send all logits and store them on every rank, while log-probabilities need a few numbers per
token and rank. `VocabParallelLogits` therefore stays local through elementwise operations, such as scales and soft
caps. Functions that can work on local columns get them from `local_logits`. Any other operation gathers first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup, gather_last_dim

ELEMENTWISE = frozenset(
    (
        *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__"),
        *("div", "true_divide", "__truediv__", "__rtruediv__", "__rdiv__", "neg", "__neg__"),
        *("tanh", "to", "float", "half", "bfloat16", "double", "contiguous"),
    )
)
"""Names of elementwise operations, which methods, operators and functions share."""


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_SHAPE, _BASE = _getter("shape"), _getter("_base")
_SAME_FOR_PARTS = frozenset(
    (
        *map(_getter, ("requires_grad", "grad_fn", "is_leaf", "dtype", "device", "ndim")),
        *(Tensor.register_hook, Tensor.dim, Tensor.is_floating_point, torch.is_floating_point),
    )
)
"""Properties and functions with the same result for what a rank holds and for all logits; FSDP uses them."""


class PartialLogits(Tensor):
    """(..., V) logits of which a part is here, with the shape of all. Subclasses say how an operation treats them."""

    _num_tokens: int
    _whole: Tensor | None
    """All logits, once an operation has needed them."""

    def plain(self) -> Tensor:
        """Return the tensor that this rank holds, as a plain one."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def apply(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that depends on the logits."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SAME_FOR_PARTS:
                return func(*args, **(kwargs or {}))
            if func == _BASE:
                return None  # in-place writes go into all logits and change no part
            if func == _SHAPE:
                return torch.Size((*func(*args)[:-1], args[0]._num_tokens))
        return cls.apply(func, args, kwargs or {})


@dataclass(frozen=True, slots=True, eq=False)
class VocabShard:
    """The columns of the logits that a rank holds, and a way to reach the other ranks."""

    first_token: int
    """First column."""
    num_tokens: int
    """V, the number of columns over all ranks."""
    gather: Callable[[Tensor], Tensor]
    """Stacks the ranks' tensors, which have one shape, along a new first dim, in the same order on every rank."""

    def columns(self, width: int, limit: int) -> slice:
        """Return this rank's ``width`` columns that lie below ``limit``, as global indices."""
        return slice(min(self.first_token, limit), min(self.first_token + width, limit))


class VocabParallelLogits(PartialLogits):
    """(..., V) logits. This rank holds some columns until an operation needs all of them.

    Gathering is collective, so all ranks must call that operation. Afterwards the object holds all logits.
    """

    _group: TensorParallelGroup

    @classmethod
    def from_local(cls, values: Tensor, group: TensorParallelGroup, num_tokens: int) -> VocabParallelLogits:
        """Return (..., ``num_tokens``) logits from this rank's columns, as ``torch.chunk`` cuts them."""
        logits = values.as_subclass(cls)
        logits._group, logits._num_tokens, logits._whole = group, num_tokens, None
        group.shared_copy = None  # the layers that shared it have run: free the graph
        return logits

    def whole(self) -> Tensor:
        """Return all logits. The first call is collective."""
        if self._whole is None:
            self._whole = gather_last_dim(self.plain(), self._group, self._num_tokens)
        return self._whole

    def local(self) -> tuple[Tensor, VocabShard | None]:
        """Return this rank's columns and their shard, or all columns and None if they were gathered."""
        if self._whole is not None:
            return self._whole, None
        first, _ = self._group.local_slice(self._num_tokens)
        return self.plain(), VocabShard(first, self._num_tokens, self._group.gather)

    def select_rows(self, rows: int | Tensor) -> Tensor:
        """Return ``self[rows]``, of this rank's columns if no operation has gathered all."""
        if self._whole is not None:
            return self._whole[rows]
        return VocabParallelLogits.from_local(self.plain()[rows], self._group, self._num_tokens)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # debuggers must not gather
        return f"VocabParallelLogits(columns of rank {self._group.index} of {self._group.size}, V={self._num_tokens})"

    @classmethod
    def apply(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply an elementwise operation to this rank's columns, and any other one to all logits."""
        with torch._C.DisableTorchFunctionSubclass():
            if _keeps_columns(func, args, kwargs):
                made = func(*args, **kwargs)
                return made if isinstance(made, cls) else cls.from_local(made, *_origin((*args, *kwargs.values())))
            args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
            return func(*args, **kwargs)


def local_logits(logits: Tensor) -> tuple[Tensor, VocabShard | None]:
    """Return the columns of ``logits`` that this rank holds and their shard; None means all columns."""
    return logits.local() if isinstance(logits, VocabParallelLogits) else (logits, None)


def _origin(values: Iterable[Any]) -> tuple[TensorParallelGroup, int]:
    return next((value._group, value._num_tokens) for value in values if isinstance(value, VocabParallelLogits))


def _keeps_columns(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` gives each rank's columns of the result from its columns of the arguments."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if getattr(func, "__name__", "") not in ELEMENTWISE:
        return False
    local = [tensor for tensor in tensors if isinstance(tensor, VocabParallelLogits) and tensor._whole is None]
    scalars = [tensor for tensor in tensors if tensor.ndim == 0]
    return len(local) + len(scalars) == len(tensors) and len({tensor.shape for tensor in local}) == 1
