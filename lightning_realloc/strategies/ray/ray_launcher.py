"""Run the Trainer's ranks as actors of a Ray cluster, and start again from the last checkpoint when one is lost."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot, _WorkerOutput
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import CheckpointError, ConfigError, RankLost, describe_error
from lightning_realloc.remote_path import AnyPath, as_path
from lightning_realloc.strategies.checkpoints.checkpoint_files import is_complete
from lightning_realloc.strategies.lightning.failures import report_failures
from lightning_realloc.strategies.lightning.last_checkpoint import with_last_resolved
from lightning_realloc.strategies.lightning.launchers import (
    FullStateLauncher,
    drop_callbacks,
    leave_process_group,
    pickling_named,
)
from lightning_realloc.strategies.lightning.process_group import open_store
from lightning_realloc.strategies.lightning.ray_options import RayOptions
from lightning_realloc.strategies.lightning.signals import signals_forwarded
from lightning_realloc.strategies.ray.bundles import RayPlacement, WaitLimits, labels_by_node
from lightning_realloc.strategies.ray.rank_group import RankGroup, StartLost
from lightning_realloc.strategies.ray.ray_cluster import connect, warn_of_unused_gpus
from lightning_realloc.strategies.ray.ray_ranks import CheckpointList, RankContext
from lightning_realloc.strategies.ray.reservation import MachinesMissing

LARGEST_SENT_BYTES = 4 * 2**30
"""Size of weights up to which they are sent to the calling process by default, which needs memory for three copies."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """What every rank runs: a function of the Trainer, with all that it needs. It is pickled as a whole."""

    launcher: RayLauncher
    """Launcher of the process that called the Trainer; its copy collects the results on a rank."""
    function: Callable[..., Any]
    """Method of the Trainer."""
    args: tuple[object, ...]
    """Its arguments."""
    kwargs: dict[str, object]
    """Its keyword arguments."""
    trainer: Trainer | None
    """The Trainer; None for a function of its own."""
    state: _GlobalStateSnapshot
    """Random generators and flags of torch."""

    def __call__(self, context: RankContext) -> object:
        """Run the function on this rank as Lightning does under torchrun, and return rank 0's results."""
        self.state.restore()
        torch.cuda.manual_seed_all(torch.initial_seed())
        if self.trainer is None:
            return self.function(*self.args, **self.kwargs)
        self.launcher.become_rank(context)
        results = _call_and_handle_interrupt(self.trainer, self.function, *self.args, **self.kwargs)
        return self.launcher.collect(self.trainer, results)

    def resumed_from(self, checkpoint: str) -> RankWork:
        """Return the same work, which begins with a checkpoint."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.arguments["ckpt_path"] = checkpoint
        return replace(self, args=bound.args, kwargs=bound.kwargs)


@dataclass(frozen=True, slots=True)
class RankResults:
    """Results of rank 0."""

    output: _WorkerOutput
    """State of the Trainer, metrics and counts."""
    weights: bytes | None
    """File with the full weights; None unless the run trained, and if they stay on the cluster."""
    weights_bytes: int
    """Size of the full weights; 0 unless the run trained."""
    last_checkpoint: str | None
    """Path of the last complete checkpoint that the run has saved."""


class RayLauncher(FullStateLauncher):
    """Lightning's launcher whose ranks are actors of a Ray cluster.

    Args:
        strategy: Strategy of the Trainer.
        options: Settings of Ray.
        plan: Execution plan, or the name of a way to make one.
        max_failures: Number of lost ranks or machines after which the run starts again from its last checkpoint.
    """

    def __init__(
        self, strategy: ModelParallelStrategy, options: RayOptions, *, plan: ExecutionPlan | str, max_failures: int
    ) -> None:
        super().__init__(strategy, start_method="spawn")
        self._options = options
        self._plan = plan
        self._max_failures = max_failures
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._saved: list[str] = []
        self._last_results: RankResults | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: actors receive a notebook's functions and classes by value."""
        return True

    def launch(
        self, function: Callable[..., Any], *args: object, trainer: Trainer | None = None, **kwargs: object
    ) -> Any:
        """Run a function on all ranks, and return the result of rank 0.

        Raises:
            SIGTERMException: if the ranks ended because of a signal, with their exit code.
            RankLost: if a rank was lost, more often than ``max_failures`` allows.
            ConfigError: for a second fit of a Trainer, for a cluster that is too small, and for evaluating weights
                that a fit has left on the cluster.
        """
        is_fit = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._already_fit and is_fit:
            raise ConfigError("a Trainer with launcher='ray' fits once; make another one, and give fit a ckpt_path=")
        leave_process_group()
        placement = self._placement()
        connect(placement.num_ranks * self._options.num_cpus, self._options.namespace)
        warn_of_unused_gpus(placement)
        args, kwargs = with_last_resolved(trainer, function, args, kwargs)
        self._refuse_untrained(function, args, kwargs)
        state = _GlobalStateSnapshot.capture()
        state.rng_states["torch.cuda"] = []  # ranks see other GPUs than this process, and seed their generators
        work = RankWork(self, function, args, kwargs, trainer, state)
        self._signals = SimpleQueue()
        with signals_forwarded(self):
            try:
                results = self._run_attempts(work, placement)
            except BaseException as error:
                if trainer is not None:
                    drop_callbacks(trainer, only_checkpoints=False)  # they have run on the ranks
                if isinstance(error, RankLost):
                    report_failures(rank=0, launcher=None)
                raise
        if trainer is None:
            return results
        self._already_fit |= is_fit
        return self._recover(results, trainer)

    def kill(self, signum: int) -> None:
        """Keep a signal for the ranks. It is sent by the loop that waits for them: this may be a signal handler."""
        self._signals.put(signum)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_signals"}

    def _placement(self) -> RayPlacement:
        strategy: Any = self._strategy
        options, num_nodes, per_node = self._options, strategy.num_nodes, strategy.num_processes
        if options.min_nodes is not None and options.min_nodes > num_nodes:
            raise ConfigError(
                f"min_nodes={options.min_nodes} is more than the Trainer's num_nodes={num_nodes}; lower it"
            )
        labels = labels_by_node(options.labels, self._plan, num_nodes, per_node)
        return RayPlacement(num_nodes, per_node, strategy.root_device.type == "cuda", options, labels)

    def _refuse_untrained(
        self, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Raise ConfigError if a fit has left its weights on the cluster, and this call names no checkpoint."""
        last = self._last_results
        if last is None or last.weights is not None or not last.weights_bytes:
            return
        if inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path") is None:
            raise ConfigError(
                f"the weights that this Trainer trained stayed on the cluster, and here are those from before; give "
                f"ckpt_path={last.last_checkpoint!r}, or set RayOptions(return_weights=True)"
            )

    # ---- attempts
    def _run_attempts(self, work: RankWork, placement: RayPlacement) -> Any:
        """Run the ranks, again from the last checkpoint after each of the allowed failures."""
        import ray
        from ray import cloudpickle

        allowed = self._max_failures
        saved = _checkpoint_list() if allowed else None
        failures = 0
        loss: RankLost | None = None
        for attempt in count():
            with pickling_named("launcher='ray'"):
                pickled = cloudpickle.dumps(work)
            limits = WaitLimits.of(self._options, is_first=loss is None)
            try:
                with RankGroup(placement, self._signals, limits, attempt) as group:
                    return group.run(pickled, saved)
            except StartLost as error:
                loss = error
                rank_zero_warn(f"{error}; its ranks had not started, which is no failure: all are placed again")
            except RankLost as error:
                if saved is None or failures == allowed:
                    raise
                failures, loss, work = failures + 1, error, restarted(work, ray.get(saved.read.remote()))
                begin = inspect.signature(work.function).bind(*work.args, **work.kwargs).arguments.get("ckpt_path")
                rank_zero_warn(
                    f"{error}; failure {failures} of {allowed}, starting again from {begin or 'the beginning'}"
                )
            except MachinesMissing as error:
                if loss is None:
                    raise
                raise RankLost(f"{loss}; after it, {error}") from error
        raise AssertionError("the last attempt returns or raises")

    # ---- on a rank
    def become_rank(self, context: RankContext) -> None:
        """Prepare this process's copy of the strategy: it launches nothing, and has the nodes of this start.

        It opens the store through which ranks meet, and sees the GPUs of its node, or its own as the only one.
        """
        strategy: Any = self._strategy
        strategy._launcher = None
        self._saved = []
        strategy.on_checkpoint = partial(self._record_checkpoint, context.on_checkpoint)
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        strategy.num_nodes = int(os.environ["WORLD_SIZE"]) // per_node
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        strategy.store = open_store(address, port, strategy._timeout, listener=context.listener)
        if strategy.root_device.type == "cuda":
            isolated = self._options.isolate_gpus
            strategy.parallel_devices = [torch.device("cuda", 0 if isolated else index) for index in range(per_node)]

    def _record_checkpoint(self, report: Callable[[str], object] | None, path: str) -> None:
        self._saved.append(path)
        if report is not None:
            report(path)

    def collect(self, trainer: Trainer, results: object) -> RankResults | None:
        """Return the results of rank 0, with full weights if they are sent; None elsewhere. Collective."""
        strategy: Any = self._strategy
        last = last_complete(self._saved)
        size = strategy.full_state_bytes() if trainer.state.fn == TrainerFn.FITTING else 0
        self.sends_weights = strategy.broadcast(bool(size) and self._wants_weights(size, last))
        output = self._collect_rank_zero_results(trainer, results)
        if output is None:
            return None
        weights = None
        if output.weights_path is not None:
            path = Path(output.weights_path)
            weights = path.read_bytes() if self.sends_weights else None
            output = output._replace(weights_path=None)
            shutil.rmtree(path.parent)
        return RankResults(output, weights, size, last) if trainer.is_global_zero else None

    def _wants_weights(self, size: int, last_checkpoint: str | None) -> bool:
        """Return whether to send weights: as set, else if they are small, or if no checkpoint holds them."""
        given = self._options.return_weights
        return given if given is not None else size <= LARGEST_SENT_BYTES or last_checkpoint is None

    # ---- in the process that called the Trainer
    def _recover(self, results: RankResults, trainer: Trainer) -> Any:
        """Take over the metrics and counts of rank 0, the path of the last checkpoint, and the weights if they came."""
        strategy: Any = self._strategy
        self._last_results = replace(results, weights=b"" if results.weights is not None else None)
        strategy.last_checkpoint = results.last_checkpoint or strategy.last_checkpoint
        output = results.output
        with tempfile.TemporaryDirectory() as folder:
            if results.weights is not None:
                path = Path(folder, "weights.ckpt")
                path.write_bytes(results.weights)
                output = output._replace(weights_path=str(path))
            elif results.weights_bytes:
                rank_zero_info(_where_weights_are(results))
            self._recover_results_in_main_process(output, trainer)
        return output.trainer_results


def _where_weights_are(results: RankResults) -> str:
    size = f"the trained weights ({results.weights_bytes / 2**30:.3g} GiB) were not sent to this process"
    if results.last_checkpoint is None:
        return f"{size}, and no checkpoint holds them: RayOptions(return_weights=False) needs a ModelCheckpoint"
    return f"{size}; the last checkpoint is {results.last_checkpoint}"


def _checkpoint_list() -> CheckpointList:
    """Start an actor on this machine that keeps the paths of saved checkpoints; it outlives the ranks."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Paths:  # nested: it travels by value, and its process need not import torch
        def __init__(self) -> None:
            self.paths: list[str] = []

        def add(self, path: str) -> None:
            self.paths.append(path)

        def read(self) -> list[str]:
            return self.paths

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    started: Any = ray.remote(Paths).options(num_cpus=0, scheduling_strategy=here).remote()
    return cast(CheckpointList, started)


def restarted(work: RankWork, saved: Sequence[str]) -> RankWork:
    """Return the work from its newest complete checkpoint; as it was if none has been saved, or for no fit.

    Args:
        saved: Paths and addresses of its checkpoints, in the order of the saves.

    Raises:
        CheckpointError: if a store cannot be read. The run would start from an earlier step, and replace checkpoints.
    """
    newest = last_complete(saved)
    return work if newest is None else work.resumed_from(newest)


def last_complete(paths: Sequence[str]) -> str | None:
    """Return the last path or address of a complete checkpoint, a folder or a file; None without one.

    Raises:
        CheckpointError: if a store cannot be read.
    """
    return next((path for path in reversed(paths) if _is_complete(as_path(path))), None)


def _is_complete(path: AnyPath) -> bool:
    try:
        return path.exists() and is_complete(path)
    except Exception as error:  # stores raise errors of any class
        raise CheckpointError(
            f"the last checkpoint is not known, since {path} cannot be read: {describe_error(error)}; start again with "
            f"ckpt_path='last' when it answers"
        ) from error


__all__ = ["RayLauncher", "RankWork", "last_complete", "restarted"]
