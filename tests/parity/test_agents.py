"""Agents of TRL: the tokens, masks and messages of its tool loop, and its losses with tools' tokens masked, to 1e-6.

Intended differences, which the tests leave out: TRL writes results that are no text as Python does, we as JSON. TRL
puts answers of ``async`` tools after those of others, we keep the order of the calls. A malformed call ends TRL's loop,
here it is answered with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_realloc import Correction, SamplingParams
from lightning_realloc.algorithms.grpo import GRPO
from lightning_realloc.batch.json_column import json_values
from lightning_realloc.batch.packing import pack
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.batch.training import Totals
from lightning_realloc.generation import Completion
from tests.environments.some_tools import Counter
from tests.environments.trl_agents import (
    EchoEnv,
    chat_tokenizer_of,
    episodes_of,
    hermes,
    look_up,
    multiply,
    play,
    samples_of,
)
from tests.models import tiny_model
from tests.strategies import runs

pytest.importorskip("trl", reason="parity needs TRL: pip install 'lightning-realloc[parity]'")

from tests.parity import trl_trainers as trl
from tests.parity.test_policies import (
    ADVANTAGES,
    CASES,
    LONGEST,
    MASK,
    assert_equal,
    drawn,
    our_loss,
    packed,
    trl_inputs,
)

CHOSEN = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [1, 0, 0, 1, 0]], dtype=torch.bool)
"""Tokens of the model; the others within `MASK` are of tools."""
USER = [{"role": "user", "content": "Begin."}]


def masked_inputs(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of TRL's losses; as there, padding is 1 in the mask of tools."""
    return {**trl_inputs(rows), "tool_mask": (CHOSEN | ~MASK).long(), "num_items_in_batch": CHOSEN.sum()}


@pytest.mark.parametrize("name", CASES)
def test_losses_leave_out_the_tokens_of_tools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rows = CASES[name], drawn("logprobs", "old", "ref")
    theirs, ours = (rows["logprobs"].clone().requires_grad_() for _ in range(2))
    expected = trl.policy_loss(
        theirs, masked_inputs(rows), **{"epsilon_high": 0.28, "max_completion_length": LONGEST, **case.theirs}
    )
    batch = packed(model_mask=CHOSEN, behaviour_logprobs=rows["old"], ref_logprobs=rows["ref"], advantages=ADVANTAGES)
    found = our_loss(monkeypatch, ours, batch, case.ours, num_tokens=int(CHOSEN.sum()))
    assert_equal(found, expected, ours, theirs)
    assert not ours.grad[~CHOSEN].any()


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_corrections_leave_out_the_tokens_of_tools(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    level, beyond = mode.split("_")
    rows = drawn("logprobs", "old", "ref", "engine")
    theirs, ours = (rows["logprobs"].clone().requires_grad_() for _ in range(2))
    apart = (rows["old"] - rows["engine"]) * CHOSEN
    ratios = (apart if level == "token" else apart.sum(-1, keepdim=True)).exp()
    outside = (ratios < 0.7) | (ratios > 1.5)
    given = ratios.clamp(0.7, 1.5) if beyond == "truncate" else ratios.masked_fill(outside, 0.0)
    assert outside.any() and not outside.all()
    expected = trl.policy_loss(
        theirs, {**masked_inputs(rows), "importance_sampling_ratio": given}, loss_type="grpo", beta=0.04,
        use_vllm=True, vllm_importance_sampling_correction=True,
    )  # fmt: skip
    batch = packed(
        model_mask=CHOSEN, proximal_logprobs=rows["old"], behaviour_logprobs=rows["engine"], ref_logprobs=rows["ref"],
        advantages=ADVANTAGES,
    )  # fmt: skip
    bounds: dict[str, Any] = {"floor": 0.7, "cap": 1.5} if beyond == "truncate" else {"low": 0.7, "high": 1.5}
    correction = Correction(weigh=level, reject="none" if beyond == "truncate" else level, **bounds)
    settings = {"correction": correction, "kl_coef": 0.04,
                "train_options": runs.options(num_epochs=2)}  # fmt: skip
    assert_equal(our_loss(monkeypatch, ours, batch, settings, num_tokens=int(CHOSEN.sum())), expected, ours, theirs)


SCRIPTS: dict[str, list[str]] = {
    "no call": ["Six."],
    "two turns of calls": [hermes("multiply", a=2, b=3), f"Again.\n{hermes('multiply', a=6, b=7)}", "It is 42."],
    "several calls in a turn": [
        f"{hermes('multiply', a=2, b=3)}\n{hermes('multiply', a=4, b=5)}\n{hermes('look_up', word='six')}", "Done.",
    ],
}  # fmt: skip
METHODS: dict[str, list[str]] = {
    "state between turns": [hermes("increment", step=2), hermes("increment", step=3), "5"],
    "limit of turns": [hermes("increment", step=1)] * 4,
}


def roles(messages: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what messages say, without the ids of calls, which TRL has not."""
    return [
        (message["role"], message.get("name"), message["content"].strip(),
         [call["function"] for call in message.get("tool_calls", ())])
        for message in messages
    ]  # fmt: skip


def compare(
    template: str,
    script: Sequence[str],
    tools: Sequence[Callable[..., Any]],
    environment: Any = None,
    *,
    most: int = 4096,
    iterations: int = 8,
) -> tuple[list[Any], float]:
    """Assert that both libraries make the same of a script; return our conversation and reward.

    Args:
        tools: Functions, or methods of an object of the environment that has been reset.
        environment: Our setting; None: the functions are its tools.
        most: Most tokens of a response.
        iterations: Most turns whose calls are answered.
    """
    tokenizer = chat_tokenizer_of(template)
    episodes = episodes_of(tokenizer, environment, [] if environment else tools, max_turns=iterations + 1)
    completions = play(episodes, samples_of(tokenizer, [{"prompt": USER, "start": 0}]), [script], most=most)
    _, columns = episodes.finish(completions)
    prompt_ids, ids, mask, messages = trl.tool_loop(
        tokenizer, USER, script, tools, max_tool_calling_iterations=iterations, max_completion_length=most
    )
    assert tokenizer.decode(completions[0].prompt) == tokenizer.decode(prompt_ids)
    assert tokenizer.decode(completions[0].token_ids) == tokenizer.decode(ids)
    assert list(completions[0].model_mask) == list(map(bool, mask))
    talk = json_values(columns["record/conversation"])[0]["messages"]  # type: ignore[arg-type]
    is_whole = completions[0].token_ids[-1] == tokenizer.eos_token_id
    assert len(talk) == len(messages) and talk[-1]["role"] == messages[-1]["role"] == "assistant"
    # A call that was cut off is text in TRL, and a call with text as arguments here.
    assert roles(talk if is_whole else talk[:-1]) == roles(messages if is_whole else messages[:-1])
    return talk, float(columns["environment_rewards"][0])  # type: ignore[arg-type, index]


TEMPLATES = ["qwen3_instruct_2507", "qwen2_5", "qwen3"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_functions_are_called_as_in_trls_loop(template: str, script: str) -> None:
    compare(template, SCRIPTS[script], [multiply, look_up])


@pytest.mark.parametrize("script", METHODS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_methods_are_called_as_in_trls_loop(template: str, script: str) -> None:
    theirs = Counter()
    theirs.reset(prompt=USER)
    _, reward = compare(template, METHODS[script], [theirs.increment], Counter, iterations=3)
    assert reward == theirs.get_reward() > 2


def test_async_methods_are_called_as_in_trls_loop() -> None:
    theirs = EchoEnv()
    asyncio.run(theirs.reset())
    script = [hermes("say", text="one"), f"{hermes('say', text='two')}\n{hermes('say', text='three')}", "Heard."]
    compare("qwen3_instruct_2507", script, [theirs.say], EchoEnv)
    assert theirs.heard == ["one", "two", "three"]


def test_responses_are_cut_off_as_in_trls_loop() -> None:
    tokenizer, script = chat_tokenizer_of("qwen3_instruct_2507"), SCRIPTS["two turns of calls"]
    episodes = episodes_of(tokenizer, None, [multiply])
    (whole,) = play(episodes, samples_of(tokenizer, [{"prompt": USER}]), [script])
    assert [chosen for chosen, _ in groupby(whole.model_mask)] == [True, False, True, False, True]
    begin = 0
    for _, run in groupby(
        whole.model_mask
    ):  # in the middle of each turn, and of each answer, for which there is no room
        length = sum(1 for _ in run)
        compare("qwen3_instruct_2507", script, [multiply], most=begin + length // 2)
        begin += length


def logprobs_of(model: PreTrainedModel, completions: Sequence[Completion]) -> list[list[float]]:
    """Return the log-probabilities of the responses' tokens, one conversation at a time."""
    found = []
    for completion in completions:
        ids = torch.tensor([[*completion.prompt, *completion.token_ids]])
        with torch.no_grad():
            laws = model(ids).logits[0, len(completion.prompt) - 1 : -1].log_softmax(-1)
        found.append(laws.gather(1, ids[0, len(completion.prompt) :, None])[:, 0].tolist())
    return found


def test_a_step_on_conversations_has_trls_loss_and_gradients() -> None:
    tokenizer = chat_tokenizer_of("qwen3_instruct_2507")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    ours, theirs = (tiny_model("llama", **sizes) for _ in range(2))
    scripts = [SCRIPTS["no call"], *METHODS.values(), [hermes("increment", step=1), "1"]]
    episodes = episodes_of(tokenizer, Counter, [], max_turns=4)
    completions = play(episodes, samples_of(tokenizer, [{"prompt": USER}] * 4), scripts)
    _, columns = episodes.finish(completions)
    rewards = columns["environment_rewards"]
    assert isinstance(rewards, Tensor) and rewards.tolist() == [0.0, 5.0, 3.0, 1.0]
    advantages = (rewards - rewards.mean()) / rewards.std()
    old = logprobs_of(tiny_model("llama", **sizes, seed=1), completions)
    samples = Samples(torch.arange(4), {
        "prompt_ids": Ragged.from_list([c.prompt for c in completions]),
        "response_ids": Ragged.from_list([c.token_ids for c in completions]),
        "model_mask": Ragged.from_list([c.model_mask for c in completions], dtype=torch.bool),
        "advantages": advantages, "behaviour_logprobs": Ragged.from_list(old, dtype=torch.float32),
    })  # fmt: skip
    module = GRPO(
        ours, runs.low_tokens, tokenizer=tokenizer, loss_average="sequence",
        sampling=SamplingParams(n=4, max_new_tokens=2048),
    )  # fmt: skip
    batch = pack(samples, columns=["advantages", "behaviour_logprobs"])
    loss = module.actor_loss(ours, batch, Totals(4, sum(sum(c.model_mask) for c in completions))).value
    expected = trl.model_policy_loss(trl.fused(theirs), padded_rows(completions, advantages, old))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    expected.backward()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None and float(own.grad.abs().max()) > 1e-4
        assert torch.allclose(own.grad, other.grad, atol=1e-5)


def padded_rows(completions: Sequence[Completion], advantages: Tensor, old: Sequence[list[float]]) -> dict[str, Tensor]:
    """Return conversations in the layout of TRL's trainer: responses are padded on the right."""
    longest = max(len(c.token_ids) for c in completions)

    def padded(rows: Iterable[Sequence[float]], value: int) -> Tensor:
        return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])

    prompts = torch.tensor([c.prompt for c in completions])
    return {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "advantages": advantages,
        "completion_ids": padded([c.token_ids for c in completions], 0),
        "completion_mask": padded([[1] * len(c.token_ids) for c in completions], 0),
        "tool_mask": padded([c.model_mask for c in completions], 1).long(),
        "old_per_token_logps": padded(old, 0),
    }  # fmt: skip
