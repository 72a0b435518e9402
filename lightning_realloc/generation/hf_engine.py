"""Completions by Hugging Face's own ``generate``: slow, and correct for every model that has one.

A reference for `GenerationEngine`, and the engine for models whose attention that one does not support. Batches are
padded, unless a model reads its padding. A finished row is computed until its batch ends. Log-probabilities take one
more forward.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.base_engine import Engine, EngineCall
from lightning_realloc.generation.core.capabilities import CAPABILITIES, NATIVE_HINTS
from lightning_realloc.generation.core.model_config import length_bounds
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample, StopRule, Tokenizer
from lightning_realloc.generation.core.sampling import sampling_logprobs
from lightning_realloc.generation.loop.run import DIVERGED, GenerationStats, not_finite
from lightning_realloc.runtime.model.batching_limits import experts_obstacle, generation_obstacle, has_plain_layers
from lightning_realloc.setting_hints import suggest_settings

_log = logging.getLogger(__name__)
_ROUNDING = 0.1
"""Share of the logits' standard deviation up to which a difference counts as rounding."""


@suggest_settings(NATIVE_HINTS)
class HFEngine(Engine):
    """Same interface as `GenerationEngine`, on the model's own ``generate``.

    Greedy responses equal the native engine's. Sampled ones follow the same distribution with other random numbers,
    which depend on ``params.seed``, the first sample's id and the batch. ``length_hints`` sort prompts into batches,
    and ``on_finished`` is called after each batch.
    """

    name = "hf"
    capabilities = CAPABILITIES["hf"]

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Tokenizer | None = None,
        max_slots: int = 64,
        max_length: int | None = None,
    ) -> None:
        """Take the settings of `GenerationEngine` that apply; ``max_slots`` is the size of a batch.

        Raises:
            GenerationError: for a model without ``generate``, or whose ``generate`` counts positions differently than
                its forward.
        """
        if not callable(getattr(model, "generate", None)):
            raise GenerationError(
                f"{type(model).__name__} has no generate() of its own; give a causal language model of transformers"
            )
        reason = generation_obstacle(model)
        if any(hasattr(module, "recurrent_states") for module in model.modules()):  # RecurrentGemma
            reason = "its layers keep the state of one call, and the next generate() continues from it"
        if reason is not None:
            raise GenerationError(
                f"{type(model).__name__} cannot be generated from: {reason}; use a decoder-only model such as Llama"
            )
        super().__init__(model, tokenizer=tokenizer, max_slots=max_slots, max_length=max_length)
        self._model: Any = model
        self._may_pad: bool | None = None
        """Whether a batch may be padded; None: not checked yet."""

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def release(self) -> None:
        """Do nothing: no storage is kept between calls."""

    def _complete(self, call: EngineCall) -> GenerationStats:
        failing = experts_obstacle(self._model)
        if failing is not None:
            raise GenerationError(f"{type(self._model).__name__} cannot generate: {'; '.join(failing)}")
        samples, stats = call.samples, GenerationStats()
        context = min(length_bounds(self._model, None).values(), default=math.inf)
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                torch.manual_seed(samples[0].key >> 1 if samples else 0)
                for batch in _batches(
                    call.longest_first(), most=self._max_slots, context=context, pads=self._pads(samples)
                ):
                    stats = self._run_batch(batch, call.params, call.stop, stats)
                    call.notifier.report(batch)
        finally:
            for module in training:
                module.training = True
        return stats

    def _pads(self, samples: Sequence[Sample]) -> bool:
        """Return whether prompts of different lengths may share a batch; checked once, when there are any.

        Some families ignore the mask of a padded batch, as Reformer does. Others attend to blocks, or to a number of
        tokens, which padding shifts for long sequences only.
        """
        prompts = sorted({sample.prompt for sample in samples}, key=len)
        if self._may_pad is None and prompts and len(prompts[0]) < len(prompts[-1]):
            width = len(prompts[-1])
            self._may_pad = has_plain_layers(self._model) and _heeds_padding(self._model, prompts[0], width=width)
            if not self._may_pad:
                _log.warning(
                    "%s may predict other tokens after a padded prompt, so batches hold prompts of one length only",
                    type(self._model).__name__,
                )
        return self._may_pad is not False

    def _run_batch(
        self, samples: Sequence[Sample], params: SamplingParams, stop: StopRule, stats: GenerationStats
    ) -> GenerationStats:
        """Complete some samples, and return the stats with theirs added."""
        width = max(len(sample.prompt) for sample in samples)
        ids, mask = _padded([sample.prompt for sample in samples], width, self._device)
        # Copies that the stopping criterion extends.
        rows = [Sample(s.sample_id, s.prompt_number, s.input, s.max_new_tokens, s.key) for s in samples]
        criteria = StoppingCriteriaList([_Stops(rows, stop)])
        try:
            with _in_place_of_own(self._model, _config(params, samples, stop)):
                output = self._model.generate(ids, attention_mask=mask, stopping_criteria=criteria)
        except RuntimeError as error:
            if "probability tensor" not in str(error):  # torch.multinomial's message, which names no rows
                raise
            raise GenerationError(
                f"the model's logits are not finite for some of the {len(samples)} sample ids "
                f"{[sample.sample_id for sample in samples[:8]]}{'…' if len(samples) > 8 else ''}; {DIVERGED}"
            ) from error
        for sample, row in zip(samples, rows, strict=True):
            logprobs = self._logprobs(sample, row.token_ids, params)
            sample.grow(row.token_ids, logprobs)
            sample.finish_reason = row.finish_reason
        bad = [sample.sample_id for sample in samples if not math.isfinite(sum(sample.logprobs))]
        if bad:
            raise not_finite(bad, len(samples))
        num_steps = output.shape[1] - width
        return replace(
            stats,
            num_steps=stats.num_steps + num_steps,
            row_steps=stats.row_steps + num_steps * len(samples),
            prefill_tokens=stats.prefill_tokens + sum(len(sample.prompt) for sample in samples),
            generated_tokens=stats.generated_tokens + sum(len(sample.token_ids) for sample in samples),
        )

    def _logprobs(self, sample: Sample, response: Sequence[int], params: SamplingParams) -> list[float]:
        ids = torch.tensor([[*sample.prompt, *response]], device=self._device)
        logits: Tensor = self._model(ids, use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
        values: list[float] = sampling_logprobs(logits, ids[0, len(sample.prompt) :], params).tolist()
        return values


@contextmanager
def _in_place_of_own(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace a model's ``generation_config``, which would otherwise fill the gaps of one that is passed."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _heeds_padding(model: Any, prompt: Sequence[int], *, width: int) -> bool:
    """Return whether ``model`` predicts the same after a prompt that is padded to ``width``, up to rounding.

    Two tokens are compared: the first follows from reading the prompt, the second from the cache.
    """
    config = GenerationConfig(
        max_new_tokens=2, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    logits: list[Tensor] = []
    for length in (len(prompt), width):
        ids, mask = _padded([prompt], length, next(model.parameters()).device)
        with _in_place_of_own(model, config):
            logits.append(torch.cat(model.generate(ids, attention_mask=mask).logits).float())
    expected, padded = logits
    if expected.isfinite().all() and not padded.isfinite().all():  # as in float64, where rows of padding have no softmax
        return False
    differs = (expected - padded).square().mean(-1).sqrt() > _ROUNDING * expected.std(-1)  # False if not finite
    return not bool(differs.any())


def _padded(prompts: Sequence[Sequence[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids (B, width) and mask (B, width) of prompts.

    Padding repeats a prompt's first token, because a repetition penalty counts padding too.
    """
    ids = [[prompt[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _batches(samples: Iterable[Sample], *, most: int, context: float, pads: bool = True) -> list[list[Sample]]:
    """Return samples in batches whose rows all stay within the model's context.

    A finished row is computed until the last one of its batch ends, and models with learned positions have none beyond
    their context. ``pads``: prompts of a batch may differ in length.
    """
    if not pads:
        samples = sorted(samples, key=lambda sample: len(sample.prompt))
    batches: list[list[Sample]] = []
    longest_prompt, longest_response = 0, 0
    for sample in samples:
        is_alike = pads or longest_prompt == len(sample.prompt)
        longest_prompt = max(longest_prompt, len(sample.prompt))
        longest_response = max(longest_response, sample.max_new_tokens)
        is_full = not batches or len(batches[-1]) == most or longest_prompt + longest_response > context
        if is_full or not is_alike:
            batches.append([])
            longest_prompt, longest_response = len(sample.prompt), sample.max_new_tokens
        batches[-1].append(sample)
    return batches


class _Stops(StoppingCriteria):
    """Ends each row of a batch by the native engine's stop rule."""

    def __init__(self, rows: Sequence[Sample], stop: StopRule) -> None:
        self._rows = rows
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **others: Any) -> Tensor:
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            if row.finish_reason is None:
                row.append(token, 0.0)
                self._stop.update(row)
        return torch.tensor([row.finish_reason is not None for row in self._rows], device=input_ids.device)


def _config(params: SamplingParams, samples: Sequence[Sample], stop: StopRule) -> GenerationConfig:
    sampling: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        sampling = {
            "do_sample": True, "temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p,
            "min_p": params.min_p or None,
        }  # fmt: skip
    early = sorted(stop.token_ids) if params.min_new_tokens else []
    return GenerationConfig(
        max_new_tokens=max(sample.max_new_tokens for sample in samples),
        min_new_tokens=params.min_new_tokens if early else None,
        # Only tokens that may not come early: rows end by the criterion, which knows stop strings and limits too.
        eos_token_id=early or None,
        repetition_penalty=params.repetition_penalty,
        pad_token_id=0,
        **sampling,
    )
