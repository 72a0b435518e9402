"""The generation loop of one call of the engine.

Every step is one forward of one packed row: tokens of prompts and of environments' answers, one token of each running
sample and those drafted to follow it. The scheduler assigns slots, the runner holds keys and values, `Decoding` drafts
and picks tokens, environments continue a turn; this module connects them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.plain_decoding import Decoding, Emitted
from lightning_realloc.generation.core.sample import FinishReason, Sample
from lightning_realloc.generation.core.sampling import Forbidden, SamplingParams
from lightning_realloc.generation.core.stopping import StopRule
from lightning_realloc.generation.forward.packed_rows import DecodeRow, PrefillChunk
from lightning_realloc.generation.forward.runner import ModelRunner
from lightning_realloc.generation.loop.environment import Conversations
from lightning_realloc.generation.schedule.admission import PrefillBatching
from lightning_realloc.generation.schedule.budget import Budget
from lightning_realloc.generation.schedule.scheduler import Move, Prompt, Scheduler, Step, Swap


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What the last call of `GenerationEngine.generate` did on this rank."""

    num_steps: int = 0
    """Forwards."""
    row_steps: int = 0
    """Running samples, summed over steps."""
    prefill_tokens: int = 0
    """Tokens of prompts, environments and resumed responses that were read."""
    generated_tokens: int = 0
    """Those that the model chose in this call."""
    cache_bytes: int = 0
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
    """Samples that gave their pages back, to be read again; they are part of ``prefill_tokens`` each time."""
    shared_prefill_tokens: int = 0
    """Tokens that did not have to be read, since pages of another sequence, or of one before, held them."""


DIVERGED = "the weights have diverged or overflow their dtype: lower the learning rate, or use bfloat16 for float16"


class GenerationRun:
    """All of the state of one call, dropped at its end; a context within which steps are made."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        samples: list[Sample],
        params: SamplingParams,
        stop: StopRule,
        decoding: Decoding,
        conversations: Conversations,
        budget: Budget,
        *,
        num_slots: int,
        may_pause: bool,
        longest_pause_s: float = math.inf,
    ) -> None:
        """Begin with nothing admitted.

        ``may_pause``: nobody waits for a forward of this rank's. ``longest_pause_s``: how long a step may wait for the
        environment.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._samples = samples
        self._params = params
        self._stop = stop
        self._decoding = decoding
        self._conversations = conversations
        self._budget = budget
        self._num_slots = num_slots
        self._may_pause = may_pause
        self._longest_pause_s = longest_pause_s
        self._refill = PrefillBatching()
        self.is_stopped = False
        """Whether the budget is spent, so that nothing runs any more."""
        self.ended: list[Sample] = []
        """Samples that got their last token here, in this order."""
        self._num_steps = self._row_steps = self._prefill_tokens = self._num_generated = 0
        self._num_preemptions = self._shared_prefill_tokens = 0

    def __enter__(self) -> None:
        self._decoding.begin(self._samples, self._params, self._num_slots)
        for index, sample in enumerate(self._samples):  # of those that are resumed, whose turn had just ended
            if sample.finish_reason == "stop" and self._conversations.goes_on_after(sample):
                self._ask(index, sample)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversations.close()
        self._decoding.end(has_failed=error is not None)

    @property
    def has_work(self) -> bool:
        """Whether any response is not over."""
        return self._scheduler.has_work or self._conversations.waiting

    def step(self) -> None:
        """Take every running sample a token or more further; where all wait for the environment, wait with them."""
        self._take_answers()
        self._hold_back()
        prefills = self._carry_out(self._scheduler.next_step())
        running = [self._samples[index] for index in self._scheduler.running if index is not None]
        if prefills or running or not self._may_pause:
            self._forward(prefills, running)
        elif self._conversations.waiting:
            self._conversations.wait(min(self._budget.seconds_left(), self._longest_pause_s))
        if self._budget.is_spent(self._num_generated):
            self._stop_all()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows, tokens read and tokens generated so far, as in the statistics."""
        return self._row_steps, self._prefill_tokens, self._num_generated

    def stats(self) -> GenerationStats:
        """Return the counts so far."""
        return GenerationStats(
            num_steps=self._num_steps,
            row_steps=self._row_steps,
            prefill_tokens=self._prefill_tokens,
            generated_tokens=self._num_generated,
            cache_bytes=self._runner.cache.num_bytes,
            num_preemptions=self._num_preemptions,
            shared_prefill_tokens=self._shared_prefill_tokens,
            **self._decoding.counts(),  # type: ignore[arg-type]
        )

    @property
    def samples(self) -> list[Sample]:
        """Samples of the call, followed by those that arrived from other ranks; see `SampleAccess`."""
        return self._samples

    def _forward(self, prefills: Sequence[PrefillChunk], running: Sequence[Sample]) -> None:
        being_read = {slot for prefill in prefills for slot in prefill.slots}
        is_tail = not self._scheduler.num_waiting
        drafts = self._decoding.propose(running, being_read, is_tail=is_tail) if running else []
        rows = [DecodeRow((sample.last_token, *draft), sample.position)
                for sample, draft in zip(running, drafts, strict=True)]  # fmt: skip
        logits = self._runner.forward(prefills, rows)
        self._num_steps += 1
        self._row_steps += len(running)
        if not running:
            return
        emitted = self._decoding.emit(logits, running, self._forbidden(running, drafts))
        self._take_tokens(emitted, running)
        self._decoding.end_step(is_typical=not prefills and self._runner.was_usual)

    def _hold_back(self) -> None:
        """Let waiting samples wait on where reading few prompts takes as long as reading many."""
        scheduler = self._scheduler
        scheduler.should_defer = (
            self._runner.replays_steps
            and scheduler.reads_to_admit
            and scheduler.num_free > 0
            and self._refill.should_defer(
                num_running=sum(index is not None for index in scheduler.running), num_free=scheduler.num_free
            )
        )

    def _carry_out(self, step: Step) -> list[PrefillChunk]:
        """Copy and move what the scheduler's step says, and return what has to be computed."""
        self._num_preemptions += len(step.preempted)
        for index in step.preempted:
            self._samples[index].num_read = 0
        self._runner.make_room(0, len(self._scheduler.slots))
        for admission in step.admissions:
            targets = [slot for slot in admission.slots if slot != admission.source]
            self._decoding.admitted(targets)
            if admission.source is not None:
                length = len(self._samples[admission.samples[0]].prompt) - 1
                self._copy(admission.source, targets, length)
                if admission.source in admission.slots:
                    self._decoding.kept(admission.source, length)
            else:
                length = admission.num_held
                self._shared_prefill_tokens += length
            for index in admission.samples:
                self._samples[index].num_read = length
        for move in step.moves:
            self._move(move)
        prefills = []
        for read in step.reads:
            samples = [self._samples[index] for index in read.samples]
            # A sequence's last token is left to the row, so that new and old samples are alike from there on.
            prefills.append(PrefillChunk(samples[0].tokens(read.begin, read.end), read.slots, read.begin))
            for sample in samples:
                sample.num_read = read.end
            self._prefill_tokens += read.end - read.begin
        return prefills

    def _copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self._runner.cache.copy(source, targets, length)
        self._decoding.copied(source, targets, length)

    def _move(self, move: Move | Swap) -> None:
        cache, slots = self._runner.cache, self._scheduler.slots
        moved = self._samples[slots[move.target]]  # type: ignore[index]
        if isinstance(move, Move):
            self._decoding.copied(move.source, [move.target], moved.num_read)
            cache.move(move.source, move.target, moved.num_read)
        else:
            other = self._samples[slots[move.source]]  # type: ignore[index]
            cache.swap(move.source, move.target, max(moved.num_read, other.num_read))
            self._decoding.swapped(move.source, move.target)

    def _take_tokens(self, emitted: Sequence[Emitted], running: Sequence[Sample]) -> None:
        if not math.isfinite(sum(sum(logprobs) for _, logprobs in emitted)):
            _raise_not_finite(emitted, running)
        for slot, (sample, (tokens, logprobs)) in enumerate(zip(running, emitted, strict=True)):
            self._num_generated += self._stop.take(sample, tokens, logprobs)
            if sample.finish_reason is not None:
                self._end_turn(slot, sample)

    def _end_turn(self, slot: int, sample: Sample) -> None:
        """Ask the environment what follows, or finish the response."""
        if sample.finish_reason == "stop" and self._conversations.goes_on_after(sample):
            index = self._scheduler.slots[slot]
            assert index is not None, f"slot {slot} ended a turn and has no sample"
            self._scheduler.park(slot)
            self._ask(index, sample)
        else:
            self._scheduler.finish(slot)
            self._end(sample)

    def _ask(self, index: int, sample: Sample) -> None:
        sample.finish_reason = None
        self._conversations.ask(index, sample)

    def _take_answers(self) -> None:
        """Let samples whose environment answered read on; finish those that it ended or failed."""
        for answer in self._conversations.answers():
            sample = self._samples[answer.index]
            sample.error = answer.error
            if answer.error is not None:
                self._finish_waiting(answer.index, "environment")
            elif answer.token_ids is None:
                self._finish_waiting(answer.index, "stop")
            elif len(sample.token_ids) + len(answer.token_ids) >= sample.max_new_tokens:
                self._finish_waiting(answer.index, "length")  # the model could not answer these tokens
            else:
                sample.extend(answer.token_ids)
                if self._scheduler.is_parked(answer.index):
                    self._scheduler.read(answer.index, sample.num_read, sample.position)
                else:
                    self._scheduler.add(Prompt(sample.prompt_number, sample.position, (answer.index,)))

    def _finish_waiting(self, index: int, reason: FinishReason) -> None:
        sample = self._samples[index]
        sample.finish_reason = reason
        if self._scheduler.is_parked(index):
            self._scheduler.drop(index)
        self._end(sample)

    def _end(self, sample: Sample) -> None:
        self.ended.append(sample)
        self._decoding.finished(sample)

    def _stop_all(self) -> None:
        """Leave what is not finished as it is."""
        self.is_stopped = True
        self._take_answers()
        for sample in self._samples:  # one that is on another rank gets its true state when it returns
            sample.finish_reason = sample.finish_reason or "unfinished"
        self._scheduler.clear()
        self._conversations.close()

    def _forbidden(self, running: Sequence[Sample], drafts: Sequence[Sequence[int]]) -> Forbidden | None:
        """Return where stop tokens may not come yet, among the rows of the logits."""
        least = self._params.min_new_tokens
        if not least or not self._stop.token_ids:
            return None
        rows: list[int] = []
        start = 0
        for sample, draft in zip(running, drafts, strict=True):
            early = min(least - len(sample.token_ids), len(draft) + 1)
            rows.extend(range(start, start + early))
            start += len(draft) + 1
        return (rows, sorted(self._stop.token_ids)) if rows else None


def _raise_not_finite(emitted: Sequence[Emitted], running: Sequence[Sample]) -> None:
    bad = [sample.sample_id for sample, (_, logprobs) in zip(running, emitted, strict=True)
           if not math.isfinite(sum(logprobs))]  # fmt: skip
    raise not_finite(bad, len(running))


def not_finite(sample_ids: Sequence[int], num_running: int) -> GenerationError:
    """Return the error of a model that says nothing of these samples, out of ``num_running``."""
    return GenerationError(
        f"the model's logits are not finite for sample ids {list(sample_ids[:8])} ({len(sample_ids)} of {num_running} "
        f"running); {DIVERGED}"
    )
