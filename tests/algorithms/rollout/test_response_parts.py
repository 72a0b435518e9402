"""Columns for parts of responses, what they do to advantages, losses and metrics, and settings that are refused."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc import GRPO, PPO, RLOO, ReinforcePlusPlus, ReMax
from lightning_realloc.algorithms.base.rollout_columns import response_summary
from lightning_realloc.algorithms.losses.controllers import RunningMoments
from lightning_realloc.algorithms.rollout.response_parts import PartColumns, part_columns_of, without_unlearned
from lightning_realloc.algorithms.rollout.token_advantages import GAE
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.batch.training import Totals, num_counted_tokens, pack_columns
from lightning_realloc.environments.turns.turn_parser import PARTS, TurnParser
from lightning_realloc.environments.turns.turn_parts import TurnParts
from lightning_realloc.errors import ConfigError
from tests.algorithms import test_grpo
from tests.algorithms.test_policy_gradients import compared, made
from tests.environments.turns.test_chat_turns import CHATML
from tests.environments.turns.test_turn_parser import with_template
from tests.models import byte_tokenizer, tiny_model

LEARNED = [[False, True], [False, True, True, False], [False], [True, True]]
"""Tokens of `test_grpo.RESPONSES` that are learned; of the third response none is."""
MASK = Ragged.from_list(LEARNED, dtype=torch.bool)


def columns_of(samples: Samples, **settings: Any) -> Samples:
    tokenizer = byte_tokenizer()
    parts = TurnParts(tokenizer, TurnParser(tokenizer, "hermes"), stop_token_ids=[2])
    return PartColumns(parts, **{"counted": PARTS, "learned": PARTS, **settings})(samples)


def test_tokens_are_counted_by_part_and_learned_ones_are_in_a_mask() -> None:
    ids = byte_tokenizer()
    texts = ["<think>a</think>b", "c", 'd<tool_call>{"name": "e"}</tool_call><eos>']
    rows = [ids(text)["input_ids"] for text in texts]
    responses, heard = [rows[0] + rows[1] + rows[2], rows[1]], len(rows[0])
    samples = Samples(
        torch.arange(2),
        {
            "prompt_ids": Ragged.from_list([ids("?")["input_ids"], ids("<think>\n")["input_ids"]]),
            "response_ids": Ragged.from_list(responses),
            "model_mask": Ragged.from_list(
                [[place != heard for place in range(len(responses[0]))], [True]], dtype=torch.bool
            ),
        },
    )
    found = columns_of(samples, learned=("answer", "calls"))
    counts = [found.tensor(name).tolist() for name in ("thinking_tokens", "call_tokens", "answer_tokens")]
    assert counts == [[16, 1], [len(rows[2]) - 1, 0], [2, 0]]
    learned = [False] * 16 + [True, False] + [True] * len(rows[2])
    assert found.ragged("learned_mask").to_lists() == [learned, [False]]
    whole = columns_of(samples, counted=("thinking", "answer"))
    assert "learned_mask" not in whole and "call_tokens" not in whole
    ended = found.with_columns(finish_reason=torch.zeros(2, dtype=torch.int64))
    assert float(response_summary(ended)["thinking_tokens"]) == 8.5


@pytest.mark.parametrize(
    ("template", "tools", "counted"),
    [
        ("{{ '<think>' }}", False, ["thinking", "answer"]),
        ("{{ '<think><tool_call>' }}", True, ["thinking", "calls", "answer"]),
        ("<tool_call>", True, ["calls", "answer"]),
        ("<tool_call>", False, None),
        ("{{ messages }}", False, None),
    ],
)
def test_parts_are_counted_where_the_model_may_write_them(template: str, tools: bool, counted: Any) -> None:
    tokenizer = with_template(template)
    made = part_columns_of(tokenizer, TurnParser(tokenizer), stop_token_ids=[2], learned=PARTS, has_tools=tools)
    assert (None if made is None else made._counted) == counted


@pytest.mark.parametrize("learned", ["thinking", "calls"])
def test_parts_that_nothing_shows_are_warned_of(learned: Any) -> None:
    tokenizer = with_template("<tool_call>")
    with pytest.warns(UserWarning, match="may leave nothing to learn"):
        part_columns_of(tokenizer, TurnParser(tokenizer), stop_token_ids=[2], learned=[learned], has_tools=False)


def naive_loss(model: Any, samples: Samples, average: str, kl_coef: float) -> Tensor:
    """Return the loss of the learned tokens, one at a time; a response without any counts as zero."""
    columns = [samples.ragged(name).to_lists() for name in ("behaviour_logprobs", "ref_logprobs")]
    losses: list[list[Tensor]] = []
    for row, (prompt, response) in enumerate(zip(test_grpo.PROMPTS, test_grpo.RESPONSES, strict=True)):
        advantage, values = samples.tensor("given").tolist()[row], []
        for place, now in enumerate(test_grpo.response_logprobs(model, prompt, response, 1.0)):
            ratio, apart = (now - columns[0][row][place]).exp(), now - columns[1][row][place]
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if LEARNED[row][place]:
                values.append(-surrogate + kl_coef * ((-apart).exp() - 1 + apart))
        losses.append(values)
    if average == "token":
        return torch.stack([value for values in losses for value in values]).mean()
    sums = [sum(values, torch.zeros(())) / (len(values) if average == "sequence" else 1) for values in losses if values]
    return sum(sums, torch.zeros(())) / len(losses) / (8 if average == "constant" else 1)


@pytest.mark.parametrize("average", ["token", "sequence", "constant", "sum"])
def test_the_loss_and_its_gradient_are_those_of_a_loop_over_learned_tokens(average: str) -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    sampling = test_grpo.runs.SamplingParams(n=2, max_new_tokens=8)
    module = made(GRPO, sampling=sampling, kl_coef=0.1, loss_average=average)
    given = torch.tensor([1.0, -1.0, 0.5, -2.0])
    samples = test_grpo.rollout().with_columns(learned_mask=MASK, given=given)
    samples = samples.with_columns(**without_unlearned({"advantages": given}, samples))
    totals = Totals(4, num_counted_tokens(samples, ["advantages"]))
    assert totals.num_tokens == 5
    packs = [pack_columns(samples.select(rows), test_grpo.CPU) for rows in ([0, 3], [1, 2])]
    first, second = (module.actor_loss(model, pack, totals) for pack in packs)
    loss, expected = first.value + second.value, naive_loss(reference, samples, average, 0.1)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=2e-6)
    assert [float(part.metrics["entropy"].weight) for part in (first, second)] == [3.0, 2.0]


@pytest.mark.parametrize("kind", [GRPO, RLOO, ReinforcePlusPlus, ReMax])
def test_advantages_are_missing_where_nothing_is_learned(kind: Any) -> None:
    columns = {"greedy_rewards": torch.zeros(4)} if kind is ReMax else {}
    module = made(kind, kl_coef=0.0)
    whole, found = (compared(module, **columns, **more)["advantages"] for more in ({}, {"learned_mask": MASK}))
    rows = whole.to_lists() if isinstance(whole, Ragged) else [
        [value] * len(row) for value, row in zip(whole.tolist(), LEARNED, strict=True)
    ]  # fmt: skip
    if kind is ReinforcePlusPlus:  # normalized over the learned tokens: rewards 1, 0, 0, 1/2 and 1/2
        mean, deviation = 0.4, statistics.pstdev([1.0, 0.0, 0.0, 0.5, 0.5])
        rows = [
            [(reward - mean) / deviation] * len(row) for reward, row in zip(test_grpo.REWARDS, LEARNED, strict=True)
        ]
    expected = [
        [value if is_learned else math.nan for value, is_learned in zip(row, learned, strict=True)]
        for row, learned in zip(rows, LEARNED, strict=True)
    ]
    for ours, theirs in zip(found.to_lists(), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, nan_ok=True)


def test_gae_normalizes_advantages_over_the_actors_learned_tokens_and_the_critic_learns_all() -> None:
    # Without discount and critic, each token's return is the score: 1 for the first response, 3 for the second one.
    # The environment wrote the second token of the first. Learned: 1, 3 and 3, of mean 7/3 and deviation sqrt(8/9).
    mask = Ragged.from_list([[True, False, True], [True, True, True]], dtype=torch.bool)
    learned = Ragged.from_list([[False, False, True], [True, False, True]], dtype=torch.bool)
    zeros = Ragged(torch.zeros(6), mask.lengths)
    samples = Samples(
        torch.arange(2),
        {
            "response_ids": Ragged.from_list([[5, 6, 7], [8, 9, 10]]), "model_mask": mask, "learned_mask": learned,
            "behaviour_logprobs": zeros, "values": zeros, "scores": torch.tensor([1.0, 3.0]),
            "finish_reason": torch.zeros(2, dtype=torch.int64), "num_model_tokens": torch.tensor([2, 3]),
        },
    )  # fmt: skip
    made = GAE(gae_lambda=1.0).estimate(samples, moments=RunningMoments(), has_reference=False, penalty=None)
    advantages: Any = made["advantages"]
    low, high = (1 - 7 / 3) / math.sqrt(8 / 9), (3 - 7 / 3) / math.sqrt(8 / 9)
    assert advantages.values[learned.values].tolist() == pytest.approx([low, high, high], abs=1e-5)
    module = PPO(tiny_model("llama"), test_grpo.fixed, tokenizer=byte_tokenizer(), kl_coef=0.0)
    estimated: dict[str, Any] = dict(module.estimate_advantages(samples))
    assert torch.equal(estimated["advantages"].values.isnan(), ~learned.values)
    assert not bool(estimated["returns"].values.isnan().any())


@pytest.mark.parametrize("kind", [GRPO, PPO])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ((), r"learned_parts=\(\) must list parts of responses, at least one of 'thinking', 'calls', 'answer'"),
        ("answer", "learned_parts='answer' must list parts"),
        (None, "learned_parts=None must list parts"),
        (("answer", "thoughts"), "learned_parts names 'thoughts', and the parts of responses are 'thinking', 'calls'"),
    ],
)
def test_unknown_parts_and_none_are_refused(kind: Any, setting: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind("x", test_grpo.fixed, learned_parts=setting)


@pytest.mark.parametrize(
    ("template", "parts", "message"),
    [
        (
            '<|eot_id|> "parameters": ',
            ("thinking",),
            "the format here has calls, answer alone; set .*response_template",
        ),
        ("{{ messages }}", ("calls",), "the format here has thinking, answer alone"),
    ],
)
def test_parts_that_the_format_does_not_have_are_refused_before_the_first_step(
    template: str, parts: Any, message: str
) -> None:  # fmt: skip
    module = made(GRPO, tokenizer=with_template(template), learned_parts=parts, kl_coef=0.0)
    with pytest.raises(ConfigError, match=message):
        module.configure_model()


def test_a_function_that_parses_turns_tells_no_parts() -> None:
    def ping() -> str:
        """Answer."""
        return "pong"

    def read(text: str) -> dict[str, Any]:
        return {"content": text}

    tokenizer = with_template(CHATML)
    module = made(GRPO, tokenizer=tokenizer, tools=[ping], parser=read, learned_parts=("answer",), kl_coef=0.0)
    with pytest.raises(ConfigError, match="the format here has answer alone"):
        module.configure_model()
