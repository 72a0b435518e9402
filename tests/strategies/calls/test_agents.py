"""Training with an environment of messages for each response: the same results in every layout and mode."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from lightning_realloc.algorithms.base.generation_options import GenerationOptions, SampleReallocation
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.generation import Conversation, RolloutBudget, SamplingParams, Speculation
from tests.environments.guessing import (
    Asking,
    Guessing,
    chat_model,
    chat_tokenizer,
    is_even,
    words_as_calls_of_two,
)
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.calls.test_sample_reallocation import Moved
from tests.strategies.runs import Outcome
from tests.workers import WorkerFailure, WorkerPool

SAMPLING = SamplingParams(n=2, max_new_tokens=40)
BOUNDS = Conversation(max_turns=4)


class Games:
    """Two batches of six games."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Samples]:
        tokens = chat_tokenizer()("user: Guess <end> assistant:")["input_ids"]
        for index in range(2):
            ids = torch.arange(6) + 6 * index
            prompts = ([{"role": "user", "content": "Guess"}],) * 6
            columns = {"prompt_ids": Ragged.from_list([tokens] * 6)}
            yield Samples(ids, columns, {"prompt": prompts, "secret": tuple(range(6))})


CHUNKS = {"strategy": {"generation_chunks": 2}}


def few_words(completions: list[list[Mapping[str, Any]]], **columns: object) -> list[float]:
    """Reward short conversations."""
    return [-0.01 * sum(len(message["content"]) for message in messages) for messages in completions]


def guesses_left(environments: list[Guessing], **columns: object) -> list[float]:
    """Reward games by their own state, which is known only where they ran."""
    return [10.0 - game.num_guesses for game in environments]


def play(name: str, layout: str, world_size: int, settings: dict[str, Any]) -> Outcome:
    """Return the outcome of two iterations."""
    strategy = settings.pop("strategy", {})
    optimizer = partial(AdamW, lr=1e-2, eps=1e-4)
    made = {"grpo": runs.RecordedGRPO, "ppo": runs.RecordedPPO}[name](
        chat_model(), settings.pop("reward", None), reference=chat_model(1), tokenizer=chat_tokenizer(),
        sampling=SAMPLING, environment=Guessing, conversation=BOUNDS, optimizer=optimizer, **settings,
    )  # fmt: skip
    return runs.train_in_layout(made, layout, world_size, Games(), strategy)


def run(workers: WorkerPool, name: str, layout: str, world_size: int, **settings: Any) -> Outcome:
    """Return the first rank's outcome."""
    return runs.outcome_of(workers, play, name, layout, world_size, settings, world_size=world_size)


@pytest.mark.parametrize(
    ("name", "layout"),
    matrix(
        [("grpo", "dp2"), ("grpo", "fsdp2"), ("grpo", "tp2"), ("ppo", "dp2"), ("ppo", "tp2")],
        ("ppo", "dp2"),
    ),
)  # fmt: skip
def test_every_layout_gives_the_results_of_one_rank(workers: WorkerPool, name: str, layout: str) -> None:
    alone, together = run(workers, name, "dp1", 1), run(workers, name, layout, 2)
    assert together.tokens == alone.tokens
    assert together.rewards == alone.rewards
    assert runs.mean_difference(together.weights, alone.weights) < 1e-6
    first = alone.logged[0]
    assert first["stopped/failure"] == 0.0 and first["turns"] > 1.5 and 0.0 < first["stopped/environment"] < 1.0
    assert first["environment/solved"] >= first["stopped/environment"]  # the mean over games with an answer
    assert len({reward for rewards in alone.rewards for reward in rewards}) > 3


@pytest.mark.exhaustive  # chunks with tools and with reward functions: below
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": {"generation_chunks": 3}},
        {"generation": GenerationOptions(max_cache_bytes=1 << 16)},
        {"reward": few_words},
    ],
)
def test_other_modes_change_no_game(workers: WorkerPool, settings: dict[str, Any]) -> None:
    plain, other = run(workers, "grpo", "dp1@0", 2), run(workers, "grpo", "dp1@0", 2, **settings)
    assert other.tokens[0] == plain.tokens[0]
    if "reward" in settings:
        assert all(ours < theirs for ours, theirs in zip(other.rewards[0], plain.rewards[0], strict=True))
    else:
        assert other.rewards == plain.rewards


def play_with_moves(moves: SampleReallocation) -> tuple[Outcome, list[float]]:
    """Return the outcome of two iterations, and the number of samples that moved in each."""
    options = GenerationOptions(sample_reallocation=moves)
    module = runs.RecordedGRPO(
        chat_model(), reference=chat_model(1), tokenizer=chat_tokenizer(), sampling=SAMPLING, environment=Guessing,
        conversation=BOUNDS, generation=options,
    )  # fmt: skip
    moved = Moved()
    with moving(every=1, plan_balance=at_random):
        outcome = runs.train(module, runs.plan_of(module, "dp2"), 2, Games(), callbacks=[moved])  # type: ignore[arg-type]
    return outcome, moved.counts


@pytest.mark.exhaustive  # of the engine: tests/generation/rebalance/test_home_conversations.py
def test_an_environment_stays_on_its_rank_when_its_sample_moves(workers: WorkerPool) -> None:
    (stayed, _), (moved, counts) = (
        workers.run(play_with_moves, moves, world_size=2, init_process_group=False)[0] for moves in (False, "all")
    )
    assert sum(counts) >= 1
    assert all(step["stopped/failure"] == 0.0 for step in moved.logged)
    assert moved.tokens == stayed.tokens and moved.rewards == stayed.rewards


@pytest.mark.parametrize("settings", matrix([{}, CHUNKS], CHUNKS))
def test_reward_functions_read_environments(workers: WorkerPool, settings: dict[str, Any]) -> None:
    plain = run(workers, "grpo", "dp1@0", 2)
    other = run(workers, "grpo", "dp1@0", 2, reward=[guesses_left, few_words], reward_weights=[1.0, 0.0], **settings)
    assert other.tokens[0] == plain.tokens[0]
    num_guesses = [10.0 - (ours - theirs) for ours, theirs in zip(other.rewards[0], plain.rewards[0], strict=True)]
    # a turn that is not the last one costs 0.1, and the right guess earns 1 less 0.1 for each turn
    for count, reward in zip(num_guesses, plain.rewards[0], strict=True):
        lost, solved = -0.1 * count, 1 - 0.1 * count - 0.1 * (count - 1)
        assert reward == pytest.approx(lost, abs=1e-5) or reward == pytest.approx(solved, abs=1e-5)


class Owner(Guessing):
    """Writes the prompt, and draws the number."""

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin the game of a row."""
        super().reset({"secret": random.Random(row["seed"]).randrange(6)})
        return [{"role": "user", "content": "Guess"}]


class Shop:
    """Has TRL's contract, and rewards its own number."""

    def reset(self, seed: int) -> str:
        """Begin with a number."""
        self.seed = seed
        return "Guess"

    def get_reward(self) -> float:
        """Return the number."""
        return float(self.seed)


def play_without_prompts(environment: Any, rows: Any, limits: Mapping[str, int]) -> list[dict[str, float]]:
    """Return the metrics of a run with a data module of these rows."""
    module = runs.RecordedGRPO(
        chat_model(), tokenizer=chat_tokenizer(), sampling=SAMPLING, environment=environment, conversation=BOUNDS
    )
    data = PromptDataModule(rows, batch_size=3, shuffle=False)
    return runs.train(module, "static", 1, data, **{"max_epochs": None, **limits}).logged  # type: ignore[arg-type]


@pytest.mark.exhaustive  # on one rank: tests/algorithms/rollout/test_agents.py
def test_an_environment_may_own_the_tasks(workers: WorkerPool) -> None:
    def run_of(*arguments: Any, **limits: int) -> list[dict[str, float]]:
        made: list[list[dict[str, float]]] = workers.run(
            play_without_prompts, *arguments, limits, world_size=1, init_process_group=False
        )
        return made[0]

    logged = run_of(Owner, None, max_steps=2)
    assert len(logged) == 2 and all(step["stopped/failure"] == 0.0 < step["turns"] for step in logged)
    # the seeds are the numbers of the run's rows: 0, 1, 2, then 3, 4, 5
    assert [step["reward"] for step in run_of(Shop, None, max_steps=2)] == [1.0, 4.0]
    assert [step["reward"] for step in run_of(Shop, [{"seed": 7}] * 3, max_steps=1)] == [7.0]
    with pytest.raises(WorkerFailure, match=r"Trainer\(max_steps=...\) bounds the run; .* has one, and max_steps=-1"):
        run_of(Owner, None, max_epochs=1)
    with pytest.raises(WorkerFailure, match=r"Guessing\.reset wrote no prompt, and the row has none; return one there"):
        run_of(Guessing, [{"secret": 1}] * 3, max_steps=1)
    several = {"game": Owner, "shop": Shop}
    with pytest.raises(WorkerFailure, match="names one of 'game', 'shop'; in a row it is missing, of columns"):
        run_of(several, None, max_steps=1)
    rows = [{"seed": 1, "environment": name} for name in ("game", "shop", "desk")]
    with pytest.raises(WorkerFailure, match="in a row it is 'desk'; correct the row"):
        run_of(several, rows, max_steps=1)


@pytest.mark.exhaustive  # conversations in pieces: test_rollout_budget.py
def test_games_go_on_in_the_next_iteration(workers: WorkerPool) -> None:
    budget = GenerationOptions(rollout_budget=RolloutBudget(tokens=60))
    outcome = run(workers, "grpo", "dp2", 2, generation=budget)
    assert max(step["carried_samples"] for step in outcome.logged) > 0
    assert all(step["stopped/failure"] == 0.0 for step in outcome.logged)
    assert all(math.isfinite(reward) for rewards in outcome.rewards for reward in rewards)


# ---- conversations with tools: the same tokens, whatever generates them
class Openings(Games):
    """Games that begin with different words."""

    def __iter__(self) -> Iterator[Samples]:
        rng = random.Random(3)
        for samples in super().__iter__():
            opened = [f"Guess {' '.join(rng.choices('012345', k=4))}" for _ in range(len(samples))]
            prompts = tuple([{"role": "user", "content": words}] for words in opened)
            yield Samples(samples.ids, samples.columns, {**samples.data, "prompt": prompts})


MODES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"strategy": {"generation_chunks": 3}},
    "stale": {"strategy": {"max_staleness": 1}},
    "moves": {"generation": GenerationOptions(sample_reallocation="all")},
    "bounded cache": {"generation": GenerationOptions(max_cache_bytes=1 << 16)},
    "drafts": {"speculation": Speculation(drafter="ngram", num_draft_tokens=3)},
}
LAYOUTS = {"dp1": 1, "tp2": 2, "dp2.tp2": 4, "fsdp4": 4, "pp2": 2, "pp2.fsdp2": 4}
"""Layout -> its number of ranks."""
GREEDY, SAMPLED = 1e-6, 1.0
"""Temperatures; that of rollouts is above 0."""


def converse(layout: str, mode: str, temperature: float) -> tuple[Outcome, float]:
    """Return the outcome of two iterations that learn nothing, and the number of samples that moved."""
    settings = dict(MODES[mode])
    strategy, moved = settings.pop("strategy", {}), Moved()
    module = runs.RecordedGRPO(
        chat_model(), few_words, reference=chat_model(1), tokenizer=chat_tokenizer(), environment=Asking,
        tools=[is_even], parser=words_as_calls_of_two,
        sampling=SamplingParams(n=2, max_new_tokens=60, temperature=temperature),
        conversation=Conversation(max_turns=5, max_turn_tokens=4), optimizer=partial(AdamW, lr=0.0), **settings,
    )  # fmt: skip
    plan = runs.ReallocStrategy(runs.plan_of(module, layout) if LAYOUTS[layout] > 1 else "static", **strategy)
    with moving(every=1, plan_balance=at_random) if mode == "moves" else nullcontext():
        outcome = runs.train(module, plan, LAYOUTS[layout], Openings(), callbacks=[moved])  # type: ignore[arg-type]
    return outcome, sum(moved.counts)


@pytest.mark.parametrize(
    ("layout", "mode", "temperature"),
    matrix(
        [
            case
            for case in itertools.product(LAYOUTS, MODES, (GREEDY, SAMPLED))
            if case[:2] != ("dp1", "plain") and (case[1] != "moves" or case[0] == "dp2.tp2")
        ],
    ),
)
def test_conversations_with_tools_are_the_same(workers: WorkerPool, layout: str, mode: str, temperature: float) -> None:
    (alone, _), (other, moved) = (
        workers.run(converse, *case, temperature, world_size=LAYOUTS[case[0]], init_process_group=False)[0]
        for case in (("dp1", "plain"), (layout, mode))
    )
    assert other.tokens == alone.tokens and other.rewards == alone.rewards
    assert (moved > 0) == (mode == "moves")
    first = alone.logged[0]
    assert first["stopped/failure"] == 0.0 and first["turns"] > 2 and first["tool_calls"] > 1
    assert min(first["tool_calls/is_above"], first["tool_calls/is_even"]) > 0
    assert len(set(map(tuple, alone.tokens[0]))) > 3
