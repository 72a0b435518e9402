"""Multi-turn responses: an environment answers each turn of the model while other samples keep running.

Asynchronous environments answer in one event loop, others in threads. Answers arrive in a queue, which the generation
loop reads between two steps. Of a tensor-parallel group, the first rank asks for all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, get_args

from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.errors import DataError, GenerationError, ReallocError, require_choice
from lightning_realloc.generation.core.model_config import as_token_ids, check_vocabulary
from lightning_realloc.generation.core.params import check_counts, check_kind
from lightning_realloc.generation.core.sample import FinishReason, Sample
from lightning_realloc.generation.loop.asking import Pause, begin_pause, call
from lightning_realloc.runtime.event_loop import EventLoop
from lightning_realloc.runtime.messages.environment_waits import WaitMeter
from lightning_realloc.runtime.messages.plain_data import decode_value, encode_value
from lightning_realloc.setting_hints import suggest_settings

_log = logging.getLogger(__name__)
Agree = Callable[[Sequence[float]], Sequence[float]]
"""Takes numbers of this rank, and returns those of the first rank of its tensor-parallel group."""
OnFailure = Literal["drop", "learn", "raise"]
"""Fate of responses whose environment failed."""
EVENT_LOOP = EventLoop("environments")
"""Where the environments of all calls of this process run."""


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
    begin: int = 0
    """Index into ``token_ids`` at which the turn begins."""
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """In training, the data's row by column, with its prompt as text or messages; otherwise empty."""


class Environment(Protocol):
    """Answers the model's turns: a tool, a simulated user, a game.

    A function runs in several threads at once, an ``async`` one in one event loop. All turns of a call's sample are
    asked about on the rank where it began. A turn that a budget cut off is asked about again, also while its first
    question is open, and by another rank or a resumed run. An attribute ``partner_queue`` holds questions to models.
    """

    def __call__(self, turn: Turn) -> Sequence[int] | ModelInput | Awaitable[Sequence[int] | ModelInput | None] | None:
        """Return the tokens to append, including those of the chat template; None: the response is finished.

        An answer with images is a `ModelInput`, with further inputs for tokens before its last.
        """
        ...


@suggest_settings({})
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Bounds of a response with an environment."""

    max_turns: int = 8
    """Most turns of the model in one response; the environment is not asked after the last one."""
    deadline_s: float = 60.0
    """Most seconds for one answer of the environment. One call of a tool may take half of it."""
    max_concurrent: int = 256
    """Most answers of a rank that are computed at a time; further turns wait, without a deadline until then."""
    max_turn_tokens: int | None = None
    """Most tokens of a turn of the model, after which the environment is asked; None: as many as the response."""
    episode_deadline_s: float = math.inf
    """Most seconds for all answers of an environment of messages in one response."""
    retries: int = 1
    """Times that an environment is asked again after it raised, within the same deadline."""
    on_failure: OnFailure = "drop"
    """For a response whose environment failed: ``"drop"`` leaves it out of losses and means, ``"learn"`` rewards and
    learns it as far as it came, ``"raise"`` ends the run."""

    def __post_init__(self) -> None:
        check_counts(max_turns=self.max_turns, max_concurrent=self.max_concurrent)
        check_counts(least=0, retries=self.retries)
        check_counts(optional=True, max_turn_tokens=self.max_turn_tokens)
        require_choice("on_failure", self.on_failure, get_args(OnFailure), GenerationError)
        for name in ("deadline_s", "episode_deadline_s"):
            seconds = getattr(self, name)
            check_kind(name, seconds, Real, "a number")
            if not seconds > 0:
                raise GenerationError(f"{name}={seconds} must be positive; use math.inf to wait for ever")


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's answer for one sample."""

    index: int
    """Index of the sample in the call."""
    input: ModelInput | None = None
    """Tokens, and further inputs of the model for them; None: the response is finished."""
    error: str | None = None

    def give_to(self, sample: Sample) -> FinishReason | None:
        """Add the answer to its sample; return why the response ends here, None if the model's next turn begins."""
        sample.error = self.error
        if self.error is not None:
            return "failure"
        if self.input is None:
            return "environment"
        if len(self.input.token_ids) >= sample.room:
            return "length"  # no room for a token of the model
        sample.extend(self.input)
        return None


@dataclass(slots=True, eq=False)
class Question:
    """A question to the environment about one turn."""

    number: int
    """Number of the turn."""
    pause: Pause
    """Time in which the environment waits for models of the run."""
    end: float = math.inf
    """When the answer must be there, without pauses; infinity until the environment is asked."""
    future: Future[None] | None = None

    @property
    def due(self) -> float:
        """When the answer must be there; infinity while the environment waits for a model."""
        return math.inf if self.pause.is_open else self.end + self.pause.seconds


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


class ModelQuestions(Protocol):
    """Questions of an environment to models of the run; `PartnerQueue` is one, and documents the members."""

    wake: Callable[[], None]

    def answer(self) -> bool: ...


class Conversations:
    """Asks an environment, and collects its answers without blocking.

    Args:
        settings: Bounds of a response's turns; None: the defaults.
        vocabulary: Bound on the environment's token ids.
        agree: In a tensor-parallel group, whose ranks hold the same samples: returns the first rank's numbers on all of
            them. `answers` is then collective while questions are open. None: no group.
        asks: Whether this rank asks; of a group, the first rank alone.
        waits: Measures how samples wait; None: nothing reads it.
        bound: Bound on the answers that are computed at a time; None: one of its own.
        place: Returns an answer with images with the model's positions of its tokens; None: they are left out.
    """

    def __init__(
        self,
        environment: Environment,
        settings: Conversation | None,
        *,
        vocabulary: int,
        clock: Callable[[], float],
        agree: Agree | None = None,
        asks: bool = True,
        waits: WaitMeter | None = None,
        bound: asyncio.Semaphore | None = None,
        place: Callable[[ModelInput], ModelInput] | None = None,
    ) -> None:
        self._environment = environment
        self._place = place
        self._settings = settings or Conversation()
        self._vocabulary = vocabulary
        self.clock = clock
        """Returns seconds, by which deadlines are counted."""
        self._agree, self._asks = agree, asks
        self._waits = waits or WaitMeter()
        self._partners: ModelQuestions | None = getattr(environment, "partner_queue", None)
        if self._partners is not None:
            self._partners.wake = self._wake
        self._may_run = bound or asyncio.Semaphore(self._settings.max_concurrent)
        self._asked: dict[int, Question] = {}
        self._received: list[tuple[Question, Answer | None]] = []
        self._queue: SimpleQueue[tuple[Question, Answer | None]] = SimpleQueue()
        """Questions with their answers; None: the environment is asked, so that there is a deadline now."""

    @property
    def waiting(self) -> bool:
        """Whether any question is open."""
        return bool(self._asked)

    @property
    def reply_s(self) -> float:
        """Seconds so far in which models of the run answered environments."""
        return self._waits.reply_s

    @property
    def asked(self) -> Collection[int]:
        """Indices of the samples whose question is open."""
        return self._asked.keys()

    def ask(self, index: int, sample: Sample) -> bool:
        """Ask for the tokens after a turn that ended by its stop rule; `answers` returns them later.

        Return whether the environment is asked: not after the last turn, which ends the response.
        """
        if sample.turn >= self._settings.max_turns:
            sample.finish_reason = "max_turns"
            return False
        sample.finish_reason = None
        turn = Turn(
            sample.sample_id,
            sample.prompt_index,
            sample.prompt,
            tuple(sample.token_ids),
            sample.turn,
            sample.turn_begin,
        )
        self.ask_about(index, turn)
        return True

    def ask_about(self, index: int, turn: Turn) -> None:
        """Ask for the tokens after a turn; `answers` returns them under this index."""
        question = self._asked[index] = Question(turn.number, Pause(self.clock))
        self._waits.count(self.clock(), len(self._asked))
        if self._asks:
            self._begin(index, question, turn)

    def answers(self) -> list[Answer]:
        """Return the answers since the last call, and a failure for each question past its deadline."""
        answers = self._ready() if self._asks else []
        if self._agree is not None and self._asked:
            answers = first_ranks(answers or None, self._agree) or []
        for answer in answers:
            del self._asked[answer.index]
        if answers:
            self._waits.count(self.clock(), len(self._asked))
        return list(map(self._placed, answers))

    def _placed(self, answer: Answer) -> Answer:
        """Return an answer with the positions of its tokens if it shows images; a failure if these do not fit."""
        if self._place is None or answer.input is None or not answer.input.extras:
            return answer
        try:
            return replace(answer, input=self._place(answer.input))
        except DataError as error:
            return Answer(answer.index, error=f"the model cannot read the images of the environment's answer: {error}")

    def mark_idle(self, is_idle: bool) -> None:
        """Record whether nothing is generated from now on while questions are open."""
        mark = self._waits.begin_idle if is_idle and self._asked else self._waits.end_idle
        mark(self.clock())

    def wait(self, most_s: float) -> None:
        """Return once there is an answer, a deadline passes, or ``most_s`` seconds have passed.

        Questions to models of the run are answered instead. Ranks that do not ask return at once, and wait for the
        first one in `answers`.
        """
        if self._partners is not None and self._partners.answer():
            return
        if not self._asks:
            return
        left = min((question.due for question in self._asked.values()), default=math.inf) - self.clock()
        with suppress(Empty):
            self._received.append(self._queue.get(timeout=max(0.0, min(left, most_s, threading.TIMEOUT_MAX))))

    def _wake(self) -> None:
        """End a wait for answers."""
        self._queue.put((Question(0, Pause(self.clock)), None))

    def close(self) -> None:
        """Forget all open questions."""
        for question in self._asked.values():
            _cancel(question)
        self._asked.clear()
        self._waits.count(self.clock(), 0)
        self._waits.end_idle(self.clock())

    def _begin(self, index: int, question: Question, turn: Turn) -> None:
        question.future = EVENT_LOOP.submit(self._answer(index, question, turn))

    def _ready(self) -> list[Answer]:
        """Return the answers that are there, and failures of those past their deadline; all questions stay open."""
        while not self._queue.empty():
            self._received.append(self._queue.get())
        # The question of an answer after its deadline is closed.
        received = [(question, answer) for question, answer in self._received if answer is not None]
        answers = {answer.index: answer for question, answer in received if self._asked.get(answer.index) is question}
        self._received.clear()
        now = self.clock()
        for index, question in self._asked.items():
            if question.due <= now and index not in answers:
                _cancel(question)
                answers[index] = Answer(
                    index,
                    error=f"the environment did not answer turn {question.number} within deadline_s="
                    f"{self._settings.deadline_s}; bound the tool's own time, or raise Conversation(deadline_s=...)",
                )
        return list(answers.values())

    async def _answer(self, index: int, question: Question, turn: Turn) -> None:
        async with self._may_run:
            begin_pause(question.pause)
            question.end = self.clock() + self._settings.deadline_s
            self._queue.put((question, None))
            answer = await self._answer_of(index, turn)
            # The question of a late answer stays open until `answers` finds that its deadline has passed.
            if self.clock() < question.due:
                self._queue.put((question, answer))

    async def _answer_of(self, index: int, turn: Turn) -> Answer:
        """Return the environment's answer; one that raises is asked again, as often as allowed."""
        for _ in range(self._settings.retries):
            answer = await self._tried(index, turn)
            if answer.error is None:
                return answer
        return await self._tried(index, turn)

    async def _tried(self, index: int, turn: Turn) -> Answer:
        try:
            return Answer(index, self._checked(await call(self._environment, turn), turn))
        except GenerationError as error:
            return Answer(index, error=str(error))
        except ReallocError as error:  # of what the environment returned
            return Answer(index, error=f"the environment's answer to turn {turn.number}: {error}")
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also SystemExit, which would end the event loop
            _log.debug("environment failed", exc_info=True)
            raised = f"the environment raised {type(error).__name__}({error}) after turn {turn.number}"
            way_out = "catch it there and return what the model is to read instead, or None to end the response"
            return Answer(index, error=f"{raised}; {way_out}")

    def _checked(self, given: Any, turn: Turn) -> ModelInput | None:
        if given is None:
            return None
        said = f"the environment's answer to turn {turn.number}"
        try:
            tokens = as_token_ids(given.token_ids if isinstance(given, ModelInput) else given)
        except TypeError:
            raise GenerationError(
                f"{said} is {repr(given)[:60]}; return a list of token ids, such as "
                'tokenizer(text, add_special_tokens=False)["input_ids"], or None to end the response'
            ) from None
        if not tokens:
            raise GenerationError(f"{said} holds no tokens; return None to end the response")
        check_vocabulary(said, tokens, self._vocabulary)
        if not isinstance(given, ModelInput):
            return ModelInput(tokens)
        if given.extras and len(tokens) == 1:
            raise GenerationError(f"{said} shows images and is one token; add a token after those of the images")
        return given


def _cancel(question: Question) -> None:
    if question.future is not None:
        question.future.cancel()


def first_ranks(value: Any, agree: Agree) -> Any:
    """Return a value of a tensor-parallel group's first rank on all of its ranks, as plain data.

    ``agree`` is collective over the group, whose ranks pass equally many numbers. None is sent as a single number.
    """
    content = b"" if value is None else encode_value(value)
    size = int(agree([float(len(content))])[0])
    if not size:
        return None
    words = array("I", bytes(content or size).ljust(-(-size // 4) * 4, b"\0"))  # a float of 64 bits holds four bytes
    return decode_value(array("I", map(int, agree([*map(float, words)]))).tobytes()[:size])
