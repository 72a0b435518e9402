"""Models as they were loaded, tokenizers as they come: any attention implementation, no special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.errors import DataError
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool


def _weights(folder: Path, attention: str) -> Any:
    actor = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    outcome = runs.train(runs.grpo(actor=actor), "static", 1, runs.Batches(2))
    return outcome.weights, outcome.tokens, actor.config._attn_implementation


def _both_attentions(folder: Path) -> Any:
    return [_weights(folder, attention) for attention in ("eager", "sdpa")]


def test_the_attention_a_model_was_loaded_with_changes_nothing_and_stays_its_own(
    workers: WorkerPool, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    ((eager, sdpa),) = workers.run(_both_attentions, tmp_path, world_size=1, init_process_group=False, deadline_s=120.0)
    assert eager[1] == sdpa[1] and all(weight.equal(sdpa[0][name]) for name, weight in eager[0].items())
    untrained = dict(tiny_model("llama").named_parameters())
    assert not any(weight.equal(untrained[name]) for name, weight in eager[0].items() if name in untrained)
    assert (eager[2], sdpa[2]) == ("eager", "sdpa")  # the caller's models, which were copied


def bare_tokenizer() -> Any:
    """Return a tokenizer without special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.bos_token = None
    assert tokenizer.pad_token_id is None and tokenizer.eos_token_id is None
    return tokenizer


def _without_special_tokens() -> Any:
    return [
        runs.train(runs.grpo(tokenizer=tokenizer), "static", 1, runs.Batches(2))
        for tokenizer in (byte_tokenizer(), bare_tokenizer())
    ]


def test_generating_and_training_need_no_special_tokens_of_the_tokenizer(workers: WorkerPool) -> None:
    ((with_some, without),) = workers.run(
        _without_special_tokens, world_size=1, init_process_group=False, deadline_s=120.0
    )
    # The model's own configuration names the same end of sequence, and nothing is ever padded.
    assert without.tokens == with_some.tokens
    assert all(weight.equal(without.weights[name]) for name, weight in with_some.weights.items())


def test_pairs_need_the_token_that_ends_a_response() -> None:
    data = PreferenceDataModule(
        [{"prompt": "a", "chosen": "b", "rejected": "c"}], batch_size=1, tokenizer=bare_tokenizer()
    )
    with pytest.raises(DataError, match="has no end-of-sequence token to learn; set tokenizer"):
        data.setup("fit")
