"""Models train with any attention implementation, and tokenizers need no special tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_realloc.algorithms.dpo import DPO
from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.algorithms.kto import KTO
from lightning_realloc.algorithms.reward_model import RewardModel
from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.data.demonstrations import SFTDataModule
from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.errors import DataError
from tests.models import byte_tokenizer, tiny_model, tiny_scorer
from tests.strategies import runs
from tests.workers import WorkerPool


def _weights(folder: Path, attention: str) -> Any:
    actor = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    outcome = runs.train(runs.grpo(actor=actor), "static", 1, runs.Batches(2))
    return outcome.weights, outcome.tokens, actor.config._attn_implementation


def _both_attentions(folder: Path) -> Any:
    return [_weights(folder, attention) for attention in ("eager", "sdpa")]


def test_the_attention_of_a_loaded_model_changes_no_result_and_is_kept(workers: WorkerPool, tmp_path: Path) -> None:
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


def test_generation_and_training_need_no_special_tokens(workers: WorkerPool) -> None:
    ((with_some, without),) = workers.run(
        _without_special_tokens, world_size=1, init_process_group=False, deadline_s=120.0
    )
    # The model's configuration names the same end of sequence, and nothing is padded.
    assert without.tokens == with_some.tokens
    assert all(weight.equal(without.weights[name]) for name, weight in with_some.weights.items())


class StrangeResponses(runs.Batches):
    """Responses; the last one has a token outside the model's vocabulary."""

    def __iter__(self) -> Iterator[Samples]:
        for samples in super().__iter__():
            rows = [*samples.ragged("response_ids").split()[:-1], torch.tensor([5, 128])]
            yield samples.with_columns(response_ids=Ragged.from_list(rows))


def _added_token() -> Any:
    """Return a tokenizer with a token outside the 259 embeddings of a model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<answer>"])
    return tokenizer


def _refusals_of_an_added_token() -> list[tuple[str, int]]:
    """Return the errors of algorithms for rows with that token, and the steps before them."""
    tokenizer, model, scorer = _added_token(), tiny_model("llama", vocab_size=259), tiny_scorer("llama", vocab_size=259)
    plain = [{"prompt": str(row), "completion": "a"} for row in range(7)]
    pairs = [{"prompt": str(row), "chosen": "a", "rejected": "b"} for row in range(7)]
    judged = [{"prompt": str(row), "completion": "a", "label": bool(row % 2)} for row in range(7)]
    options: Any = {"batch_size": 2, "tokenizer": tokenizer, "shuffle": False}
    settings: Any = {"tokenizer": tokenizer}
    added = "b<answer>"
    cases: list[tuple[Any, Any]] = [
        (SFT(model, **settings), SFTDataModule([*plain, {"prompt": "7", "completion": added}], **options)),
        (DPO(model, **settings), PreferenceDataModule([*pairs, {**pairs[0], "rejected": added}], **options)),
        (KTO(model, **settings), BinaryFeedbackDataModule([*judged, {**judged[1], "completion": added}], **options)),
        (RewardModel(scorer, **settings), PreferenceDataModule([*pairs, {**pairs[0], "prompt": added}], **options)),
        (
            GRPO(model, runs.low_tokens, sampling=runs.SAMPLING, **settings),
            PromptDataModule([*plain, {**plain[0], "prompt": added}], **options),
        ),
        (SFT(model, **settings), SFTDataModule(plain, val_data=[{"prompt": "7", "completion": added}], **options)),
    ]
    found = []
    for module, data in cases:
        trainer = runs.trainer("realloc", 1)
        with pytest.raises(DataError) as caught:
            trainer.fit(module, data)
        found.append((str(caught.value), trainer.global_step))
    with pytest.raises(DataError) as caught:  # no data module: at the sample
        runs.trainer("realloc", 1).fit(runs.sft(), StrangeResponses(1, responses=True))
    return [*found, (str(caught.value), 0)]


def test_token_ids_outside_a_models_embeddings_are_refused_before_the_first_step(workers: WorkerPool) -> None:
    (found,) = workers.run(_refusals_of_an_added_token, world_size=1, init_process_group=False, deadline_s=120.0)
    expected = ["response of sample 7", "response of sample 15", "response of sample 7", "prompt of sample 14",
                "prompt of sample 7", "response of sample 0", "response of sample 5"]  # fmt: skip
    assert [text.split(" holds")[0] for text, _ in found] == [f"the {part}" for part in expected]
    assert [step for _, step in found] == [0] * 7
    assert found[0][0].endswith(
        "holds token ids from 2 to 259, actor's vocabulary has 259; use the model's own tokenizer, and after adding "
        "tokens to it model.resize_token_embeddings(len(tokenizer))"
    )


def test_pairs_need_a_token_that_ends_a_response() -> None:
    data = PreferenceDataModule(
        [{"prompt": "a", "chosen": "b", "rejected": "c"}], batch_size=1, tokenizer=bare_tokenizer()
    )
    with pytest.raises(DataError, match="has no end-of-sequence token to learn; set tokenizer"):
        data.setup("fit")
