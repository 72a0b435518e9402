"""Questions of environments to models of the run, answered by the thread that generates while all its samples wait.

Environments ask from the event loop. The questions that have gathered are answered in one call of an engine of the
asked model: between two steps of the call that generates, before its first, or after its last. Of a tensor-parallel
group, the first rank's environments ask, and all ranks answer together.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.params import SamplingParams
from lightning_realloc.generation.loop.asking import current_pause

if TYPE_CHECKING:
    from lightning_realloc.generation.base_engine import Engine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PartnerQuestion:
    """A question to a model."""

    role: str
    """Role of the model."""
    key: int
    """Number that keys the answer's random numbers, in place of a sample's id."""
    prompt: tuple[int, ...]
    """Tokens before the answer."""
    max_new_tokens: int
    """Most tokens of the answer."""
    temperature: float
    """Divisor of the logits; 0 takes the most likely token."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end the answer, the same for all questions to a model."""


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A question that waits for its answer."""

    question: PartnerQuestion
    answer: asyncio.Future[tuple[int, ...]]

    def settle(self, given: tuple[int, ...] | Exception) -> None:
        """Give the answer, or an error, to the environment; any thread may call it."""

        def settle() -> None:
            if self.answer.done():  # the environment was given up
                return
            if isinstance(given, Exception):
                self.answer.set_exception(given)
            else:
                self.answer.set_result(given)

        self.answer.get_loop().call_soon_threadsafe(settle)


class PartnerQueue:
    """Questions to the models of one generating call at a time.

    Args:
        gather_s: Seconds without a further question after which those that came are answered. Longer waits make larger
            batches.
    """

    def __init__(self, gather_s: float = 0.005) -> None:
        self._gather_s = gather_s
        self._engine: Engine | None = None
        self._sampling = SamplingParams()
        self._asked: SimpleQueue[_Open | None] = SimpleQueue()
        """Questions in the order in which they came; None: what `run` carries out is done."""
        self.wake: Callable[[], None] = _do_nothing
        """Called after a question was asked, by the event loop."""

    def __reduce__(self) -> tuple[type[PartnerQueue], tuple[float]]:
        """Leave questions in the process in which they are asked."""
        return PartnerQueue, (self._gather_s,)

    def open(self, engine: Engine, sampling: SamplingParams) -> None:
        """Answer by the models that an engine's environments may ask, and by this sampling where none is asked for."""
        self._engine, self._sampling, self.wake = engine, sampling, _do_nothing

    def close(self) -> None:
        """Answer nothing any more: open and later questions raise GenerationError."""
        self._engine, self.wake = None, _do_nothing
        while not self._asked.empty():
            left = self._asked.get()
            if left is not None:
                left.settle(_closed())

    # ---- in the event loop
    async def ask(
        self,
        role: str,
        key: int,
        prompt: tuple[int, ...],
        *,
        stop_token_ids: Collection[int],
        max_new_tokens: int | None,
        temperature: float | None,
    ) -> tuple[int, ...]:
        """Return the tokens that a model answers; None takes a setting of the call's sampling.

        The asking partner has checked the settings, since it knows its own name.

        Raises:
            GenerationError: for a prompt without room for an answer, and where no call generates.
        """
        if self._engine is None:
            raise _closed()
        longest = self._engine.partners[role].max_prompt_tokens
        room = math.inf if longest is None else longest + 1 - len(prompt)
        if room < 1:
            raise GenerationError(
                f"{role} is asked with {len(prompt)} tokens, and its context leaves no room for an answer; give "
                f"reply() fewer or shorter messages"
            )
        most = self._sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        chosen = self._sampling.temperature if temperature is None else temperature
        question = PartnerQuestion(role, key, prompt, int(min(most, room)), chosen, tuple(sorted(stop_token_ids)))
        opened = _Open(question, asyncio.get_running_loop().create_future())
        with current_pause():
            self._asked.put(opened)
            self.wake()
            if self._engine is None:  # closed in this moment
                raise _closed()
            return await opened.answer

    # ---- in the thread that generates, on all ranks of a tensor-parallel group
    def answer(self) -> bool:
        """Answer the questions that are there; return whether there were any."""
        return self._answer(is_blocking=False)

    def run(self, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which waits for environments, and answer their questions until then.

        It is called on a tensor-parallel group's first rank; all ranks return its result, as plain data.
        """
        assert self._engine is not None, "a call is open"
        work: Future[T] = Future()

        def carry_out() -> None:
            try:
                work.set_result(make())
            except BaseException as error:
                work.set_exception(error)
            self._asked.put(None)

        self._engine.on_first_rank(lambda: threading.Thread(target=carry_out, daemon=True).start())
        while self._answer(is_blocking=True):
            pass
        return self._engine.on_first_rank(work.result)

    def _answer(self, *, is_blocking: bool) -> bool:
        engine, opened = self._engine, list[_Open]()
        assert engine is not None, "a call is open"

        def gather() -> list[PartnerQuestion]:
            opened.extend(self._gathered(is_blocking=is_blocking))
            return [each.question for each in opened]

        questions = engine.on_first_rank(gather)
        try:
            answers = _answers(engine, self._sampling, questions) if questions else []
        except BaseException:
            self.close()
            for each in opened:
                each.settle(_closed())
            raise
        for each, answer in zip(opened, answers, strict=False):  # other ranks have none open
            each.settle(answer)
        return bool(questions)

    def _gathered(self, *, is_blocking: bool) -> list[_Open]:
        """Return the questions that are there, and those that come soon after; [] if `run` is done."""
        found: list[_Open] = []
        while True:
            try:
                wait_s = self._gather_s if found else 0.0
                opened = self._asked.get() if is_blocking and not found else self._asked.get(wait_s > 0, wait_s)
            except Empty:
                return found
            if opened is None:
                if found:
                    self._asked.put(None)
                return found
            if not opened.answer.cancelled():
                found.append(opened)


def _answers(engine: Engine, sampling: SamplingParams, questions: Sequence[PartnerQuestion]) -> list[tuple[int, ...]]:
    """Return the answers to questions, each batch of which one call of an engine gives."""
    answers: dict[int, tuple[int, ...]] = {}
    began_at = time.monotonic()
    with engine.interrupted():
        for places in _batches(questions).values():
            batch = [questions[place] for place in places]
            most = max(question.max_new_tokens for question in batch)
            completions = engine.partners[batch[0].role].generate(
                [question.prompt for question in batch],
                _sampled(sampling, most, batch[0].temperature, batch[0].stop_token_ids),
                sample_ids=[question.key for question in batch],
                token_limits=[question.max_new_tokens for question in batch],
            )
            answers |= zip(places, (completion.token_ids for completion in completions), strict=True)
    engine.waits.count_replies(time.monotonic() - began_at, [len(answer) for answer in answers.values()])
    return [answers[place] for place in range(len(questions))]


def _sampled(
    sampling: SamplingParams, most: int, temperature: float, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Return the sampling of one answer for each question, with a call's other settings."""
    return replace(
        sampling,
        n=1,
        max_new_tokens=most,
        min_new_tokens=min(most, sampling.min_new_tokens),
        temperature=temperature,
        stop_token_ids=stop_token_ids,
    )


def _batches(questions: Sequence[PartnerQuestion]) -> Mapping[object, list[int]]:
    """Return the places of questions that one call can answer: to one model, sampled alike, with distinct keys."""
    batches: dict[object, list[int]] = {}
    seen: dict[tuple[str, int], int] = {}
    for place, question in enumerate(questions):
        number = seen[question.role, question.key] = seen.get((question.role, question.key), 0) + 1
        batches.setdefault((question.role, question.temperature, number), []).append(place)
    return batches


def _closed() -> GenerationError:
    return GenerationError(
        "no model answers an environment before or after the call that generates its response; ask partners in reset, "
        "step and get_reward alone"
    )


def _do_nothing() -> None:
    pass
