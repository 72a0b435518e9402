"""Reserve machines of a Ray cluster for the plan's nodes: ask for them until they are there, and log what is missing.

A placement group stays pending while machines lack, so that an autoscaler sees the demand. `bundles` chooses
what to ask for.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.ray.bundles import (
    PlacementRequest,
    RayMachine,
    RayPlacement,
    WaitLimits,
    choose_request,
    choose_spread,
    describe_machines,
)
from lightning_realloc.strategies.ray.ray_cluster import machines, ray_version

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)

REVIEW_S = 1.0
"""Seconds after which a request is reviewed, since machines may have been lost or added."""
FIRST_REPORT_S = 3.0
"""Seconds before the first log line about missing machines; ended ranks hold theirs for a moment."""
REPORT_S = 300.0
"""Seconds between two log lines about missing machines, unless machines change."""


class MachinesMissing(ConfigError):
    """The cluster did not provide machines in time."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Placement group whose resources are reserved."""

    group: PlacementGroup
    """Ray's handle."""
    placement: RayPlacement
    """Nodes of the plan that it holds."""
    node_ids: tuple[str, ...]
    """Ray's ids of the machines of these nodes."""

    def has_lost_machine(self) -> bool:
        """Return whether Ray has lost one of the machines; their ids change where it has found others."""
        return _node_ids(self.group) != self.node_ids

    def give_back(self) -> None:
        """Free the resources."""
        from ray.util import remove_placement_group

        remove_placement_group(self.group)


def reserve(placement: RayPlacement, limits: WaitLimits, check_signals: Callable[[], None]) -> Reservation:
    """Wait for machines, and return the reservation: of all nodes, or of fewer if ``min_nodes`` allows it.

    Args:
        placement: Nodes and ranks.
        limits: Seconds to wait.
        check_signals: Called every second; what it raises ends the waiting.

    Raises:
        MachinesMissing: if the machines have not come in time.
        ConfigError: for labels with a Ray that has none.
    """
    from ray.util import remove_placement_group

    began, report_at = time.monotonic(), FIRST_REPORT_S
    reported: str | None = None
    group: PlacementGroup | None = None
    asked: PlacementRequest | None = None
    try:
        while True:
            waited_s, found = time.monotonic() - began, machines()
            request = choose_request(placement, found, waited_s, limits)
            if group is None or asked is None or not asked.serves(request):
                if group is not None:
                    remove_placement_group(group)
                group, asked = _ask(placement.with_nodes(request.num_nodes), request), request
            if group.wait(REVIEW_S):
                placed = placement.with_nodes(asked.num_nodes)
                reservation = Reservation(group, placed, _node_ids(group))
                _warn_of_sharing(placement, reservation)
                return reservation
            check_signals()
            if waited_s >= limits.end_for(asked, placement):
                raise MachinesMissing(
                    f"Ray did not provide {placement} within {waited_s:.3g} s; {describe_machines(placement, found)}; "
                    f"add machines, end other jobs, lower devices or num_nodes, or wait for longer by "
                    f"RayOptions(placement_timeout=...)"
                )
            state = f"{placement}; {_describe_wait(placement, found)}"
            if waited_s >= report_at or (reported is not None and state != reported):
                log.warning("waiting %s for %s", limits, state)
                reported, report_at = state, waited_s + REPORT_S
    except BaseException:
        if group is not None:
            remove_placement_group(group)
        raise


def _describe_wait(placement: RayPlacement, found: Sequence[RayMachine]) -> str:
    """Return the machines of the cluster, and whether other work alone keeps the ranks from them."""
    text = describe_machines(placement, found)
    is_enough = choose_spread(placement, found) is not None
    return f"{text}; they are enough, and other work holds them" if is_enough else text


def _ask(placement: RayPlacement, request: PlacementRequest) -> PlacementGroup:
    """Create a placement group, with one bundle for each node."""
    from ray.util import placement_group

    nodes = range(placement.num_nodes)
    selectors: dict[str, Any] = {}
    if placement.labels:
        if "bundle_label_selector" not in inspect.signature(placement_group).parameters:
            raise ConfigError(
                f"RayOptions(labels=...) needs Ray 2.49 or newer, and {ray_version()} is installed; upgrade Ray, or "
                f"start machines with `ray start --resources` and set RayOptions(resources=...)"
            )
        selectors["bundle_label_selector"] = [dict(placement.labels_of(node)) for node in nodes]
    name = placement.options.name or ""
    return placement_group([placement.needed for _ in nodes], strategy=request.spread, name=name, **selectors)


def _node_ids(group: PlacementGroup) -> tuple[str, ...]:
    """Return the machines of a placement group's bundles; "" for those that have none now."""
    from ray.util import placement_group_table

    table = placement_group_table(group)
    known = table.get("bundles_to_node_id", {})
    is_placed = table.get("state") == "CREATED"
    return tuple(known.get(bundle, "") if is_placed else "" for bundle in range(group.bundle_count))


def _warn_of_sharing(placement: RayPlacement, reservation: Reservation) -> None:
    """Warn if the plan's nodes share machines, or if the run goes on without some of them."""
    count = reservation.placement.num_nodes
    if count < placement.num_nodes:
        rank_zero_warn(
            f"Ray has machines for {count} of the plan's {placement.num_nodes} nodes: this start has "
            f"{reservation.placement.num_ranks} of {placement.num_ranks} ranks (min_nodes="
            f"{placement.options.min_nodes}); the next one asks for all again"
        )
    if len(set(reservation.node_ids)) < count:
        rank_zero_warn(f"Ray has fewer machines than the plan's {count} nodes: ranks of several nodes share one")
