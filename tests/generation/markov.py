"""Order-2 Markov text over few tokens, and models that learn it in seconds, for tests of speculation."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 32
EOS = 2


def markov_text(num_rows: int, length: int, *, seed: int) -> Tensor:
    """Return rows of tokens 3 … 31, each drawn given the two before it: one likely follower and two others."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.Generator().manual_seed(0)
    followers = torch.randint(3, VOCABULARY, (VOCABULARY, VOCABULARY, 3), generator=table)
    text = torch.randint(3, VOCABULARY, (num_rows, length), generator=generator)
    chances = torch.tensor([0.8, 0.15, 0.05])
    for place in range(2, length):
        choice = torch.multinomial(chances.expand(num_rows, -1), 1, generator=generator)[:, 0]
        text[:, place] = followers[text[:, place - 2], text[:, place - 1], choice]
    return text


@cache
@torch.inference_mode(False)  # its first caller may generate: the model is the same for all
@torch.enable_grad()
def trained_model(hidden_size: int, num_layers: int, *, steps: int, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model trained on Markov text for ``steps`` steps."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for step in range(steps):
        text = markov_text(16, 40, seed=step + 1)
        loss = model(text, labels=text, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def target() -> PreTrainedModel:
    """Return the model that tests generate from."""
    return trained_model(64, 2, steps=100)


def drafter_model() -> PreTrainedModel:
    """Return a smaller model trained on the same text."""
    return trained_model(32, 1, steps=100, seed=1)
