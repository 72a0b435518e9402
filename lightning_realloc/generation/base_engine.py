"""Base of the generation engines: it checks a call's arguments, makes its samples, and reports them as they finish.

An engine itself completes these samples. Other calls see their progress, and get finished ones, while it generates.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import GenerationError, ReallocError
from lightning_realloc.generation.core.capabilities import Capability, require_capability
from lightning_realloc.generation.core.model_config import length_bounds, vocabulary_of
from lightning_realloc.generation.core.params import SamplingParams, check_counts, check_kind
from lightning_realloc.generation.core.sample import Completion, Sample, StopRule, Tokenizer
from lightning_realloc.generation.core.stopping import StopStringCheck, check_tokenizer, stop_rule_of
from lightning_realloc.generation.loop.environment import Agree, Conversation, Environment, first_ranks
from lightning_realloc.generation.loop.requests import Requests
from lightning_realloc.generation.loop.run import GenerationStats
from lightning_realloc.generation.loop.streaming import CallNotifier, PartialResults
from lightning_realloc.runtime.messages.environment_waits import WaitMeter
from lightning_realloc.runtime.messages.flight_record import ActivityProgress
from lightning_realloc.runtime.model.image_inputs import placed_input
from lightning_realloc.runtime.model.structure import check_extra_inputs
from lightning_realloc.runtime.parallel.tensor_parallel import tensor_parallel_group

if TYPE_CHECKING:  # imported where samples move
    from lightning_realloc.generation.rebalance.handover import MigrationStats


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GivenWeights:
    """Weights that another process was given for generation."""

    num_bytes: int = 0
    """Bytes of all updates."""
    seconds: float = 0.0
    """Seconds of all updates, without those in which the process started."""
    check_s: float = 0.0
    """Seconds of comparing them there, which are among the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One call of an engine, with checked arguments."""

    samples: Sequence[Sample]
    """Samples to complete, in the order of the call's result."""
    requests: Requests
    """Arguments that the samples were made of."""
    stop: StopRule
    """Ends turns."""
    notifier: CallNotifier
    """Reports tokens and finished samples to the caller."""

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of all samples."""
        return self.requests.params

    def longest_first(self) -> list[Sample]:
        """Return the samples, those with the largest length hints first, and resumed ones first among equal hints."""
        queue = sorted(self.requests.queue(self.samples), key=lambda prompt: -prompt.length_hint)
        return [self.samples[place] for prompt in queue for place in prompt.samples]


class Engine(ABC):
    """A generation engine on a model whose weights change between calls.

    A subclass names its capabilities and completes the samples of a call; see `Engine._complete`.

    Args:
        model: The model.
        tokenizer: Its end-of-sequence token ends responses, as the model's does; stop strings need it.
        max_slots: Samples that run at a time.
        max_length: Most tokens of prompt and response together; None: the model's context.
    """

    name: ClassVar[str]
    """Name of the engine in an algorithm's settings."""
    capabilities: ClassVar[frozenset[Capability]]
    """Capabilities of the engine, which options may need."""
    partial_results: PartialResults | None = None
    """Sends finished responses in chunks while a call runs; None: nothing is sent."""
    partners: Mapping[str, Engine] = MappingProxyType({})
    """Engines of the models that environments may ask during a call, by role."""
    _followed: list[Sample] | None = None
    """Samples of all generations inside `sharing`, without those of other ranks; None outside."""

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Tokenizer | None,
        max_slots: int,
        max_length: int | None,
        agree: Agree | None = None,
    ) -> None:
        check_counts(max_slots=max_slots)
        check_counts(optional=True, max_length=max_length)
        check_tokenizer(tokenizer)
        self._model, self._tokenizer = model, tokenizer
        self._max_slots, self._max_length, self._agree = max_slots, max_length, agree
        self._version = 0
        self._check_stop_strings = StopStringCheck(tokenizer)
        self._stats = GenerationStats()
        self.waits = WaitMeter()
        """Measures how samples wait for their environments, of all generations since `sharing` began."""

    @property
    def stats(self) -> GenerationStats:
        """Counts of the last call."""
        return self._stats

    @property
    def migration_stats(self) -> MigrationStats | None:
        """Samples that moved from and to this rank in the last call, and their cost; None where samples stay."""
        return None

    @property
    def merges_adapters(self) -> bool:
        """Whether the model's adapters are to be merged into its weights while the engine generates."""
        return True

    @property
    def given_weights(self) -> GivenWeights | None:
        """Weights that another process was given in the last call; None for an engine that reads the model's own."""
        return None

    @property
    def expert_counts(self) -> Tensor | None:
        """(layers, experts) tokens of the responses by expert, since `sharing` began; None if they are not counted."""
        return None

    def record_experts(self, is_recorded: bool) -> None:
        """Set whether later calls keep the experts of a mixture's tokens, in `Completion.experts`; at first none does.

        Raises:
            GenerationError: for an engine that cannot record them, and for a model without known routers.
        """
        asked, own = "router_replay=True", self.capabilities
        require_capability("records_experts", asked, engine=self.name, capabilities=own, error=GenerationError)

    def with_experts(self, samples: Samples, completions: Sequence[Completion]) -> Samples:
        """Return a rollout with the column ``experts``, if they are recorded, of the tokens of its completions.

        Unfinished completions have none. Tokens that the model has not read have unknown experts: routers choose them.
        """
        return samples

    @property
    def max_prompt_tokens(self) -> int | None:
        """Most tokens of a prompt that leave room for a response; None: no bound is known."""
        most = min(self._length_bounds().values(), default=None)
        return None if most is None else most - 1

    def on_first_rank(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on a tensor-parallel group's first rank, as plain data, on all of them.

        Raises:
            ReallocError: an error of ``make``, on all ranks: they would wait for the result.
        """
        group = tensor_parallel_group(self._model)
        if group is None or self._agree is None:
            return make()
        made: T | None = None
        problem: ReallocError | None = None
        if group.index == 0:
            try:
                made = make()
            except ReallocError as error:
                problem = error
        sent: tuple[T, ReallocError | None] = first_ranks((made, problem) if group.index == 0 else None, self._agree)
        if sent[1] is not None:
            raise problem or sent[1]
        return sent[0]

    def weights_updated(self, version: int | None = None) -> None:
        """Set the version of updated parameters, by default the last one + 1; before any update it is 0.

        There is nothing to drop: no result of the old parameters outlives a call.
        """
        check_kind("version", version, Integral, "a whole number", optional=True)
        self._version = self._version + 1 if version is None else version

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Enclose what another engine generates between two steps of a call, also from the same model."""
        was_idle = self.waits.is_idle
        self.waits.end_idle(time.monotonic())
        try:
            yield
        finally:
            if was_idle:
                self.waits.begin_idle(time.monotonic())

    @abstractmethod
    def release(self) -> None:
        """Free storage that is kept between calls; the next call allocates it again."""

    @torch.no_grad()  # not inference_mode: its tensors break a later training forward under FSDP
    def generate(
        self,
        prompts: Sequence[Sequence[int] | ModelInput],
        params: SamplingParams | None = None,
        *,
        sample_ids: Sequence[int] | None = None,
        length_hints: Sequence[int] | None = None,
        token_limits: Sequence[int] | None = None,
        environment: Environment | None = None,
        conversation: Conversation | None = None,
        token_budget: int | None = None,
        seconds_budget: float | None = None,
        resume: Sequence[Completion] = (),
        on_finished: Callable[[Completion], None] | None = None,
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
        may_stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Return ``params.n`` completions per prompt, in the order of the prompts, and then the resumed ones.

        Args:
            prompts: Token ids; with further inputs of the model, or a key that is known, as `ModelInput`.
            params: Sampling parameters; None: the defaults.
            sample_ids: Distinct id per new completion, which keys its random numbers; None: the numbers after the ids
                in ``resume``.
            length_hints: Expected response length per prompt, then per resumed completion. Long ones start first.
            token_limits: Bound per prompt, then per resumed completion, that may lower ``params.max_new_tokens``.
            environment: Answers turns that end by their stop rule; its tokens count in ``params.max_new_tokens``.
            conversation: Bounds of turns and of the environment's time.
            token_budget: Tokens of the model after which the call ends; completions may then be "unfinished".
            seconds_budget: The same in seconds.
            resume: Unfinished completions of an earlier call with the same ``params``, to continue on current weights.
            on_finished: Called once with each completion: between two steps if it ends on this rank, else at the end.
            on_tokens: Called between two steps with a sample's id and its new tokens, an environment's included.
            may_stop: Called after ``on_finished`` when a budget is spent; if it returns False, the call continues. It
                must return the same on all ranks of a tensor-parallel group.

        Raises:
            GenerationError: for arguments that cannot be generated from, for those that need a capability which the
                engine lacks, and for logits that are not finite.
            ConfigError: for further inputs that the model does not read.
        """
        requests = Requests(
            vocabulary_of(self._model), self._length_bounds(), prompts, SamplingParams() if params is None else params,
            sample_ids, length_hints, token_limits, environment, conversation, token_budget, seconds_budget, resume,
            on_finished, on_tokens, may_stop,
        )  # fmt: skip
        requests.require(self.capabilities, engine=self.name)
        with self._announced():
            samples = requests.samples()
            self._place_extra_inputs(samples)
            if self._followed is not None:
                self._followed.extend(samples)
            stop = stop_rule_of(self._model, requests.params, self._tokenizer)
            self._check_stop_strings(requests.params.stop_strings)
            notifier = CallNotifier(samples, on_finished, self._completion, on_tokens)
            self._stats = self._measured(EngineCall(samples=samples, requests=requests, stop=stop, notifier=notifier))
        notifier.report(samples)
        return list(map(self._completion, samples))

    def _measured(self, call: EngineCall) -> GenerationStats:
        """Complete a call, and return its counts with the seconds of waiting for environments."""
        before_s = self.waits.idle_s
        return replace(self._complete(call), waited_s=self.waits.idle_s - before_s)

    @abstractmethod
    def _complete(self, call: EngineCall) -> GenerationStats:
        """Give every sample of a call its tokens, log-probabilities and finish reason, and return the counts.

        Finished samples may be given to ``call.notifier`` before the end.
        """

    def _place_extra_inputs(self, samples: Sequence[Sample]) -> None:
        """Check further inputs of prompts and earlier answers, and give those with images their positions."""
        given = {id(part): part for sample in samples for _, part in sample.inputs if part.extras}
        if extras := sorted({name for part in given.values() for name in part.extras}):
            self._check_extra_inputs(extras)
            if shown := [part.images for part in given.values() if part.images is not None]:
                shown[0].read_ahead(shown)
            placed = {key: placed_input(self._model, part) for key, part in given.items()}
            for sample in samples:
                sample.input = placed.get(id(sample.input), sample.input)
                sample.answers = [replace(one, input=placed[id(one.input)]) for one in sample.answers]

    def _placed(self, answer: ModelInput) -> ModelInput:
        """Return an environment's answer that shows images, checked, with positions counted from its first token."""
        self._check_extra_inputs(sorted(answer.extras))
        if answer.images is not None:
            answer.images.read_next()
        return placed_input(self._model, answer)

    def _check_extra_inputs(self, names: Sequence[str]) -> None:
        """Raise for further inputs that the engine does not pass on or the model does not read."""
        asked, own = f"the model's input {names[0]!r}", self.capabilities
        require_capability("extra_inputs", asked, engine=self.name, capabilities=own, error=GenerationError)
        check_extra_inputs(self._model, names)

    def _length_bounds(self) -> Mapping[str, int]:
        """Return the most tokens of prompt and response together, by the source of the bound."""
        return length_bounds(self._model, self._max_length)

    def _announced(self) -> AbstractContextManager[None]:
        """Return a context that encloses the checks and the generation of a call."""
        return nullcontext()

    def _completion(self, sample: Sample) -> Completion:
        return sample.completion(self._version)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Count the time inside as waiting for environments: for resets and rewards, while nothing is generated."""
        self.waits.begin_idle(time.monotonic())
        try:
            yield
        finally:
            self.waits.end_idle(time.monotonic())

    # ---- other calls during a generation
    def progress(self) -> ActivityProgress | None:
        """Return the progress of all generations inside `sharing`; None outside. Any thread may call it.

        A sample that moved to another rank counts as unfinished until it returns.
        """
        followed = self._followed  # the thread that trains may end the call meanwhile
        if followed is None:
            return None
        samples = tuple(followed)
        longest = max((len(sample.token_ids) for sample in samples if sample.finish_reason is None), default=None)
        done = sum(sample.finish_reason is not None for sample in samples)
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        return ActivityProgress(done, len(samples), "samples", num_tokens, longest)

    @contextmanager
    def sharing(self, partial_results: PartialResults | None = None) -> Iterator[None]:
        """Share finished responses, and progress, with other calls inside this context."""
        self.partial_results, self._followed, self.waits = partial_results, [], WaitMeter()
        try:
            yield
        finally:
            self.partial_results = self._followed = None
