"""Speculative decoding: draft tokens for the running samples, verify them in one forward, and measure both."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.core.step import NO_DRAFT, Draft, DrawRule, Emitted
from lightning_realloc.generation.schedule.length_predictor import LengthPredictor
from lightning_realloc.generation.speculative.controller import DepthController, DraftOutcome, MeasuredStep
from lightning_realloc.generation.speculative.drafter import Drafter, checked_propose

if TYPE_CHECKING:
    from lightning_realloc.generation.speculative.config import Speculation

STEPS_PER_AGREEMENT = 16
"""Steps whose seconds ranks agree on at once. Larger: fewer messages, and older costs."""


class Speculator(Decoding):
    """Speculative decoding. One per engine: the controller's estimates outlive a generation.

    Ranks of a tensor-parallel group decide alike. They run the same samples, and ``agree`` gives all of them one rank's
    measured seconds, which nothing but the controller's costs depends on.
    """

    def __init__(
        self,
        speculation: Speculation,
        drafter: Drafter,
        *,
        agree: Callable[[Sequence[float]], Sequence[float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        vocabulary: int | None = None,
    ) -> None:
        """Draft with ``drafter``; ``clock`` returns seconds; ``vocabulary`` is the target's size, None if unknown."""
        self.drafter = self.follower = drafter
        self._counts: defaultdict[str, float] = defaultdict(int)
        """Values of `GenerationStats` by field."""
        self.max_ahead = speculation.most_ahead
        self.adapts = speculation.num_draft_tokens is None
        self._speculation, self._vocabulary = speculation, vocabulary
        self._controller = DepthController(speculation.max_draft_tokens)
        self._agree = agree
        self._clock = clock
        self._propose = checked_propose(drafter, vocabulary=vocabulary, need_laws=lambda: self._rule.needs_laws)
        self._lengths = LengthPredictor()
        self._depth = self._num_unread = self._num_drafted = 0
        """Depth of this step, tokens that the drafter missed before it, and drafted tokens."""
        self._drafting_s = 0.0
        """Seconds of drafting in this step."""
        self._begin_s = 0.0
        """Clock when this step's forward began."""
        self._limits: Sequence[int] = ()
        """Limits of this step's drafts."""
        self._drafts: Sequence[Draft] = ()
        self._outcomes: Sequence[DraftOutcome] = ()
        self._unrecorded: deque[MeasuredStep] = deque(maxlen=STEPS_PER_AGREEMENT)
        """Steps that the controller has not learnt from, the last ones if there are many. Recording many at once is
        cheaper: right after a forward the caches are full of weights, and the same code takes twice as long."""

    def for_other_samples(self) -> Speculator:
        drafter, agree, clock = self.drafter.for_other_samples(), self._agree, self._clock
        return Speculator(self._speculation, drafter, agree=agree, clock=clock, vocabulary=self._vocabulary)

    def begin(self, samples: Sequence[Sample], params: SamplingParams, num_slots: int) -> DrawRule:
        """Start a generation of these samples, and return the rule that verifies drafts.

        Raises:
            GenerationError: where the rule needs draft lengths that do not depend on the tokens left out.
        """
        self._rule = self._speculation.rule(params)
        if self.adapts and self._rule.needs_laws and self.drafter.anticipates:
            raise GenerationError(
                f"verification='reject' keeps the distribution only where a draft's length does not depend on the "
                f"tokens it leaves out, and that of {type(self.drafter).__name__} may, by anticipates=True; use "
                f"verification='match', or a fixed num_draft_tokens"
            )
        self._counts.clear()
        self._lengths = self._lengths.decayed()
        self._record()  # before the controller turns to other prompts
        self._controller.begin(seen_prompts=self.drafter.has_seen_prompts(samples))
        self.drafter.begin(samples, self._rule, num_slots)
        return self._rule

    def end(self, *, has_failed: bool = False) -> None:
        self.drafter.end(has_failed=has_failed)

    def propose(self, running: Sequence[Sample], being_read: Collection[int], *, is_tail: bool) -> Sequence[Draft]:
        self._depth, self._num_drafted, self._drafting_s = self._speculation.most_ahead, 0, 0.0
        self._outcomes = ()
        if self.adapts:
            begin = self._clock()
            self._depth = self._choose_depth(running, being_read, is_tail)
            self._counts["planning_s"] += self._clock() - begin
        self._drafts = self._draft(running, being_read) if self._depth else [NO_DRAFT] * len(running)
        self._begin_s = self._clock()
        return self._drafts

    def verified(self, emitted: Sequence[Emitted]) -> None:
        """Count each sample's accepted tokens; one token follows them."""
        if self._num_drafted:
            self._counts["verified_tokens"] += self._num_drafted
            self._counts["accepted_tokens"] += sum(len(tokens) for tokens, _ in emitted) - len(emitted)
        if self._depth and self.adapts:  # lengths alone: distributions are too large to keep
            self._outcomes = [
                DraftOutcome(limit, len(draft), len(tokens) - 1)
                for limit, draft, (tokens, _) in zip(self._limits, self._drafts, emitted, strict=True)
            ]

    def end_step(self, *, is_typical: bool) -> None:
        """Measure a step; ``is_typical``: other steps of its size will take about as long."""
        if not self.adapts:
            return
        now = self._clock()
        self._unrecorded.append(
            MeasuredStep(
                self._controller.num_steps,
                len(self._drafts),
                self._depth,
                self._num_drafted,
                now - self._begin_s,
                self._drafting_s,
                self._num_unread if self._depth else 0,
                is_typical,
                self._outcomes,
            )
        )
        if self._agree is not None and len(self._unrecorded) >= STEPS_PER_AGREEMENT:
            self._record()
            self._counts["planning_s"] += self._clock() - now

    def finished(self, sample: Sample) -> None:
        self._lengths.finish(sample.prompt_number, len(sample.token_ids), is_cut=sample.is_full)
        self.drafter.finished(sample)

    def counts(self) -> dict[str, float]:
        return self._counts

    def _choose_depth(self, running: Sequence[Sample], being_read: Collection[int], is_tail: bool) -> int:
        """Return the controller's depth. A step that reads prompts is not measured, so it belongs to no probe."""
        controller, num_rows, may_probe = self._controller, len(running), not being_read
        depth = controller.held_depth(num_rows, may_probe=may_probe)
        # A drafter reads up to so many tokens before every draft; more are tokens that it missed.
        most_in_a_step = num_rows * (1 + self._speculation.max_draft_tokens)
        self._num_unread = 0 if depth == 0 else max(self.drafter.num_unread(running) - most_in_a_step, 0)
        if depth is not None:
            return depth
        if self._agree is None:
            self._record()
        longest = max(running, key=self._remaining)
        remaining = self._remaining(longest)
        return controller.decide(
            num_rows,
            num_unread=self._num_unread,
            remaining_tokens=remaining,
            horizon=len(longest.token_ids) + remaining if is_tail else math.inf,
            may_probe=may_probe,
        )

    def _draft(self, running: Sequence[Sample], being_read: Collection[int]) -> Sequence[Draft]:
        """Return a draft for each running sample."""
        begin = self._clock()
        self.drafter.prepare(running)
        self._limits = self._limits_of(running, self._depth, being_read)
        drafts = self._propose(running, self._limits)
        self._drafting_s = self._clock() - begin
        self._num_drafted = sum(map(len, drafts))
        self._counts["drafting_s"] += self._drafting_s
        self._counts["drafted_tokens"] += self._num_drafted
        return drafts

    def _remaining(self, sample: Sample) -> float:
        """Return the expected number of tokens to come of a sample."""
        return self._lengths.expected(0, len(sample.token_ids), max_new_tokens=sample.max_new_tokens)

    def _limits_of(self, running: Sequence[Sample], depth: int, being_read: Collection[int]) -> list[int]:
        """Return the most tokens to draft for each sample; the last token of a response is never drafted."""
        limits = [min(depth, sample.max_new_tokens - len(sample.token_ids) - 1) for sample in running]
        if being_read and self.drafter.reads_target_cache:
            return [0 if slot in being_read else limit for slot, limit in enumerate(limits)]
        return limits

    def _record(self) -> None:
        """Let the controller learn from the steps since the last call. Collective where ranks agree on seconds."""
        if not self._unrecorded:
            return
        steps = list(self._unrecorded)
        self._unrecorded.clear()
        seconds = [value for step in steps for value in (step.seconds, step.drafting_s)]
        agreed = iter(seconds if self._agree is None else self._agree(seconds))
        # A coarse clock may not have moved, or went back.
        for step, step_s, drafting_s in zip(steps, agreed, agreed, strict=True):
            self._controller.record(step._replace(seconds=max(step_s, 1e-9), drafting_s=max(drafting_s, 0.0)))
