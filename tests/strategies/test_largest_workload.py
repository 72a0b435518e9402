"""The longest sequence that data and sampling allow is compared with the limits of forward passes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.errors import DataError
from lightning_realloc.strategies.largest_workload import check_longest_sequences
from tests.strategies import runs
from tests.strategies.algorithms import preferences


def check(module: Any, data: Any, plan: dict[str, Any]) -> None:
    """Check an algorithm's calls against the rows of a data module."""
    data.setup()
    trainer: Any = runs.trainer("auto", 1)
    trainer.datamodule = data
    check_longest_sequences(module, trainer, ExecutionPlan.from_mapping(plan), module.dataflow.iteration_calls)


def options(limit: int) -> Any:
    """Return training options with a limit of tokens."""
    return runs.options(micro_batch_tokens=limit)


def test_a_row_that_fits_no_forward_pass_is_refused_with_call_and_setting() -> None:
    # The byte tokenizer makes a token of each letter, and ends a completion: 3 + 4 + 1 tokens.
    data = SFTDataModule([{"prompt": "abc", "completion": "defg"}], batch_size=1, tokenizer=runs.byte_tokenizer())
    plan = runs.calls(actor_train="dp1")
    check(runs.sft(train_options=options(8)), data, plan)
    with pytest.raises(DataError, match=r"micro-batch of actor\.train; one has 8 tokens, and micro_batch_tokens=7"):
        check(runs.sft(train_options=options(7)), data, plan)
    planned = runs.calls(actor_train={"layout": "dp1", "micro_batch_tokens": 4})
    with pytest.raises(DataError, match=r"micro_batch_tokens=4: raise it to at least 8 where it is set, in the plan's"):
        check(runs.sft(train_options=options(8)), data, planned)


def test_both_sides_of_a_pair_must_fit() -> None:
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "e"}]  # 2 + 2 + 1 and 2 + 1 + 1 tokens
    data = PreferenceDataModule(rows, batch_size=1, tokenizer=runs.byte_tokenizer())
    plan = runs.calls(actor_train="dp1", reference_infer="dp1")
    check(preferences.dpo(train_options=options(9)), data, plan)
    with pytest.raises(DataError, match=r"a pair must fit one micro-batch of .*; one has 9 tokens"):
        check(preferences.dpo(train_options=options(8)), data, plan)


def test_responses_that_may_become_too_long_are_warned_about() -> None:
    data = PromptDataModule([{"prompt": "abcd"}], batch_size=1, tokenizer=runs.byte_tokenizer())  # 4 + at most 6 tokens
    plan = runs.calls(actor_train="dp1", actor_generate="dp1", reference_infer="dp1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(runs.grpo(train_options=options(10)), data, plan)
    with pytest.warns(UserWarning, match="micro_batch_tokens=9 of .* is less than the 10 tokens of the longest prompt"):
        check(runs.grpo(train_options=options(9)), data, plan)
    with pytest.raises(DataError, match="one has 4 tokens, and micro_batch_tokens=3"):
        check(runs.grpo(train_options=options(3)), data, plan)
    # A call whose limit is only perhaps too low hides none whose limit certainly is.
    for lower in ("actor_train", "reference_infer"):
        planned = {"calls": plan["calls"] | runs.calls(**{lower: {"layout": "dp1", "micro_batch_tokens": 3}})["calls"]}
        with pytest.raises(DataError, match="one has 4 tokens, and micro_batch_tokens=3"):
            check(runs.grpo(train_options=options(9)), data, planned)
