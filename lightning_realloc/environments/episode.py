"""One sample's conversation with its environment, from the first reset to the reward at the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import IMAGES
from lightning_realloc.data.chat import Message
from lightning_realloc.data.images.sample_images import SampleImages, shown_files, shown_input
from lightning_realloc.data.prompts import EMPTY_PROMPT
from lightning_realloc.environments.episode_options import EpisodeOptions
from lightning_realloc.environments.message_environment import (
    MessageEnvironment,
    StepResult,
    check_size,
    checked_conversation,
    checked_result,
    checked_reward,
    read_images,
)
from lightning_realloc.environments.partner import Replies, partners_of
from lightning_realloc.environments.tool_environment import only_calls_tools, plain_environment
from lightning_realloc.environments.trl_environment import TrlEnvironment
from lightning_realloc.environments.turns.chat_turns import ChatTurns
from lightning_realloc.errors import ConfigError, GenerationError, ReallocError, RewardError, describe_error, error_line
from lightning_realloc.generation.core.sample import FinishReason
from lightning_realloc.generation.loop.asking import call, stopwatch, time_limit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Tokens of a turn of the model."""

    before: Sequence[int]
    """Prompt and response before the turn."""
    own: Sequence[int]


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn of the model, and the environment's answer."""

    message: Message
    """The model's turn."""
    result: StepResult
    answer: ModelInput | None
    """Tokens that follow the model's, with the images that they show; None: the episode ended with this turn."""
    seconds: float
    """Time of the environment."""


@dataclass(slots=True, eq=False)
class Episode:
    """A conversation, and the environment that answers in it.

    A turn is played once, however often it is asked about. After an abandoned or failed question, the environment's
    state is unknown: a new one gets the row and all turns so far.
    """

    options: EpisodeOptions
    row: Mapping[str, Any]
    """The data's columns, with ``prompt`` as messages."""
    replies: Replies
    """Replies of the environment's partners."""
    prompt: Sequence[Message] = ()
    """Messages before the model's first turn."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the prompt shows: the environment's, else the row's."""
    changes_prompt: bool = False
    """Whether the prompt differs from the data's, by its messages or by tools."""
    turns: list[PlayedTurn] = field(default_factory=list)
    reward: float | None = None
    """Reward of the whole episode, once it is finished; None: it has none."""
    failure: str | None = None
    """Error of a ``reset``, which the first answer raises, or of ``get_reward``; None: none."""
    chat: ChatTurns = field(init=False)
    _environment: MessageEnvironment | None = None
    """The environment; None where its state is not that of the last turn."""
    _lost: list[MessageEnvironment] = field(default_factory=list)
    """Environments of which a call failed or was abandoned; they are closed with the episode."""
    _only_calls_tools: bool = False
    """Whether the environment does nothing but carry out calls."""
    _lost_s: float = 0.0
    """Time of calls that failed or were abandoned."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.chat, self.tools = self.options.chat(self.row)

    def messages(self, turns: Sequence[TurnTokens], num_answers: int) -> list[Message]:
        """Return the conversation as the model knows it: its turns, and the answers that it read.

        The last turn may have been cut off, so that nothing answered it. An answer for which there was no room, or no
        further turn, is left out: reward functions would take it for the model's. The last words of an environment that
        ended the episode are kept.

        Args:
            turns: Tokens of the model's turns.
            num_answers: Number of answers that follow them.
        """
        found: list[Message] = []
        for place, turn in enumerate(self.turns):
            found.append(turn.message)
            if place < num_answers or turn.result.done:
                found += turn.result.messages
        return found + [self._cut_off(tokens) for tokens in turns[len(self.turns) :]]

    @property
    def shown(self) -> object:
        """The environment as reward functions get it: the user's object; None if its state is lost."""
        return _given_object(self._environment)

    @property
    def images(self) -> SampleImages | None:
        """Images of the prompt, those of the row among them; None: no others than the row's."""
        found = shown_files(self.prompt, self.options.find_processor) if self.changes_prompt else None
        return None if found == self.row.get(IMAGES) else found

    @property
    def last_images(self) -> SampleImages | None:
        """Images of the answer that ended the episode; None: no images."""
        return shown_files(self.turns[-1].result.messages, self.options.find_processor) if self.is_done else None

    @property
    def is_done(self) -> bool:
        """Whether the environment has ended the episode."""
        return bool(self.turns) and self.turns[-1].result.done

    @property
    def end(self) -> FinishReason:
        """Reason for which the answer to the last turn ended the episode; tools alone leave that to the model."""
        if not self.is_done:
            return "max_turns"
        return "stop" if self._only_calls_tools else "environment"

    @property
    def num_calls(self) -> int:
        """Number of the model's tool calls so far."""
        return sum(len(turn.message.get("tool_calls", ())) for turn in self.turns)

    @property
    def seconds(self) -> list[float]:
        """Time of the environment in each turn."""
        return [turn.seconds for turn in self.turns]

    def metrics(self) -> Mapping[str, float]:
        """Return the sums of the turns' metrics by name."""
        sums: Counter[str] = Counter()
        for turn in self.turns:
            sums.update(turn.result.metrics)
        return sums

    async def begin(self) -> None:
        """Reset the environment, and learn the conversation to begin with.

        Raises:
            ConfigError: if ``reset`` gives no messages. Another error is raised by the first answer, so that it fails
                this episode alone.
        """
        try:
            await self._retried(self._revived, "reset")
        except ConfigError:
            raise
        except Exception as error:
            self.refuse(_failure("reset", error))

    def refuse(self, failure: str) -> None:
        """Let the first answer fail: the environment began no conversation that can be continued."""
        self.prompt, self.changes_prompt = self.row["prompt"], False
        self.failure = failure

    async def answer(self, number: int, tokens: TurnTokens) -> ModelInput | None:
        """Return the tokens after the model's turn ``number``, counted from 1; None: the episode has ended.

        Raises:
            GenerationError: if the environment failed to reset.
        """
        if self.failure is not None:
            raise GenerationError(self.failure)
        async with self._lock:
            if len(self.turns) < number:
                assert len(self.turns) == number - 1, f"turn {number} comes after turn {len(self.turns)}"
                self.turns.append(await self._played(tokens, is_last=number >= self.options.bounds.max_turns))
        return self.turns[number - 1].answer

    async def finish(self) -> None:
        """Ask for the episode's reward: the environment's, else the sum of those of turns.

        It is 0 for an episode without any that a limit cut off, such as a game that is rewarded at its end.

        Raises:
            RewardError: for anything but a finite number.
        """
        own, environment = None, self._environment
        if environment is not None:
            try:
                own = await self._retried(lambda: self._asked_for_reward(environment), "get_reward")
            except Exception as error:
                self.failure = _failure("get_reward", error)
        self.reward = checked_reward(own, f"{type(self.shown).__name__}.get_reward()")
        of_turns = [turn.result.reward for turn in self.turns if turn.result.reward is not None]
        if self.reward is None and self.failure is None and (of_turns or not self.is_done):
            self.reward = sum(of_turns, 0.0)

    async def close(self) -> None:
        """Close the environment, and those that were lost; their errors are logged.

        Raises:
            ConfigError: for a ``close`` that asks a partner.
        """
        environments, self._lost = self._lost, []
        if self._environment is not None:
            environments.append(self._environment)
            self._environment = None
        for environment in environments:
            if self.options.partners is not None:
                own: Any = _given_object(environment)
                own.partners.is_over = True
            try:
                await self._in_time(partial(call, environment.close), "close")
            except ConfigError:
                raise
            except Exception as error:
                _log.warning("%s: %s", type(_given_object(environment)).__name__, _failure("close", error))

    # ---- playing
    async def _played(self, tokens: TurnTokens, *, is_last: bool) -> PlayedTurn:
        elapsed_s = stopwatch()
        message = self._message(tokens)
        result = await self._bounded_step(message, elapsed_s, is_last=is_last)
        check_size(result.messages, f"{type(self.shown).__name__}.step")
        seconds = elapsed_s()
        if result.done or is_last:
            return PlayedTurn(message, result, None, seconds)
        answer_ids = self.chat.answer_ids(tokens.own, message, result.messages, self.tools)
        answer = shown_input(answer_ids, result.messages, self.options.find_processor)
        return PlayedTurn(message, result, answer, seconds)

    def _cut_off(self, tokens: TurnTokens) -> Message:
        """Return a turn that nothing answered; its text as content if the parser fails on part of a turn."""
        try:
            return self._message(tokens)
        except Exception:
            text = self.options.tokenizer.decode(list(tokens.own), skip_special_tokens=True)
            return {"role": "assistant", "content": text}

    def _message(self, tokens: TurnTokens) -> Message:
        return self.options.parser.parse_tokens(
            tokens.own,
            before=tokens.before,
            stop_token_ids=self.options.stop_token_ids,
            first_call=self.num_calls,
            tools=self.tools,
        )

    async def _bounded_step(self, message: Message, elapsed_s: Callable[[], float], *, is_last: bool) -> StepResult:
        """Return the environment's result within the deadline of the episode."""
        deadline_s = self.options.bounds.episode_deadline_s
        left_s = deadline_s - self._lost_s - sum(self.seconds)
        try:
            async with time_limit(max(left_s, 0.0)):
                return await self._step(message, is_last=is_last)
        except BaseException as error:
            self._lost_s += elapsed_s()
            if isinstance(error, TimeoutError) and self._lost_s + sum(self.seconds) >= deadline_s:
                raise GenerationError(
                    f"the environment took longer than episode_deadline_s={deadline_s} for all answers of the episode; "
                    f"bound the tools' own time, or raise Conversation(episode_deadline_s=...)"
                ) from None
            raise

    async def _step(self, message: Message, *, is_last: bool) -> StepResult:
        environment = await self._revived()
        self._only_calls_tools = only_calls_tools(environment)
        if is_last and message.get("tool_calls") and self._only_calls_tools:
            return StepResult()  # the model would not read the answers
        # Until it has answered: a failed or abandoned call leaves it in an unknown state.
        self._environment = None
        self._lost.append(environment)
        self._begin_turn(environment, len(self.turns) + 1)
        result = checked_result(await self._answered(environment, message), environment)
        if result.shows_images:
            name, turn = type(_given_object(environment)).__name__, len(self.turns) + 1
            place = f"{name}.step after turn {turn} of sample {self.replies.sample_id}"
            result = await call(read_images, result, place, self.options.find_processor)
        self._environment = self._lost.pop()
        return result

    async def _answered(self, environment: MessageEnvironment, message: Message) -> Any:
        try:
            return await call(environment.step, message)
        except (ReallocError, asyncio.CancelledError):
            raise
        except BaseException as error:  # also SystemExit, which would end the event loop
            _log.debug("environment failed", exc_info=True)
            after = f"after turn {len(self.turns) + 1}; catch it there and return a StepResult in its place"
            raise GenerationError(f"{_failure('step', error)}, {after}") from error

    async def _revived(self) -> MessageEnvironment:
        """Return the environment in the state after the last turn."""
        if self._environment is None:
            environment = await call(self.options.factory.make, self.row)
            self._lost.append(environment)  # until it is in the state of the last turn
            self._begin_turn(environment, 0)
            begun = checked_conversation(await call(environment.reset, self.row), environment)
            reset = f"{type(_given_object(environment)).__name__}.reset"
            if begun is None and self.row["prompt"] == EMPTY_PROMPT and not environment.tools:
                raise ConfigError(
                    f"{reset} wrote no prompt, and the row has none; return one there, or add a column 'prompt'"
                )
            check_size(begun or (), reset)
            if begun is not None and (given := StepResult(begun)).shows_images:
                place = f"{reset} of sample {self.replies.sample_id}"
                begun = (await call(read_images, given, place, self.options.find_processor)).messages
            self.prompt = self.row["prompt"] if begun is None else begun
            self.tools = [tool.schema for tool in environment.tools] or self.tools
            self.changes_prompt = begun is not None or bool(environment.tools)
            for number, turn in enumerate(self.turns, start=1):
                self._begin_turn(environment, number)
                await call(environment.step, turn.message)
            self._lost.remove(environment)
            self._environment = environment
        return self._environment

    async def _asked_for_reward(self, environment: MessageEnvironment) -> Any:
        self._begin_turn(environment, len(self.turns) + 1)
        return await call(environment.get_reward)

    def _begin_turn(self, environment: MessageEnvironment, number: int) -> None:
        """Give a new environment its partners; let them count the questions of a turn."""
        if self.options.partners is None:
            return
        own: Any = _given_object(environment)
        if number == 0:
            own.partners = partners_of(self.options.partners, self.chat, self.replies)
        own.partners.begin_turn(number)

    async def _retried(self, act: Callable[[], Awaitable[Any]], method: str) -> Any:
        """Return the result of an act within the deadline; after an error it is tried again, as often as allowed."""

        async def tried() -> Any:
            for _ in range(self.options.bounds.retries):
                try:
                    return await act()
                except ConfigError:
                    raise
                except Exception:
                    continue
            return await act()

        return await self._in_time(tried, method)

    async def _in_time(self, act: Callable[[], Awaitable[Any]], method: str) -> Any:
        deadline_s = self.options.bounds.deadline_s
        try:
            async with time_limit(deadline_s) as deadline:
                return await act()
        except TimeoutError:
            if not deadline.expired():  # the environment's own
                raise
            raise GenerationError(
                f"the environment's {method} did not return within deadline_s={deadline_s}; bound its own time, or "
                f"raise Conversation(deadline_s=...)"
            ) from None


def _given_object(environment: MessageEnvironment | None) -> object:
    """Return the user's object in an environment; None for None."""
    own = None if environment is None else plain_environment(environment)
    return own.wrapped if isinstance(own, TrlEnvironment) else own


def _failure(method: str, error: BaseException) -> str:
    """Return the failure of an episode for an error of one of its environment's methods."""
    if isinstance(error, GenerationError | RewardError):
        return str(error)
    return f"the environment's {method} raised {describe_error(error)}{error_line(error)}"
