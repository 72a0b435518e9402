"""Lengths of the sequences of one iteration, and their distribution over several iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_realloc.errors import PlanError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of the sequences of one iteration, over all ranks."""

    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    responses: tuple[int, ...]
    """Tokens of each response, in the order of the prompts."""

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.responses):
            raise PlanError(
                f"an iteration has a prompt and a response for each of its sequences; got {len(self.prompts)} prompts "
                f"and {len(self.responses)} responses"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return sum(self.prompts) + sum(self.responses)


@dataclass(frozen=True, slots=True)
class TypicalLengths:
    """Lengths that several iterations had, as input of the estimates."""

    num_sequences: int
    """Mean number of sequences in an iteration."""
    prompt_tokens: int
    """Mean tokens of a prompt."""
    longest_prompt: int
    """Most tokens of a prompt."""
    responses: tuple[int, ...]
    """Equally likely response lengths, in tokens, ascending. An empty response counts as one token."""

    @classmethod
    def from_iterations(cls, iterations: Sequence[Lengths]) -> TypicalLengths:
        """Combine the lengths of iterations.

        Raises:
            PlanError: without an iteration.
        """
        if not iterations:
            raise PlanError("typical lengths need the lengths of at least one iteration; pass one or more")
        prompts = [length for one in iterations for length in one.prompts]
        responses = tuple(sorted(max(1, length) for one in iterations for length in one.responses))
        return cls(
            num_sequences=max(1, round(len(prompts) / len(iterations))),
            prompt_tokens=max(1, round(sum(prompts) / len(prompts))),
            longest_prompt=max(1, *prompts),
            responses=responses,
        )
