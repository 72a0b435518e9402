"""Prompts in, completions out, on the weights that a Hugging Face model holds right now.

This module checks what it is given and keeps what outlives a call; `run` carries one call out.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.attention import check_supported, slot_attention
from lightning_realloc.generation.drafters import build_drafter
from lightning_realloc.generation.drafting import Drafter
from lightning_realloc.generation.kv_cache import SlotCache
from lightning_realloc.generation.noise import sample_key
from lightning_realloc.generation.packed_linear import packed_linears
from lightning_realloc.generation.run import GenerationRun, GenerationStats
from lightning_realloc.generation.runner import ModelRunner
from lightning_realloc.generation.samples import Completion, Sample, StopRule, Tokenizer
from lightning_realloc.generation.sampling import SamplingParams
from lightning_realloc.generation.scheduler import Prompt, Scheduler
from lightning_realloc.generation.speculation import Speculation
from lightning_realloc.generation.speculator import Speculator


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
        speculation: Speculation | None = None,
        drafter: Drafter | None = None,
        agree: Callable[[Sequence[float]], Sequence[float]] | None = None,
        pack_weights: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Remember the model; nothing is allocated before the first `generate`.

        ``max_length`` bounds prompt plus response, besides the model's own context. ``lockstep`` is for models whose
        forward is collective: called before every step with "this rank has work", it returns whether any rank has, and
        a rank without work then joins with a dummy token.

        ``speculation`` drafts tokens ahead and verifies several at once; None: one token at a time. ``drafter`` takes
        the place of the one that it names. ``agree`` is for models in tensor parallelism: given this rank's measured
        seconds, it returns those that all ranks of the group go by, such as the first one's.
        ``clock`` tells the seconds by which depths are planned and ``stats`` are counted; on a machine shared with
        others ``time.process_time`` says more about this process.

        ``pack_weights`` lets long generations on CPU copy linear layers' weights into the order that their products
        are fastest with, and drop the copies at the end; False: it saves the memory of the copies.

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
        self._pack_weights = pack_weights
        speculation = speculation or Speculation(drafter="none", num_draft_tokens=0)
        self._speculator = Speculator(
            speculation, drafter or build_drafter(speculation, model), agree=agree, clock=clock
        )
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
        runner = ModelRunner(self._model, self._cache, num_slots=num_slots, longest=longest)
        run = GenerationRun(runner, scheduler, samples, params, stop, self._speculator, num_slots)
        num_steps = max((sample.max_new_tokens for sample in samples), default=0) if self._pack_weights else 0
        try:
            with (
                slot_attention(self._model),
                packed_linears(self._model, num_slots=num_slots, num_steps=num_steps),
                run,
            ):
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
