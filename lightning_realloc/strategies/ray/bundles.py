"""Plan the bundles of a placement group: resources and labels of the plan's nodes, and the machines that suit them.

Pure: plan, options and machines are arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations
from typing import Any, Literal

from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import ConfigError, counted
from lightning_realloc.strategies.lightning.ray_options import ALL_RANKS, RayOptions

Spread = Literal["STRICT_SPREAD", "PACK", "SPREAD"]
"""Ray's placement of the plan's nodes: each on a machine of its own; on as few machines as possible; or, while machines
lack, on machines as they come."""
ACCELERATOR_SHARE = 0.001
"""Amount of Ray's resource ``accelerator_type:...`` that a node asks for; a machine has 1."""
PLACEMENT_TIMEOUT_S = 120.0
"""Seconds to wait for machines at the first start. More: slow autoscalers work, and mistakes show later."""
SHRUNK_S = 30.0
"""Seconds that fewer nodes get to be placed, after the time for all nodes."""
Labels = tuple[tuple[str, str], ...]
"""Labels, sorted by name."""


@dataclass(frozen=True, slots=True)
class RayMachine:
    """Machine of a Ray cluster."""

    resources: Mapping[str, float]
    """All that it has, in use or not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's labels, and those of ``ray start --labels``."""


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """The plan's nodes, to be mapped to machines."""

    num_nodes: int
    """Nodes of the plan."""
    per_node: int
    """Ranks on each of them."""
    uses_gpus: bool
    """Whether each rank needs a GPU."""
    options: RayOptions = field(default_factory=RayOptions)
    """Settings of the launcher."""
    labels: tuple[Labels, ...] = ()
    """Labels of each node's machine; () if no node has any."""

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.num_nodes * self.per_node

    @property
    def of_rank(self) -> dict[str, float]:
        """Resources of one rank, without that of the accelerator's type."""
        own = {"CPU": self.options.num_cpus, "GPU": float(self.uses_gpus), "memory": float(self.options.memory_bytes)}
        return {name: amount for name, amount in {**own, **self.options.resources}.items() if amount}

    @property
    def needed(self) -> dict[str, float]:
        """Resources of one node."""
        kind = self.options.accelerator_type
        typed = {} if kind is None else {f"accelerator_type:{kind}": ACCELERATOR_SHARE}
        return {name: amount * self.per_node for name, amount in self.of_rank.items()} | typed

    def labels_of(self, node: int) -> Labels:
        """Return the labels that a node's machine must have."""
        return self.labels[node] if self.labels else ()

    def with_nodes(self, num_nodes: int) -> RayPlacement:
        """Return the placement of the first nodes."""
        return replace(self, num_nodes=num_nodes, labels=self.labels[:num_nodes])

    def __str__(self) -> str:
        needed = ", ".join(_described(self.needed))
        kinds = dict.fromkeys(self.labels_of(node) for node in range(self.num_nodes))
        labels = " or ".join(" and ".join(f"{name}={text}" for name, text in kind) for kind in kinds if kind)
        return f"{self.num_nodes} x ({needed})" + (f" with {labels}" if labels else "")


def _described(resources: Mapping[str, float]) -> list[str]:
    """Return the amounts of resources, as text."""
    return [
        f"{amount / 2**30:.3g} GiB memory" if name == "memory" else name if ":" in name else f"{amount:g} {name}"
        for name, amount in resources.items()
    ]


def rank_options(placement: RayPlacement, rank: int, attempt: int, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a rank's actor.

    Args:
        placement: Nodes and ranks.
        rank: Number of the rank.
        attempt: Number of this start; the name of an actor of the one before may still be taken.
        variables: Environment variables from the calling process; those of the options' ``runtime_env`` win.
    """
    options = placement.options
    environment = {**options.runtime_env, "env_vars": {**variables, **options.runtime_env.get("env_vars", {})}}
    named = {} if options.name is None else {"name": f"{options.name}.{attempt}.rank{rank}"}
    if named and options.namespace is not None:
        named["namespace"] = options.namespace
    return {
        "num_cpus": options.num_cpus,
        "num_gpus": int(placement.uses_gpus),
        "memory": options.memory_bytes or None,
        "resources": dict(options.resources),
        "max_restarts": 0,
        "runtime_env": environment,
        **named,
    }


# ---- machines that suit
def choose_spread(placement: RayPlacement, machines: Sequence[RayMachine]) -> Spread | None:
    """Return the placement of the plan's nodes; None if the machines cannot hold them, even when idle."""
    wanted = Counter(placement.labels_of(node) for node in range(placement.num_nodes))
    held = [(machine.labels, _capacity(placement.needed, machine.resources)) for machine in machines]
    if _can_hold(wanted, [(labels, min(1, count)) for labels, count in held]):
        return "STRICT_SPREAD"
    return "PACK" if _can_hold(wanted, held) else None


def _capacity(needed: Mapping[str, float], offered: Mapping[str, float]) -> int:
    """Return the number of nodes that a machine holds."""
    return int(min(offered.get(name, 0.0) / amount + 1e-9 for name, amount in needed.items()))


def _can_hold(wanted: Counter[Labels], held: Sequence[tuple[Mapping[str, str], int]]) -> bool:
    """Return whether every node finds a place on a machine with its labels: Hall's condition, for kinds of labels."""
    kinds = [kind for kind, count in wanted.items() if count]
    suits = [{kind for kind in kinds if has_labels(dict(kind), labels)} for labels, _ in held]
    for size in range(1, len(kinds) + 1):
        for some in combinations(kinds, size):
            room = sum(count for (_, count), own in zip(held, suits, strict=True) if not own.isdisjoint(some))
            if sum(wanted[kind] for kind in some) > room:
                return False
    return True


def has_labels(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a machine's labels satisfy Ray's selectors: ``"a"``, ``"!a"``, ``"in(a, b)"``, ``"!in(a, b)"``."""
    for name, selector in wanted.items():
        text = selector.removeprefix("!")
        is_list = text.startswith("in(") and text.endswith(")")
        values = [one.strip() for one in text[3:-1].split(",")] if is_list else [text]
        if (labels.get(name) in values) == selector.startswith("!"):
            return False
    return True


# ---- waiting
@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Placement group to ask for now."""

    num_nodes: int
    """Nodes of the plan, or fewer."""
    spread: Spread
    """How they are placed."""

    def serves(self, later: PlacementRequest) -> bool:
        """Return whether this pending request also serves in place of a later one.

        Machines as they come are as good as any, and a request that stays keeps its place.
        """
        return self == later or (self.spread == "SPREAD" and self.num_nodes == later.num_nodes)


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Seconds to wait for machines."""

    all_nodes_s: float
    """Until which all nodes are asked for."""
    end_s: float
    """After which waiting ends."""

    @classmethod
    def of(cls, options: RayOptions, *, is_first: bool) -> WaitLimits:
        """Return the limits of the first start, or of a start after a loss, which by default has no end."""
        given = options.placement_timeout
        end = given if given is not None else PLACEMENT_TIMEOUT_S if is_first else math.inf
        shrinks_after = PLACEMENT_TIMEOUT_S if given is None else given
        return cls(math.inf if options.min_nodes is None else shrinks_after, end)

    def end_for(self, asked: PlacementRequest, placement: RayPlacement) -> float:
        """Return the seconds after which waiting ends; fewer nodes get some more, since they are asked for last."""
        return self.end_s + (SHRUNK_S if asked.num_nodes < placement.num_nodes else 0.0)

    def __str__(self) -> str:
        return "without end" if self.end_s == math.inf else f"for at most {self.end_s:g} s"


def choose_request(
    placement: RayPlacement, machines: Sequence[RayMachine], waited_s: float, limits: WaitLimits
) -> PlacementRequest:
    """Return the placement group to ask for: as many nodes as machines hold once all have been waited for long enough.

    One that does not fit is asked for as well, since autoscalers act on it.
    """
    least = placement.options.min_nodes
    if least is not None and waited_s >= limits.all_nodes_s:
        for count in range(placement.num_nodes, least - 1, -1):
            spread = choose_spread(placement.with_nodes(count), machines)
            if spread is not None:
                return PlacementRequest(count, spread)
    return PlacementRequest(placement.num_nodes, choose_spread(placement, machines) or "SPREAD")


# ---- texts
def describe_machines(placement: RayPlacement, machines: Sequence[RayMachine]) -> str:
    """Return the machines of the cluster by what they offer of the needed resources, and what none of them has."""
    names = list(dict.fromkeys(["CPU", "GPU", *placement.needed]))
    kinds = Counter(tuple((name, machine.resources.get(name, 0.0)) for name in names) for machine in machines)
    each = "; ".join(
        f"{count} with {', '.join(_described({n: a for n, a in kind if a or ':' not in n}))}"
        for kind, count in kinds.items()
    )
    lacking = [*_lacking_resources(placement, machines), *_lacking_labels(placement, machines)]
    return "; ".join([f"Ray has {counted(len(machines), 'machine')}" + (f": {each}" if each else ""), *lacking])


def _lacking_resources(placement: RayPlacement, machines: Sequence[RayMachine]) -> list[str]:
    """Name the resources that no machine has at all, with similar ones that some have."""
    there = {name for machine in machines for name, amount in machine.resources.items() if amount}
    return [
        f"no machine has {name}{_similar(name, there)}"
        for name in placement.needed
        if name not in there and name not in ("CPU", "GPU")
    ]


def _lacking_labels(placement: RayPlacement, machines: Sequence[RayMachine]) -> list[str]:
    """Name the labels that no machine has, with the values that there are or the names that are similar."""
    wanted = {label for node in range(placement.num_nodes) for label in placement.labels_of(node)}
    lacking = []
    for name, text in sorted(wanted):
        if any(has_labels({name: text}, machine.labels) for machine in machines):
            continue
        values = sorted({machine.labels[name] for machine in machines if name in machine.labels})
        names = {one for machine in machines for one in machine.labels}
        known = f" ({name} is {', '.join(values)})" if values else _similar(name, names)
        lacking.append(f"no machine has the label {name}={text}{known}")
    return lacking


def _similar(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


# ---- labels by plan
def labels_by_node(
    labels: Mapping[str, Mapping[str, str]], plan: ExecutionPlan | str, num_nodes: int, per_node: int
) -> tuple[Labels, ...]:
    """Return the labels of each node's machine: those of every call that runs on one of its ranks.

    Args:
        labels: Call, role or ``"*"`` -> labels, see `RayOptions`.
        plan: Execution plan, or the name of a way to make one.
        num_nodes: Nodes of the plan.
        per_node: Ranks on each of them.

    Raises:
        ConfigError: for a name that the plan does not have, for names with a plan that is made later, and for two calls
            that want different machines for the same node.
    """
    if not labels:
        return ()
    ranks = {ALL_RANKS: range(num_nodes * per_node)} | _ranks_by_name(labels, plan)
    nodes: list[dict[str, tuple[str, str]]] = [{} for _ in range(num_nodes)]
    for owner, wanted in labels.items():
        for node in sorted({rank // per_node for rank in ranks[owner] if rank < num_nodes * per_node}):
            for name, text in wanted.items():
                known, other = nodes[node].setdefault(name, (text, owner))
                if known != text:
                    raise ConfigError(
                        f"labels: {other!r} wants a machine with {name}={known} and {owner!r} one with {name}={text}, "
                        f"and both run on node {node} (ranks {node * per_node}-{(node + 1) * per_node - 1}); give "
                        f"them ranks of different nodes in the plan"
                    )
    return tuple(tuple(sorted((name, text) for name, (text, _) in node.items())) for node in nodes)


def _ranks_by_name(labels: Mapping[str, object], plan: ExecutionPlan | str) -> dict[str, Collection[int]]:
    """Return the ranks of every call and role of a plan."""
    named = [name for name in labels if name != ALL_RANKS]
    if not named:
        return {}
    if isinstance(plan, str):
        raise ConfigError(
            f"labels: {', '.join(map(repr, named))} have ranks only in a plan with layouts, and plan={plan!r} is made "
            f"on the ranks; give a plan file (`lightning-realloc plan` writes one), or labels for all: {ALL_RANKS!r}"
        )
    ranks: dict[str, set[int]] = {}
    for call, own in plan.calls:
        for name in (call, call.partition(".")[0]):
            ranks.setdefault(name, set()).update(own.layout.ranks)
    for name in named:
        if name not in ranks:
            near = _similar(name, ranks)
            raise ConfigError(f"labels: the plan has no call or role {name!r}{near}; it has {', '.join(sorted(ranks))}")
    return dict(ranks)
