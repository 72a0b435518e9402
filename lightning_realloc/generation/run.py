"""One call of the engine, step by step.

Every step is one forward of one packed row: the tokens of newly admitted prompts, one token of each running sample and
those drafted to follow it. The scheduler says who runs where, the runner holds keys and values, the speculator drafts,
verification picks tokens; this module connects them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.runner import ModelRunner, Prefill, Row
from lightning_realloc.generation.samples import Sample, StopRule
from lightning_realloc.generation.sampling import Forbidden, SamplingParams
from lightning_realloc.generation.scheduler import Scheduler
from lightning_realloc.generation.speculator import Speculator
from lightning_realloc.generation.verification import Draft, Emitted


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What the last call of `GenerationEngine.generate` did on this rank."""

    num_steps: int = 0
    """Forwards."""
    row_steps: int = 0
    """Running samples, summed over steps."""
    prefill_tokens: int = 0
    generated_tokens: int = 0
    cache_bytes: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    """Drafted tokens that the model read."""
    accepted_tokens: int = 0
    """Of these, those that stood."""
    drafting_s: float = 0.0
    planning_s: float = 0.0


class GenerationRun:
    """All of the state of one call, dropped at its end; a context within which steps are made."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        samples: Sequence[Sample],
        params: SamplingParams,
        stop: StopRule,
        speculator: Speculator,
        num_slots: int,
    ) -> None:
        """Begin with nothing admitted."""
        self._runner = runner
        self._scheduler = scheduler
        self._samples = samples
        self._params = params
        self._stop = stop
        self._speculator = speculator
        self._num_slots = num_slots
        self._num_steps = self._row_steps = self._prefill_tokens = 0

    def __enter__(self) -> None:
        self._verification = self._speculator.begin(self._samples, self._params, self._num_slots)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._speculator.end()

    def step(self) -> None:
        """Admit, run one forward, and take every running sample a token or more further."""
        prefills = self._admit()
        running = [self._samples[index] for index in self._scheduler.running if index is not None]
        drafts = self._speculator.propose(running, is_tail=not self._scheduler.num_waiting) if running else []
        begin = self._speculator.clock()
        rows = [Row((sample.last_token, *draft.tokens), sample.position)
                for sample, draft in zip(running, drafts, strict=True)]  # fmt: skip
        logits = self._runner.forward(prefills, rows)
        self._num_steps += 1
        self._row_steps += len(running)
        if not running:
            return
        emitted = self._verification.emit(logits, running, drafts, self._forbidden(running, drafts))
        self._take_tokens(emitted, running)
        self._speculator.learn(drafts, [tokens for tokens, _ in emitted])
        if not prefills:
            self._speculator.time_step(drafts, self._speculator.clock() - begin)

    def stats(self) -> GenerationStats:
        """Return the counts so far."""
        drafting = self._speculator.stats
        return GenerationStats(
            num_steps=self._num_steps,
            row_steps=self._row_steps,
            prefill_tokens=self._prefill_tokens,
            generated_tokens=sum(len(sample.token_ids) for sample in self._samples),
            cache_bytes=self._runner.cache.num_bytes,
            drafted_tokens=drafting.drafted_tokens,
            verified_tokens=drafting.verified_tokens,
            accepted_tokens=drafting.accepted_tokens,
            drafting_s=drafting.drafting_s,
            planning_s=drafting.planning_s,
        )

    def _admit(self) -> list[Prefill]:
        """Carry out the scheduler's turn and return what has to be computed of newly admitted prompts."""
        turn = self._scheduler.next_turn()
        drafter = self._speculator.drafter
        prefills = []
        for admission in turn.admissions:
            sample = self._samples[admission.samples[0]]
            drafter.admitted([slot for slot in admission.slots if slot != admission.source])
            if admission.source is None:
                # The prompt's last token is left to the row, so that new and old samples are alike from here on.
                prefills.append(Prefill(sample.prompt[:-1], admission.slots))
            else:
                targets = [slot for slot in admission.slots if slot != admission.source]
                self._copy(admission.source, targets, sample.position)
        for move in turn.moves:
            index = self._scheduler.running[move.target]
            assert index is not None, f"slot {move.target} was filled by a move and has no sample"
            self._copy(move.source, [move.target], self._samples[index].position)
        self._prefill_tokens += sum(len(prefill.tokens) for prefill in prefills)
        return prefills

    def _copy(self, source: int, targets: Sequence[int], length: int) -> None:
        self._runner.cache.copy(source, targets, length)
        self._speculator.drafter.copied(source, targets, length)

    def _take_tokens(self, emitted: Sequence[Emitted], running: Sequence[Sample]) -> None:
        if not math.isfinite(sum(sum(logprobs) for _, logprobs in emitted)):
            _raise_not_finite(emitted, running)
        for slot, (sample, (tokens, logprobs)) in enumerate(zip(running, emitted, strict=True)):
            for token, logprob in zip(tokens, logprobs, strict=True):
                sample.append(token, logprob)
                if self._stop.update(sample):
                    self._scheduler.finish(slot)
                    self._speculator.finished(sample)
                    break

    def _forbidden(self, running: Sequence[Sample], drafts: Sequence[Draft]) -> Forbidden | None:
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
    raise GenerationError(
        f"the model's logits are not finite for sample ids {bad[:8]} ({len(bad)} of {len(running)} running); "
        "the weights have diverged or overflow their dtype: lower the learning rate, or use bfloat16 for float16"
    )
