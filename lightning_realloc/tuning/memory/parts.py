"""What memory is worked out from, and what comes out: a role, how tensors are kept, the workload, bytes by purpose."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

from lightning_realloc.errors import PlanError
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

HEADROOM = 0.1
"""Share of a device's memory that chosen plans leave free, since forecasts err by up to 9 %. A larger share is safer,
and excludes faster plans."""


def usable_bytes(device_bytes: int, headroom: float = HEADROOM) -> int:
    """Return the bytes of a device that a plan may fill which is chosen by forecasts.

    Raises:
        PlanError: for a head-room that leaves nothing, or is none.
    """
    if not 0 <= headroom < 1:
        raise PlanError(f"headroom={headroom:g} is a share of a device's memory; it must lie in [0, 1)")
    return int(device_bytes * (1 - headroom))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """A model of its own that drafts for those that generate. First blocks that do keep nothing besides."""

    model: RoleMemory
    """Whole on every rank."""
    learns: bool = False
    """Whether it learns from every generation: in fp32, by AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What the engine keeps while it generates; the same for all generating calls."""

    max_cache_bytes: int | None = None
    """Which keys and values may take on a rank, a draft model's with them; None: room for the longest in every slot."""
    moves_samples: bool = False
    """Whether samples come from other ranks, for which a bounded cache takes all that it may."""
    num_ahead: int = 0
    """Most drafted tokens of a sample that one step verifies."""
    draft: DraftMemory | None = None
    packs_weights: bool = False
    """Whether linear layers' weights are copied into the order that CPUs multiply fastest with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """How tensors are kept, the same for all roles."""

    master_bytes: int = 4
    """Of one weight that is trained."""
    copy_bytes: int = 4
    """Of one weight that is frozen or a copy in another layout, and of one activation."""
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
    engine: EngineMemory = EngineMemory()

    def home_bytes(self, role: RoleMemory, *, is_trained: bool) -> int:
        """Bytes of one weight that a role's home replica computes with; under adapters that is the base's."""
        whole = not role.frozen_params if is_trained else role.follows is not None
        return self.master_bytes if whole else self.copy_bytes

    def weights_bytes(self, role: RoleMemory, num: int, num_trained: int, *, is_trained: bool) -> int:
        """Bytes of so many weights of a role's home replica: only what changes is kept more exactly than in copies.

        A follower keeps its weights as exactly as a trained role.
        """
        exact = num_trained if is_trained else num if role.follows is not None else 0
        return exact * self.master_bytes + (num - exact) * self.copy_bytes

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
    """Optimizer steps in a pass over the sequences."""
    num_epochs: int = 1
    """Passes of a training call over the sequences."""
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
    packed: int = 0
    """Copies of linear layers' weights while a CPU generates."""
    drafts: int = 0
    """A draft model with weights of its own, and what it learns with."""
    staging: int = 0
    """Of reallocations."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(_sizes(self))

    def __add__(self, other: MemoryParts) -> MemoryParts:
        sums = map(operator.add, _sizes(self), _sizes(other))
        return MemoryParts(**dict(zip(_PARTS, sums, strict=True)))

    @property
    def largest(self) -> str:
        """The name of the part that takes most."""
        return max(_PARTS, key=lambda name: getattr(self, name))


# Looked up once: a search adds up hundreds of thousands of these.
_PARTS = tuple(item.name for item in fields(MemoryParts))
_sizes: Callable[[MemoryParts], tuple[int, ...]] = operator.attrgetter(*_PARTS)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


LEAST_DEVICE_BYTES = 1 << 10
"""What nobody means by a device's memory: a unit was forgotten."""


def parse_bytes(size: int | str) -> int:
    """Read ``"24GiB"``, ``"512MB"`` or a number of bytes. Raises PlanError for anything else, and for less
    than any device has."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise PlanError(
            f'{size!r} is no amount of memory; write bytes, or a number and a unit, as in "24GiB" or "24GB"'
        )
    found = int(float(match[1]) * _UNITS[match[2].upper()])
    if found < LEAST_DEVICE_BYTES:
        raise PlanError(f'{size!r} is {found:,} bytes, no device\'s memory; was "{match[1]}GiB" meant?')
    return found
