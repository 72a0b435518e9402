"""Facts about a run's ranks, and settings of a pool of models: dtypes, transport, shared and averaged weights."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_realloc.errors import ConfigError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.runtime.transfer.agreement import TransportName, WeightVerification
from lightning_realloc.runtime.transfer.executor import Reallocation
from lightning_realloc.strategies.pool.precision import copy_dtype_of, master_dtype_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """This rank among those of the run; known once the process group has started."""

    rank: int
    """This process."""
    world_size: int
    """Number of processes."""
    device: torch.device
    """This rank's device."""
    cluster: ClusterSpec
    """Nodes, devices, memory and links."""
    precision: str
    """Precision of the Trainer."""


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """The moving average that a role's weights are."""

    average_of: str
    """The trained role."""
    rate: float
    """Weight of the trained role in one step: 1 minus the decay of the moving average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """Settings that do not depend on a role."""

    facts: RunFacts
    """This rank, the cluster in which senders are chosen, and the precision that dtypes follow from."""
    transport: TransportName
    """How weights travel; ``auto`` probes."""
    verify_weights: WeightVerification
    """Elements that are compared after weights moved."""
    tp_plans: Mapping[str, Mapping[str, str]]
    """Role -> tensor-parallel styles, for models without a plan of their own."""
    averages: Mapping[str, MovingAverage]
    """Role -> the moving average that its weights are."""
    biased: frozenset[str]
    """Roles whose training updates the biases by which tokens choose experts."""
    sharers: Mapping[str, str]
    """Role without weights of its own -> the role whose base it uses, with adapters off."""

    @property
    def copy_dtype(self) -> torch.dtype:
        """Dtype of every replica except home replicas."""
        return copy_dtype_of(self.facts.precision)

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of weights that training changes, in home replicas."""
        return master_dtype_of(self.facts.precision)

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy | None:
        """Policy of FSDP for home replicas; None without mixed precision."""
        mixed = MixedPrecisionPolicy(param_dtype=self.copy_dtype, reduce_dtype=self.master_dtype)
        return mixed if self.copy_dtype != self.master_dtype else None

    def home_dtypes(self, model: nn.Module, unchanged: Set[str] | None) -> dict[str, torch.dtype]:
        """Return the dtype of every parameter of a home replica.

        Weights that nothing changes need no more precision than other replicas. Buffers (rotary frequencies) do.

        Args:
            unchanged: Names of parameters that nothing changes; None: of all.
        """
        names = [name for name, _ in model.named_parameters()]
        kept = set(names) if unchanged is None else unchanged
        return {name: self.copy_dtype if name in kept else self.master_dtype for name in names}

    def reallocation(
        self,
        source: ModelLayout,
        held: Mapping[str, Tensor],
        target: ModelLayout,
        *,
        role: str,
        dtype: torch.dtype | None = None,
        transport: TransportName | None = None,
        target_tensors: dict[str, Tensor] | None = None,
    ) -> Reallocation:
        """Return a reallocation of this rank's tensors ``held``; see `Reallocation`. Collective over all ranks."""
        return Reallocation(
            source,
            held,
            target,
            rank=self.facts.rank,
            world_size=self.facts.world_size,
            dtype=dtype or self.copy_dtype,
            device=self.facts.device,
            cluster=self.facts.cluster,
            transport=transport or self.transport,
            target_tensors=target_tensors,
            verify_weights=self.verify_weights,
            role=role,
        )

    def require_same(self, options: PoolOptions) -> None:
        """Raise ConfigError, naming what differs, unless the models were laid out with these settings."""
        for path in ("facts.world_size", "facts.precision", "transport", "verify_weights", "tp_plans", "sharers"):
            ours, theirs = map(attrgetter(path), (self, options))
            if ours != theirs:
                name = path.rpartition(".")[2]
                raise ConfigError(
                    f"the models were laid out by an earlier Trainer with {name}={ours}, and this one asks for "
                    f"{theirs}; give both the same settings, or build the LightningModule anew"
                )
