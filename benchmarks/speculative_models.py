"""Predictable text for `benchmarks.speculative`, and models that learn it first.

Text of random weights is unpredictable, so drafts of it are rejected. This text is a Markov chain of order 2 with an
entropy of 0.27 nats a token, like a confident policy's. For a less confident policy every figure of speculation is
smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_realloc.generation.speculative.draft_model import first_blocks

VOCABULARY = 256
CHANCES = (0.94, 0.04, 0.02)
"""Probabilities of the three tokens that may follow."""
LONGEST = 128
"""Tokens of a prompt with its response, and of a row of training text."""
_FIRST_TOKEN = 3
_NUM_GROUPS = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape of a Llama, and its training."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    steps: int
    rows_per_step: int
    learning_rate: float
    draft_blocks: int | None = None
    """First blocks that also learn to predict the text; None: only the whole model learns."""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("draft", 64, 128, 1, 4, 2, steps=300, rows_per_step=8, learning_rate=1e-2),
        Recipe("3m", 256, 1024, 4, 8, 2, steps=180, rows_per_step=4, learning_rate=3e-3, draft_blocks=1),
        Recipe("40m", 768, 2304, 6, 12, 4, steps=100, rows_per_step=3, learning_rate=2e-3, draft_blocks=1),
    )
}


def markov_text(num_rows: int, length: int, *, seed: int) -> Tensor:
    """Return token ids (num_rows, length). The previous token and the group of the one before choose each token.

    A group is half of the vocabulary. The three tokens that may follow are the same for every ``seed``.
    """
    table = torch.Generator().manual_seed(0)
    followers = torch.randint(_FIRST_TOKEN, VOCABULARY, (_NUM_GROUPS, VOCABULARY, len(CHANCES)), generator=table)
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(_FIRST_TOKEN, VOCABULARY, (num_rows, length), generator=generator)
    chances = torch.tensor(CHANCES).expand(num_rows, -1)
    for place in range(2, length):
        choice = torch.multinomial(chances, 1, generator=generator)[:, 0]
        text[:, place] = followers[text[:, place - 2] % _NUM_GROUPS, text[:, place - 1], choice]
    return text


def train(recipe: Recipe, *, seed: int = 0) -> tuple[PreTrainedModel, float]:
    """Return a float32 model that learnt the text, and its loss in nats a token at the last step.

    Every step adds the loss of the first ``recipe.draft_blocks`` blocks, through the model's own last norm and head.
    Without that loss the blocks cannot draft.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_blocks, num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads, max_position_embeddings=2 * LONGEST, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    learners = [model] if recipe.draft_blocks is None else [model, first_blocks(model, recipe.draft_blocks)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    losses = [torch.zeros(())]
    for step in range(recipe.steps):
        text = markov_text(recipe.rows_per_step, LONGEST, seed=1000 * seed + step)
        losses = [learner(text, labels=text, use_cache=False).loss for learner in learners]
        torch.stack(losses).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False), losses[0].item()
