"""Check a call's arguments and turn them into samples."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from torch import Tensor

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.capabilities import Capability, require_capability
from lightning_realloc.generation.core.model_config import as_token_ids, check_vocabulary
from lightning_realloc.generation.core.noise import sample_key
from lightning_realloc.generation.core.params import SamplingParams, check_kind, is_of_kind
from lightning_realloc.generation.core.sample import Completion, Sample
from lightning_realloc.generation.loop.environment import Conversation, Environment
from lightning_realloc.generation.schedule.slot_plan import Prompt

_log = logging.getLogger(__name__)

_NEEDS: Mapping[str, Capability] = {
    "environment": "environment",
    "conversation": "environment",
    "token_budget": "budget",
    "seconds_budget": "budget",
    "may_stop": "budget",
    "resume": "budget",
    "on_tokens": "stream",
}
"""Argument -> the capability that it needs of the engine."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Arguments of one call of an engine, as `Engine.generate` describes them.

    Each list holds one entry per prompt, followed by one per ``resume``.
    """

    vocabulary: int
    """Tokens of the model's vocabulary."""
    bounds: Mapping[str, int]
    """Most tokens of prompt and response together, by the source of the bound."""
    prompts: Sequence[Sequence[int] | ModelInput]
    params: SamplingParams
    sample_ids: Sequence[int] | None = None
    length_hints: Sequence[int] | None = None
    token_limits: Sequence[int] | None = None
    environment: Environment | None = None
    conversation: Conversation | None = None
    token_budget: int | None = None
    seconds_budget: float | None = None
    resume: Sequence[Completion] = ()
    on_finished: Callable[[Completion], None] | None = None
    on_tokens: Callable[[int, Sequence[int]], None] | None = None
    may_stop: Callable[[], bool] | None = None

    def require(self, capabilities: Collection[Capability], *, engine: str) -> None:
        """Raise GenerationError for an argument that needs a capability which an engine lacks."""
        for name, capability in _NEEDS.items():
            if getattr(self, name) not in (None, (), []):
                require_capability(capability, name, engine=engine, capabilities=capabilities, error=GenerationError)

    def samples(self) -> list[Sample]:
        """Return ``params.n`` samples per prompt, those of one prompt adjacent, then the resumed ones.

        Raises:
            GenerationError: for arguments that cannot be generated from.
        """
        self._check_kinds()
        n = self.params.n
        ids = self._sample_ids()
        cut: Counter[str] = Counter()
        limits = _whole_numbers(
            "token_limits",
            self._per_request("token_limits", self.token_limits, self.params.max_new_tokens),
            "one for each prompt",
        )
        samples = []
        most = self.conversation.max_turn_tokens if isinstance(self.conversation, Conversation) else None
        for index, given in enumerate(self.prompts):
            prompt = self._check_prompt(f"prompt {index}", given)
            limit = self._limit(index, len(prompt.token_ids), limits, cut, n)
            for sample_id in ids[index * n : (index + 1) * n]:
                key = sample_key(self.params.seed, sample_id)
                samples.append(Sample(sample_id, index, prompt, limit, key, max_turn_tokens=most))
        for index, completion in enumerate(self.resume, start=len(self.prompts)):
            samples.append(replace(self._resumed(index, completion, limits, cut), max_turn_tokens=most))
        for name, count in cut.items():
            _log.warning(
                "%d of %d samples have room for fewer than their max_new_tokens: %s ends them earlier; shorten their "
                "prompts, or lower max_new_tokens",
                count, len(samples), name,
            )  # fmt: skip
        return samples

    def _check_kinds(self) -> None:
        for name in ("on_finished", "on_tokens", "may_stop"):
            check_kind(name, getattr(self, name), Callable, "a function", optional=True)  # type: ignore[arg-type]
        if not isinstance(self.params, SamplingParams):
            raise GenerationError(
                f"params={self.params!r} is a {type(self.params).__name__}; write SamplingParams(...)"
            )
        if not hasattr(self.prompts, "__len__"):
            raise GenerationError(
                f"prompts must be a list of lists of token ids; it is a {type(self.prompts).__name__}"
            )
        if not isinstance(self.resume, Sequence):
            raise GenerationError(
                "resume must be a list of unfinished completions of an earlier call; it is a "
                f"{type(self.resume).__name__}"
            )
        if not all(isinstance(completion, Completion) for completion in self.resume):
            kinds = sorted({type(completion).__name__ for completion in self.resume})
            raise GenerationError(f"resume must hold completions of an earlier call; it holds {', '.join(kinds)}")

    def queue(self, samples: Sequence[Sample]) -> list[Prompt]:
        """Return the prompts to schedule; resumed samples come first among equal hints."""
        n, num_fresh = self.params.n, len(self.prompts)
        hints = self._per_request("length_hints", self.length_hints, 0)
        for index, hint in enumerate(hints):
            if not is_of_kind(hint, Real) or not math.isfinite(hint):
                raise GenerationError(
                    f"length_hints[{index}]={hint!r} must be a number of tokens, 0 where none is known"
                )
        begun = [Prompt.of(samples, (place,), num_fresh + index, hints[num_fresh + index])
                 for index, place in enumerate(range(num_fresh * n, len(samples)))]  # fmt: skip
        fresh = [Prompt.of(samples, tuple(range(index * n, (index + 1) * n)), index, hints[index])
                 for index in range(num_fresh)]  # fmt: skip
        return begun + fresh

    def _sample_ids(self) -> list[int]:
        """Return the ids of new samples, distinct from each other and from the resumed ones."""
        total, taken = len(self.prompts) * self.params.n, {completion.sample_id for completion in self.resume}
        if self.sample_ids is None:
            first = max(taken, default=-1) + 1
            ids = list(range(first, first + total))
        else:
            ids = list(_whole_numbers("sample_ids", self.sample_ids, "one for each new completion"))
        if len(ids) != total or len(set(ids)) != total:
            raise GenerationError(
                f"{len(self.prompts)} prompts with n={self.params.n} need {total} distinct sample_ids, "
                f"got {len(ids)} of which {len(set(ids))} distinct"
            )
        twice = Counter([*ids, *(completion.sample_id for completion in self.resume)]) - Counter({*ids, *taken})
        if twice:
            raise GenerationError(
                f"resume holds the sample ids {sorted(twice)[:8]} twice, or they are also among the new ones; give "
                "sample_ids that were not used before"
            )
        return ids

    def _resumed(self, index: int, completion: Completion, limits: Sequence[int], cut: Counter[str]) -> Sample:
        name = f"resume[{index - len(self.prompts)}]"
        if completion.finish_reason != "unfinished":
            raise GenerationError(
                f"{name}, sample {completion.sample_id}, is finished ({completion.finish_reason!r}); resume only "
                "those whose finish_reason is 'unfinished'"
            )
        prompt = self._check_prompt(f"the prompt of {name}", completion.input)
        return Sample(
            completion.sample_id, index, prompt, self._limit(index, len(prompt.token_ids), limits, cut, 1),
            sample_key(self.params.seed, completion.sample_id), list(completion.token_ids), list(completion.logprobs),
            list(completion.model_mask), completion.versions, prompt_index=completion.prompt_index,
            answers=list(completion.answers),
        )  # fmt: skip

    def _limit(self, index: int, length: int, limits: Sequence[int], cut: Counter[str], count: int) -> int:
        """Return how many tokens may follow a prompt of ``length``; count in ``cut`` the bounds that leave fewer than
        asked."""
        if limits[index] < 1:
            raise GenerationError(f"token_limits[{index}]={limits[index]} must be at least 1")
        asked = min(self.params.max_new_tokens, limits[index])
        name, bound = min(self.bounds.items(), key=lambda item: item[1], default=("", length + asked))
        if bound - length < asked:
            cut[f"{name} of {bound}"] += count
        return min(asked, bound - length)

    def _check_prompt(self, name: str, given: Sequence[int] | ModelInput) -> ModelInput:
        try:
            prompt = as_token_ids(given.token_ids if isinstance(given, ModelInput) else given)
        except TypeError as error:
            text = repr(given)
            raise GenerationError(
                f"{name} must be a list of token ids; it is {text if len(text) <= 60 else text[:57] + '...'}, "
                f'turn text into ids first: tokenizer(texts)["input_ids"]'
            ) from error
        if not prompt:
            raise GenerationError(f"{name} is empty; give it at least one token, for example the tokenizer's BOS")
        check_vocabulary(name, prompt, self.vocabulary)
        for what, bound in self.bounds.items():
            if len(prompt) >= bound:
                raise GenerationError(
                    f"{name} holds {len(prompt)} tokens and leaves no room for a response within {what} of "
                    f"{bound}; shorten the prompt to at most {bound - 1} tokens or drop it from the data"
                )
        if not isinstance(given, ModelInput):
            return ModelInput(prompt)
        if len(prompt) == 1 and (inputs := [key for key, values in given.extras.items() if len(values)]):
            raise GenerationError(
                f"{name} is one token, and the model reads its input {inputs[0]!r} with the tokens before a prompt's "
                f"last; add a token after its placeholders"
            )
        return given

    def _per_request(self, name: str, given: Sequence[int] | None, default: int) -> Sequence[int]:
        num_prompts, total = len(self.prompts), len(self.prompts) + len(self.resume)
        if given is None:
            return [default] * total
        if not hasattr(given, "__len__"):
            raise GenerationError(f"{name}={given!r} must be a list with one number for each prompt")
        if len(given) != total:
            also = f" and {len(self.resume)} resumed completions" if self.resume else ""
            raise GenerationError(
                f"{name} must hold one number per prompt: got {len(given)} for {num_prompts} prompts{also}"
            )
        return given.tolist() if isinstance(given, Tensor) else given


def _whole_numbers(name: str, given: Any, wanted: str) -> tuple[int, ...]:
    try:
        return as_token_ids(given)
    except TypeError as error:
        raise GenerationError(f"{name}={given!r} must be a list of whole numbers, {wanted}") from error
