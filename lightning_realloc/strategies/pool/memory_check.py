"""Check that a plan fits into memory: by a forecast before any model is built, and by an allocation before a move.

The forecast reads configurations and shapes alone. The allocation is needed since memory is shared and fragmented: a
rank that runs out of memory during a move leaves the others waiting in it. So all ranks allocate before the move. The
allocator keeps the block, and the move's tensors come out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_realloc.batch.samples import EXPERTS
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, PlanError, ReallocError
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.generation.forward.latents import latent_modules
from lightning_realloc.generation.forward.packed_linear import packs
from lightning_realloc.limits import VLLM_CHUNK_BYTES, VLLM_CPU_CACHE_BYTES, VLLM_MEMORY_SHARE
from lightning_realloc.runtime.forward.attention.packable import check_packable
from lightning_realloc.runtime.forward.routers import describe_missing_routers, has_routers
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.model.quantized import quantized_bytes
from lightning_realloc.runtime.model.training_mode import can_recompute
from lightning_realloc.runtime.parallel.model_spec import MAX_TENSOR_PARALLEL, describe_model
from lightning_realloc.strategies.algorithm_protocol import EngineOptions, RunnableAlgorithm
from lightning_realloc.strategies.pool.precision import copy_dtype_of, master_dtype_of
from lightning_realloc.tuning.memory.advice import SUGGESTED_ADAPTERS, find_excess, in_half_precision
from lightning_realloc.tuning.memory.forecast import forecast_memory
from lightning_realloc.tuning.memory.parts import (
    DraftMemory,
    EngineMemory,
    MemorySettings,
    VLLMMemory,
    Workload,
    usable_bytes,
)
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.tower import Tower

if TYPE_CHECKING:
    from lightning_realloc.generation import Speculation

log = logging.getLogger(__name__)


def describe_roles(
    roles: Iterable[Any],
    tp_plans: Mapping[str, Mapping[str, str]],
    *,
    max_tp: int = MAX_TENSOR_PARALLEL,
    packed: Collection[str] = (),
    replayed: Collection[str] = (),
) -> dict[str, RoleMemory]:
    """Return role -> its description for memory forecasts. Loads nothing but configurations.

    Args:
        tp_plans: Role -> tensor-parallel styles, for models without a plan of their own.
        max_tp: Largest tensor-parallel degree of any layout: a run's number of ranks.
        packed: Roles that run packed sequences.
        replayed: Roles whose tokens are given the experts of generation.

    Raises:
        ConfigError: for a model that cannot run packed sequences, or has no routers, and has to.
        PlanError: for a configuration without the sizes of a decoder.
    """
    described: dict[str, RoleMemory] = {}
    for role in sorted(
        roles, key=lambda role: role.shares is not None
    ):  # a role that shares a base comes after its owner
        if role.shares in described:
            described[role.name] = replace(described[role.shares], frozen_params=frozenset(), shares=role.shares)
            continue
        model = role.describe()
        if role.name in packed:
            check_packable(model)
        if role.name in replayed and not has_routers(model):
            raise ConfigError(f"{role.name}: {describe_missing_routers(model)}")
        spec = describe_model(model, tp_plan=tp_plans.get(role.name), max_tp=max_tp)
        config = getattr(model, "config", None)
        shape = tower = None
        if hasattr(config, "get_text_config"):
            num_outputs = None if role.task == "causal_lm" else 1
            keeps_latents = bool(latent_modules(model))
            shape = ModelShape.from_config(config, spec, num_outputs=num_outputs, keeps_latents=keeps_latents)
            tower = Tower.from_config(config, spec)
        described[role.name] = RoleMemory(
            model=spec,
            shape=shape,
            tower=tower,
            frozen_params=role.frozen_parameters(model),
            quantized_bytes=quantized_bytes(model),
            average_of=role.average_of,
            deferred=role.can_defer_weights,
            can_recompute=can_recompute(model),
        )
    return described


def replayed_roles(dataflow: Dataflow) -> tuple[str, ...]:
    """Return the roles whose tokens are given the experts of generation, by ``router_replay``."""
    return tuple(call.role for call in dataflow.calls if call.role is not None and EXPERTS in call.produces)


def refuse_offload_without_gpu(plan: ExecutionPlan, device_type: str) -> None:
    """Raise PlanError for a plan that offloads activations from devices of another type than ``"cuda"``."""
    offloading = [name for name, call in plan.calls if call.activation_offload]
    if offloading and device_type != "cuda":
        raise PlanError(
            f"calls.{offloading[0]}: activation_offload moves activations from a CUDA device to host memory, and the "
            f"ranks are on {device_type}; leave it out, or set gradient_checkpointing"
        )


def describe_with_adapters(
    roles: Iterable[Any], tp_plans: Mapping[str, Mapping[str, str]], *, max_tp: int
) -> dict[str, RoleMemory] | None:
    """Return the description of the roles with LoRA adapters in all trained ones; None if they cannot have any.

    A reference from the actor's source then is the actor's base.
    """
    given = {role.name: role for role in roles}
    if any(role.has_adapters for role in given.values()):
        return None
    changed, actor = [], given.get("actor")
    for role in given.values():
        is_base = role.name == "reference" and role.peft is None and actor is not None and role.source is actor.source
        peft = dict(SUGGESTED_ADAPTERS) if role.trained else role.peft
        changed.append(replace(role, peft=peft, shares="actor" if is_base else role.shares))
    try:
        return describe_roles(changed, tp_plans, max_tp=max_tp)
    except ReallocError:  # a model that adapters do not fit
        return None


def engine_memory(module: RunnableAlgorithm, device: torch.device, copy_dtype: torch.dtype) -> EngineMemory:
    """Return the engine's settings that its memory depends on. Raises GenerationError for an unreadable draft model."""
    if "vllm" in CAPABILITIES[module.engine]:
        device_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
        return memory_of_vllm(module.generation_options, device_bytes)
    if "keeps_cache" not in CAPABILITIES[module.engine]:
        return EngineMemory()
    speculation, options = module.speculation, module.generation_options
    return EngineMemory(
        max_cache_bytes=options.max_cache_bytes,
        has_environment=module.has_environment,
        moves_samples=bool(options.sample_reallocation),
        frees_cache=options.free_cache is not False,
        captures_anew=options.free_cache is True,  # "auto" keeps graphs where memory allows it
        captures_collectives=options.cuda_graphs == "collective",
        num_ahead=0 if speculation is None else speculation.most_ahead,
        draft=None if speculation is None else _draft_memory(speculation),
        packs_weights=device.type == "cpu" and packs(copy_dtype),
    )


def memory_of_vllm(options: EngineOptions, device_bytes: int | None) -> EngineMemory:
    """Return the settings that the memory of a vLLM depends on. ``device_bytes``: memory of a GPU; None: on CPUs."""
    vllm, bound, on_cpu = options.vllm, options.max_cache_bytes, device_bytes is None
    share = VLLM_MEMORY_SHARE if vllm is None else vllm.memory_share
    memory = VLLMMemory(
        cache_bytes=bound or (VLLM_CPU_CACHE_BYTES if on_cpu else 0),
        least_bytes=0 if device_bytes is None or bound else int(share * device_bytes),
        chunk_bytes=VLLM_CHUNK_BYTES if on_cpu else 0,
        takes_adapters=vllm is None or not vllm.merge_adapters,
        is_elsewhere=vllm is not None and vllm.address is not None,
    )
    return EngineMemory(vllm=memory, frees_cache=vllm is not None and vllm.sleep)


def _draft_memory(speculation: Speculation) -> DraftMemory | None:
    source = speculation.draft_model
    if source is None:
        return None
    described = _describe_draft(source) if isinstance(source, nn.Module) else _describe_named_draft(source)
    return DraftMemory(model=described, learns=speculation.draft_learning_rate is not None)


@lru_cache(
    maxsize=8
)  # read at every change of plans; keyed by name alone, since a module as a key would never be freed
def _describe_named_draft(source: str | Path) -> RoleMemory:
    return _describe_draft(source)


def _describe_draft(source: str | Path | nn.Module) -> RoleMemory:
    from lightning_realloc.generation.speculative.draft_model import describe_draft_model

    model: Any = describe_draft_model(source)
    spec = describe_model(model, max_tp=1)
    shape = ModelShape.from_config(model.config, spec, keeps_latents=bool(latent_modules(model)))
    return RoleMemory(model=spec, shape=shape)


def settings_of_precision(precision: str, *, optimizer_bytes: int = 8) -> MemorySettings:
    """Return the bytes per element on CUDA devices under a Trainer's precision.

    ``optimizer_bytes``: optimizer state of one float32 weight; by default that of AdamW.
    """
    master, copy = master_dtype_of(precision).itemsize, copy_dtype_of(precision).itemsize
    return MemorySettings(
        master_bytes=master, copy_bytes=copy, gathered_bytes=copy, optimizer_bytes=optimizer_bytes * master // 4
    )


def refuse_too_large(
    dataflow: Dataflow,
    plan: ExecutionPlan,
    roles: Mapping[str, RoleMemory],
    settings: MemorySettings,
    *,
    rank: int,
    budget_bytes: int,
    adapted: Callable[[], Mapping[str, RoleMemory] | None],
    shortage: Callable[[], str | None],
) -> None:
    """Refuse a plan that needs more than ``budget_bytes`` on some rank, however short its sequences are.

    Every rank forecasts its own bytes. Collective over all ranks.

    Args:
        adapted: Returns the roles with adapters in place of trained weights, for the message; None if they cannot have
            any.
        shortage: Tries the plans of a run that is given none, and returns why none fits, for the message; None if one
            does. Collective.

    Raises:
        PlanError: on every rank, with phase, rank, bytes and changes that would fit.
    """

    def forecast(roles: Mapping[str, RoleMemory], settings: MemorySettings, candidate: ExecutionPlan) -> Any:
        return forecast_memory(dataflow, candidate, roles, settings, None, ranks=(rank,))

    def lighter() -> Iterator[tuple[str, Any]]:
        others, half, precision = adapted(), in_half_precision(settings), "Trainer(precision='bf16-true')"
        if others is not None:
            yield f"peft_config={dict(SUGGESTED_ADAPTERS)}", partial(forecast, others, settings)
        if half != settings:
            yield precision, partial(forecast, roles, half)
        if others is not None and half != settings:
            yield f"both peft_config and {precision}", partial(forecast, others, half)

    current = partial(forecast, roles, settings)
    excess = find_excess(dataflow, plan, current, budget_bytes=budget_bytes, lighter=lighter)
    found = [text for text in gather_objects(excess) if text is not None]
    if found:
        way_out = shortage() or "without plan=, or with plan='heuristic', the run takes one that fits"
        raise PlanError(f"{found[0]}. Activations and caches, which depend on lengths, come on top; {way_out}")


def has_room_for_caches(
    dataflow: Dataflow,
    plan: ExecutionPlan,
    roles: Mapping[str, RoleMemory],
    settings: MemorySettings,
    workload: Workload,
    *,
    rank: int,
    budget_bytes: int,
) -> bool:
    """Return whether every rank can keep its caches between generations, if samples get as long as they may.

    Every rank forecasts its own bytes. Collective over all ranks. Graphs are not forecast, and left to the share of
    memory that `usable_bytes` keeps free. False where replicas are freed, since graphs do not outlive them; where roles
    are offloaded, since a checkpoint brings all of them back; and for models without a forecast.
    """
    if settings.frees_copies or plan.offload:
        return False
    try:
        forecast = forecast_memory(dataflow, plan, roles, settings.with_kept_caches(), workload, ranks=(rank,))
        has_room = forecast.iteration_peak.parts.total <= usable_bytes(budget_bytes)
    except ReallocError as error:
        log.debug("caches are freed after each generation, as there is no forecast of memory: %s", error)
        has_room = False
    return all(gather_objects(has_room))


def allocate_once(num_bytes: int, device: torch.device) -> None:
    """Allocate bytes and free them. Raises torch.cuda.OutOfMemoryError if there is no room."""
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def require_free_memory(
    num_bytes: int,
    device: torch.device,
    *,
    what: str,
    way_out: str = "use a plan that moves fewer roles or cuts them more, or offload",
    take: Callable[[int, torch.device], Any] = allocate_once,
) -> None:
    """Refuse a step that some rank has no room for. Does nothing on CPU. Collective over all ranks.

    Raises:
        PlanError: on every rank, naming the first rank without room.
    """
    if device.type == "cpu":
        return
    has_room = True
    try:
        take(num_bytes, device)
    except torch.cuda.OutOfMemoryError:
        has_room = False
    answers = gather_objects((has_room, num_bytes))
    without = [(rank, size) for rank, (has, size) in enumerate(answers) if not has]
    if without:
        rank, size = without[0]
        raise PlanError(
            f"{what} needs {size / 2**20:.0f} MiB more on rank {rank}, and its device has no room; {way_out}"
        )
