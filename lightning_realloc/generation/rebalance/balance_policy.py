"""Plan which samples move between data-parallel generation ranks, so that all of them finish together.

The last rank to finish gives samples to the first one (the aim is described by Wang et al., arXiv:2512.04752; the rule
is ours). Pure: every rank evaluates the same function on the same loads and gets the same moves. Ties go to the lowest
id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.rebalance.load import (
    Handover,
    LiveSample,
    MoveCost,
    RankLoad,
    SampleMove,
    drain_seconds,
)

MIN_PAYBACK = 3
"""Gap between two ranks' finishes, in multiples of the cost of a running sample's move, above which it moves. Raise it
where predicted lengths are poor."""
MIN_GAIN_SHARE = 0.02
"""Share by which an exchange has to bring the later finish forward. Smaller gains are lost in the prediction error."""


class LoadForecast(NamedTuple):
    """A rank's load and its predicted finish."""

    load: RankLoad
    busy_s: float
    """Seconds spent on moves."""
    finish_s: float
    """Seconds until the rank has no sample left, moves included."""


def plan_balance(
    loads: Sequence[RankLoad],
    cost: MoveCost | None,
    *,
    hysteresis: float = 0.15,
    min_gap_s: float = 0.0,
    cooldown_rounds: int = 4,
    current_round: int,
) -> tuple[SampleMove, ...]:
    """Return moves that lower the predicted makespan, in an order that always leaves a slot for the next move.

    Repeatedly, the rank that finishes last gives samples to the rank that finishes first: as few as make both finish
    together. It gives queued samples, whose moves are free, or else running ones with most work per byte of keys and
    values.

    An exchange has three conditions. The gap between the two finishes is above ``hysteresis`` times the later one, and
    above three times the cost. The later finish comes forward by ``min_gap_s``. The donor's steps or its queue get
    shorter: below the knee of the step curve, fewer rows gain nothing.

    Args:
        cost: Cost of moving running samples; None: only queued samples move.
        hysteresis: Smallest gap, as a share of the later finish.
        min_gap_s: Smallest gap, and smallest gain, in seconds.
        cooldown_rounds: Rounds for which a moved sample stays where it is.
    """
    forecasts = _forecasts(loads)
    fixed = {
        sample.sample_id
        for load in loads
        for sample in load.live
        if sample.last_moved_round is not None and current_round - sample.last_moved_round < cooldown_rounds
    }
    moves: list[SampleMove] = []
    lowest, num_useful = _makespan(forecasts), 0
    while exchange := _next_exchange(forecasts, cost, hysteresis, min_gap_s, fixed):
        moves += exchange
        fixed |= {move.sample_id for move in exchange}
        forecasts = _after(forecasts, exchange, cost)
        # If two ranks finish last together, relieving one gains nothing until the other is relieved too.
        if _makespan(forecasts) < lowest:
            lowest, num_useful = _makespan(forecasts), len(moves)
    return tuple(moves[:num_useful])


def _forecasts(loads: Sequence[RankLoad]) -> dict[int, LoadForecast]:
    """Return the forecast of every rank, ranks ascending."""
    forecasts = {load.rank: _forecast(load, 0.0) for load in sorted(loads, key=lambda load: load.rank)}
    samples = [sample.sample_id for load in loads for sample in load.live]
    if not loads or len(forecasts) < len(loads) or len(set(samples)) < len(samples):
        raise GenerationError(
            "every rank publishes one load and every sample is on one rank, "
            f"got ranks {[load.rank for load in loads]} and samples {sorted(samples)}; pass each once"
        )
    return forecasts


def _forecast(load: RankLoad, busy_s: float) -> LoadForecast:
    return LoadForecast(load, busy_s, busy_s + drain_seconds(load))


def _makespan(forecasts: Mapping[int, LoadForecast]) -> float:
    return max(forecast.finish_s for forecast in forecasts.values())


def _after(
    forecasts: Mapping[int, LoadForecast], moves: Sequence[SampleMove], cost: MoveCost | None
) -> dict[int, LoadForecast]:
    """Return the forecasts after ``moves``. A queued sample joins the end of its new rank's queue.

    A moved running sample delays both ranks by the stall, and the target by the whole transfer as well. This
    overestimates, since the target decodes during a send.
    """
    loads = [forecasts[source].load for source in {move.source for move in moves}]
    samples = {sample.sample_id: sample for load in loads for sample in load.live}
    running = {sample.sample_id for load in loads for sample in load.samples}
    leaving = {move.sample_id for move in moves}
    resumed: defaultdict[int, list[LiveSample]] = defaultdict(list)
    queued: defaultdict[int, list[LiveSample]] = defaultdict(list)
    busy_s: defaultdict[int, float] = defaultdict(float)
    for move in moves:
        sample = samples[move.sample_id]
        if move.sample_id not in running:
            queued[move.target].append(sample)
            continue
        assert cost is not None, f"running sample {sample.sample_id} moves, and no cost is given"
        resumed[move.target].append(sample)
        busy_s[move.source] += cost.stall_s
        busy_s[move.target] += cost.stall_s + cost.handover(sample)[1]
    after = dict(forecasts)
    for rank in {rank for move in moves for rank in (move.source, move.target)}:
        load = forecasts[rank].load
        stay = [sample for sample in load.samples if sample.sample_id not in leaving]
        wait = [sample for sample in load.waiting if sample.sample_id not in leaving]
        after[rank] = _forecast(
            replace(
                load,
                samples=(*stay, *resumed[rank]),
                waiting=(*wait, *queued[rank]),
                free_slots=load.num_slots - len(stay) - len(resumed[rank]),
            ),
            forecasts[rank].busy_s + busy_s[rank],
        )
    return after


def _next_exchange(
    forecasts: Mapping[int, LoadForecast], cost: MoveCost | None, hysteresis: float, min_gap_s: float, fixed: set[int]
) -> tuple[SampleMove, ...]:
    """Return moves from the last rank to finish to the first one that can relieve it; none if no rank can.

    Forecasts are in the order of ranks, so the lowest rank wins a tie.
    """
    donor = max(forecasts.values(), key=lambda forecast: forecast.finish_s)
    for receiver in sorted(forecasts.values(), key=lambda forecast: forecast.finish_s):
        gap_s = donor.finish_s - receiver.finish_s
        if gap_s <= max(hysteresis * donor.finish_s, min_gap_s):
            break
        if not receiver.load.num_slots:  # its call has ended
            continue
        queued = [sample for sample in donor.load.waiting if sample.sample_id not in fixed]
        running = [sample for sample in donor.load.samples if sample.sample_id not in fixed]
        room = max(receiver.load.free_slots - len(receiver.load.waiting), 0)
        longest_first = sorted(queued, key=lambda sample: (-sample.remaining_tokens, sample.sample_id))
        candidates: list[list[tuple[LiveSample, Handover]]] = [[(s, "recompute") for s in longest_first]]
        if cost is not None:
            candidates.append([(s, cost.handover(s)[0]) for s in _worth_their_cost(running, cost, gap_s)[:room]])
        for samples in candidates:
            moves = [SampleMove(s.sample_id, donor.load.rank, receiver.load.rank, how) for s, how in samples]
            if exchange := _smallest_useful(donor, receiver, moves, cost, min_gap_s):
                return exchange
    return ()


def _worth_their_cost(samples: Iterable[LiveSample], cost: MoveCost, gap_s: float) -> list[LiveSample]:
    """Return the samples with most work per byte, as many as the gap between the two finishes pays for."""
    by_work = sorted(samples, key=lambda s: (-s.remaining_tokens / max(s.context_tokens, 1), s.sample_id))
    costs_s = accumulate(cost.stall_s + cost.handover(sample)[1] for sample in by_work)
    return [sample for sample, cost_s in zip(by_work, costs_s, strict=True) if MIN_PAYBACK * cost_s < gap_s]


def _smallest_useful(
    donor: LoadForecast,
    receiver: LoadForecast,
    moves: Sequence[SampleMove],
    cost: MoveCost | None,
    min_gain_s: float,
) -> tuple[SampleMove, ...]:
    """Return the first of ``moves``, as few as make both ranks finish together; none if that gains nothing."""
    latest_s = donor.finish_s - max(MIN_GAIN_SHARE * donor.finish_s, min_gain_s)
    pair = {forecast.load.rank: forecast for forecast in (donor, receiver)}

    def after(count: int) -> tuple[LoadForecast, LoadForecast]:
        forecasts = _after(pair, moves[:count], cost)
        return forecasts[donor.load.rank], forecasts[receiver.load.rank]

    def receiver_finishes_last(count: int) -> bool:
        giving, taking = after(count)
        return giving.finish_s <= taking.finish_s

    # Every move brings the donor's finish forward and delays the receiver's: the best count is at their crossing, or
    # one before.
    crossing = 1 + bisect_left(range(1, len(moves) + 1), True, key=receiver_finishes_last)
    counts = [count for count in (crossing - 1, crossing) if 1 <= count <= len(moves)]
    for count in sorted(counts, key=lambda count: max(forecast.finish_s for forecast in after(count))):
        giving, taking = after(count)
        gains = max(giving.finish_s, taking.finish_s) < latest_s
        if gains and _is_relieved(donor.load, giving.load):
            return tuple(moves[:count])
    return ()


def _is_relieved(before: RankLoad, after: RankLoad) -> bool:
    """Return whether a rank's next step gets shorter, or fewer samples wait for a slot."""
    fewer_wait = len(after.live) - after.rows < len(before.live) - before.rows
    return fewer_wait or after.curve.seconds(after.rows) < before.curve.seconds(before.rows)
