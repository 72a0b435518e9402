"""Place an algorithm's roles for a run: build the pool, the call runner and the offloader, and apply other plans."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import (
    ConfigError,
    DataError,
    DeviceFull,
    GenerationError,
    PlanError,
    RankLost,
    require_choice,
)
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.remote_path import local_folder
from lightning_realloc.runtime.measure.allocators import collect_garbage, give_back_freed_memory
from lightning_realloc.runtime.measure.usage import PeakMemory
from lightning_realloc.runtime.messages.failure_agreement import rank_lost
from lightning_realloc.runtime.messages.failure_store import is_broken_connection
from lightning_realloc.runtime.messages.flight_record import FlightRecord
from lightning_realloc.runtime.messages.mailbox import Mailbox
from lightning_realloc.runtime.messages.watchdog import StallAction, Watchdog, write_flight_record
from lightning_realloc.runtime.parallel.shards import reshard
from lightning_realloc.runtime.transfer.agreement import TransportName, WeightVerification
from lightning_realloc.strategies.calls.call_runner import CallRunner
from lightning_realloc.strategies.calls.context import CallContext
from lightning_realloc.strategies.calls.engine_factory import check_vllm
from lightning_realloc.strategies.calls.overlap import OverlapOptions
from lightning_realloc.strategies.calls.step_metrics import log_now
from lightning_realloc.strategies.calls.weight_updates import VersionLog
from lightning_realloc.strategies.largest_workload import check_longest_sequences
from lightning_realloc.strategies.lightning.failures import CALLER_ERRORS, log_way_to_resume
from lightning_realloc.strategies.lightning.optimizer_checks import check_optimizers
from lightning_realloc.strategies.lightning.optimizer_hooks import LightningOptimizers, prepare_optimizers
from lightning_realloc.strategies.lightning.signals import StopRequest
from lightning_realloc.strategies.pool.builder import NamedPlan, PoolBuilder
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.offloader import Offloader
from lightning_realloc.strategies.pool.phase_hooks import announced
from lightning_realloc.strategies.pool.pool_options import MovingAverage, PoolOptions, RunFacts
from lightning_realloc.strategies.pool.replica import Replica
from lightning_realloc.strategies.pool.run_policies import RunPolicies
from lightning_realloc.strategies.pool.weight_averages import WeightAverages
from lightning_realloc.trainers import trainer_callbacks
from lightning_realloc.tuning.memory.offload_schedule import OffloadSchedule

_log = logging.getLogger(__name__)

WEIGHT_VERSIONS = "weight_versions"
"""Folder in the Trainer's ``default_root_dir`` for the versions of weights that took part in each batch."""
FLIGHT_RECORDS = "flight_record"
"""Folder in the Trainer's ``default_root_dir`` for the latest activities of ranks, after a failure or stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """Settings by which a run places its models."""

    plan: NamedPlan
    """The execution plan, or the name of a way to make one."""
    overlap: OverlapOptions
    """Calls that may run at the same time."""
    transport: TransportName
    """How weights travel."""
    verify_weights: WeightVerification
    """Elements that are compared after weights moved."""
    tp_plans: Mapping[str, Mapping[str, str]]
    """Role -> tensor-parallel styles, for models without a plan of their own."""
    memory_budget: int | None
    """Bytes of one device that a plan may use; None: the device's memory."""
    stall_timeout_s: float | None
    """Seconds beyond the longest call so far after which a waiting rank says for whom it waits; None: never."""
    on_stall: StallAction
    """Whether the process goes on waiting then, or ends."""

    def __post_init__(self) -> None:
        require_choice("transport", self.transport, get_args(TransportName))
        require_choice("verify_weights", self.verify_weights, get_args(WeightVerification))
        require_choice("on_stall", self.on_stall, get_args(StallAction))
        if self.stall_timeout_s is not None and not self.stall_timeout_s > 0:
            raise ConfigError(f"stall_timeout={self.stall_timeout_s} must be positive seconds; None switches it off")


class PlacedRoles:
    """Owns the pool of models of one LightningModule, its call runner and its offloader."""

    def __init__(self, optimizers: LightningOptimizers, stop: StopRequest, options: PlacementOptions) -> None:
        self._optimizers = optimizers
        self._stop = stop
        self._options = options
        self._plan = options.plan
        self._read_facts: Callable[[], RunFacts]
        self._pool: ModelPool | None = None
        self._runner: CallRunner | None = None
        self._offloader: Offloader | None = None
        self.module: Any = None
        """The LightningModule of the run; None before it begins."""
        self._watchdog: Watchdog | None = None
        self._record = FlightRecord()

    @property
    def facts(self) -> RunFacts:
        """This rank among those of the run, once that has begun; links between nodes may be measured again in it."""
        return self._read_facts()

    @property
    def pool(self) -> ModelPool:
        """The replicas of every role. Raises ConfigError before the models are set up."""
        if self._pool is None:
            raise ConfigError("the models are not set up yet; read strategy.pool from on_fit_start on")
        return self._pool

    @property
    def runner(self) -> CallRunner:
        """The call runner. Raises ConfigError before the models are set up."""
        if self._runner is None:
            raise ConfigError("the models are not set up yet; read strategy.runner from on_fit_start on")
        return self._runner

    def builder(self) -> PoolBuilder:
        """Return the builder for the module that is trained now."""
        roles = self.module.roles()
        averaged = [role for role in roles if role.average_of is not None]
        options = PoolOptions(
            facts=self.facts,
            transport=self._options.transport,
            verify_weights=self._options.verify_weights,
            tp_plans=self._options.tp_plans,
            averages={role.name: MovingAverage(role.average_of, role.average_rate) for role in averaged},
            biased=frozenset(
                role.name
                for role in roles
                if role.trained and self.module.train_options_of(role.name).router_bias_update_rate
            ),
            sharers={role.name: role.shares for role in roles if role.shares is not None},
        )
        return PoolBuilder(
            module=self.module,
            options=options,
            memory_budget=self._options.memory_budget or self.facts.cluster.device_memory_bytes,
            policies=self.policies,
            pushes_weights=self._options.overlap.pushes_weights,
        )

    # ---- a run's beginning and end
    def begin(self, module: nn.Module, read_facts: Callable[[], RunFacts]) -> None:
        """Begin a run of a module; first free the models of another one."""
        self._read_facts = read_facts
        if self.module is module:
            return
        if self._pool is not None:
            self._optimizers.forget()
        self.module, self._pool, self._runner = module, None, None
        self._plan = self._options.plan
        collect_garbage()

    def choose_plan(self) -> None:
        """Choose the plan before models are built.

        Raises:
            PlanError: if it cannot fit into memory in training.
            GenerationError: for a generating call whose layout cannot follow the algorithm's options.
            ConfigError: for a host that is to generate with vLLM, and has none.
        """
        builder = self.builder()
        self._plan = builder.choose_plan(self._options.plan)
        check_vllm(self.module, builder.dataflow, self._plan, self.facts.rank)
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            builder.check_memory(self._plan)

    def set_up(self, trainer: Trainer) -> None:
        """Shard every role into its home layout, and make the runner and the offloader. Collective over all ranks."""
        # Lightning's, on every rank of every run, about a rule of torch's pytrees that Lightning alone can follow.
        warnings.filterwarnings("ignore", r".*isinstance.treespec, LeafSpec", FutureWarning)
        self._watch(local_folder(trainer.default_root_dir))
        with self._naming_failures():
            builder = self.builder()
            known = () if self._pool is None else [call.name for call in self._pool.dataflow.calls]
            if any(call.name not in known for call in builder.dataflow.calls):  # of a callback, in a further fit
                self._pool, self._runner = builder.build(self._plan), None
            assert self._pool is not None, "an algorithm has calls"
            if self._runner is None or not self._runner.can_go_on():
                self._runner = self._make_runner(self._pool)
            self._offloader = self._make_offloader(self._pool)
        if trainer.state.fn == TrainerFn.FITTING:
            check_longest_sequences(self.module, trainer, self._pool.plan, self._pool.dataflow.iteration_calls)
        self.runner.version_log.write_to(local_folder(trainer.default_root_dir) / WEIGHT_VERSIONS)

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Raise RankLost with the lost rank if a connection breaks in the set-up, and DeviceFull if memory runs out."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceFull(
                f"the models find no room on {self.facts.device}: cut their weights over more ranks, train "
                f"adapters (peft_config), or end other processes there ({str(error).splitlines()[0]})"
            ) from error
        except RuntimeError as error:
            if self._watchdog is None or not is_broken_connection(error):
                raise
            raise rank_lost(error, self._watchdog.describe_lost()) from error

    def _watch(self, folder: Path) -> None:
        """Watch this rank's calls for stalls, if there are other ranks."""
        timeout_s = self._options.stall_timeout_s
        if self.facts.world_size == 1:
            return
        if self._watchdog is None:
            self._watchdog = Watchdog(
                self._record,
                rank=self.facts.rank,
                world_size=self.facts.world_size,
                timeout_s=math.inf if timeout_s is None else timeout_s,
                action=self._options.on_stall,
                folder=folder / FLIGHT_RECORDS,
                before_end=lambda: log_way_to_resume(self.module.trainer),
            )
        self._watchdog.start()

    def stop_watching(self) -> None:
        """Stop watching this rank's calls for stalls."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def write_record_after(self, error: BaseException) -> None:
        """Write this rank's latest activities to a file after an error, unless it is a mistake of the caller.

        A connection that broke between calls gets a note with the lost ranks.
        """
        if self._watchdog is None:
            return
        self._watchdog.explain(error)
        is_mistake = isinstance(error, CALLER_ERRORS) and not isinstance(error, RankLost | DeviceFull)
        if is_mistake or not isinstance(error, Exception) or self._record.is_empty:
            return
        folder, rank = local_folder(self.module.trainer.default_root_dir) / FLIGHT_RECORDS, self.facts.rank
        file = write_flight_record(self._record, folder, rank)
        _log.warning("the latest activities of rank %d are in %s", rank, file)

    def decide_on_caches(self) -> None:
        """Decide whether engines keep their caches between generations. Collective over all ranks."""
        engines = self.runner.engines
        engines.free_caches()  # those of an earlier fit
        engines.keeps_caches = self.builder().keeps_caches(self.pool.plan)

    def finish(self) -> None:
        """Wait for the last messages between ranks, and log late metrics."""
        if self._runner is not None:
            log_now(self.module.trainer, self._runner.finish())

    def bring_back(self) -> None:
        """Fetch everything that the plan offloads to the device until the next call begins."""
        if self._offloader is not None:
            self._offloader.bring_back()

    def close(self) -> None:
        """Fetch everything that the plan offloads for good, free kept caches, and end processes that generate."""
        if self._runner is not None:
            self._runner.close()
        if self._offloader is not None:
            self._offloader.close()
            self._offloader = None

    # ---- calls
    @contextmanager
    def phase(self, call: str) -> Iterator[Replica]:
        """Announce a call to callbacks, and yield the replica that it works on."""
        assert self._offloader is not None
        self._offloader.begin(call, self._optimizers.by_role(), self.runner.record)
        with announced(call, self.module.trainer, self.pool, self.policies.reallocation):
            replica = self.pool.active(call)
            yield replica
            if self.pool.dataflow.call(call).kind != "train":
                reshard(replica.model)  # without a backward pass nothing else frees the weights that FSDP gathered
        self._offloader.end(call, self.runner.record)

    def layout_of(self, call: str) -> Layout:
        """Return the layout in which a call will find its model."""
        role = str(self.pool.dataflow.call(call).role)
        return (self.pool.target(call) if self.policies.reallocation.enabled else self.pool.home(role)).layout

    @property
    def frees_copies(self) -> bool:
        """Whether replicas leave memory between their calls."""
        return self.policies.reallocation.free_after

    # ---- changes between iterations
    def apply_plan(self, plan: NamedPlan) -> None:
        """See `ReallocStrategy.set_plan`."""
        if self.runner.is_running:
            raise ConfigError(
                "set_plan moves all models, and calls are running; use it between iterations, in on_train_batch_end "
                "or on_train_batch_start"
            )
        if self.runner.is_ahead:
            raise ConfigError(
                "set_plan cannot move responses that wait to be trained on, and with max_staleness there are some "
                "after every iteration except an epoch's last; use max_staleness=0 where plans change"
            )
        builder, running = self.builder(), self.pool.plan
        try:
            wanted = builder.choose_plan(plan)
        except GenerationError as error:
            raise PlanError(str(error)) from error
        if wanted == running:
            return
        try:
            self._check_optimizers(wanted)
            check_longest_sequences(builder.module, builder.module.trainer, wanted, builder.dataflow.iteration_calls)
        except (ConfigError, DataError) as error:
            raise PlanError(str(error)) from error
        self.runner.engines.free_caches()  # the move needs their memory
        builder.check_memory(wanted, running=running)
        with self.runner.collective("set_plan"):
            self.runner.finish()
            self.pool.meshes.create(wanted.layouts)
            self.close()
            self.pool.apply_plan(wanted, self._optimizers.by_role())
            self._replace_models()
            self.decide_on_caches()

    def prepare_optimizers(self) -> None:
        """Record the settings of new optimizers, and refuse those, and schedules, that cannot run in the plan."""
        prepare_optimizers(list(self._optimizers.by_role().values()), self._optimizers.schedules)
        self._check_optimizers(self.pool.plan)

    def _check_optimizers(self, plan: ExecutionPlan) -> None:
        pool = self.pool
        homes = {role: plan.layout(pool.dataflow.home_call(role).name) for role in pool.dataflow.trained_roles}
        layouts = {role: ModelLayout(pool.home(role).model_layout.model, home) for role, home in homes.items()}
        models = {role: pool.home(role).model for role in homes}
        names = {role: {id(p): name for name, p in model.named_parameters()} for role, model in models.items()}
        check_optimizers(self._optimizers.by_role(), layouts, names)

    def release(self, role: str) -> None:
        """See `ReallocStrategy.release`."""
        self.runner.finish()
        self.close()
        self.pool.release(role)
        self._replace_models()
        give_back_freed_memory()

    def _replace_models(self) -> None:
        """Give the module, the offloader and the runner the models that the pool holds now."""
        for role in self.pool.roles:
            setattr(self.module, role, self.pool.home(role).model)
        self._offloader = self._make_offloader(self.pool)
        self.runner.plan_changed()

    @property
    def policies(self) -> RunPolicies:
        """Decisions of the Trainer's callbacks about weights."""
        return RunPolicies.from_callbacks(trainer_callbacks(self.module.trainer))

    @property
    def averages(self) -> WeightAverages:
        """The averages of trained weights. Raises ConfigError before the models are set up."""
        return WeightAverages(self.pool, self._optimizers.optimizer_of, self.bring_back)

    def _make_offloader(self, pool: ModelPool) -> Offloader:
        schedule = OffloadSchedule(pool.dataflow, pool.plan, self.facts.rank, pool.average_of, pool.sharers)
        return Offloader(pool, schedule, self.facts.device, self._options.verify_weights)

    def _make_runner(self, pool: ModelPool) -> CallRunner:
        rank, device = self.facts.rank, self.facts.device
        group, hosts = pool.meshes.new_host_group(), self.facts.cluster.ranks_by_node
        mailbox = Mailbox(rank, self.facts.world_size, group, self._watchdog, hosts=hosts)
        log = VersionLog(rank, self._options.overlap.replay_versions)
        context = CallContext(self.module, pool, mailbox, device, PeakMemory(device), rank, log)
        return CallRunner(context, self, self._optimizers, self._options.overlap, self._stop)
