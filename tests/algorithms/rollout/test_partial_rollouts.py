"""Rollouts with a budget: finished, carried and late responses, token versions and checkpoints."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_realloc import GenerationOptions
from lightning_realloc.algorithms.base.rollout_columns import Dialogue
from lightning_realloc.algorithms.rollout.partial_rollouts import BudgetedRollout, PartialRollouts, Progress
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import ANSWER_INPUTS, Divided, Samples
from lightning_realloc.errors import CheckpointError, ConfigError, DataError
from lightning_realloc.generation import Completion, Conversation, GenerationEngine, RolloutBudget, SamplingParams
from tests.generation.dialogues import tool
from tests.models import tiny_model
from tests.strategies import runs

SAMPLING = SamplingParams(n=2, max_new_tokens=16, stop_token_ids=tuple(range(118, 128)), seed=3)


def completion(sample_id: int, reason: Any = "stop") -> Completion:
    """Return a response of one token."""
    return Completion(sample_id, 0, (7,), (-1.0,), reason, (True,), (0,), ModelInput((5,)))


def test_a_rollout_may_stop_once_enough_groups_are_finished_and_none_is_late() -> None:
    # Two groups: samples 0 and 1, and sample 2, whose sibling finished before. Sample 1 is late.
    progress = Progress({0: 10, 1: 10, 2: 11}, least=2, late=[1], waiting={11: 1})
    heard = []
    for sample_id in (0, 2, 1):
        progress.record(completion(sample_id))
        heard.append(progress.may_stop())
    # Half of group 10: no. All of group 11: two samples, but sample 1 is late. All samples: yes.
    assert heard == [False, False, True]
    progress = Progress({0: 0, 1: 1}, least=1, late=[], waiting={})
    progress.record(completion(0, "unfinished"))
    assert not progress.may_stop()
    progress.record(completion(1, "environment"))  # a failure ends a response, too
    assert progress.may_stop()


def prompts_of(*ids: int) -> Samples:
    """Return prompts of three tokens with their texts."""
    rows = [[5 + index, 9, 17] for index in ids]
    return Samples(torch.tensor(ids), {"prompt_ids": Ragged.from_list(rows), "prompt": tuple(map(str, ids))})


def part(iteration: int, *, groups: bool = True, **budget: Any) -> BudgetedRollout:
    """Return one rollout with a budget."""
    return BudgetedRollout(
        budget=RolloutBudget(**budget), iteration=iteration, num_minibatches=1, whole_groups=groups
    )  # fmt: skip


def state_of(samples: Samples) -> dict[int, Completion]:
    """Return sample id -> its tokens, log-probabilities and versions."""
    columns = [samples.ragged(name).to_lists() for name in ("response_ids", "behaviour_logprobs", "versions")]
    return {
        sample_id: Completion(sample_id, 0, tuple(t), tuple(lp), "stop", (), tuple(v), ModelInput(()))  # type: ignore[arg-type]
        for sample_id, t, lp, v in zip(samples.ids.tolist(), *columns, strict=True)
    }


@pytest.mark.parametrize("groups", [True, False])
def test_budgeted_rollouts_give_the_tokens_of_whole_rollouts(groups: bool) -> None:
    engine = GenerationEngine(tiny_model("llama").double())
    prompts = prompts_of(*range(6))
    whole = engine.generate(prompts.ragged("prompt_ids").to_lists(), SAMPLING)
    carried, finished, num_iterations = None, {}, 0
    while True:
        engine.weights_updated(num_iterations)
        made = part(num_iterations, tokens=20, groups=groups, max_staleness=99).run(engine, prompts, SAMPLING, carried)
        assert isinstance(made, Divided) and len(made.finished) > 0  # some responses to train on in every iteration
        assert finished.keys().isdisjoint(made.finished.ids.tolist())
        finished |= state_of(made.finished)
        num_iterations += 1
        if groups:
            counts = made.finished.tensor("prompt_id").unique(return_counts=True)[1]
            assert counts.tolist() == [2] * len(counts)
        if not len(made.carried):
            break
        carried = made.carried
        prompts = PartialRollouts.from_responses(carried, prompts).prompts
    assert num_iterations > 2
    assert {one.sample_id: one.token_ids for one in whole} == {i: one.token_ids for i, one in finished.items()}
    for one in whole:
        assert finished[one.sample_id].logprobs == pytest.approx(one.logprobs, abs=1e-6)
    assert any(len(set(one.versions)) > 1 for one in finished.values())


def test_tokens_keep_their_logprobs_and_versions_when_weights_change() -> None:
    model = tiny_model("llama").double()
    engine = GenerationEngine(model)
    engine.weights_updated(5)
    begun = part(5, tokens=24).run(engine, prompts_of(0, 1, 2, 3), SAMPLING, None)
    before = state_of(begun.carried)
    assert begun.carried.tensor("began_in").tolist() == [5] * len(begun.carried)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), tiny_model("llama", seed=1).parameters(), strict=True):
            parameter.copy_(other)
    engine.weights_updated(6)
    worked_on = PartialRollouts.from_responses(begun.carried, prompts_of(0, 1, 2, 3)).prepend_to(prompts_of(7))
    made = part(6, tokens=10_000).run(engine, worked_on, SAMPLING, begun.carried)
    assert len(made.carried) == 0
    after = state_of(made.finished)
    assert after.keys() == before.keys() | {14, 15}
    for sample_id, old in before.items():
        new, length = after[sample_id], len(old.token_ids)
        assert new.token_ids[:length] == old.token_ids
        assert new.logprobs[:length] == old.logprobs  # by the weights that drew them, so that ratios are right
        assert new.versions == (5,) * length + (6,) * (len(new.token_ids) - length)
    stale = made.finished.tensor("stale_tokens").tolist()
    assert stale == [len(before[i].token_ids) if i in before else 0 for i in made.finished.ids.tolist()]
    assert sum(stale) > 0
    assert made.finished.tensor("oldest_ages").tolist() == [int(tokens > 0) for tokens in stale]


def test_late_responses_are_finished_or_dropped() -> None:
    engine = GenerationEngine(tiny_model("llama").double())
    prompts = prompts_of(*range(6))
    begun = part(0, tokens=20).run(engine, prompts, SAMPLING, None)
    left = PartialRollouts.from_responses(begun.carried, prompts).prompts
    # Responses that may not be carried on are finished beyond the budget:
    finished = part(2, tokens=1, max_staleness=2).run(engine, left, SAMPLING, begun.carried)
    assert len(finished.carried) == 0 and len(finished.finished) == len(begun.carried)
    dropped = part(2, tokens=1, max_staleness=2, late="drop").run(engine, left, SAMPLING, begun.carried)
    assert len(dropped.carried) == 0 and 0 < len(dropped.finished) < len(begun.carried)
    carried = part(1, tokens=1, max_staleness=2).run(engine, left, SAMPLING, begun.carried)
    assert len(carried.carried) + len(carried.finished) == len(begun.carried) and len(carried.carried)


def test_carried_responses_survive_saving_and_loading() -> None:
    engine = GenerationEngine(tiny_model("llama").double())
    prompts = prompts_of(*range(4))
    made = part(0, tokens=20).run(engine, prompts, SAMPLING, None)
    carried = PartialRollouts.from_responses(made.carried, prompts)
    assert 0 < len(carried.prompts) < 4
    file = io.BytesIO()
    torch.save(carried.state(), file)
    file.seek(0)
    read = PartialRollouts.from_state(torch.load(file, weights_only=True))
    assert read.prompts.equals(carried.prompts) and read.responses.equals(carried.responses)
    with pytest.raises(DataError, match="must continue its ids from epoch to epoch if a rollout_budget carries"):
        read.prepend_to(prompts)


def test_conversations_of_a_checkpoint_without_images_of_answers_go_on() -> None:
    prompts, talked = prompts_of(0, 1), replace(part(0, tokens=20), dialogue=Dialogue(tool, Conversation()))
    engine = GenerationEngine(tiny_model("llama").double())
    carried = PartialRollouts.from_responses(talked.run(engine, prompts, SAMPLING, None).carried, prompts)
    assert ANSWER_INPUTS in carried.responses
    saved = replace(carried, responses=carried.responses.without_columns(ANSWER_INPUTS)).state()
    read = PartialRollouts.from_state(saved)
    assert read.responses.equals(carried.responses)
    later = replace(talked, iteration=1, budget=RolloutBudget(tokens=10_000))
    made = [later.run(engine, one.prompts, SAMPLING, one.responses).finished for one in (carried, read)]
    assert len(made[0]) == len(carried.responses) and made[0].equals(made[1])


def test_a_checkpoint_whose_carried_responses_do_not_fit_the_run_is_reported() -> None:
    engine = GenerationEngine(tiny_model("llama").double())
    made = part(0, tokens=20).run(engine, prompts_of(0, 1), SAMPLING, None)
    checkpoint = {"carried_rollout": PartialRollouts.from_responses(made.carried, prompts_of(0, 1)).state()}
    budgeted = GenerationOptions(rollout_budget=RolloutBudget(tokens=5))
    with pytest.raises(CheckpointError, match="began without an environment, and this run has one; resume with the"):
        runs.grpo(generation=budgeted, environment=len).on_load_checkpoint(checkpoint)
    with pytest.warns(UserWarning, match=f"holds {len(made.carried)} responses that were to go on, and they are left"):
        runs.grpo().on_load_checkpoint(checkpoint)
    module = runs.grpo(generation=budgeted)
    module.on_load_checkpoint(checkpoint)
    saved: dict[str, Any] = {}
    module.on_save_checkpoint(saved)
    assert PartialRollouts.from_state(saved["carried_rollout"]).responses.equals(made.carried)
    with pytest.raises(CheckpointError, match=r"began with sampling.n=2, and this run has sampling.n=4; resume with"):
        runs.grpo(generation=budgeted, sampling=replace(runs.SAMPLING, n=4)).on_load_checkpoint(saved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs tokens= or seconds="),
        ({"tokens": 0}, r"RolloutBudget\(tokens=0\) must be at least 1"),
        ({"tokens": "100"}, r"RolloutBudget\(tokens='100'\) must be a whole number or None"),
        ({"seconds": True}, r"RolloutBudget\(seconds=True\) must be a number or None"),
        ({"tokens": 1, "max_staleness": 1.5}, r"RolloutBudget\(max_staleness=1.5\) must be a whole number"),
        ({"seconds": 0.0}, r"RolloutBudget\(seconds=0.0\) must be positive"),
        ({"tokens": 1, "max_staleness": 0}, r"RolloutBudget\(max_staleness=0\) carries nothing on"),
        ({"tokens": 1, "late": "forget"}, r"RolloutBudget\(late='forget'\) must be one of finish, drop"),
    ],
)
def test_invalid_budgets_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutBudget(**settings)


def test_settings_that_exclude_a_budget_are_refused() -> None:
    budget = RolloutBudget(tokens=5)
    with pytest.raises(ConfigError, match=r"rollout_budget.*engine='hf'"):
        runs.grpo(engine="hf", generation=GenerationOptions(rollout_budget=budget))
    for moves in (True, "all"):
        with pytest.raises(ConfigError, match=f"rollout_budget.*sample_reallocation={moves!r}"):
            GenerationOptions(rollout_budget=budget, sample_reallocation=moves)
    with pytest.raises(ConfigError, match="must be positive"):
        replace(RolloutBudget(tokens=5), seconds=-1.0)
