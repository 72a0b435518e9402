"""What vLLM's workers do otherwise when they draw tokens. Loaded by `child`, so it imports nothing of this package."""

from __future__ import annotations

from typing import Any


def report_tempered_logprobs(worker: Any) -> None:
    """Make vLLM report log-probabilities of ``softmax(logits / temperature)`` over the whole vocabulary.

    Its own modes leave out the temperature, or take only the tokens that filters keep.
    """
    import torch

    sampler = worker.model_runner.sampler
    forward = sampler.forward

    def tempered(logits: Any, sampling_metadata: Any, *others: Any, **options: Any) -> Any:
        divisors = sampling_metadata.temperature
        if divisors is not None:
            divisors = torch.where(divisors < 1e-5, 1.0, divisors)[:, None]  # below it vLLM is greedy
        sampler.compute_logprobs = lambda raw: (raw.float() if divisors is None else raw / divisors).log_softmax(-1)
        return forward(logits, sampling_metadata, *others, **options)

    sampler.forward = tempered


def keep_random_numbers(worker: Any) -> None:
    """Draw for prompts that are not read to their end by other random numbers than their own; vLLM drops these tokens.

    vLLM turns the generator back instead, which one on CPU cannot do: such a step would fail.
    """
    runner = worker.model_runner
    sample_tokens = runner.sample_tokens

    def sample(*args: Any, **options: Any) -> Any:
        own = runner.input_batch.generators
        unread = {i: own.pop(i) for i in list(own) if runner.discard_request_mask.np[i]}
        try:
            return sample_tokens(*args, **options)
        finally:
            own.update(unread)

    if worker.device.type == "cpu":
        runner.sample_tokens = sample
