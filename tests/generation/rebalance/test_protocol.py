"""Samples that move between ranks during generation get the same tokens as on one rank."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation, Turn
from lightning_realloc.generation.loop.sample_access import SampleAccess, foreign_prompt_number, own_prompt_number
from lightning_realloc.generation.rebalance import protocol
from lightning_realloc.generation.rebalance.handover import Arrival, MigrationStats
from lightning_realloc.generation.rebalance.load import LoadReport, MoveCost, RankLoad, SampleMove
from lightning_realloc.generation.rebalance.peers import MovableSamples, Peers
from lightning_realloc.runtime.messages.failure_agreement import FAILURE_DEADLINE_S
from lightning_realloc.runtime.messages.mailbox import FrameKind, Mailbox
from tests.generation.random_moves import at_random, moving
from tests.matrices import matrix
from tests.models import tiny_model
from tests.workers import WorkerPool

PARAMS = SamplingParams(max_new_tokens=48, n=2, seed=5, temperature=1.2)
NUM_PROMPTS = 9
BLOCKS = Speculation(drafter="blocks", draft_blocks=1, num_draft_tokens=2)


def _prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, 120) for _ in range(rng.randrange(1, 14))] for _ in range(NUM_PROMPTS)]


def _limits() -> list[int]:
    """Return token limits with which samples end at different times; one ends after its first token."""
    return [1 + (17 * prompt) % 48 for prompt in range(NUM_PROMPTS)]


def _peers(moves: MovableSamples = "all") -> Peers:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mailbox = Mailbox(rank, world_size, dist.new_group(backend="gloo"))
    return Peers(mailbox, rank, mailbox.others, moves)


def _generate(
    speculation: Speculation | None,
    max_slots: int,
    max_cache_bytes: int | None,
    calls: int,
    moves: MovableSamples = "all",
) -> list[tuple[list[Completion], Any]]:
    """Return the results of this rank's calls while samples move at random every other step."""
    with moving(every=2, plan_balance=at_random):
        return _calls(speculation, max_slots, max_cache_bytes, calls, moves=moves)


def _calls(
    speculation: Speculation | None,
    max_slots: int,
    max_cache_bytes: int | None,
    calls: int,
    moves: MovableSamples = "all",
) -> list[tuple[list[Completion], Any]]:
    peers = _peers(moves)
    # The clock ticks once per call: on a busy machine, slow steps would make rounds rare.
    engine = GenerationEngine(
        tiny_model("llama"), max_slots=max_slots, peers=peers, speculation=speculation, max_prefill_tokens=8,
        max_cache_bytes=max_cache_bytes, clock=map(float, itertools.count()).__next__,
    )  # fmt: skip
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [i for i in range(NUM_PROMPTS) if i % (size + 1) == rank or (rank == 0 and i % (size + 1) == size)]
    ids = [2 * i + k for i in mine for k in range(2)]
    prompts, limits = _prompts(), _limits()
    made = []
    for _ in range(calls):
        completions = engine.generate(
            [prompts[i] for i in mine], PARAMS, sample_ids=ids, token_limits=[limits[i] for i in mine]
        )
        made.append((completions, engine.migration_stats))
    peers.mailbox.release(0)
    return made


@pytest.fixture(scope="module")
def alone() -> dict[int, Completion]:
    made = GenerationEngine(tiny_model("llama")).generate(_prompts(), PARAMS, token_limits=_limits())
    return {completion.sample_id: completion for completion in made}


@pytest.mark.parametrize(
    ("speculation", "max_slots", "max_cache_bytes", "world_size"),
    [
        pytest.param(None, 4, None, 2, marks=pytest.mark.exhaustive),
        pytest.param(None, 16, None, 3, marks=pytest.mark.exhaustive),
        pytest.param(Speculation(drafter="history", num_draft_tokens=3), 5, None, 2, marks=pytest.mark.exhaustive),
        pytest.param(BLOCKS, 8, None, 2, marks=pytest.mark.exhaustive),
        pytest.param(None, 16, 90_000, 2, marks=pytest.mark.exhaustive),
        (BLOCKS, 8, 130_000, 3),
    ],
    ids=["few slots", "three ranks", "look-ups", "draft model", "few pages", "draft model in few pages"],
)
def test_samples_that_move_at_random_get_the_tokens_of_one_rank(
    workers: WorkerPool,
    alone: dict[int, Completion],
    speculation: Speculation | None,
    max_slots: int,
    max_cache_bytes: int | None,
    world_size: int,
) -> None:
    ranks = workers.run(_generate, speculation, max_slots, max_cache_bytes, 2, world_size=world_size)
    for call in range(2):
        completions = [completion for rank in ranks for completion in rank[call][0]]
        assert {c.sample_id: c.token_ids for c in completions} == {i: c.token_ids for i, c in alone.items()}
        assert {c.sample_id: (c.finish_reason, c.prompt) for c in completions} == {
            i: (c.finish_reason, c.prompt) for i, c in alone.items()
        }
        for completion in completions:
            assert completion.logprobs == pytest.approx(alone[completion.sample_id].logprobs, abs=1e-5)
        sent, received = (sum(getattr(rank[call][1], name) for rank in ranks) for name in ("num_sent", "num_received"))
        assert sent == received > 0


TALK = SamplingParams(max_new_tokens=40, n=2, seed=5, stop_token_ids=tuple(range(110, 128)))
"""A seventh of the vocabulary ends a turn. Shorter turns leave less to move."""


def _answer(turn: Turn) -> list[int] | None:
    """Answer after a short delay with tokens that depend on the turn; end the conversation after a few turns."""
    prompts = _prompts()
    indices = (
        turn.prompt_index,
        2 * turn.prompt_index + turn.sample_id // 2 % 2,
    )  # among all prompts, or among one rank's
    assert list(turn.prompt) in [prompts[index] for index in indices if index < NUM_PROMPTS]
    time.sleep(0.002 * (turn.sample_id % 3))
    return None if turn.number + turn.sample_id % 3 > 4 else [5 + turn.number, turn.token_ids[-1] % 80 + 3]


def _talk(max_cache_bytes: int | None) -> list[tuple[list[Completion], MigrationStats]]:
    """Return the results of conversations that move at random, in slots or in few pages.

    There are several calls: the times of answers vary, so that a single call on a busy machine may move nothing.
    """
    calls = []
    with moving(every=1, plan_balance=at_random):
        peers, rank = _peers(), dist.get_rank()
        engine = GenerationEngine(tiny_model("qwen3_moe"), max_slots=6, peers=peers, max_cache_bytes=max_cache_bytes)
        engine.record_experts(True)
        mine = range(rank, NUM_PROMPTS, dist.get_world_size())
        for _ in range(2):
            made = engine.generate(
                [_prompts()[i] for i in mine], TALK, sample_ids=[2 * i + k for i in mine for k in range(2)],
                environment=_answer,
            )  # fmt: skip
            calls.append((made, engine.migration_stats))
    peers.mailbox.release(0)
    return calls


@pytest.mark.parametrize("max_cache_bytes", matrix([None, 60_000]), ids=["slots", "pages"])
def test_conversations_move_between_and_within_turns(workers: WorkerPool, max_cache_bytes: int | None) -> None:
    engine = GenerationEngine(tiny_model("qwen3_moe"))
    engine.record_experts(True)
    alone = engine.generate(_prompts(), TALK, environment=_answer)

    def compared(made: Sequence[Completion]) -> dict[int, object]:
        return {
            c.sample_id: (c.token_ids, c.model_mask, c.finish_reason, None if c.experts is None else c.experts.tolist())
            for c in made
        }

    expected = compared(alone)
    assert any(not all(c.model_mask) for c in alone)
    ranks = workers.run(_talk, max_cache_bytes, world_size=2)
    num_sent = 0
    for call in zip(*ranks, strict=True):
        assert compared([c for made, _ in call for c in made]) == expected
        assert sum(stats.num_sent for _, stats in call) == sum(stats.num_received for _, stats in call)
        num_sent += sum(stats.num_sent for _, stats in call)
    assert num_sent > 0


def _generate_while_shipments_are_late() -> list[tuple[list[Completion], Any]]:
    """Return the results of samples that move at random, and join a rank only once it has no others."""
    with mock.patch.object(Arrival, "is_here", lambda arrival: False):
        return _generate(None, 6, None, 2)


@pytest.mark.exhaustive  # samples that move at random: above
def test_samples_that_arrive_late_get_the_tokens_of_one_rank(workers: WorkerPool, alone: dict[int, Completion]) -> None:
    for call in zip(*workers.run(_generate_while_shipments_are_late, world_size=3), strict=True):
        made = {c.sample_id: c.token_ids for completions, _ in call for c in completions}
        assert made == {i: c.token_ids for i, c in alone.items()}
        assert sum(stats.num_received for _, stats in call) > 0


def test_no_two_prompts_of_a_rank_have_the_same_number() -> None:
    numbers = [
        *range(100), *map(own_prompt_number, range(100)),
        *(foreign_prompt_number(r, n) for r in range(4) for n in range(100)),
    ]  # fmt: skip
    assert len(set(numbers)) == 600


def _generate_queued(max_slots: int) -> list[tuple[list[Completion], Any]]:
    """Return the results of this rank's calls while queued samples move at random."""
    return _generate(None, max_slots, None, 2, "queued")


def test_queued_samples_move_as_tokens_only_and_get_the_tokens_of_one_rank(
    workers: WorkerPool, alone: dict[int, Completion]
) -> None:
    for call in zip(*workers.run(_generate_queued, 3, world_size=2), strict=True):
        made = {c.sample_id: c.token_ids for completions, _ in call for c in completions}
        assert made == {i: c.token_ids for i, c in alone.items()}
        num_sent = sum(stats.num_sent for _, stats in call)
        assert num_sent == sum(stats.num_received for _, stats in call) > 0
        assert sum(stats.bytes_sent for _, stats in call) < 2_000 * num_sent + 20_000


def _exchange(loads: Sequence[RankLoad], cost: MoveCost, *, current_round: int, **_: Any) -> tuple[SampleMove, ...]:
    """Let each of two ranks send its sample to the other in the second round."""
    return tuple(
        SampleMove(sample.sample_id, load.rank, 1 - load.rank, "send")
        for load in loads if current_round == 2 for sample in load.samples
    )  # fmt: skip


def _end_on_the_way() -> tuple[list[int], MigrationStats]:
    """Return the lengths of samples that finish after their keys and values were sent ahead, and the statistics."""
    peers, rank = _peers(), dist.get_rank()
    with moving(every=4, plan_balance=_exchange):
        engine = GenerationEngine(tiny_model("llama"), peers=peers, clock=lambda: 0.0)
        assert engine._rebalancer is not None
        engine._rebalancer.pace.steps.observe(1, 1.0)
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        made = engine.generate([[5 + rank]], params, sample_ids=[rank])
    peers.mailbox.release(0)
    return [len(completion.token_ids) for completion in made], engine.migration_stats


def test_ranks_do_not_wait_for_samples_that_finish_during_their_move(workers: WorkerPool) -> None:
    for lengths, stats in workers.run(_end_on_the_way, world_size=2, deadline_s=15.0):
        assert lengths == [10]
        assert stats.bytes_sent > 2000  # keys and values were sent ahead, and no sample followed them
        assert stats.num_sent == stats.num_received == 0


def _ids_used_twice() -> str:
    peers = _peers()
    engine = GenerationEngine(tiny_model("llama"), peers=peers)
    try:
        engine.generate([[5, 6]], SamplingParams(max_new_tokens=40, ignore_eos=True))
    except GenerationError as error:
        peers.mailbox.release(0)
        return str(error)
    return "nothing"


def test_sample_ids_that_several_ranks_use_are_refused_by_all(workers: WorkerPool) -> None:
    for message in workers.run(_ids_used_twice, world_size=2):
        assert "[0] are on several" in message


def _skewed(peers_move: bool) -> tuple[dict[int, tuple[int, ...]], MigrationStats]:
    """Return the results of this rank; only the first rank has long responses."""
    rank = dist.get_rank()
    peers, model, now = _peers(), tiny_model("llama"), 0.0

    def take_time(_: torch.nn.Module, args: Any, arguments: Mapping[str, Any]) -> None:
        nonlocal now
        now += 1e-3 * arguments["input_ids"].shape[1]

    model.register_forward_pre_hook(take_time, with_kwargs=True)  # a millisecond for every token
    engine = GenerationEngine(model, peers=peers if peers_move else None, max_slots=12, clock=lambda: now)
    limits = [100] * 12 if rank == 0 else [4] * 12
    prompts = [[5 + i, 7] for i in range(12)]
    with moving():
        for _ in range(2):  # step times are known from the second call on
            made = engine.generate(
                prompts, SamplingParams(max_new_tokens=100, ignore_eos=True),
                sample_ids=range(12 * rank, 12 * rank + 12), token_limits=limits, length_hints=limits,
            )  # fmt: skip
    peers.mailbox.release(0)
    return {c.sample_id: c.token_ids for c in made}, engine.migration_stats


def test_a_rank_without_work_receives_samples_from_a_busy_one(workers: WorkerPool) -> None:
    moved, stayed = (workers.run(_skewed, peers_move, world_size=2) for peers_move in (True, False))
    assert [tokens for tokens, _ in moved] == [tokens for tokens, _ in stayed]
    assert moved[0][1].num_sent == moved[1][1].num_received
    assert 3 <= moved[0][1].num_sent <= 9


def _num_rounds(least_period_s: float) -> int:
    """Return the number of rounds in a hundred steps of a millisecond."""
    peers, now = _peers(), 0.0
    model = tiny_model("llama")

    def take_time(*_: Any) -> None:
        nonlocal now
        now += 1e-3

    model.register_forward_pre_hook(take_time)
    engine = GenerationEngine(model, peers=peers, clock=lambda: now)
    with moving(every=8), mock.patch.object(protocol, "MIN_PERIOD_S", least_period_s):
        for _ in range(2):  # step times are known from the second call on
            engine.generate([[5]], SamplingParams(max_new_tokens=100, ignore_eos=True), sample_ids=[dist.get_rank()])
    peers.mailbox.release(0)
    return engine.migration_stats.num_rounds


def test_short_steps_do_not_make_rounds_more_frequent(workers: WorkerPool) -> None:
    often, seldom = (workers.run(_num_rounds, least_period_s, world_size=2)[0] for least_period_s in (0.0, 0.05))
    assert often >= 6
    assert seldom <= often - 3


def _reports_in_calls(lengths: Sequence[int]) -> list[tuple[int, list[int], int]]:
    """Return, for calls with responses of these lengths: rounds, samples in each report, messages to each peer."""
    peers, rank, found = _peers(), dist.get_rank(), []
    engine = GenerationEngine(tiny_model("llama"), peers=peers)
    report, sizes = protocol._Rounds._report, []

    def note(rounds: protocol._Rounds) -> LoadReport:
        made = report(rounds)
        sizes.append(len(made.live))
        return made

    with mock.patch.object(protocol._Rounds, "_report", note):
        for length in lengths:
            params = SamplingParams(max_new_tokens=length, ignore_eos=True)
            before = peers.num_reports
            engine.generate([[5], [6]], params, sample_ids=[2 * rank, 2 * rank + 1])
            found.append((engine.migration_stats.num_rounds, sizes.copy(), peers.num_reports - before))
            sizes.clear()
    peers.mailbox.release(0)
    return found


def test_calls_too_short_for_a_move_have_no_rounds(workers: WorkerPool) -> None:
    for short, longer in workers.run(_reports_in_calls, [13, 30], world_size=2, deadline_s=15.0):
        assert short == (0, [0], 1)
        num_rounds, sizes, num_messages = longer
        assert num_rounds >= 1
        assert sizes[0] == 2
        assert num_messages == len(sizes) + 1  # and a farewell


def received_error(error: Exception, mailbox: Mailbox) -> str:
    """Return this rank's error as the others receive it, or another rank's error as received."""
    if mailbox.has_failed:
        return str(error)
    try:
        mailbox.fail(error)
    except Exception as heard:
        return str(heard)


def _in_short_calls(limits: Sequence[int], fails_in: int | None = None) -> list[tuple[int, tuple[int, ...]]] | str:
    """Return, for short calls with responses of these lengths: messages to each peer and tokens.

    If a call fails on the second rank, return the received error.
    """
    peers, rank, found = _peers(), dist.get_rank(), []
    model = tiny_model("llama")
    engine = GenerationEngine(model, peers=peers)
    with mock.patch.object(protocol, "MIN_PERIOD_S", 100.0):
        try:
            for number, length in enumerate(limits):
                if rank and number == fails_in:
                    with torch.no_grad():
                        next(model.parameters()).fill_(float("nan"))
                before = peers.num_reports
                params = SamplingParams(max_new_tokens=length, ignore_eos=True)
                (made,) = engine.generate([[5]], params, sample_ids=[rank])
                found.append((peers.num_reports - before, made.token_ids))
            if fails_in is not None:
                peers.mailbox.receive(FrameKind.ROWS, 0, 0, 1 - rank)  # as in a later call
            peers.mailbox.release(0)
        except Exception as error:
            return received_error(error, peers.mailbox)
    return found


def test_most_calls_after_a_short_one_send_no_message(workers: WorkerPool) -> None:
    limits = [8] * 12 + [9, 8]
    (ours, theirs), alone = workers.run(_in_short_calls, limits, world_size=2, deadline_s=20.0), tiny_model("llama")
    for rank, made in enumerate((ours, theirs)):
        assert [num_messages for num_messages, _ in made] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0]
        for length, (_, tokens) in zip(limits, made, strict=True):
            params = SamplingParams(max_new_tokens=length, ignore_eos=True)
            assert tokens == GenerationEngine(alone).generate([[5]], params, sample_ids=[rank])[0].token_ids


def test_a_failure_in_a_call_without_messages_reaches_the_others(workers: WorkerPool) -> None:
    for heard in workers.run(_in_short_calls, [8] * 6, 4, world_size=2, deadline_s=20.0):
        assert "not finite" in heard


def _messages_where_samples_move() -> list[tuple[int, int]]:
    """Return, for short calls in which samples move: samples that were sent and messages to each peer."""
    peers, rank, found = _peers(), dist.get_rank(), []
    engine = GenerationEngine(tiny_model("llama"), peers=peers, max_slots=8)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with moving(every=2, plan_balance=at_random), mock.patch.object(protocol, "MIN_PERIOD_S", 100.0):
        for _ in range(3):
            before = peers.num_reports
            engine.generate([[5]] * 4, params, sample_ids=range(4 * rank, 4 * rank + 4))
            found.append((engine.migration_stats.num_sent, peers.num_reports - before))
    peers.mailbox.release(0)
    return found


def test_calls_in_which_samples_move_are_not_short(workers: WorkerPool) -> None:
    ours, theirs = workers.run(_messages_where_samples_move, world_size=2, deadline_s=20.0)
    assert all(num_messages > 1 for _, num_messages in (*ours, *theirs))
    assert sum(sent for sent, _ in (*ours, *theirs)) > 0


def _one_fails() -> str:
    peers = _peers()
    model = tiny_model("llama")
    engine = GenerationEngine(model, peers=peers, max_slots=4)
    rank, params = dist.get_rank(), SamplingParams(max_new_tokens=100, ignore_eos=True)
    ids, limits = range(4 * rank, 4 * rank + 4), [40 + 60 * rank] * 4
    try:
        with mock.patch.object(protocol, "MIN_PERIOD_S", 0.0):  # no call is short
            engine.generate([[5]] * 4, params, sample_ids=ids, token_limits=limits)
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan") if rank else 0.0)
            engine.generate([[5]] * 4, params, sample_ids=ids)
    except Exception as error:
        return received_error(error, peers.mailbox)
    return "nothing"


def _one_cannot_begin() -> str:
    """Return the received error of a rank that requests an impossible call, before any round."""
    peers, rank = _peers(), dist.get_rank()
    engine = GenerationEngine(tiny_model("llama"), peers=peers, max_cache_bytes=90_000)
    prompts = [[5] * (120 if rank else 2)]
    try:
        engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True), sample_ids=[rank])
    except GenerationError as error:
        return received_error(error, peers.mailbox)
    return "nothing"


def test_a_rank_that_cannot_start_does_not_keep_the_others_waiting(workers: WorkerPool) -> None:
    for message in workers.run(_one_cannot_begin, world_size=2, deadline_s=15.0):
        assert "max_cache_bytes=90000 must hold the longest sample of a call" in message


def _leave(loads: Sequence[RankLoad], cost: MoveCost, *, current_round: int, **_: Any) -> tuple[SampleMove, ...]:
    """Move the first rank's sample in the third round to the second rank, which has none left."""
    return tuple(SampleMove(sample.sample_id, 0, 1, "send") for sample in loads[0].samples if current_round == 3)


def _one_fails_while_it_sends(stage: int) -> tuple[str, float]:
    """Return the received error and its delay if the first rank fails to pack a sample."""
    peers, rank = _peers(), dist.get_rank()
    engine = GenerationEngine(tiny_model("llama"), peers=peers, max_slots=4)

    read, num_read = SampleAccess.read_cache, 0

    def fail(*arguments: Any) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        if num_read > stage:
            raise MemoryError("no room to pack")
        return read(*arguments)

    replaced = mock.patch.object(SampleAccess, "read_cache", fail) if rank == 0 else nullcontext()
    params = SamplingParams(max_new_tokens=4 if rank else 100, ignore_eos=True)
    with moving(every=2, plan_balance=_leave), replaced:
        try:
            engine.generate([[5]], params, sample_ids=[rank])
        except Exception as error:
            begin = time.monotonic()
            return received_error(error, peers.mailbox), time.monotonic() - begin
    return "nothing", 0.0


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_that_fails_while_it_sends_does_not_keep_the_others_waiting(workers: WorkerPool, stage: int) -> None:
    for message, seconds in workers.run(_one_fails_while_it_sends, stage, world_size=2, deadline_s=30.0):
        assert "no room to pack" in message
        assert seconds < FAILURE_DEADLINE_S / 2  # otherwise one rank waited for samples, and the other one for a reply


def test_a_failure_of_one_rank_reaches_the_others(workers: WorkerPool) -> None:
    for message in workers.run(_one_fails, world_size=2):
        assert "not finite" in message
