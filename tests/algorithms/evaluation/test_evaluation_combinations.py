"""Named sets beside other settings: the same numbers, and training that goes on as without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lightning_realloc import (
    EMA,
    GRPO,
    Conversation,
    Evaluation,
    EvaluationSet,
    PromptDataModule,
    ReallocStrategy,
    SamplingParams,
)
from lightning_realloc.generation import Speculation
from tests.algorithms.evaluation.test_named_evaluation import Received, actor, sets
from tests.callbacks.test_ema import whole
from tests.environments.guessing import NUMBERS, Guessing, chat_model, chat_tokenizer
from tests.models import tiny_model
from tests.strategies import runs

LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}


def trained(
    settings: Mapping[str, Any], strategy: Mapping[str, Any] | None = None, *callbacks: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train GRPO for three iterations, and return the weights and the metrics of training."""
    record = runs.Record()
    made = ReallocStrategy(**(strategy or {}))
    given = {"reference": tiny_model("llama", seed=1, vocab_size=320), **settings}
    module = runs.grpo(actor=actor(), **given)
    runs.trainer(made, 1, callbacks=[*callbacks, record]).fit(module, runs.Batches(3))
    return made.full_weights("actor"), [
        {name: one for name, one in row.items() if not name.startswith("eval/")} for row in record.logged
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    """Return the scores of the model before training, with the default settings."""
    received = Received()
    trained({}, {}, Evaluation(sets(), every=2), received)
    return received.metrics[0][1]


SLOTS = {"actor.generate": {"layout": "dp1", "max_slots": 3}, "actor.train": "dp1", "reference.infer": "dp1"}


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({"engine": "hf"}, {}),
        ({"peft_config": LORA, "speculation": Speculation(num_draft_tokens=3)}, {}),
        ({}, {"generation_chunks": 2, "plan": {"calls": SLOTS}}),
        pytest.param(
            {"speculation": Speculation(drafter="ngram", num_draft_tokens=2)}, {}, marks=pytest.mark.exhaustive
        ),
        pytest.param({}, {"max_staleness": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=["hf", "adapters and drafts", "chunks and few slots", "ngram", "stale"],
)
def test_sets_have_the_same_numbers_with_any_setting_and_leave_training_alone(
    plain: dict[str, float], settings: dict[str, Any], strategy: dict[str, Any]
) -> None:
    received = Received()
    weights, logged = trained(settings, strategy, Evaluation(sets(), every=2), received)
    bare, bare_logged = trained(settings, strategy)
    assert [step for step, _ in received.metrics] == [0, 2, 3]
    assert all(torch.equal(weights[name], bare[name]) for name in bare) and logged == bare_logged
    # The engine "hf" samples with random numbers of its own.
    same = "eval/greedy/" if "engine" in settings else "eval/"
    first = received.metrics[0][1]
    assert [(name, first[name]) for name in plain if name.startswith(same)] == [
        (name, one) for name, one in plain.items() if name.startswith(same)
    ]


def test_averages_of_weights_are_evaluated_and_the_weights_come_back_to_the_bit() -> None:
    def fit(strategy: ReallocStrategy, module: Any, count: int, *callbacks: Any) -> None:
        runs.trainer(strategy, 1, callbacks=list(callbacks)).fit(module, runs.Batches(count, responses=True))

    received, strategy, bare = Received(), ReallocStrategy(), ReallocStrategy()
    fit(strategy, runs.sft(actor=actor(), learning_rate=3e-2), 3, Evaluation(sets(), every=1), received, EMA(0.75))
    fit(bare, runs.sft(actor=actor(), learning_rate=3e-2), 3, EMA(0.75))
    weights = whole(strategy)
    assert all(torch.equal(weights[name], one) for name, one in whole(bare).items())

    model, of_averages = actor(), Received()
    with strategy.averages.in_place_of_weights("actor"):
        model.load_state_dict(whole(strategy))
    fit(ReallocStrategy(), runs.sft(actor=model), 1, Evaluation(sets()), of_averages)
    assert received.metrics[-1][1] == of_averages.metrics[0][1] != received.metrics[0][1]


def test_environments_and_tools_answer_in_evaluations_as_in_validation() -> None:
    rows = [{"prompt": [{"role": "user", "content": "Guess"}], "secret": number} for number in range(NUMBERS)]
    sampling, received = SamplingParams(n=3, max_new_tokens=40), Received()
    module = GRPO(
        chat_model(), environment=Guessing, conversation=Conversation(max_turns=4), tokenizer=chat_tokenizer(),
        sampling=sampling, evaluation_sampling=sampling,
    )  # fmt: skip
    data = PromptDataModule(rows, val_data=rows, batch_size=NUMBERS)
    trainer = runs.trainer("realloc", 1, callbacks=[Evaluation({"sampled": EvaluationSet(rows)}), received])
    trainer.fit(module, data)
    (found,) = trainer.validate(module, data, verbose=False)
    last = received.metrics[-1][1]
    shared = {name for name in last if name.replace("eval/sampled/", "val/") in found and not name.endswith("_s")}
    assert last["eval/sampled/turns"] > 1 and len(shared) > 5
    assert {name: last[name] for name in shared} == {
        name: pytest.approx(found[name.replace("eval/sampled/", "val/")]) for name in shared
    }
