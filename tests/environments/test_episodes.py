"""Episodes against a replay of the same turns by hand."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import pytest
import torch

from lightning_realloc.batch.json_column import json_values
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.data.prompts import EMPTY_PROMPT
from lightning_realloc.environments import MessageEnvironment, StepResult, ToolEnvironment
from lightning_realloc.environments.environment_factory import EnvironmentFactory
from lightning_realloc.environments.episode_options import EpisodeOptions
from lightning_realloc.environments.episodes import Episodes
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.errors import ConfigError, RewardError
from lightning_realloc.generation import Completion, Conversation, GenerationEngine, SamplingParams
from lightning_realloc.generation.core.sample import FinishReason
from lightning_realloc.rewards.functions import RewardFunctions
from tests.environments.guessing import END, WORDS, Guessing, chat_model, chat_tokenizer
from tests.environments.some_tools import Counter

PARAMS = SamplingParams(max_new_tokens=40, seed=3)


def options(source: Any, **bounds: Any) -> EpisodeOptions:
    """Return options for the tokenizer of words."""
    tokenizer = chat_tokenizer()
    factory, parser = EnvironmentFactory(source), TurnParser(tokenizer)
    return EpisodeOptions(factory, tokenizer, frozenset({END}), {}, parser, Conversation(**bounds))


def prompts(count: int) -> Samples:
    """Return prompts with the columns of the data, one for each secret number in turn."""
    ids = chat_tokenizer()(["user: Guess <end> assistant:"] * count)["input_ids"]
    rows = ([{"role": "user", "content": "Guess"}],) * count
    data = {"prompt": rows, "secret": tuple(index % 6 for index in range(count))}
    return Samples(torch.arange(count), {"prompt_ids": Ragged.from_list(ids)}, data)


def generate(episodes: Episodes, samples: Samples, **settings: Any) -> list[Completion]:
    """Return responses of the tiny model."""
    bounds = episodes.options.bounds
    return GenerationEngine(chat_model(), tokenizer=chat_tokenizer()).generate(
        episodes.begin(samples, max_prompt_tokens=127), PARAMS, sample_ids=samples.ids.tolist(), environment=episodes,
        conversation=Conversation(max_turns=bounds.max_turns + 1, deadline_s=bounds.deadline_s), **settings,
    )  # fmt: skip


def test_a_conversation_is_what_a_replay_by_hand_makes_of_the_models_words() -> None:
    samples, episodes = prompts(12), Episodes(options(Guessing, max_turns=4))
    completions, columns = episodes.finish(generate(episodes, samples))
    rewards = columns["environment_rewards"]
    assert isinstance(rewards, torch.Tensor)
    turn_rewards, talks = columns["record/turn_rewards"], columns["record/conversation"]
    assert isinstance(turn_rewards, Ragged) and isinstance(talks, Ragged)
    num_solved = 0
    for row, (completion, talk) in enumerate(zip(completions, json_values(talks), strict=True)):
        game, words = Guessing(), [WORDS[token] for token in completion.token_ids]
        game.reset({"secret": row % 6})
        expected, own, at = [], [], 0
        while at < len(words) and len(own) < 4:
            end = words.index("<end>", at) + 1 if "<end>" in words[at:] else len(words)
            assert all(completion.model_mask[at:end])
            expected.append("assistant")
            if words[end - 1] != "<end>":
                break  # cut off by its length
            result = game.step({"role": "assistant", "content": " ".join(words[at : end - 1])})
            own.append(result.reward)
            num_solved += result.done
            if result.done or len(own) == 4:
                assert end == len(words)
                assert completion.finish_reason == ("environment" if result.done else "max_turns")
                break
            answer = ["user:", result.messages[0]["content"], "<end>", "assistant:"]
            if end == len(words):
                assert completion.finish_reason == "length"
                break
            assert words[end : end + 4] == answer and not any(completion.model_mask[end : end + 4])
            expected.append("user")
            at = end + 4
        assert turn_rewards.to_lists()[row] == pytest.approx(own)
        assert [message["role"] for message in talk["messages"]] == expected
        assert float(rewards[row]) == pytest.approx(sum(own))
    assert num_solved > 0 and len(set(turn_rewards.lengths.tolist())) > 2


def test_a_game_won_in_the_last_turn_is_ended_by_its_environment() -> None:
    episodes = Episodes(options(Guessing, max_turns=1))
    completions, columns = episodes.finish(generate(episodes, prompts(36)))
    rewards = columns["environment_rewards"]
    assert isinstance(rewards, torch.Tensor)
    ended = [completion.finish_reason == "environment" for completion in completions]
    assert ended == [reward > 0 for reward in rewards.tolist()]  # a wrong guess costs 0.1, none gives NaN
    assert 0 < sum(ended) < 36


def test_a_turn_without_calls_is_the_models_own_end_where_there_are_tools_alone() -> None:
    episodes = Episodes(options(ToolEnvironment, max_turns=2))
    completions, _ = episodes.finish(generate(episodes, prompts(8)))
    for completion in completions:
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == END else "length")
    assert sum(completion.finish_reason == "stop" for completion in completions) > 4


class Flaky(Guessing):
    """Raises once per episode, in its second turn."""

    raised: ClassVar[set[int]] = set()

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Fail before the game sees the second turn."""
        if self.num_guesses == 1 and self.secret not in self.raised:
            self.raised.add(self.secret)
            self.num_guesses = 100
            raise ConnectionError("reset by peer")
        return super().step(message)


def test_a_failed_step_is_played_again_by_a_new_environment_in_the_same_state() -> None:
    Flaky.raised.clear()
    outcomes = []
    for source in (Guessing, Flaky):
        episodes = Episodes(options(source, max_turns=4))
        completions, columns = episodes.finish(generate(episodes, prompts(6)))
        rewards = columns["environment_rewards"]
        assert isinstance(rewards, torch.Tensor)
        outcomes.append(([(c.token_ids, c.finish_reason) for c in completions], rewards.nan_to_num(9).tolist()))
    assert Flaky.raised
    assert outcomes[0] == outcomes[1]


def test_unfinished_episodes_go_on_where_they_are_and_in_a_new_environment() -> None:
    whole = Episodes(options(Guessing, max_turns=4))
    expected, columns = whole.finish(generate(whole, prompts(8)))
    for is_lost in (False, True):
        episodes = Episodes(options(Guessing, max_turns=4))
        partial, first = episodes.finish(generate(episodes, prompts(8), token_budget=150))
        unfinished = [c for c in partial if c.finish_reason == "unfinished"]
        assert unfinished and any(not all(c.model_mask) for c in unfinished)
        if is_lost:
            episodes.close()
        rows = prompts(8).by_ids([c.sample_id for c in unfinished])
        episodes.resume(rows, unfinished)
        engine = GenerationEngine(chat_model(), tokenizer=chat_tokenizer())
        rest = engine.generate(
            [], PARAMS, resume=unfinished, environment=episodes, conversation=Conversation(max_turns=5)
        )
        done, last = episodes.finish(rest)
        found = {c.sample_id: c.token_ids for c in (*partial, *done)}
        assert [found[c.sample_id] for c in expected] == [c.token_ids for c in expected]
        both = {c.sample_id: r for cs, made in ((partial, first), (done, last))
                for c, r in zip(cs, _rewards(made), strict=True)}  # fmt: skip
        assert [both[c.sample_id] for c in expected] == pytest.approx(_rewards(columns), nan_ok=True)


def _rewards(columns: Mapping[str, Any]) -> list[float]:
    values: list[float] = columns["environment_rewards"].tolist()
    return values


class Breaking(Guessing):
    """Never answers in the games of one secret number."""

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Fail, or answer."""
        if self.secret == 1:
            raise ConnectionError("reset by peer")
        return super().step(message)


@pytest.mark.parametrize("on_failure", ["drop", "learn"])
def test_reward_functions_read_environments_of_finished_responses_alone(on_failure: str) -> None:
    read: list[tuple[int, bool]] = []

    def guesses_left(environments: list[Guessing | None], secret: list[int], **columns: Any) -> list[float]:
        read.extend((number, game is None) for number, game in zip(secret, environments, strict=True))
        return [0.0 if game is None else 10.0 - game.num_guesses for game in environments]

    episodes = Episodes(options(Breaking, max_turns=4, retries=0, on_failure=on_failure))
    made = generate(episodes, prompts(12))
    made[3:6] = [replace(completion, finish_reason="unfinished", error=None) for completion in made[3:6]]
    completions, columns = episodes.finish(made, RewardFunctions(guesses_left, alone=False))
    known = [c.finish_reason != "unfinished" and (c.error is None or on_failure == "learn") for c in completions]
    rewards = columns["reward_of_environment/guesses_left"]
    assert isinstance(rewards, torch.Tensor) and (~rewards.isnan()).tolist() == known
    assert read == [(row % 6, c.error is not None) for row, c in enumerate(completions) if known[row]]
    assert {c.finish_reason for c in completions} >= {"environment", "unfinished", "failure"}
    episodes.close()


def test_turns_that_nothing_answered_are_part_of_the_conversation() -> None:
    def no_part(text: str) -> Mapping[str, Any]:
        raise ValueError("no whole turn")

    plain = options(Guessing, max_turns=4)
    for used in (plain, replace(plain, parser=TurnParser(plain.tokenizer, no_part))):
        episodes = Episodes(used)
        completions, columns = episodes.finish(generate(episodes, prompts(12)))
        cut_off = 0
        for completion, talk in zip(completions, _talks(columns), strict=True):
            own = [message["content"] for message in talk["messages"] if message["role"] == "assistant"]
            tokens = zip(completion.token_ids, completion.model_mask, strict=True)
            turns = [list(run) for chosen, run in groupby(tokens, key=itemgetter(1)) if chosen]
            words = [[WORDS[token] for token, _ in turn if token not in (END, 0)] for turn in turns]
            assert [content.replace("?", "").split() for content in own] == words
            cut_off += completion.token_ids[-1] != END
        assert cut_off


class RewardedAtTheEnd(Guessing):
    """Rewards a game that is won, and nothing before."""

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """Answer a guess."""
        result = super().step(message)
        return replace(result, reward=1.0 if result.done and self.secret < 3 else None)


def test_what_a_limit_cut_off_has_earned_nothing_so_far() -> None:
    episodes = Episodes(options(RewardedAtTheEnd, max_turns=4))
    completions, columns = episodes.finish(generate(episodes, prompts(12)))
    ended = [completion.finish_reason == "environment" for completion in completions]
    expected = [(1.0 if place % 6 < 3 else math.nan) if won else 0.0 for place, won in enumerate(ended)]
    assert _rewards(columns) == pytest.approx(expected, nan_ok=True)
    assert len(set(map(str, expected))) == 3


class Slow(MessageEnvironment):
    """Resets of all samples at the same time; each waits for the others."""

    gate: ClassVar[threading.Barrier] = threading.Barrier(5)

    def reset(self, row: Mapping[str, Any]) -> None:
        """Wait for four others."""
        self.gate.wait(timeout=10)

    def step(self, message: Mapping[str, Any]) -> StepResult:
        """End the episode."""
        return StepResult(done=True)


def test_resets_run_at_the_same_time() -> None:
    episodes = Episodes(options(Slow, retries=0))
    assert len(episodes.begin(prompts(5))) == 5
    episodes.close()


class Broken(MessageEnvironment):
    """Fails where it is told to."""

    where = ""

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Fail, or return numbers."""
        if self.where == "reset":
            raise OSError("no port is free")
        return [1, 2] if self.where == "prompt" else None

    def step(self, message: Mapping[str, Any]) -> Any:
        """Return no result."""
        return "higher" if self.where == "step" else StepResult(done=True)

    def get_reward(self) -> float:
        """Fail."""
        raise ValueError("the score is lost")


@pytest.mark.parametrize("where", ["reset", "reward"])
def test_failures_end_the_episode_and_are_named(where: str) -> None:
    source = type("Failing", (Broken,), {"where": where})
    episodes = Episodes(options(source, retries=1))
    completions, columns = episodes.finish(generate(episodes, prompts(2)))
    reasons: set[FinishReason] = {completion.finish_reason for completion in completions if completion.error}
    assert reasons == {"failure"}
    expected = {"reset": "no port is free", "reward": "the score is lost"}[where]
    assert all(expected in talk["failure"] for talk, c in zip(_talks(columns), completions, strict=True) if c.error)
    assert all(map(math.isnan, _rewards(columns)))


@pytest.mark.parametrize("reward", ["ten", math.nan])
def test_a_reward_that_is_no_number_ends_the_run(reward: Any) -> None:
    for base in (Guessing, Counter):
        source = type("Judging", (base,), {"get_reward": lambda self: reward})
        episodes = Episodes(options(source))
        with pytest.raises(RewardError, match=rf"Judging\.get_reward\(\) must be a finite number.*got '?{reward}"):
            episodes.finish(generate(episodes, prompts(2)))
        episodes.close()


def of_class(**methods: Any) -> type:
    """Return a class of environments that ends an episode after one turn, with other methods."""
    return type("Made", (Broken,), {"get_reward": lambda game: 1.0, **methods})


def said(text: str) -> list[Mapping[str, Any]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("methods", "failure"),
    [
        ({"reset": lambda game, row: time.sleep(0.9)}, "the environment's reset did not return within deadline_s=0.5"),
        ({"get_reward": lambda game: time.sleep(0.9)}, "get_reward did not return within deadline_s=0.5; bound its"),
        ({"reset": lambda game, row: {}["port"]}, "the environment's reset raised KeyError: 'port'"),
        ({"step": lambda game, said_: {}["card"]}, "environment's step raised KeyError: 'card' in test_episodes.py"),
        ({"step": lambda game, said_: {}["card"]}, ", after turn 1; catch it there and return a StepResult in its pl"),
        ({"step": lambda game, said_: sys.exit(3)}, "the environment's step raised SystemExit: 3"),
        ({"reset": lambda game, row: said("Guess " * 200_000)}, "Made.reset may return 1000000 characters of messages"),
        ({"step": lambda game, said_: StepResult(said("1 " * 600_000))}, "Made.step may return 1000000 characters of "),
        ({"step": lambda game, said_: StepResult(said("1 " * 600_000), done=True)}, "and returned 1200000; return a"),
        ({"step": lambda game, said_: StepResult(reward=math.nan)}, "answer to turn 1: StepResult(reward=...) must be"),
        ({"reset": lambda game, row: said("Guess " * 200)},
         "the prompt of sample 1 with what Made adds by reset and tools has 203 tokens, and a response has room after "
         "at most 127; return less from reset, describe fewer tools, or leave the row out"),
    ],
)  # fmt: skip
def test_a_failure_is_named_in_the_words_of_the_environment(methods: dict[str, Any], failure: str) -> None:
    deadline_s = 0.5 if "deadline_s" in failure else 60.0
    episodes = Episodes(options(of_class(**methods), retries=0, deadline_s=deadline_s))
    completions, columns = episodes.finish(generate(episodes, prompts(2)))
    failures = [talk["failure"] or "" for talk in _talks(columns)]
    assert failure in failures[1]
    assert completions[1].finish_reason == "failure"


def test_a_conversation_that_the_template_cannot_render_fails_its_episode() -> None:
    plain = options(
        of_class(reset=lambda game, row: said("Guess") if row["secret"] else [{"role": "ghost", "content": ""}])
    )
    plain.tokenizer.chat_template = (
        "{% if messages[0].role == 'ghost' %}{{ raise_exception('no ghosts') }}{% endif %}"
        + plain.tokenizer.chat_template
    )
    episodes = Episodes(plain)
    completions, _ = episodes.finish(generate(episodes, prompts(2)))
    assert completions[1].error is None and "cannot be read: " in str(completions[0].error)


def test_an_empty_prompt_needs_tools_or_a_reset_that_writes_one() -> None:
    rows = prompts(2)
    rows = Samples(rows.ids, rows.columns, {**rows.data, "prompt": (EMPTY_PROMPT, EMPTY_PROMPT)})
    with pytest.raises(ConfigError, match=r"Guessing\.reset wrote no prompt, and the row has none; return one there"):
        Episodes(options(Guessing)).begin(rows)
    episodes = Episodes(options(Counter))
    assert len(episodes.begin(rows)) == 2
    episodes.close()


def _talks(columns: Mapping[str, Any]) -> list[Any]:
    return json_values(columns["record/conversation"])


def test_an_environment_that_breaks_its_contract_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="reset must return messages"):
        Episodes(options(type("Numbers", (Broken,), {"where": "prompt"}))).begin(prompts(1))
    episodes = Episodes(options(type("Words", (Broken,), {"where": "step"})))
    completions = generate(episodes, prompts(4))
    with pytest.raises(ConfigError, match="step must return StepResult"):
        episodes.finish(completions)


def test_nothing_is_left_open() -> None:
    opened: list[Any] = []

    class Counted(Flaky):
        """Counts what is closed."""

        def reset(self, row: Mapping[str, Any]) -> Any:
            """Open."""
            opened.append(self)
            return super().reset(row)

        async def close(self) -> None:
            """Close."""
            await asyncio.sleep(0)
            opened.remove(self)

    Flaky.raised.clear()
    episodes = Episodes(options(Counted, max_turns=3))
    episodes.finish(generate(episodes, prompts(5)))
    assert opened == []
    begun = [c for c in generate(episodes, prompts(5), token_budget=20) if c.finish_reason == "unfinished"]
    assert len(opened) > 1
    episodes.resume(prompts(5), begun[:1])  # the others are continued elsewhere, or given up
    assert len(opened) == 1
    episodes.close()
    assert opened == []


def test_environments_that_cannot_be_reset_are_closed_too() -> None:
    opened: list[Any] = []

    class Half(Broken):
        """Opens something, and fails."""

        where = "reset"

        def reset(self, row: Mapping[str, Any]) -> Any:
            """Open, and fail."""
            opened.append(self)
            return super().reset(row)

        def close(self) -> None:
            """Close."""
            opened.remove(self)

    episodes = Episodes(options(Half, retries=1))
    made = generate(episodes, prompts(2))
    assert len(opened) == 4
    episodes.finish(made)
    assert opened == []


def test_a_reset_and_a_close_that_hang_are_given_up_at_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    num_resets = 0

    class Stuck(Guessing):
        """Begins nothing, and never closes."""

        async def reset(self, row: Mapping[str, Any]) -> None:  # type: ignore[override]
            """Count, and wait."""
            nonlocal num_resets
            num_resets += 1
            await asyncio.sleep(3600)

        async def close(self) -> None:
            """Wait."""
            await asyncio.sleep(3600)

    episodes = Episodes(options(Stuck, deadline_s=0.1, retries=1))
    episodes.begin(prompts(1))
    episodes.close()
    assert num_resets == 1, "a new try would have another deadline"
    assert "Stuck: the environment's close did not return within deadline_s=0.1" in caplog.text


class Late(Guessing):
    """Takes a tenth of a second for each answer."""

    async def step(self, message: Mapping[str, Any]) -> StepResult:  # type: ignore[override]
        """Wait, and answer."""
        await asyncio.sleep(0.1)
        return super().step(message)


def test_the_answers_of_an_episode_have_a_deadline_together() -> None:
    episodes = Episodes(options(Late, max_turns=8, episode_deadline_s=0.25))
    completions, columns = episodes.finish(generate(episodes, prompts(6)))
    late = [(c, talk) for c, talk in zip(completions, _talks(columns), strict=True) if c.error]
    assert late and all(c.finish_reason == "failure" and "episode_deadline_s=0.25" in str(c.error) for c, _ in late)
    assert all(len(talk["rewards"]) <= 2 for _, talk in late)  # a third answer would end after 0.3 s
