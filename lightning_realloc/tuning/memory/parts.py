"""Inputs and result of a memory forecast: storage settings, the workload, and bytes by purpose."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from lightning_realloc.errors import PlanError
from lightning_realloc.limits import DEFAULT_MICRO_BATCH_TOKENS
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

HEADROOM = 0.1
"""Fraction of a device's memory that chosen plans leave free, since forecasts err by up to 9 %. A larger value is
safer, but excludes faster plans."""


def usable_bytes(device_bytes: int, headroom: float = HEADROOM) -> int:
    """Return the bytes of a device that a plan may fill if it is chosen by forecasts.

    Raises:
        PlanError: for a ``headroom`` outside of [0, 1).
    """
    if not 0 <= headroom < 1:
        raise PlanError(f"headroom={headroom:g} is a share of a device's memory; it must lie in [0, 1)")
    return int(device_bytes * (1 - headroom))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """Memory of a separate draft model. Drafting with the first blocks of the target needs no memory of its own."""

    model: RoleMemory
    """The draft model, which every rank holds whole."""
    learns: bool = False
    """Whether it is distilled after every generation, in fp32 with AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMMemory:
    """Memory of a vLLM next to each generating rank, which has weights, keys and values of its own."""

    cache_bytes: int
    """Bytes of keys and values on a rank's device; 0: what ``least_bytes`` leaves besides the weights."""
    least_bytes: int = 0
    """Bytes that vLLM takes of a rank's device in any case."""
    chunk_bytes: int = 0
    """Most bytes of the memory through which weights are handed over; 0: they are read where they are."""
    is_elsewhere: bool = False
    """Whether it is a server, on other devices or on memory that is taken before the run."""
    takes_adapters: bool = False
    """Whether a model's adapters are given alone, after its base was given once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Settings of the generation engine that its memory depends on; the same for all generating calls."""

    max_cache_bytes: int | None = None
    """Bound on the bytes of the KV cache of a rank, a draft model's included; None: every slot has room for the
    longest sequence."""
    has_environment: bool = False
    """Whether samples wait for an environment, and keep their keys and values while others run."""
    moves_samples: bool = False
    """Whether samples arrive from other ranks, so that a bounded cache takes all bytes that it may."""
    frees_cache: bool = True
    """Whether the KV cache is freed after each generation."""
    captures_anew: bool = False
    """Whether each generation captures its decoding steps again, since their CUDA graphs are always freed."""
    captures_collectives: bool = False
    """Whether decoding steps of tensor-parallel layouts are captured as CUDA graphs, too."""
    num_ahead: int = 0
    """Most drafted tokens of a sample that one step verifies."""
    draft: DraftMemory | None = None
    """The draft model; None without a separate one."""
    packs_weights: bool = False
    """Whether linear layers' weights are copied into the order that CPUs multiply fastest."""
    vllm: VLLMMemory | None = None
    """A vLLM that generates, in processes of its own on the same devices; None: the ranks generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Storage of tensors, the same for all roles."""

    master_bytes: int = 4
    """Bytes of a trained weight."""
    copy_bytes: int = 4
    """Bytes of a weight that is frozen or in a replica outside of its home, and of an activation."""
    gathered_bytes: int = 4
    """Bytes of a weight while FSDP has it gathered."""
    optimizer_bytes: int = 8
    """Bytes of optimizer state for a trained weight; AdamW keeps two fp32 numbers."""
    shares_memory: bool = False
    """Whether replicas lie in memory that the ranks of a host share (CPU), with each distinct shard stored once."""
    pushes_weights: bool = False
    """Whether trained weights wait in this memory on their way to ranks that only generate (CPU, `max_staleness`)."""
    frees_copies: bool = False
    """Whether a replica outside of its home is freed when its call ends."""
    builds_on_device: bool = False
    """Whether models that are built whole are in the counted memory, all before the first is divided (CPU)."""
    engine: EngineMemory = EngineMemory()
    """Settings of the generation engine."""

    def home_bytes(self, role: RoleMemory, *, is_trained: bool) -> int:
        """Return the bytes of a weight that a role's home computes with; with adapters, of a weight of the base."""
        whole = not role.frozen_params if is_trained else role.average_of is not None
        return self.master_bytes if whole else self.copy_bytes

    def with_kept_caches(self, keeps: bool = True) -> MemorySettings:
        """Return the settings of a run whose engines keep their caches between generations, if ``keeps``."""
        return replace(self, engine=replace(self.engine, frees_cache=False)) if keeps else self

    def __post_init__(self) -> None:
        for name in ("master_bytes", "copy_bytes", "gathered_bytes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be at least 1, bytes of one element")
        if self.optimizer_bytes < 0:
            raise PlanError(f"optimizer_bytes={self.optimizer_bytes} may not be negative; SGD without momentum has 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Number and lengths of an iteration's sequences."""

    num_sequences: int
    """Sequences of one iteration, over all ranks: prompts times responses per prompt."""
    prompt_tokens: int
    """Tokens of the longest prompt, those of its images included."""
    response_tokens: int
    """Tokens of the longest response."""
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
    """Most tokens of one forward pass if the plan sets no limit."""
    num_minibatches: int = 1
    """Optimizer steps in one pass over the sequences."""
    num_epochs: int = 1
    """Passes of a training call over the sequences."""
    samples_per_prompt: int = 1
    """Responses per prompt, which share its prefill."""
    group_size: int = 1
    """Sequences that stay together in a micro-batch, such as the two of a pair."""
    images: ImagesPerPrompt | None = None
    """Images of each prompt, for the towers of all roles; None without images."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.prompt_tokens + self.response_tokens

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "images" and getattr(self, item.name) < 1:
                raise PlanError(f"{item.name}={getattr(self, item.name)} of a workload must be at least 1")


class MemoryParts(NamedTuple):
    """Bytes of one rank by purpose, at the peak of one phase.

    A named tuple: a search makes hundreds of thousands of them, and a frozen dataclass takes several times as long.
    """

    weights: int = 0
    """Weights of the homes of all roles."""
    optimizer: int = 0
    """Optimizer states."""
    copies: int = 0
    """Replicas in other layouts than the home."""
    gradients: int = 0
    gathered: int = 0
    """Weights that FSDP has gathered, and its buffers."""
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    packed: int = 0
    """Packed copies of linear layers' weights during generation on CPU."""
    vllm: int = 0
    """A vLLM's weights, keys and values, in processes of its own on the same device."""
    drafts: int = 0
    """A separate draft model, with its gradients and optimizer state if it is distilled."""
    staging: int = 0
    """Buffers of reallocations."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)

    def __add__(self, other: tuple[Any, ...]) -> MemoryParts:
        return MemoryParts(*map(operator.add, self, other))

    def by_size(self, count: int | None = 4) -> list[tuple[str, int]]:
        """Return the largest parts as (name with spaces, bytes), largest first; None: all parts."""
        sizes = sorted(zip(self, self._fields, strict=True), reverse=True)
        return [(name.replace("_", " "), size) for size, name in sizes[:count]]


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


MIN_DEVICE_BYTES = 1 << 10
"""Smaller sizes of a device's memory are refused, since they lack a unit."""


def parse_bytes(size: int | str) -> int:
    """Read an amount of memory such as ``"24GiB"``, ``"512MB"`` or a number of bytes.

    Raises:
        PlanError: for any other text, and for less than `MIN_DEVICE_BYTES`.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise PlanError(
            f'{size!r} is no amount of memory; write bytes, or a number and a unit, as in "24GiB" or "24GB"'
        )
    found = int(float(match[1]) * _UNITS[match[2].upper()])
    if found < MIN_DEVICE_BYTES:
        raise PlanError(f'{size!r} is {found:,} bytes, too few for a device; did you mean "{match[1]}GiB"?')
    return found
