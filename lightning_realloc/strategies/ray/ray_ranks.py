"""Run one rank in a Ray actor: its environment, its signals, and its answer.

`rank_environments` and `choose_spread` are pure. Ray itself is imported only by actors, which cannot exist without it.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.rewards.texts import SECRET_SUFFIXES
from lightning_realloc.runtime.messages.failure_store import is_broken_connection
from lightning_realloc.strategies.lightning.signals import INTERRUPT_EXIT_CODE, STOP_SIGNALS

if TYPE_CHECKING:
    from ray import ObjectRef

FORWARDED_PREFIXES = (
    *("CUBLAS_", "CUDA_LAUNCH", "GLOO_", "HF_", "LIGHTNING_REALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_"),
    *("PL_", "PYTORCH_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_"),
)
"""Beginnings of the environment variables that ranks take over from the process that called the Trainer."""
Spread = Literal["STRICT_SPREAD", "PACK"]
"""Ray's placement of the plan's nodes: each on a machine of its own, or on as few machines as possible."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Process of a rank, and what it offers to the others."""

    node_id: str
    """Ray's id of the machine."""
    address: str
    """IP address of the machine."""
    pid: int
    """Process id on that machine."""
    port: int
    """A free port of the machine, for the store of ``torch.distributed``."""
    gpu_ids: tuple[str, ...] = ()
    """GPUs that Ray gave to this process, as in ``CUDA_VISIBLE_DEVICES``."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Error that ended a rank."""

    error: BaseException
    """The error itself; a RuntimeError with its text if it cannot be pickled."""
    trace: str
    """Formatted traceback of the rank."""
    exit_code: int | None = None
    """Exit code of a rank that ended by `SystemExit` or a signal; None after another error."""
    is_lost: bool = False
    """Whether the process or its machine ended without an answer."""

    @property
    def is_consequence(self) -> bool:
        """Whether the error only says that another rank has ended."""
        return is_broken_connection(self.error)

    @property
    def is_stop(self) -> bool:
        """Whether a signal ended the rank, and no error."""
        return isinstance(self.error, SIGTERMException) or (self.exit_code or 0) > 128


def describe_failure(error: BaseException) -> RankFailure:
    """Return an error as data that can be sent to another process."""
    from ray import cloudpickle  # also takes classes of a script, by value

    trace = "".join(traceback.format_exception(error))
    code = None
    if isinstance(error, KeyboardInterrupt):
        code = INTERRUPT_EXIT_CODE
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # whatever a class of the user does in __reduce__ and __init__
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return RankFailure(error, trace, code)


# ---- placement and environment
def node_resources(per_node: int, *, uses_gpus: bool) -> dict[str, float]:
    """Return the resources of one of the plan's nodes: a processor, and perhaps a GPU, for every rank."""
    return {"CPU": float(per_node), **({"GPU": float(per_node)} if uses_gpus else {})}


def choose_spread(
    needed: Mapping[str, float], num_nodes: int, machines: Sequence[Mapping[str, float]]
) -> Spread | None:
    """Return the placement of the plan's nodes; None if the machines cannot hold them, even when idle.

    Args:
        needed: Resources of one of the plan's nodes.
        num_nodes: Number of the plan's nodes.
        machines: Total resources of every machine.
    """
    fitting = [int(min(each.get(name, 0.0) // amount for name, amount in needed.items())) for each in machines]
    if sum(count > 0 for count in fitting) >= num_nodes:
        return "STRICT_SPREAD"
    return "PACK" if sum(fitting) >= num_nodes else None


def rank_environments(places: Sequence[RankPlace], per_node: int) -> list[dict[str, str]]:
    """Return the environment variables of every rank, as torchrun would set them.

    Ranks of one of the plan's nodes see each other's GPUs, in the order of their ranks: the local rank is the index.

    Args:
        places: Processes, by rank.
        per_node: Ranks on each of the plan's nodes.
    """
    shared = {
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(places[0].port),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(per_node),
    }
    environments = []
    for rank in range(len(places)):
        node, local = divmod(rank, per_node)
        gpus = [each for place in places[node * per_node : (node + 1) * per_node] for each in place.gpu_ids]
        own = {"RANK": str(rank), "NODE_RANK": str(node), "LOCAL_RANK": str(local)}
        environments.append({**shared, **own, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})})
    return environments


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks take over from the process that called the Trainer.

    Secrets stay behind: Ray shows the variables of an actor to everyone who can reach the cluster.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED_PREFIXES) and not name.endswith(SECRET_SUFFIXES)
    }


# ---- in the actor
class RemoteMethod(Protocol):
    """Method of an actor."""

    def remote(self, *args: object) -> ObjectRef[Any]:
        """Call it, and return a reference to its result."""


class CheckpointList(Protocol):
    """Handle of the actor that keeps the paths of saved checkpoints."""

    add: RemoteMethod
    """Append a path."""
    read: RemoteMethod
    """Return all paths."""


class RankActor:
    """Ray actor whose process is one rank. It serves one run, and then ends."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # Ray puts it before every line that the process prints
        return f"rank {self._rank}"

    def describe(self) -> RankPlace:
        """Return machine, process id and GPUs of this rank."""
        import ray

        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        gpus = tuple(str(each) for each in context.get_accelerator_ids().get("GPU", ()))
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), port, gpus)

    def run(self, environment: Mapping[str, str], folder: str, work: bytes, saved: CheckpointList | None) -> object:
        """Run the pickled work in this process, and return its result or a `RankFailure`.

        Args:
            environment: Variables of this rank.
            folder: Working directory of the process that called the Trainer; ignored on machines without it.
            work: Pickled function of one argument, ``on_checkpoint``.
            saved: Actor with the list of saved checkpoints; None if nobody needs it.
        """
        import ray

        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)
        report: Callable[[str], object] | None = None
        if saved is not None:
            report = lambda path: ray.get(saved.add.remote(path))  # noqa: E731
        try:
            _restore_signals()
            return ray.cloudpickle.loads(work)(report)
        except BaseException as error:
            return describe_failure(error)


def _restore_signals() -> None:
    """Give this process the signal handlers of a script. Ray's end it at once, and Ray blocks SIGINT."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
