"""Problems of reasoning-gym score as the library scores them, and are made again from their rows."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lightning_realloc import EvaluationSet, PromptDataModule
from lightning_realloc.errors import ConfigError, DataError
from tests.data.test_prompts import CHAT_TEMPLATE
from tests.environments.adapters.scripted import play
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")

from lightning_realloc.environments.adapters.reasoning_gym import (  # noqa: E402
    ReasoningGymEnvironment,
    reasoning_gym_rows,
    reasoning_gym_score,
)

SUMS = {"min_terms": 2, "max_terms": 2}


def sent(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as another rank reads it from a file."""
    return json.loads(json.dumps(row))  # type: ignore[no-any-return]


def test_rows_are_the_librarys_problems_and_batches_keep_them() -> None:
    rows = reasoning_gym_rows("chain_sum", size=3, seed=5, system_prompt="Add.", **SUMS)
    direct = reasoning_gym.create_dataset("chain_sum", size=3, seed=5, **SUMS)
    assert [[message["content"] for message in row["prompt"]] for row in rows] == [
        ["Add.", problem["question"]] for problem in direct
    ]
    assert [[message["role"] for message in row["prompt"]] for row in rows] == [["system", "user"]] * 3
    data = PromptDataModule(
        [{**row, "prompt": row["prompt"][-1]["content"]} for row in rows], batch_size=3, tokenizer=byte_tokenizer()
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert sorted(problem["index"] for problem in batch.data["reasoning_gym"]) == [0, 1, 2]


@pytest.mark.parametrize(("name", "config"), [("chain_sum", SUMS), ("countdown", {"max_numbers": 4})])
def test_scores_are_those_of_the_library_until_an_answer_is_right(name: str, config: dict[str, Any]) -> None:
    direct = reasoning_gym.create_dataset(name, size=4, seed=1, **config)
    for row, problem in zip(reasoning_gym_rows(name, size=4, seed=1, **config), direct, strict=True):
        answers = [None, "1 + 1", problem["answer"], "never said"]
        turns = ["I do not know." if answer is None else f"Well: <answer> {answer} </answer>" for answer in answers]
        if name == "countdown":
            answers[2] = problem["metadata"]["expression"]
            turns[2] = f"<answer>1</answer> no, <answer>{answers[2]}</answer>"
        scores = [direct.score_answer(answer, problem) for answer in answers[:3]]
        assert scores[2] == 1 > max(scores[:2])
        game = play(ReasoningGymEnvironment(max_tries=4), sent(row), turns)
        assert [result.done for result in game.results] == [False, False, True]
        assert game.said[0] == ["There is no answer between <answer> and </answer>. Try again."]
        assert f"{scores[1]:.2f} out of 1" in game.said[1][0]
        assert game.reward == 1 and [dict(result.metrics)["solved"] for result in game.results] == [0, 0, 1]
        for last in (1, 2):  # fewer tries: the reward is the score of the last one
            game = play(ReasoningGymEnvironment(max_tries=last), sent(row), turns)
            assert len(game.results) == last and game.results[-1].done and game.reward == scores[last - 1]
        assert play(ReasoningGymEnvironment(), sent(row), []).reward == direct.score_answer(None, problem)


def test_a_problem_that_another_version_would_make_differently_is_refused() -> None:
    row = sent(reasoning_gym_rows("chain_sum", size=1, **SUMS)[0])
    changed = copy.deepcopy(row)
    changed["reasoning_gym"]["question"] += " Hurry."
    with pytest.raises(ConfigError, match=r"problem 0 of 'chain_sum' differs .* PYTHONHASHSEED=0"):
        play(ReasoningGymEnvironment(), changed, [])
    with pytest.raises(ConfigError, match=r"a column 'reasoning_gym', which reasoning_gym_rows"):
        play(ReasoningGymEnvironment(), {"prompt": row["prompt"]}, [])


@pytest.mark.parametrize(
    ("name", "config", "rule"),
    [
        ("chain_sums", {}, "'chain_sums' not registered"),
        ("chain_sum", {"num_terms": 2}, r"num_terms.*DATASETS lists names and settings"),
        ("composite", {"datasets": {object()}}, "must be numbers, text, lists and dicts"),
    ],
)
def test_data_sets_and_settings_that_do_not_exist_are_refused(name: str, config: dict[str, Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        reasoning_gym_rows(name, size=1, **config)
    with pytest.raises(ConfigError, match="max_tries=0 must be a whole number of at least 1"):
        ReasoningGymEnvironment(max_tries=0)


def test_evaluation_sets_are_named_and_scored_as_the_library_scores() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    module = runs.sft(actor=tiny_model("llama", vocab_size=320, max_position_embeddings=2048), tokenizer=tokenizer)
    trainer = runs.trainer("realloc", 1)
    module.trainer = trainer
    trainer.strategy.connect(module)
    loaded = EvaluationSet("reasoning-gym:chain_sum", limit=3).load("sums", module)
    problems = reasoning_gym.create_dataset("chain_sum", size=3, seed=1_000_003)
    assert [row["question"] for row in loaded.table.objects("reasoning_gym")] == [one["question"] for one in problems]
    answers = [f"So <answer>{problems[0]['answer']}</answer>", "<answer>no number</answer>", problems[2]["answer"]]
    rows = [sent(row)["reasoning_gym"] for row in reasoning_gym_rows("chain_sum", 3, 1_000_003)]
    expected = [
        problems.score_answer(answer, entry)
        for answer, entry in zip([problems[0]["answer"], "no number", None], problems, strict=True)
    ]
    assert reasoning_gym_score(answers, rows) == expected and expected[0] == 1.0 > expected[1]
    assert loaded.functions is not None and loaded.functions.names == ("reasoning_gym_score",)
    rows[0]["question"] = "another"
    with pytest.raises(ConfigError, match="problem 0 of 'chain_sum' differs"):
        reasoning_gym_score(answers, rows)
    with pytest.raises(DataError, match="cannot make the data set 'chain_some'"):
        EvaluationSet("reasoning-gym:chain_some").load("sums", module)
