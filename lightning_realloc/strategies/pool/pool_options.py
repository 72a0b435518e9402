"""What a pool of models is told about where it runs and how its roles belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_realloc.errors import ConfigError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.transfer.agreement import TransportName


@dataclass(frozen=True, slots=True)
class Following:
    """What a role's weights follow, and how closely."""

    role: str
    """The leader, which is trained."""
    rate: float
    """How much of the way to the leader's weights one step goes: 1 less the decay of a moving average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What does not depend on a role."""

    cluster: ClusterSpec
    """For the choice of senders."""
    device: torch.device
    """Where weights live."""
    rank: int
    """This process."""
    world_size: int
    """All processes."""
    copy_dtype: torch.dtype
    """Of every replica but the home ones."""
    mixed_precision: MixedPrecisionPolicy | None
    """For sharded replicas."""
    transport: TransportName
    """How weights travel; ``auto`` probes."""
    tp_plans: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Role -> tensor-parallel styles, for models that bring none."""
    followers: Mapping[str, Following] = field(default_factory=dict)
    """Role -> what its weights follow."""
    sharers: Mapping[str, str] = field(default_factory=dict)
    """Role without weights of its own -> the role whose base it is, without that one's adapters."""

    def require_same(self, options: PoolOptions) -> None:
        """Refuse to serve other settings than these.

        Raises:
            ConfigError: naming what differs.
        """
        for name in ("world_size", "copy_dtype", "mixed_precision", "transport", "tp_plans", "sharers"):
            ours, theirs = getattr(self, name), getattr(options, name)
            if ours != theirs:
                raise ConfigError(
                    f"the models were laid out by an earlier Trainer with {name}={ours}, and this one asks for "
                    f"{theirs}; give both the same settings, or build the LightningModule anew"
                )
