"""What one forward reads, and how a model is run on it: a single packed row, with the step as one more argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_realloc.generation.forward.attention import STEP_ARGUMENT, PackedStep, StepArgument, check_attended


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of a sequence whose keys and values are to be computed, and nothing else."""

    tokens: Sequence[int]
    slots: tuple[int, ...]
    """Every slot that is to hold them."""
    begin: int = 0
    """Position of the first of them; the slots hold what is before it."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Tokens that one slot's sample reads in this forward."""

    tokens: Sequence[int]
    """At least one."""
    position: int
    """Of the first of them."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.position + len(self.tokens)


def run_packed(model: nn.Module, ids: Tensor, positions: Tensor, step: PackedStep, *, kept: int | Tensor) -> Tensor:
    """Return the logits (K, V) of the last ``kept`` tokens, or of those at these indices.

    Args:
        ids: (1, N).
        positions: (1, N), as rotary embeddings count.
    """
    output = model(
        input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept,
        **{STEP_ARGUMENT: StepArgument(step)},
    )  # fmt: skip
    check_attended(model, step)
    logits: Tensor = output.logits[0]
    return logits
