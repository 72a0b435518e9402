"""Run the Trainer's ranks as actors of a Ray cluster, and start again from the last checkpoint when one is lost."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot, _WorkerOutput
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_realloc.errors import ConfigError, RankLost
from lightning_realloc.strategies.checkpoints.checkpoint_files import is_complete
from lightning_realloc.strategies.lightning.failures import report_failures
from lightning_realloc.strategies.lightning.last_checkpoint import with_last_resolved
from lightning_realloc.strategies.lightning.launchers import (
    FullStateLauncher,
    drop_callbacks,
    leave_process_group,
    pickling_named,
)
from lightning_realloc.strategies.lightning.signals import signals_forwarded
from lightning_realloc.strategies.ray.ray_cluster import RankGroup, RayPlacement, connect
from lightning_realloc.strategies.ray.ray_ranks import CheckpointList


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

    def __call__(self, on_checkpoint: Callable[[str], object] | None) -> object:
        """Run the function on this rank as Lightning does under torchrun, and return rank 0's results."""
        self.state.restore()
        if self.trainer is None:
            return self.function(*self.args, **self.kwargs)
        self.launcher.become_rank(on_checkpoint)
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
    """File with the full weights; None unless the run trained."""


class RayLauncher(FullStateLauncher):
    """Lightning's launcher whose ranks are actors of a Ray cluster.

    Args:
        strategy: Strategy of the Trainer.
        max_failures: Number of lost ranks or machines after which the run starts again from its last checkpoint.
    """

    def __init__(self, strategy: ModelParallelStrategy, *, max_failures: int) -> None:
        super().__init__(strategy, start_method="spawn")
        self._max_failures = max_failures
        self._signals: SimpleQueue[int] = SimpleQueue()

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
            ConfigError: for a second fit of a Trainer, and for a cluster that is too small.
        """
        is_fit = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._already_fit and is_fit:
            raise ConfigError("a Trainer with launcher='ray' fits once; make another one, and give fit a ckpt_path=")
        leave_process_group()
        placement = self._placement()
        connect(placement.num_ranks)
        args, kwargs = with_last_resolved(trainer, function, args, kwargs)
        work = RankWork(self, function, args, kwargs, trainer, _GlobalStateSnapshot.capture())
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
        uses_gpus = strategy.root_device.type == "cuda"
        return RayPlacement(num_nodes=strategy.num_nodes, per_node=strategy.num_processes, uses_gpus=uses_gpus)

    # ---- attempts
    def _run_attempts(self, work: RankWork, placement: RayPlacement) -> Any:
        """Run the ranks, again from the last checkpoint after each of the allowed failures."""
        from ray import cloudpickle

        saved = _checkpoint_list() if self._max_failures else None
        for attempt in range(self._max_failures + 1):
            try:
                with pickling_named("launcher='ray'"):
                    pickled = cloudpickle.dumps(work)
                with RankGroup(placement, self._signals) as group:
                    return group.run(pickled, saved)
            except RankLost as error:
                if saved is None or attempt == self._max_failures:
                    raise
                work = _resumed(work, saved)
                begin = inspect.signature(work.function).bind(*work.args, **work.kwargs).arguments.get("ckpt_path")
                rank_zero_warn(
                    f"{error}; failure {attempt + 1} of {self._max_failures}, starting again from "
                    f"{begin or 'the beginning'}"
                )
        raise AssertionError("the last attempt returns or raises")

    # ---- on a rank
    def become_rank(self, on_checkpoint: Callable[[str], object] | None) -> None:
        """Prepare this process's copy of the strategy: it launches nothing, and sees the GPUs of its rank's node."""
        strategy: Any = self._strategy
        strategy._launcher = None
        strategy.on_checkpoint = on_checkpoint
        if strategy.root_device.type == "cuda":
            import torch

            strategy.parallel_devices = [torch.device("cuda", index) for index in range(strategy.num_processes)]

    def collect(self, trainer: Trainer, results: object) -> RankResults | None:
        """Return the results of rank 0, with full weights; None on other ranks. Collective over all ranks."""
        output = self._collect_rank_zero_results(trainer, results)
        if output is None:
            return None
        weights = None
        if output.weights_path is not None:
            path = Path(output.weights_path)
            weights = path.read_bytes()
            shutil.rmtree(path.parent)
        return RankResults(output, weights) if trainer.is_global_zero else None

    # ---- in the process that called the Trainer
    def _recover(self, results: RankResults, trainer: Trainer) -> Any:
        """Take over the weights, metrics and counts of rank 0."""
        output = results.output
        with tempfile.TemporaryDirectory() as folder:
            if results.weights is not None:
                path = Path(folder, "weights.ckpt")
                path.write_bytes(results.weights)
                output = output._replace(weights_path=str(path))
            self._recover_results_in_main_process(output, trainer)
        return output.trainer_results


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


def _resumed(work: RankWork, saved: CheckpointList) -> RankWork:
    """Return the work from its newest complete checkpoint; as it was if none has been saved, or for no fit."""
    import ray

    newest = last_complete(ray.get(saved.read.remote()))
    return work if newest is None else work.resumed_from(newest)


def last_complete(paths: Sequence[str]) -> str | None:
    """Return the last path of a complete checkpoint, a folder or a file; None without one."""
    found = (path for path in reversed(paths) if os.path.isfile(path) or is_complete(Path(path)))
    return next(found, None)


__all__ = ["RayLauncher", "RankWork", "last_complete"]
