"""Which samples move between data-parallel generation ranks, so that the stage ends sooner.

Every rank evaluates these functions on the same published loads and gets the same moves: no clock is read, no rank is
asked for, ties go to the lowest id. Carrying moves out is left to the migration.

Two ideas, and a choice between them: *balance* gives samples of the rank that would end last to one that would end
early (Wang et al., arXiv:2512.04752, describe the aim; the rule is ours), *consolidate* gathers the tail on few ranks
and frees the others for other work (Zhong et al., arXiv:2409.13221).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from typing import Literal

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.rebalance.load import (
    Handover,
    LiveSample,
    MoveCost,
    RankLoad,
    SampleMove,
    drain_seconds,
)

_PAYBACK = 3
"""A running sample moves only if the ranks' ends lie this many times its cost apart: predicted lengths are guesses."""

_MIN_GAIN = 0.02
"""An exchange has to bring the later end forward by this share: less is not told from guesses, and as often a loss."""


Action = Literal["none", "balance", "consolidate"]


@dataclass(frozen=True, slots=True)
class Consolidation:
    """Which ranks go on generating, and the moves that empty the others."""

    kept: tuple[int, ...]
    moves: tuple[SampleMove, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do about the loads of this moment."""

    action: Action
    moves: tuple[SampleMove, ...]
    freed: tuple[int, ...]
    """Ranks that are done with generation once ``moves`` are carried out, and have other work."""
    stage_s: float
    """Predicted, from now."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """A rank's load and what lies ahead of it."""

    load: RankLoad
    busy_s: float
    """Spent on moves."""
    finish_s: float
    """When the rank has nothing left, moves included."""


def makespan_seconds(loads: Sequence[RankLoad], cost: MoveCost, moves: Iterable[SampleMove] = ()) -> float:
    """Return when the last rank ends, from now, if ``moves`` are carried out.

    A running sample that moves holds up both ranks for the stall and the target for the whole transfer: that is on
    the safe side, since a send may go on while the target decodes.
    """
    return _makespan(_after(_outlooks(loads), tuple(moves), cost))


def plan_balance(
    loads: Sequence[RankLoad],
    cost: MoveCost,
    *,
    hysteresis: float = 0.15,
    least_gap_s: float = 0.0,
    rest_steps: int = 64,
    step: int,
) -> tuple[SampleMove, ...]:
    """Return moves that lower the predicted makespan, none if there are none; ``step`` is the current one.

    Time and again the rank that ends last gives to the one that ends first: waiting samples, which cost nothing, or
    else running ones, those with most work per byte of keys and values, as few as make both end together. It gives
    only if that brings the later end forward by ``least_gap_s`` seconds, if the two ends lie further apart than
    ``hysteresis`` times the later and three times the cost, and if its own steps get shorter or its queue does: below
    the knee of the curve fewer rows gain nothing.

    A sample that moved less than ``rest_steps`` steps ago stays where it is, and none moves twice. In the order given
    there is always a slot for the next.
    """
    outlooks = _outlooks(loads)
    resting = {
        sample.sample_id
        for load in loads
        for sample in load.live
        if sample.last_moved_step is not None and step - sample.last_moved_step < rest_steps
    }
    moves: list[SampleMove] = []
    lowest, num_useful = _makespan(outlooks), 0
    while exchange := _next_exchange(outlooks, cost, hysteresis, least_gap_s, resting):
        moves += exchange
        resting |= {move.sample_id for move in exchange}
        outlooks = _after(outlooks, exchange, cost)
        # Of two ranks that end last together the first to be relieved gains nothing before the second is, too.
        if _makespan(outlooks) < lowest:
            lowest, num_useful = _makespan(outlooks), len(moves)
    return tuple(moves[:num_useful])


def plan_consolidation(loads: Sequence[RankLoad], cost: MoveCost, *, kv_slots_per_rank: int) -> Consolidation:
    """Gather all samples on as few ranks as keep steps below the knee of the curve and fit their slots.

    Ranks with most remaining work are kept. The others' samples, longest first, go to the kept rank with fewest.
    Samples that moved a moment ago move again: their rank is given away.
    """
    outlooks = _outlooks(loads)
    fewest = min(load.num_slots for load in loads)
    if not 0 < kv_slots_per_rank <= fewest:
        raise GenerationError(
            f"kv_slots_per_rank={kv_slots_per_rank} must lie between 1 and the slots of every rank; "
            f"one has {fewest}, pass at most that"
        )
    num_live = sum(len(load.live) for load in loads)
    knee = min(load.curve.knee_rows() for load in loads)
    num_kept = min(max(ceil(num_live / knee), ceil(num_live / kv_slots_per_rank), 1), len(loads))
    by_work = sorted(outlooks, key=lambda rank: -outlooks[rank].load.remaining_tokens)  # ties: the lowest rank first
    kept, emptied = sorted(by_work[:num_kept]), sorted(by_work[num_kept:])

    rows = {rank: len(outlooks[rank].load.live) for rank in kept}
    work = {rank: outlooks[rank].load.remaining_tokens for rank in kept}
    leaving = [(rank, sample) for rank in emptied for sample in outlooks[rank].load.live]
    moves = []
    for source, sample in sorted(leaving, key=lambda pair: (-pair[1].remaining_tokens, pair[1].sample_id)):
        target = min(kept, key=lambda rank: (rows[rank], work[rank], rank))
        assert rows[target] < kv_slots_per_rank, f"no slot for sample {sample.sample_id} on ranks {kept}"
        moves.append(_move(outlooks[source].load, sample, target, cost))
        rows[target] += 1
        work[target] += sample.remaining_tokens
    return Consolidation(tuple(kept), tuple(moves))


def choose(
    loads: Sequence[RankLoad],
    cost: MoveCost,
    *,
    step: int,
    hysteresis: float = 0.15,
    least_gap_s: float = 0.0,
    rest_steps: int = 64,
) -> Choice:
    """Return the action with the shortest predicted stage: generation, and other calls that wait for ranks.

    The model: rank r has ``waiting_call_s`` w_r of other calls, and works on them from its end f_r until generation as
    a whole ends, after G seconds; the W ranks share out what is left. So the stage takes
    ``G + (Σ w_r − Σ min(w_r, G − f_r)) / W``. A rank that is left without samples and has such calls is freed for good.

    Equal stages: the action that does less. Samples are gathered only where that gains more than guesses are good for,
    and none of those that leave may be about to move already. Without waiting calls this is `plan_balance`.
    """
    unchanged = _outlooks(loads)
    waits = any(load.waiting_call_s > 0 for load in loads)
    balance = plan_balance(
        loads, cost, hysteresis=hysteresis, least_gap_s=least_gap_s, rest_steps=rest_steps, step=step
    )

    def judge(action: Action, moves: tuple[SampleMove, ...]) -> Choice:
        outlooks = _after(unchanged, moves, cost)
        freed = tuple(rank for rank, o in outlooks.items() if o.load.waiting_call_s > 0 and not o.load.live)
        return Choice(action, moves, freed, _stage_seconds(outlooks))

    best = min(judge("none", ()), judge("balance", balance), key=lambda choice: choice.stage_s)
    gathered = _gathered(loads, cost, step) if waits else ()
    if gathered and (choice := judge("consolidate", gathered)).stage_s < (1 - _MIN_GAIN) * best.stage_s:
        return choice
    return best


def _stage_seconds(outlooks: Mapping[int, _Outlook]) -> float:
    """Return when generation and the calls that wait are over; see `choose`."""
    generation_s = _makespan(outlooks)
    left_s = sum(max(0.0, o.load.waiting_call_s - (generation_s - o.finish_s)) for o in outlooks.values())
    return generation_s + left_s / len(outlooks)


def _gathered(loads: Sequence[RankLoad], cost: MoveCost, step: int) -> tuple[SampleMove, ...]:
    """Return the moves that gather all samples on few ranks; none where that cannot be, or not yet."""
    slots = min(load.num_slots for load in loads)
    if not slots:  # a rank that is to generate no more
        return ()
    moves = plan_consolidation(loads, cost, kv_slots_per_rank=slots).moves
    leaving = {move.sample_id for move in moves}
    moved = {s.sample_id: s.last_moved_step for load in loads for s in load.live if s.sample_id in leaving}
    # Told as moved in this round or the one before: perhaps on its way, or held where it is.
    return moves if all(then is None or step - then > 1 for then in moved.values()) else ()


def _outlooks(loads: Sequence[RankLoad]) -> dict[int, _Outlook]:
    """Return every rank's outlook, ranks ascending."""
    outlooks = {load.rank: _outlook(load, 0.0) for load in sorted(loads, key=lambda load: load.rank)}
    samples = [sample.sample_id for load in loads for sample in load.live]
    if not loads or len(outlooks) < len(loads) or len(set(samples)) < len(samples):
        raise GenerationError(
            "every rank publishes one load and every sample is on one rank, "
            f"got ranks {[load.rank for load in loads]} and samples {sorted(samples)}; pass each once"
        )
    return outlooks


def _outlook(load: RankLoad, busy_s: float) -> _Outlook:
    return _Outlook(load, busy_s, busy_s + drain_seconds(load))


def _makespan(outlooks: Mapping[int, _Outlook]) -> float:
    return max(outlook.finish_s for outlook in outlooks.values())


def _after(outlooks: Mapping[int, _Outlook], moves: Sequence[SampleMove], cost: MoveCost) -> dict[int, _Outlook]:
    """Return the outlooks once ``moves`` are carried out. A waiting sample joins the end of its new rank's queue."""
    loads = [outlooks[source].load for source in {move.source for move in moves}]
    samples = {sample.sample_id: sample for load in loads for sample in load.live}
    running = {sample.sample_id for load in loads for sample in load.samples}
    leaving = {move.sample_id for move in moves}
    taken_over: defaultdict[int, list[LiveSample]] = defaultdict(list)
    queued: defaultdict[int, list[LiveSample]] = defaultdict(list)
    busy_s: defaultdict[int, float] = defaultdict(float)
    for move in moves:
        sample = samples[move.sample_id]
        if move.sample_id not in running:
            queued[move.target].append(sample)
            continue
        taken_over[move.target].append(sample)
        busy_s[move.source] += cost.stall_s
        busy_s[move.target] += cost.stall_s + cost.handover(sample)[1]
    after = dict(outlooks)
    for rank in {rank for move in moves for rank in (move.source, move.target)}:
        load = outlooks[rank].load
        stay = [sample for sample in load.samples if sample.sample_id not in leaving]
        wait = [sample for sample in load.waiting if sample.sample_id not in leaving]
        after[rank] = _outlook(
            replace(
                load,
                samples=(*stay, *taken_over[rank]),
                waiting=(*wait, *queued[rank]),
                free_slots=load.num_slots - len(stay) - len(taken_over[rank]),
            ),
            outlooks[rank].busy_s + busy_s[rank],
        )
    return after


def _next_exchange(
    outlooks: Mapping[int, _Outlook], cost: MoveCost, hysteresis: float, least_gap_s: float, resting: set[int]
) -> tuple[SampleMove, ...]:
    """Return moves from the rank that ends last to the earliest other one that relieves it, none if no rank does.

    Outlooks are in the order of ranks, so of equal ends the lowest rank's is taken.
    """
    donor = max(outlooks.values(), key=lambda outlook: outlook.finish_s)
    for receiver in sorted(outlooks.values(), key=lambda outlook: outlook.finish_s):
        gap_s = donor.finish_s - receiver.finish_s
        if gap_s <= max(hysteresis * donor.finish_s, least_gap_s):
            break
        if not receiver.load.num_slots:  # a rank that is to generate no more
            continue
        queued = [sample for sample in donor.load.waiting if sample.sample_id not in resting]
        running = [sample for sample in donor.load.samples if sample.sample_id not in resting]
        room = max(receiver.load.free_slots - len(receiver.load.waiting), 0)
        for samples in (_longest_first(queued), _worth_their_cost(running, cost, gap_s)[:room]):
            moves = tuple(_move(donor.load, sample, receiver.load.rank, cost) for sample in samples)
            if exchange := _as_many_as_help(donor, receiver, moves, cost, least_gap_s):
                return exchange
    return ()


def _longest_first(samples: Iterable[LiveSample]) -> list[LiveSample]:
    return sorted(samples, key=lambda sample: (-sample.remaining_tokens, sample.sample_id))


def _worth_their_cost(samples: Iterable[LiveSample], cost: MoveCost, gap_s: float) -> list[LiveSample]:
    """Return those with most work per byte first, and no more than the gap between the ranks' ends pays for."""
    by_work = sorted(samples, key=lambda s: (-s.remaining_tokens / max(s.context_tokens, 1), s.sample_id))
    costs_s = accumulate(cost.stall_s + cost.handover(sample)[1] for sample in by_work)
    return [sample for sample, cost_s in zip(by_work, costs_s, strict=True) if _PAYBACK * cost_s < gap_s]


def _as_many_as_help(
    donor: _Outlook, receiver: _Outlook, moves: Sequence[SampleMove], cost: MoveCost, least_gain_s: float
) -> tuple[SampleMove, ...]:
    """Return the first of ``moves``, as few as make both ranks end together; none if that relieves nobody."""
    latest_s = donor.finish_s - max(_MIN_GAIN * donor.finish_s, least_gain_s)
    pair = {outlook.load.rank: outlook for outlook in (donor, receiver)}

    def after(count: int) -> tuple[_Outlook, _Outlook]:
        outlooks = _after(pair, moves[:count], cost)
        return outlooks[donor.load.rank], outlooks[receiver.load.rank]

    def receiver_ends_last(count: int) -> bool:
        gives, takes = after(count)
        return gives.finish_s <= takes.finish_s

    # The donor's end falls with every move and the receiver's rises: the best count is where they cross or one before.
    crossing = 1 + bisect_left(range(1, len(moves) + 1), True, key=receiver_ends_last)
    counts = [count for count in (crossing - 1, crossing) if 1 <= count <= len(moves)]
    for count in sorted(counts, key=lambda count: max(outlook.finish_s for outlook in after(count))):
        gives, takes = after(count)
        gains = max(gives.finish_s, takes.finish_s) < latest_s
        if gains and _is_relieved(donor.load, gives.load):
            return tuple(moves[:count])
    return ()


def _is_relieved(before: RankLoad, after: RankLoad) -> bool:
    """Return whether a rank's next step is shorter or fewer samples wait for a slot."""
    fewer_wait = len(after.live) - after.rows < len(before.live) - before.rows
    return fewer_wait or after.curve.seconds(after.rows) < before.curve.seconds(before.rows)


def _move(source: RankLoad, sample: LiveSample, target: int, cost: MoveCost) -> SampleMove:
    how: Handover = "recompute" if sample in source.waiting else cost.handover(sample)[0]
    return SampleMove(sample.sample_id, source.rank, target, how)
