"""Run one rank in a Ray actor: its environment, its signals, and its answer.

`rank_environments` is pure. Ray itself is imported only by actors, which cannot exist without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.rewards.texts import SECRET_SUFFIXES
from lightning_realloc.runtime.messages.failure_store import is_broken_connection
from lightning_realloc.strategies.lightning.process_group import LOOPBACK, listen_at
from lightning_realloc.strategies.lightning.signals import INTERRUPT_EXIT_CODE, STOP_SIGNALS

if TYPE_CHECKING:
    from ray import ObjectRef

FORWARDED_PREFIXES = (
    *("CUBLAS_", "CUDA_LAUNCH", "GLOO_", "HF_", "LIGHTNING_REALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_"),
    *("PL_", "PYTORCH_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "VLLM_"),
)
"""Beginnings of the environment variables that ranks take over from the process that called the Trainer."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Process of a rank, and what it offers to the others."""

    node_id: str
    """Ray's id of the machine."""
    address: str
    """IP address of the machine."""
    pid: int
    """Process id on that machine."""
    port: int = 0
    """Port at which rank 0 listens, for the store of ``torch.distributed``; 0 on other ranks."""
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


# ---- environment
def rank_environments(
    places: Sequence[RankPlace], per_node: int, *, isolate_gpus: bool = False
) -> list[dict[str, str]]:
    """Return the environment variables of every rank, as torchrun would set them.

    Ranks of one of the plan's nodes see each other's GPUs, in the order of their ranks: the local rank is the index.
    All ranks of a single node meet at loopback, where rank 0 then listens.

    Args:
        places: Processes, by rank.
        per_node: Ranks on each of the plan's nodes.
        isolate_gpus: Show each rank its own GPU alone.
    """
    shared = {
        "MASTER_ADDR": places[0].address if len(places) > per_node else LOOPBACK,
        "MASTER_PORT": str(places[0].port),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(per_node),
    }
    environments = []
    for rank in range(len(places)):
        node, local = divmod(rank, per_node)
        visible = places[rank : rank + 1] if isolate_gpus else places[node * per_node : (node + 1) * per_node]
        gpus = [each for place in visible for each in place.gpu_ids]
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


@dataclass(frozen=True, slots=True)
class RankContext:
    """What the process of a rank has for its work."""

    on_checkpoint: Callable[[str], object] | None
    """Called with the path of each saved checkpoint; None if nobody needs it."""
    listener: socket.socket | None
    """Socket for the store of ``torch.distributed``, which listens since its port was chosen; None but on rank 0."""


class RankActor:
    """Ray actor whose process is one rank. It serves one run, and then ends.

    Args:
        rank: Number of the rank. Rank 0 listens for the others, so that nobody else takes its port.
        is_alone: Whether all ranks are on its node, so that it listens on loopback.
    """

    def __init__(self, rank: int, is_alone: bool) -> None:
        import ray

        self._rank = rank
        self._address: str = ray.util.get_node_ip_address()
        self._listener = None
        if rank == 0:
            self._listener = listen_at_first((LOOPBACK,) if is_alone else (self._address, ""))

    def __repr__(self) -> str:  # Ray puts it before every line that the process prints
        return f"rank {self._rank}"

    def describe(self) -> RankPlace:
        """Return machine, process id and GPUs of this rank."""
        import ray

        context = ray.get_runtime_context()
        port = 0 if self._listener is None else self._listener.getsockname()[1]
        gpus = tuple(str(each) for each in context.get_accelerator_ids().get("GPU", ()))
        return RankPlace(context.get_node_id(), self._address, os.getpid(), port, gpus)

    def run(self, environment: Mapping[str, str], folder: str, work: bytes, saved: CheckpointList | None) -> object:
        """Run the pickled work in this process, and return its result or a `RankFailure`.

        Args:
            environment: Variables of this rank.
            folder: Working directory of the process that called the Trainer; ignored on machines without it.
            work: Pickled function of one argument, a `RankContext`.
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
            return ray.cloudpickle.loads(work)(RankContext(report, self._listener))
        except BaseException as error:
            return describe_failure(error)


def listen_at_first(addresses: Sequence[str]) -> socket.socket:
    """Return a socket that listens on a free port at the first address that belongs to this machine."""
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):  # such as the outer address of a container
            return listen_at(address)
    return listen_at(addresses[-1])


def _restore_signals() -> None:
    """Give this process the signal handlers of a script. Ray's end it at once, and Ray blocks SIGINT."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
