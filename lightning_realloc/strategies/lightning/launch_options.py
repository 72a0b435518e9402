"""Choose how the processes of a run start: by the script, by spawn, by fork, or as actors of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.strategies.lightning.last_checkpoint import InProcessLauncher
from lightning_realloc.strategies.lightning.launchers import FullStateLauncher, refuse_in_notebook
from lightning_realloc.strategies.lightning.script_launcher import ScriptLauncher

LauncherName = Literal["popen", "spawn", "fork", "ray"]
"""How the process of a device starts: by the script, by the function in a new or a forked process, in a Ray actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of starting processes; `ReallocStrategy` documents each.

    Raises:
        ConfigError: for an unknown launcher, and for ``max_failures`` that is negative or has no effect.
    """

    launcher: LauncherName = "popen"
    max_failures: int = 0

    def __post_init__(self) -> None:
        require_choice("launcher", self.launcher, get_args(LauncherName))
        if self.max_failures < 0:
            raise ConfigError(f"max_failures={self.max_failures} must be at least 0")
        if self.max_failures and self.launcher != "ray":
            raise ConfigError(
                f"max_failures={self.max_failures} needs launcher='ray'; launcher={self.launcher!r} starts processes "
                f"once, torchrun has --max-restarts"
            )


def make_launcher(strategy: ModelParallelStrategy, options: LaunchOptions) -> _Launcher:
    """Return the launcher of a strategy; one that starts nothing if the processes exist already, or one is enough.

    Raises:
        ConfigError: in a notebook for launchers that run a script again, without Ray where it is asked for, and for
            Ray in a process that another launcher started as one of several.
    """
    if options.launcher == "ray":
        return _ray_launcher(strategy, options.max_failures)
    environment = strategy.cluster_environment
    assert environment is not None, "Lightning sets the environment before it configures the launcher"
    if environment.creates_processes_externally or strategy.num_processes * strategy.num_nodes == 1:
        return InProcessLauncher()  # one process works in notebooks, and ends without waiting for an observer
    launcher: _Launcher
    if options.launcher == "popen":
        launcher = ScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)
    else:
        launcher = FullStateLauncher(strategy, start_method=options.launcher)
    refuse_in_notebook(launcher)
    return launcher


def _ray_launcher(strategy: ModelParallelStrategy, max_failures: int) -> _Launcher:
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
    return RayLauncher(strategy, max_failures=max_failures)
