"""Prompts in, completions out, on the weights that a Hugging Face model holds right now.

Every step is one forward of one packed row: the tokens of newly admitted prompts and one token of each running sample.
The scheduler says who runs where, the cache holds keys and values, the sampler picks tokens; this module connects them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.attention import (
    STEP_ARGUMENT,
    PackedStep,
    check_supported,
    segments_of,
    slot_attention,
)
from lightning_realloc.generation.kv_cache import SlotCache
from lightning_realloc.generation.samples import Completion, Sample, StopRule, Tokenizer
from lightning_realloc.generation.sampling import SamplingParams, keyed_uniforms, sample_key, sample_tokens
from lightning_realloc.generation.scheduler import Admission, Prompt, Scheduler

_CAPACITY_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What the last call of `GenerationEngine.generate` did on this rank."""

    num_steps: int = 0
    """Forwards."""
    row_steps: int = 0
    """Tokens of running samples, summed over steps."""
    prefill_tokens: int = 0
    generated_tokens: int = 0
    cache_bytes: int = 0


class GenerationEngine:
    """Continuous batching on a Hugging Face decoder, through transformers' attention registry.

    The model is used as it is: every forward reads its parameters anew, so all that a weight update has to do is to
    happen between two calls. Output is a function of weights, prompts, ``params.seed`` and sample ids; slots, batch
    composition and layout enter only through the rounding of matrix products of other shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Tokenizer | None = None,
        max_slots: int = 64,
        max_length: int | None = None,
        lockstep: Callable[[bool], bool] | None = None,
    ) -> None:
        """Remember the model; nothing is allocated before the first `generate`.

        ``max_length`` bounds prompt plus response, besides the model's own context. ``lockstep`` is for models whose
        forward is collective: called before every step with "this rank has work", it returns whether any rank has, and
        a rank without work then joins with a dummy token.

        Raises:
            GenerationError: for a model that the engine cannot run; see :func:`check_supported`.
        """
        check_supported(model, max_length=1)
        if max_slots < 1:
            raise GenerationError(f"max_slots={max_slots} must be at least 1")
        self._model = model
        self._tokenizer = tokenizer
        self._max_slots = max_slots
        self._max_length = max_length
        self._lockstep = lockstep
        self._cache = SlotCache()
        self._stats = GenerationStats()

    @property
    def stats(self) -> GenerationStats:
        """What the last call did."""
        return self._stats

    def weights_updated(self) -> None:
        """Say that the parameters changed. Nothing computed from them outlives a call, so there is nothing to drop."""

    def release(self) -> None:
        """Give the cache's storage back; the next call allocates it again."""
        self._cache.release()

    @torch.no_grad()  # not inference_mode: its tensors break a later training forward under FSDP
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        sample_ids: Sequence[int] | None = None,
        length_hints: Sequence[int] | None = None,
        token_limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Return ``params.n`` completions per prompt, those of one prompt adjacent, in the order of the prompts.

        ``sample_ids`` holds one distinct id per completion (default: their order) and keys their randomness.
        ``length_hints`` holds an expected response length per prompt: long ones start first. ``token_limits`` holds a
        bound per prompt that may lower ``params.max_new_tokens``.

        Args:
            prompts: Token ids of each prompt; text is for the tokenizer first.
            params: By default ``SamplingParams()``.

        Raises:
            GenerationError: for what cannot be generated from, and for logits that are not finite.
        """
        params = params or SamplingParams()
        samples = self._make_samples(prompts, params, sample_ids, token_limits)
        longest = max((len(sample.prompt) + sample.max_new_tokens for sample in samples), default=1)
        check_supported(self._model, max_length=longest)
        stop = StopRule(
            token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids()),
            strings=params.stop_strings,
            tokenizer=self._tokenizer,
            min_new_tokens=params.min_new_tokens,
        )
        num_slots = max(1, min(self._max_slots, len(samples)))
        scheduler = Scheduler(_waiting_prompts(samples, params.n, length_hints), num_slots=num_slots)
        run = _Run(self._model, self._cache, scheduler, samples, params, stop, num_slots, longest)
        try:
            with slot_attention(self._model):
                while self._anybody_has_work(scheduler.has_work):
                    run.step()
        except BaseException:
            self._cache.release()  # it may hold values that are not finite
            raise
        self._stats = run.stats()
        return [sample.completion() for sample in samples]

    def _anybody_has_work(self, has_work: bool) -> bool:
        return has_work if self._lockstep is None else self._lockstep(has_work)

    def _make_samples(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        sample_ids: Sequence[int] | None,
        token_limits: Sequence[int] | None,
    ) -> list[Sample]:
        total = len(prompts) * params.n
        ids = list(range(total)) if sample_ids is None else [int(sample_id) for sample_id in sample_ids]
        if len(ids) != total or len(set(ids)) != total:
            raise GenerationError(
                f"{len(prompts)} prompts with n={params.n} need {total} distinct sample_ids, "
                f"got {len(ids)} of which {len(set(ids))} distinct"
            )
        limits = _per_prompt("token_limits", token_limits, len(prompts), params.max_new_tokens)
        samples = []
        for index, given in enumerate(prompts):
            prompt, room = self._check_prompt(index, given)
            limit = min(params.max_new_tokens, limits[index], room)
            if limit < 1:
                raise GenerationError(f"token_limits[{index}]={limits[index]} must be at least 1")
            for sample_id in ids[index * params.n : (index + 1) * params.n]:
                samples.append(Sample(sample_id, index, prompt, limit, sample_key(params.seed, sample_id)))
        return samples

    def _check_prompt(self, index: int, given: Sequence[int]) -> tuple[list[int], int]:
        """Return the prompt as a list, and how many tokens can follow it."""
        prompt = _token_ids(index, given)
        if not prompt:
            raise GenerationError(
                f"prompt {index} is empty; give it at least one token, for example the tokenizer's BOS"
            )
        config: Any = self._model.config
        text = config.get_text_config()
        if not 0 <= min(prompt) <= max(prompt) < text.vocab_size:
            raise GenerationError(
                f"prompt {index} holds token ids from {min(prompt)} to {max(prompt)}, the model's vocabulary has "
                f"{text.vocab_size}; use the model's own tokenizer"
            )
        context = getattr(text, "max_position_embeddings", None)
        bounds = {"the model's max_position_embeddings": context, "the engine's max_length": self._max_length}
        for name, bound in bounds.items():
            if bound is not None and len(prompt) >= bound:
                raise GenerationError(
                    f"prompt {index} holds {len(prompt)} tokens and leaves no room for a response within {name} of "
                    f"{bound}; shorten the prompt to at most {bound - 1} tokens or drop it from the data"
                )
        return prompt, min((bound for bound in bounds.values() if bound is not None), default=2**62) - len(prompt)

    def _eos_ids(self) -> frozenset[int]:
        for holder in (getattr(self._model, "generation_config", None), self._model.config):
            eos = getattr(holder, "eos_token_id", None)
            if eos is not None:
                return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
        return frozenset()


class _Run:
    """One call of `GenerationEngine.generate`: all of its state, dropped at its end."""

    def __init__(
        self,
        model: nn.Module,
        cache: SlotCache,
        scheduler: Scheduler,
        samples: Sequence[Sample],
        params: SamplingParams,
        stop: StopRule,
        num_slots: int,
        longest: int,
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._cache = cache
        self._scheduler = scheduler
        self._samples = samples
        self._params = params
        self._stop = stop
        self._num_slots = num_slots
        self._longest = longest
        self._num_steps = self._row_steps = self._prefill_tokens = 0

    def step(self) -> None:
        """Admit, run one forward, and take every running sample one token further."""
        admissions = self._admit()
        running = [self._samples[index] for index in self._scheduler.running if index is not None]
        logits = self._forward(admissions, running)
        self._num_steps += 1
        self._row_steps += len(running)
        if running:
            self._take_tokens(logits, running)

    def stats(self) -> GenerationStats:
        """Return the counts so far."""
        generated = sum(len(sample.token_ids) for sample in self._samples)
        return GenerationStats(self._num_steps, self._row_steps, self._prefill_tokens, generated, self._cache.num_bytes)

    def _admit(self) -> list[Admission]:
        """Carry out the scheduler's turn and return the admissions whose prompts have to be computed."""
        turn = self._scheduler.next_turn()
        for admission in turn.admissions:
            if admission.source is not None:
                targets = [slot for slot in admission.slots if slot != admission.source]
                self._cache.copy(admission.source, targets, self._samples[admission.samples[0]].position)
        for move in turn.moves:
            sample = self._scheduler.running[move.target]
            assert sample is not None, f"slot {move.target} was filled by a move and has no sample"
            self._cache.copy(move.source, [move.target], self._samples[sample].position)
        return [admission for admission in turn.admissions if admission.source is None]

    def _forward(self, admissions: Sequence[Admission], running: Sequence[Sample]) -> Tensor:
        """Return the logits (B, V) of every running sample's last token; those of a dummy if there is none."""
        # The prompt's last token is left to the decode part, so that new and old samples are alike from here on.
        prefixes = [self._samples[admission.samples[0]].prompt[:-1] for admission in admissions]
        segments = segments_of([len(prefix) for prefix in prefixes], [admission.slots for admission in admissions])
        tokens = [sample.last_token for sample in running] or [0]
        positions = [sample.position for sample in running] or [0]
        max_length = max(positions) + 1
        self._make_room(max_length)
        num_prefill = sum(map(len, prefixes))
        self._prefill_tokens += num_prefill
        all_tokens = [token for prefix in prefixes for token in prefix] + tokens
        all_places = [place for prefix in prefixes for place in range(len(prefix))] + positions
        ids, places = torch.tensor([[all_tokens], [all_places]], device=self._device).unbind()
        step = PackedStep(self._cache, segments, num_prefill, places[0, num_prefill:], max_length)
        output = self._model(
            input_ids=ids, position_ids=places, use_cache=False, logits_to_keep=len(tokens), **{STEP_ARGUMENT: step}
        )
        logits: Tensor = output.logits[0, -len(tokens) :]
        return logits

    def _take_tokens(self, logits: Tensor, running: Sequence[Sample]) -> None:
        keys, taken = [sample.key for sample in running], [len(sample.token_ids) for sample in running]
        uniforms = torch.tensor(keyed_uniforms(keys, taken), dtype=torch.float64, device=self._device)
        drawn, of_drawn = sample_tokens(logits, uniforms, self._params, forbidden=self._forbidden(running))
        tokens, logprobs = drawn.tolist(), of_drawn.tolist()
        if not math.isfinite(sum(logprobs)):
            self._raise_not_finite(running, logprobs)
        for slot, sample in enumerate(running):
            sample.append(tokens[slot], logprobs[slot])
            if self._stop.update(sample):
                self._scheduler.finish(slot)

    def _forbidden(self, running: Sequence[Sample]) -> tuple[list[int], list[int]] | None:
        if not self._params.min_new_tokens or not self._stop.token_ids:
            return None
        rows = [row for row, sample in enumerate(running) if len(sample.token_ids) < self._params.min_new_tokens]
        return (rows, sorted(self._stop.token_ids)) if rows else None

    def _make_room(self, length: int) -> None:
        if length > self._cache.capacity or self._num_slots > self._cache.num_slots:
            rounded = -(-length // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE
            grown = rounded if length <= self._cache.capacity else max(rounded, 2 * self._cache.capacity)
            self._cache.reserve(self._num_slots, max(length, min(grown, self._longest)))

    def _raise_not_finite(self, running: Sequence[Sample], logprobs: Sequence[float]) -> None:
        bad = [sample.sample_id for sample, value in zip(running, logprobs, strict=True) if not math.isfinite(value)]
        raise GenerationError(
            f"the model's logits are not finite for sample ids {bad[:8]} ({len(bad)} of {len(running)} running); "
            "the weights have diverged or overflow their dtype: lower the learning rate, or use bfloat16 for float16"
        )


def _token_ids(index: int, given: Any) -> list[int]:
    try:
        return [operator.index(token) for token in (given.tolist() if isinstance(given, Tensor) else given)]
    except TypeError as error:
        text = repr(given)
        raise GenerationError(
            f"prompt {index} must be a list of token ids; it is {text if len(text) <= 60 else text[:57] + '...'}, "
            f'turn text into ids first: tokenizer(texts)["input_ids"]'
        ) from error


def _waiting_prompts(samples: Sequence[Sample], n: int, length_hints: Sequence[int] | None) -> Iterable[Prompt]:
    hints = _per_prompt("length_hints", length_hints, len(samples) // n, 0)
    for index, hint in enumerate(hints):
        yield Prompt(index, samples[index * n].position, tuple(range(index * n, (index + 1) * n)), hint)


def _per_prompt(name: str, given: Sequence[int] | None, num_prompts: int, default: int) -> Sequence[int]:
    if given is None:
        return [default] * num_prompts
    if len(given) != num_prompts:
        raise GenerationError(f"{name} must hold one number per prompt: got {len(given)} for {num_prompts} prompts")
    return given
