"""An environment that keeps state: GRPO guesses a number from "higher" and "lower", and no game mixes with another."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lightning_realloc import Conversation, GenerationOptions, PromptDataModule, RolloutBudget, SamplingParams, Turn
from tests.models import tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

NUMBERS = 8
"""Tokens 0 to 7 are the numbers. Each ends a turn, so each is a guess."""
HIGHER, LOWER = 8, 9
WORDS = (*map(str, range(NUMBERS)), "higher", "lower", "?")
MOST_GUESSES = 4
MAX_NEW_TOKENS = 10
SAMPLING = SamplingParams(n=4, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=tuple(range(NUMBERS)))


@dataclass
class Game:
    """What the environment knows of one sample."""

    secret: int
    guesses: list[int] = field(default_factory=list)


class GuessingGame:
    """Keeps games by sample id, and replays the response of a turn that does not continue the one it has."""

    made: ClassVar[list[GuessingGame]] = []
    """Environments of this process."""

    def __init__(self, tokenizer: Any) -> None:
        self.games: dict[int, Game] = {}
        self.num_continued = self.num_replayed = 0
        self._lock = threading.Lock()
        self.made.append(self)

    def __call__(self, turn: Turn) -> list[int] | None:
        """Answer a guess; None ends the response at the right one, and at the last that is allowed."""
        *before, guess = guesses_in(turn.token_ids)
        with self._lock:
            game = self.games.get(turn.sample_id)
            if game == Game(turn.columns["secret"], before):
                self.num_continued += 1
            else:
                self.num_replayed += turn.number > 1
                game = self.games[turn.sample_id] = Game(turn.columns["secret"], before)
            game.guesses.append(guess)
            if guess == game.secret or len(game.guesses) == MOST_GUESSES:
                del self.games[turn.sample_id]
                return None
            return [HIGHER if guess < game.secret else LOWER]


def guesses_in(tokens: Sequence[int]) -> list[int]:
    """Return the numbers among the tokens."""
    return [token for token in tokens if token < NUMBERS]


class FewGuesses:
    """Rewards early right guesses, and keeps what it was asked."""

    def __init__(self) -> None:
        self.played: list[tuple[Sequence[int], int]] = []
        """Response and secret number of every sample."""

    def __call__(
        self, completion_ids: Sequence[Sequence[int]], secret: Sequence[int], **columns: object
    ) -> list[float]:
        """Return 1 for the right number at once, less for each guess before it, 0 if it is never said."""
        pairs = list(zip(completion_ids, secret, strict=True))
        self.played += pairs
        tried = [(guesses_in(tokens), number) for tokens, number in pairs]
        return [1 - said.index(number) / MOST_GUESSES if number in said else 0.0 for said, number in tried]


class Forget(Callback):
    """Takes all games away after every iteration, as a resumed run does."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Drop the games."""
        GuessingGame.made[-1].games.clear()


@dataclass
class Played:
    """What a run on one rank saw."""

    samples: list[tuple[Sequence[int], int]]
    logged: list[dict[str, float]]
    num_continued: int
    num_replayed: int


def play(num_iterations: int, settings: dict[str, Any]) -> Played:
    """Train, with evaluations of samples that have the ids of trained ones; with a budget, games are forgotten."""
    GuessingGame.made.clear()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, "?")), pad_token="?"
    )
    reward, record = FewGuesses(), runs.Record()
    module = runs.grpo(
        actor=tiny_model("llama", vocab_size=len(WORDS), pad_token_id=None, bos_token_id=None, eos_token_id=None),
        reward=reward, tokenizer=tokenizer, environment=GuessingGame, conversation=Conversation(max_turns=10),
        sampling=SAMPLING, evaluation_sampling=SAMPLING, kl_coef=0.0, learning_rate=3e-3, **settings,
    )  # fmt: skip
    rows = [{"prompt": "?", "secret": index % NUMBERS} for index in range(NUMBERS * num_iterations)]
    callbacks = [record, Forget()] if settings else [record]
    trainer = runs.trainer("realloc-static", 1, callbacks=callbacks, val_check_interval=1)
    trainer.fit(module, PromptDataModule(rows, val_data=rows[:NUMBERS], batch_size=NUMBERS, shuffle=False))
    (game,) = GuessingGame.made
    return Played(reward.played, record.logged, game.num_continued, game.num_replayed)


@pytest.mark.parametrize("settings", [{}, {"generation": GenerationOptions(rollout_budget=RolloutBudget(tokens=60))}])
def test_every_answer_follows_from_the_samples_own_game(workers: WorkerPool, settings: dict[str, Any]) -> None:
    (played,) = workers.run(play, 4, settings, world_size=1, init_process_group=False)
    for tokens, secret in played.samples:
        *wrong, last = guesses_in(tokens) or [-1]
        assert secret not in wrong and len(wrong) < MOST_GUESSES
        if tokens[-1] == last and len(tokens) < MAX_NEW_TOKENS - 1:  # an answer would have had room
            assert last == secret or len(wrong) + 1 == MOST_GUESSES
        for token, answer in pairwise(tokens):
            assert token >= NUMBERS or answer == (HIGHER if token < secret else LOWER)
    assert all(step["stopped/failure"] == 0.0 for step in played.logged)
    assert any(step["stopped/environment"] > 0.0 for step in played.logged)
    assert played.num_continued > 0
    assert (played.num_replayed > 0) == bool(settings)
    if settings:
        assert max(step["carried_samples"] for step in played.logged) > 0
