"""Choose how the processes of a run start: by the script, by spawn, by fork, or as actors of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.strategies.lightning.last_checkpoint import InProcessLauncher
from lightning_realloc.strategies.lightning.launchers import FullStateLauncher, refuse_in_notebook
from lightning_realloc.strategies.lightning.ray_options import RayOptions
from lightning_realloc.strategies.lightning.script_launcher import ScriptLauncher

LauncherName = Literal["popen", "spawn", "fork", "ray"]
"""How the process of a device starts: by the script, by the function in a new or a forked process, in a Ray actor."""

Launcher = LauncherName | RayOptions
"""The same, or Ray with settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of starting processes; `ReallocStrategy` documents each.

    Raises:
        ConfigError: for an unknown launcher, for ``max_failures`` that is negative or has no effect, and for
            ``min_nodes`` with a plan or a cluster for one number of nodes.
    """

    launcher: Launcher = "popen"
    max_failures: int = 0
    plan: ExecutionPlan | str = "heuristic"
    """The execution plan, or the name of a way to make one."""
    cluster: ClusterSpec | str | None = None
    """Nodes, devices and memory, if they are given."""

    def __post_init__(self) -> None:
        if not isinstance(self.launcher, RayOptions):
            require_choice("launcher", self.launcher, get_args(LauncherName))
        if self.max_failures < 0:
            raise ConfigError(f"max_failures={self.max_failures} must be at least 0")
        if self.max_failures and self.ray is None:
            raise ConfigError(
                f"max_failures={self.max_failures} needs launcher='ray'; launcher={self.launcher!r} starts processes "
                f"once, torchrun has --max-restarts"
            )
        if self.ray is not None and self.ray.min_nodes is not None:
            self._refuse_fixed_nodes(self.ray.min_nodes)

    def _refuse_fixed_nodes(self, min_nodes: int) -> None:
        if isinstance(self.plan, ExecutionPlan):
            num_ranks = 1 + max((rank for _, call in self.plan.calls for rank in call.layout.ranks), default=0)
            raise ConfigError(
                f"min_nodes={min_nodes} lets a run go on with fewer nodes, and the given plan is for {num_ranks} "
                f"ranks; use plan='heuristic', which suits any number, or leave min_nodes out"
            )
        if self.cluster is not None:
            raise ConfigError(
                f"min_nodes={min_nodes} lets a run go on with fewer nodes, and cluster= describes one number of "
                f"nodes; leave cluster out, so that each start describes its own, or leave min_nodes out"
            )

    @property
    def ray(self) -> RayOptions | None:
        """Settings of Ray's launcher; None for another one."""
        if isinstance(self.launcher, RayOptions):
            return self.launcher
        return RayOptions() if self.launcher == "ray" else None


class RemoteGPUs(CUDAAccelerator):
    """Lightning's accelerator for GPUs of other machines: ranks have them, and this process may see none."""

    @staticmethod
    def is_available() -> bool:
        """Whether there are any; the placement of the ranks shows it."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """Raise ConfigError, since this process does not know the machines."""
        raise ConfigError("RayOptions(use_gpus=True) needs Trainer(devices=N), the ranks on each of num_nodes machines")

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return as many indices. Raises ConfigError for anything but a number: Ray chooses the GPUs."""
        if isinstance(devices, list) or not str(devices).isdecimal():
            raise ConfigError(
                f"RayOptions(use_gpus=True) needs Trainer(devices=N), the number of ranks on each machine, not "
                f"devices={devices!r}: Ray chooses the GPUs"
            )
        return list(range(int(devices)))


def make_launcher(strategy: ModelParallelStrategy, options: LaunchOptions) -> _Launcher:
    """Return the launcher of a strategy; one that starts nothing if the processes exist already, or one is enough.

    Raises:
        ConfigError: in a notebook for launchers that run a script again, without Ray where it is asked for, and for
            Ray in a process that another launcher started as one of several.
    """
    name = options.launcher
    if isinstance(name, RayOptions) or name == "ray":
        return _ray_launcher(strategy, name if isinstance(name, RayOptions) else RayOptions(), options)
    environment = strategy.cluster_environment
    assert environment is not None, "Lightning sets the environment before it configures the launcher"
    if environment.creates_processes_externally or strategy.num_processes * strategy.num_nodes == 1:
        return InProcessLauncher()  # one process works in notebooks, and ends without waiting for an observer
    launcher: _Launcher
    if name == "popen":
        launcher = ScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)
    else:
        launcher = FullStateLauncher(strategy, start_method=name)
    refuse_in_notebook(launcher)
    return launcher


def _ray_launcher(strategy: ModelParallelStrategy, ray: RayOptions, options: LaunchOptions) -> _Launcher:
    """Return Ray's launcher, which also serves one rank: it may run on another machine."""
    from lightning_realloc.strategies.ray.ray_cluster import check_ray
    from lightning_realloc.strategies.ray.ray_launcher import RayLauncher

    check_ray()
    environment = strategy.cluster_environment
    if isinstance(environment, SLURMEnvironment):  # a script inside a job whose nodes run Ray
        strategy.cluster_environment = LightningEnvironment()
    elif environment is not None and environment.creates_processes_externally:
        raise ConfigError(
            "launcher='ray' starts the ranks itself, and torchrun or another launcher started this process as one of "
            "them; run the script once, with python"
        )
    return RayLauncher(strategy, ray, plan=options.plan, max_failures=options.max_failures)
