"""Arm of `benchmarks.generation` that runs the engine ``"vllm"``: vLLM in its own process and environment.

CPU-seconds are those of both processes. Log-probabilities are compared with a forward pass of the model, so both arms
have the same weights, also after a hand-over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, SamplingParams, VLLMEngine, VLLMOptions

_LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.15}


class VllmUnavailableError(Exception):
    """vLLM cannot run here; the message has the reason."""


class VllmArm:
    """The engine on a model; a context manager, which ends vLLM's process."""

    def __init__(self, python: Path, model: PreTrainedModel, *, max_sequences: int) -> None:
        """Start vLLM with its interpreter and give it the model's weights.

        Raises:
            VllmUnavailableError: if the interpreter does not exist or vLLM does not start.
        """
        self._model = model
        options = VLLMOptions(python=str(python), max_length=1024)
        self._engine = VLLMEngine(model, max_slots=max_sequences, options=options)
        try:
            connection = self._engine.service.prepare(model)
        except GenerationError as reason:
            raise VllmUnavailableError(f"vLLM does not run: {reason}") from reason
        assert self._engine.service.process_id is not None
        self.version = connection.version
        self._process = psutil.Process(self._engine.service.process_id)

    def __enter__(self) -> VllmArm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.service.close()

    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], n: int = 1) -> float:
        """Return the CPU-seconds of ``n`` responses of exactly these lengths per prompt."""
        params = SamplingParams(max_new_tokens=max(lengths), n=n, ignore_eos=True)
        made: list[Completion] = []
        seconds = self._seconds(lambda: made.extend(self._engine.generate(prompts, params, token_limits=lengths)))
        num_tokens = sum(len(completion.token_ids) for completion in made)
        if num_tokens != n * sum(lengths):
            raise RuntimeError(f"vLLM made {num_tokens} tokens, the workload wants {n * sum(lengths)}")
        self._check_weights(made[0])
        return seconds

    def hand_over(self) -> float:
        """Give the model's current weights to vLLM; return the CPU-seconds."""
        self._engine.weights_updated()
        return self._seconds(lambda: self._engine.service.prepare(self._model))

    def _seconds(self, work: Callable[[], Any]) -> float:
        begin = self._spent()
        work()
        return self._spent() - begin

    def _spent(self) -> float:
        theirs = self._process.cpu_times()
        return time.process_time() + theirs.user + theirs.system

    @torch.no_grad()
    def _check_weights(self, made: Completion) -> None:
        ids = torch.tensor([[*made.prompt, *made.token_ids]])
        logits = self._model(ids, use_cache=False).logits[0, len(made.prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        error = float((logprobs - torch.tensor(made.logprobs)).abs().max())
        if not error < _LARGEST_ERROR[self._model.dtype]:
            raise RuntimeError(f"vLLM's log-probabilities are {error:.3g} off the model's: it runs other weights")
