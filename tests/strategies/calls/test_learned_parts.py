"""Runs that learn some parts of responses, and count all, compared with a loop over the tokens of each response."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.models import byte_tokenizer
from tests.strategies import runs
from tests.strategies.calls.test_rollout_budget import SAMPLING, Learnt, budget, learn
from tests.strategies.runs import Outcome
from tests.workers import WorkerPool

TEMPLATE = {
    "start_anchor": "<no anchor>",
    "fields": {"thinking": {"open_pattern": "[A-P]", "close_pattern": "[Q-Z]"}, "content": {}},
}
"""Single letters open and close thoughts, so that random responses have some."""
OPTIMIZER = partial(AdamW, lr=1e-2, eps=1e-4)
"""One that does not enlarge rounding."""
STOPS = {2, *runs.SAMPLING.stop_token_ids, *SAMPLING.stop_token_ids}
LETTERS = {token: text for text, token in byte_tokenizer().get_vocab().items() if "A" <= text <= "Z"}


def reasoning_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.response_template = TEMPLATE
    return tokenizer


def num_thoughts(responses: list[list[int]]) -> list[int]:
    """Return the number of tokens of each response that are part of a thought."""
    counts = []
    for response in responses:
        found, inside = [], False
        for token in response:
            letter = LETTERS.get(token, "")
            inside = inside or ("A" <= letter <= "P")
            found.append(inside)
            inside = inside and not letter >= "Q"
        if response[-1] in STOPS:  # it belongs to the part before it
            found[-1] = found[-2] if len(found) > 1 else False
        counts.append(sum(found))
    return counts


def fit(name: str, layout: str, world_size: int, settings: dict[str, Any]) -> Outcome:
    """Return the outcome of two iterations that learn the answers."""
    strategy, moves = settings.pop("strategy", {}), settings.pop("moves", False)
    options = {"generation": GenerationOptions(sample_reallocation="all")} if moves else {}
    given = {
        "tokenizer": reasoning_tokenizer(),
        "learned_parts": ("answer",),
        "optimizer": OPTIMIZER,
        **options,
        **settings,
    }
    module = {"grpo": runs.grpo, "ppo": runs.ppo}[name](**given)
    with moving(every=1, plan_balance=at_random) if moves else nullcontext():
        return runs.train_in_layout(module, layout, world_size, runs.Batches(2), strategy)


def run(workers: WorkerPool, name: str, layout: str, world_size: int, **settings: Any) -> list[Outcome]:
    outcomes: list[Outcome] = workers.run(
        fit, name, layout, world_size, settings, world_size=world_size, init_process_group=False
    )
    return outcomes


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    matrix(
        [
            *((name, layout, {}) for name in ("grpo", "ppo") for layout in ("dp2", "fsdp2", "tp2")),
            ("grpo", "dp2", {"strategy": {"generation_chunks": 2}}),
            ("grpo", "dp2", {"moves": True}),
        ],
        ("ppo", "dp2", {}),
    ),
)
def test_every_layout_learns_the_same_tokens(
    workers: WorkerPool, name: str, layout: str, settings: dict[str, Any]
) -> None:  # fmt: skip
    (alone,) = run(workers, name, "dp1", 1)
    runs.check_equal_to_one_rank(run(workers, name, layout, 2, **settings), alone)
    (whole,) = run(workers, name, "dp1", 1, learned_parts=("thinking", "calls", "answer"))
    assert whole.tokens[0] == alone.tokens[0]
    assert runs.largest_difference(whole.weights, alone.weights) > 1e-4


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_the_loss_is_the_mean_over_learned_tokens(average: str) -> None:
    outcome = fit(
        "grpo",
        "dp1",
        1,
        {"loss_average": average, "advantages": "group_mean", "kl_coef": 0.0, "learned_parts": ["answer"]},
    )
    responses, rewards, logged = outcome.tokens[0], outcome.rewards[0], outcome.logged[0]
    thoughts = num_thoughts(responses)
    learned = [len(response) - count for response, count in zip(responses, thoughts, strict=True)]
    assert sum(thoughts) > 0 and 0 in learned and sum(learned) > 10
    # Ratios are 1 in the first step, so the loss of a token is minus its advantage.
    groups = [rewards[first : first + runs.SAMPLING.n] for first in range(0, len(rewards), runs.SAMPLING.n)]
    advantages = [reward - sum(group) / len(group) for group in groups for reward in group]
    if average == "token":
        expected = -sum(a * n for a, n in zip(advantages, learned, strict=True)) / sum(learned)
    else:
        expected = -sum(a for a, n in zip(advantages, learned, strict=True) if n) / len(learned)
    assert logged["actor/loss"] == pytest.approx(expected, abs=1e-5)
    assert logged["thinking_tokens"] == pytest.approx(sum(thoughts) / len(thoughts))
    assert logged["answer_tokens"] == pytest.approx(sum(learned) / len(learned))
    assert "call_tokens" not in logged


def straight_and_resumed(folder: str) -> list[Learnt]:
    """Return a run with a budget, and one that resumes after its second iteration."""
    settings = {**budget(tokens=40), "tokenizer": reasoning_tokenizer(), "learned_parts": ("thinking",)}
    fitted, path = partial(learn, "grpo", "dp2", 2, settings), Path(folder) / "half"
    return [fitted(save=(2, path)), fitted(resume=path)]


@pytest.mark.exhaustive  # whole turns: above
def test_turns_that_continue_in_the_next_iteration_are_read_as_a_whole(workers: WorkerPool, tmp_path: Path) -> None:
    straight, resumed = workers.run(straight_and_resumed, str(tmp_path), world_size=2, init_process_group=False)[0]
    assert straight.logged[1]["carried_samples"] > 0
    for logged, responses in zip(straight.logged, straight.responses, strict=True):
        counts = num_thoughts(list(responses.values()))
        assert logged["thinking_tokens"] == pytest.approx(sum(counts) / len(counts))
    assert resumed.logged == straight.logged[2:]
    assert runs.largest_difference(resumed.weights, straight.weights) == 0.0
