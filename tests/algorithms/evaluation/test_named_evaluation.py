"""Named sets during training, compared with a loop over Hugging Face's generate, between ranks, and without them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_realloc import (
    Accuracy,
    DatasetSource,
    Evaluation,
    EvaluationSet,
    PhaseCallback,
    PreferenceDataModule,
    PromptDataModule,
    ReallocStrategy,
    RewardModel,
    Timeline,
)
from lightning_realloc.algorithms.distillation import OnPolicyDistillation
from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.errors import ConfigError, DataError, PlanError, RewardError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.report.runs.run_folder import read_run_folder
from lightning_realloc.report.runs.score_words import accuracy_sentences, compare_runs
from lightning_realloc.rewards import exact_match
from lightning_realloc.scores.question_scores import QuestionScores
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

ROWS = [{"prompt": f"{number} + {number + 1} =", "limit": 3 + number % 3} for number in range(5)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)
SAMPLED = SamplingParams(n=4, max_new_tokens=6, stop_token_ids=runs.SAMPLING.stop_token_ids)


def varied(completion_ids: Sequence[Sequence[int]], limit: Sequence[int], **columns: object) -> list[float]:
    """Call a response right if it has enough different tokens."""
    return [float(len(set(ids)) >= least) for ids, least in zip(completion_ids, limit, strict=True)]


def actor() -> Any:
    """Return a tiny llama that knows all tokens of the tokenizer."""
    return tiny_model("llama", vocab_size=320)


class Received(PhaseCallback):
    """Keeps what evaluations report."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def on_evaluation_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        metrics: Mapping[str, float],
        scores: Mapping[str, QuestionScores],
    ) -> None:
        """Keep the metrics with the step."""
        assert {f"eval/{name}" for name in ("greedy", "sampled")} >= scores.keys()
        self.metrics.append((trainer.global_step, dict(metrics)))


def sets(**settings: Any) -> dict[str, EvaluationSet]:
    """Return two sets with the same rows."""
    greedy = EvaluationSet(ROWS, reward=varied, sampling=GREEDY)
    return {"greedy": greedy, "sampled": EvaluationSet(ROWS, reward=varied, sampling=SAMPLED, **settings)}


def by_hugging_face(model: Any) -> tuple[float, float]:
    """Return the share of right greedy responses and their mean length, one row at a time."""
    tokenizer, lengths, rewards = byte_tokenizer(), [], []
    for row in ROWS:
        ids = torch.tensor([tokenizer.encode(row["prompt"])])
        made = model.generate(ids, do_sample=False, max_new_tokens=6, attention_mask=torch.ones_like(ids))
        response = made[0, ids.shape[1] :].tolist()
        lengths.append(len(response))
        rewards += varied([response], [row["limit"]])
    return sum(rewards) / len(ROWS), sum(lengths) / len(ROWS)


def fit(steps: int, folder: Path, *callbacks: Any, ckpt_path: Any = None) -> tuple[Any, L.Trainer, dict[str, Any]]:
    """Train by SFT, and return the module, the Trainer and the weights."""
    module, strategy = runs.sft(actor=actor()), ReallocStrategy()
    options = {"enable_checkpointing": True, "default_root_dir": folder, "max_epochs": -1, "max_steps": steps}
    trainer = runs.trainer(strategy, 1, callbacks=list(callbacks), **options)
    trainer.fit(module, runs.Batches(2, responses=True), ckpt_path=ckpt_path)
    return module, trainer, strategy.full_weights("actor")


def best(folder: Path) -> ModelCheckpoint:
    """Return a callback that keeps the checkpoints of the two evaluations with the longest responses."""
    return ModelCheckpoint(
        folder, monitor="eval/sampled/response_length", mode="max", save_top_k=2, every_n_train_steps=2,
        filename="{step}",
    )  # fmt: skip


def test_scores_equal_those_of_hugging_face_and_the_best_checkpoint_is_kept_also_after_resuming(tmp_path: Path) -> None:
    received, kept = Received(), best(tmp_path / "kept")
    evaluation = Evaluation(sets(every=2), every=3)
    module, _, weights = fit(5, tmp_path, kept, evaluation, received, Timeline(tmp_path / "record"))
    steps = [
        (step, "eval/greedy/accuracy" in found, "eval/sampled/accuracy" in found) for step, found in received.metrics
    ]
    assert steps == [(0, True, True), (2, False, True), (3, True, False), (4, False, True), (5, True, True)]
    first, last = received.metrics[0][1], received.metrics[-1][1]
    assert (first["eval/greedy/accuracy"], first["eval/greedy/response_length"]) == pytest.approx(
        by_hugging_face(actor()), abs=1e-7
    )
    trained = actor()
    trained.load_state_dict(weights)
    accuracy, length = by_hugging_face(trained)
    assert (last["eval/greedy/accuracy"], last["eval/greedy/response_length"]) == pytest.approx((accuracy, length))
    assert first["eval/sampled/pass@4"] > 0 and first["eval/sampled/accuracy"] < first["eval/sampled/pass@2"]

    lengths = {step: found["eval/sampled/response_length"] for step, found in received.metrics if step in (2, 4)}
    assert {path: float(score) for path, score in kept.best_k_models.items()} == {
        str(tmp_path / "kept" / f"step={step}.ckpt"): length for step, length in lengths.items()
    }
    _, _, bare = fit(5, tmp_path / "bare")
    assert all(torch.equal(weights[name], bare[name]) for name in weights)

    resumed, again = Received(), best(tmp_path / "kept")
    where = tmp_path / "kept" / "step=2.ckpt"
    _, trainer, continued = fit(
        5, tmp_path / "again", again, Evaluation(sets(every=2), every=3), resumed, ckpt_path=where
    )
    assert all(torch.equal(weights[name], continued[name]) for name in weights)
    assert resumed.metrics == received.metrics[2:] and again.best_model_score == max(lengths.values())

    (found,) = trainer.validate(module, runs.Batches(1, responses=True), verbose=False)
    assert found["eval/sampled/accuracy"] == pytest.approx(last["eval/sampled/accuracy"])
    run = read_run_folder(tmp_path)
    assert run.evaluations.keys() == {"eval/greedy", "eval/sampled"}
    assert run.evaluations["eval/sampled"].scores == module.question_scores["eval/sampled"]
    assert run.metrics["eval/greedy/accuracy"].steps.tolist() == [0, 3, 5]
    sentences = accuracy_sentences(compare_runs(run, run))
    assert sentences[0].startswith("eval/greedy/accuracy: ") and "paired bootstrap over 5 questions" in sentences[0]


def results_of(algorithm: str, plan: Any, settings: dict[str, Any], evaluates: bool) -> tuple[Any, Any, Any]:
    """Return the metrics of two evaluations, those of training, and the sums of the weights."""
    world_size, received, record = runs.world_size(), Received(), runs.Record()
    callbacks = [*([Evaluation(sets(), every=2)] if evaluates else []), received, record]
    if algorithm == "sft" and not evaluates:
        plan = {"calls": {"actor.train": plan["calls"]["actor.train"]}}
    strategy = ReallocStrategy(plan, **settings)
    trainer = runs.trainer(strategy, world_size, callbacks=callbacks)
    if algorithm == "dpo":
        pairs = [{"prompt": f"a{row}", "chosen": "b", "rejected": "cc"} for row in range(6)]
        module: Any = DPO(actor(), tokenizer=byte_tokenizer(), learning_rate=1e-2)
        trainer.fit(module, PreferenceDataModule(pairs, batch_size=2))
    else:
        reference = {} if algorithm == "sft" else {"reference": tiny_model("llama", seed=1, vocab_size=320)}
        module = getattr(runs, algorithm)(actor=actor(), **reference)
        trainer.fit(module, runs.Batches(3, responses=algorithm == "sft"))
    weights = {name: float(weight.double().sum()) for name, weight in strategy.full_weights("actor").items()}
    return received.metrics, record.logged, weights


DIVIDED = {"calls": {"actor.generate": "dp1@0", "actor.train": "dp1@1", "reference.infer": "dp1@1"}}


@pytest.mark.parametrize(
    ("algorithm", "plan", "settings"),
    [
        ("sft", {"calls": {"actor.train": "fsdp2", "actor.generate": "tp2"}}, {}),
        pytest.param("dpo", "heuristic", {}, marks=pytest.mark.exhaustive),
        pytest.param("ppo", "heuristic", {}, marks=pytest.mark.exhaustive),
        ("grpo", DIVIDED, {"max_staleness": 1}),
    ],
)
def test_ranks_and_plans_give_the_same_numbers_and_training_goes_on_as_without(
    workers: WorkerPool, algorithm: str, plan: Any, settings: dict[str, Any]
) -> None:
    run = partial(workers.run, results_of, algorithm, init_process_group=False)
    first, second = run(plan, settings, True, world_size=2)
    (found, logged, weights), (bare, bare_logged, bare_weights) = first, run(plan, settings, False, world_size=2)[0]
    assert found == second[0] and [step for step, _ in found] == [0, 2, 3] and bare == []
    assert weights == bare_weights
    trained = [{name: one for name, one in row.items() if not name.startswith("eval/")} for row in logged]
    assert trained == bare_logged
    ((alone, _, _),) = run("heuristic", {}, True, world_size=1)
    assert found[0] == alone[0], "the same model on one rank"


def evaluated_later(first: Any, second: Any) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Return the evaluations of a fit, and those of a module after a fit that was the same without; None: validates."""
    world_size, data = runs.world_size(), runs.Batches(2, responses=True)
    module, received, expected = runs.sft(actor=actor()), Received(), Received()
    trainer = runs.trainer(ReallocStrategy(first), world_size)
    trainer.fit(module, data)
    if second is None:
        vars(trainer)["callbacks"] += [Evaluation(sets()), received]
        trainer.validate(module, data, verbose=False)
    else:
        callbacks = [Evaluation(sets()), received]
        runs.trainer(ReallocStrategy(second), world_size, callbacks=callbacks).fit(module, data)
        runs.trainer(ReallocStrategy(first), world_size, callbacks=[received]).fit(module, data)
    callbacks = [Evaluation(sets()), expected]
    runs.trainer(ReallocStrategy(second or first), world_size, callbacks=callbacks).fit(runs.sft(actor=actor()), data)
    return expected.metrics, received.metrics


TRAINING, GENERATION = {"actor.train": "fsdp2"}, {"actor.generate": "tp2"}


@pytest.mark.parametrize(
    ("world_size", "first", "second"),
    [
        (1, "heuristic", None),
        pytest.param(1, "heuristic", "heuristic", marks=pytest.mark.exhaustive),
        (2, {"calls": TRAINING}, {"calls": TRAINING | GENERATION}),
    ],
)
def test_a_module_that_was_trained_without_sets_is_evaluated_in_a_later_fit(
    workers: WorkerPool, world_size: int, first: Any, second: Any
) -> None:
    run = partial(workers.run, evaluated_later, world_size=world_size, init_process_group=False)
    for expected, found in run(first, second):
        assert [step for step, _ in found] == ([0, 2] if second else [2]) and found[0][1] == expected[-1][1]


def load(module: Any, *given: Any, **options: Any) -> None:
    """Begin a fit with an evaluation."""
    runs.trainer("realloc", 1, callbacks=list(given), **options).fit(module, runs.Batches(1, responses=True))


def test_sets_that_cannot_be_used_are_refused_before_the_first_step() -> None:
    only = EvaluationSet(ROWS, reward=varied, sampling=GREEDY)

    def refused(match: str, one: Any, *others: Any, module: Any = None, error: type[Exception] = ConfigError) -> None:
        with pytest.raises(error, match=match):
            load(module or runs.sft(actor=actor()), Evaluation({"own": one}), *others)

    refused("SFT has no rewards that could tell .* give the evaluation set 'own' reward=", EvaluationSet(ROWS))
    refused(
        r"needs the columns \['answer'\], the evaluation set 'own' has", EvaluationSet(ROWS, reward=exact_match),
        error=RewardError,
    )  # fmt: skip
    several = EvaluationSet(ROWS, reward=varied, sampling=SAMPLED, accuracy=Accuracy(ks=(8,)))
    refused(r"pass@8 needs as many responses per prompt, and sampling.n of the evaluation set 'own'=4", several)
    alike = EvaluationSet(ROWS, reward=varied, sampling=SamplingParams(n=2, temperature=0.0))
    refused("'own' samples n=2 responses at temperature=0, which are all the same", alike)
    refused("'own' has a reward model, and rewards of a set are functions", EvaluationSet(ROWS, reward="./scorer"))
    refused("holds no rows", EvaluationSet([], reward=varied), error=DataError)
    refused("no column 'question'", EvaluationSet(ROWS, reward=varied, prompt_column="question"), error=DataError)
    strange = EvaluationSet([{"prompt": "ÿ", "limit": 1}], reward=varied)
    refused("actor's vocabulary has 128", strange, module=runs.sft(), error=Exception)
    if find_spec("reasoning_gym") is None:
        refused(r"needs reasoning-gym .* pip install", EvaluationSet("reasoning-gym:chain_sum"))
    refused("two Evaluation callbacks have a set 'own'", only, Evaluation({"own": only}))
    refused("RewardModel has none; remove the callback", only, module=RewardModel(actor(), tokenizer=byte_tokenizer()))
    refused("OnPolicyDistillation has no rewards", EvaluationSet(ROWS), module=OnPolicyDistillation(actor(), actor()))
    for monitor in ("eval/onw/accuracy", "eval/own/pass@2", "eval/own", "eval/own/acc"):
        refused("no evaluation set logs; .*eval/own/accuracy", only, EarlyStopping(monitor))
    with pytest.raises(PlanError, match=r"actor.generate, .* does not have.*callbacks=\[Evaluation"):
        strategy = ReallocStrategy({"calls": {"actor.train": "dp1", "actor.generate": "dp1"}})
        runs.trainer(strategy, 1).fit(runs.sft(actor=actor()), runs.Batches(1, responses=True))
    with pytest.raises(ConfigError, match="the Trainer has none; add callbacks"):
        load(runs.sft(), EarlyStopping("eval/own/accuracy"))
    with pytest.raises(ConfigError, match="BoringModel under"):
        from lightning.pytorch.demos.boring_classes import BoringModel

        load(BoringModel(), Evaluation({"own": only}))


def test_checkpoints_between_evaluations_are_warned_of(tmp_path: Path) -> None:
    def warnings_of(steps: int) -> list[str]:
        one = EvaluationSet(ROWS, reward=varied, sampling=GREEDY)
        keep = ModelCheckpoint(tmp_path, monitor="eval/own/accuracy", every_n_train_steps=steps)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            load(runs.sft(actor=actor()), Evaluation({"own": one}, every=2), keep, enable_checkpointing=True)
        return [str(each.message) for each in found if "every_n_train_steps" in str(each.message)]

    assert "let every_n_train_steps be a multiple of 2" in warnings_of(3)[0]
    assert not warnings_of(4)


def test_wrong_settings_are_named() -> None:
    wrong: Any
    for wrong in ({}, [EvaluationSet(ROWS)], None):
        with pytest.raises(ConfigError, match="must name at least one set"):
            Evaluation(wrong)
    with pytest.raises(ConfigError, match="'a/b', which becomes part of metrics' names"):
        Evaluation({"a/b": EvaluationSet(ROWS)})
    with pytest.raises(ConfigError, match="every=0 must be a whole number of at least 1 iterations"):
        Evaluation({"a": EvaluationSet(ROWS)}, every=0)
    with pytest.raises(ConfigError, match="limit=0 must be a whole number of at least 1 rows"):
        EvaluationSet(ROWS, limit=0)
    with pytest.raises(DataError, match="this one is a stream"):
        EvaluationSet(DatasetSource("allenai/c4", streaming=True))


def test_rows_are_those_of_a_data_module_or_the_first_ones() -> None:
    module = runs.sft(actor=actor())
    trainer = runs.trainer("realloc", 1)
    module.trainer = trainer
    trainer.strategy.connect(module)
    assert len(EvaluationSet(ROWS, reward=varied, limit=2).load("own", module).table) == 2
    data = PromptDataModule(ROWS[:2], val_data=ROWS[2:], batch_size=1)
    assert EvaluationSet(data, reward=varied).load("own", module).table.objects("limit") == (5, 3, 4)
    split = PromptDataModule(ROWS, val_fraction=0.5, batch_size=1)
    held_out = EvaluationSet(split, reward=varied).load("own", module).table
    assert 0 < len(held_out) < len(ROWS) and len(held_out) == len(split.tables["val"])
