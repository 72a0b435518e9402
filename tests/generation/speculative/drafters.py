"""Drafters for tests of speculation, and engines that use them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from lightning_realloc.generation import Completion, GenerationEngine, Speculation
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import Draft
from lightning_realloc.generation.speculative.draft_model import BlocksDrafter, ModelDrafter
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.lookup import HistoryDrafter, NgramDrafter
from tests.generation.markov import VOCABULARY, drafter_model, markov_text


class RandomDrafter(Drafter):
    """Drafts random tokens of random length within the limits. No output may depend on them."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> list[Draft]:
        drafts = []
        for limit in limits:
            length = self._rng.randint(0, max(limit, 0))
            tokens = [self._rng.choice((0, self._vocabulary - 1, 5, 9)) for _ in range(length)]
            laws = [(token,) for token in tokens]
            drafts.append(Draft(tokens, laws=laws))
        return drafts


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "none": lambda model: Drafter(),
    "random": lambda model: RandomDrafter(VOCABULARY),
    "ngram": lambda model: NgramDrafter(),
    "history": lambda model: HistoryDrafter(),
    "model": lambda model: ModelDrafter(drafter_model(), model),
    "blocks": lambda model: BlocksDrafter(model, 1),
    "itself": lambda model: ModelDrafter(model, model),
}


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of Markov text, of 1 to 20 tokens."""
    rng = random.Random(seed)
    return [row[: rng.randint(1, 20)] for row in markov_text(count, 20, seed=99 + seed).tolist()]


def speculating(
    model: PreTrainedModel, drafter: str, depth: int | None, verification: Any = "match", **settings: Any
) -> GenerationEngine:
    """Return an engine with a drafter of ``DRAFTERS``."""
    return GenerationEngine(
        model,
        speculation=Speculation(drafter="none", num_draft_tokens=depth, verification=verification),
        drafter=DRAFTERS[drafter](model),
        **{"max_slots": 4, **settings},
    )


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]
