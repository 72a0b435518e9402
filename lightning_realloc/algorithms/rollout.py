"""From an engine's completions to the columns of a rollout, and back to text."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.runtime.samples import Ragged, Samples

FINISH_REASONS = ("stop", "length")
"""What a rollout's ``finish_reason`` column counts in."""


def sample_responses(engine: GenerationEngine, prompts: Samples, sampling: SamplingParams) -> Samples:
    """Return ``sampling.n`` responses per prompt, with the columns of a rollout.

    Columns: ``prompt_id`` (B,), ``prompt_ids`` and ``response_ids`` ragged, ``behaviour_logprobs`` ragged float32 of
    the response tokens, ``finish_reason`` (B,) an index into ``FINISH_REASONS``. Sample ids are those of
    ``prompts.repeat(sampling.n)``, so that randomness follows the sample wherever it is generated.
    """
    samples = prompts.with_columns(prompt_id=prompts.ids).repeat(sampling.n)
    completions = engine.generate(prompts.ragged("prompt_ids").to_lists(), sampling, sample_ids=samples.ids.tolist())
    return Samples(
        samples.ids,
        {
            "prompt_id": samples.tensor("prompt_id"),
            "prompt_ids": samples.ragged("prompt_ids"),
            "response_ids": Ragged.from_list([c.token_ids for c in completions], dtype=torch.int64),
            "behaviour_logprobs": Ragged.from_list([c.logprobs for c in completions], dtype=torch.float32),
            "finish_reason": torch.tensor(
                [FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=torch.int64
            ),
        },
    )


def response_texts(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the responses as text, without special tokens."""
    ids = samples.ragged("response_ids").to_lists()
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids]
