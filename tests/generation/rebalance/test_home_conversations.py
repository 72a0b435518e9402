"""Conversations whose environment keeps state on one rank equal those of one rank alone, in any layout."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.generation import Completion, Conversation, GenerationEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.rebalance.handover import MigrationStats
from lightning_realloc.generation.rebalance.load import MoveCost, RankLoad, SampleMove
from lightning_realloc.generation.rebalance.peers import Peers
from lightning_realloc.layout import Layout, ModelLayout
from lightning_realloc.runtime.messages.failure_agreement import FAILURE_DEADLINE_S
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.model_spec import describe_model
from lightning_realloc.runtime.parallel.parallelize import parallelize
from tests.generation.random_moves import at_random, moving
from tests.generation.rebalance.test_protocol import received_error
from tests.matrices import matrix
from tests.models import tiny_model
from tests.workers import WorkerPool

PROMPTS = [[5 + 3 * i, 9, 40 + i] for i in range(8)]
GREEDY = SamplingParams(max_new_tokens=60, temperature=0, stop_token_ids=tuple(range(40, 80)))
ENDLESS = Conversation(max_turns=100)
DRAFTS = Speculation(drafter="history", num_draft_tokens=2)


class Diary:
    """An environment with state by sample: it answers with what it was told before, which only one rank knows."""

    def __init__(self) -> None:
        self.told: dict[int, list[int]] = {}
        """Sample id -> last token of each turn, in the order of the questions."""

    def __call__(self, turn: Turn) -> list[int] | None:
        told = self.told.setdefault(turn.sample_id, [])
        told.append(turn.token_ids[-1])
        return None if turn.number > 6 else [sum(told) % 128, 3 + turn.number]


class CountingMailbox(Mailbox):
    """Counts the questions that this rank sent."""

    num_questions = 0

    def send(self, to: Any, kind: FrameKind, *arguments: Any, **named: Any) -> None:
        self.num_questions += kind == FrameKind.QUESTION
        super().send(to, kind, *arguments, **named)


@dataclass
class Talk:
    """Conversations of one rank."""

    made: list[list[Completion]]
    """Completions by call."""
    told: list[dict[int, list[int]]]
    """What the rank's environment was told in each call."""
    moved: list[MigrationStats | None]
    num_questions: int
    """Questions to other ranks."""


def _alone() -> tuple[list[tuple[int, ...]], dict[int, list[int]]]:
    """Return the tokens of one rank, and what its environment was told."""
    diary = Diary()
    made = GenerationEngine(tiny_model("llama").double()).generate(
        PROMPTS, GREEDY, environment=diary, conversation=ENDLESS
    )
    return [completion.token_ids for completion in made], diary.told


def _engine(model: Any, mailbox: Mailbox, others: tuple[int, ...], **settings: Any) -> GenerationEngine:
    """Return an engine whose samples may move.

    Its clock ticks once per call: on a busy machine, slow steps would make rounds rare.
    """
    clock = map(float, itertools.count()).__next__
    peers = Peers(mailbox, dist.get_rank(), others, "all")
    return GenerationEngine(model, max_slots=8, peers=peers, clock=clock, **settings)


def _talk(text: str, settings: dict[str, Any]) -> Talk:
    """Return this rank's conversations in a layout; samples move at random between data-parallel ranks."""
    layout, rank = Layout.parse(text, world_size=dist.get_world_size()), dist.get_rank()
    meshes = MeshRegistry("cpu")
    meshes.create([layout])
    model = tiny_model("llama").double()
    if layout.dims.tp > 1:
        model = parallelize(model, ModelLayout(describe_model(model), layout), meshes)
    mailbox = CountingMailbox(rank, dist.get_world_size(), dist.new_group(backend="gloo"))
    others = tuple(other for other in layout.batch_group(rank) if other != rank)
    engine = _engine(model, mailbox, others, agree=_agreement(meshes, layout), **settings)
    index, size = layout.data_parallel_index(rank), layout.data_parallel_size
    mine = range(index, len(PROMPTS), size)
    talk = Talk([], [], [], 0)
    with moving(every=1, plan_balance=at_random):
        for _ in range(2):
            diary = Diary()
            talk.made.append(
                engine.generate(
                    [PROMPTS[i] for i in mine], GREEDY, sample_ids=mine, environment=diary, conversation=ENDLESS
                )
            )
            talk.told.append(diary.told)
            talk.moved.append(engine.migration_stats)
    mailbox.release(0)
    talk.num_questions = mailbox.num_questions
    return talk


def _agreement(meshes: MeshRegistry, layout: Layout) -> Callable[[Sequence[float]], Sequence[float]] | None:
    group = meshes.group(layout, "tp") if layout.dims.tp > 1 else None

    def first_ones(numbers: Sequence[float]) -> list[float]:
        agreed = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(agreed, group=group, group_src=0)
        return list(agreed.tolist())

    return None if group is None else first_ones


@pytest.mark.parametrize(
    ("layout", "settings"),
    matrix(
        [
            (layout, settings)
            for layout in ("tp2", "dp2", "dp2.tp2")
            for settings in ({}, {"speculation": DRAFTS, "max_cache_bytes": 120_000})
        ],
        ("dp2.tp2", {"speculation": DRAFTS, "max_cache_bytes": 120_000}),
    ),
)
def test_the_environment_is_asked_once_per_turn_on_the_rank_where_the_sample_began(
    workers: WorkerPool, layout: str, settings: dict[str, Any]
) -> None:
    tokens, told = _alone()
    assert sum(len(turns) > 2 for turns in told.values()) > 4
    ranks = workers.run(_talk, layout, settings, world_size=4 if "." in layout else 2)
    firsts, rest = (ranks[::2], ranks[1::2]) if "tp" in layout else (ranks, [])
    for call in range(2):
        assert all(one.made == other.made for one, other in zip(firsts, rest, strict=False))
        made = {c.sample_id: c.token_ids for rank in firsts for c in rank.made[call]}
        assert [made[index] for index in range(len(PROMPTS))] == tokens
        for index, rank in enumerate(firsts):
            assert rank.told[call] == {i: turns for i, turns in told.items() if i % len(firsts) == index}
        assert all(rank.told[call] == {} for rank in rest)
    moved = [stats.num_sent for rank in firsts for stats in rank.moved if stats is not None]
    assert (sum(moved) > 0) == (sum(rank.num_questions for rank in firsts) > 0) == ("dp" in layout)
    assert all(rank.num_questions == 0 for rank in rest)


# ---- a rank whose samples are all elsewhere
LONG = SamplingParams(max_new_tokens=100, stop_token_ids=tuple(range(100, 128)))
FAILS_AFTER = 60
"""Tokens of a response after which environments fail. Its sample has moved by then."""


def _leave(loads: Sequence[RankLoad], cost: MoveCost, *, current_round: int, **_: Any) -> tuple[SampleMove, ...]:
    """Move the first rank's sample to the second rank from the third round on, as soon as it can leave."""
    return tuple(
        SampleMove(sample.sample_id, 0, 1, "send")
        for sample in loads[0].live
        if current_round > 2 and current_round - (sample.last_moved_round or 0) > 1
    )


def _answer(turn: Turn) -> list[int] | None:
    """Answer in two tokens that stop no turn."""
    return [3, 4 + turn.number % 30]


def _raise(turn: Turn) -> list[int] | None:
    if len(turn.token_ids) > FAILS_AFTER:
        raise ValueError(f"no more on rank {dist.get_rank()}")
    return _answer(turn)


class Hang:
    """An environment that does not answer after some tokens, until the calls are over."""

    is_over = threading.Event()

    def __call__(self, turn: Turn) -> list[int] | None:
        if len(turn.token_ids) > FAILS_AFTER:
            self.is_over.wait(20)
        return _answer(turn)


def _left(behaviours: Sequence[tuple[Any, float]]) -> list[tuple[Completion, int]]:
    """Return this rank's sample for each environment and deadline, and the samples that came here."""
    rank = dist.get_rank()
    mailbox = Mailbox(rank, 2, dist.new_group(backend="gloo"))
    engine = _engine(tiny_model("llama").double(), mailbox, mailbox.others)
    found = []
    Hang.is_over.clear()
    for environment, deadline_s in behaviours:
        with moving(every=2, plan_balance=_leave):
            (made,) = engine.generate(
                [[5 + rank]], LONG, sample_ids=[rank], token_limits=[100 if rank == 0 else 1],
                environment=environment if rank == 0 else _refuse,
                conversation=Conversation(max_turns=100, deadline_s=deadline_s),
            )  # fmt: skip
        assert engine.migration_stats is not None
        found.append((made, engine.migration_stats.num_received))
    Hang.is_over.set()
    mailbox.release(0)
    return found


def _refuse(turn: Turn) -> None:
    raise AssertionError(f"sample {turn.sample_id} is asked about away from home")


def test_a_rank_without_samples_keeps_answering_with_its_own_failures_and_deadlines(workers: WorkerPool) -> None:
    behaviours = [(_answer, 60.0), (_raise, 60.0), (Hang(), 0.3)]
    ours, theirs = workers.run(_left, behaviours, world_size=2, deadline_s=40.0)
    assert [count for _, count in theirs] == [1, 1, 1]
    (answered, _), (failed, _), (late, _) = ours
    (alone,) = GenerationEngine(tiny_model("llama").double()).generate(
        [[5]], LONG, environment=_answer, conversation=ENDLESS
    )
    assert (answered.token_ids, answered.finish_reason) == (alone.token_ids, alone.finish_reason)
    assert failed.finish_reason == late.finish_reason == "failure"
    assert "the environment raised ValueError(no more on rank 0) after turn" in str(failed.error)
    assert "within deadline_s=0.3" in str(late.error)
    assert failed.token_ids == late.token_ids == alone.token_ids[: len(late.token_ids)]
    assert FAILS_AFTER < len(late.token_ids) < 100


def _left_to_a_rank_that_fails() -> tuple[str, float]:
    """Return the received error, and the seconds that agreeing on it took, if the rank with the only sample fails."""
    rank, model = dist.get_rank(), tiny_model("llama").double()
    mailbox = CountingMailbox(rank, 2, dist.new_group(backend="gloo"))

    def fail_after_questions(*_: Any) -> None:
        if mailbox.num_questions > 2:
            raise MemoryError("no room for a step")

    model.register_forward_pre_hook(fail_after_questions)
    engine = _engine(model, mailbox, mailbox.others)
    with moving(every=2, plan_balance=_leave):
        try:
            engine.generate(
                [[5 + rank]], LONG, sample_ids=[rank], token_limits=[100 if rank == 0 else 1], environment=_answer,
                conversation=ENDLESS,
            )  # fmt: skip
        except Exception as error:
            begin = time.monotonic()
            return received_error(error, mailbox), time.monotonic() - begin
    return "nothing", 0.0


def test_a_rank_that_only_answers_receives_the_failure_of_the_one_that_asks(workers: WorkerPool) -> None:
    for message, seconds in workers.run(_left_to_a_rank_that_fails, world_size=2, deadline_s=40.0):
        assert "no room for a step" in message
        assert seconds < FAILURE_DEADLINE_S / 2  # otherwise one rank waited for the other's reply


# ---- budgets
def _stop_often(budgets: Sequence[int]) -> list[tuple[int, ...]]:
    """Return this rank's responses, each made in two calls: the first one ends while samples move and wait."""
    rank = dist.get_rank()
    mailbox = Mailbox(rank, 2, dist.new_group(backend="gloo"))
    engine = _engine(tiny_model("llama").double(), mailbox, mailbox.others)
    mine, found = range(rank, len(PROMPTS), 2), []
    for budget in budgets:
        settings: dict[str, Any] = {"environment": _answer, "conversation": ENDLESS}
        with moving(every=1, plan_balance=at_random):
            begun = engine.generate(
                [PROMPTS[i] for i in mine], GREEDY, sample_ids=mine, token_budget=budget, **settings
            )
            going_on = [completion for completion in begun if completion.finish_reason == "unfinished"]
            ended = [completion for completion in begun if completion.finish_reason != "unfinished"]
            ended += engine.generate([], GREEDY, resume=going_on, **settings)
        found += [completion.token_ids for completion in sorted(ended, key=lambda each: each.sample_id)]
    mailbox.release(0)
    return found


@pytest.mark.exhaustive  # on one rank: tests/generation/test_partial.py
def test_questions_that_a_budget_cut_off_are_asked_again_at_home(workers: WorkerPool) -> None:
    alone = GenerationEngine(tiny_model("llama").double()).generate(
        PROMPTS, GREEDY, environment=_answer, conversation=ENDLESS
    )
    budgets = [7, 33, 80]
    for rank, made in enumerate(workers.run(_stop_often, budgets, world_size=2, deadline_s=40.0)):
        assert made == [completion.token_ids for completion in alone[rank::2]] * len(budgets)
