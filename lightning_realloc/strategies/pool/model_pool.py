"""Hold the replicas of every role on this rank, and choose the one that a call works on.

A role has one replica per distinct layout of its calls. The home replica owns the master weights and the optimizer's
parameters. Every other replica is a module without weights, whose parameters are bound to storage that a reallocation
fills. Calls with equal layouts share a replica. If the home replica is wrapped by FSDP only to average gradients, other
calls in its layout get a second module on the same storage, without FSDP. A role that shares another role's base has
no replicas; its calls work on that role's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.runtime.forward.routers import install_routers
from lightning_realloc.runtime.model.adapter_layers import adapter_config, adapters_disabled, adapters_merged
from lightning_realloc.runtime.model.quantized import free_quantized_weights, quantized_layers
from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.parallelize import needs_fsdp, parallelize
from lightning_realloc.runtime.parallel.shards import (
    allocate_weights,
    fill_weights,
    free_weights,
    reshard,
    take_weights,
    weightless_copy,
)
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.strategies.pool.moving_average import AveragedRoles
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.replan import move_optimizer, move_weights
from lightning_realloc.strategies.pool.replica import (
    Replica,
    added_reports,
    connect_copy,
    prepare_copy,
    refuse_thawed,
    share_weights,
    sync_biases,
    undivided_like,
)
from lightning_realloc.strategies.pool.weight_streams import WeightStreams


class ModelPool:
    """All replicas of all roles under one execution plan."""

    def __init__(self, dataflow: Dataflow, plan: ExecutionPlan, meshes: MeshRegistry, options: PoolOptions) -> None:
        self.dataflow = dataflow
        self.plan = plan
        self.meshes = meshes
        self._options = options
        self.verify_weights = options.verify_weights
        """Elements that are compared after weights moved."""
        self._home: dict[str, Replica] = {}
        self._blanks: dict[str, nn.Module] = {}
        self._frozen: dict[str, frozenset[str]] = {}
        """Role -> parameters that training leaves unchanged."""
        self._averages = AveragedRoles(dataflow, options)
        self._copies: dict[tuple[str, Layout], Replica] = {}
        self._realized: set[str] = set()
        self.released: set[str] = set()
        """Roles whose weights were freed for good."""
        self.streams = WeightStreams(options)
        """Replicas that are filled in the background."""
        self._reports: dict[str, ReallocationReport] = {}
        self.seconds_moving = 0.0
        """Seconds that this rank spent moving weights, without waiting for other ranks."""

    # ---- building
    def place(self, role: str, model: nn.Module, spec: ModelSpec) -> None:
        """Lay a model out in its home layout, and prepare the role's other replicas.

        The model is divided without weights. Then each rank copies its own regions of the full weights, one parameter
        after the other, so that a device holds no whole model.

        Args:
            model: The model, with full weights in host memory, in mapped files, or as recipes.

        Raises:
            LayoutError: when a layout of one of the role's calls does not fit the model.
        """
        trains = role in self.dataflow.trained_roles
        self._frozen[role] = frozenset(n for n, p in model.named_parameters() if trains and not p.requires_grad)
        home = ModelLayout(spec, self.plan.layout(self.dataflow.home_call(role).name))
        if quantized_layers(model):
            model.to(self._options.facts.device)  # first, since all replicas share 4-bit weights
        unchanged = self._frozen[role] if role in self.changing_roles else None
        whole = take_weights(model, self._options.home_dtypes(model, unchanged))
        install_routers(model)
        self._blanks[role] = weightless_copy(model)
        self._add_copies(role, home)
        self._home[role] = self._lay_out(role, model, home)
        if self._options.facts.rank in home.layout:
            fill_weights(model, home, self._options.facts.rank, whole)

    def apply_plan(self, plan: ExecutionPlan, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Switch to another plan: move weights and optimizer state of every role whose home layout changes.

        Drops replicas in layouts that the plan does not use. Collective over all ranks, between iterations.
        """
        before, self.plan = self.plan, plan
        for role in self.roles:
            if role in self.released:
                continue
            old, call = self._home[role], self.dataflow.home_call(role).name
            home = ModelLayout(old.model_layout.model, plan.layout(call))
            if (
                home.layout != old.layout
                or plan.call(call).gradient_checkpointing != before.call(call).gradient_checkpointing
            ):
                self._home[role] = self._move_home(old, home, optimizers.get(role))
            if self._home[role] is not old:
                self._averages.forget()
            for kept in (copy for (of, _), copy in self._copies.items() if of == role):
                if self._home[role] is not old:
                    kept.weight_copy = None
                    kept.forget()
            self._add_copies(role, home)

    def _add_copies(self, role: str, home: ModelLayout) -> None:
        """Prepare a replica for every layout of the role's calls except its home layout, and drop all others."""
        wanted = {self.plan.layout(call.name) for call in self._calls_on(role)} - {home.layout}
        if self._is_copied_at_home(role, home.layout):
            wanted.add(home.layout)
        for _, layout in [key for key in self._copies if key[0] == role and key[1] not in wanted]:
            del self._copies[role, layout]
        for layout in sorted(wanted, key=str):
            if (role, layout) not in self._copies:
                copy = ModelLayout(home.model, layout)
                model = prepare_copy(role, self._blanks[role], copy, self.meshes, self._options)
                self._copies[role, layout] = Replica(role, copy, model, self._options.facts.rank)

    def _is_copied_at_home(self, role: str, home: Layout) -> bool:
        """Return whether calls other than training have a replica of their own in the home layout.

        FSDP wraps replicated weights only to average gradients, and copies all of them in every forward pass; a second
        module on the same storage avoids that. Under ``bf16-mixed``, generation reads bf16 weights, since decoding
        reads all of them for every token; FSDP gathers its shards in bf16 anyway, and bases of adapters are in bf16.
        """
        kinds = {call.kind for call in self._calls_on(role) if self.plan.layout(call.name) == home}
        if home.is_sharded:
            return False
        if self._has_dtype_of_copies(role):
            return bool(kinds - {"train"}) and role in self.dataflow.trained_roles and home.has_replicas
        return "generate" in kinds and adapter_config(self._blanks[role]) is None

    def _has_dtype_of_copies(self, role: str) -> bool:
        return {parameter.dtype for parameter in self._blanks[role].parameters()} == {self._options.copy_dtype}

    def _lay_out(self, role: str, model: nn.Module, home: ModelLayout) -> Replica:
        """Make ``model``, whose parameters are on the meta device, the home replica, with undefined weights."""
        if self.plan.call(self.dataflow.home_call(role).name).gradient_checkpointing:
            enable_activation_checkpointing(model)
        tp_plan = self._options.tp_plans.get(role)
        if self._options.facts.rank in home.layout:
            policy = self._options.mixed_precision if needs_fsdp(model, home.layout) else None
            parallelize(model, home, self.meshes, mixed_precision=policy, tp_plan=tp_plan)
            allocate_weights(model, self._options.facts.device)
        else:
            free_weights(model, self._options.facts.device)
        return Replica(role, home, model, self._options.facts.rank, version=1, frozen_version=1)

    def _move_home(self, old: Replica, home: ModelLayout, optimizer: torch.optim.Optimizer | None) -> Replica:
        new = self._lay_out(old.role, undivided_like(self._blanks[old.role], old), home)
        new.version, new.frozen_version = old.version + 1, old.frozen_version + 1
        move_weights(old, new, self._options)
        if optimizer is not None:
            move_optimizer(old, new, optimizer, self._options)
        return new

    def release(self, role: str) -> None:
        """Free a role's weights on every rank for good. Raises PlanError if training changes them. Collective."""
        if role in self.changing_roles:
            raise PlanError(f"the weights of role {role!r} change as training goes on; it cannot be released")
        if role in self.sharers:
            return
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != role}
        old = self._home[role]
        blank = undivided_like(self._blanks[role], old)
        free_weights(blank, self._options.facts.device)
        free_quantized_weights(blank, self._blanks[role])
        self._home[role] = Replica(role, old.model_layout, blank, old.rank)
        self.released.add(role)

    # ---- reading
    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that have weights of their own, and have been placed."""
        return tuple(self._home)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """Role -> description of its model, including roles that share one."""
        return {role: self.home(role).model_layout.model for role in self.dataflow.roles}

    def saved_parameters(self, role: str, *, include_frozen: bool) -> frozenset[str] | None:
        """Return the parameters that belong into a checkpoint; None means all of them.

        The frozen base under adapters may be left out.
        """
        home = self.home(role)
        if include_frozen or adapter_config(home.model) is None:
            return None
        return frozenset(param.name for param in home.model_layout.model.params) - self._frozen[role]

    @property
    def sharers(self) -> Mapping[str, str]:
        """Role without weights of its own -> the role whose weights its calls use."""
        return self._options.sharers

    def owner(self, role: str) -> str:
        """Return the role whose weights a role's calls use: itself, unless it shares another role's."""
        return self.sharers.get(role, role)

    def _calls_on(self, role: str) -> list[ModelFunctionCall]:
        """Return the calls that use a role's weights."""
        own = [call for call in self.dataflow.model_calls if self.owner(str(call.role)) == role]
        return own + [call for call in self.dataflow.model_calls if role in call.further_roles]

    def alone(self, *, frees_copies: bool) -> tuple[str, ...]:
        """Return roles that allow one call at a time, because their weights leave memory when a call ends."""
        going = self.roles if frees_copies else self.plan.offload
        return tuple(role for role in self.dataflow.roles if self.owner(role) in going)

    @contextmanager
    def adapted_for(
        self, call: ModelFunctionCall, model: nn.Module, *, merges: bool = True, keeps: bool = False
    ) -> Iterator[None]:
        """Turn adapters off for a role that shares another's base; else generation ``merges`` and ``keeps`` copies."""
        own = adapters_merged(model, keeps_copies=keeps) if merges and call.kind == "generate" else nullcontext()
        with own if self.owner(str(call.role)) == call.role else adapters_disabled(model):
            yield

    def require_same(self, plan: ExecutionPlan, options: PoolOptions) -> None:
        """Refuse another plan, precision or transport than the models were laid out with.

        Raises:
            ConfigError: naming what differs.
        """
        if plan != self.plan:
            raise ConfigError(
                f"the models were laid out by an earlier Trainer, as\n{self.plan.table()}\nand this one asks for\n"
                f"{plan.table()}\nGive both the same plan, or build the LightningModule anew"
            )
        self._options.require_same(options)

    def home(self, role: str) -> Replica:
        """Return the replica that owns a role's weights."""
        role = self.owner(role)
        if role not in self._home:
            raise PlanError(f"role {role!r} has not been placed; placed are {', '.join(self._home) or 'none'}")
        return self._home[role]

    def target(self, call: str, role: str | None = None) -> Replica:
        """Return the replica of a role that a call uses, by default its own, in the layout that the plan gives it."""
        chosen = self.dataflow.call(call)
        if chosen.role is None:
            raise PlanError(f"{call!r} is a computation on the host and has no model")
        home, layout = self.home(role or chosen.role), self.plan.layout(call)
        # Inference in the home layout computes as training does, in its dtype.
        reads_home = layout == home.layout and chosen.kind != "generate" and not self._has_dtype_of_copies(home.role)
        return home if chosen.kind == "train" or reads_home else self._copies.get((home.role, layout), home)

    def active(self, call: str, role: str | None = None) -> Replica:
        """Return the replica that ``call`` works on: that of `target` after `realize`, else the role's home."""
        replica = self.target(call, role)
        return replica if call in self._realized else self.home(replica.role)

    @property
    def changing_roles(self) -> tuple[str, ...]:
        """Roles whose weights change during a run: trained roles and their moving averages."""
        return (*self.dataflow.trained_roles, *self._options.averages)

    @property
    def average_of(self) -> dict[str, str]:
        """Role -> the trained role whose moving average it is."""
        return {role: average.average_of for role, average in self._options.averages.items()}

    @property
    def shared_bytes(self) -> int:
        """This rank's share of the bytes that replicas take in memory shared with other ranks."""
        return sum(copy.weight_copy.shared_bytes for copy in self._copies.values() if copy.weight_copy is not None)

    # ---- moving
    def realize(self, call: str) -> ReallocationReport | None:
        """Fill the replicas in the layout of ``call`` with the current weights. Collective over all ranks.

        Returns:
            A report of the move; None if the replicas held the current weights already.
        """
        chosen = self.dataflow.call(call)
        self._realized.add(call)
        reports = [self._fill(call, role) for role in chosen.further_roles]
        stream, own = self.streams.of(call), self.target(call)
        if stream is not None:
            stream.catch_up()
        else:
            reports.append(self._fill(call, str(chosen.role)))
            self.streams.open(call, self.home(own.role), own, self.meshes)
        report = added_reports(reports)
        if report is not None:
            self._reports[call] = report
            self.seconds_moving += report.seconds + report.check_s
        return report

    def _fill(self, call: str, role: str) -> ReallocationReport | None:
        """Copy the weights of a role's home to its replica for a call, if that does not hold them."""
        home, target = self.home(role), self.target(call, role)
        # A call without adapters needs the base alone, which training leaves unchanged.
        needs_trained = role == target.role
        frozen = target.frozen_version != home.frozen_version
        trained = needs_trained and target.version != home.version
        if target is home or not (frozen or trained):
            return None
        reshard(home.model)
        if target.layout == home.layout and self._has_dtype_of_copies(home.role):
            share_weights(home, target)
            return None
        has_own_memory = self.streams.is_allowed(call)
        if target.weight_copy is None or (has_own_memory and target.weight_copy.is_shared):
            frozen_names = self._frozen[home.role]
            target.weight_copy = connect_copy(home, target, frozen_names, self._options, is_shared=not has_own_memory)
        report = target.weight_copy.run(home, frozen=frozen, trained=trained)
        target.frozen_version = home.frozen_version
        if trained:
            target.version = home.version
        if report is not None:
            reshard(target.model)
        return report

    def sync_biases(self) -> None:
        """Give all ranks the biases of routers that training updates. Collective over all ranks."""
        for role in self._options.biased:
            sync_biases(self._home[role], self._options)

    def ready(self, call: str) -> Replica | None:
        """Return the replica of ``call`` if this rank can read it at any time without other ranks, else None.

        That is the case if nothing has to be moved or gathered, no weights are offloaded between calls, and no adapters
        may be merged into them by a generation that is running.
        """
        target = self.target(call)
        home, may_be_merged = self.home(target.role), adapter_config(target.model) is not None
        is_collective = target.layout.runs_in_lockstep or needs_fsdp(target.model, target.layout)
        if may_be_merged or is_collective or target.role in self.plan.offload:
            return None
        if target.layout == home.layout and target is not home and self._has_dtype_of_copies(home.role):
            reshard(home.model)
            share_weights(home, target)
        return target if target is home or target.version == home.version else None

    def take_report(self, call: str) -> ReallocationReport | None:
        """Return the report of the last move for ``call``, once; None if there was none."""
        return self._reports.pop(call, None)

    def relinquish(self, call: str, *, free: bool = False) -> None:
        """End a phase. ``free`` releases the replica's storage until its next use, as offloaded roles always do."""
        self._realized.discard(call)
        chosen = self.dataflow.call(call)
        for target in (self.target(call, role) for role in (chosen.role, *chosen.further_roles)):
            if (free or target.role in self.plan.offload) and target.weight_copy is not None:
                target.weight_copy.release()
                target.forget()

    def weights_changed(self, role: str) -> None:
        """Mark every other replica of a role as stale, since all of its master weights changed."""
        self.streams.close(role)
        self._home[role].version += 1
        self._home[role].frozen_version += 1

    def weights_trained(self, role: str) -> None:
        """Mark other replicas' copies of a role's trained weights as stale.

        Raises:
            PlanError: for a parameter that was frozen when the role was laid out and is trained now.
        """
        refuse_thawed(role, self._home[role].model, self._frozen[role])
        self._home[role].version += 1

    def weights_replaced(self, role: str) -> None:
        """Mark other replicas' copies of a role's trained weights as stale, since other values took their place."""
        self.streams.close(role)
        self.weights_trained(role)

    def update_averages(self, trained: str) -> None:
        """Move the averages of role ``trained`` one step towards its weights. Collective over all ranks."""
        for role, average in self._options.averages.items():
            if average.average_of == trained:
                self.seconds_moving += self._averages.take_step(self.home(role), self.home(trained), average.rate)
                self.weights_changed(role)
