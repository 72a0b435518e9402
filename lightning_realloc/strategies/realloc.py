"""``Trainer(strategy="realloc")``: owns every model of an algorithm and runs each call in the layout of the plan.

A LightningModule that declares a dataflow (see ``algorithms.module``) is run call by call. Any other LightningModule is
trained data-parallel, like under any strategy. Lightning's life cycle stays as it is; ``docs/lightning.md`` lists what
is overridden and why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lightning_realloc.callbacks.phase import dispatch
from lightning_realloc.callbacks.reallocation import ParameterReallocation
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout, ParallelDims
from lightning_realloc.runtime.mesh import MeshRegistry
from lightning_realloc.runtime.model_spec import describe_model
from lightning_realloc.runtime.samples import Samples
from lightning_realloc.strategies import checkpoint as checkpoints
from lightning_realloc.strategies import huggingface
from lightning_realloc.strategies.call_runner import CallRunner
from lightning_realloc.strategies.data_parallel import average_gradients, broadcast_module
from lightning_realloc.strategies.gather import gather_weights
from lightning_realloc.strategies.launchers import FullStateLauncher
from lightning_realloc.strategies.model_pool import ModelPool, PoolOptions, Replica, TransportName
from lightning_realloc.strategies.random_state import random_state
from lightning_realloc.strategies.trainer_step import Trainee
from lightning_realloc.tuning.dataflow import Dataflow
from lightning_realloc.tuning.execution_plan import ExecutionPlan
from lightning_realloc.tuning.heuristic import heuristic_plan

PlanSource = ExecutionPlan | Mapping[str, Any] | str | Path
REFUSED_PRECISIONS = {
    "16-mixed": "one gradient scaler cannot serve several optimizers: each would unscale with the other's scale",
    "16-true": "float16 weights lose small updates without a gradient scaler",
    "64-true": "float64 weights would be cast to float32 by collectives and kernels that have no float64 form",
    "transformer-engine": "its layers hide their weights from reallocation",
    "transformer-engine-float16": "its layers hide their weights from reallocation",
}


class ReallocStrategy(ModelParallelStrategy):
    """Gives every model function call of an iteration the layout and ranks that suit it.

    Args:
        plan: ``"heuristic"`` works out layouts from world size, model sizes and memory; ``"static"`` keeps one sharded
            layout for everything; a path reads a YAML file; or an :class:`ExecutionPlan`, or its mapping.
        transport: How weights travel: ``"push"`` through shared memory of one host, ``"direct"`` from rank to rank,
            ``"auto"`` chooses by probing.
        cluster: Nodes, devices and memory; by default what this machine shows.
        tp_plans: Role -> tensor-parallel styles by module pattern, for models that bring none.
        start_method: ``"popen"`` re-runs the script for each device, ``"spawn"`` and ``"fork"`` serve notebooks.
        save_frozen_roles: Also write roles that are never trained into checkpoints.
        load_weights_only: Refuse checkpoints whose metadata holds more than plain data.
        process_group_backend: By default nccl on CUDA, gloo elsewhere.
        timeout: Of every collective.
    """

    strategy_name = "realloc"
    is_distributed = True  # Lightning asks only its own classes; without it samplers and sync_dist are silently skipped

    def __init__(
        self,
        plan: PlanSource = "heuristic",
        *,
        transport: TransportName = "auto",
        cluster: ClusterSpec | str | None = None,
        tp_plans: Mapping[str, Mapping[str, str]] | None = None,
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        save_frozen_roles: bool = False,
        load_weights_only: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._plan_source = _read_plan_source(plan)
        self._transport: TransportName = transport
        self._cluster = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
        self._tp_plans = dict(tp_plans or {})
        self._start_method = start_method
        self._save_frozen_roles = save_frozen_roles
        self._load_weights_only = load_weights_only
        self._pool: ModelPool | None = None
        self._runner: CallRunner | None = None
        self._placed_module: nn.Module | None = None
        self._sync_blocked = False

    # ---- what users and callbacks read
    @property
    def pool(self) -> ModelPool:
        """The replicas of every role. Raises ConfigError before the models are set up."""
        if self._pool is None:
            raise ConfigError("the models are not set up yet; read strategy.pool from on_fit_start on")
        return self._pool

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan in use."""
        return self.pool.plan

    @property
    def runner(self) -> CallRunner:
        """What runs the calls; holds the seconds that each took."""
        if self._runner is None:
            raise ConfigError("the models are not set up yet; read strategy.runner from on_fit_start on")
        return self._runner

    @property
    def dataflow(self) -> Dataflow | None:
        """The algorithm's calls; None for a LightningModule that declares none."""
        flow = getattr(self.lightning_module, "dataflow", None)
        return flow if isinstance(flow, Dataflow) else None

    # ---- launching and processes
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            return
        if self.num_processes * self.num_nodes == 1:
            return  # no launcher: works in notebooks, and no observer thread delays the end of the process
        if self._start_method == "popen":
            super()._configure_launcher()
        else:
            self._launcher = FullStateLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        """Start the process group; with external launchers also check what they started."""
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        if self.cluster_environment.creates_processes_externally:
            self._check_external_processes()
        self._setup_distributed()
        self._device_mesh = init_device_mesh(
            self.root_device.type, (self.world_size,), mesh_dim_names=("data_parallel",)
        )
        self.lightning_module._device_mesh = self._device_mesh

    def _check_external_processes(self) -> None:
        started = int(os.environ.get("WORLD_SIZE", self.num_processes * self.num_nodes))
        if started != self.num_processes * self.num_nodes:
            raise MisconfigurationException(
                f"{started} processes were started, but Trainer(devices={self.num_processes}, "
                f"num_nodes={self.num_nodes}) asks for {self.num_processes * self.num_nodes}; make both equal"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A loader's share: everything for an algorithm with calls, which take theirs; else a part per rank."""
        if self.dataflow is not None:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # ---- models
    def setup(self, trainer: Trainer) -> None:
        """Shard every role into its home layout, then make the optimizers, which must see sharded parameters."""
        assert self.accelerator is not None
        assert self.model is not None
        self._check_precision()
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        flow = self.dataflow
        if flow is None:
            self.model_to_device()
            broadcast_module(self.model)
        else:
            self._set_up_roles(trainer, flow)
            self.model_to_device()
        self.barrier("realloc.setup")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _check_precision(self) -> None:
        precision = str(getattr(self.precision_plugin, "precision", "32-true"))
        if precision in REFUSED_PRECISIONS:
            raise MisconfigurationException(
                f"precision={precision!r} cannot be used with strategy='realloc': {REFUSED_PRECISIONS[precision]}; "
                f"use '32-true', 'bf16-mixed' or 'bf16-true'"
            )

    def _set_up_roles(self, trainer: Trainer, flow: Dataflow) -> None:
        module: Any = self.lightning_module
        if not any(isinstance(callback, ParameterReallocation) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks.insert(0, ParameterReallocation())  # type: ignore[attr-defined]
        if self._placed_module is module and self._pool is not None:
            return
        models = module.models()
        plan = self._resolve_plan(flow, models)
        meshes = MeshRegistry(self.root_device.type)
        meshes.create((*plan.layouts, Layout(ParallelDims(dp=self.world_size), tuple(range(self.world_size)))))
        self._pool = ModelPool(flow, plan, meshes, self._pool_options())
        for role in flow.roles:
            self._pool.place(role, models[role])
        self._placed_module = module
        trainee = Trainee(
            self, meshes, module.train_options, device=self.root_device, rank=self.global_rank, seed=module.seed,
            dropout=module.dropout,
        )  # fmt: skip
        self._runner = CallRunner(module, self._pool, self.phase_replica, trainee, device=self.root_device,
                                  rank=self.global_rank)  # fmt: skip

    def _pool_options(self) -> PoolOptions:
        precision = str(self.precision_plugin.precision)
        is_bf16 = precision.startswith("bf16")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return PoolOptions(
            cluster=self.cluster,
            device=self.root_device,
            rank=self.global_rank,
            world_size=self.world_size,
            copy_dtype=torch.bfloat16 if is_bf16 else torch.float32,
            mixed_precision=policy if precision == "bf16-mixed" else None,
            transport=self._transport,
            tp_plans=self._tp_plans,
        )

    @property
    def cluster(self) -> ClusterSpec:
        """Nodes, devices and memory: what was given, else what this machine shows."""
        if self._cluster is None:
            base = ClusterSpec.local(self.num_processes, "h100" if self.root_device.type == "cuda" else "cpu")
            self._cluster = _with_memory(base, self.num_nodes, self.root_device)
        return self._cluster

    def _resolve_plan(self, flow: Dataflow, models: Mapping[str, nn.Module]) -> ExecutionPlan:
        missing = [role for role in flow.roles if role not in models]
        if missing:
            raise PlanError(f"role {missing[0]!r} has no model; configure_model() built {', '.join(models) or 'none'}")
        plan = self._read_plan(flow, models).completed(flow)
        plan.check(flow, self.world_size)
        for role in flow.trained_roles:
            layout = plan.layout(flow.home_call(role).name)
            if set(layout.ranks) != set(range(self.world_size)):
                raise PlanError(
                    f"calls.{role}.train: layout {layout} leaves out ranks of this run's {self.world_size}; "
                    f"training on some ranks only is not available yet, use all of 0-{self.world_size - 1}"
                )
        self._agree_on(plan)
        return plan

    def _read_plan(self, flow: Dataflow, models: Mapping[str, nn.Module]) -> ExecutionPlan:
        source = self._plan_source
        if isinstance(source, ExecutionPlan):
            return source
        if source == "static":
            return ExecutionPlan.static(flow, Layout(ParallelDims(fsdp=self.world_size), tuple(range(self.world_size))))
        specs = {role: describe_model(models[role], tp_plan=self._tp_plans.get(role)) for role in flow.roles}
        element_bytes = 2 if str(self.precision_plugin.precision).startswith("bf16") else 4
        return heuristic_plan(flow, specs, self.cluster, world_size=self.world_size, element_bytes=element_bytes)

    def _agree_on(self, plan: ExecutionPlan) -> None:
        if self.broadcast(plan.digest) == plan.digest:
            agreed = self.reduce_boolean_decision(True)
        else:
            agreed = self.reduce_boolean_decision(False)
        if not agreed:
            raise PlanError("ranks hold different execution plans; give every process the same file or object")

    # ---- running calls
    @contextmanager
    def phase_replica(self, call: str) -> Iterator[Replica]:
        """Announce a call to callbacks, and yield the replica that it works on."""
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        dispatch(trainer, "on_phase_start", call)
        yield self.pool.active(call)
        dispatch(trainer, "on_phase_end", call)

    @contextmanager
    def phase(self, call: str) -> Iterator[nn.Module]:
        """Announce a call to callbacks, and yield its model in that call's layout; for a hand-written training_step."""
        with self.phase_replica(call) as replica:
            yield replica.model

    def run_iteration(self, batch: Samples) -> Samples:
        """Run every call once, count one step, and advance learning-rate schedules."""
        before = dict(self.runner.seconds)
        samples = self.runner.run(batch, self.pool.dataflow.iteration_calls)
        spent = {f"seconds/{name}": total - before.get(name, 0.0) for name, total in self.runner.seconds.items()}
        self.log({name: torch.tensor(value) for name, value in spent.items()})
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        for config in trainer.lr_scheduler_configs:
            config.scheduler.step()
        return samples

    def run_calls(self, batch: Samples, names: tuple[str, ...]) -> Samples:
        """Run some calls on a batch, in the dataflow's order, without training."""
        calls = [call for call in self.pool.dataflow.calls if call.name in names]
        if len(calls) < len(names):
            raise PlanError(f"{', '.join(set(names) - {c.name for c in calls})} is no call of this algorithm")
        return self.runner.run(batch, calls)

    # ---- what a training call needs (strategies.trainer_step.Stepper)
    @property
    def iteration(self) -> int:
        """Iterations done so far."""
        return int(self.lightning_module.trainer.global_step)  # type: ignore[union-attr]

    def optimizer_of(self, role: str) -> torch.optim.Optimizer:
        """Return the optimizer whose parameter groups are named after ``role``."""
        for optimizer in self.optimizers:
            if optimizer.param_groups[0].get("name") == role:
                return optimizer
        names = [str(optimizer.param_groups[0].get("name")) for optimizer in self.optimizers]
        raise ConfigError(
            f"no optimizer's parameter group is named {role!r}, there are {names}; name groups after roles"
        )

    def forward_context(self, *, wrapped: bool) -> Any:
        """Autocast for plain weights; those that FSDP wraps are gathered in the lower precision already."""
        return nullcontext() if wrapped else self.precision_plugin.forward_context()

    def backward_loss(self, loss: Tensor) -> None:
        """Run backward with Lightning's hooks."""
        self.lightning_module.manual_backward(loss)  # type: ignore[union-attr]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer with Lightning's hooks; the iteration is counted once, in ``run_iteration``."""
        self.optimizer_step(optimizer, lambda: None)

    def log(self, metrics: dict[str, Tensor]) -> None:
        """Log values that are the same on every rank."""
        module: Any = self.lightning_module
        module.log_dict(metrics, batch_size=1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; autocast around all of it only where it declares no calls."""
        if self.dataflow is None:
            return super().training_step(*args, **kwargs)
        return self.lightning_module.training_step(*args, **kwargs)  # type: ignore[union-attr]

    # An FSDP2 module whose first forward runs under inference_mode, as Lightning's evaluation loops use with NCCL,
    # cannot be trained afterwards.
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run under ``no_grad``."""
        with torch.inference_mode(False), torch.no_grad():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run under ``no_grad``."""
        with torch.inference_mode(False), torch.no_grad():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run under ``no_grad``."""
        with torch.inference_mode(False), torch.no_grad():
            return super().predict_step(*args, **kwargs)

    # ---- gradients of a LightningModule without calls
    def post_backward(self, closure_loss: Tensor) -> None:
        """Average gradients over all ranks, once per optimizer step."""
        if self.dataflow is None and not self._sync_blocked and self._optimizes_automatically():
            assert self.model is not None
            average_gradients(self.model)

    def _optimizes_automatically(self) -> bool:
        return bool(self.lightning_module.automatic_optimization)  # type: ignore[union-attr]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients unreduced inside, for accumulation."""
        self._sync_blocked = True
        sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)] if self.model is not None else []
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            self._sync_blocked = False
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    # ---- checkpoints
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are read into sharded models."""
        return self.dataflow is not None

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers itself."""
        return self.dataflow is None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what rank 0 writes: everything, or, where roles are sharded, everything but their parameters."""
        assert self.lightning_module is not None
        if self.dataflow is None:
            return self.lightning_module.state_dict()
        return checkpoints.other_state(self.lightning_module, self.pool)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state; of sharded roles only the groups' settings, tensors are written apart."""
        raw = getattr(optimizer, "_optimizer", optimizer)
        return raw.state_dict() if self.dataflow is None else checkpoints.optimizer_settings(raw)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: one file, or a folder of shards where roles are sharded."""
        if self.dataflow is None:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigError("storage_options cannot be used: a folder of shards is not written by a CheckpointIO")
        checkpoint[checkpoints.RANDOM_STATES] = self._gather_random_states()
        folder = Path(self.broadcast(str(filepath)))
        checkpoints.save(folder, checkpoint, self._trained_models(), include_frozen=self._save_frozen_roles)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; sharded roles are filled in place, whatever layout and world they were written under.

        Raises:
            CheckpointError: for something that is not a checkpoint of this strategy, or is one of other models.
        """
        if self.dataflow is None:
            checkpoints.refuse_folder(Path(checkpoint_path))
            return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        # Lightning drops the argument of fit(weights_only=...) for strategies that restore after their setup.
        weights_only = self._load_weights_only if weights_only is None else weights_only
        folder = Path(self.broadcast(str(checkpoint_path)))
        return checkpoints.load(
            folder, self._trained_models(), weights_only=weights_only, device=self.root_device, resuming=self._fitting
        )

    def save_huggingface(self, role: str, folder: str | Path, *, dtype: str | None = None) -> None:
        """Write a role's current weights as a folder that ``from_pretrained`` reads. Collective over all ranks.

        Raises:
            CheckpointError: on every rank, for what has no Hugging Face form or cannot be written.
        """
        models, parsed = self._trained_models(), huggingface.parse_dtype(dtype)
        weights = self.full_weights(role)
        checkpoints.on_first_rank(
            lambda: huggingface.write_running_model(
                self.pool.home(role).model, weights, models.tokenizer, Path(folder), role=role, dtype=parsed
            ),
            models,
        )

    def check_huggingface(self, role: str, *, dtype: str | None = None) -> None:
        """Raise what :meth:`save_huggingface` would raise before it gathers anything."""
        huggingface.parse_dtype(dtype)
        huggingface.import_model_class(huggingface.class_path(self.pool.home(role).model), role)

    def _trained_models(self) -> checkpoints.TrainedModels:
        module: Any = self.lightning_module
        try:
            tokenizer = module.tokenizer
        except (AttributeError, ConfigError):  # models that were handed over as modules may come without one
            tokenizer = None
        optimizers = {str(optimizer.param_groups[0].get("name")): optimizer for optimizer in self.optimizers}
        return checkpoints.TrainedModels(
            pool=self.pool,
            algorithm=type(module).__name__,
            optimizers=optimizers if self._fitting else {},
            tokenizer=tokenizer,
            rank=self.global_rank,
            world_size=self.world_size,
            broadcast=self.broadcast,
        )

    @property
    def _fitting(self) -> bool:
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING  # type: ignore[union-attr]

    def _gather_random_states(self) -> list[Any]:
        states: list[Any] = [random_state(self.root_device)]
        if self.world_size > 1:
            states = [None] * self.world_size
            dist.all_gather_object(states, random_state(self.root_device))
        return states

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what is not sharded; sharded roles were filled by ``load_checkpoint``."""
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict and self.dataflow is None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizers of a module without calls; those of roles were filled by ``load_checkpoint``."""
        if self.dataflow is None:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)

    def full_weights(self, role: str) -> dict[str, Tensor]:
        """Return a role's full weights on rank 0, {} elsewhere. Collective over all ranks."""
        return gather_weights(self.pool.home(role), self.global_rank, self.world_size, self.root_device)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's state with full tensors on rank 0. Collective over all ranks."""
        assert self.lightning_module is not None
        if self.dataflow is None:
            return self.lightning_module.state_dict()
        state = self.lightning_module_state_dict()
        for role in self.pool.roles:
            state |= {f"{role}.{name}": tensor.cpu() for name, tensor in self.full_weights(role).items()}
        return state

    # ---- names
    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names that ``Trainer(strategy=...)`` understands."""
        for name, options in REGISTERED_NAMES.items():
            strategy_registry.register(name, cls, override=True, description=cls.__doc__.split("\n")[0], **options)  # type: ignore[union-attr]


REGISTERED_NAMES: dict[str, dict[str, Any]] = {
    "realloc": {},
    "realloc-static": {"plan": "static"},
    "realloc_spawn": {"start_method": "spawn"},
    "realloc_fork": {"start_method": "fork"},
}
"""Name -> arguments of :class:`ReallocStrategy`."""


def _read_plan_source(plan: PlanSource) -> ExecutionPlan | Literal["heuristic", "static"]:
    """Return a plan, read where it is a file or a mapping, or the name of how one is worked out."""
    if isinstance(plan, ExecutionPlan):
        return plan
    if isinstance(plan, Mapping):
        return ExecutionPlan.from_mapping(plan)
    if plan == "heuristic" or plan == "static":
        return plan  # type: ignore[return-value]
    return ExecutionPlan.load(plan)


def _with_memory(base: ClusterSpec, num_nodes: int, device: torch.device) -> ClusterSpec:
    from dataclasses import replace

    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // base.devices_per_node
    return replace(base, num_nodes=num_nodes, device_memory_bytes=memory)
