"""Agents written for TRL train unchanged: a model that calls tools at random, against a replay of its calls by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightning_realloc import GRPO, Conversation, PromptDataModule, SamplingParams
from lightning_realloc.batch.samples import Samples
from tests.matrices import matrix
from tests.models import tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

pytest.importorskip("trl", reason="chat templates of TRL: pip install 'lightning-realloc[parity]'")

from tests.environments.some_tools import Counter
from tests.environments.trl_agents import EchoEnv, chat_tokenizer_of, hermes, look_up, multiply

ACTIONS = (
    hermes("multiply", a=2, b=3),
    f"{hermes('look_up', word='six')}\n{hermes('multiply', a=4, b=5)}",
    hermes("increment", step=2),
    hermes("increment", step="many"),
    hermes("say", text="Hello."),
    "I am done.",
)
"""Turns that the model may take, each of which is one token."""
MAX_TURNS = 4
ASKED = [{"role": "user", "content": "Begin."}]
SEEN: list[dict[str, Any]] = []
"""Conversations that reward functions of this process got."""


def acting_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template of Qwen3, and a token for each action."""
    tokenizer = chat_tokenizer_of("qwen3_instruct_2507")
    tokenizer.add_tokens(list(ACTIONS))
    return tokenizer


def acting_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a tiny model that takes actions at random: after an action it ends the turn, after all else it acts."""
    end = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 8192, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, eos_token_id=end)
    actions = tokenizer.convert_tokens_to_ids(list(ACTIONS))
    with torch.no_grad():
        for layer in model.model.layers:  # the next token depends on the last one alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        embedding[:, 0] = 1.0
        embedding[actions, 0] = 0.0
        embedding[actions, 1] = 1.0
        head.zero_()
        head[actions, 0] = 4.0  # the norm before the head makes a logit of 32 of it
        head[end, 1] = 4.0
    return model


def records(
    prompts: Sequence[Any], completions: Sequence[Any], start: Sequence[int], log_extra: Any, log_metric: Any,
    **columns: Any,
) -> list[float | None]:  # fmt: skip
    """Keep what a reward function of TRL gets, and apply to half of the samples."""
    log_extra("start", list(start))
    log_metric("num_prompts", float(len(prompts)))
    rows = zip(prompts, completions, start, columns["environment"], strict=True)
    SEEN.extend(dict(zip(("prompt", "completion", "start", "environment"), row, strict=True)) for row in rows)
    return [float(len(said)) if begin else None for said, begin in zip(completions, start, strict=True)]


def heard(environments: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward by the environments' own state, where they have it."""
    return [float(len(found.heard)) if isinstance(found, EchoEnv) else None for found in environments]


def num_turns(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Reward turns."""
    return [float(sum(message["role"] == "assistant" for message in said)) for said in completions]


class Acting(GRPO):
    """GRPO that keeps the rewards of every iteration."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rewards: list[list[float]] = []

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Keep the rewards."""
        self.rewards.append(samples.tensor("rewards").tolist())
        return super().summarize(samples)


def act(settings: Mapping[str, Any]) -> tuple[runs.Outcome, list[dict[str, Any]]]:
    """Return the outcome of an iteration on one rank, and the conversations."""
    SEEN.clear()
    tokenizer = acting_tokenizer()
    names = ("counter", "echo") if isinstance(settings.get("environment"), dict) else ("counter", "counter")
    rows = [{"prompt": ASKED, "start": place % 2, "environment": names[place // 2 % 2]} for place in range(4)]
    module = Acting(
        acting_model(tokenizer), [records, heard, num_turns], tokenizer=tokenizer, learning_rate=1e-3,
        sampling=SamplingParams(n=3, max_new_tokens=1024), conversation=Conversation(max_turns=MAX_TURNS), **settings,
    )  # fmt: skip
    outcome = runs.train(module, "static", 1, PromptDataModule(rows, batch_size=4))  # type: ignore[arg-type]
    return outcome, list(SEEN)


def replay(row: Mapping[str, Any], tools: Sequence[Any], kind: type | None) -> tuple[list[Any], float]:
    """Return the conversation that TRL's contract makes of the model's turns, and the sum of its rewards."""
    made = None if kind is None else kind()
    own = [getattr(made, name) for name in ("increment", "say") if hasattr(made, name)]
    functions = {tool.__name__: tool for tool in (*tools, *own)}
    observed = None if made is None else result(made.reset(prompt=ASKED, start=row["start"]))
    assert row["prompt"] == [{"role": "user", "content": ASKED[0]["content"] + (observed or "")}]
    expected: list[Any] = []
    turns = [message for message in row["completion"] if message["role"] == "assistant"]
    for number, message in enumerate(turns, start=1):
        expected.append(message)
        if number < MAX_TURNS:
            expected += [answer(functions, call["function"]) for call in message.get("tool_calls", ())]
    rewards = [len(turns), len(expected) if row["start"] else 0]
    if isinstance(made, Counter):
        rewards.append(int(made.get_reward()))
    elif isinstance(made, EchoEnv):
        rewards.append(len(made.heard))
    return expected, float(sum(rewards))


def answer(functions: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a call, whose content is None if it is an error, in the words of each library."""
    try:
        content = str(result(functions[call["name"]](**call["arguments"])))
    except (KeyError, TypeError):
        content = None
    return {"role": "tool", "name": call["name"], "content": content}


def result(found: Any) -> Any:
    """Return a result, awaited if it is one of an ``async`` function."""
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


SETTINGS: Mapping[str, dict[str, Any]] = {
    "functions": {"tools": [multiply, look_up]},
    "an environment": {"environment": Counter},
    "several environments and functions": {
        "environment": {"counter": Counter, "echo": EchoEnv}, "tools": [multiply, look_up],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", matrix(SETTINGS, "several environments and functions"))
def test_agents_of_trl_train_unchanged(workers: WorkerPool, name: str) -> None:
    settings = SETTINGS[name]
    given, tools = settings.get("environment"), settings.get("tools", [])
    outcome, seen = workers.run(act, settings, world_size=1, init_process_group=False)[0]
    rewards = [reward for step in outcome.rewards for reward in step]
    assert len(seen) == len(rewards) == 12
    for row, reward in zip(seen, rewards, strict=True):
        messages, expected = replay(row, tools, given[row["environment"]] if isinstance(given, dict) else given)
        assert reward == expected
        for ours, theirs in zip(row["completion"], messages, strict=True):
            assert (ours["role"], ours.get("name")) == (theirs["role"], theirs.get("name"))
            is_error = theirs["content"] is None
            assert ours["content"].startswith('{"error": ') if is_error else ours["content"] == theirs["content"]
    names = {message.get("name") for row in seen for message in row["completion"]} - {None}
    assert names == {"multiply", "look_up", "increment", "say"} and len(set(rewards)) > 3
    assert outcome.logged[0]["stopped/failure"] == 0.0 and outcome.logged[0]["tool_calls"] > 1
    if given is not None:
        assert "reward/environment" in outcome.logged[0]
