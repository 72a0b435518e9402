"""Settings of ``launcher="ray"``: resources of ranks, waiting for machines, and the results that come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_realloc.errors import ConfigError
from lightning_realloc.tuning.memory.parts import parse_bytes

ALL_RANKS = "*"
"""Key of ``labels`` that stands for every role."""
RESERVED_RESOURCES = {"CPU": "num_cpus", "GPU": "use_gpus", "memory": "memory"}
"""Names of Ray's own resources -> the settings for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Settings of a run whose ranks are actors of a Ray cluster, as ``ReallocStrategy(launcher=RayOptions(...))``.

    Raises:
        ConfigError: for values out of range, and for resources that have a setting of their own.
        PlanError: for ``memory`` that is no amount.
    """

    num_cpus: float = 1.0
    """Processors of each rank."""
    use_gpus: bool = False
    """Give every rank a GPU although this process may see none, as on a head without GPUs; leave the Trainer's
    ``accelerator`` out. Without it, ranks have GPUs if the Trainer finds some here."""
    memory: int | str | None = None
    """Host memory of each rank that Ray counts, in bytes or as in ``"64GiB"``; None: not counted."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of each rank, by the names of ``ray start --resources``."""
    accelerator_type: str | None = None
    """Type that Ray gives to GPUs, such as ``"H100"``; None: any."""
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Call, role, or ``"*"`` for all -> labels of the machines of its ranks, from Ray 2.49 on. Names of calls and roles
    need a plan with ranks."""
    isolate_gpus: bool = False
    """Show every rank its own GPU alone, as ``cuda:0``, instead of those of all ranks of its node."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the ranks, on top of the job's."""
    name: str | None = None
    """Beginning of the names of the actors and of the placement group; None: they have none."""
    namespace: str | None = None
    """Ray's namespace of named actors; None: that of the job."""
    placement_timeout: float | None = None
    """Seconds to wait for machines. None: 120 at the first start, and without end after a loss. With ``min_nodes``,
    the seconds after which the run goes on with fewer nodes; None: 120."""
    min_nodes: int | None = None
    """Nodes with which the run goes on if there are no machines for all; None: all are needed. It needs a plan that is
    made for any number of ranks, as by ``plan="heuristic"``."""
    return_weights: bool | None = None
    """Send the trained weights to the calling process; None: if they have at most 4 GiB, or no checkpoint holds them.
    Without them, ``fit`` logs the path of the last checkpoint."""

    def __post_init__(self) -> None:
        if not 0 < self.num_cpus < math.inf:
            raise ConfigError(f"num_cpus={self.num_cpus} must be positive: the processors of each rank")
        if self.placement_timeout is not None and not self.placement_timeout > 0:
            raise ConfigError(f"placement_timeout={self.placement_timeout} must be positive seconds")
        if self.min_nodes is not None and self.min_nodes < 1:
            raise ConfigError(f"min_nodes={self.min_nodes} must be at least 1; leave it out to need all nodes")
        if self.memory is not None:
            parse_bytes(self.memory)
        for name, amount in self.resources.items():
            if name in RESERVED_RESOURCES:
                raise ConfigError(f"resources has {name}; set {RESERVED_RESOURCES[name]} instead")
            if not amount > 0:
                raise ConfigError(f"resources: {name}={amount} must be positive, or left out")
        for role, wanted in self.labels.items():
            if not isinstance(wanted, Mapping) or not all(isinstance(text, str) for text in wanted.values()):
                raise ConfigError(
                    f"labels: {role!r} has {wanted!r}; write a mapping of labels, as in {{{role}: {{market: spot}}}}"
                )

    @property
    def memory_bytes(self) -> int:
        """Host memory of each rank; 0 if it is not counted."""
        return 0 if self.memory is None else parse_bytes(self.memory)
