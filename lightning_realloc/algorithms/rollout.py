"""From an engine's completions to the columns of a rollout, and back to text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams
from lightning_realloc.rewards.functions import RewardFunctions, Rewards
from lightning_realloc.runtime.samples import Ragged, Samples

FINISH_REASONS = ("stop", "length", "environment", "unfinished")
"""What a rollout's ``finish_reason`` column counts in."""
_FAILURES = "reward_failures/"


def sample_responses(engine: GenerationEngine, prompts: Samples, sampling: SamplingParams) -> Samples:
    """Return ``sampling.n`` responses per prompt, with the columns of a rollout.

    Columns: ``prompt_id`` (B,), ``prompt_ids`` and ``response_ids`` ragged, ``behaviour_logprobs`` ragged float32 of
    the response tokens, ``finish_reason`` (B,) an index into ``FINISH_REASONS``. Sample ids are those of
    ``prompts.repeat(sampling.n)``, so that randomness follows the sample wherever it is generated.

    Where calls wait for these samples on ranks of their own, those that finish early are handed on to them.
    """
    samples = prompts.with_columns(prompt_id=prompts.ids).repeat(sampling.n)
    ids = samples.ids.tolist()

    def responses(completions: Sequence[Completion]) -> Samples:
        return _rollout(samples.by_ids([c.sample_id for c in completions]), completions)

    on_finished = None if engine.outlet is None else engine.outlet.collect(len(samples), responses)
    prompt_ids = prompts.ragged("prompt_ids").to_lists()
    return responses(engine.generate(prompt_ids, sampling, sample_ids=ids, on_finished=on_finished))


def _rollout(prompts: Samples, completions: Sequence[Completion]) -> Samples:
    """Return the columns of a rollout, row by row of ``prompts`` what responds to it."""
    return Samples(
        prompts.ids,
        {
            "prompt_id": prompts.tensor("prompt_id"),
            "prompt_ids": prompts.ragged("prompt_ids"),
            "response_ids": Ragged.from_list([c.token_ids for c in completions], dtype=torch.int64),
            "behaviour_logprobs": Ragged.from_list([c.logprobs for c in completions], dtype=torch.float32),
            "finish_reason": torch.tensor(
                [FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=torch.int64
            ),
        },
    )


def judged_responses(functions: RewardFunctions, samples: Samples, tokenizer: PreTrainedTokenizerBase) -> Rewards:
    """Return what reward functions say about responses; they get the data's columns of python objects."""
    known = {name: column for name, column in samples.columns.items() if isinstance(column, tuple)}
    prompts = known.pop("prompt")
    return functions(prompts, response_texts(samples, tokenizer), samples.ragged("response_ids").to_lists(), known)


def reward_columns(rewards: Rewards) -> dict[str, Tensor]:
    """Return the column of every function's rewards, where there are several, and of failures, where there may be."""
    several = rewards.by_function if len(rewards.by_function) > 1 else {}
    failures = {f"{_FAILURES}{name}": failed.float() for name, failed in rewards.failed.items()}
    return {f"reward/{name}": values for name, values in several.items()} | failures


def reward_summary(samples: Samples) -> dict[str, Tensor]:
    """Return the mean of every function's rewards over the responses that it applied to, and how often it failed."""
    means = {name: samples.tensor(name).nanmean() for name in samples.columns if name.startswith("reward/")}
    return means | {name: samples.tensor(name).sum() for name in samples.columns if name.startswith(_FAILURES)}


def response_summary(samples: Samples) -> dict[str, Tensor]:
    """Return the mean length of responses and the share of them that ended by themselves."""
    return {
        "response_length": samples.ragged("response_ids").lengths.float().mean(),
        "finished": (samples.tensor("finish_reason") == FINISH_REASONS.index("stop")).float().mean(),
    }


def response_texts(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the responses as text, without special tokens."""
    ids = samples.ragged("response_ids").to_lists()
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids]
