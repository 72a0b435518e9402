"""Data columns with names that the package uses itself: training ignores them, and rewards read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

import lightning_realloc
from lightning_realloc import KTO, BinaryFeedbackDataModule, MultiModelModule, PreferenceDataModule, SFTDataModule
from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.steps import StepDataModule
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs
from tests.workers import WorkerPool

PUBLIC = [getattr(lightning_realloc, name) for name in lightning_realloc.__all__]
ALGORITHMS = [item for item in PUBLIC if isinstance(item, type) and issubclass(item, MultiModelModule)]
CALLS = [call for algorithm in ALGORITHMS for call in algorithm.calls_for(("actor", "reference", "reward", "critic"))]
BESIDE_CALLS = {
    "self", "this", "ids", "data", "columns", "group", "batch", "prompt_id", "prompt_ids", "response_ids", "messages",
    "finish_reason", "model_mask", "num_model_tokens", "num_turns", "versions", "began_in", "oldest_ages",
    "stale_tokens", "trained", "chosen_tokens", "mismatched_ids", "mismatched_ref_logprobs", "greedy_rewards",
    "compared", "kl_k1", "return_sums", "num_steps", "num_right", "step_ends", "score_chosen", "reward", "response",
    "thinking_tokens", "call_tokens", "answer_tokens", "learned_mask",
}  # fmt: skip
NAMES = sorted({name for call in CALLS for name in (*call.needs, *call.produces)} | BESIDE_CALLS)
COLUMNS = {name: f"the data's {name}" for name in NAMES}
TEXTS = [("a", "bc", "de"), ("fg", "h", "ij"), ("k", "lmn", "o"), ("pq", "r", "s")]


def reads_all(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Reward low tokens, after checking that the columns are those of the data."""
    for name in NAMES if "group" in columns else ():
        assert columns[name] == [COLUMNS[name]] * len(prompts), name
    return runs.low_tokens(completion_ids)


class ReadsAll:
    """A reward with a method, which cannot take a column named ``self``."""

    def __call__(self, prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """Return the rewards of :func:`reads_all`."""
        assert "self" not in columns
        return reads_all(prompts, completion_ids, **columns, **{"self": [COLUMNS["self"]] * len(prompts)})


Case = tuple[Callable[[], MultiModelModule], Callable[..., RowDataModule], Callable[[str, str, str], dict[str, Any]]]
CASES: Mapping[str, Case] = {
    "grpo": (lambda: runs.grpo(reward=[reads_all, ReadsAll()]), PromptDataModule, lambda a, b, c: {"prompt": a}),
    "ppo": (lambda: runs.ppo(reward=reads_all), PromptDataModule, lambda a, b, c: {"prompt": a}),
    "sft": (runs.sft, SFTDataModule, lambda a, b, c: {"prompt": a, "completion": b}),
    "dpo": (
        lambda: DPO(tiny_model("llama"), tokenizer=byte_tokenizer()), PreferenceDataModule,
        lambda a, b, c: {"prompt": a, "chosen": b, "rejected": c},
    ),
    "kto": (
        lambda: KTO(tiny_model("llama"), tokenizer=byte_tokenizer()), BinaryFeedbackDataModule,
        lambda a, b, c: {"prompt": a, "completion": b, "label": len(b) > 1},
    ),
    "reward_model": (
        lambda: lightning_realloc.RewardModel(tiny_scorer("llama"), tokenizer=byte_tokenizer()), PreferenceDataModule,
        lambda a, b, c: {"prompt": a, "chosen": b, "rejected": c},
    ),
    "process_reward": (
        lambda: lightning_realloc.ProcessReward(tiny_scorer("llama"), tokenizer=byte_tokenizer()),
        partial(StepDataModule, step_separator=";"),
        lambda a, b, c: {"prompt": a, "completions": [b, c], "labels": [True, False]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", matrix(CASES, "grpo", "dpo", "process_reward"))
def test_columns_of_any_name_change_no_result_and_reach_rewards(name: str) -> None:
    make, data_module, row_of = CASES[name]
    found = []
    for others in ({}, COLUMNS):
        rows = [{**others, **row_of(*texts)} for texts in TEXTS]
        data = data_module(rows, batch_size=4, val_data=rows, tokenizer=byte_tokenizer())
        record = runs.Record()
        trainer = runs.trainer("realloc", 1, callbacks=[record])
        trainer.fit(make(), data)
        found.append((record.logged, runs.numbers(trainer.callback_metrics)))
        (batch,) = data.train_dataloader()
        assert all(batch.objects(name) == (value,) * len(batch) for name, value in others.items())
    assert str(found[0]) == str(found[1])  # as text: NaN equals itself
    assert len(found[0][0]) == 1


def _fit_apart() -> list[dict[str, float]]:
    """Return the metrics of PPO with the critic on a separate rank, so that ranks exchange columns."""
    data = PromptDataModule(
        [{**COLUMNS, "prompt": a} for a, _, _ in TEXTS], batch_size=4, tokenizer=byte_tokenizer()
    )  # fmt: skip
    plan = runs.calls(actor_generate="dp2", actor_train="fsdp2", reference_infer="dp1@0", critic_infer="dp1@1",
                      critic_train="dp1@1")  # fmt: skip
    record = runs.Record()
    trainer = runs.trainer(ReallocStrategy(plan), 2, callbacks=[record])
    trainer.fit(runs.ppo(reward=reads_all), data)
    return record.logged


def test_columns_of_any_name_can_be_exchanged_between_ranks(workers: WorkerPool) -> None:
    everyone = workers.run(_fit_apart, world_size=2, init_process_group=False)
    assert len(everyone[0]) == 1 and everyone[0] == everyone[1]


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "trainer_state", "log_extra"])
def test_a_column_named_like_an_argument_of_reward_functions_is_refused(name: str) -> None:
    module = PromptDataModule([{"prompt": "a", name: "b"}], batch_size=1, tokenizer=byte_tokenizer())
    with pytest.raises(lightning_realloc.DataError, match=rf"row 0 .*; rename the columns \['{name}'\]"):
        module.setup()
