"""Completions by vLLM, with the interface of `GenerationEngine`.

vLLM draws by its own random numbers: responses differ from the native engine's, and follow the same distribution.
Arguments that need the native engine's caches or steps are refused: drafts, samples that move, environments, budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.model_config import length_bounds, vocabulary_of
from lightning_realloc.generation.core.sample import Completion, Sample, StopRule, Tokenizer
from lightning_realloc.generation.core.sampling import SamplingParams, check_counts
from lightning_realloc.generation.core.stopping import StopStringCheck, check_tokenizer, stop_rule_of
from lightning_realloc.generation.loop.requests import Requests, check_callables, next_version
from lightning_realloc.generation.loop.run import GenerationStats, not_finite
from lightning_realloc.generation.loop.streaming import CompletionNotifier, SharingEngine
from lightning_realloc.generation.native_arguments import refuse_native
from lightning_realloc.generation.vllm.hand_over import weights_of
from lightning_realloc.generation.vllm.messages import Connection, TokenRequest, TokenResponse
from lightning_realloc.generation.vllm.process import VLLMProcess
from lightning_realloc.generation.vllm.service import VLLMService
from lightning_realloc.generation.vllm.vllm_options import VLLMOptions
from lightning_realloc.generation.vllm.vllm_server import VLLMServer


class VLLMEngine(SharingEngine):
    """Same interface as `GenerationEngine`, by a vLLM that gets the model's weights before each call on new ones.

    Greedy responses equal the native engine's up to rounding. Sampled ones follow the same distribution with other
    random numbers, which depend on ``params.seed`` and the sample's id.

    Args:
        model: The model whose weights vLLM gets; whole on this rank.
        tokenizer: Decodes responses for stop strings.
        max_slots: Most samples that vLLM runs at a time.
        max_cache_bytes: Bytes of vLLM's keys and values; None: see ``VLLMOptions.memory_share``, on CPU 1 GiB.
        options: Where vLLM is, and how it starts.
        service: A vLLM that an earlier engine of the same model left running; None: one is started when needed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Tokenizer | None = None,
        max_slots: int = 64,
        max_cache_bytes: int | None = None,
        options: VLLMOptions | None = None,
        service: VLLMService | None = None,
        **native: object,
    ) -> None:
        refuse_native(self, "__init__", native)
        check_counts(max_slots=max_slots)
        check_counts(optional=True, max_cache_bytes=max_cache_bytes)
        check_tokenizer(tokenizer)
        self._model, self._tokenizer, self._max_slots = model, tokenizer, max_slots
        self._options = options or VLLMOptions()
        weights_of(model)
        if self._options.sleep and next(model.parameters()).device.type == "cpu" and self._options.address is None:
            raise GenerationError("sleep=True frees memory of a GPU, and the model is on the CPU; leave sleep out")
        self._check_stop_strings = StopStringCheck(tokenizer)
        # Without the model: the service may outlive it.
        connect = partial(
            _connect, options=self._options, tokenizer=tokenizer, max_slots=max_slots, max_cache_bytes=max_cache_bytes
        )
        self.service = service or VLLMService(connect, restarts=self._options.restarts)
        self._version = 0
        self._stats = GenerationStats()

    @property
    def stats(self) -> GenerationStats:
        """Counts of the last call: forward passes, and tokens of prompts and responses."""
        return self._stats

    def weights_updated(self, version: int | None = None) -> None:
        """Set the version of updated parameters, by default the last one + 1; before any update it is 0."""
        self._version = next_version(self._version, version)
        self.service.weights_changed()

    def release(self) -> None:
        """Free the device's memory, if ``VLLMOptions.sleep`` asks for it."""
        if self._options.sleep:
            self.service.sleep()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        sample_ids: Sequence[int] | None = None,
        length_hints: Sequence[int] | None = None,
        token_limits: Sequence[int] | None = None,
        on_finished: Callable[[Completion], None] | None = None,
        **native: object,
    ) -> list[Completion]:
        """Return ``params.n`` completions per prompt, in the order of the prompts.

        Arguments and errors are those of `GenerationEngine.generate`. ``length_hints`` order the requests. Arguments
        that only that engine supports are refused.

        Raises:
            EngineLost: if vLLM ends or falls silent, and may not be restarted.
        """
        refuse_native(self, "generate", native)
        params = SamplingParams() if params is None else params
        check_callables(on_finished=on_finished)
        requests = Requests(
            prompts,
            (),
            params,
            sample_ids,
            length_hints,
            token_limits,
            vocabulary=vocabulary_of(self._model),
            bounds=length_bounds(self._model, self.service.max_length or self._options.max_length),
        )
        samples = requests.samples()
        self._follow(samples)
        stop = stop_rule_of(self._model, params, self._tokenizer)
        self._check_stop_strings(params.stop_strings)
        hints = [prompt.length_hint for prompt in requests.queue(samples)]
        order = sorted(range(len(samples)), key=lambda index: -hints[samples[index].prompt_number])
        asked = [_request(index, samples[index]) for index in order]
        notifier = CompletionNotifier(samples, on_finished, lambda sample: sample.completion(self._version))

        def accept(response: TokenResponse) -> None:
            sample = samples[response.index]
            _fill(sample, response, stop)
            notifier.report([sample])

        num_steps = self.service.generate(self._model, asked, _sampling(params, stop), accept) if asked else 0
        num_generated = sum(len(sample.token_ids) for sample in samples)
        self._stats = GenerationStats(
            num_steps=num_steps,
            row_steps=num_generated,
            generated_tokens=num_generated,
            prefill_tokens=sum(len(sample.prompt) for sample in samples),
        )
        return [sample.completion(self._version) for sample in samples]


def _connect(
    model: Any,
    needs_tokenizer: bool,
    *,
    options: VLLMOptions,
    tokenizer: Tokenizer | None,
    max_slots: int,
    max_cache_bytes: int | None,
) -> Connection:
    if options.address is not None:
        return VLLMServer(model, options, max_slots=max_slots)
    if needs_tokenizer and not hasattr(tokenizer, "save_pretrained"):
        raise GenerationError(
            f"vLLM looks for stop_strings by a tokenizer of transformers, and this one is a "
            f"{type(tokenizer).__name__}; use stop_token_ids, or engine='native'"
        )
    used = tokenizer if needs_tokenizer else None
    return VLLMProcess(model, options, tokenizer=used, max_slots=max_slots, max_cache_bytes=max_cache_bytes)


def _request(index: int, sample: Sample) -> TokenRequest:
    return TokenRequest(index, tuple(sample.prompt), sample.max_new_tokens, sample.key % (1 << 63))


def _sampling(params: SamplingParams, stop: StopRule) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` that all requests of a call share."""
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "min_tokens": params.min_new_tokens,
        "stop_token_ids": sorted(stop.token_ids),
        "ignore_eos": True,
        "detokenize": bool(params.stop_strings),
    }
    if params.stop_strings:
        sampling |= {"stop": list(params.stop_strings), "skip_special_tokens": False}
    return sampling


def _fill(sample: Sample, response: TokenResponse, stop: StopRule) -> None:
    """Add a response to its sample, up to the token that ends it by the native engine's stop rule."""
    count = stop.take(sample, response.token_ids, response.logprobs)
    if not math.isfinite(sum(response.logprobs[:count])):
        raise not_finite([sample.sample_id], 1)
    if sample.finish_reason is None:  # a stop string that the tokenizer of vLLM decodes otherwise
        sample.finish_reason = "stop" if response.reason == "stop" else "length"
