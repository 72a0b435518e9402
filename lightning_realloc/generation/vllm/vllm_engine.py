"""Completions by vLLM, with the interface of `GenerationEngine`.

vLLM draws by its own random numbers: responses differ from the native engine's, and follow the same distribution.
Each turn of a conversation is a request of its own, and so is the rest of a response that a budget cut. Arguments that
need the native engine's caches or steps are refused: drafts, samples that move.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.errors import GenerationError, ReallocError
from lightning_realloc.generation.base_engine import Engine, EngineCall, GivenWeights
from lightning_realloc.generation.core.capabilities import CAPABILITIES, NATIVE_HINTS
from lightning_realloc.generation.core.model_config import length_bounds
from lightning_realloc.generation.core.noise import stream_key
from lightning_realloc.generation.core.params import SamplingParams, check_counts
from lightning_realloc.generation.core.sample import Sample, StopRule, Tokenizer
from lightning_realloc.generation.loop.environment import Agree
from lightning_realloc.generation.loop.rounds import Rounds
from lightning_realloc.generation.loop.run import Budget, GenerationStats, not_finite
from lightning_realloc.generation.vllm.hand_over import SharedMemoryHandOver, weights_of
from lightning_realloc.generation.vllm.hand_over_proof import HandedModel, HandOverProof
from lightning_realloc.generation.vllm.lone_adapters import adapter_names, adapter_settings, adapters_of
from lightning_realloc.generation.vllm.messages import Connection, OnResponse, TokenRequest, TokenResponse
from lightning_realloc.generation.vllm.process import VLLMProcess
from lightning_realloc.generation.vllm.service import VLLMService
from lightning_realloc.generation.vllm.tensor_ranks import GroupBudget, TensorRanks
from lightning_realloc.generation.vllm.vllm_options import VLLMOptions
from lightning_realloc.generation.vllm.vllm_server import VLLMServer
from lightning_realloc.runtime.dtypes import dtype_name
from lightning_realloc.runtime.model.batching_limits import has_experts
from lightning_realloc.runtime.model.image_inputs import placeholder_ids
from lightning_realloc.runtime.model.structure import check_extra_inputs
from lightning_realloc.runtime.transfer.agreement import WeightVerification
from lightning_realloc.setting_hints import suggest_settings

_TEMPERATURES = (0.01, 2.0)
"""Least and greatest temperature with which vLLM draws. It refuses greater ones, and raises smaller ones silently."""
_NEVER = torch.finfo(torch.float32).min
"""Added to logits of tokens that may not be drawn; finite, since JSON has no infinities."""


@suggest_settings(NATIVE_HINTS)
class VLLMEngine(Engine):
    """Same interface as `GenerationEngine`, by a vLLM that gets the model's weights before each call on new ones.

    Greedy responses equal the native engine's up to rounding. Sampled ones follow the same distribution with other
    random numbers, which depend on ``params.seed`` and the sample's id. ``length_hints`` order the requests.

    `generate` raises `EngineLost` if vLLM ends or falls silent, and may not be restarted.

    Args:
        model: The model whose weights vLLM gets.
        tokenizer: Decodes responses for stop strings.
        max_slots: Most samples that vLLM runs at a time.
        max_cache_bytes: Bytes of vLLM's keys and values; None: see ``VLLMOptions.memory_share``, on CPU 1 GiB.
        options: Where vLLM is, and how it starts.
        service: A vLLM that an earlier engine of the same model left running; None: one is started when needed.
        ranks: Ranks that hold shards of the model, and call the engine together; None: it is whole on this rank.
        agree: Broadcasts numbers of the first of these ranks; None with ``ranks=None``.
        verify_weights: Elements that are compared after vLLM got weights: "sampled" ones, "all" or none ("off").
        handed: Names of the model for errors of this comparison.
    """

    name = "vllm"
    capabilities = CAPABILITIES["vllm"]

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Tokenizer | None = None,
        max_slots: int = 64,
        max_cache_bytes: int | None = None,
        options: VLLMOptions | None = None,
        service: VLLMService | None = None,
        ranks: TensorRanks | None = None,
        agree: Agree | None = None,
        verify_weights: WeightVerification = "sampled",
        handed: HandedModel | None = None,
    ) -> None:
        self._options, self._ranks = options or VLLMOptions(), ranks
        super().__init__(
            model, tokenizer=tokenizer, max_slots=max_slots, max_length=self._options.max_length, agree=agree
        )
        check_counts(optional=True, max_cache_bytes=max_cache_bytes)
        self._check_weights(model)
        if self._options.sleep and next(model.parameters()).device.type == "cpu" and self._options.address is None:
            raise GenerationError("sleep=True frees memory of a GPU, and the model is on the CPU; leave sleep out")
        if self._options.quantization is not None:
            _check_quantization(self._options.quantization, model)
        # Without the model: the service may outlive it.
        proof = HandOverProof(verify_weights, handed or HandedModel(), ranks) if service is None else service.proof
        connect = partial(
            _connect,
            options=self._options,
            proof=proof,
            tokenizer=tokenizer,
            max_slots=max_slots,
            max_cache_bytes=max_cache_bytes,
            ranks=ranks,
        )
        self.service = service or VLLMService(connect, restarts=self._options.num_restarts, proof=proof)
        self._given_before = self.service.given
        self._hand_over = SharedMemoryHandOver(ranks=ranks)
        """Writes this rank's shards for the first rank; unused there."""

    def _check_weights(self, model: nn.Module) -> None:
        """Raise GenerationError for weights that vLLM, or this way to it, cannot take over."""
        weights_of(model)
        if adapter_names(model) and not self._options.merge_adapters:
            adapter_settings(model)
            if self._options.address is not None:
                raise GenerationError(
                    f"the server {self._options.address} takes whole weights, and the model has adapters; set "
                    f"VLLMOptions(merge_adapters=True), or leave address out"
                )
        if self._ranks is not None and placeholder_ids(model):
            raise GenerationError(
                f"{type(model).__name__} reads images, and its weights go to vLLM from ranks that hold whole ones; "
                f"generate in a layout with tp=1, or use engine='native'"
            )

    @property
    def merges_adapters(self) -> bool:
        """Whether vLLM gets weights with merged adapters."""
        return self._options.merge_adapters

    @property
    def given_weights(self) -> GivenWeights:
        """Weights that vLLM was given in the last call."""
        before, now = self._given_before, self.service.given
        return GivenWeights(
            now.num_bytes - before.num_bytes, now.seconds - before.seconds, now.check_s - before.check_s
        )

    def weights_updated(self, version: int | None = None) -> None:
        """Set the version of updated parameters; vLLM gets them before the next call."""
        super().weights_updated(version)
        self.service.proof.version = self._version
        self.service.weights_changed()

    def release(self) -> None:
        """Free the device's memory, if ``VLLMOptions.sleep`` asks for it."""
        if self._options.sleep:
            self.service.sleep()

    def _length_bounds(self) -> Mapping[str, int]:
        return length_bounds(self._model, self.service.max_length or self._max_length)

    def _place_extra_inputs(self, samples: Sequence[Sample]) -> None:
        """Check that further inputs are those of images, which vLLM makes itself, and images those of the prompts."""
        if others := sorted({name for one in samples if one.input.images is None for name in one.input.extras}):
            self._check_extra_inputs(others)
        shown = sorted({name for one in samples if one.input.images is not None for name in one.input.extras})
        check_extra_inputs(self._model, shown)
        if shown and self._options.address is not None:
            raise GenerationError(
                f"the prompts show images, and the server {self._options.address} would expand the tokens that stand "
                f"for them again; leave address out for a process of the run's own, or use engine='native'"
            )

    def _complete(self, call: EngineCall) -> GenerationStats:
        counts, sampling = Counter[str](), _sampling(call.params, call.stop)
        self._given_before = self.service.given
        budget = self._budget(call)
        for sample in call.samples:  # resumed ones may be at the end of a turn
            call.stop.already_ends(sample)

        def complete_turns(samples: Sequence[Sample], on_ended: Callable[[Sequence[Sample]], None]) -> None:
            asked = [_request(index, sample, call) for index, sample in enumerate(samples)]

            def accept(response: TokenResponse) -> None:
                sample = samples[response.index]
                counts["generated_tokens"] += _fill(sample, response, call.stop)
                counts["prefill_tokens"] += len(asked[response.index].prompt)
                if budget is not None:
                    budget.spend(len(response.token_ids))
                if sample.finish_reason is not None:
                    on_ended([sample])

            counts["num_steps"] += self._ask(asked, sampling, accept, budget) if asked else 0

        asks = self._ranks is None or self._ranks.is_first
        given = call.longest_first(), call.requests, call.notifier
        Rounds(*given, waits=self.waits, agree=self._agree, asks=asks, budget=budget).run(complete_turns)
        return GenerationStats(row_steps=counts["generated_tokens"], **counts)

    def _budget(self, call: EngineCall) -> Budget | None:
        """Return the budget of a call; None without one. While vLLM starts and gets weights, its seconds stand still.

        Raises:
            GenerationError: for a running server.
        """
        asked, agree = call.requests, self._agree
        if asked.token_budget is None and asked.seconds_budget is None:
            return None
        if self._options.address is not None:
            raise GenerationError(
                f"a budget cuts responses, and the server {self._options.address} returns whole ones; leave address "
                f"out for a process of the run's own, or leave the budget out"
            )

        def clock() -> float:
            now = time.monotonic() - self.service.preparing_s
            return now if agree is None else agree([now])[0]

        return Budget(asked.token_budget, asked.seconds_budget, clock, asked.may_stop or (lambda: True))

    def _ask(
        self,
        requests: Sequence[TokenRequest],
        sampling: Mapping[str, Any],
        accept: OnResponse,
        budget: Budget | None,
    ) -> int:
        """Complete all requests, or leave them by the budget, and return the number of forward passes.

        Tensor-parallel ranks get responses together, at decisions about the budget and at the end, from the first
        one: they must end the same turns together.
        """
        if self._ranks is None:
            return self.service.generate(self._model, requests, sampling, accept, budget)
        if self._ranks.is_first:
            shared = None if budget is None else GroupBudget(self._ranks, accept, budget)
            result = self._asked_for_all(requests, sampling, shared)
            self._ranks.finish(result)
        else:
            decide = None if budget is None else GroupBudget(None, accept, budget).decided
            result = self._ranks.follow(self._give_shards, decide)
        responses, num_steps, problem = result
        if problem is not None:
            raise problem
        for response in responses:
            accept(response)
        return int(num_steps)

    def _asked_for_all(
        self, requests: Sequence[TokenRequest], sampling: Mapping[str, Any], budget: GroupBudget | None
    ) -> tuple[list[TokenResponse], int, ReallocError | None]:
        responses: list[TokenResponse] = []

        def keep(response: TokenResponse) -> None:
            (responses if budget is None else budget.responses).append(response)

        try:
            num_steps = self.service.generate(self._model, requests, sampling, keep, budget)
        except ReallocError as error:
            if budget is not None and budget.has_failed:  # on all ranks alike
                raise
            return [], 0, error
        return responses if budget is None else budget.responses, num_steps, None

    def _give_shards(self, said: Mapping[str, Any]) -> None:
        """Write this rank's shards where the first rank says, or send it their checksums."""
        weights = adapters_of(self._model) if said["kind"] == "adapters" else weights_of(self._model)
        if said["do"] == "prove":
            self.service.proof.answer(weights, said)
        else:
            self._hand_over.give(weights, said["handle"])


def _check_quantization(name: str, model: Any) -> None:
    """Raise GenerationError for weights that vLLM cannot round so, or would leave as they are."""
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise GenerationError(
            f"quantization={name!r} rounds weights of 16 bits, and generation has {dtype_name(dtype)}; set "
            f"precision='bf16-mixed' or 'bf16-true' in the Trainer, or leave quantization out"
        )
    if name == "int8" and not has_experts(model):
        raise GenerationError(
            f"quantization='int8' rounds weights of experts, and {type(model).__name__} has none; use 'fp8'"
        )


def _connect(
    model: Any,
    needs_tokenizer: bool,
    images: PromptImages | None,
    *,
    options: VLLMOptions,
    tokenizer: Tokenizer | None,
    max_slots: int,
    max_cache_bytes: int | None,
    ranks: TensorRanks | None,
    proof: HandOverProof,
) -> Connection:
    if options.address is not None:
        return VLLMServer(model, options, max_slots=max_slots)
    if needs_tokenizer and not hasattr(tokenizer, "save_pretrained"):
        raise GenerationError(
            f"vLLM looks for stop_strings by a tokenizer of transformers, and this one is a "
            f"{type(tokenizer).__name__}; use stop_token_ids, or engine='native'"
        )
    used = tokenizer if needs_tokenizer else None
    return VLLMProcess(
        model,
        options,
        tokenizer=used,
        images=images,
        max_slots=max_slots,
        max_cache_bytes=max_cache_bytes,
        ranks=ranks,
        proof=proof,
    )


def _request(index: int, sample: Sample, call: EngineCall) -> TokenRequest:
    """Return the request for a sample's turn.

    Raises:
        GenerationError: for tokens of an environment that stand for parts of an image.
    """
    if shown := set(call.stop.never_drawn).intersection(sample.token_ids):
        raise GenerationError(
            f"sample {sample.sample_id} has the token {min(shown)} in an answer of its environment, which stands for a "
            f"part of an image, and engine='vllm' reads images of prompts alone; use engine='native'"
        )
    # With the seed of an earlier turn or part of it, vLLM would draw by the same random numbers again.
    key = sample.key if sample.turn == 1 else stream_key(sample.key, sample.turn)
    if not sample.turn_is_open:
        key = stream_key(key, len(sample.token_ids) << 32)
    num_early = min(max(call.params.min_new_tokens - len(sample.token_ids), 0), sample.turn_room)
    images = sample.input.images
    return TokenRequest(index, tuple(sample.sequence), sample.turn_room, num_early, key % (1 << 63), images)


def _sampling(params: SamplingParams, stop: StopRule) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` that all requests of a call share.

    Raises:
        GenerationError: for a temperature that vLLM refuses, or replaces by another one.
    """
    least, most = _TEMPERATURES
    if params.temperature != 0 and not least <= params.temperature <= most:
        raise GenerationError(
            f"temperature={params.temperature} is not among those of vLLM, 0 and {least:g} to {most:g}; set one of "
            f"these, or engine='native'"
        )
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": sorted(stop.token_ids),
        "ignore_eos": True,
        "detokenize": bool(params.stop_strings),
        "logit_bias": dict.fromkeys(stop.never_drawn, _NEVER),
    }
    if params.stop_strings:
        sampling |= {"stop": list(params.stop_strings), "skip_special_tokens": False}
    return sampling


def _fill(sample: Sample, response: TokenResponse, stop: StopRule) -> int:
    """Add a response to its sample, up to the token that ends it by the native engine's stop rule; return how many.

    A response that a budget cut has no finish reason, unless its tokens end it.
    """
    count = stop.take(sample, response.token_ids, response.logprobs)
    if not math.isfinite(sum(response.logprobs[:count])):
        raise not_finite([sample.sample_id], 1)
    if (
        sample.finish_reason is None and response.reason != "unfinished"
    ):  # a stop string that the tokenizer of vLLM decodes otherwise
        sample.finish_reason = "stop" if response.reason == "stop" else "length"
    return count
