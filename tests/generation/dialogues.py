"""Reference conversations, computed with one full forward per token, for tests of turns and of partial rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from transformers import PreTrainedModel

from lightning_realloc.generation import Completion, Environment, GenerationEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.core.noise import keyed_uniforms, sample_key
from lightning_realloc.generation.core.sampling import sample_tokens
from tests.models import tiny_model

STOPS = tuple(range(20, 44))
SAMPLED = SamplingParams(max_new_tokens=32, n=2, seed=3, stop_token_ids=STOPS)
GREEDY = SamplingParams(max_new_tokens=32, temperature=0, stop_token_ids=STOPS)
PROMPTS = ((5, 9, 17, 3, 88), (8,) * 11, (40,), (7, 7, 90, 4, 4, 4), (101, 33))


def tool(turn: Turn) -> list[int] | None:
    """Answer with one to six tokens, which depend on the model's last one; None ends the third turn at the latest."""
    last = turn.token_ids[-1]
    if turn.number > 2 or last % 7 == 0:
        return None
    return [(last + 11 * step) % 128 for step in range(1 + last % 6)]


@dataclass
class Told:
    """A sample that the reference loop generated."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_mask: list[bool] = field(default_factory=list)
    finish_reason: str = ""


def tell(
    model: PreTrainedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    sample_id: int,
    environment: Environment,
    max_turn_tokens: int = 1000,
) -> Told:
    """Generate one response token by token, without a cache."""
    told, turn, begin = Told(), 1, 0
    while not told.finish_reason:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *told.token_ids]]), use_cache=False).logits[:, -1]
        place = keyed_uniforms([sample_key(params.seed, sample_id)], [len(told.token_ids)])
        token, logprob = sample_tokens(logits, torch.tensor(place, dtype=torch.float64), params)
        told.token_ids.append(int(token))
        told.logprobs.append(float(logprob))
        told.model_mask.append(True)
        is_cut = len(told.token_ids) - begin == max_turn_tokens and len(told.token_ids) < params.max_new_tokens
        if told.token_ids[-1] in params.stop_token_ids or is_cut:
            answer = environment(Turn(sample_id, 0, tuple(prompt), tuple(told.token_ids), turn))
            if answer is None:
                told.finish_reason = "environment"
            elif len(told.token_ids) + len(answer) >= params.max_new_tokens:
                told.finish_reason = "length"
            else:
                told.token_ids += answer
                told.logprobs += [0.0] * len(answer)
                told.model_mask += [False] * len(answer)
                turn, begin = turn + 1, len(told.token_ids)
        elif len(told.token_ids) == params.max_new_tokens:
            told.finish_reason = "length"
    return told


@cache
def exact_model(family: str = "llama", window: int | None = None) -> PreTrainedModel:
    """Return a tiny model in float64 without an end-of-sequence token."""
    model = tiny_model(family, **({} if window is None else {"sliding_window": window})).double()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


@cache
def expected(params: SamplingParams, family: str = "llama", window: int | None = None) -> list[Told]:
    """Return the reference responses to all prompts, with `tool` as the environment."""
    return [
        tell(exact_model(family, window), prompt, params, index * params.n + copy, tool)
        for index, prompt in enumerate(PROMPTS)
        for copy in range(params.n)
    ]


def engine_of(model: PreTrainedModel, *, speculates: bool = False, **settings: object) -> GenerationEngine:
    """Return an engine on ``model``; with ``speculates`` it drafts three tokens."""
    speculation = Speculation(drafter="history", num_draft_tokens=3) if speculates else None
    return GenerationEngine(model, speculation=speculation, **settings)  # type: ignore[arg-type]


def check_same(completions: Sequence[Completion], told: Sequence[Told]) -> None:
    """Assert that completions equal those of the reference loop."""
    assert len(completions) == len(told)
    for completion, one in zip(completions, told, strict=True):
        assert completion.token_ids == tuple(one.token_ids)
        assert completion.model_mask == tuple(one.model_mask)
        assert (completion.finish_reason, completion.error) == (one.finish_reason, None)
        torch.testing.assert_close(torch.tensor(completion.logprobs), torch.tensor(one.logprobs), atol=1e-6, rtol=0)
