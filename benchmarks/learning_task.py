"""Task of `benchmarks.learning`: write more vowels, learnt from rewards or from pairs.

A model of a million weights first learns in a few seconds to write random letters and to stop after any of them. So
responses have many lengths, as in practice, and a fifth of their letters are vowels.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workload import random_model, share_of_vowels

FAMILIES = ("grpo", "dpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Sizes and settings, the same for both arms."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    warm_up_steps: int = 60
    prompt_lengths: tuple[int, int] = (8, 32)
    """Least and most letters of a prompt, without the colon after them."""
    mean_response: int = 16
    """Mean letters of a response that ends by itself; lengths are geometric."""
    new_tokens: int = 64
    """Longest response, in tokens."""

    grpo_steps: int = 24
    num_prompts: int = 8
    """Prompts per step."""
    group_size: int = 8
    kl_coef: float = 0.04
    grpo_learning_rate: float = 1e-3
    reward_to_reach: float = 0.6

    dpo_steps: int = 30
    num_pairs: int = 24
    """Pairs per step."""
    beta: float = 0.1
    dpo_learning_rate: float = 1e-3
    accuracy_to_reach: float = 0.8
    least_margin: float = 0.25
    """Least difference between the shares of vowels of the chosen and the rejected response."""
    num_held_out: int = 256
    """Held-out pairs."""

    window: int = 3
    """Steps over which the score is averaged before it is compared with the target."""

    def num_steps(self, family: str) -> int:
        """Return the optimizer steps of a run."""
        return self.grpo_steps if family == "grpo" else self.dpo_steps

    def score_to_reach(self, family: str) -> float:
        """Return the mean reward or the accuracy at which the seconds of a run are read."""
        return self.reward_to_reach if family == "grpo" else self.accuracy_to_reach


QUICK = Task(
    hidden_size=32, num_layers=1, warm_up_steps=4, new_tokens=12, grpo_steps=3, num_prompts=2, group_size=2,
    dpo_steps=3, num_pairs=4, num_held_out=8,
)  # fmt: skip


# --- text -------------------------------------------------------------------------------------------------------------


def prompt(task: Task, rng: random.Random) -> str:
    """Return random letters, followed by a colon."""
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*task.prompt_lengths))) + ":"


def response(task: Task, rng: random.Random) -> str:
    """Return random letters; the response ends after each of them with the same probability."""
    length = 1
    while length < task.new_tokens - 1 and rng.random() > 1 / task.mean_response:
        length += 1
    return "".join(rng.choices(string.ascii_lowercase, k=length))


def pair(task: Task, rng: random.Random) -> dict[str, str]:
    """Return two responses to one prompt; the chosen one has the larger share of vowels."""
    while True:
        first, second = response(task, rng), response(task, rng)
        shares = share_of_vowels([first, second])
        if abs(shares[0] - shares[1]) >= task.least_margin:
            chosen, rejected = (first, second) if shares[0] > shares[1] else (second, first)
            return {"prompt": prompt(task, rng), "chosen": chosen, "rejected": rejected}


def draw_rows(task: Task, family: str, seed: int) -> list[dict[str, str]]:
    """Return the rows of one run in their order; no row repeats."""
    rng = random.Random(f"{family} {seed}")
    if family == "grpo":
        return [{"prompt": prompt(task, rng)} for _ in range(task.grpo_steps * task.num_prompts)]
    return [pair(task, rng) for _ in range(task.dpo_steps * task.num_pairs)]


def held_out(task: Task) -> list[dict[str, str]]:
    """Return pairs that are in no run."""
    rng = random.Random("held out")
    return [pair(task, rng) for _ in range(task.num_held_out)]


# --- the model --------------------------------------------------------------------------------------------------------


def save_model(task: Task, folder: str, *, seed: int) -> int:
    """Write the start model of all runs of this seed, with its tokenizer; return its number of weights."""
    model, tokenizer = random_model(
        "qwen2", hidden_size=task.hidden_size, num_layers=task.num_layers, num_heads=task.num_heads, seed=seed
    )
    _learn_to_write(model, tokenizer, task, random.Random(f"warm-up {seed}"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _learn_to_write(model: Any, tokenizer: Any, task: Task, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(task.warm_up_steps):
        texts = [(prompt(task, rng), response(task, rng)) for _ in range(32)]
        loss = -torch.cat(response_logprobs(model, tokenizer, texts)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def response_logprobs(model: Any, tokenizer: Any, texts: Sequence[tuple[str, str]]) -> list[Tensor]:
    """Return the log-probabilities of each response's tokens and its end, by padded transformers.

    Both arms are judged by this function, which uses no arm's code.
    """
    ids = [tokenizer(text)["input_ids"] for pair in texts for text in pair]
    prompts, answers = ids[0::2], [[*answer, tokenizer.eos_token_id] for answer in ids[1::2]]
    rows = [torch.tensor(first + rest) for first, rest in zip(prompts, answers, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=padded, attention_mask=mask).logits[:, :-1]
    taken = F.log_softmax(logits, dim=-1).gather(-1, padded[:, 1:, None]).squeeze(-1)
    spans = zip(taken, prompts, rows, strict=True)
    return [values[len(first) - 1 : len(row) - 1] for values, first, row in spans]


@torch.no_grad()
def held_out_accuracy(task: Task, folder: str, weights: Mapping[str, Tensor]) -> float:
    """Return the share of held-out pairs whose chosen response gained more likelihood than the rejected one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    after.load_state_dict(weights)
    pairs = held_out(task)
    gains = []
    for side in ("chosen", "rejected"):
        texts = [(row["prompt"], row[side]) for row in pairs]
        now, then = (response_logprobs(model.eval(), tokenizer, texts) for model in (after, before))
        gains.append(torch.stack([a.sum() - b.sum() for a, b in zip(now, then, strict=True)]))
    return float((gains[0] > gains[1]).float().mean())
