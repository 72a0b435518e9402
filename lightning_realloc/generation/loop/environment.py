"""Multi-turn responses: an environment answers each turn of the model while other samples keep running.

Each answer is computed in a thread of its own: a tool that hangs cannot be stopped, and must not block a pool that
others wait for. There are at most as many threads as waiting samples. Threads are daemons, so none keeps the process
alive.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.model_config import as_token_ids, check_vocabulary
from lightning_realloc.generation.core.params import check_counts, check_kind
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.setting_hints import suggest_settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """The model's last turn, as an environment sees it."""

    sample_id: int
    """Unique among the samples of a call. Those of an evaluation have ids of trained ones."""
    prompt_index: int
    """Index of the prompt in the call that started the response, which other ranks and calls use for other prompts."""
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The response so far, including environments' tokens; its last token ended the turn."""
    number: int
    """Number of the turn, starting at 1."""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """In training, the data's row by column, with its prompt as text or messages; otherwise empty."""


class Environment(Protocol):
    """Answers the model's turns: a tool, a simulated user, a game. Called from several threads at once.

    A turn may be asked about again, also while its first question is open, and by another rank or a resumed run.
    """

    def __call__(self, turn: Turn) -> Sequence[int] | None:
        """Return the tokens to append, including those of the chat template; None: the response is finished."""
        ...


@suggest_settings({})
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Bounds of a response with an environment."""

    max_turns: int = 8
    """Most turns of the model in one response; the environment is not asked after the last one."""
    deadline_s: float = 60.0
    """Most seconds for one answer of the environment."""

    def __post_init__(self) -> None:
        check_counts(max_turns=self.max_turns)
        check_kind("deadline_s", self.deadline_s, Real, "a number")
        if not self.deadline_s > 0:
            raise GenerationError(f"deadline_s={self.deadline_s} must be positive; use math.inf to wait for ever")


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's answer for one sample."""

    index: int
    """Index of the sample in the call."""
    token_ids: tuple[int, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Question:
    number: int
    """Number of the turn."""
    due: float


def check_environment(environment: object, settings: object) -> None:
    """Raise GenerationError for an environment that cannot be called with a turn, or for unusable settings."""
    given = f"environment={environment!r}"
    if settings is not None and not isinstance(settings, Conversation):
        raise GenerationError(f"conversation={settings!r} is a {type(settings).__name__}; write Conversation(...)")
    if environment is None:
        if settings is not None:
            raise GenerationError(f"{settings} bounds a conversation without environment; give environment= too")
    elif isinstance(environment, type) or not callable(environment):
        raise GenerationError(f"{given} cannot be called with a Turn; give a function, or an object with __call__")
    elif inspect.iscoroutinefunction(environment) or inspect.iscoroutinefunction(type(environment).__call__):
        raise GenerationError(
            f"{given} is async; give a plain function, which may run the other one by asyncio.run(...): every question "
            "has a thread of its own"
        )


class Conversations:
    """Asks an environment, and collects its answers without blocking.

    Args:
        settings: Bounds of a response's turns; None: the defaults.
        vocabulary: Bound on the environment's token ids.
    """

    def __init__(
        self, environment: Environment, settings: Conversation | None, *, vocabulary: int, clock: Callable[[], float]
    ) -> None:
        self._environment = environment
        self._settings = settings or Conversation()
        self._vocabulary = vocabulary
        self._clock = clock
        self._asked: dict[int, _Question] = {}
        self._received: list[tuple[int, _Question, Answer]] = []
        self._queue: SimpleQueue[tuple[int, _Question, Answer]] = SimpleQueue()

    @property
    def waiting(self) -> bool:
        """Whether any question is open."""
        return bool(self._asked)

    @property
    def asked(self) -> Collection[int]:
        """Indices of the samples whose question is open."""
        return self._asked.keys()

    def goes_on_after(self, sample: Sample) -> bool:
        """Return whether the environment is asked about a turn that ended by its stop rule."""
        return sample.turn < self._settings.max_turns

    def ask(self, index: int, sample: Sample) -> None:
        """Ask for the tokens after the sample's turn, in a thread; `answers` returns them later."""
        question = _Question(sample.turn, self._clock() + self._settings.deadline_s)
        self._asked[index] = question
        turn = Turn(sample.sample_id, sample.prompt_index, sample.prompt, tuple(sample.token_ids), sample.turn)
        name = f"environment of sample {sample.sample_id}"
        threading.Thread(target=self._answer, args=(index, question, turn), name=name, daemon=True).start()

    def answers(self) -> list[Answer]:
        """Return the answers since the last call, and a failure for each question past its deadline."""
        while not self._queue.empty():
            self._received.append(self._queue.get())
        # The question of an answer after its deadline is closed.
        answers = [answer for index, question, answer in self._received if self._asked.get(index) is question]
        self._received.clear()
        for answer in answers:
            del self._asked[answer.index]
        now = self._clock()
        for index, question in [(index, question) for index, question in self._asked.items() if question.due <= now]:
            del self._asked[index]
            answers.append(
                Answer(
                    index,
                    error=f"the environment did not answer turn {question.number} within deadline_s="
                    f"{self._settings.deadline_s}; bound the tool's own time, or raise Conversation(deadline_s=...)",
                )
            )
        return answers

    def wait(self, most_s: float) -> None:
        """Return once there is an answer, a deadline passes, or ``most_s`` seconds have passed."""
        left = min((question.due for question in self._asked.values()), default=math.inf) - self._clock()
        with suppress(Empty):
            self._received.append(self._queue.get(timeout=max(0.0, min(left, most_s, threading.TIMEOUT_MAX))))

    def close(self) -> None:
        """Forget all open questions."""
        self._asked.clear()

    def _answer(self, index: int, question: _Question, turn: Turn) -> None:
        try:
            answer = Answer(index, self._checked(self._environment(turn), turn))
        except GenerationError as error:
            answer = Answer(index, error=str(error))
        except BaseException as error:  # also SystemExit, which would end the thread silently
            _log.debug("environment failed", exc_info=True)
            answer = Answer(
                index,
                error=f"the environment raised {type(error).__name__}({error}) after turn {turn.number}; catch it "
                "there and return what the model is to read instead, or None to end the response",
            )
        self._queue.put((index, question, answer))

    def _checked(self, given: Any, turn: Turn) -> tuple[int, ...] | None:
        if given is None:
            return None
        said = f"the environment's answer to turn {turn.number}"
        try:
            tokens = as_token_ids(given)
        except TypeError:
            raise GenerationError(
                f"{said} is {repr(given)[:60]}; return a list of token ids, such as "
                'tokenizer(text, add_special_tokens=False)["input_ids"], or None to end the response'
            ) from None
        if not tokens:
            raise GenerationError(f"{said} holds no tokens; return None to end the response")
        check_vocabulary(said, tokens, self._vocabulary)
        return tokens
