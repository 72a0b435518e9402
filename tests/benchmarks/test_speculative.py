"""Arms, text, models and targets of the speculation benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import speculative
from benchmarks.harness import BenchmarkReport
from benchmarks.speculative import ADAPTIVE, NONE, Arm, Cell, Models, Settings, judge, judge_cell, run
from benchmarks.speculative_grpo import SETTINGS as GRPO_SETTINGS
from benchmarks.speculative_grpo import measure_grpo
from benchmarks.speculative_models import CHANCES, RECIPES, markov_text, train
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.generation.core.sample import Completion
from lightning_realloc.generation.loop.run import GenerationStats
from tests.workers import WorkerPool

TINY = replace(
    RECIPES["draft"], name="tiny", hidden_size=32, intermediate_size=64, num_blocks=2, steps=3, draft_blocks=1
)
SETTINGS = Settings(
    models=("tiny",), batches=(2,), depths=(2,), new_tokens=12, cell_s=0.0, least_turns=2, most_turns=2
)  # fmt: skip


@pytest.fixture
def tiny_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speculative.RECIPES, "tiny", TINY)
    monkeypatch.setitem(speculative.RECIPES, "draft", replace(RECIPES["draft"], steps=3))


@pytest.mark.exhaustive  # of a benchmark alone
def test_every_drafter_and_arm_has_a_row_and_the_tokens_of_no_speculation(tiny_recipes: None) -> None:
    report = BenchmarkReport("speculative")
    cells = run(SETTINGS, report)
    assert [cell.name for cell in cells] == [f"tiny B=2 {name}" for name in speculative.DRAFTERS]
    assert [row["arm"] for row in report.rows] == len(cells) * ["0", "2", "adaptive"]
    assert all(row["turns"] == 2 and row["differing"] == 0 and row["cpu_s"] > 0 for row in report.rows)
    by_arm = {(row["drafter"], row["arm"]): row for row in report.rows}
    assert by_arm["model", "2"]["drafting_share"] > 0.1
    assert all(by_arm[drafter, "0"]["tokens_per_row_step"] == 1.0 for drafter in speculative.DRAFTERS)
    assert len(report.targets) == 2 * len(cells) + 1  # the target of the best drafter exists for batches 1 and 4 only


def test_cells_are_reported_one_by_one_and_history_holds_only_the_previous_responses(tiny_recipes: None) -> None:
    report = BenchmarkReport("speculative")
    reported: list[tuple[int, int]] = []
    _, cell = run(
        SETTINGS, report, only=["ngram", "history"],
        after_cell=lambda cell: reported.append((len(report.rows), len(report.targets))),
    )  # fmt: skip
    assert reported == [(3, 2), (6, 4)]  # three arms and two targets a cell
    assert cell.name.endswith("history")
    kept = cell.arms["2"].drafter._responses  # type: ignore[attr-defined]
    last = {completion.token_ids for completion in cell.arms["2"].turns[-1]}
    assert [len(responses) for responses in kept.values()] == [1, 1]
    assert {responses[0] for responses in kept.values()} == last
    assert cell.arms["2"].turns[0] != cell.arms["2"].turns[1]  # each turn has its own seed


def test_cells_match_any_of_several_texts_and_turns_are_multiplied() -> None:
    chosen = speculative.chosen_cells(Settings(), ["3m B=1 ", "40m B=32 ngram"])
    assert [cell.name for cell in chosen] == [*(f"3m B=1 {name}" for name in speculative.DRAFTERS), "40m B=32 ngram"]
    more = Settings().with_turns(3)
    assert (more.cell_s, more.least_turns, more.most_turns) == (240.0, 36, 60)


def test_the_markov_text_follows_its_table_with_the_given_chance() -> None:
    text = markov_text(64, 400, seed=3)
    contexts: dict[tuple[int, int], list[int]] = {}
    for row in text.tolist():
        for before, last, token in zip(row, row[1:], row[2:], strict=False):
            contexts.setdefault((before % 2, last), []).append(token)
    frequent = [tokens for tokens in contexts.values() if len(tokens) >= 100]
    likeliest = sum(max(map(tokens.count, set(tokens))) for tokens in frequent) / sum(map(len, frequent))
    assert likeliest == pytest.approx(CHANCES[0], abs=0.015)
    assert all(len(set(tokens)) <= len(CHANCES) for tokens in contexts.values())


@pytest.mark.exhaustive  # of a benchmark alone
def test_training_lowers_the_loss_of_the_model_and_of_its_first_blocks() -> None:
    recipe = replace(TINY, steps=40)
    _, before = train(replace(recipe, steps=1))
    _, after = train(recipe)
    assert after < before - 0.3


def test_the_adaptive_arm_is_compared_by_turn_with_the_fastest_fixed_depth() -> None:
    cell = _measured({NONE: [4.0, 8.0], "2": [2.0, 4.0], "4": [5.0, 10.0], ADAPTIVE: [2.5, 4.0]})
    assert cell.over_none(ADAPTIVE) == pytest.approx((4 / 2.5 + 8 / 4) / 2)
    assert cell.over_best_fixed() == pytest.approx((2 / 2.5 + 4 / 4) / 2)  # depth 2
    report = BenchmarkReport("speculative")
    judge_cell(cell, report)
    judge([cell], report)
    met = {target.name: target.met for target in report.targets}
    assert met == {
        "m B=1 ngram: over the best fixed depth": False,  # 0.9
        "m B=1 ngram: over no speculation": True,
        "m B=1: best drafter, ngram": True,  # 1.8
        "planner's largest share, m B=1 ngram": False,  # 0.5 s of 6.5 s
    }


def test_tokens_that_differ_from_those_without_speculation_are_an_error() -> None:
    cell = _measured({NONE: [1.0], ADAPTIVE: [1.0]})
    cell.arms[ADAPTIVE].turns = [(_completion(6),)]
    with pytest.raises(RuntimeError, match="arm adaptive drew other tokens than no speculation in 1 of 1"):
        cell.num_differing(ADAPTIVE)


def run_grpo() -> BenchmarkReport:
    """Return the report of two epochs of one iteration, with a barely warmed-up model."""
    report = BenchmarkReport("speculative")
    few = {"num_prompts": 2, "prompts_per_iteration": 2, "epochs": 2}
    measure_grpo(report, replace(GRPO_SETTINGS, num_demonstrations=128, warm_up_epochs=1, **few))
    return report


@pytest.mark.exhaustive
def test_a_real_policy_is_reported_by_epoch_and_trains_the_same_at_every_depth(workers: WorkerPool) -> None:
    (report,) = workers.run(run_grpo, world_size=1, init_process_group=False)
    adaptive, fixed = ([row for row in report.rows if row["arm"] == arm] for arm in ("adaptive", "4"))
    assert [row["epoch"] for row in adaptive] == [row["epoch"] for row in fixed] == [1, 2]
    assert [row["reward"] for row in adaptive] == [row["reward"] for row in fixed]
    assert all(row["tokens_per_row_step"] >= 1.0 for row in report.rows)
    assert report.targets[0].value == fixed[1]["tokens_per_row_step"]


def _completion(token: int) -> Completion:
    return Completion(0, 0, (token,), (0.0,), "length", model_mask=(True,), versions=(0,), input=ModelInput((5,)))


def _measured(seconds: dict[str, list[float]]) -> Cell:
    cell = Cell("m", 1, "ngram", seconds=seconds)
    target, _ = train(replace(TINY, steps=1))
    models = Models("m", target, target, 1)
    for name, times in seconds.items():
        cell.arms[name] = Arm(models, "ngram", 0, [(5,)])
        cell.arms[name].turns = [(_completion(5),) for _ in times]
        cell.arms[name].stats = [GenerationStats(planning_s=0.25) for _ in times]
    return cell
