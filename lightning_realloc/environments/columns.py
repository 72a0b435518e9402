"""Columns of responses that environments of messages answered, one value per response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from lightning_realloc.batch.json_column import json_values
from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.batch.samples import RECORD, Samples, answer_inputs, column_images, prompt_images
from lightning_realloc.data.chat import Message
from lightning_realloc.data.images.sample_images import SampleImages
from lightning_realloc.data.shown_images import with_changed_parts

REWARDS = "environment_rewards"
"""(B,) float32: the environments' rewards; NaN where there is none."""
FUNCTIONS = "reward_of_environment/"
"""Beginning of the columns (B,) float32 of reward functions that read environments; NaN where one does not apply."""
TURN_REWARDS = f"{RECORD}turn_rewards"
"""Ragged float32: the rewards of each response's turns; 0 where a turn has none."""
CONVERSATION = f"{RECORD}conversation"
"""Ragged uint8, as of `json_column`: ``prompt`` and ``messages`` of a response, whose images are in other columns;
``seconds`` of the environment and ``rewards`` by turn; ``metrics`` by name; ``failure`` of the environment, or None."""
LAST_IMAGES = f"{RECORD}last_images"
"""Ragged uint8, as of `image_column`: images of the answers that ended conversations, which no model reads."""
SECONDS = "environment_s"
"""(B,) float32: seconds that the environment took in all turns."""
NUM_CALLS = "num_tool_calls"
"""(B,) int64: calls of tools by the model."""
OWN_METRICS = "environment/"
"""Beginning of columns (B,) float32 of environments' own metrics, such as ``environment/solved``; NaN for none."""
TOOL_METRICS = ("tool_calls", "tool_failures", "tool_s")
"""(B,) float32, one column for each tool, such as ``tool_calls/search``: calls, those that failed, and seconds."""


def conversations(samples: Samples) -> list[dict[str, Any]]:
    """Return the values of the column of conversations, with an `ImageFile` in each part of type ``image``."""
    talks: list[dict[str, Any]] = json_values(samples.ragged(CONVERSATION))
    shown = zip(prompt_images(samples), answer_inputs(samples), column_images(samples, LAST_IMAGES), strict=True)
    for talk, (of_prompt, answers, last) in zip(talks, shown, strict=True):
        talk["prompt"] = _with_files(talk["prompt"], [of_prompt])
        talk["messages"] = _with_files(talk["messages"], [*(one.input.images for one in answers), last])
    return talks


def _with_files(messages: Sequence[Message], images: Iterable[PromptImages | None]) -> list[Message]:
    """Return messages with the next of the images in each part that shows one."""
    files = (file for each in images if each is not None for file in cast("SampleImages", each).files)

    def filled(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**part, "image": next(files)} if part.get("type") == "image" else part

    return with_changed_parts(messages, filled)
