"""Read or make a plan, check it against an algorithm's models and memory, and build the pool of models.

All methods of `PoolBuilder` are collective over all ranks, and raise an error on every one of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import PlanError
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.remote_path import expand_home
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.messages.objects import gather_objects
from lightning_realloc.runtime.model.adapter_layers import adapted_layers
from lightning_realloc.runtime.model.structure import vision_parts
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.transfer.shared_memory import shared_memory_obstacle
from lightning_realloc.strategies.generation_limits import (
    generation_limits,
    refuse_generation_layouts,
)
from lightning_realloc.strategies.largest_workload import largest_workload, usual_sequence
from lightning_realloc.strategies.pool.memory_check import (
    describe_roles,
    describe_with_adapters,
    engine_memory,
    has_room_for_caches,
    refuse_offload_without_gpu,
    refuse_too_large,
    replayed_roles,
    require_free_memory,
    settings_of_precision,
)
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.pool_options import PoolOptions, RunFacts
from lightning_realloc.strategies.pool.precision import cast_parameters
from lightning_realloc.strategies.pool.run_policies import RunPolicies
from lightning_realloc.tuning.memory.forecast import forecast_memory, transition_bytes
from lightning_realloc.tuning.memory.parts import MemorySettings, Workload
from lightning_realloc.tuning.search.default_plan import DefaultPlan, default_plan, largest_by_phase
from lightning_realloc.tuning.search.heuristic import heuristic_plan
from lightning_realloc.tuning.search.planning_task import PlanningTask
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.tower import Tower

PlanSource = Mapping[str, Any] | str | Path | ExecutionPlan  # the command line takes the first type that fits
NamedPlan = ExecutionPlan | Literal["heuristic", "static"]
"""A plan, or the name of a way to make one."""

_POOL_ATTRIBUTE = "_realloc_pool"
"""Attribute under which a LightningModule keeps its pool for the next Trainer."""
_MIN_WEIGHTS_ANNOUNCED = 500_000_000
"""Weights from which on a model is announced before it is read, which takes seconds to minutes."""
_ROLES_ATTRIBUTE = "_realloc_roles"
"""Attribute with the roles' descriptions. Describing them again would take a tenth of the time of a change of plans."""


def read_plan_source(plan: PlanSource) -> NamedPlan:
    """Read a plan from a file or a mapping; plans and names are returned unchanged. Raises PlanError for others."""
    if isinstance(plan, ExecutionPlan):
        return plan
    if isinstance(plan, Mapping):
        return ExecutionPlan.from_mapping(plan)
    if not isinstance(plan, str | Path):
        raise PlanError(f"plan={plan!r} is a {type(plan).__name__}; give a path, a mapping, or an ExecutionPlan")
    if plan == "heuristic" or plan == "static":
        return plan  # type: ignore[return-value]
    if isinstance(plan, str) and not os.path.exists(expand_home(plan)) and not Path(plan).suffix:
        raise PlanError(f"plan={plan!r} is neither 'heuristic' nor 'static', and there is no such file in {Path.cwd()}")
    return ExecutionPlan.load(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBuilder:
    """Lays out the models of one algorithm."""

    module: Any
    """The algorithm."""
    options: PoolOptions
    """Settings of the pool that do not depend on a role."""
    memory_budget: int
    """Bytes of one device that a plan may use."""
    policies: RunPolicies
    """Decisions of callbacks about weights."""
    pushes_weights: bool = False
    """Whether trained weights travel in the background to ranks that only generate."""
    _described: dict[str, RoleMemory] = field(default_factory=dict, init=False)
    """Role -> its description, once one was asked for."""
    dataflow: Dataflow = field(init=False)
    """The algorithm's calls. The algorithm works them out anew whenever it is asked."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataflow", self.module.dataflow)

    @property
    def facts(self) -> RunFacts:
        """This rank, and where it runs."""
        return self.options.facts

    def plan(self, source: NamedPlan, specs: Mapping[str, ModelSpec]) -> ExecutionPlan:
        """Return a checked plan for models of these shapes, the same on all ranks.

        Raises:
            PlanError: when ranks hold different plans, and for one that does not fit the algorithm, ranks or device.
            LayoutError: for a layout that does not fit its model.
            GenerationError: for a generating call whose layout cannot follow the algorithm's options.
        """
        plan = self._make_plan(source, specs).completed(self.dataflow)
        if len(set(gather_objects(plan.digest))) > 1:  # first, so that every rank finds the same errors in it
            raise PlanError("ranks hold different execution plans; give every process the same file or object")
        plan.check(self.dataflow, self.facts.world_size)
        plan.check_models(self.dataflow, specs)
        refuse_offload_without_gpu(plan, self.facts.device.type)
        self._refuse_compiled_schedule(plan)
        if self.policies.reallocation.enabled:  # else each role stays in one layout
            refuse_generation_layouts(self.module, self.dataflow, plan)
        return plan

    def _refuse_compiled_schedule(self, plan: ExecutionPlan) -> None:
        for name, call in plan.calls:
            if call.pipeline_schedule == "zero_bubble":
                backend = self.module.train_options_of(self.dataflow.call(name).role).compile
                if backend is not None:
                    raise PlanError(
                        f"calls.{name}: pipeline_schedule='zero_bubble' divides the backward pass of a layer, which "
                        f"compile={backend!r} fuses; leave one of them out"
                    )

    def _make_plan(self, source: NamedPlan, specs: Mapping[str, ModelSpec]) -> ExecutionPlan:
        """Return the plan itself, or make the one that is named; see `heuristic_plan`."""
        if isinstance(source, ExecutionPlan):
            return source
        if source == "static":
            layout = Layout(ParallelDims(fsdp=self.facts.world_size), tuple(range(self.facts.world_size)))
            return ExecutionPlan.static(self.dataflow, layout)
        return heuristic_plan(
            self.dataflow,
            specs,
            self.facts.cluster,
            world_size=self.facts.world_size,
            element_bytes=self.options.copy_dtype.itemsize,
            sharers=self.options.sharers,
            **generation_limits(self.module),
        )

    def choose_plan(self, source: NamedPlan) -> ExecutionPlan:
        """Return a checked plan; for ``"heuristic"`` one that fits, or else the heuristic one.

        Reads only the models' configurations. Collective over all ranks.

        Raises:
            PlanError: see `plan`, also for further errors.
        """
        roles = self.describe_roles()
        if all(gather_objects(source == "heuristic")):  # else ranks were given different plans, which is refused below
            found = self._default_plan(roles)
            source = found.plan
            if found.reason is not None:
                rank_zero_info(found.reason)
        return self.plan(source, {name: role.model for name, role in roles.items()})

    def check_memory(self, plan: ExecutionPlan, *, running: ExecutionPlan | None = None) -> None:
        """Refuse a plan that does not fit into memory. Reads only the models' configurations.

        Args:
            running: The plan in use. If given, devices must also have room for the move from it.

        Raises:
            PlanError: for a plan that is too large, with phase, rank, bytes and what would fit.
        """
        roles = self.describe_roles()
        plan, settings = self.for_forecast(plan)
        tp_plans, max_tp = self.options.tp_plans, self.facts.world_size
        refuse_too_large(
            self.dataflow,
            plan,
            roles,
            settings,
            rank=self.facts.rank,
            budget_bytes=self.memory_budget,
            adapted=partial(describe_with_adapters, self.module.roles(), tp_plans, max_tp=max_tp),
            shortage=lambda: self._default_plan(roles).shortage,
        )
        if running is not None and self.facts.device.type != "cpu":
            extra = transition_bytes(self.dataflow, running, plan, roles, settings, rank=self.facts.rank)
            require_free_memory(extra, self.facts.device, what="moving to the new plan")

    def _default_plan(self, roles: Mapping[str, RoleMemory]) -> DefaultPlan:
        """Return the plan of a run that is given none, on devices with the least memory that a rank may use."""
        settings, workload = self.memory_settings(), self.largest_workload()

        def phase_bytes(plan: ExecutionPlan) -> dict[str, int]:
            run, changed = self.policies.applied_to(plan, self.dataflow, settings)
            own = forecast_memory(self.dataflow, run, roles, changed, workload, ranks=(self.facts.rank,))
            ranks = gather_objects(largest_by_phase(own))
            return {phase: max(sizes[phase] for sizes in ranks) for phase in ranks[0]}

        task = PlanningTask(
            dataflow=self.dataflow,
            roles=roles,
            cluster=self.facts.cluster,
            settings=settings,
            workload=workload,
            memory_budget=min(gather_objects(self.memory_budget)),
            **generation_limits(self.module),
        )
        return default_plan(task, phase_bytes, world_size=self.facts.world_size)

    def keeps_caches(self, plan: ExecutionPlan) -> bool:
        """Return whether engines keep caches and CUDA graphs between generations. Collective over all ranks."""
        wanted = self.module.generation_options.free_cache
        if wanted != "auto" or "keeps_cache" not in CAPABILITIES[self.module.engine] or self.facts.device.type == "cpu":
            return wanted is False
        workload = self.largest_workload()
        if workload is None or torch.are_deterministic_algorithms_enabled():
            return False
        plan, settings = self.for_forecast(plan)
        free = torch.cuda.mem_get_info(self.facts.device)[0] + torch.cuda.memory_reserved(self.facts.device)
        roles, budget = self.describe_roles(), min(self.memory_budget, free)
        return has_room_for_caches(
            self.dataflow, plan, roles, settings, workload, rank=self.facts.rank, budget_bytes=budget
        )

    def largest_workload(self) -> Workload | None:
        """Return the largest workload that memory must have room for; None if it is unknown."""
        return largest_workload(self.module, self.module.trainer, self.dataflow.trained_roles, self.tower)

    @property
    def tower(self) -> Tower | None:
        """Tower of the first trained role, as which the rows' images are counted; None for a model of text."""
        trained = self.dataflow.trained_roles
        return self.describe_roles()[trained[0]].tower if trained else None

    def for_forecast(self, plan: ExecutionPlan) -> tuple[ExecutionPlan, MemorySettings]:
        """Return a plan and the settings of memory as callbacks change both."""
        return self.policies.applied_to(plan, self.dataflow, self.memory_settings())

    def memory_settings(self) -> MemorySettings:
        """Return the bytes per element that the Trainer's and the algorithm's settings imply.

        Raises:
            GenerationError: for a draft model whose configuration cannot be read.
        """
        options, on_cpu = self.options, self.facts.device.type == "cpu"
        return replace(
            settings_of_precision(self.facts.precision, optimizer_bytes=self.module.optimizer_bytes),
            shares_memory=on_cpu and options.transport != "direct" and shared_memory_obstacle() is None,
            builds_on_device=on_cpu,
            pushes_weights=self.pushes_weights and on_cpu,
            engine=engine_memory(self.module, self.facts.device, options.copy_dtype),
        )

    def describe_roles(self) -> dict[str, RoleMemory]:
        """Return role -> its description for estimates. The module keeps it once its models are laid out."""
        kept: dict[str, RoleMemory] = vars(self.module).get(_ROLES_ATTRIBUTE, self._described)
        if kept.keys() >= set(self.dataflow.roles):
            return kept
        roles = describe_roles(
            self.module.roles(),
            self.options.tp_plans,
            max_tp=self.facts.world_size,
            packed=self.module.packed_roles,
            replayed=replayed_roles(self.dataflow),
        )
        for role in self.dataflow.trained_roles:
            roles[role] = _balanced(roles[role], self.module.train_options_of(role).router_aux_loss_coef)
        roles = self._with_images(roles)
        self._described.update(roles)
        if _POOL_ATTRIBUTE in vars(self.module):
            setattr(self.module, _ROLES_ATTRIBUTE, roles)
        return roles

    def _with_images(self, roles: dict[str, RoleMemory]) -> dict[str, RoleMemory]:
        """Return the roles with the stages that the data's images balance; those of the pool, once there is one."""
        towers = [name for name, role in roles.items() if role.tower is not None]
        if not towers:
            return roles
        pool: ModelPool | None = vars(self.module).get(_POOL_ATTRIBUTE)
        if pool is not None:
            placed = {name: pool.specs[name].costs for name in towers if name in pool.specs}
            return roles | {
                name: replace(roles[name], model=replace(roles[name].model, costs=costs))
                for name, costs in placed.items()
            }
        trained = self.dataflow.trained_roles
        images, tokens = usual_sequence(self.module, self.module.trainer, roles[trained[0]].tower if trained else None)
        return {name: role.with_images(images, tokens, is_trained=name in trained) for name, role in roles.items()}

    def build(self, source: NamedPlan) -> ModelPool:
        """Build the pool, or return the one that an earlier Trainer built for this module.

        Raises:
            PlanError: see `plan`, and for a role without a model.
            ConfigError: when the earlier Trainer had another plan or other settings.
        """
        earlier: ModelPool | None = vars(self.module).get(_POOL_ATTRIBUTE)
        models, master_dtype = self.module.models(), self.options.master_dtype
        if master_dtype != torch.float32:
            placed = {id(parameter) for model in models.values() for parameter in model.parameters()}
            others = {name for name, parameter in self.module.named_parameters() if id(parameter) not in placed}
            cast_parameters(self.module, master_dtype, names=others)
        elif earlier is None:
            self._log_widened(models)
        specs = self._specs(models, earlier)
        if earlier is not None:
            kept = source == "heuristic"  # a run that is given no plan goes on with the one that the models lie in
            self._reuse(earlier, earlier.plan.completed(self.dataflow) if kept else self.plan(source, specs))
            return earlier
        plan = self.plan(source, specs)
        meshes = MeshRegistry(self.facts.device.type)
        num_ranks = self.facts.world_size
        meshes.create((*plan.layouts, Layout(ParallelDims(dp=num_ranks), tuple(range(num_ranks)))))
        pool = ModelPool(self.dataflow, plan, meshes, self.options)
        for role in self.dataflow.roles:
            if role not in self.options.sharers:
                _announce(role, specs[role], plan.layout(self.dataflow.home_call(role).name))
                pool.place(role, models[role], specs[role])
        setattr(self.module, _POOL_ATTRIBUTE, pool)
        return pool

    def _reuse(self, pool: ModelPool, plan: ExecutionPlan) -> None:
        """Refuse another plan than a pool's; add calls that the pool lacks, such as that of `Evaluation`."""
        extended = pool.plan.with_rest_of(plan)
        if plan.with_rest_of(pool.plan) == extended != pool.plan:
            pool.meshes.create(extended.layouts)
            pool.dataflow = self.dataflow
            pool.apply_plan(extended, {})
        pool.require_same(plan.with_rest_of(pool.plan), self.options)

    def _log_widened(self, models: Mapping[str, nn.Module]) -> None:
        """Log given models whose trained or averaged weights become float32: narrower ones lose small updates."""
        given = {role.name for role in self.module.roles() if isinstance(role.source, nn.Module)}
        found: dict[str, torch.dtype] = {}
        for role in (*self.dataflow.trained_roles, *self.options.averages):
            for parameter in models[role].parameters() if role in models and role in given else ():
                changes = parameter.requires_grad or role in self.options.averages
                if changes and parameter.is_floating_point() and parameter.dtype != torch.float32:
                    found.setdefault(role, parameter.dtype)
        if found:
            casts = ", ".join(f"{role} ({dtype_name(dtype)})" for role, dtype in found.items())
            rank_zero_info(
                f"precision={self.facts.precision!r} trains float32 weights, so these were cast: {casts}; set "
                f"precision='bf16-true' to train bfloat16 weights"
            )

    def _specs(self, models: Mapping[str, nn.Module], earlier: ModelPool | None) -> dict[str, ModelSpec]:
        self._check_sharers(models)
        sharers = self.options.sharers
        roles = [role for role in self.dataflow.roles if role not in sharers]
        missing = [role for role in roles if role not in models]
        if missing:
            raise PlanError(f"role {missing[0]!r} has no model; configure_model() built {', '.join(models) or 'none'}")
        if earlier is not None:  # a sharded model no longer shows its own shapes
            return earlier.specs
        describe = partial(describe_model, max_tp=self.facts.world_size)
        specs = {role: describe(models[role], tp_plan=self.options.tp_plans.get(role)) for role in roles}
        for role, spec in specs.items():
            if vision_parts(models[role]):  # whose share of the work follows from the data
                specs[role] = replace(spec, costs=self.describe_roles()[role].model.costs)
        return specs | {role: specs[owner] for role, owner in sharers.items() if role in self.dataflow.roles}

    def _check_sharers(self, models: Mapping[str, nn.Module]) -> None:
        for role, owner in self.options.sharers.items():
            if owner not in models or not adapted_layers(models[owner]):
                raise PlanError(
                    f"role {role!r} shares the base of {owner!r}, which is no role with adapters; give {owner} a "
                    f"peft_config, or {role} a model of its own"
                )
            if any(call.kind == "train" for call in self.dataflow.calls_of(role)):
                raise PlanError(f"role {role!r} shares the base of {owner!r} and has a training call; train {owner}")


def _announce(role: str, model: ModelSpec, layout: Layout) -> None:
    if model.num_elements >= _MIN_WEIGHTS_ANNOUNCED:
        rank_zero_info(f"reading {role}, {model.num_elements / 1e9:.1f} billion weights, into {layout}")


def _balanced(role: RoleMemory, weight: float | None) -> RoleMemory:
    """Return the description of a role whose experts a loss of this weight balances; None: as its config says."""
    shape = role.shape
    if weight is None or shape is None or shape.experts is None:
        return role
    return replace(role, shape=replace(shape, experts=replace(shape.experts, is_balanced=weight > 0)))
