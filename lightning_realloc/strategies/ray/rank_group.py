"""Start ranks as actors of a Ray cluster, wait for them, and name the rank and the machine that were lost."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.errors import ConfigError, RankLost
from lightning_realloc.strategies.lightning.launchers import STUCK_S
from lightning_realloc.strategies.ray.bundles import RayPlacement, WaitLimits, rank_options
from lightning_realloc.strategies.ray.ray_ranks import (
    CheckpointList,
    RankActor,
    RankFailure,
    RankPlace,
    forwarded_variables,
    rank_environments,
)
from lightning_realloc.strategies.ray.reservation import reserve

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two looks at answers and at signals."""


class StartLost(RankLost):
    """A machine was lost before all ranks had started; nothing of the run is lost."""


class RankGroup:
    """Ranks of one attempt: actors in a placement group with one bundle for each of the plan's nodes.

    Args:
        placement: Nodes and ranks.
        signals: Signals to forward to all ranks, as they come.
        limits: Seconds to wait for machines.
        attempt: Number of this start.
    """

    def __init__(
        self, placement: RayPlacement, signals: SimpleQueue[int], limits: WaitLimits | None = None, attempt: int = 0
    ) -> None:
        self._placement = placement
        self._signals = signals
        self._limits = limits or WaitLimits.of(placement.options, is_first=True)
        self._attempt = attempt
        self._received = 0
        self._reservation: Any = None
        self._actors: list[Any] = []
        self._places: list[RankPlace] = []

    def __enter__(self) -> RankGroup:
        self._reservation = reserve(self._placement, self._limits, self._end_if_stopped)
        try:
            self._placement = self._reservation.placement
            self._start(self._attempt)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._reservation.give_back()

    def run(self, work: bytes, saved: CheckpointList | None) -> object:
        """Run pickled work on every rank, and return the result of rank 0; see `RankActor.run`.

        Raises:
            SIGTERMException: if a signal ended the ranks.
            RankLost: if the process or the machine of a rank ended.
            BaseException: another error of a rank.
        """
        import ray

        shared, folder = ray.put(work), os.getcwd()
        isolates = self._placement.options.isolate_gpus
        environments = rank_environments(self._places, self._placement.per_node, isolate_gpus=isolates)
        pairs = zip(self._actors, environments, strict=True)
        results = self._wait([actor.run.remote(environment, folder, shared, saved) for actor, environment in pairs])
        return results[0]

    def _start(self, attempt: int) -> None:
        """Start the actors, and learn where they run.

        Raises:
            StartLost: if a machine was lost before all ranks had started.
            RankLost: if the process of a rank ended for another reason.
            ConfigError: for a name that is taken, and for a runtime environment that cannot be made.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement = self._placement
        variables, remote = forwarded_variables(os.environ), ray.remote(RankActor)
        for rank in range(placement.num_ranks):
            bundle = PlacementGroupSchedulingStrategy(
                self._reservation.group, placement_group_bundle_index=rank // placement.per_node
            )
            options = rank_options(placement, rank, attempt, variables)
            try:
                actor = remote.options(**options, scheduling_strategy=bundle).remote(rank, placement.num_nodes == 1)
            except ValueError as error:
                if "name" not in options:
                    raise
                raise ConfigError(f"RayOptions(name={placement.options.name!r}): {error}; choose another") from error
            self._actors.append(actor)
        try:
            self._places = self._wait([actor.describe.remote() for actor in self._actors], starts=True)
        except RankLost as error:
            if isinstance(error, StartLost) or not self._loses_machine():
                raise
            raise StartLost(str(error)) from error
        nodes = ", ".join(dict.fromkeys(place.address for place in self._places))
        log.info("Ray: %d ranks on %s", placement.num_ranks, nodes)

    def _loses_machine(self) -> bool:
        """Return whether Ray finds within seconds that a machine was lost; processes end before it knows."""
        give_up_at = time.monotonic() + STUCK_S
        while time.monotonic() < give_up_at:
            if self._reservation.has_lost_machine():
                return True
            time.sleep(POLL_S)
        return False

    # ---- waiting
    def _wait(self, references: Sequence[ObjectRef[Any]], *, starts: bool = False) -> list[Any]:
        """Return the answers of all ranks. After a failure, others get `STUCK_S` to end by themselves.

        An actor whose machine is lost before it starts waits for another one; with ``starts``, that is a `StartLost`.
        """
        import ray

        waiting = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        give_up_at = math.inf
        while waiting and time.monotonic() < give_up_at:
            self._forward_signals()
            done, _ = ray.wait(list(waiting), timeout=POLL_S)
            if starts and not done and not failures and self._reservation.has_lost_machine():
                raise StartLost(f"a machine of {', '.join(map(self._name, waiting.values()))} was lost")
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
        except ray.exceptions.RuntimeEnvSetupError as error:
            text = " ".join(str(error).split())
            return RankFailure(ConfigError(f"the runtime environment of {self._name(rank)} cannot be made: {text}"), "")
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
                if failure.trace:
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


def _signal_sender() -> Any:
    """Return the task that sends a signal. A nested function travels by value: its process need not import torch."""

    def send_signal(pid: int, signum: int) -> None:
        import os

        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return

    return send_signal
