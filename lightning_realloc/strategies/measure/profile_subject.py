"""What is measured, and where: a model by its blocks, and this rank."""

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
    """Name of its shape in the table."""
    num_blocks: int
    """Of the real model."""
    num_outside: int
    """Elements of the real model outside of blocks."""
    build: Callable[[int], nn.Module]
    """Number of blocks -> a model with full weights on the device, the same on every rank."""
    forward: Callable[[nn.Module, PackedBatch], Tensor]
    """What a call makes of a pack: one number per token or per sequence."""
    is_trained: bool
    new_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    decode: Callable[[nn.Module, dist.ProcessGroup | None, Size, int], Sequence[float]] | None = None
    """(model, group that steps together, sequences and context, number) -> seconds of decoding steps; None: it does
    not decode."""
    tp_plan: Mapping[str, str] | None = None
    compile: str | None = None
    """The backend of ``torch.compile`` that runs its blocks in training calls; None: they run as they are."""
    bare: Subject | None = None
    """The same blocks with next to nothing behind them, to measure blocks with; None for such a one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This rank, and how it computes."""

    meshes: MeshRegistry
    device: torch.device
    rank: int
    world_size: int
    cluster: ClusterSpec
    copy_dtype: torch.dtype
    mixed_precision: MixedPrecisionPolicy | None
    """Of wrapped models that are trained."""
    forward_context: Callable[[bool], AbstractContextManager[object]]
    """Whether FSDP wraps the model -> the context of a training forward pass."""
    clock: Callable[[], float] = time.perf_counter
