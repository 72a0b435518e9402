from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_realloc.dataflow.pipeline_schedule import (
    Exchange,
    ScheduleName,
    StagePass,
    idle_turns,
    passes_held,
    passes_waiting,
    pipeline_turns,
    stage_passes,
)

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
KINDS = {None: ["forward"], "1f1b": ["forward", "backward"], "zero_bubble": ["forward", "backward", "weights"]}
stages_and_counts = given(num_stages=st.integers(2, 9), count=st.integers(1, 24), vpp=st.integers(1, 4))


def _by_stage(schedule: ScheduleName | None, num_stages: int, count: int, vpp: int) -> list[tuple[StagePass, ...]]:
    return [stage_passes(schedule, stage, num_stages, count, vpp=vpp) for stage in range(num_stages)]


@stages_and_counts
@settings(max_examples=50, deadline=None)
def test_every_stage_runs_every_pass_once_and_in_a_legal_order(num_stages: int, count: int, vpp: int) -> None:
    for schedule, kinds in KINDS.items():
        for stage, passes in enumerate(_by_stage(schedule, num_stages, count, vpp)):
            runs = range(stage, num_stages * vpp, num_stages)
            every = [StagePass(kind, number, run) for kind in kinds for run in runs for number in range(count)]  # type: ignore[arg-type]
            assert Counter(passes) == Counter(every)
            place = {one: index for index, one in enumerate(passes)}
            for run in runs:
                for number in range(count):
                    places = [place[StagePass(kind, number, run)] for kind in kinds]  # type: ignore[arg-type]
                    assert places == sorted(places)


@stages_and_counts
@settings(max_examples=50, deadline=None)
def test_no_stage_holds_more_than_the_first_stage_of_1f1b(num_stages: int, count: int, vpp: int) -> None:
    for schedule in SCHEDULES:
        for stage, passes in enumerate(_by_stage(schedule, num_stages, count, vpp)):
            held = waiting = most_held = most_waiting = most = 0
            for one in passes:
                held += {"forward": 1, "backward": -1, "weights": 0}[one.kind]
                waiting += {"forward": 0, "backward": schedule == "zero_bubble", "weights": -1}[one.kind]
                most_held, most_waiting = max(most_held, held), max(most_waiting, waiting)
                most = max(most, held + waiting)
            assert most_held == round(vpp * passes_held(stage, num_stages, count, vpp=vpp))
            assert held == waiting == 0
            if schedule == "zero_bubble":  # the pass whose weights' gradients come next waits for a moment
                assert most_waiting <= vpp * passes_waiting(stage, count, vpp=vpp) + 1
                assert most <= vpp * passes_held(0, num_stages, count, vpp=vpp) + 1


def _text(passes: tuple[StagePass, ...], num_stages: int) -> str:
    """Return the passes in short: kind and micro-batch, and a quote for the second run of a stage."""
    return " ".join(f"{one.kind[0]}{one.micro_batch}{chr(39) * (one.run // num_stages)}" for one in passes)


def test_1f1b_of_three_stages_by_hand() -> None:
    texts = [_text(passes, 3) for passes in _by_stage("1f1b", 3, 4, 1)]

    assert texts == ["f0 f1 f2 b0 f3 b1 b2 b3", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"]


def test_two_runs_on_each_of_two_stages_by_hand() -> None:
    """Groups of two micro-batches; the first stage runs four passes ahead, the last one two (Narayanan, figure 4)."""
    first, last = (_text(passes, 2) for passes in _by_stage("1f1b", 2, 4, 2))

    assert first == "f0 f1 f0' f1' f2 b0' f3 b1' f2' b0 f3' b1 b2' b3' b2 b3"
    assert last == "f0 f1 f0' b0' f1' b1' f2 b0 f3 b1 f2' b2' f3' b3' b2 b3"


def test_neighbours_swap_their_messages_in_one_exchange() -> None:
    """After its third pass a first of two stages sends a micro-batch, while the gradient of one arrives."""
    first, _ = pipeline_turns("1f1b", 2, 4)

    swap = Exchange(peer=1, sent=StagePass("forward", 2, 1), received=StagePass("backward", 1, 0))
    assert [turn.exchanges for turn in first if turn.made == StagePass("forward", 2, 0)] == [(swap,)]


@dataclass
class _Simulation:
    """Stages that run their passes in simulated time, and send their results at once."""

    passes: list[tuple[StagePass, ...]]
    seconds: dict[str, float]
    vpp: int
    clock: list[float] = field(init=False)
    ended: dict[StagePass, float] = field(default_factory=dict)
    """When each pass ended, and its result was sent."""

    def run(self) -> float:
        """Return when the last stage ends. Fails if the stages wait for each other forever."""
        self.clock = [0.0] * len(self.passes)
        left = [list(passes) for passes in self.passes]
        while any(left):
            advanced = [self._advance(stage, passes) for stage, passes in enumerate(left)]
            assert any(advanced), f"all stages wait: {[passes[:1] for passes in left]}"
        return max(self.clock)

    def _advance(self, stage: int, passes: list[StagePass]) -> bool:
        """Run the passes of a stage up to the first that waits; return whether there was one."""
        before = len(passes)
        while passes and (begin := self._arrival(passes[0])) is not None:
            one = passes.pop(0)
            self.clock[stage] = max(self.clock[stage], begin) + self.seconds[one.kind] / self.vpp
            self.ended[one] = self.clock[stage]
        return len(passes) < before

    def _arrival(self, one: StagePass) -> float | None:
        last = len(self.passes) * self.vpp - 1
        if one.kind == "weights" or (one.kind == "forward" and one.run == 0):
            return 0.0
        if one.kind == "backward" and one.run == last:
            return self.ended.get(one._replace(kind="forward"))
        return self.ended.get(one._replace(run=one.run + (-1 if one.kind == "forward" else 1)))


@stages_and_counts
@settings(max_examples=50, deadline=None)
@example(num_stages=4, count=8, vpp=1)
@example(num_stages=4, count=8, vpp=2)
@example(num_stages=4, count=9, vpp=2)
@example(num_stages=8, count=2, vpp=2)
def test_idle_time_is_that_of_the_formula(num_stages: int, count: int, vpp: int) -> None:
    for forward, backward, weights in ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.0)):
        for schedule in SCHEDULES:
            whole = backward if schedule == "zero_bubble" else backward + weights
            seconds = {"forward": forward, "backward": whole, "weights": weights}
            took = _Simulation(_by_stage(schedule, num_stages, count, vpp), seconds, vpp).run()
            idle = took - count * (forward + backward + weights)
            turns, weight_turns = idle_turns(schedule, num_stages, count, vpp=vpp)
            expected = turns * (forward + backward) + weight_turns * weights
            error = 0.12 * took if vpp > 1 and schedule == "zero_bubble" else 1e-6
            assert abs(idle - expected) <= error, (schedule, num_stages, count, vpp)


@pytest.mark.parametrize(("count", "least", "most"), [(4, 0.92, 0.96), (8, 0.94, 0.96), (16, 0.96, 0.98)])
def test_interleaving_speeds_up_delayed_gradients_of_weights(count: int, least: float, most: float) -> None:
    seconds = {"forward": 1.0, "backward": 1.0, "weights": 1.0}
    one, two = (_Simulation(_by_stage("zero_bubble", 4, count, vpp), seconds, vpp).run() for vpp in (1, 2))
    assert least <= two / one <= most


@stages_and_counts
@settings(max_examples=50, deadline=None)
@example(num_stages=2, count=4, vpp=2)
def test_neighbours_make_the_same_exchanges_even_if_each_of_them_blocks(num_stages: int, count: int, vpp: int) -> None:
    """NCCL needs this order; gloo's sends may wait for the receiver. Passes find their inputs."""
    for schedule in KINDS:
        turns = pipeline_turns(schedule, num_stages, count, vpp=vpp)
        left = [[one for turn in stage for one in (turn.made, *turn.exchanges) if one is not None] for stage in turns]
        ready = [{StagePass("forward", number, 0) for number in range(count)}, *(set[StagePass]() for _ in turns[1:])]
        results = [set[StagePass]() for _ in turns]
        met = set[tuple[int, int]]()
        while any(left):
            before = sum(map(len, left))
            for stage, actions in enumerate(left):
                while actions and isinstance(made := actions[0], StagePass):
                    actions.pop(0)
                    assert made.kind == "weights" or made in ready[stage] or made.run == num_stages * vpp - 1
                    results[stage].add(made)
                peer = actions[0].peer if actions and isinstance(actions[0], Exchange) else None
                if peer is None or not left[peer] or not isinstance(other := left[peer][0], Exchange):
                    continue
                if other.peer == stage:
                    one = actions.pop(0)
                    left[peer].pop(0)
                    assert isinstance(one, Exchange)
                    assert (one.sent, one.received) == (other.received, other.sent)
                    pair = min(stage, peer), max(stage, peer)
                    assert pair in met or None in (one.sent, one.received)  # the first one agrees on the dtype
                    met.add(pair)
                    for sender, receiver, message in ((stage, peer, one.sent), (peer, stage, one.received)):
                        if message is not None:
                            step = -1 if message.kind == "forward" else 1
                            assert message._replace(run=message.run + step) in results[sender]
                            ready[receiver].add(message)
            assert sum(map(len, left)) < before, f"all stages wait: {[actions[:1] for actions in left]}"
