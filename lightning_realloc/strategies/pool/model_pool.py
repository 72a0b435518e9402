"""Which replicas of every role exist on this rank, and which one a call works on.

A role has one replica per distinct layout of its calls. The home replica owns the master weights (and the optimizer's
parameters); every other one is a skeleton whose parameters are views of storage that a reallocation fills. Equal
layouts share a replica; where replicas are trained, other calls in their layout get a skeleton of their own on the same
storage, without FSDP around it. A role that shares another one's base has no replicas: its calls work on that one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.runtime.model.adapter_layers import adapter_config, adapters_merged, adapters_off
from lightning_realloc.runtime.model.training_mode import enable_activation_checkpointing
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.parallelize import needs_fsdp, parallelize
from lightning_realloc.runtime.parallel.shards import bind_tensors, local_tensors, own_storage, reshard, vacate
from lightning_realloc.runtime.parallel.twin import weightless_copy
from lightning_realloc.runtime.transfer.executor import Reallocation, ReallocationReport
from lightning_realloc.strategies.pool.copies import blank_model, prepare_copy
from lightning_realloc.strategies.pool.moving_average import AveragedRoles
from lightning_realloc.strategies.pool.pool_options import PoolOptions
from lightning_realloc.strategies.pool.precision import cast_parameters
from lightning_realloc.strategies.pool.replan import StateMover, move_optimizer, move_weights
from lightning_realloc.strategies.pool.replica import Replica
from lightning_realloc.strategies.pool.weight_copy import WeightCopy, refuse_thawed


class ModelPool:
    """All replicas of all roles under one execution plan."""

    def __init__(self, dataflow: Dataflow, plan: ExecutionPlan, meshes: MeshRegistry, options: PoolOptions) -> None:
        self.dataflow = dataflow
        self.plan = plan
        self.meshes = meshes
        self._options = options
        self._home: dict[str, Replica] = {}
        self._blanks: dict[str, nn.Module] = {}
        self._frozen: dict[str, frozenset[str]] = {}
        """Role -> parameters that its training leaves as they are."""
        self._followers = AveragedRoles(dataflow, options)
        self._copies: dict[tuple[str, Layout], Replica] = {}
        self._realized: set[str] = set()
        self.released: set[str] = set()
        """Roles whose weights are gone for good."""
        self._reports: dict[str, ReallocationReport] = {}
        self.seconds_moving = 0.0
        """Seconds that this rank spent on moving weights, waiting for other ranks not included."""

    # ---- building
    def place(self, role: str, model: nn.Module, spec: ModelSpec) -> None:
        """Shard ``model``, which holds full weights, into its home layout, and prepare the other replicas.

        ``spec`` is its description, of before it is laid out.

        Raises:
            LayoutError: when a layout of one of the role's calls does not fit the model.
        """
        trains = role in self.dataflow.trained_roles
        self._frozen[role] = frozenset(n for n, p in model.named_parameters() if trains and not p.requires_grad)
        home = ModelLayout(spec, self.plan.layout(self.dataflow.home_call(role).name))
        # Weights that no optimizer changes need no more precision than copies; buffers (rotary frequencies) do.
        unchanged = self._frozen[role] if role in self.changing_roles else None
        cast_parameters(model, self._options.copy_dtype, names=unchanged)
        self._blanks[role] = weightless_copy(model)
        self._add_copies(role, home)
        model.to(self._options.device)
        self._home[role] = self._lay_out(role, model, home)

    def apply_plan(self, plan: ExecutionPlan, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Serve another plan from now on: move weights and optimizer state of every role whose home layout changes.

        Replicas in layouts that the plan does not use are dropped. Collective over all ranks, between iterations.
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
                self._followers.forget()
            for kept in (copy for (of, _), copy in self._copies.items() if of == role):
                if self._home[role] is not old:
                    kept.delivery = None
                    kept.forget()
            self._add_copies(role, home)

    def _add_copies(self, role: str, home: ModelLayout) -> None:
        """Prepare a replica for every layout of the role's calls but its home's, and drop the others."""
        wanted = {self.plan.layout(call.name) for call in self._calls_on(role)} - {home.layout}
        if self._is_read_at_home(role, home.layout):
            wanted.add(home.layout)
        for _, layout in [key for key in self._copies if key[0] == role and key[1] not in wanted]:
            del self._copies[role, layout]
        for layout in sorted(wanted, key=str):
            if (role, layout) not in self._copies:
                copy = ModelLayout(home.model, layout)
                model = prepare_copy(role, self._blanks[role], copy, self.meshes, self._options)
                self._copies[role, layout] = Replica(role, copy, model)

    def _is_read_at_home(self, role: str, home: Layout) -> bool:
        """Return whether calls other than training run where replicas are trained, and need not go through FSDP.

        It wraps those for their gradients' sake, and copies all weights in every forward pass: decoding would take
        twice as long. A second module on the same storage does without.
        """
        calls = [call for call in self._calls_on(role) if self.plan.layout(call.name) == home]
        reads = any(call.kind != "train" for call in calls)
        is_wrapped = role in self.dataflow.trained_roles and home.dims.dp > 1 and home.dims.fsdp == 1
        dtypes = {parameter.dtype for parameter in self._blanks[role].parameters()}
        return reads and is_wrapped and dtypes == {self._options.copy_dtype}

    def _lay_out(self, role: str, model: nn.Module, home: ModelLayout) -> Replica:
        """Make ``model``, which holds full weights, the replica that owns them."""
        if self.plan.call(self.dataflow.home_call(role).name).gradient_checkpointing:
            enable_activation_checkpointing(model)
        tp_plan = self._options.tp_plans.get(role)
        if self._options.rank in home.layout:
            policy = self._options.mixed_precision if needs_fsdp(model, home.layout) else None
            parallelize(model, home, self.meshes, mixed_precision=policy, tp_plan=tp_plan)
            if role in self.plan.offload:
                own_storage(model)
        else:
            vacate(model)
        return Replica(role, home, model, version=1, frozen_version=1)

    def _move_home(self, old: Replica, home: ModelLayout, optimizer: torch.optim.Optimizer | None) -> Replica:
        has_weights = self._options.rank in home.layout
        model = blank_model(self._blanks[old.role], old, self._options.device, has_weights=has_weights)
        new = self._lay_out(old.role, model, home)
        new.version, new.frozen_version = old.version + 1, old.frozen_version + 1
        mover = StateMover(old.model_layout, home, self._options.rank, self._options.world_size, self._options.device)
        move_weights(old, new, mover)
        if optimizer is not None:
            move_optimizer(old, new, optimizer, mover)
        return new

    def release(self, role: str) -> None:
        """Free a role's weights on every rank, for good; PlanError where training changes them. Collective."""
        if role in self.changing_roles:
            raise PlanError(f"the weights of role {role!r} change as training goes on; it cannot be released")
        if role in self.sharers:
            return
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != role}
        old = self._home[role]
        blank = blank_model(self._blanks[role], old, self._options.device, has_weights=False)
        self._home[role] = Replica(role, old.model_layout, blank)
        self.released.add(role)

    # ---- reading
    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that have been placed: those with weights of their own."""
        return tuple(self._home)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """Every role's model, also of those that share one."""
        return {role: self.home(role).model_layout.model for role in self.dataflow.roles}

    def saved_parameters(self, role: str, *, include_frozen: bool) -> frozenset[str] | None:
        """Return what of a role belongs into a checkpoint, None for all: of adapters' base it may be left out."""
        home = self.home(role)
        if include_frozen or adapter_config(home.model) is None:
            return None
        return frozenset(param.name for param in home.model_layout.model.params) - self._frozen[role]

    @property
    def sharers(self) -> Mapping[str, str]:
        """Role without weights of its own -> the role whose weights its calls work with."""
        return self._options.sharers

    def owner(self, role: str) -> str:
        """Return the role whose weights a role's calls work with: itself, unless it shares them."""
        return self.sharers.get(role, role)

    def _calls_on(self, role: str) -> list[ModelFunctionCall]:
        """Return the calls that work with a role's weights."""
        return [call for call in self.dataflow.model_calls if self.owner(str(call.role)) == role]

    def alone(self, *, frees_copies: bool) -> tuple[str, ...]:
        """Return the roles of which two calls may not be under way at once: weights go when the first one ends."""
        going = self.roles if frees_copies else self.plan.offload
        return tuple(role for role in self.dataflow.roles if self.owner(role) in going)

    def adapted_for(self, call: ModelFunctionCall, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which ``model``, of the replica that the call works on, computes what it is to.

        Without adapters for a role that shares another one's base; with them merged where tokens are generated.
        """
        if self.owner(str(call.role)) != call.role:
            return adapters_off(model)
        return adapters_merged(model) if call.kind == "generate" else nullcontext()

    def require_same(self, plan: ExecutionPlan, options: PoolOptions) -> None:
        """Refuse to serve another plan, precision or transport: models that are laid out already stay as they are.

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

    def target(self, call: str) -> Replica:
        """Return the replica in the layout that the plan gives ``call``."""
        chosen = self.dataflow.call(call)
        if chosen.role is None:
            raise PlanError(f"{call!r} is a computation on the host and has no model")
        home = self.home(chosen.role)
        return home if chosen.kind == "train" else self._copies.get((home.role, self.plan.layout(call)), home)

    def active(self, call: str) -> Replica:
        """Return the replica that ``call`` works on: its own layout's if that was made real, else the home one."""
        replica = self.target(call)
        return replica if call in self._realized else self.home(replica.role)

    @property
    def changing_roles(self) -> tuple[str, ...]:
        """Roles whose weights are not what they were loaded as: those that are trained, and their followers."""
        return (*self.dataflow.trained_roles, *self._options.followers)

    @property
    def leaders(self) -> dict[str, str]:
        """Role -> the trained role that its weights follow."""
        return {role: following.role for role, following in self._options.followers.items()}

    @property
    def shared_bytes(self) -> int:
        """This rank's part of the memory that copies take in segments shared with other ranks."""
        return sum(copy.delivery.shared_bytes for copy in self._copies.values() if copy.delivery is not None)

    # ---- moving
    def realize(self, call: str) -> ReallocationReport | None:
        """Make the layout of ``call`` real. Collective over all ranks.

        Returns:
            What was moved, None when the replica already held the current weights.
        """
        target = self.target(call)
        home = self.home(target.role)
        self._realized.add(call)
        # Without adapters a call needs the base alone, which training leaves as it is.
        needs_trained = self.dataflow.call(call).role == target.role
        frozen = target.frozen_version != home.frozen_version
        trained = needs_trained and target.version != home.version
        if target is home or not (frozen or trained):
            return None
        reshard(home.model)
        if target.layout == home.layout:
            self._share(home, target)
            return None
        if target.delivery is None:
            target.delivery = self._connect(home, target)
        report = target.delivery.run(frozen=frozen, trained=trained)
        target.frozen_version = home.frozen_version
        if trained:
            target.version = home.version
        if report is None:
            return None
        self.seconds_moving += report.seconds
        reshard(target.model)
        self._reports[call] = report
        return report

    def _share(self, home: Replica, target: Replica) -> None:
        """Let a replica in the home's layout read the home's storage."""
        if target.version == 0 and self._options.rank in home.layout:
            bind_tensors(target.model, local_tensors(home.model))
        target.version, target.frozen_version = home.version, home.frozen_version

    def ready(self, call: str) -> Replica | None:
        """Return the replica of ``call`` if it can be read at any time and without any other rank, else None.

        So it is where nothing has to be moved, no weights are gathered, none are away between calls, and no adapters
        may be merged into them for a generation that is under way.
        """
        target = self.target(call)
        home, may_be_merged = self.home(target.role), adapter_config(target.model) is not None
        if may_be_merged or needs_fsdp(target.model, target.layout) or target.role in self.plan.offload:
            return None
        if target.layout == home.layout and target is not home:
            reshard(home.model)
            self._share(home, target)
        return target if target is home or target.version == home.version else None

    def take_report(self, call: str) -> ReallocationReport | None:
        """Return what was moved for ``call`` since this was asked last, None for nothing."""
        return self._reports.pop(call, None)

    def relinquish(self, call: str, *, free: bool = False) -> None:
        """End a phase; ``free`` gives the replica's storage back until the next time. Offloaded roles always do."""
        self._realized.discard(call)
        target = self.target(call)
        if (free or target.role in self.plan.offload) and target.delivery is not None:
            target.delivery.release()
            target.forget()

    def weights_changed(self, role: str) -> None:
        """Note that all of a role's master weights are new: every other replica is stale."""
        self._home[role].version += 1
        self._home[role].frozen_version += 1

    def weights_trained(self, role: str) -> None:
        """Note that a role's master weights were trained: what of them is not frozen is new.

        Raises:
            PlanError: for a parameter that was frozen when the role was laid out, and is not any more.
        """
        refuse_thawed(role, self._home[role].model, self._frozen[role])
        self._home[role].version += 1

    def weights_followed(self, leader: str) -> None:
        """Let the roles that follow ``leader`` take a step towards its weights. Collective over all ranks."""
        for role, following in self._options.followers.items():
            if following.role == leader:
                self.seconds_moving += self._followers.take_step(self.home(role), self.home(leader), following.rate)
                self.weights_changed(role)

    def _connect(self, home: Replica, target: Replica) -> WeightCopy:
        options = self._options
        inside = options.rank in target.layout.ranks
        uses_storage = target.layout.dims.fsdp > 1
        existing = local_tensors(target.model) if inside and uses_storage else {}

        def connect(source: ModelLayout, there: ModelLayout, held: Mapping[str, Tensor]) -> Reallocation:
            return Reallocation(
                source, held, there, rank=options.rank, world_size=options.world_size, dtype=options.copy_dtype,
                device=options.device, cluster=options.cluster,
                # Shards that FSDP allocated are filled in place, which shared memory cannot do.
                transport="direct" if uses_storage else options.transport,
                target_tensors={name: existing[name] for name in there.names(options.rank)} if uses_storage else None,
            )  # fmt: skip

        held = local_tensors(home.model) if options.rank in home.layout.ranks else {}
        delivery = WeightCopy.of(home.model_layout, held, target.model_layout, self._frozen[home.role], connect)
        if inside and not uses_storage:
            bind_tensors(target.model, delivery.target_tensors)
        return delivery
