"""Talks with models of the run, against a loop that plays both seats with the models' own ``generate``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from lightning_realloc.batch.json_column import json_values
from lightning_realloc.environments import MessageEnvironment, StepResult
from lightning_realloc.environments.episodes import Episodes
from lightning_realloc.environments.partner import PartnerSettings, Voice
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.generation import Completion, Conversation, Engine, GenerationEngine, HFEngine, SamplingParams
from lightning_realloc.generation.partners import PartnerQueue
from tests.environments.guessing import END, chat_model, chat_tokenizer
from tests.environments.talking import MAX_REPLY, Talking
from tests.environments.test_episodes import options, prompts
from tests.matrices import crossed

GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0)
MAX_TURN = 5
"""Most tokens of a turn, since the tiny model goes on for ever greedily."""
SAMPLED = replace(GREEDY, temperature=1.0, seed=3)
COUNT = 8


class Stage:
    """An actor and the model that its environments talk to, itself unless another one is given."""

    def __init__(
        self, source: Any, *, other: PreTrainedModel | None = None, engine: Any = GenerationEngine, **bounds: Any
    ) -> None:
        tokenizer, actor = chat_tokenizer(), chat_model()
        voice = Voice("other", TurnParser(tokenizer), frozenset({END}))
        self.partner: Engine = engine(actor if other is None else other, tokenizer=tokenizer)
        self.actor: Engine = engine(actor, tokenizer=tokenizer)
        self.actor.partners = {"other": self.partner}
        self.queue = PartnerQueue()
        partners = PartnerSettings({"other": voice}, self.queue)
        bounds = {"max_turn_tokens": MAX_TURN, **bounds}
        self.episodes = Episodes(replace(options(source, **bounds), partners=partners))

    def play(self, params: SamplingParams, **settings: Any) -> list[Completion]:
        """Return responses to a few prompts, as a generating call makes them."""
        samples, bounds = prompts(COUNT), self.episodes.options.bounds
        self.queue.open(self.actor, params)
        inputs = self.queue.run(lambda: self.episodes.begin(samples))
        conversation = replace(bounds, max_turns=bounds.max_turns + 1)
        return self.actor.generate(
            inputs, params, sample_ids=samples.ids.tolist(), environment=self.episodes, conversation=conversation,
            **settings,
        )  # fmt: skip

    def finish(self, completions: list[Completion]) -> tuple[list[Completion], list[dict[str, Any]]]:
        """Return the final completions, and what is known of their conversations."""
        settled, columns = self.queue.run(lambda: self.episodes.finish(completions))
        return settled, json_values(columns["record/conversation"])


def said_by(model: PreTrainedModel, ids: list[int], most: int) -> list[int]:
    """Return the greedy continuation by the model's own ``generate``, up to the end of a turn."""
    read = torch.tensor([ids])
    output = model.generate(
        read, attention_mask=torch.ones_like(read), max_new_tokens=most, do_sample=False, eos_token_id=END,
        pad_token_id=0,
    )  # fmt: skip
    return output[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def talk_by_hand(actor: PreTrainedModel, other: PreTrainedModel, secret: int, *, turns: int) -> list[int]:
    """Return the tokens of a response, in which both seats are played in turn."""
    tokenizer = chat_tokenizer()

    def encoded(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]  # type: ignore[no-any-return]

    prompt, response = encoded("user: Guess <end> assistant:"), list[int]()
    talk = f"user: Guess {secret} <end> "
    for turn in range(1, turns + 1):
        own = said_by(actor, prompt + response, min(MAX_TURN, GREEDY.max_new_tokens - len(response)))
        response += own
        if turn == turns:
            break
        talk += f"user: {tokenizer.decode([word for word in own if word != END])} <end> "
        words = said_by(other, encoded(talk + "assistant:"), MAX_REPLY)
        reply = tokenizer.decode([word for word in words if word != END])
        talk += f"assistant: {reply} <end> "
        end = "" if own[-1] == END else "<end> "
        answer = encoded(f"{end}user: {reply} <end> assistant:")
        if len(response) + len(answer) >= GREEDY.max_new_tokens:
            break
        response += answer
    return response


@pytest.mark.parametrize(("engine", "is_self"), crossed([GenerationEngine, HFEngine], [True, False]))
def test_a_greedy_talk_is_that_of_both_seats_played_by_hand(engine: Any, is_self: bool) -> None:
    other = None if is_self else chat_model(1)
    completions = Stage(Talking, other=other, engine=engine, max_turns=3).play(GREEDY)
    expected = [
        talk_by_hand(chat_model(), other or chat_model(), index % 6, turns=3) for index in range(len(completions))
    ]
    assert [list(completion.token_ids) for completion in completions] == expected
    assert any(not all(completion.model_mask) for completion in completions)
    assert all(completion.error is None for completion in completions)


def test_replies_depend_on_sample_and_turn_alone() -> None:
    together = Stage(Talking, max_turns=3).play(SAMPLED)
    stage = Stage(Talking, max_turns=3)
    stage.actor, stage.partner = (
        GenerationEngine(chat_model(), tokenizer=chat_tokenizer(), max_slots=slots) for slots in (2, 3)
    )
    stage.actor.partners = {"other": stage.partner}
    assert [c.token_ids for c in stage.play(SAMPLED)] == [c.token_ids for c in together]
    assert len({c.token_ids for c in together}) > 4


class Everywhere(Talking):
    """Asks its partner in ``reset`` and ``get_reward``, too, twice each."""

    async def reset(self, row: Mapping[str, Any]) -> Any:  # type: ignore[override]
        """Begin with words of the partner."""
        super().reset(row)
        partner = self.partners["other"]
        first, second = await asyncio.gather(*(partner.reply(self.talk, max_new_tokens=4) for _ in range(2)))
        assert first != second or not first["content"]  # different random numbers
        return [{"role": "user", "content": first["content"] or "Guess"}]

    async def get_reward(self) -> float:  # type: ignore[override]
        """Reward by words of the partner."""
        reply = await self.partners["other"].reply(self.talk, temperature=0.0, max_new_tokens=2)
        again = await self.partners["other"].reply(self.talk, temperature=0.0, max_new_tokens=2)
        assert reply == again
        return float(len(reply["content"].split()))


def test_partners_answer_before_the_first_turn_and_after_the_last() -> None:
    stage = Stage(Everywhere, max_turns=2)
    completions, talks = stage.finish(stage.play(SAMPLED))
    assert all(talk["failure"] is None for talk in talks), [talk["failure"] for talk in talks]
    begun = [talk["prompt"][0]["content"] for talk in talks]
    assert len(set(begun)) > 2
    tokenizer = chat_tokenizer()
    expected = [tuple(tokenizer(f"user: {words} <end> assistant:")["input_ids"]) for words in begun]
    assert [completion.prompt for completion in completions] == expected


class Forgetful(Talking):
    """Fails once in the second turn, after its partner has replied."""

    failed: ClassVar[set[int]] = set()

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin a talk."""
        self.secret, self.num_turns = row["secret"], 0
        return super().reset(row)

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Fail once."""
        result = await super().step(message)
        self.num_turns += 1
        if self.num_turns == 2 and self.secret not in self.failed:
            self.failed.add(self.secret)
            raise ValueError("the line was cut")
        return result


def test_a_replayed_episode_reads_the_same_replies_without_asking_again() -> None:
    Forgetful.failed.clear()
    plain, stage = Stage(Talking, max_turns=3), Stage(Forgetful, max_turns=3, retries=1)
    asked: list[int] = []
    generate = stage.partner.generate

    def counted(questions: Any, *arguments: Any, **named: Any) -> Any:
        asked.extend(named["sample_ids"])
        return generate(questions, *arguments, **named)

    stage.partner.generate = counted  # type: ignore[method-assign]
    assert [c.token_ids for c in stage.play(SAMPLED)] == [c.token_ids for c in plain.play(SAMPLED)]
    assert Forgetful.failed and len(set(asked)) == len(asked)


def test_a_talk_that_a_budget_cuts_off_goes_on() -> None:
    whole, stage = Stage(Talking, max_turns=3).play(SAMPLED), Stage(Talking, max_turns=3)
    part = stage.play(SAMPLED, token_budget=40)
    assert any(completion.finish_reason == "unfinished" for completion in part)
    resumed = [completion for completion in part if completion.finish_reason == "unfinished"]
    rest = stage.actor.generate(
        [],
        SAMPLED,
        resume=resumed,
        environment=stage.episodes,
        conversation=Conversation(max_turns=4, max_turn_tokens=MAX_TURN),
    )
    found = {c.sample_id: c.token_ids for c in (*part, *rest) if c.finish_reason != "unfinished"}
    assert [found[index] for index in range(COUNT)] == [completion.token_ids for completion in whole]


class Waiting(Talking):
    """Waits a moment of its own besides."""

    own_s: ClassVar[float] = 0.0

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Wait, and ask."""
        await asyncio.sleep(self.own_s)
        return await super().step(message)


@pytest.mark.parametrize(("own_s", "bound"), [(0.0, "deadline_s"), (0.0, "episode_deadline_s"), (0.8, "deadline_s")])
def test_waiting_for_a_partner_counts_in_no_deadline(own_s: float, bound: str) -> None:
    stage = Stage(type("Waiting", (Waiting,), {"own_s": own_s}), max_turns=2, retries=0, **{bound: 0.5})
    generate = stage.partner.generate

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.8)
        return generate(*arguments, **named)

    stage.partner.generate = slow  # type: ignore[method-assign]
    _, talks = stage.finish(stage.play(GREEDY))
    failed = [talk["failure"] for talk in talks if talk["failure"]]
    asked = [talk for talk in talks if talk["seconds"]]
    assert failed if own_s else asked and not failed
    assert all(f"within {bound}=0.5" in failure for failure in failed)
    assert all(seconds < 0.5 for talk in asked for seconds in talk["seconds"])
    assert stage.actor.stats.waited_s < 0.8 * (2 if own_s else 1)


class Wrong(MessageEnvironment):
    """Asks wrongly."""

    how: ClassVar[str] = ""

    async def step(self, message: Mapping[str, Any]) -> StepResult:
        """Ask."""
        messages: Any = [{"role": "user", "content": "higher " * (500 if self.how == "long" else 1)}]
        name = "nobody" if self.how == "name" else "other"
        settings: dict[str, Any] = {"temperature": -1.0} if self.how == "temperature" else {}
        reply = await self.partners[name].reply("Guess" if self.how == "text" else messages, **settings)
        return StepResult([{"role": "user", "content": reply["content"]}])


class Plain(Wrong):
    """Asks in a plain method."""

    def step(self, message: Mapping[str, Any]) -> StepResult:  # type: ignore[override]
        """Ask, in a loop of its own or in none."""
        if self.how == "own loop":
            return asyncio.run(super().step(message))
        reply: Any = self.partners["other"].reply([{"role": "user", "content": "higher"}])
        return StepResult([{"role": "user", "content": reply["content"]}])


class Closing(Talking):
    """Asks when it is closed."""

    async def close(self) -> None:
        """Ask."""
        await self.partners["other"].reply(self.talk)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("close", r"partners\['other'\].reply was called in close\(\), after the episode; ask in reset, step or"),
        ("long", "leaves no room for an answer"),
        ("name", r"asks for partners\['nobody'\]; there are 'other'"),
        ("text", "reply needs messages with 'role' and 'content'; got 'Guess'"),
        ("temperature", r"partners\['other'\].reply: temperature=-1.0"),
        ("plain", "called in a plain method or a loop of its own; define the method or tool with async def"),
        ("own loop", "called in a plain method or a loop of its own"),
    ],
)
def test_questions_that_cannot_be_answered_are_named(how: str, message: str) -> None:
    source = Closing if how == "close" else Plain if how in ("plain", "own loop") else Wrong
    stage = Stage(type("Wrong", (source,), {"how": how}), max_turns=2)
    completions = stage.play(GREEDY)
    with pytest.raises(Exception, match=message):
        settled, _ = stage.finish(completions)
        raise next(ValueError(completion.error) for completion in settled if completion.error)


def test_an_error_of_the_model_ends_the_call_and_leaves_nothing_waiting() -> None:
    stage = Stage(Talking, max_turns=2)

    def broken(*arguments: Any, **named: Any) -> Any:
        raise ArithmeticError("the logits are lost")

    stage.partner.generate = broken  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="the logits are lost"):
        stage.play(GREEDY)
    begin = time.monotonic()
    stage.queue.close()
    stage.episodes.close()
    assert time.monotonic() - begin < 5
