"""What are logits while each tensor-parallel rank has those of its own part of the vocabulary? A tensor that stands for
all of them.

Joined, they would be a message of all logits and a copy on every rank; their log-probabilities take a few numbers per
token of each rank. So a rank's share is handed on as it is: through what a model does to every logit by itself, such as
scales and soft caps, and to functions that take shares apart with `share_of`. For anything else it is joined first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_realloc.runtime.forward.tp_group import TensorParallelGroup, gather_last_dim

_BY_ELEMENT = frozenset({
    "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__", "div", "true_divide",
    "__truediv__", "__rtruediv__", "__rdiv__", "neg", "__neg__", "tanh", "to", "float", "half", "bfloat16", "double",
})  # fmt: skip
"""What makes each entry from the entry in its place: by name, as methods, operators and functions share them."""


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_SHAPE, _BASE = _getter("shape"), _getter("_base")
_OF_ANY_SHARE = frozenset({
    *map(_getter, ("requires_grad", "grad_fn", "is_leaf", "dtype", "device", "ndim")),
    Tensor.register_hook, Tensor.dim, Tensor.is_floating_point, torch.is_floating_point,
})  # fmt: skip
"""What a share answers as all logits would; FSDP asks for it."""


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyShare:
    """Which columns of the logits a rank has, and how it hears of the others."""

    first_token: int
    """The first column."""
    num_tokens: int
    """V, columns of all ranks."""
    gather: Callable[[Tensor], Tensor]
    """Stacks the ranks' tensors, all of one shape, along a new first dim; in the same order on every rank."""

    def columns(self, width: int, limit: int) -> slice:
        """Return the columns below ``limit`` of all ranks' that lie among this rank's ``width`` ones."""
        return slice(min(self.first_token, limit), min(self.first_token + width, limit))


class SharedLogits(Tensor):
    """(..., V) logits of which this rank has some columns, until somebody asks for more than every logit by itself.

    Then all ranks must ask: joining is collective. From then on it is all logits, for those who hold it too.
    """

    _group: TensorParallelGroup
    _num_tokens: int
    _whole: Tensor | None

    @classmethod
    def of(cls, values: Tensor, group: TensorParallelGroup, num_tokens: int) -> SharedLogits:
        """Return what stands for (..., ``num_tokens``) logits, from this rank's columns as ``torch.chunk`` cuts."""
        shared = values.as_subclass(cls)
        shared._group, shared._num_tokens, shared._whole = group, num_tokens, None
        group.shared_copy = None  # the layers that shared it are done: let go of the graph
        return shared

    def whole(self) -> Tensor:
        """Return all logits. Collective, the first time."""
        if self._whole is None:
            self._whole = gather_last_dim(_plain(self), self._group, self._num_tokens)
        return self._whole

    def share(self) -> tuple[Tensor, VocabularyShare | None]:
        """Return this rank's columns and which they are, or all columns and None once they were joined."""
        if self._whole is not None:
            return self._whole, None
        first, _ = self._group.slice_of(self._num_tokens)
        return _plain(self), VocabularyShare(first, self._num_tokens, self._group.gather)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # joins nothing: debuggers ask
        return f"SharedLogits(columns of rank {self._group.index} of {self._group.size}, V={self._num_tokens})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_ANY_SHARE:
                return func(*args, **kwargs)
            if func == _BASE:
                return None  # what is written into logits goes into the joined ones, and changes no share
            if func == _SHAPE:
                return torch.Size((*func(*args)[:-1], args[0]._num_tokens))
            if _keeps_columns(func, args, kwargs):
                made = func(*args, **kwargs)
                return made if isinstance(made, cls) else cls.of(made, *_origin((*args, *kwargs.values())))
            args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
            return func(*args, **kwargs)


def share_of(logits: Tensor) -> tuple[Tensor, VocabularyShare | None]:
    """Return the columns of ``logits`` that this rank has, and which they are; None: all of them."""
    return logits.share() if isinstance(logits, SharedLogits) else (logits, None)


def rows_of(logits: Tensor, rows: int | Tensor) -> Tensor:
    """Return ``logits[rows]``, in shares if they are; of logits that nobody writes to, since the share is a copy."""
    values, share = share_of(logits)
    if share is None:
        return values[rows]
    assert isinstance(logits, SharedLogits), "others have no share"
    return SharedLogits.of(values[rows], logits._group, logits._num_tokens)


def _plain(shared: SharedLogits) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return shared.as_subclass(Tensor)


def _origin(values: Iterable[Any]) -> tuple[TensorParallelGroup, int]:
    return next((value._group, value._num_tokens) for value in values if isinstance(value, SharedLogits))


def _keeps_columns(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether each rank can do it to its columns, with the result that it has on all of them."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if getattr(func, "__name__", "") not in _BY_ELEMENT:
        return False
    shares = [tensor for tensor in tensors if isinstance(tensor, SharedLogits) and tensor._whole is None]
    numbers = [tensor for tensor in tensors if tensor.ndim == 0]
    return len(shares) + len(numbers) == len(tensors) and len({share.shape for share in shares}) == 1
