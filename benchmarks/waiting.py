"""Seconds of a generation whose samples wait for an environment, next to those of the model alone.

Each episode has two to four turns of 40 to 120 tokens. Between two turns an asynchronous environment answers after 0.1
to 2 seconds. The forwards of a tiny model sleep until 20 ms after the one before, as if an accelerator took as long for
a step. Turns and waits are drawn once, so that all arms generate the same tokens.

- "alone": answers come at once.
- "slots": the default; as many waiting samples keep their keys and values as run, others are read again.
- "pages": ``max_cache_bytes`` is the memory that "slots" took.

A call takes at least as long as the model alone, and as the slowest episode waits. ``busy`` is the share of slots whose
samples run or are read, over the seconds in which other samples could run.

Run ``python -m benchmarks.waiting``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from typing_extensions import override

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from lightning_realloc.generation import Conversation, GenerationEngine, SamplingParams, Turn
from lightning_realloc.generation.core.sample import Sample, StopRule
from lightning_realloc.generation.loop.run import GenerationRun

PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 24, 8, 128
ARMS = ("alone", "slots", "pages")
MOST_RATIO, LEAST_BUSY = 1.15, 0.9


@dataclass(frozen=True, slots=True)
class Workload:
    """Number of episodes and slots, and the seconds of a step."""

    samples: int = 256
    slots: int = 64
    step_s: float = 0.02
    """Least seconds between two forwards, in which the engine works, too."""
    tokens: tuple[int, int] = (40, 120)
    """Fewest and most tokens of a turn."""
    waits: tuple[float, float] = (0.1, 2.0)
    """Least and most seconds of an answer."""
    turns: int = 3
    """Times that each arm is measured."""
    seed: int = 1


QUICK = Workload(samples=32, slots=8, turns=1)


@dataclass(frozen=True, slots=True)
class Episode:
    """The model's turns, and the environment's waits between them."""

    turns: tuple[int, ...]
    """Tokens of each turn."""
    waits: tuple[float, ...]
    """Seconds of each answer."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole response."""
        return sum(self.turns) + ANSWER_TOKENS * len(self.waits)


def draw_episodes(work: Workload) -> list[Episode]:
    """Return the episodes of a workload, the same for the same seed."""
    rng = Random(work.seed)
    episodes = []
    for _ in range(work.samples):
        turns = tuple(rng.randint(*work.tokens) for _ in range(rng.randint(2, 4)))
        episodes.append(Episode(turns, tuple(rng.uniform(*work.waits) for _ in turns[1:])))
    return episodes


@dataclass(frozen=True, slots=True)
class Tool:
    """Answers after the episode's waits; ``is_instant``: at once."""

    episodes: Sequence[Episode]
    is_instant: bool = False

    async def __call__(self, turn: Turn) -> list[int] | None:
        """Return an answer, or None after the last turn."""
        waits = self.episodes[turn.sample_id].waits
        if turn.number > len(waits):
            return None
        await asyncio.sleep(0.0 if self.is_instant else waits[turn.number - 1])
        return [3 + turn.number] * ANSWER_TOKENS


class _EndsOfTurns(StopRule):
    """Ends each turn after its tokens, as if by an end token that the engine does not know."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        super().__init__(token_ids=frozenset())
        self._episodes = episodes

    @override
    def update(self, sample: Sample) -> bool:
        turns = self._episodes[sample.sample_id].turns
        if len(sample.token_ids) - sample.turn_begin >= turns[sample.turn - 1]:
            sample.finish_reason = "stop"
        return sample.finish_reason is not None


class _Engine(GenerationEngine):
    """An engine whose turns have given lengths, and that measures how many slots are busy."""

    episodes: Sequence[Episode] = ()
    contended_s = busy_slot_s = 0.0

    @override
    def _begin(self, *args: Any) -> GenerationRun:
        run = super()._begin(*args)
        run._stop = _EndsOfTurns(self.episodes)
        self.contended_s = self.busy_slot_s = 0.0

        def measured_step() -> None:
            begin = time.perf_counter()
            run.submit_step()
            others, active = run.scheduler.num_waiting > 0, run.scheduler.num_active
            run.collect_step()
            if others:
                self.contended_s += (seconds := time.perf_counter() - begin)
                self.busy_slot_s += seconds * active

        run.step = measured_step  # type: ignore[method-assign]
        return run


def build_model(work: Workload) -> PreTrainedModel:
    """Return a model of 50,000 weights whose forwards begin at the pace of the workload's device."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)

    due_s = 0.0

    def sleep(*_: object) -> None:
        nonlocal due_s
        time.sleep(max(0.0, due_s - time.perf_counter()))
        due_s = time.perf_counter() + work.step_s

    model.register_forward_pre_hook(sleep)
    return model


def measure(engine: _Engine, work: Workload, *, is_instant: bool) -> tuple[float, list[tuple[int, ...]]]:
    """Return the seconds of a call, and its tokens."""
    prompts = [[3 + index % 125, *[5] * (PROMPT_TOKENS - 1)] for index in range(work.samples)]
    params = SamplingParams(max_new_tokens=1 + max(episode.num_tokens for episode in engine.episodes), ignore_eos=True)
    begin = time.perf_counter()
    completions = engine.generate(
        prompts, params, environment=Tool(engine.episodes, is_instant), conversation=Conversation(max_turns=5)
    )
    return time.perf_counter() - begin, [completion.token_ids for completion in completions]


def run(work: Workload, report: BenchmarkReport) -> None:
    """Measure all arms in turns, and add a row and the targets of each to the report."""
    model, episodes = build_model(work), draw_episodes(work)
    engines = {"alone": _Engine(model, max_slots=work.slots), "slots": _Engine(model, max_slots=work.slots)}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    busy: dict[str, list[float]] = {arm: [] for arm in ARMS}
    tokens = {}
    for _ in range(work.turns):
        for arm in ARMS:
            if arm not in engines:
                engines[arm] = _Engine(model, max_slots=work.slots, max_cache_bytes=engines["slots"].stats.cache_bytes)
            engines[arm].episodes = episodes
            call_s, tokens[arm] = measure(engines[arm], work, is_instant=arm == "alone")
            seconds[arm].append(call_s)
            busy[arm].append(engines[arm].busy_slot_s / (work.slots * engines[arm].contended_s))
    slowest_s = max(sum(episode.waits) for episode in episodes)
    for arm in ARMS:
        ratio = median(call / max(alone, slowest_s) for call, alone in zip(seconds[arm], seconds["alone"], strict=True))
        stats = engines[arm].stats
        report.add_row(
            arm=arm, call_s=median(seconds[arm]), slowest_wait_s=slowest_s, ratio=ratio, busy=median(busy[arm]),
            step_ms=1e3 * median(seconds[arm]) / stats.num_steps, read_tokens=stats.prefill_tokens,
            preemptions=stats.num_preemptions, cache_MB=stats.cache_bytes / 1e6,
        )  # fmt: skip
        if arm != "alone":
            report.require_at_most(f"{arm}: call over model alone or slowest waiting", ratio, MOST_RATIO)
            report.require_at_least(f"{arm}: share of busy slots", median(busy[arm]), LEAST_BUSY)
    report.require_at_most("responses with other tokens", _num_other(tokens), 0)


def _num_other(tokens: Mapping[str, Sequence[tuple[int, ...]]]) -> int:
    return sum(len({*responses}) > 1 for responses in zip(*tokens.values(), strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--turns", type=int, help="times that each arm is measured; default: 3")
    parser.add_argument("--quick", action="store_true", help="32 episodes in 8 slots, for a quick look")
    options = parser.parse_args(arguments)
    be_quiet()
    work = QUICK if options.quick else Workload()
    if options.turns is not None:
        work = Workload(work.samples, work.slots, turns=options.turns)
    settings = {"samples": work.samples, "slots": work.slots, "step_s": work.step_s}
    report = BenchmarkReport("waiting", seeds=(work.seed,), settings=settings)
    run(work, report)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
