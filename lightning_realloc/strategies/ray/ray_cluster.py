"""Start ranks as actors of a Ray cluster, wait for them, and name the rank and the machine that were lost.

The only module besides `ray_ranks` that calls Ray. Everything is imported on use, so that nothing else needs Ray.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from packaging.version import Version

from lightning_realloc.errors import ConfigError, RankLost
from lightning_realloc.strategies.lightning.launchers import STUCK_S
from lightning_realloc.strategies.ray.ray_ranks import (
    CheckpointList,
    RankActor,
    RankFailure,
    RankPlace,
    choose_spread,
    forwarded_variables,
    node_resources,
    rank_environments,
)

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger(__name__)

OLDEST_RAY = Version("2.40")
"""Oldest release of Ray that is accepted."""
NEWEST_RAY = Version("2.60")
"""Newest minor release that was tested; a newer one gets a warning."""
PLACEMENT_TIMEOUT_S = 120.0
"""Seconds to wait for machines with free processors and GPUs. More: slow autoscalers work, and mistakes show later."""
CONNECT_TIMEOUT_S = 10.0
"""Seconds to wait for the answer of the cluster at ``RAY_ADDRESS``."""
REPLAN_S = 10.0
"""Seconds after which a waiting placement is chosen anew, since machines may have been lost or added."""
POLL_S = 0.2
"""Seconds between two looks at answers and at signals."""


# ---- the cluster
def ray_version() -> str | None:
    """Return the version of the installed Ray; None without one."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def check_ray() -> None:
    """Check that Ray is installed, in a version that works. Do not import it.

    Raises:
        ConfigError: without Ray, and for a version before `OLDEST_RAY`.
    """
    text = ray_version()
    if text is None:
        raise ConfigError("launcher='ray' needs Ray, which is not installed: pip install 'lightning-realloc[ray]'")
    installed = Version(text)
    if installed < OLDEST_RAY:
        raise ConfigError(
            f"launcher='ray' needs Ray {OLDEST_RAY} or newer, and {installed} is installed: "
            f"pip install 'ray>={OLDEST_RAY}'"
        )
    if (installed.major, installed.minor) > (NEWEST_RAY.major, NEWEST_RAY.minor):
        rank_zero_warn(f"Ray {installed} is newer than {NEWEST_RAY}, the newest version that was tested")


def connect(num_ranks: int) -> None:
    """Connect to the cluster of ``RAY_ADDRESS`` or of this machine, unless connected; else start Ray on this machine.

    Args:
        num_ranks: Processors to offer at least, where Ray is started here: on a CPU, a rank is one process.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    refuse_unreachable(address)
    try:
        ray.init(address=address)
    except ConnectionError:  # no cluster on this machine
        ray.init(address="local", num_cpus=max(num_ranks, os.cpu_count() or 1), include_dashboard=False)


def refuse_unreachable(address: str) -> None:
    """Raise ConfigError for the address of a cluster that does not answer, for which Ray would wait for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    try:
        if "/" in host or not port.isdecimal():  # also ray://, a client without shared memory and placement groups
            raise OSError("it is not host:port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS={address!r} cannot be reached ({error}); start the cluster, correct the address, or unset "
            f"RAY_ADDRESS to run on this machine"
        ) from None


def machines() -> list[dict[str, float]]:
    """Return the total resources of every machine of the cluster that is alive."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """The plan's nodes, to be mapped to machines."""

    num_nodes: int
    """Nodes of the plan."""
    per_node: int
    """Ranks on each of them."""
    uses_gpus: bool
    """Whether each rank needs a GPU."""

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.num_nodes * self.per_node

    @property
    def needed(self) -> dict[str, float]:
        """Resources of one node."""
        return node_resources(self.per_node, uses_gpus=self.uses_gpus)

    def __str__(self) -> str:
        needed = ", ".join(f"{amount:g} {name}" for name, amount in self.needed.items())
        return f"{self.num_nodes} x ({needed})"


# ---- the ranks
class RankGroup:
    """Ranks of one attempt: actors in a placement group with one bundle for each of the plan's nodes.

    Args:
        placement: Nodes and ranks.
        signals: Signals to forward to all ranks, as they come.
    """

    def __init__(self, placement: RayPlacement, signals: SimpleQueue[int]) -> None:
        self._placement = placement
        self._signals = signals
        self._received = 0
        self._group: Any = None
        self._actors: list[Any] = []
        self._places: list[RankPlace] = []

    def __enter__(self) -> RankGroup:
        try:
            self._group = self._place()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray.util import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)

    def run(self, work: bytes, saved: CheckpointList | None) -> object:
        """Run pickled work on every rank, and return the result of rank 0; see `RankActor.run`.

        Raises:
            SIGTERMException: if a signal ended the ranks.
            RankLost: if the process or the machine of a rank ended.
            BaseException: another error of a rank.
        """
        import ray

        shared, folder = ray.put(work), os.getcwd()
        environments = rank_environments(self._places, self._placement.per_node)
        pairs = zip(self._actors, environments, strict=True)
        results = self._wait([actor.run.remote(environment, folder, shared, saved) for actor, environment in pairs])
        return results[0]

    def _place(self) -> Any:
        """Return a placement group whose resources are reserved."""
        give_up_at = time.monotonic() + PLACEMENT_TIMEOUT_S
        is_reported = False
        while time.monotonic() < give_up_at:
            found = machines()
            spread = choose_spread(self._placement.needed, self._placement.num_nodes, found)
            if spread is not None and (group := self._reserved(spread)) is not None:
                if spread == "PACK":
                    rank_zero_warn(
                        f"Ray has fewer machines than the plan's {self._placement.num_nodes} nodes: ranks of several "
                        f"nodes share one"
                    )
                return group
            if not is_reported:
                log.warning("waiting for %s; %s", self._placement, _describe(found))
                is_reported = True
            self._pause(1.0)
        raise ConfigError(
            f"Ray did not provide {self._placement} within {PLACEMENT_TIMEOUT_S:g} s; {_describe(machines())}; add "
            f"machines, end other jobs, or lower devices or num_nodes"
        )

    def _reserved(self, spread: str) -> Any:
        from ray.util import placement_group, remove_placement_group

        group = placement_group([self._placement.needed] * self._placement.num_nodes, strategy=spread)
        replan_at = time.monotonic() + REPLAN_S
        while time.monotonic() < replan_at:
            if group.wait(1):
                return group
            self._end_if_stopped()
        remove_placement_group(group)
        return None

    def _start(self) -> None:
        """Start the actors, and learn where they run."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = ray.remote(RankActor)
        for rank in range(self._placement.num_ranks):
            bundle = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // self._placement.per_node
            )
            options = {
                "num_cpus": 1,
                "num_gpus": int(self._placement.uses_gpus),
                "max_restarts": 0,
                "scheduling_strategy": bundle,
                "runtime_env": {"env_vars": forwarded_variables(os.environ)},
            }
            self._actors.append(remote.options(**options).remote(rank))
        self._places = self._wait([actor.describe.remote() for actor in self._actors])
        nodes = ", ".join(dict.fromkeys(place.address for place in self._places))
        log.info("Ray: %d ranks on %s", self._placement.num_ranks, nodes)

    # ---- waiting
    def _wait(self, references: Sequence[ObjectRef[Any]]) -> list[Any]:
        """Return the answers of all ranks. After a failure, others get `STUCK_S` to end by themselves."""
        import ray

        waiting = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        give_up_at = math.inf
        while waiting and time.monotonic() < give_up_at:
            self._forward_signals()
            done, _ = ray.wait(list(waiting), timeout=POLL_S)
            for reference in done:
                rank = waiting.pop(reference)
                result = self._answer(rank, reference)
                if not isinstance(result, RankFailure):
                    results[rank] = result
                    continue
                failures[rank] = result
                give_up_at = min(give_up_at, time.monotonic() + STUCK_S)
                ray.kill(self._actors[rank])  # peers that wait for it lose the connection, and end as well
        if failures:
            raise self._error(failures, silent=sorted(waiting.values()))
        return [results[rank] for rank in range(len(results))]

    def _answer(self, rank: int, reference: ObjectRef[Any]) -> Any:
        """Return a rank's result or its failure; a lost process is a failure with a `RankLost`."""
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            reason = " ".join(line for line in str(error).splitlines() if line[:1] not in ("\t", ""))
            lost = RankLost(f"{self._name(rank)} was lost: {reason[:400]}")
            return RankFailure(lost, trace=str(error), is_lost=True)

    def _error(self, failures: Mapping[int, RankFailure], *, silent: Sequence[int]) -> BaseException:
        """Return the error to raise: the cause rather than its consequences on other ranks."""
        lost = [each.error for each in failures.values() if each.is_lost]
        stops = [each for each in failures.values() if each.is_stop]
        if self._received and (stops or lost):
            codes = [each.exit_code for each in stops if each.exit_code]
            return SIGTERMException(codes[0] if codes else 128 + self._received)
        if lost:
            return lost[0]
        for rank, failure in failures.items():
            if not failure.is_consequence:
                failure.error.add_note(f"raised on {self._name(rank)}:\n{failure.trace}")
                return failure.error
        if silent:
            names = ", ".join(map(self._name, silent))
            return RankLost(f"{names} did not answer within {STUCK_S:g} s after others had lost the connection")
        rank, failure = next(iter(failures.items()))
        return RankLost(f"{self._name(rank)} lost the connection to another rank: {failure.error}")

    def _name(self, rank: int) -> str:
        node = rank // self._placement.per_node
        where = f" ({self._places[rank].address})" if self._places else ""
        return f"rank {rank} on node {node}{where}"

    # ---- signals
    def _forward_signals(self) -> None:
        """Send the signals that came to every rank's process, by a task on its machine."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        while (signum := self._next_signal()) is not None:
            if not self._places:
                raise SIGTERMException(128 + signum)
            remote = ray.remote(num_cpus=0, max_retries=0)(_signal_sender())
            for place in self._places:
                here = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
                remote.options(scheduling_strategy=here).remote(place.pid, signum)

    def _next_signal(self) -> int | None:
        try:
            self._received = self._signals.get_nowait()
        except Empty:
            return None
        return self._received

    def _end_if_stopped(self) -> None:
        if self._next_signal() is not None:
            raise SIGTERMException(128 + self._received)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self._end_if_stopped()


def _signal_sender() -> Any:
    """Return the task that sends a signal. A nested function travels by value: its process need not import torch."""

    def send_signal(pid: int, signum: int) -> None:
        import os

        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return

    return send_signal


def _describe(found: Sequence[Mapping[str, float]]) -> str:
    each = ", ".join(f"{one.get('CPU', 0.0):g} CPU and {one.get('GPU', 0.0):g} GPU" for one in found)
    return f"Ray has {len(found)} machine{'s' if len(found) != 1 else ''}: {each}"
