"""Order of the passes and messages of a training pipeline: 1F1B, ZB-H1, and both with interleaved runs of blocks.

Pure: ``runtime/parallel/pipeline.py`` runs the passes, and ``tuning`` estimates their idle time.

Sources: 1F1B and interleaving: Narayanan et al., arXiv:2104.04473, section 2.2; ZB-H1, which delays the gradients of
weights: Qi et al., arXiv:2401.10241, section 2.1.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

ScheduleName = Literal["1f1b", "zero_bubble"]


class StagePass(NamedTuple):
    """One pass of a micro-batch through a run of blocks. Its input comes from another stage, except at both ends."""

    kind: Literal["forward", "backward", "weights"]
    """"forward" makes hidden states for the next run, "backward" their gradient for the run before. "weights" makes
    the gradients of weights that the backward pass has left out."""
    micro_batch: int
    run: int
    """Run of blocks, which stage ``run % num_stages`` holds."""


class Exchange(NamedTuple):
    """Messages between this stage and another one, which start together, as NCCL requires."""

    peer: int
    sent: StagePass | None
    """Pass of the other stage whose input is sent; None: nothing is."""
    received: StagePass | None
    """Pass of this stage whose input arrives; None: nothing does."""


class StageTurn(NamedTuple):
    """A pass of a stage, and the exchanges that it starts next, in this order."""

    made: StagePass | None
    """None: the stage has no pass to run."""
    exchanges: tuple[Exchange, ...]


def stage_passes(
    schedule: ScheduleName | None, stage: int, num_stages: int, count: int, *, vpp: int = 1
) -> tuple[StagePass, ...]:
    """Return the passes of a stage for ``count`` micro-batches.

    Micro-batches go through the runs of a stage in groups of at least ``num_stages``, if there are as many. A stage
    runs as many forward passes ahead as keep it busy until its first gradient arrives, and holds their activations.
    ZB-H1 delays the weights' gradients by as many passes as the first stage is further ahead: with them, no stage holds
    more than the first. At the end they fill the time in which a stage waits for gradients.

    Args:
        schedule: None: forward passes alone.
        vpp: Runs of blocks of each stage.
    """
    groups = _groups(num_stages, count)
    runs = range(stage, num_stages * vpp, num_stages)
    forward = [StagePass("forward", number, run) for group in groups for run in runs for number in group]
    if schedule is None:
        return tuple(forward)
    backward = [StagePass("backward", number, run) for group in groups for run in reversed(runs) for number in group]
    ahead = min(len(forward), _passes_ahead(stage, num_stages, count, vpp))
    passes = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        passes += pair
    passes += backward[len(forward) - ahead :]
    return tuple(_with_weights(passes, _delay(stage, vpp)) if schedule == "zero_bubble" else passes)


def _passes_ahead(stage: int, num_stages: int, count: int, vpp: int) -> int:
    after = num_stages - stage - 1
    return after if vpp == 1 else 2 * after + (vpp - 1) * len(_groups(num_stages, count)[0])


def passes_held(stage: int, num_stages: int, count: int, *, vpp: int = 1) -> float:
    """Return the most micro-batches whose activations a stage holds under 1F1B, in all of its runs of blocks.

    >>> passes_held(0, num_stages=4, count=8), passes_held(0, num_stages=4, count=8, vpp=2)
    (4.0, 5.5)
    """
    return min(count, (_passes_ahead(stage, num_stages, count, vpp) + 1) / vpp)


def passes_waiting(stage: int, count: int, *, vpp: int = 1) -> float:
    """Return the most micro-batches whose gradients of weights wait at a stage under ZB-H1, in all of its runs.

    >>> passes_waiting(3, count=8), passes_waiting(3, count=8, vpp=2)
    (3.0, 3.0)
    """
    return min(count, _delay(stage, vpp) / vpp)


def _delay(stage: int, vpp: int) -> int:
    """Return the backward passes after which ZB-H1 computes gradients of weights."""
    return stage if vpp == 1 else 2 * stage


def _groups(num_stages: int, count: int) -> list[range]:
    """Return the micro-batches in groups, as equal as possible, the larger ones first."""
    number = max(1, count // num_stages)
    bounds = [-(-count * index // number) for index in range(number + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _with_weights(passes: list[StagePass], delay: int) -> list[StagePass]:
    made, waiting = list[StagePass](), deque[StagePass]()
    for one in passes:
        made.append(one)
        if one.kind == "backward":
            waiting.append(one._replace(kind="weights"))
            if len(waiting) > delay:
                made.append(waiting.popleft())
    return [*made, *waiting]


@lru_cache(maxsize=256)
def pipeline_turns(
    schedule: ScheduleName | None, num_stages: int, count: int, *, vpp: int = 1
) -> tuple[tuple[StageTurn, ...], ...]:
    """Return the turns of every stage.

    All stages simulate passes of equal length, and start exchanges in the order of simulated time, those of one instant
    by pair of stages. So all follow one global order: whichever exchange comes first in it can always proceed, and none
    waits forever even if each blocks.
    """
    left = [deque(stage_passes(schedule, stage, num_stages, count, vpp=vpp)) for stage in range(num_stages)]
    turns: list[list[StageTurn]] = [[] for _ in left]
    ready = {StagePass("forward", number, 0) for number in range(count)}
    last = num_stages * vpp - 1
    while any(left):
        made = [passes.popleft() if passes and _is_ready(passes[0], ready) else None for passes in left]
        assert any(made), f"the passes of {schedule} wait for each other"
        inputs = [None if one is None else _pass_after(one, last) for one in made]
        for stage, one in enumerate(made):
            exchanges = _exchanges(inputs, stage)
            if one is not None or exchanges:
                turns[stage].append(StageTurn(one, exchanges))
        ready.update(one for one in inputs if one is not None)
    return tuple(map(tuple, turns))


def _is_ready(one: StagePass, ready: set[StagePass]) -> bool:
    return one.kind == "weights" or one in ready


def _pass_after(one: StagePass, last: int) -> StagePass | None:
    """Return the pass that needs the result; None if none does."""
    if one.kind == "forward":
        return one._replace(kind="backward") if one.run == last else one._replace(run=one.run + 1)
    return one._replace(run=one.run - 1) if one.kind == "backward" and one.run > 0 else None


def _exchanges(inputs: Sequence[StagePass | None], stage: int) -> tuple[Exchange, ...]:
    """Return the exchanges of a stage after one instant: ``inputs`` are the passes that need each stage's result."""
    count = len(inputs)

    def message(source: int, target: int) -> StagePass | None:
        one = inputs[source]
        return one if one is not None and one.run % count == target else None

    peers = sorted({(stage - 1) % count, (stage + 1) % count} - {stage}, key=lambda peer: sorted((stage, peer)))
    made = (Exchange(peer, message(stage, peer), message(peer, stage)) for peer in peers)
    return tuple(one for one in made if one.sent is not None or one.received is not None)


def idle_turns(schedule: ScheduleName, num_stages: int, count: int, *, vpp: int = 1) -> tuple[float, float]:
    """Return how often a stage idles for a forward with its backward pass, and for the gradients of weights.

    Seconds idle are the first, times those of both passes of all its blocks but for the weights' gradients, plus the
    second, times those of these gradients. ZB-H1 fills the pipeline's end with them, so its second number is negative.
    With interleaving that one is a lower bound.

    >>> idle_turns("1f1b", num_stages=4, count=8)
    (3.0, 3.0)
    >>> idle_turns("zero_bubble", num_stages=4, count=8)
    (3.0, -3.0)
    >>> idle_turns("1f1b", num_stages=4, count=8, vpp=2)
    (1.5, 1.5)
    """
    missing = max(0, num_stages - count)  # a group of fewer micro-batches than stages waits between its runs
    turns = (num_stages - 1 + (vpp - 1) * missing) / vpp
    return turns, turns if schedule == "1f1b" else -min(num_stages - 1, count * vpp - 1) / vpp
