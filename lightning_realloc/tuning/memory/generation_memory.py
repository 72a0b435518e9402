"""How many bytes do the cache, packed weights and a draft model add to a generating call? The engine's own arithmetic.

A model that drafts keeps keys and values of its own: beside the others, or, where the cache is bounded, in its pages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from lightning_realloc.limits import (
    BUFFER_SHARE,
    CACHE_MULTIPLE,
    DISTILLATION_TOKENS,
    MIN_PACKED_FLOAT32_WEIGHTS,
    MIN_PACKED_STEPS,
    PACKED_TOGETHER,
    PAGE_SIZE,
)
from lightning_realloc.tuning.memory.parts import DraftMemory, EngineMemory, MemoryParts
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The keys and values of one generating call on one rank."""

    target: ModelShape
    draft: ModelShape | None
    """Of a model that drafts with keys and values of its own, whole on every rank; None without one."""
    tp: int
    """Degree that divides the heads of ``target``."""
    element_bytes: int
    """Of a key or value."""
    slots: int
    """Samples that run at a time."""
    prompt_tokens: int
    longest: int
    """Tokens of the longest prompt with its response."""
    most_bytes: int | None = None
    """A bound on its bytes."""
    fills: bool = False
    """Whether it takes all that it may, whatever its own samples need: others may come."""

    @property
    def position_bytes(self) -> int:
        """Of one position of one sample, in all layers of both models."""
        drafted = 0 if self.draft is None else self.draft.kv_cache_elements(1)
        return (self.target.kv_cache_elements(self.tp) + drafted) * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Of one position in the layer that needs most."""
        layers = [self.target.kv_cache_elements(self.tp) // self.target.num_layers]
        if self.draft is not None:
            layers.append(self.draft.kv_cache_elements(1) // self.draft.num_layers)
        return max(layers) * self.element_bytes

    @property
    def at_first(self) -> int:
        """Bytes when prompts have been read."""
        if self.most_bytes is not None:
            return self.at_last  # taken at once
        return self.slots * self.position_bytes * self._first_capacity

    @property
    def at_last(self) -> int:
        """Bytes when the longest sample ends."""
        if self.most_bytes is not None:
            pages, buffer = self._bounded(self.most_bytes)
            return PAGE_SIZE * (pages * self.position_bytes + buffer * self.layer_bytes)
        return self.slots * self.position_bytes * self.longest

    @property
    def while_learning(self) -> int:
        """Bytes when a draft model has given up what it kept."""
        return self.at_last if self.most_bytes is not None else replace(self, draft=None).at_last

    @property
    def growth(self) -> int:
        """What growing takes beside the cache: it is done layer by layer, and at the end by at most half."""
        if self.most_bytes is not None or self.longest <= self._first_capacity:
            return 0
        return self.slots * self.layer_bytes * self.longest // 2

    @property
    def _first_capacity(self) -> int:
        return min(self.longest, -(-self.prompt_tokens // CACHE_MULTIPLE) * CACHE_MULTIPLE)

    @property
    def positions(self) -> int | None:
        """Positions that there are pages for, None where all samples have room for their longest.

        Where they do not, a sample gives its pages back and is read again, as far as it got: one step may read so many.
        """
        if self.most_bytes is None:
            return None
        pages, _ = self._bounded(self.most_bytes)
        return None if pages >= self.slots * self._pages_of_longest else pages * PAGE_SIZE

    @property
    def _pages_of_longest(self) -> int:
        return -(-self.longest // PAGE_SIZE)

    def _bounded(self, most: int) -> tuple[int, int]:
        """Return pages, and those of one layer that the buffer holds: no more than are of use, unless it fills.

        A bound too small for one sample, which the engine refuses, counts as one that suffices.
        """
        page, buffered = PAGE_SIZE * self.position_bytes, PAGE_SIZE * self.layer_bytes
        each = max(1, most // (page + buffered)) if self.fills else self._pages_of_longest
        left = max(each, (most - each * page) // buffered)
        buffer = min(max(most // BUFFER_SHARE // buffered, each), left, self.slots * each)
        return max(each, min((most - buffer * buffered) // page, self.slots * each)), buffer


def packed_bytes(role: RoleMemory, engine: EngineMemory, *, tp: int, element_bytes: int, num_steps: int) -> int:
    """Return what packed copies of linear layers take: all but those whose products ranks sum, a tied head with them.

    Weights of two dims count as linear layers', unless they come before the blocks.
    """
    if not engine.packs_weights or num_steps < MIN_PACKED_STEPS:
        return 0
    least = MIN_PACKED_FLOAT32_WEIGHTS if element_bytes == _FLOAT32 else 0
    tied = {owner for _, owner in role.model.aliases}
    sizes: Counter[str] = Counter()
    for param in role.model.params:
        is_linear = len(param.shape) == 2 and (param.section != "input" or param.name in tied)
        if is_linear and (tp == 1 or param.tp is None or param.tp.dim == 0):
            sizes[_shared_product(param.name)] += param.numel // (1 if param.tp is None else tp)
    return sum(size for size in sizes.values() if size >= least) * element_bytes


def _shared_product(name: str) -> str:
    """Return the same for weights that are packed as one."""
    for siblings in PACKED_TOGETHER:
        for sibling in siblings:
            name = name.replace(f".{sibling}.", f".{siblings[0]}.")
    return name


def draft_bytes(draft: DraftMemory | None, *, element_bytes: int) -> int:
    """Return what a draft model keeps on a rank between generations; ``element_bytes`` of the target's weights."""
    if draft is None:
        return 0
    weights = draft.model.model.num_elements
    return weights * (3 * _FLOAT32 if draft.learns else element_bytes)  # AdamW keeps two numbers for each


def learning(draft: DraftMemory | None, *, samples: int, longest: int) -> MemoryParts:
    """Return what a draft model that learns adds when a generation has ended: gradients and a batch's activations.

    Args:
        samples: Which it learns from.
        longest: Tokens of the longest one with its prompt.
    """
    if draft is None or not draft.learns:
        return MemoryParts()
    shape, gradients = draft.model.shape, draft.model.model.num_elements * _FLOAT32
    if shape is None:
        return MemoryParts(drafts=gradients)
    tokens = max(longest, min(DISTILLATION_TOKENS, samples * longest))
    kept = shape.num_layers * shape.saved_bytes(1, _FLOAT32)
    # First logits, those of responses, their log-probabilities and a gradient of these; then gradients of a block.
    logits, backward = 4 * _FLOAT32 * shape.num_outputs, shape.backward_elements(1) * _FLOAT32
    if logits < backward:
        return MemoryParts(drafts=gradients, activations=tokens * (kept + backward))
    return MemoryParts(drafts=gradients, activations=tokens * kept, logits=tokens * logits)
