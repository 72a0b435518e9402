"""Training on conversations equals runs without an environment and runs on one rank."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
from torch.optim import AdamW

from lightning_realloc.algorithms.base.generation_options import GenerationOptions, SampleReallocation
from lightning_realloc.generation import Conversation, SamplingParams, Turn
from tests.generation.dialogues import tool
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.models import UNEVEN_HEADS, tiny_model
from tests.strategies import runs
from tests.strategies.calls.test_sample_reallocation import Moved
from tests.strategies.calls.test_speculation import ALGORITHMS
from tests.strategies.runs import Batches, Outcome
from tests.workers import WorkerFailure, WorkerPool

SAMPLING = SamplingParams(n=2, max_new_tokens=32, stop_token_ids=tuple(range(80, 128)))
"""A turn has three tokens on average."""


def never(turn: Turn) -> None:
    """End every response after its first turn."""


def informed(turn: Turn) -> list[int] | None:
    """Answer as the tool does, after checking that the turn has the right row of the data."""
    if turn.columns != {"prompt": f"prompt {turn.sample_id // SAMPLING.n}"}:
        raise ValueError(f"sample {turn.sample_id} is told of {turn.columns}")
    return tool(turn)


def unreliable(turn: Turn) -> list[int] | None:
    """Raise for every third sample, hang for the one after it, and answer the others."""
    if turn.sample_id % 3 == 0:
        raise RuntimeError("out of order")
    if turn.sample_id % 3 == 1:
        time.sleep(30)
    return tool(turn)


def run_some(name: str, layout: str, world_size: int, settings: dict[str, Any]) -> Outcome:
    """Return the outcome of two iterations."""
    strategy = settings.pop("strategy", {})
    optimizer = partial(AdamW, lr=1e-2, eps=1e-4)  # with the default eps the last bit of a tiny gradient decides
    module = ALGORITHMS[name](**{"sampling": SAMPLING, "optimizer": optimizer, **settings})
    return runs.train_in_layout(module, layout, world_size, Batches(2), strategy)


def run(workers: WorkerPool, name: str, layout: str, world_size: int, **settings: Any) -> Outcome:
    """Return the first rank's outcome."""
    return runs.outcome_of(workers, run_some, name, layout, world_size, settings, world_size=world_size)


@pytest.mark.parametrize("name", matrix(["grpo", "ppo"], "grpo"))
def test_an_environment_that_never_answers_changes_nothing(workers: WorkerPool, name: str) -> None:
    plain, asked = (run(workers, name, "dp1", 1, environment=one) for one in (None, never))
    assert asked.tokens == plain.tokens
    assert asked.rewards == plain.rewards
    assert runs.largest_difference(asked.weights, plain.weights) == 0.0
    for mine, others in zip(asked.logged, plain.logged, strict=True):
        assert mine == others | {
            "turns": 1.0, "stopped/environment": others["stopped/model"], "stopped/model": 0.0,
            "stopped/max_turns": 0.0, "stopped/failure": 0.0,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    matrix(
        [("grpo", "dp2"), ("grpo", "fsdp2"), ("grpo", "tp2"), ("ppo", "dp2")],
        ("grpo", "tp2"),
    ),
)
def test_conversations_give_the_same_results_on_one_rank_and_two(workers: WorkerPool, name: str, layout: str) -> None:
    settings: dict[str, Any] = {"environment": informed, "conversation": Conversation(max_turns=2)}
    alone, together = run(workers, name, "dp1", 1, **settings), run(workers, name, layout, 2, **settings)
    assert together.tokens == alone.tokens
    assert together.rewards == alone.rewards
    assert runs.mean_difference(together.weights, alone.weights) < 1e-6
    first = alone.logged[0]
    assert first["stopped/failure"] == 0.0
    assert 1.0 < first["turns"] < 2.0 and 0.0 < first["stopped/environment"] < 1.0
    # Lengths count only the model's tokens.
    whole = [sum(map(len, rows)) / len(rows) for rows in alone.tokens]
    assert all(step["response_length"] < length for step, length in zip(alone.logged, whole, strict=True))


@pytest.mark.parametrize(("layout", "world_size"), matrix([("dp1", 1), ("tp2", 2)], ("dp1", 1)))
def test_a_run_that_generates_by_the_models_own_generate_has_conversations_too(
    workers: WorkerPool, layout: str, world_size: int
) -> None:
    settings: dict[str, Any] = {"environment": informed, "conversation": Conversation(max_turns=2), "engine": "hf"}
    for logged in run(workers, "grpo", layout, world_size, **settings).logged:
        assert logged["stopped/failure"] == 0.0
        assert 1.0 < logged["turns"] <= 2.0


@pytest.mark.exhaustive  # chunks: test_agents.py and test_partners.py; a step ahead: test_staleness.py
def test_conversations_run_in_chunks_and_one_step_ahead(workers: WorkerPool) -> None:
    plain, chunks, ahead = (
        run(workers, "grpo", "dp1@0", 2, environment=tool, strategy=strategy)
        for strategy in ({}, {"generation_chunks": 3}, {"max_staleness": 1})
    )
    assert ahead.tokens[0] == plain.tokens[0]
    assert chunks.tokens == plain.tokens
    assert runs.mean_difference(chunks.weights, plain.weights) < 1e-6


def run_with_moves(layout: str, world_size: int, moves: SampleReallocation) -> tuple[Outcome, list[float]]:
    """Return the outcome of two iterations, and the number of samples that moved in each."""
    sizes = dict(UNEVEN_HEADS["9/3"]) if "tp" in layout else {}  # counterparts hold equally many heads
    actor, reference = (tiny_model("llama", seed=seed, **sizes) for seed in (0, 1))
    generation = GenerationOptions(sample_reallocation=moves)
    module = runs.grpo(actor=actor, reference=reference, sampling=SAMPLING, environment=informed, generation=generation)
    moved = Moved()
    with moving(every=1, plan_balance=at_random):
        outcome = runs.train(module, runs.plan_of(module, layout), world_size, Batches(2), callbacks=[moved])
    return outcome, moved.counts


@pytest.mark.parametrize(("layout", "world_size"), matrix([("dp2", 2), ("dp2.tp2", 4)], ("dp2", 2)))
def test_conversations_continue_on_the_rank_that_receives_their_sample(
    workers: WorkerPool, layout: str, world_size: int
) -> None:
    (stayed, _), (moved, counts) = (
        workers.run(run_with_moves, layout, world_size, moves, world_size=world_size, init_process_group=False)[0]
        for moves in (False, "all")
    )
    assert sum(counts) >= 1
    assert all(step["stopped/failure"] == 0.0 for step in moved.logged)
    assert moved.tokens == stayed.tokens
    assert runs.mean_difference(moved.weights, stayed.weights) < 1e-6


def rewards_and_failures(workers: WorkerPool, on_failure: Any) -> tuple[list[float], float]:
    """Return the rewards of the first iteration, and the share of its environments that failed."""
    bounds = Conversation(deadline_s=1.0, on_failure=on_failure, retries=0)
    outcome = run(workers, "grpo", "dp1", 1, environment=out_of_order, conversation=bounds)
    return outcome.rewards[0], outcome.logged[0]["stopped/failure"]


def out_of_order(turn: Turn) -> list[int] | None:
    """Raise for every third sample."""
    if turn.sample_id % 3 == 0:
        raise RuntimeError("out of order")
    return tool(turn)


def test_failures_of_environments_are_left_out_learned_or_end_the_run(workers: WorkerPool) -> None:
    dropped, share = rewards_and_failures(workers, "drop")
    learned, same = rewards_and_failures(workers, "learn")
    assert share == same > 0.2
    assert sum(map(math.isnan, dropped)) == round(share * len(dropped))
    assert not any(map(math.isnan, learned))
    assert all(math.isnan(ours) or ours == theirs for ours, theirs in zip(dropped, learned, strict=True))
    with pytest.raises(WorkerFailure, match="failed, and on_failure='raise' ends the run: the environment raised Runt"):
        rewards_and_failures(workers, "raise")


@pytest.mark.exhaustive  # on one rank: tests/generation/test_turns.py; in a run: tests/chaos
def test_tools_that_raise_or_hang_end_only_their_own_samples(workers: WorkerPool) -> None:
    begin = time.monotonic()
    settings: dict[str, Any] = {"environment": unreliable, "conversation": Conversation(deadline_s=1.0)}
    outcome = run(workers, "grpo", "dp2", 2, **settings)
    assert time.monotonic() - begin < 25  # no rank waited for a call that hangs
    sound = run(workers, "grpo", "dp2", 2, environment=tool)
    for step in outcome.logged:
        assert 0.3 < step["stopped/failure"] < 0.67  # samples may also end at the length limit
    for rows, expected in zip(outcome.tokens[:1], sound.tokens[:1], strict=True):
        assert rows[2::3] == expected[2::3]  # their tool worked
        assert all(row == other[: len(row)] for row, other in zip(rows, expected, strict=True))
    assert outcome.steps == [1, 2]
