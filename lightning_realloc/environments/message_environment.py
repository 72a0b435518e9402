"""Environments of messages: base class, and the result of a step.

One object answers one sample: it reads the model's messages and keeps the state of that conversation alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_realloc.data.chat import Message as Message
from lightning_realloc.data.chat import is_conversation, is_image_part, plain_messages
from lightning_realloc.data.images.image_files import ImageFile
from lightning_realloc.data.images.row_images import has_images, with_images, with_placed_images
from lightning_realloc.data.images.sample_images import ImageProcessor
from lightning_realloc.environments.partner import Partner, Partners
from lightning_realloc.environments.tools.tool import Tool
from lightning_realloc.errors import ConfigError, DataError, GenerationError, RewardError, described
from lightning_realloc.rewards.invoke import MAX_REWARD, finite_number

MAX_MESSAGE_CHARACTERS = 1_000_000
"""Most characters of an environment's messages at a time; more hold up all episodes while they are tokenized."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to a turn of the model."""

    messages: Sequence[Message] = ()
    """Messages that the model reads next, unless the episode is done."""
    reward: float | None = None
    """Reward of this turn; None: it has none."""
    done: bool = False
    """Whether the episode has ended."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers by name, added up over the turns of an episode; `MessageEnvironment.metric_names` are logged."""
    images: Sequence[Any] = field(default=(), hash=False)
    """Pillow images, bytes, paths or ``data:`` addresses, for the parts ``{"type": "image"}`` of messages, in order.
    Without such parts they come before the text of the first message, without messages in one of the user."""

    def __post_init__(self) -> None:
        if isinstance(self.messages, str | Mapping) or not isinstance(self.messages, Sequence):
            raise ConfigError(
                f"StepResult(messages=...) is a list of messages, such as [{{'role': 'user', 'content': 'Go on.'}}]; "
                f"got {repr(self.messages)[:60]}"
            )
        object.__setattr__(self, "messages", tuple(self.messages))
        if self.messages and not is_conversation(list(self.messages)):
            raise ConfigError(f"every message needs 'role' and 'content'; StepResult got {repr(self.messages)[:120]}")
        _check_messages(self.shown_messages, "StepResult(messages=...)", may_show_images=True)
        if not isinstance(self.done, bool | np.bool_):
            raise ConfigError(f"StepResult(done=...) is True or False; got {self.done!r}")
        object.__setattr__(self, "done", bool(self.done))
        if not isinstance(self.metrics, Mapping):
            raise ConfigError(f"StepResult(metrics=...) maps names to numbers; got {repr(self.metrics)[:60]}")
        object.__setattr__(self, "reward", checked_reward(self.reward, "StepResult(reward=...)"))
        for name, value in self.metrics.items():
            if not isinstance(name, str) or finite_number(value) is None:
                raise ConfigError(
                    f"StepResult(metrics={{{name!r}: {value!r}}}) must be a finite number; leave a metric out of "
                    f"turns that it has no value in"
                )
        object.__setattr__(self, "metrics", {name: float(value) for name, value in self.metrics.items()})

    @property
    def shown_messages(self) -> Sequence[Message]:
        """The messages, with each of ``images`` in the part that shows it."""
        if not isinstance(self.images, list | tuple):
            raise ConfigError(f"StepResult(images=...) is a list of images; got {described(self.images)}")
        try:
            return with_placed_images(self.messages, self.images, "StepResult(images=...)")
        except DataError as error:
            raise ConfigError(str(error)) from None

    @property
    def shows_images(self) -> bool:
        """Whether messages show images."""
        return bool(self.images) or has_images({"messages": list(self.messages)}, ["messages"])


class MessageEnvironment:
    """Base class of environments, which answer the model's turns in messages.

    One object answers one sample: it may keep that conversation's state in its fields. Every method may be ``async``;
    plain ones run in threads. Override `step`, and the others as needed.

    Example:
        >>> class Guessing(MessageEnvironment):
        ...     def step(self, message):
        ...         if "7" in message["content"]:
        ...             return StepResult(reward=1.0, done=True)
        ...         return StepResult([{"role": "user", "content": "Wrong, guess again."}])
        >>> Guessing().step({"role": "assistant", "content": "3?"}).messages[0]["content"]
        'Wrong, guess again.'
    """

    partners: Mapping[str, Partner] = Partners()
    """Models that it may talk to, by the names of the algorithm's setting ``partners``; set before `reset`."""
    metric_names: Sequence[str] = ()
    """Names among the metrics of steps that are logged as ``environment/<name>``: means over the episodes with one."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools that the chat template shows to the model, known after `reset`."""
        return ()

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin an episode; return the whole conversation to begin with, images too, or None for the row's prompt.

        Args:
            row: The data's columns, with ``prompt`` as messages.
        """
        return None

    def step(self, message: Message) -> StepResult | Awaitable[StepResult]:
        """Answer a turn of the model.

        Args:
            message: The turn: ``{"role": "assistant", "content": ...}``, with ``reasoning_content`` and ``tool_calls``
                where it has them. The ``arguments`` of a call stay text if they are no JSON object.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method step(self, message) -> StepResult")

    def get_reward(self) -> float | Awaitable[float | None] | None:
        """Return the reward of the whole episode, asked for once at its end; None: the sum of its turns' rewards.

        An episode also ends by the limits of turns and tokens, after which `step` is not called: without any reward, it
        then has 0.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds."""
        return None


def checked_result(result: object, environment: object) -> StepResult:
    """Return the result of a step.

    Raises:
        ConfigError: if it is none.
    """
    if isinstance(result, StepResult):
        return result
    raise ConfigError(
        f"{type(environment).__name__}.step must return StepResult(messages, ...); it returned {repr(result)[:60]}"
    )


def read_images(result: StepResult, place: str, find_processor: Callable[[], ImageProcessor | None]) -> StepResult:
    """Return a result that shows images with these in its messages, read now, and the text that stands for them.

    Args:
        place: The step, for error messages.
        find_processor: Returns the model's processor of images; None for a model of text.

    Raises:
        GenerationError: for images and a model of text, or without its processor.
        DataError: for images that cannot be used.
    """
    try:
        processor = find_processor()
    except DataError as error:
        raise GenerationError(f"{place} shows images, and {error}") from error
    if processor is None:
        raise GenerationError(
            f"{place} shows images, and the model reads text alone, or its tokenizer came without a processor of "
            f"images; train a vision-language model, give tokenizer= its processor, or describe images in words"
        )
    row = {"messages": list(result.shown_messages)}
    shown = with_images(row, ["messages"], place, processor, read=ImageFile.copy_of)
    return replace(result, messages=shown["messages"], images=())


def check_size(messages: Sequence[Message], name: str) -> None:
    """Raise GenerationError for messages that no context can hold, which would be tokenized for minutes."""
    num_characters = sum(len(str(message.get("content") or "")) for message in messages)
    if num_characters > MAX_MESSAGE_CHARACTERS:
        raise GenerationError(
            f"{name} may return {MAX_MESSAGE_CHARACTERS} characters of messages, and returned {num_characters}; return "
            f"a part of them"
        )


def checked_conversation(begun: object, environment: object) -> Sequence[Message] | None:
    """Return the messages with which an episode begins; None: those of the row.

    Raises:
        ConfigError: if they are no messages.
    """
    if begun is None:
        return None
    if isinstance(begun, Sequence) and is_conversation(list(begun)):
        _check_messages(begun, f"{type(environment).__name__}.reset", may_show_images=True)
        return begun
    raise ConfigError(
        f"{type(environment).__name__}.reset must return messages with 'role' and 'content', or None for the row's "
        f"prompt; it returned {repr(begun)[:60]}"
    )


def checked_reward(reward: object, name: str) -> float | None:
    """Return a reward as float; None: there is none.

    Raises:
        RewardError: for anything but a finite number, as for results of reward functions.
    """
    if reward is None:
        return None
    number = finite_number(reward)
    if number is not None:
        return number
    raise RewardError(
        f"{name} must be a finite number (of at most {MAX_REWARD:g}), or None where there is no reward; got "
        f"{repr(reward)[:60]}"
    )


def checked_tools(environment: MessageEnvironment) -> tuple[Tool, ...]:
    """Return the tools of an environment.

    Raises:
        ConfigError: if they are other objects.
    """
    tools = environment.tools
    if isinstance(tools, Sequence) and all(isinstance(tool, Tool) for tool in tools):
        return tuple(tools)
    raise ConfigError(
        f"{type(environment).__name__}.tools must be a list of Tool; it is {repr(tools)[:60]}; write "
        f"Tool.from_function(...) for each function, or derive from ToolEnvironment"
    )


def _check_messages(messages: Sequence[Message], name: str, *, may_show_images: bool = False) -> None:
    kinds = "{'type': 'text', 'text': ...}" + (" and images" if may_show_images else "")
    for message in messages:
        role, content = message["role"], message.get("content")
        if may_show_images and isinstance(content, list):
            message = {**message, "content": [part for part in content if not is_image_part(part)]}
        if not isinstance(role, str):
            raise ConfigError(f"{name}: the role of a message is a word, such as 'user'; got {repr(role)[:60]}")
        try:
            plain_messages([message], name)
        except DataError:
            raise ConfigError(
                f"{name}: the content of a message is text, or a list of {kinds}; one of role {role!r} holds "
                f"{repr(content)[:60]}; describe it in words"
            ) from None
