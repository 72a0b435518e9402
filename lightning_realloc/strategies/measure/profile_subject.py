"""Describe a model to profile block by block, and the rank that profiles it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.tuning.estimate.pass_samples import Size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model whose passes are measured."""

    key: str
    """Name of its shape in the profile table."""
    num_blocks: int
    """Blocks of the real model."""
    num_outside: int
    """Elements of the real model's parameters outside of blocks."""
    build: Callable[[int], nn.Module]
    """Number of blocks -> a model with full weights on the device, the same on every rank."""
    forward: Callable[[nn.Module, PackedBatch], Tensor]
    """A call's forward pass over a pack: one number per token or per sequence."""
    is_trained: bool
    """Whether to measure training passes and optimizer steps."""
    new_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """Parameters -> the role's optimizer."""
    decode: Callable[[nn.Module, dist.ProcessGroup | None, Size, int], Sequence[float]] | None = None
    """(model, group in lockstep, sequences and context, number of steps) -> seconds of each decoding step. None if
    the model does not generate."""
    tp_plan: Mapping[str, str] | None = None
    """Tensor-parallel styles by module pattern; None uses the model's own."""
    compile: str | None = None
    """Backend of ``torch.compile`` for its blocks in training calls; None does not compile."""
    bare: Subject | None = None
    """Model of the same blocks with a head of one score, to measure blocks with. None if this is one or none exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This rank, its devices and precision."""

    meshes: MeshRegistry
    """Process groups by layout."""
    device: torch.device
    """This rank's device."""
    rank: int
    """This rank."""
    world_size: int
    """Number of ranks."""
    cluster: ClusterSpec
    """Nodes, devices and memory."""
    copy_dtype: torch.dtype
    """Dtype of weights that are not trained."""
    mixed_precision: MixedPrecisionPolicy | None
    """Policy of trained models that FSDP wraps; None computes in the weights' dtype."""
    forward_context: Callable[[bool], AbstractContextManager[object]]
    """Whether FSDP wraps the model -> context of a training forward pass."""
    clock: Callable[[], float] = time.perf_counter
    """Current time in seconds."""
