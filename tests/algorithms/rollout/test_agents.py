"""Every algorithm that generates learns from conversations, and from nothing but the model's own tokens in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_realloc import (
    GRPO,
    PPO,
    RLOO,
    BestOfN,
    OnlineDPO,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    ReMax,
    SamplingParams,
)
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.batch.training import Loss, Totals
from lightning_realloc.generation import Conversation
from tests.environments.guessing import Guessing, chat_model, chat_tokenizer
from tests.strategies import runs

NUM_GAMES = 4


class Games:
    """One batch of games."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Samples]:
        tokens = chat_tokenizer()("user: Guess <end> assistant:")["input_ids"]
        columns = {"prompt_ids": Ragged.from_list([tokens] * NUM_GAMES)}
        data = {"prompt": ([{"role": "user", "content": "Guess"}],) * NUM_GAMES, "secret": tuple(range(NUM_GAMES))}
        yield Samples(torch.arange(NUM_GAMES), columns, data)


class Watched:
    """Keeps the packs that the actor learns, with the places whose output has a gradient, and so predicts."""

    def __init__(self, *models: Any, **settings: Any) -> None:
        super().__init__(*models, **settings)
        self.learned: list[tuple[PackedBatch, Tensor]] = []

    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return the loss, and watch the last layer's output, which the head alone reads."""
        outputs: list[Tensor] = []
        handle = actor.model.norm.register_forward_hook(lambda *call: outputs.append(call[2]))  # type: ignore[union-attr]
        loss: Loss = super().actor_loss(actor, batch, totals)  # type: ignore[misc]
        handle.remove()
        (output,) = outputs
        output.register_hook(lambda gradient: self.learned.append((batch, gradient[0].any(-1))))
        return loss


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (GRPO, {}),
        pytest.param(GRPO, {"advantages": "group_turns"}, marks=pytest.mark.exhaustive),
        (PPO, {}),
        pytest.param(RLOO, {}, marks=pytest.mark.exhaustive),  # GRPO's loss
        (ReMax, {}),
        (ReinforcePlusPlus, {}),
        (OnlineDPO, {}),
        (BestOfN, {}),
        (OnPolicyDistillation, {"teacher": chat_model(2)}),
        pytest.param(
            OnPolicyDistillation, {"teacher": chat_model(2), "divergence": "forward_kl"}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_the_tokens_of_environments_are_never_learned(kind: type[Any], others: dict[str, Any]) -> None:
    watched = type("Watched", (Watched, kind), {})
    module = watched(
        chat_model(), environment=Guessing, conversation=Conversation(max_turns=4), tokenizer=chat_tokenizer(),
        sampling=SamplingParams(n=4, max_new_tokens=40), **others,
    )  # fmt: skip
    outcome = runs.train(module, "static", 1, Games())  # type: ignore[arg-type]
    assert outcome.steps == [1] and outcome.logged[0]["turns"] > 1
    assert module.learned
    for batch, learned in module.learned:
        responses = torch.zeros(batch.num_tokens, dtype=torch.bool)
        for end, length in zip(batch.cu_seqlens[1:].tolist(), batch.response_lengths, strict=True):
            responses[end - length : end] = True
        predicts_the_model = torch.zeros(batch.num_tokens, dtype=torch.bool)
        predicts_the_model[batch.predecessors[batch.response_mask]] = True
        assert (responses & ~batch.response_mask).any() and learned.any()
        assert not (learned & ~predicts_the_model).any()
