"""What memory is worked out from, and what comes out: a role, how tensors are kept, the workload, bytes by purpose."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.layout.sharding import local_shard
from lightning_realloc.tuning.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """What the memory of one role depends on, besides the plan."""

    model: ModelSpec
    shape: ModelShape | None = None
    """None: unknown, as of a module without a config; activations and caches are then left out."""
    frozen_params: frozenset[str] = frozenset()
    """Parameters without gradients in a role that is trained, as under adapters."""
    follows: str | None = None
    """The trained role whose weights this one's move towards; it keeps them as exactly as a trained one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """How tensors are kept, the same for all roles."""

    master_bytes: int = 4
    """Of one weight that is trained."""
    copy_bytes: int = 4
    """Of one weight of frozen roles and of copies in other layouts, and of one activation."""
    gathered_bytes: int = 4
    """Of one weight while FSDP has it gathered."""
    optimizer_bytes: int = 8
    """Optimizer state of one weight; AdamW keeps two fp32 numbers."""
    shares_memory: bool = False
    """Whether copies lie in memory that all ranks of the host share (CPU), each distinct shard once."""
    frees_copies: bool = False
    """Whether a copy is freed when its call ends."""
    builds_on_device: bool = False
    """Whether models are built in the memory that is counted, all roles before the first is laid out (CPU)."""

    def home_bytes(self, role: RoleMemory, *, is_trained: bool) -> int:
        """Bytes of one weight of a role's home replica; a follower keeps it as exactly as a trained role."""
        return self.master_bytes if is_trained or role.follows is not None else self.copy_bytes

    def __post_init__(self) -> None:
        for name in ("master_bytes", "copy_bytes", "gathered_bytes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be at least 1, bytes of one element")
        if self.optimizer_bytes < 0:
            raise PlanError(f"optimizer_bytes={self.optimizer_bytes} may not be negative; SGD without momentum has 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How long an iteration's sequences are."""

    num_sequences: int
    """Sequences of one iteration, over all ranks: prompts times responses per prompt."""
    prompt_tokens: int
    """The longest prompt."""
    response_tokens: int
    """The longest response."""
    micro_batch_tokens: int = 8192
    """Most tokens of one forward pass where the plan sets none."""
    num_minibatches: int = 1
    """Optimizer steps over the sequences."""
    samples_per_prompt: int = 1
    """Responses per prompt, which share its prefill."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise PlanError(f"{item.name}={getattr(self, item.name)} of a workload must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank at the moment when one phase needs most."""

    weights: int = 0
    """Home replicas, of all roles."""
    optimizer: int = 0
    copies: int = 0
    """Replicas in other layouts."""
    gradients: int = 0
    gathered: int = 0
    """Weights that FSDP has gathered, and its buffers."""
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    staging: int = 0
    """Of reallocations."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, item.name) for item in fields(self))

    def __add__(self, other: MemoryParts) -> MemoryParts:
        return MemoryParts(**{i.name: getattr(self, i.name) + getattr(other, i.name) for i in fields(self)})

    @property
    def largest(self) -> str:
        """The name of the part that takes most."""
        return max((item.name for item in fields(self)), key=lambda name: getattr(self, name))


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(size: int | str) -> int:
    """Read ``"24GiB"``, ``"512MB"`` or a number of bytes. Raises PlanError for anything else, and for nothing."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise PlanError(
            f'{size!r} is no amount of memory; write bytes, or a number and a unit, as in "24GiB" or "24GB"'
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


class RoleBytes:
    """Elements of one role's tensors on one rank under one layout.

    ``whole`` sizes are those after tensor parallelism and pipeline stages alone: what FSDP gathers, and what gradients
    are of before they are reduced. Sharded ones are padded to equal length, as FSDP keeps them.

    Raises:
        LayoutError: for a layout that does not fit the model, and for a rank outside of it.
    """

    def __init__(self, role: RoleMemory, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.num_sharded = self.num_trained_sharded = self.num_trained = 0
        self.root = self.trained_root = 0
        blocks: dict[int, int] = {}
        trained_blocks: dict[int, int] = {}
        at, dims = layout.coordinate(rank), layout.dims
        for name in ModelLayout(role.model, layout).names(rank):
            param = role.model.param(name)
            shape = local_shard(param.shape, param.tp, dims.tp, at.tp, 1, 0).shape
            whole, padded = math.prod(shape), -(-shape[0] // dims.fsdp) * math.prod(shape[1:]) if shape else 1
            trained = name not in role.frozen_params
            self.num_sharded += padded
            self.num_trained_sharded += padded * trained
            self.num_trained += whole * trained
            if param.block is None:
                self.root += whole
                self.trained_root += whole * trained
            else:
                blocks[param.block] = blocks.get(param.block, 0) + whole
                trained_blocks[param.block] = trained_blocks.get(param.block, 0) + whole * trained
        self.num_blocks = len(blocks)
        self.largest_block = max(blocks.values(), default=0)
        self.trained_block = max(trained_blocks.values(), default=0)
