"""Initialize a model without memory for its weights, and repeat the operations that fill one of them when it is needed.

Values are those of the same construction in memory. Each random operation runs on a temporary tensor, so that the
generator advances, and is recorded with the generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig

from lightning_realloc.runtime.model.structure import replace_parameter, tied_names

RECIPE = "recipe"
"""Attribute of a parameter on the meta device that holds its `Recipe`, or another object that can ``make`` values."""
_OVERWRITING = frozenset({"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_"})
"""Operations after which earlier values do not matter."""
_MAX_KEPT_ELEMENTS = 1 << 20
"""Largest parameter whose values at its construction are kept. Larger ones must be filled by operations in place."""


class NotRecordableError(Exception):
    """An initialization computes with weights in another way than in place, or leaves large ones as constructed."""


@dataclass(frozen=True, slots=True)
class _Box:
    """A view of the parameter that an operation changes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation in place."""

    func: Any
    args: tuple[Any, ...]
    """Arguments, with a `_Box` in place of the parameter."""
    kwargs: dict[str, Any]
    random_state: Tensor | None
    """State of the generator before a random operation."""

    def run(self, whole: Tensor) -> None:
        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
        args = tree_map_only(_Box, lambda box: whole.as_strided(box.size, box.stride, box.offset), self.args)
        self.func(*args, **self.kwargs)


@dataclass(slots=True)
class Recipe:
    """The operations that fill one parameter."""

    shape: torch.Size
    dtype: torch.dtype
    steps: list[_Step] = field(default_factory=list)

    def make(self) -> Tensor:
        """Return the values of the whole parameter."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for step in self.steps:
                step.run(whole)
        return whole


def weight_values(parameter: Tensor) -> Tensor:
    """Return the values of an undivided parameter, which its `Recipe` makes if it has one."""
    recipe: Any = getattr(parameter, RECIPE, None)
    values: Tensor = parameter.detach() if recipe is None else recipe.make()
    return values


def defer_init(construct: Callable[[PreTrainedConfig], nn.Module], config: PreTrainedConfig) -> nn.Module:
    """Return a new module whose parameters are on the meta device, with a `Recipe` each; buffers are real.

    An initialization that cannot be recorded is repeated in memory, with the same random numbers.
    """
    before = torch.get_rng_state()
    recorder = _Recorder()
    hook = register_module_parameter_registration_hook(recorder.free)
    try:
        with recorder:
            model = construct(config)
        recorder.require_filled()
    except NotRecordableError as reason:
        rank_zero_info(f"a model is whole in memory before it is divided, since {reason}")
        hook.remove()
        torch.set_rng_state(before)
        return construct(config)
    finally:
        hook.remove()
    recorder.move_to_meta(model)
    return model


class _Recorder(TorchDispatchMode):
    """Records operations on parameters whose memory `free` has released. They stay on the CPU meanwhile.

    Functions of ``torch.nn.init`` do nothing on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recipes: dict[int, Recipe] = {}
        self._parameters: list[nn.Parameter] = []
        """Parameters with recipes. They keep their storages alive, which identify them."""
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def free(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Release the memory of a new parameter."""
        if parameter is None or _key(parameter) in self._recipes:
            return
        recipe = Recipe(parameter.shape, parameter.dtype)
        if parameter.numel() <= _MAX_KEPT_ELEMENTS:  # may have values already, such as the ones of a norm
            values = parameter.detach().clone()
            recipe.steps.append(_Step(torch.ops.aten.copy_.default, (_whole(parameter), values), {}, None))
        parameter.untyped_storage().resize_(0)
        self._recipes[_key(parameter)] = recipe
        self._parameters.append(parameter)

    def move_to_meta(self, model: nn.Module) -> None:
        """Replace the parameters by ones on the meta device with their recipes."""
        for owner, names in tied_names(model).items():
            parameter = model.get_parameter(owner)
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            setattr(empty, RECIPE, self._recipes[_key(parameter)])
            replace_parameter(model, names, empty)

    def require_filled(self) -> None:
        """Raise NotRecordableError for a parameter without values."""
        for recipe in self._recipes.values():
            if not recipe.steps:
                raise NotRecordableError(
                    f"a weight of shape {tuple(recipe.shape)} keeps the values of its construction"
                )

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation; one that changes a parameter is recorded, and run on a temporary tensor if it is random."""
        options = dict(kwargs or {})
        leaves = tree_leaves((args, options))
        freed = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _key(leaf) in self._recipes]
        if not freed:
            return func(*args, **options)
        target = args[0]
        if func.is_view:
            return _view(func, target, args, options)
        if len(freed) > 1 or freed[0] is not target or not func._schema.is_mutable:
            raise NotRecordableError(f"its initialization computes with weights ({func})")
        self._record(self._recipes[_key(target)], func, target, args[1:], options)
        return target

    def _record(
        self, recipe: Recipe, func: Any, target: Tensor, others: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        step = _Step(func, (_whole(target), *others), options, torch.get_rng_state() if is_random else None)
        if func._schema.name in _OVERWRITING and target.shape == recipe.shape:
            recipe.steps.clear()
        recipe.steps.append(step)
        if is_random:
            func(self._room_for(target), *others, **options)

    def _room_for(self, tensor: Tensor) -> Tensor:
        """Return undefined memory of a tensor's shape, the same for all: malloc would fragment memory by new blocks."""
        num_bytes = tensor.numel() * tensor.itemsize
        if len(self._scratch) < num_bytes:
            self._scratch = torch.empty(0, dtype=torch.uint8)  # first free the old block
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(tensor.dtype).view(tensor.shape)


def _view(func: Any, target: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return a view of a tensor without memory; views are checked against the size of the storage."""
    storage = target.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    storage.resize_((int(target.storage_offset()) + last + 1) * target.itemsize)
    try:
        return func(*args, **options)
    finally:
        storage.resize_(0)


def _whole(tensor: Tensor) -> _Box:
    return _Box(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
