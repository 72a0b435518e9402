"""Lightning strategy that owns every model of an algorithm, and runs each call in the plan's layout.

``Trainer(strategy="realloc")`` runs a LightningModule that declares a dataflow (see ``algorithms.base.module``) call by
call, and trains any other data-parallel. ``docs/internals/lightning.md`` lists the overridden members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.dataflow import CallOrName
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.remote_path import AnyPath
from lightning_realloc.runtime.measure.allocators import InfrequentCollection, give_back_freed_memory
from lightning_realloc.runtime.messages.watchdog import StallAction
from lightning_realloc.runtime.transfer.agreement import TransportName, WeightVerification
from lightning_realloc.setting_hints import STRATEGY_HINTS, suggest_settings
from lightning_realloc.strategies.calls.call_runner import CallRunner
from lightning_realloc.strategies.calls.overlap import OverlapOptions
from lightning_realloc.strategies.calls.step_metrics import log_results
from lightning_realloc.strategies.checkpoints.safety.failed_saves import SaveErrorAction
from lightning_realloc.strategies.lightning.data_parallel import DataParallelStrategy
from lightning_realloc.strategies.lightning.failures import dismiss_observer
from lightning_realloc.strategies.lightning.launch_options import Launcher, LaunchOptions
from lightning_realloc.strategies.lightning.optimizer_hooks import LightningOptimizers
from lightning_realloc.strategies.measure.profiling import Profile, make_plan_evaluator, profile_models
from lightning_realloc.strategies.measure.subjects import Machine
from lightning_realloc.strategies.placed_roles import PlacedRoles, PlacementOptions
from lightning_realloc.strategies.pool.builder import PlanSource, read_plan_source
from lightning_realloc.strategies.pool.model_pool import ModelPool
from lightning_realloc.strategies.pool.pool_options import RunFacts
from lightning_realloc.strategies.pool.precision import refuse_precision
from lightning_realloc.strategies.pool.weight_averages import WeightAverages
from lightning_realloc.strategies.role_checkpoints import RoleCheckpoints, SaveOptions
from lightning_realloc.strategies.run_summary import log_summary, warn_of_earlier_checkpoint
from lightning_realloc.tuning.candidates import PlanEvaluator
from lightning_realloc.tuning.memory.parts import parse_bytes
from lightning_realloc.tuning.shapes.lengths import Lengths
from lightning_realloc.tuning.timeline.iteration_schedule import Overlap
from lightning_realloc_autoload import STRATEGIES


@suggest_settings(STRATEGY_HINTS)
class ReallocStrategy(DataParallelStrategy):
    """Gives every model function call of an iteration the layout and ranks that suit it.

    Args:
        plan: ``"heuristic"`` works out layouts, and options if need be, from ranks, models and memory; ``"static"`` has
            one sharded layout for everything; a path reads a YAML file; or an :class:`ExecutionPlan`, or its mapping.
        transport: How weights travel: ``"push"`` through each node's shared memory, ``"direct"`` from rank to rank,
            ``"auto"`` chooses by probing.
        verify_weights: Elements to compare after weights moved: ``"sampled"`` 256 of each tensor, ``"all"``, ``"off"``.
        overlap: What may run at the same time on disjoint ranks: ``"iterations"`` means calls, and calls of the next
            iteration beside a training call that they do not depend on; ``"calls"`` only those of one iteration;
            ``"none"`` one call at a time. Results are the same.
        max_staleness: 0 learns from responses of the policy as it is. 1 generates the next batch while the last one is
            trained on, on ranks of its own if the plan gives it some; responses then come from the policy before that
            step (arXiv:2410.18252), which losses that weigh by the probability at rollout account for. k lets k batches
            wait; from 2 on, ranks that only generate take newer weights between two tokens.
        replay_versions: Folder ``weight_versions`` of an earlier run: weights arrive after the same tokens as there.
        generation_chunks: Chunks in which a generating rank sends its samples to inference on other ranks, which then
            runs during the rest of the generation. Losses change by rounding alone. With ``sample_reallocation``, a
            rank without samples also infers on those that finished there. 1 with ``overlap="none"``, ``max_staleness``.
        cluster: Nodes, devices and memory; by default what this machine shows.
        memory_per_device: Bytes that a plan may need of a device, as ``"24GiB"``; by default all. Others are refused.
        tp_plans: Role -> tensor-parallel styles by module pattern, for models that bring none.
        launcher: ``"popen"`` re-runs the script; ``"spawn"``, ``"fork"``: in notebooks; ``"ray"``, `RayOptions`: Ray.
        max_failures: Lost ranks or machines after which ``"ray"`` starts the run again from its last checkpoint.
        save_frozen_roles: Also write roles that are never trained into checkpoints.
        load_weights_only: Refuse checkpoints with more than plain data, which could run code. False reads any class;
            only for checkpoints that you trust.
        stall_timeout: Seconds over the longest call so far, after which a waiting rank logs the late one; None: never.
        on_stall: ``"warn"`` goes on waiting; ``"end"`` writes the rank's flight record and ends the process with exit
            code 124; in the set-up and the first call of a name, after half an hour.
        async_checkpoints: Write checkpoints of an algorithm while ``fit`` goes on, from a copy in host memory. The next
            save and the end of ``fit`` wait for the files and raise their error.
        on_save_error: ``"raise"`` ends the run if a checkpoint cannot be written; ``"warn"`` names it and trains on.
        process_group_backend: By default nccl on CUDA, gloo elsewhere.
        timeout: Of every collective.
    """

    strategy_name = "realloc"
    num_shown = 0
    """Samples of an iteration whose responses every rank receives."""
    shown: tuple[Samples, ...] = ()
    """The first ``num_shown`` samples of each batch that the last iteration trained on."""
    lengths: Lengths | None = None
    """Lengths of the latest iteration's sequences; None before it, and if it has no prompts with responses."""

    def __init__(
        self,
        plan: PlanSource = "heuristic",
        *,
        transport: TransportName = "auto",
        verify_weights: WeightVerification | Literal[False] = "sampled",
        overlap: Overlap = "iterations",
        max_staleness: int = 0,
        replay_versions: str | Path | None = None,
        generation_chunks: int = 1,
        cluster: ClusterSpec | str | None = None,
        memory_per_device: int | str | None = None,
        tp_plans: Mapping[str, Mapping[str, str]] | None = None,
        launcher: Launcher = "popen",
        max_failures: int = 0,
        save_frozen_roles: bool = False,
        load_weights_only: bool = True,
        stall_timeout: float | None = 60.0,
        on_stall: StallAction = "warn",
        async_checkpoints: bool = False,
        on_save_error: SaveErrorAction = "raise",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        source = read_plan_source(plan)
        super().__init__(
            cluster=cluster,
            launch=LaunchOptions(launcher=launcher, max_failures=max_failures, plan=source, cluster=cluster),
            load_weights_only=load_weights_only,
            on_save_error=on_save_error,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._overlap = OverlapOptions(
            overlap=overlap,
            max_staleness=max_staleness,
            generation_chunks=generation_chunks,
            replay_versions=replay_versions,
        )
        self._optimizer_hooks = LightningOptimizers(self)
        options = PlacementOptions(
            plan=source,
            overlap=self._overlap,
            transport=transport,
            verify_weights="off" if verify_weights is False else verify_weights,  # YAML reads off as False
            tp_plans=dict(tp_plans or {}),
            memory_budget=None if memory_per_device is None else parse_bytes(memory_per_device),
            stall_timeout_s=stall_timeout,
            on_stall=on_stall,
        )
        self._placed = PlacedRoles(self._optimizer_hooks, self.stop, options)
        saving = SaveOptions(save_frozen_roles=save_frozen_roles, in_background=async_checkpoints)
        self._checkpoints = RoleCheckpoints(self._placed, self._optimizer_hooks, self.failed_saves, saving)
        self._collection = InfrequentCollection()
        self.max_staleness = max_staleness
        """Training steps by which generation may run ahead of training."""
        self.generation_chunks = generation_chunks
        """Chunks in which samples are sent to inference while others are generated."""

    # ---- what users and callbacks read
    @property
    def pool(self) -> ModelPool:
        """The replicas of every role. Raises ConfigError before the models are set up."""
        return self._placed.pool

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan in use."""
        return self.pool.plan

    @property
    def runner(self) -> CallRunner:
        """The call runner, with the seconds of each call. Raises ConfigError before the models are set up."""
        return self._placed.runner

    @property
    def averages(self) -> WeightAverages:
        """Averages of trained weights, which `EMA` updates. Raises ConfigError before the models are set up."""
        return self._placed.averages

    def profile(
        self, iterations: Sequence[Lengths], *, cache: Path | None, seconds: float = math.inf
    ) -> Profile | None:
        """Return how long passes of the models take on these ranks, at such lengths. Collective, between iterations.

        Measuring takes about ``seconds`` at most; None where that is too little. A cached profile takes none.
        """
        builder, context = self._placed.builder(), self._optimizer_hooks.forward_context
        machine = Machine(options=builder.options, meshes=self.pool.meshes, forward_context=context)
        return profile_models(builder, machine, iterations, cache=cache, seconds=seconds)

    def plan_evaluator(
        self, iterations: Sequence[Lengths], profile: Profile | None = None, factors: Mapping[str, float] | None = None
    ) -> PlanEvaluator:
        """Return an evaluator of other plans, see `make_plan_evaluator`. Collective over all ranks."""
        return make_plan_evaluator(self._placed.builder(), self.plan, iterations, self._overlap, profile, factors)

    # ---- models
    def setup_environment(self) -> None:
        """Start the process group; free the models of earlier fits before this one's are built."""
        super().setup_environment()
        self._placed.begin(self.connected_module, self._facts)

    def _facts(self) -> RunFacts:
        return RunFacts(
            rank=self.global_rank,
            world_size=self.world_size,
            device=self.root_device,
            cluster=self.cluster,
            precision=str(self.precision_plugin.precision),
        )

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Surround ``configure_model``: choose a plan that fits into memory before a model is built."""
        module: Any = self.lightning_module
        if self.dataflow is not None and not module.models():
            self._placed.choose_plan()
        with super().model_sharded_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard every role into its home layout, then make the optimizers, which must see sharded parameters."""
        assert self.accelerator is not None and self.model is not None
        refuse_precision(str(self.precision_plugin.precision))
        self.accelerator.setup(trainer)
        flow = self.dataflow
        if flow is None:
            super().setup(trainer)
        else:
            self._placed.set_up(trainer)
            self.model_to_device()
        self.barrier("realloc.setup")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if flow is not None:
                self._placed.prepare_optimizers()
                self.runner.restore(None)  # batches that waited when an earlier fit ended are left out
        self.setup_precision_plugin()
        give_back_freed_memory()  # of the whole models that were divided

    def set_plan(self, plan: PlanSource) -> None:
        """Run the following iterations under another plan: weights and optimizer state move, training goes on.

        Collective over all ranks, between iterations: in a callback's ``on_train_batch_end``, for instance.

        Raises:
            PlanError: on every rank, for a plan that does not fit the algorithm, the ranks or their memory, or that
                cannot be moved to; the one before stays.
            ConfigError: while calls are under way.
        """
        self._placed.apply_plan(read_plan_source(plan))

    def check_release(self, role: str) -> None:
        """Raise ConfigError where a role's weights are needed after its last call."""
        self._checkpoints.check_release(role)

    def release(self, role: str) -> None:
        """Free the weights of a role after its last call. Collective, between iterations.

        Raises PlanError for a role that is trained, or whose weights another role needs.
        """
        self._placed.release(role)

    # ---- running calls
    @contextmanager
    def phase(self, call: str) -> Iterator[nn.Module]:
        """Announce a call to callbacks, and yield its model in that call's layout; for a hand-written training_step."""
        with self._placed.phase(call) as replica, self.pool.adapted_for(self.pool.dataflow.call(call), replica.model):
            yield replica.model

    def run_iteration(self, batch: Samples) -> tuple[Samples, ...]:
        """Run every call once, count one step, and advance learning-rate schedules.

        Returns:
            All samples of each batch that was trained on, with the values that calls made; of sequences the lengths.
            With ``max_staleness=k``, the batch is that of k iterations before: none at first, all that wait at last.
        """
        module: Any = self.lightning_module
        trainer, iteration = module.trainer, self.iteration
        calls = [call for call in self.pool.dataflow.iteration_calls if module.runs(call.name, iteration)]
        is_last = trainer.is_last_batch or iteration + 1 == trainer.max_steps
        results = self.runner.run_iteration(
            batch, calls, iteration=iteration, is_last=is_last, num_shown=self.num_shown
        )
        self.shown = tuple(result.shown for result in results if result.shown is not None)
        for result in results:
            self.lengths = result.lengths
            module.on_samples_carried(result.carried, num_learnt=len(result.samples))
        log_results(module, results, set(self.pool.dataflow.trained_roles))
        self._optimizer_hooks.count_iteration()
        self._stop_if_agreed()
        return tuple(result.samples.lengths_only() for result in results)

    def run_calls(self, batch: Samples, calls: Sequence[CallOrName], *, are_of_next: bool = False) -> Samples:
        """Run some calls on a batch, without training; every rank gets all results.

        ``calls``: names, in any order; or calls in running order, whose methods may be others than in the dataflow.
        ``are_of_next``: whether these calls begin the next iteration, which then logs their metrics.
        """
        chosen = self.pool.dataflow.select(calls)
        results = self.runner.run_calls(batch, chosen, are_of_next=are_of_next)
        self._stop_if_agreed()
        return results

    def _stop_if_agreed(self) -> None:
        """End the run after this batch if a rank received a signal, with all messages between ranks received."""
        if self.stop.agreed:
            self._placed.finish()
            dismiss_observer(self._launcher)
            self.stop.end_run(self.lightning_module.trainer)  # type: ignore[union-attr]

    def on_train_start(self) -> None:
        """Log a summary, and collect garbage seldom: iterations leave none, and all ranks wait for a collection."""
        super().on_train_start()
        self.stop.handle_interrupts(self.connected_module.trainer)
        if self.dataflow is not None:
            self._checkpoints.check_callbacks()
            self._placed.decide_on_caches()
            self._collection.start()
            log_summary(self._placed, self._optimizer_hooks)
        warn_of_earlier_checkpoint(self.connected_module.trainer, has_roles=self.dataflow is not None)

    def _record_failure(self, exception: BaseException) -> None:
        self._placed.write_record_after(exception)

    def on_train_end(self) -> None:
        """Receive the last messages of other ranks, and wait for the last checkpoint."""
        self._placed.finish()
        self._checkpoints.finish_saving()

    def bring_back(self) -> None:
        """Fetch everything that the plan offloads to the device, until the next call begins."""
        self._placed.bring_back()

    def teardown(self) -> None:
        """Fetch offloaded weights, and release the models."""
        self._checkpoints.close()
        self._collection.stop()
        self._placed.stop_watching()
        self._placed.close()
        module: Any = self.lightning_module
        if hasattr(module, "release"):
            module.release()
        super().teardown()
        give_back_freed_memory()

    # ---- optimizers
    @property
    def iteration(self) -> int:
        """Iterations done so far."""
        return self._optimizer_hooks.iteration

    def optimizer_of(self, role: str) -> Optimizer:
        """Return a role's optimizer. Raises ConfigError if there is none."""
        return self._optimizer_hooks.optimizer_of(role)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: object
    ) -> Any:
        """Step an optimizer. Outside of calls, which do so themselves, mark replicas of its weights as stale."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.dataflow is not None and not self.runner.is_running:
            named = {str(group.get("name")).partition("/")[0] for group in optimizer.param_groups}  # actor, actor/1
            trained = self.pool.dataflow.trained_roles
            for role in named if named.issubset(trained) else trained:
                self.pool.weights_trained(role)
        return result

    # ---- checkpoints: a folder of shards for an algorithm's roles, one file for a module without calls
    @property
    def _roles(self) -> RoleCheckpoints | None:
        return None if self.dataflow is None else self._checkpoints

    def save_huggingface(
        self, role: str, folder: str | AnyPath, *, dtype: str | torch.dtype | None = None, merge: bool = False
    ) -> None:
        """Write a role as a folder, or to an address, that ``from_pretrained`` reads. Collective over all ranks.

        Adapters are written for PEFT or, with ``merge``, merged. Raises CheckpointError on every rank if it fails.
        """
        self._checkpoints.save_huggingface(role, folder, dtype=dtype, merge=merge)

    def check_huggingface(self, role: str, *, dtype: str | torch.dtype | None = None) -> None:
        """Raise the errors that :meth:`save_huggingface` would raise before it gathers anything."""
        self._checkpoints.check_huggingface(role, dtype=dtype)

    def full_weights(self, role: str, names: Set[str] | None = None) -> dict[str, Tensor]:
        """Return a role's full weights, all or some, on rank 0, {} elsewhere. Collective over all ranks."""
        return self._checkpoints.full_weights(role, names)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names that ``Trainer(strategy=...)`` understands."""
        for name, options in STRATEGIES.items():
            strategy_registry.register(name, cls, override=True, description=cls.__doc__.split("\n")[0], **options)  # type: ignore[union-attr]
