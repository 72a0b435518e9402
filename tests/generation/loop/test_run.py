"""The generation loop on an executor without a model: every token is read once, in order, whatever the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.core.plain_decoding import Decoding
from lightning_realloc.generation.core.sample import Sample, StopRule
from lightning_realloc.generation.core.step import Draft
from lightning_realloc.generation.loop.run import Budget, GenerationRun
from lightning_realloc.generation.schedule.scheduler import Prompt, Scheduler
from lightning_realloc.generation.speculative.config import Speculation
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.speculator import Speculator
from tests.generation.fake_executor import CopyingExecutor


class Counting(Drafter):
    """Drafts the next numbers, every third of them wrong."""

    def propose(self, running: Sequence[Sample], limits: Sequence[int]) -> Sequence[Draft]:
        """Return drafts up to the limits."""
        return [
            Draft(tuple(sample.last_token + 1 + i + (i % 3 == 2) for i in range(limit)))
            for sample, limit in zip(running, limits, strict=True)
        ]


def run_to_end(
    prompts: Sequence[int], limits: Sequence[int], *, n: int, num_slots: int, most_read: int, decoding: Decoding,
    tokens: int | None = None,
) -> tuple[list[Sample], CopyingExecutor, GenerationRun]:  # fmt: skip
    samples = [
        Sample(index * n + k, index, ModelInput(tuple(range(length))), limit, key=0)
        for index, (length, limit) in enumerate(zip(prompts, limits, strict=True))
        for k in range(n)
    ]
    waiting = [Prompt(i, length - 1, tuple(range(i * n, i * n + n))) for i, length in enumerate(prompts)]
    scheduler = Scheduler(waiting, num_slots=num_slots, max_prefill_tokens=most_read)
    stop = StopRule(token_ids=frozenset({40}), strings=(), tokenizer=None, min_new_tokens=0)
    executor, budget = CopyingExecutor(), Budget(tokens, None, lambda: 0.0, lambda: True)
    params = SamplingParams(n=n)
    run = GenerationRun(executor, scheduler, samples, params, stop, decoding, None, budget, max_pause_s=math.inf)
    with run:
        while run.has_work:
            run.step()
    return samples, executor, run


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 20),
    st.booleans(),
)
def test_every_sample_gets_its_own_tokens_in_any_schedule(
    asked: list[tuple[int, int]], n: int, num_slots: int, most_read: int, drafts: bool
) -> None:
    speculation = Speculation(drafter="none", num_draft_tokens=3)
    decoding = Speculator(speculation, Counting(), clock=lambda: 0.0) if drafts else Decoding()
    prompts, limits = zip(*asked, strict=True)
    samples, executor, run = run_to_end(
        prompts, limits, n=n, num_slots=num_slots, most_read=most_read, decoding=decoding
    )
    for sample in samples:
        length = len(sample.prompt)
        assert sample.token_ids == list(range(length, length + sample.max_new_tokens))
        assert sample.finish_reason == "length" and sample.logprobs == [-1.0] * sample.max_new_tokens
    stats = run.stats()
    assert stats.generated_tokens == sum(limits) * n and stats.num_steps == len(executor.steps)
    assert stats.row_steps == sum(len(step.running) for step in executor.steps)
    assert max(len(step.running) for step in executor.steps) <= num_slots
    if drafts:  # a draft ends before the last token, so no accepted token is cut off
        assert stats.generated_tokens == stats.row_steps + stats.accepted_tokens


def test_a_stop_token_ends_a_sample_in_the_middle_of_its_draft_and_a_budget_the_call() -> None:
    speculator = Speculator(Speculation(drafter="none", num_draft_tokens=2), Counting(), clock=lambda: 0.0)
    (sample,), executor, _ = run_to_end([39], [9], n=1, num_slots=1, most_read=64, decoding=speculator)
    assert sample.token_ids == [39, 40] and sample.finish_reason == "stop"
    assert len(executor.steps) == 1  # it reads the prompt, and then its last token with the draft 39, 40
    samples, _, _ = run_to_end([3, 3], [9, 9], n=1, num_slots=2, most_read=64, decoding=Decoding(), tokens=6)
    assert [(s.token_ids, s.finish_reason) for s in samples] == [([3, 4, 5], "unfinished")] * 2
