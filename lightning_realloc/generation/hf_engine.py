"""Completions by Hugging Face's own ``generate``: slow, and correct for every model that has one.

A reference for `GenerationEngine`, and the engine for models whose attention that one does not support. Batches are
padded, unless a model reads its padding. A finished row is computed until its batch ends. Log-probabilities take one
more forward for each turn.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from lightning_realloc.batch.model_input import joined_inputs
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.base_engine import Engine, EngineCall
from lightning_realloc.generation.core.capabilities import CAPABILITIES, NATIVE_HINTS
from lightning_realloc.generation.core.model_config import length_bounds
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.sample import Sample, StopRule, Tokenizer
from lightning_realloc.generation.core.sampling import sampling_logprobs
from lightning_realloc.generation.loop.environment import Agree
from lightning_realloc.generation.loop.rounds import Rounds
from lightning_realloc.generation.loop.run import DIVERGED, GenerationStats, not_finite
from lightning_realloc.runtime.model.batching_limits import experts_obstacle, generation_obstacle, has_plain_layers
from lightning_realloc.runtime.model.image_inputs import (
    placeholder_ids,
    present_inputs,
    token_types,
)
from lightning_realloc.runtime.parallel.tensor_parallel import tensor_parallel_group
from lightning_realloc.setting_hints import suggest_settings

_log = logging.getLogger(__name__)
_Extras = Sequence[Mapping[str, Tensor]]
"""Further inputs of a sequence: those of its prompt, and of each answer that shows images."""
_ROUNDING = 0.1
"""Share of the logits' standard deviation up to which a difference counts as rounding."""


@suggest_settings(NATIVE_HINTS)
class HFEngine(Engine):
    """Same interface as `GenerationEngine`, on the model's own ``generate``.

    Greedy responses equal the native engine's. Sampled ones follow the same distribution with other random numbers,
    which depend on ``params.seed``, the first sample's id and the batch. ``length_hints`` sort prompts into batches,
    and ``on_finished`` is called after each batch. Conversations go on in `Rounds`, whose batches depend on the time
    that the environment takes.
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
        agree: Agree | None = None,
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
        super().__init__(model, tokenizer=tokenizer, max_slots=max_slots, max_length=max_length, agree=agree)
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
        samples, counts = call.samples, Counter[str]()
        rounds = self._rounds(call)
        context = min(length_bounds(self._model, None).values(), default=math.inf)

        def complete_turns(samples: Sequence[Sample], on_ended: Callable[[Sequence[Sample]], None]) -> None:
            pads = self._pads(samples)
            for batch in _batches(samples, most=self._max_slots, context=context, pads=pads):
                counts.update(self._run_batch(batch, call.params, call.stop))
                on_ended(batch)

        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                torch.manual_seed(samples[0].key >> 1 if samples else 0)
                rounds.run(complete_turns)
        finally:
            for module in training:
                module.training = True
        return GenerationStats(**counts)

    def _rounds(self, call: EngineCall) -> Rounds:
        group = tensor_parallel_group(self._model)
        if call.requests.environment is not None and group is not None and self._agree is None:
            raise GenerationError(
                "ranks in tensor parallelism must take the same answers of an environment, and each would ask "
                "separately; pass HFEngine(agree=...), which gives all ranks the first one's answers"
            )
        asks = group is None or group.index == 0
        given = call.longest_first(), call.requests, call.notifier
        return Rounds(*given, waits=self.waits, agree=self._agree, asks=asks, place=self._placed)

    def _pads(self, samples: Sequence[Sample]) -> bool:
        """Return whether sequences of different lengths may share a batch; checked once, when there are any.

        Some families ignore the mask of a padded batch, as Reformer does. Others attend to blocks, or to a number of
        tokens, which padding shifts for long sequences only. And padding may not repeat a token that stands for a
        further input, which is known for images alone.
        """
        if not placeholder_ids(self._model) and any(map(_extras_of, samples)):
            return False
        by_length = sorted(samples, key=lambda sample: len(sample.sequence)) if self._may_pad is None else []
        if by_length and len(by_length[0].sequence) < len(by_length[-1].sequence):
            width = len(by_length[-1].sequence)
            self._may_pad = has_plain_layers(self._model) and _heeds_padding(self._model, by_length[0], width=width)
            if not self._may_pad:
                _log.warning(
                    "%s may predict other tokens after a padded prompt, so batches hold prompts of one length only",
                    type(self._model).__name__,
                )
        return self._may_pad is not False

    def _run_batch(self, samples: Sequence[Sample], params: SamplingParams, stop: StopRule) -> Mapping[str, int]:
        """Generate the current turn of some samples, and return what it adds to `GenerationStats`, by field."""
        sequences = [sample.sequence for sample in samples]
        # Copies that the stopping criterion extends.
        rows = [
            replace(s, token_ids=[*s.token_ids], logprobs=[*s.logprobs], model_mask=[*s.model_mask]) for s in samples
        ]
        inputs = list(map(_extras_of, samples))
        num_steps = self._generate(sequences, inputs, rows, params, stop)
        num_generated = 0
        for sample, sequence, row, extras in zip(samples, sequences, rows, inputs, strict=True):
            turn = row.token_ids[len(sample.token_ids) :]
            sample.grow(turn, self._logprobs(sequence, turn, extras, params))
            sample.finish_reason = row.finish_reason
            num_generated += len(turn)
        bad = [sample.sample_id for sample in samples if not math.isfinite(sum(sample.logprobs))]
        if bad:
            raise not_finite(bad, len(samples))
        return {
            "num_steps": num_steps,
            "row_steps": num_steps * len(samples),
            "prefill_tokens": sum(map(len, sequences)),
            "generated_tokens": num_generated,
        }

    def _generate(
        self,
        sequences: Sequence[Sequence[int]],
        inputs: Sequence[_Extras],
        rows: Sequence[Sample],
        params: SamplingParams,
        stop: StopRule,
    ) -> int:
        """Add the tokens of a turn to ``rows``, without log-probabilities; return the number of steps."""
        width = max(map(len, sequences))
        arguments = _arguments(self._model, sequences, inputs, width)
        settings = {
            "stopping_criteria": StoppingCriteriaList([_Stops(rows, stop)]),
            "logits_processor": LogitsProcessorList([_EarlyStops(rows, stop)]),
        }
        try:
            with _in_place_of_own(self._model, _config(params, rows)), _passed_once(self._model, inputs):
                output = self._model.generate(**arguments, **settings)
        except RuntimeError as error:
            if "probability tensor" not in str(error):  # torch.multinomial's message, which names no rows
                raise
            raise GenerationError(
                f"the model's logits are not finite for some of the {len(rows)} sample ids "
                f"{[row.sample_id for row in rows[:8]]}{'…' if len(rows) > 8 else ''}; {DIVERGED}"
            ) from error
        num_steps: int = output.shape[1] - width
        return num_steps

    def _logprobs(
        self, before: Sequence[int], turn: Sequence[int], extras: _Extras, params: SamplingParams
    ) -> list[float]:
        sequence = [*before, *turn]
        arguments = _arguments(self._model, [sequence], [extras], len(sequence))
        del arguments["attention_mask"]  # without padding
        logits: Tensor = self._model(**arguments, use_cache=False).logits[0, len(before) - 1 : -1]
        values: list[float] = sampling_logprobs(logits, arguments["input_ids"][0, len(before) :], params).tolist()
        return values


@contextmanager
def _in_place_of_own(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace a model's ``generation_config``, which would otherwise fill the gaps of one that is passed."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _passed_once(model: nn.Module, inputs: Iterable[_Extras]) -> Iterator[None]:
    """Give a model the further inputs of sequences with these alone, and not again with each token of a response.

    Transformers' ``generate`` does so for inputs that it knows.
    """
    names = {name for parts in inputs for extras in parts for name in extras}

    def drop(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        is_prompt = named["input_ids"].shape[1] > 1
        return arguments, {name: value for name, value in named.items() if is_prompt or name not in names}

    if not names:
        yield
        return
    handle = model.register_forward_pre_hook(drop, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _heeds_padding(model: Any, sample: Sample, *, width: int) -> bool:
    """Return whether ``model`` predicts the same after a sample's tokens that are padded to ``width``, up to rounding.

    Two tokens are compared: the first follows from reading the prompt, the second from the cache.
    """
    config = GenerationConfig(
        max_new_tokens=2, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    logits: list[Tensor] = []
    for length in (len(sample.sequence), width):
        arguments = _arguments(model, [sample.sequence], [_extras_of(sample)], length)
        with _in_place_of_own(model, config), _passed_once(model, [_extras_of(sample)]):
            logits.append(torch.cat(model.generate(**arguments).logits).float())
    expected, padded = logits
    if (
        expected.isfinite().all() and not padded.isfinite().all()
    ):  # as in float64, where rows of padding have no softmax
        return False
    differs = (expected - padded).square().mean(-1).sqrt() > _ROUNDING * expected.std(-1)  # False if not finite
    return not bool(differs.any())


def _arguments(
    model: Any, sequences: Sequence[Sequence[int]], inputs: Sequence[_Extras], width: int
) -> dict[str, Tensor]:
    """Return the arguments with which a model reads sequences on the left of which is padding up to ``width``."""
    device = next(model.parameters()).device
    ids, mask = _padded(sequences, width, placeholder_ids(model))
    extras = joined_inputs(extras for parts in inputs for extras in parts)
    further = {name: values.to(device) for name, values in present_inputs(model, extras).items()}
    if further and placeholder_ids(model):
        taken = inspect.signature(type(model).forward).parameters
        types = token_types(model, ids).to(device)
        further |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), **further}


def _extras_of(sample: Sample) -> _Extras:
    """Return the further inputs of a sample's prompt and of the environment's answers."""
    return sample.extras_between(0, sample.position)


def _padded(sequences: Sequence[Sequence[int]], width: int, placeholders: Collection[int]) -> tuple[Tensor, Tensor]:
    """Return token ids (B, width) and mask (B, width) of sequences, on the host.

    Padding repeats a sequence's first token, because a repetition penalty counts padding too: the first one that stands
    for no part of an image, as each of those takes a feature.
    """
    ids, mask = [], []
    for sequence in sequences:
        num_padding = width - len(sequence)
        repeated = next((token for token in sequence if token not in placeholders), 0)
        ids.append([*[repeated] * num_padding, *sequence])
        mask.append([0] * num_padding + [1] * len(sequence))
    return torch.tensor(ids), torch.tensor(mask)


def _batches(samples: Iterable[Sample], *, most: int, context: float, pads: bool = True) -> list[list[Sample]]:
    """Return samples in batches whose rows all stay within the model's context.

    A finished row is computed until the last one of its batch ends, and models with learned positions have none beyond
    their context. ``pads``: sequences of a batch may differ in length.
    """
    if not pads:
        samples = sorted(samples, key=lambda sample: len(sample.sequence))
    batches: list[list[Sample]] = []
    longest_read, longest_turn = 0, 0
    for sample in samples:
        length = len(sample.sequence)
        is_alike = pads or longest_read == length
        longest_read, longest_turn = max(longest_read, length), max(longest_turn, sample.turn_room)
        is_full = not batches or len(batches[-1]) == most or longest_read + longest_turn > context
        if is_full or not is_alike:
            batches.append([])
            longest_read, longest_turn = length, sample.turn_room
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


class _EarlyStops(LogitsProcessor):
    """Forbids stop tokens in rows whose response has fewer than ``min_new_tokens``."""

    def __init__(self, rows: Sequence[Sample], stop: StopRule) -> None:
        self._rows = rows
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forbidden = self._stop.forbidden(self._rows, [()] * len(self._rows))
        if forbidden is None:
            return scores
        rows, tokens = (torch.tensor(part, device=scores.device) for part in forbidden)
        return scores.index_put((rows, tokens), scores.new_tensor(-math.inf))


def _config(params: SamplingParams, samples: Sequence[Sample]) -> GenerationConfig:
    sampling: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        sampling = {
            "do_sample": True, "temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p,
            "min_p": params.min_p or None,
        }  # fmt: skip
    return GenerationConfig(
        max_new_tokens=max(sample.turn_room for sample in samples),
        eos_token_id=None,  # rows end by the criterion, which knows stop strings and limits too
        repetition_penalty=params.repetition_penalty,
        pad_token_id=0,
        **sampling,
    )
