"""Bytes of the KV cache, of packed weights and of a draft model in a generating call, by the engine's own arithmetic.

A draft model has keys and values of its own. They lie next to the target's or, in a bounded cache, in the same pages.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from lightning_realloc.layout.dims import Layout, ParallelDims, Share
from lightning_realloc.layout.model import ModelLayout
from lightning_realloc.layout.sharding import local_shard
from lightning_realloc.limits import (
    ABSORBED_PROJECTION,
    BUFFER_SHARE,
    CACHE_MULTIPLE,
    DISTILLATION_TOKENS,
    MIN_PACKED_FLOAT32_WEIGHTS,
    MIN_PACKED_STEPS,
    PAGE_SIZE,
    READING_THE_SAME,
)
from lightning_realloc.tuning.memory.parts import DraftMemory, EngineMemory, MemoryParts
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Size of the KV cache of one generating call on one rank."""

    target: ModelShape
    """Shape of the model that generates."""
    draft: ModelShape | None
    """Shape of a separate draft model, which the rank holds whole; None without one."""
    tp: int
    """Tensor-parallel degree, which divides the heads of ``target``."""
    num_layers: int
    """Layers of ``target`` on the rank: those of its pipeline stage."""
    element_bytes: int
    """Bytes of one element of a key or a value."""
    slots: int
    """Samples that are decoded at a time, and others that keep keys and values while they wait for an environment."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    longest: int
    """Tokens of the longest prompt with its response."""
    max_bytes: int | None = None
    """Bound on the bytes of the cache; None: every slot has room for the longest sequence."""
    num_groups: int = 1
    """Groups of samples of a pipeline, which divide the slots and the bound evenly."""
    fills: bool = False
    """Whether a bounded cache takes all bytes that it may, since samples of other ranks may arrive."""

    @property
    def position_bytes(self) -> int:
        """Bytes of one token in all layers of both models on the rank."""
        drafted = 0 if self.draft is None else self.draft.kv_cache_elements(1)
        own = self.target.kv_cache_elements(self.tp) * self.num_layers // self.target.num_layers
        return (own + drafted) * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in the layer that needs most."""
        layers = [self.target.kv_cache_elements(self.tp) // self.target.num_layers]
        if self.draft is not None:
            layers.append(self.draft.kv_cache_elements(1) // self.draft.num_layers)
        return max(layers) * self.element_bytes

    @property
    def prefill_bytes(self) -> int:
        """Bytes after the prompts have been processed."""
        if self.max_bytes is not None:
            return self.final_bytes  # a bounded cache is allocated at once
        return self.slots * self.position_bytes * self._first_capacity

    @property
    def final_bytes(self) -> int:
        """Bytes when the longest sample finishes."""
        if self.max_bytes is not None:
            pages, buffer = self._bounded(self.max_bytes)
            return PAGE_SIZE * (pages * self.position_bytes + buffer * self.layer_bytes)
        return self.slots * self.position_bytes * self.longest

    @property
    def distilling_bytes(self) -> int:
        """Bytes while a draft model is distilled, which has freed its own keys and values."""
        return self.final_bytes if self.max_bytes is not None else replace(self, draft=None).final_bytes

    @property
    def growth_bytes(self) -> int:
        """Extra bytes while an unbounded cache grows, which it does layer by layer, by at most half at the end."""
        if self.max_bytes is not None or self.longest <= self._first_capacity:
            return 0
        return self.slots * self.layer_bytes * self.longest // 2

    @property
    def _first_capacity(self) -> int:
        return min(self.longest, -(-self.prompt_tokens // CACHE_MULTIPLE) * CACHE_MULTIPLE)

    @property
    def positions(self) -> int | None:
        """Tokens that there are pages for; None if every slot has room for the longest sample.

        Where pages run out, a sample is preempted and later prefilled again, up to this many tokens in one step.
        """
        if self.max_bytes is None:
            return None
        pages, _ = self._bounded(self.max_bytes)
        return None if pages >= self.slots * self._pages_of_longest else pages * PAGE_SIZE

    @property
    def _pages_of_longest(self) -> int:
        return -(-self.longest // PAGE_SIZE)

    def _bounded(self, most: int) -> tuple[int, int]:
        """Return the number of pages, and of one layer's pages in the buffers; no more than useful unless ``fills``.

        A bound that is too small for one sample, which the engine refuses, counts as one that suffices.
        """
        most, slots = most // self.num_groups, -(-self.slots // self.num_groups)
        page, buffered = PAGE_SIZE * self.position_bytes, PAGE_SIZE * self.layer_bytes
        each = max(1, most // (page + buffered)) if self.fills else self._pages_of_longest
        left = max(each, (most - each * page) // buffered)
        buffer = min(max(most // BUFFER_SHARE // buffered, each), left, slots * each)
        pages = max(each, min((most - buffer * buffered) // page, slots * each))
        return self.num_groups * pages, self.num_groups * buffer


def num_cache_slots(engine: EngineMemory, *, running: int, share: int) -> int:
    """Return the most samples that hold keys and values.

    Args:
        running: Samples that are decoded at a time.
        share: Samples of the rank.
    """
    if not engine.has_environment:
        return running
    return share if engine.max_cache_bytes is not None else min(share, 2 * running)


def packed_bytes(
    role: RoleMemory,
    engine: EngineMemory,
    *,
    tp: int,
    element_bytes: int,
    num_steps: int,
    stage: tuple[int, int] = (0, 1),
) -> int:
    """Return the bytes of packed copies of linear layers, without those whose products are summed over ranks.

    Counts the first of ``tp`` ranks, which holds the most. A weight with two dims counts as a linear layer's, unless it
    comes before the blocks, or decoding absorbs it. A tied head counts. ``stage`` is the rank's pipeline stage, and the
    number of stages.
    """
    if not engine.packs_weights or num_steps < MIN_PACKED_STEPS:
        return 0
    least = MIN_PACKED_FLOAT32_WEIGHTS if element_bytes == _FLOAT32 else 0
    sizes: Counter[str] = Counter()
    index, pp = stage
    absorbs = role.shape is not None and role.shape.cached_latent is not None
    laid_out = ModelLayout(role.model, Layout(ParallelDims(pp=pp), tuple(range(pp))))
    for param in (param for param in role.model.params if pp == 1 or index in laid_out.stages(param.name)):
        is_linear = len(param.shape) == 2 and param.section != "input"
        is_linear &= not (absorbs and ABSORBED_PROJECTION in param.name.split("."))
        cuts = tuple(cut for cut in param.cuts if not cut.is_gathered)
        if is_linear and (tp == 1 or all(cut.dim == 0 for cut in cuts)):
            shard = local_shard(param.shape, cuts, (Share(tp, 0),) * len(cuts))
            sizes[_shared_product(param.name)] += math.prod(shard.shape)
    return sum(size for size in sizes.values() if size >= least) * element_bytes


def _shared_product(name: str) -> str:
    """Return the same name for all weights that are packed together."""
    for siblings in READING_THE_SAME:
        for sibling in siblings:
            name = name.replace(f".{sibling}.", f".{siblings[0]}.")
    return name


def draft_bytes(draft: DraftMemory | None, *, element_bytes: int) -> int:
    """Return the bytes of a draft model on a rank between generations.

    Args:
        element_bytes: Bytes of a weight of the target, which a draft model that does not learn has too.
    """
    if draft is None:
        return 0
    weights = draft.model.model.num_elements
    return weights * (3 * _FLOAT32 if draft.learns else element_bytes)  # AdamW keeps two numbers for each weight


def distillation_memory(draft: DraftMemory | None, *, samples: int, longest: int) -> MemoryParts:
    """Return the bytes that distilling a draft model adds after a generation: gradients and a batch's activations.

    Args:
        samples: Number of samples that it is distilled on.
        longest: Tokens of the longest sample with its prompt.
    """
    if draft is None or not draft.learns:
        return MemoryParts()
    shape, gradients = draft.model.shape, draft.model.model.num_elements * _FLOAT32
    if shape is None:
        return MemoryParts(drafts=gradients)
    tokens = max(longest, min(DISTILLATION_TOKENS, samples * longest))
    kept = shape.num_layers * shape.saved_bytes(1, _FLOAT32)
    # Logits, those of the responses, their logprobs and the gradient of these; later, gradients of one block.
    logits, backward = 4 * _FLOAT32 * shape.num_outputs, shape.backward_elements(1) * _FLOAT32
    if logits < backward:
        return MemoryParts(drafts=gradients, activations=tokens * (kept + backward))
    return MemoryParts(drafts=gradients, activations=tokens * kept, logits=tokens * logits)
