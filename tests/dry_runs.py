"""Remember the results of dry runs in a process of the pool, which lays out models of a few structures again and again.

Every fit describes each model twice, and checks it by forwards without weights, in a tenth of the CPU time of a tiny
fit. The result depends on the classes of the modules, their code, attributes and shapes alone. So a structure is
checked once in each process; a refusal or a failure is raised again by the check itself. The tests of the checks and
descriptions run in pytest's own process, where nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_realloc.runtime.model.structure import tied_names

_PLAIN = (str, int, float, tuple, list, type(None))


def remember_dry_runs() -> None:
    """Replace both checks in this process by ones that remember which structures passed, and descriptions for fits."""
    from lightning_realloc.runtime.forward.attention import packed_attention
    from lightning_realloc.runtime.parallel import model_spec
    from lightning_realloc.strategies.pool import builder, memory_check

    packed_attention._check_segments = _remembered(packed_attention._check_segments)
    model_spec.find_mixed_features = _remembered(model_spec.find_mixed_features)
    builder.describe_model = memory_check.describe_model = _described_once(model_spec.describe_model)


def remember_entry_points() -> None:
    """Let Lightning look for callbacks of installed packages once, instead of for every Trainer."""
    from lightning.fabric.utilities import registry

    registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]


def remember_shardings() -> None:
    """Let DTensor compute the placements of an operation's outputs once: they take a sixth of a tiny fit.

    Its own caches keep meshes, and are emptied after every run. What is remembered has numbers in place of meshes.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    ShardingPropagator.propagate_op_sharding_non_cached = _propagated_once(  # type: ignore[method-assign]
        ShardingPropagator.propagate_op_sharding_non_cached
    )


def leave_logged_values() -> None:
    """Let Lightning leave a logged value that is on the CPU where it is.

    It visits all attributes of every metric in every step, to move the value: in a thirtieth of a tiny fit.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    move, cpu = _ResultMetric.to, torch.device("cpu")

    def moved(metric: _ResultMetric, device: torch.device | str) -> _ResultMetric:
        stays = metric.is_tensor and metric.value.device == cpu == torch.device(device)
        return metric if stays else move(metric, device)

    _ResultMetric.to = moved  # type: ignore[method-assign, assignment]


def _described_once(describe: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Hashable, Any] = {}

    def described(model: nn.Module, **options: Any) -> Any:
        ties = repr(list(tied_names(model).items()))
        key = (structure(model), ties, repr(getattr(model, "tp_plan", None)), repr(sorted(options.items())))
        if key not in known:
            known[key] = describe(model, **options)
        return known[key]

    return described


def _remembered(check: Callable[..., Any]) -> Callable[..., Any]:
    passed: set[Hashable] = set()

    def remembered(model: nn.Module, *others: Any) -> Any:
        key = (structure(model), repr(others))
        if key in passed:
            return None
        found = check(model, *others)
        if found is None:
            passed.add(key)
        return found

    return remembered


class _Spec(NamedTuple):
    """A ``DTensorSpec`` whose mesh is one of a list."""

    mesh: int
    placements: Any
    tensor_meta: Any
    shard_order: Any
    is_strided: bool | None


def _propagated_once(propagate: Callable[..., Any]) -> Callable[..., Any]:
    from torch.distributed.tensor._op_schema import OutputSharding

    known: dict[Hashable, Any] = {}

    def propagated(propagator: Any, schema: Any) -> Any:
        meshes: list[Any] = []
        arguments = _without_meshes([*schema.args_schema, *sorted(schema.kwargs_schema.items())], meshes)
        key = schema.op, arguments, tuple(mesh._hash_key() for mesh in meshes)
        if key in known:
            return OutputSharding(_with_meshes(known[key], meshes))
        found, num_given = propagate(propagator, schema), len(meshes)
        output = _without_meshes(found.output_spec, meshes)
        if found.redistribute_schema is None and len(meshes) == num_given:
            known[key] = output
        return found

    return propagated


def _without_meshes(value: Any, meshes: list[Any]) -> Any:
    """Return arguments or outputs of an operation that can be compared and kept; their meshes join the list."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if isinstance(value, list | tuple):
        return type(value) is list, tuple(_without_meshes(one, meshes) for one in value)
    if not isinstance(value, DTensorSpec):
        return repr(value) if isinstance(value, int | float) else value  # 1, 1.0 and True are equal
    if value.mesh not in meshes:
        meshes.append(value.mesh)
    strided = value.use_strided_shard_as_shard_order
    order = None if strided else value.shard_order
    return _Spec(meshes.index(value.mesh), value.placements, value.tensor_meta, order, strided)


def _with_meshes(value: Any, meshes: list[Any]) -> Any:
    """Undo `_without_meshes`."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if isinstance(value, _Spec):
        return DTensorSpec(meshes[value.mesh], *value[1:])
    if isinstance(value, tuple):
        is_list, items = value
        restored = [_with_meshes(one, meshes) for one in items]
        return restored if is_list else tuple(restored)
    return value


def structure(model: nn.Module) -> Hashable:
    """Return all that a forward without weights depends on: code, plain attributes, shapes and configuration."""
    config = getattr(model, "config", None)
    return repr(config if config is None else sorted(vars(config).items())), *(
        (
            name,
            type(module),
            getattr(module.forward, "__func__", module.forward),
            repr([(key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN)]),
            tuple((key, weight.shape) for key, weight in module.named_parameters(recurse=False)),
        )
        for name, module in model.named_modules()
    )
