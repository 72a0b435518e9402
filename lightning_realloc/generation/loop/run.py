"""The generation loop of one call of the engine.

Each step is one forward of one packed row: tokens of prompts and of environments' answers, and of each running sample
one token and those drafted to follow it. The scheduler assigns slots, the executor runs the model and draws tokens,
`Decoding` drafts, environments answer turns. This module connects them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from lightning_realloc.batch.model_input import joined_inputs
from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.params import SamplingParams, check_kind
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.core.sample import FinishReason, Sample, StopRule
from lightning_realloc.generation.core.step import Emitted, ForwardStep, PrefillChunk, StepExecutor, decode_rows
from lightning_realloc.generation.schedule.slot_plan import Admission, Move, Prompt, Step, Swap

if TYPE_CHECKING:
    from lightning_realloc.generation.loop.environment import Answer
    from lightning_realloc.generation.schedule.scheduler import Scheduler

DIVERGED = "the weights have diverged or overflow their dtype: lower the learning rate, or use bfloat16 for float16"


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Counts of the last call of `GenerationEngine.generate` on this rank."""

    num_steps: int = 0
    """Number of forwards."""
    row_steps: int = 0
    """Sum of running samples over all steps."""
    prefill_tokens: int = 0
    """Tokens read of prompts, environments and resumed responses, without each prompt's last token, which the first
    decoding step reads. The engines ``"hf"`` and ``"vllm"`` count all tokens before each turn."""
    generated_tokens: int = 0
    """Tokens that the model chose."""
    cache_bytes: int = 0
    """Bytes of keys and values held at the end."""
    drafted_tokens: int = 0
    """Tokens that the drafter proposed."""
    verified_tokens: int = 0
    """Drafted tokens that the model read."""
    accepted_tokens: int = 0
    """Drafted tokens that the model accepted."""
    drafting_s: float = 0.0
    """Seconds of drafting."""
    planning_s: float = 0.0
    """Seconds of choosing how many tokens to draft."""
    num_preemptions: int = 0
    """Times that a sample gave its slot or pages back; its tokens then count in ``prefill_tokens`` again."""
    capture_s: float = 0.0
    """Seconds of capturing steps as CUDA graphs, with the compilation of their blocks."""
    shared_prefill_tokens: int = 0
    """Tokens that were not read because shared pages hold them."""
    waited_s: float = 0.0
    """Seconds in which nothing was generated because all samples waited for environments."""


class Budget:
    """Tokens and seconds that a call may spend, from its beginning.

    Args:
        tokens: Most tokens of the model; None: no bound.
        seconds: Most seconds; None: no bound.
        may_stop: While it returns False, the call continues beyond its budget.

    Raises:
        GenerationError: for a budget that allows nothing.
    """

    def __init__(
        self, tokens: int | None, seconds: float | None, clock: Callable[[], float], may_stop: Callable[[], bool]
    ) -> None:
        check_kind("token_budget", tokens, Real, "a number", optional=True)
        check_kind("seconds_budget", seconds, Real, "a number", optional=True)
        if tokens is not None and tokens < 1:
            raise GenerationError(f"token_budget={tokens} must be at least 1; leave it out to finish every response")
        if seconds is not None and not seconds > 0:
            raise GenerationError(f"seconds_budget={seconds} must be positive; leave it out to finish every response")
        self._tokens = math.inf if tokens is None else tokens
        self._clock = clock
        self.may_stop = may_stop
        self._end = None if seconds is None else clock() + seconds
        self._num_spent = 0

    def spend(self, num_tokens: int) -> None:
        """Count tokens of the model."""
        self._num_spent += num_tokens

    def left(self) -> tuple[float, float]:
        """Return the tokens and seconds that are left, whether the call may stop or not; infinity without a bound."""
        return self._tokens - self._num_spent, math.inf if self._end is None else self._end - self._clock()

    def seconds_left(self) -> float:
        """Return the remaining seconds; infinity without a bound, and while the call may not stop."""
        return math.inf if self._end is None or not self.may_stop() else self._end - self._clock()

    def is_spent(self) -> bool:
        """Return whether the tokens or the seconds so far use the budget up."""
        return (self._num_spent >= self._tokens and self.may_stop()) or self.seconds_left() <= 0


class TurnQuestions(Protocol):
    """Questions to an environment about turns that have ended; `Conversations` documents the members."""

    @property
    def waiting(self) -> bool: ...

    @property
    def asked(self) -> Collection[int]: ...

    @property
    def reply_s(self) -> float: ...

    def ask(self, index: int, sample: Sample) -> bool: ...

    def answers(self) -> list[Answer]: ...

    def mark_idle(self, is_idle: bool) -> None: ...

    def wait(self, most_s: float) -> None: ...

    def close(self) -> None: ...


class GenerationRun:
    """State of one call, and its steps. Make steps within its context.

    One step may be in flight: from `submit_step` to `collect_step`, slots and samples stay as they are. Runs with slots
    of their own can have a step in flight each.

    Args:
        samples: Samples of the call; those of other ranks are appended.
        conversations: Ask the environment; None: each response is one turn.
        max_pause_s: Most seconds that a step waits for environments. 0: it never does, because other ranks' forwards
            wait for this rank's.
    """

    def __init__(
        self,
        executor: StepExecutor,
        scheduler: Scheduler,
        samples: list[Sample],
        params: SamplingParams,
        stop: StopRule,
        decoding: Decoding,
        conversations: TurnQuestions | None,
        budget: Budget,
        *,
        max_pause_s: float,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.samples = samples
        self.decoding = decoding
        self.conversations = conversations
        self._params = params
        self._stop = stop
        self._budget = budget
        self._max_pause_s = max_pause_s
        self.is_stopped = False
        """Whether the budget is spent and nothing runs any more."""
        self.ended: list[Sample] = []
        """Samples that finished here, in this order."""
        self._counts: Counter[str] = Counter()
        """Values of `GenerationStats` by field."""
        self._in_flight: tuple[list[Sample], bool] | None = None
        """Running samples of the submitted step, and whether it reads prompts; None between two steps."""
        self._session = ExitStack()
        """Ends what has begun."""

    def __enter__(self) -> None:
        with ExitStack() as session:
            rule = self.decoding.begin(self.samples, self._params, self.scheduler.most_slots)
            session.push(lambda kind, *_: self.decoding.end(has_failed=kind is not None))
            self.executor.begin(self._params, rule)
            session.push(lambda kind, *_: self.executor.end(has_failed=kind is not None))
            if self.conversations is not None:
                session.callback(self.conversations.close)
            for index, sample in enumerate(self.samples):  # resumed samples may be at the end of a turn
                if sample.finish_reason == "stop":
                    self._ask(index, sample)
            self._session = session.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    @property
    def has_work(self) -> bool:
        """Whether any sample is unfinished."""
        return self.scheduler.has_work or (self.conversations is not None and self.conversations.waiting)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows, tokens read and tokens generated so far, as in the statistics."""
        return self._counts["row_steps"], self._counts["prefill_tokens"], self._counts["generated_tokens"]

    def stats(self) -> GenerationStats:
        """Return the counts so far."""
        of_executor = {"cache_bytes": self.executor.cache_bytes, "capture_s": self.executor.capture_s}
        counts = {**self._counts, **self.decoding.counts(), **of_executor}
        return GenerationStats(**counts)  # type: ignore[arg-type]

    def weights_updated(self, before: int) -> None:
        """Record that all tokens so far are of the version ``before`` or an earlier one."""
        for sample in self.samples:
            sample.weights_updated(before)

    def step(self) -> None:
        """Advance every running sample by a token or more; if all samples wait for their environment, wait for it."""
        self.submit_step()
        self.collect_step()

    @property
    def is_in_flight(self) -> bool:
        """Whether a step was submitted and is not collected."""
        return self._in_flight is not None

    def submit_step(self, *, may_wait: bool = True) -> None:
        """Submit the next step. If all samples wait for their environment, wait for it instead, if that is allowed."""
        if self.conversations is not None:
            self._take_answers(self.conversations)
        self.scheduler.batch_prefills(is_worthwhile=self.executor.replays_steps)
        prefills = self._apply(self.scheduler.next_step())
        running = [self.samples[index] for index in self.scheduler.running if index is not None]
        if self.conversations is not None:
            self.conversations.mark_idle(not (prefills or running))
        if prefills or running or not self._max_pause_s:
            self.executor.submit(self._make_step(prefills, running))
            self._in_flight = running, bool(prefills)
        elif may_wait and self.conversations is not None and self.conversations.waiting:
            self.conversations.wait(min(self._budget.seconds_left(), self._max_pause_s))

    def collect_step(self) -> None:
        """Give the running samples the tokens of the submitted step, and stop if the budget is spent."""
        if self._in_flight is not None:
            (running, has_prefills), self._in_flight = self._in_flight, None
            self._counts["num_steps"] += 1
            self._counts["row_steps"] += len(running)
            emitted = self.executor.collect()
            if running:
                self.decoding.verified(emitted)
                self._take_tokens(emitted, running)
                self.decoding.end_step(is_typical=not has_prefills and self.executor.was_usual)
        if self._budget.is_spent():
            self._stop_all()

    # ---- before the forward
    def _make_step(self, prefills: Sequence[PrefillChunk], running: Sequence[Sample]) -> ForwardStep:
        if not running:
            return ForwardStep(prefills)
        being_read = {slot for prefill in prefills for slot in prefill.slots}
        drafts = self.decoding.propose(running, being_read, is_tail=not self.scheduler.num_waiting)
        forbidden = self._stop.forbidden(running, [draft.tokens for draft in drafts])
        return ForwardStep(prefills, decode_rows(running, drafts, self._params), forbidden)

    def _apply(self, step: Step) -> list[PrefillChunk]:
        """Copy and move cache content as scheduled, and return the tokens to read."""
        self._counts["num_preemptions"] += len(step.preempted)
        for index in step.preempted:
            self.samples[index].num_read = 0
        self.executor.make_room(0, len(self.scheduler.slots))
        for admission in step.admissions:
            self._admit(admission)
        for move in step.moves:
            self._move(move)
        prefills = []
        for read in step.reads:
            samples = [self.samples[index] for index in read.samples]
            # A sequence's last token is read as a row, so that new and old samples are alike from there on.
            first, bounds = samples[0], (read.begin, read.end)
            parts = first.extras_between(*bounds)
            extras = parts[0] if len(parts) == 1 else joined_inputs(parts)
            tokens, positions = first.tokens(*bounds), first.positions_between(*bounds)
            prefills.append(PrefillChunk(tokens, read.slots, read.begin, extras, positions))
            for sample in samples:
                sample.num_read = read.end
            self._counts["prefill_tokens"] += read.end - read.begin
        return prefills

    def _admit(self, admission: Admission) -> None:
        source, length = admission.source, admission.num_held
        targets = [slot for slot in admission.slots if slot != source]
        follower = self.decoding.follower
        follower.admitted(targets)
        if source is None:
            self._counts["shared_prefill_tokens"] += length
        else:
            length = len(self.samples[admission.samples[0]].prompt) - 1
            self.executor.copy(source, targets, length)
            follower.copied(source, targets, length)
            if source in admission.slots:
                follower.kept(source, length)
        for index in admission.samples:
            self.samples[index].num_read = length

    def _move(self, move: Move | Swap) -> None:
        executor, slots = self.executor, self.scheduler.slots
        moved = self.samples[slots[move.target]]  # type: ignore[index]
        if isinstance(move, Move):
            self.decoding.follower.copied(move.source, [move.target], moved.num_read)
            executor.move(move.source, move.target, moved.num_read)
        else:
            other = self.samples[slots[move.source]]  # type: ignore[index]
            executor.swap(move.source, move.target, max(moved.num_read, other.num_read))
            self.decoding.follower.swapped(move.source, move.target)

    # ---- after the forward
    def _take_tokens(self, emitted: Sequence[Emitted], running: Sequence[Sample]) -> None:
        if not math.isfinite(sum(map(sum, (logprobs for _, logprobs in emitted)))):
            bad = [sample.sample_id for sample, (_, logprobs) in zip(running, emitted, strict=True)
                   if not math.isfinite(sum(logprobs))]  # fmt: skip
            raise not_finite(bad, len(running))
        num_taken = 0
        for slot, (sample, (tokens, logprobs)) in enumerate(zip(running, emitted, strict=True)):
            num_taken += self._stop.take(sample, tokens, logprobs)
            if sample.finish_reason is not None:
                self._end_turn(slot, sample)
        self._counts["generated_tokens"] += num_taken
        self._budget.spend(num_taken)

    def _end_turn(self, slot: int, sample: Sample) -> None:
        """Ask the environment for an answer, or finish the response."""
        index = self.scheduler.slots[slot]
        assert index is not None, f"slot {slot} ended a turn and has no sample"
        turn_begin = len(sample.prompt) + sample.turn_begin
        sample.experts = self.executor.read_experts(slot, turn_begin, sample.num_read)
        if sample.finish_reason == "stop" and self._ask(index, sample):
            self.scheduler.park(slot, sample.num_read)
        else:
            self.scheduler.finish(slot)
            self._end(sample)

    def _end(self, sample: Sample) -> None:
        self.ended.append(sample)
        self.decoding.finished(sample)

    def _stop_all(self) -> None:
        """Stop at a spent budget; unfinished samples stay as they are."""
        self.is_stopped = True
        if self.conversations is not None:
            self._take_answers(self.conversations)
            self.conversations.close()
        for sample in self.samples:  # a sample on another rank gets its true state when it returns
            sample.finish_reason = sample.finish_reason or "unfinished"
        self.scheduler.clear()

    # ---- environments
    def _ask(self, index: int, sample: Sample) -> bool:
        """Ask the environment about a turn that has just ended; return whether there is one to ask."""
        return self.conversations is not None and self.conversations.ask(index, sample)

    def _take_answers(self, conversations: TurnQuestions) -> None:
        """Let answered samples read on; finish those that the environment ended or failed."""
        for answer in conversations.answers():
            sample = self.samples[answer.index]
            reason = answer.give_to(sample)
            if reason is not None:
                self._finish_waiting(answer.index, reason)
            elif self.scheduler.is_parked(answer.index):
                unread = sample.num_read, sample.position
                self.scheduler.read(answer.index, *unread, is_whole=bool(sample.extras_between(*unread)))
            else:
                self.scheduler.add(Prompt.of(self.samples, (answer.index,), sample.prompt_number))

    def _finish_waiting(self, index: int, reason: FinishReason) -> None:
        sample = self.samples[index]
        sample.finish_reason = reason
        self.scheduler.drop(index)
        self._end(sample)


def not_finite(sample_ids: Sequence[int], num_running: int) -> GenerationError:
    """Return the error for samples, out of ``num_running``, whose logits are not finite."""
    return GenerationError(
        f"the model's logits are not finite for sample ids {list(sample_ids[:8])} ({len(sample_ids)} of {num_running} "
        f"running); {DIVERGED}"
    )
