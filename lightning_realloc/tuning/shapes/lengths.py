"""How long were an iteration's sequences?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_realloc.errors import PlanError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of every sequence of one iteration, over all ranks."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    """In the same order."""

    def __post_init__(self) -> None:
        if not self.prompts or len(self.prompts) != len(self.responses):
            raise PlanError(
                f"an iteration has a prompt and a response for each of its sequences; got {len(self.prompts)} prompts "
                f"and {len(self.responses)} responses"
            )

    @property
    def num_tokens(self) -> int:
        """Prompts and responses together."""
        return sum(self.prompts) + sum(self.responses)


@dataclass(frozen=True, slots=True)
class TypicalLengths:
    """What several iterations were like."""

    num_sequences: int
    """Of one iteration, as a mean."""
    prompt_tokens: int
    """Of a prompt, as a mean."""
    longest_prompt: int
    responses: tuple[int, ...]
    """Equally likely lengths. An empty one counts as one token: somebody looked at it."""

    @classmethod
    def of(cls, iterations: Sequence[Lengths]) -> TypicalLengths:
        """Put iterations together. Raises PlanError for none."""
        if not iterations:
            raise PlanError("lengths of at least one iteration are needed to say what is typical")
        prompts = [length for one in iterations for length in one.prompts]
        responses = tuple(sorted(max(1, length) for one in iterations for length in one.responses))
        return cls(
            num_sequences=max(1, round(len(prompts) / len(iterations))),
            prompt_tokens=max(1, round(sum(prompts) / len(prompts))),
            longest_prompt=max(1, *prompts),
            responses=responses,
        )
