"""Results of steps are checked when they are made, and what environments return where it is read."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_realloc.environments import MessageEnvironment, StepResult
from lightning_realloc.environments.message_environment import (
    checked_conversation,
    checked_result,
    checked_reward,
    checked_tools,
)
from lightning_realloc.environments.tools.tool import tools_of
from lightning_realloc.errors import ConfigError, ReallocError, RewardError
from tests.environments.some_tools import Echo, add

SAID = [{"role": "user", "content": "Go on."}]


def test_results_hold_messages_a_reward_and_metrics() -> None:
    result = StepResult(SAID, reward=1, done=True, metrics={"length": np.float32(2)})
    assert result.messages == tuple(SAID) and result.reward == 1 and result.done
    metrics = {"length": torch.tensor(2)}
    numbers: dict[str, Any] = {"reward": np.float32(0.5), "done": np.bool_(True), "metrics": metrics}
    given = StepResult(**numbers)
    assert json.dumps([given.reward, given.done, given.metrics]) == '[0.5, true, {"length": 2.0}]'
    assert StepResult() == StepResult((), reward=None, done=False, metrics={})


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"messages": "Go on."}, "is a list of messages, such as"),
        ({"messages": SAID[0]}, "is a list of messages"),
        ({"messages": [{"content": "Go on."}]}, "every message needs 'role' and 'content'"),
        ({"messages": [{"role": 1, "content": ""}]}, "the role of a message is a word, such as 'user'; got 1"),
        ({"messages": [{"role": "user", "content": 5}]}, "text, or a list of .*; one of role 'user' holds 5; describe"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 part of type 'image' .* for 0 images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "and images; .* holds .*audio.*; describe it",
        ),
        ({"images": "ball.png"}, r"StepResult\(images=\.\.\.\) is a list of images; got str 'ball.png'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [b"", b""]}, "for 2 images"),
        ({"reward": torch.ones(2)}, r"must be a finite number \(of at most 1e\+18\), or None"),
        ({"done": 1}, r"StepResult\(done=\.\.\.\) is True or False; got 1"),
        ({"reward": math.nan}, r"StepResult\(reward=\.\.\.\) must be a finite number .*, or None .* got nan"),
        ({"reward": "1"}, "must be a finite number"),
        ({"metrics": [1.0]}, "maps names to numbers"),
        ({"metrics": {"length": math.inf}}, "'length': inf.* must be a finite number; leave a metric out"),
        ({"metrics": {3: 1.0}}, "must be a finite number"),
    ],
)
def test_invalid_results_are_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ReallocError, match=rule):
        StepResult(**fields)


def test_the_base_class_begins_with_the_rows_prompt_and_has_no_reward() -> None:
    environment = MessageEnvironment()
    assert environment.reset({}) is environment.get_reward() is environment.close() is None
    assert tuple(environment.tools) == ()
    with pytest.raises(NotImplementedError, match=r"MessageEnvironment needs a method step\(self, message\)"):
        environment.step(SAID[0])


def test_what_environments_return_is_checked_by_name() -> None:
    echo = Echo()
    assert checked_result(result := StepResult(), echo) is result
    assert checked_conversation(SAID, echo) == SAID and checked_conversation(None, echo) is None
    assert checked_reward(True, "reward") == 1.0 and checked_reward(None, "reward") is None
    with pytest.raises(ConfigError, match=r"Echo\.step must return StepResult\(messages, \.\.\.\); it returned 'hi'"):
        checked_result("hi", echo)
    for begun in (7, "hi", [1, 2], [{"text": "hi"}], []):
        with pytest.raises(ConfigError, match=r"Echo\.reset must return messages with 'role' and 'content', or None"):
            checked_conversation(begun, echo)
    with pytest.raises(ConfigError, match=r"Echo\.reset: the content of a message is text.* holds 5; describe"):
        checked_conversation([{"role": "user", "content": 5}], echo)
    with pytest.raises(RewardError, match=r"get_reward\(\) must be a finite number.*got inf"):
        checked_reward(math.inf, "get_reward()")


def test_tools_of_an_environment_are_tools() -> None:
    class Listing(MessageEnvironment):
        tools: Any = tools_of([add])

    environment = Listing()
    assert [tool.name for tool in checked_tools(environment)] == ["add"]
    environment.tools = [add]
    with pytest.raises(ConfigError, match=r"Listing\.tools must be a list of Tool; .* write Tool\.from_function"):
        checked_tools(environment)
