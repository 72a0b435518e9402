from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_realloc.dataflow.pipeline_schedule import ScheduleName, StagePass, idle_turns, stage_passes

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
stages_and_counts = given(num_stages=st.integers(1, 9), count=st.integers(1, 24))


def _by_stage(schedule: ScheduleName, num_stages: int, count: int) -> list[tuple[StagePass, ...]]:
    return [stage_passes(schedule, stage, num_stages, count) for stage in range(num_stages)]


@stages_and_counts
def test_every_stage_runs_every_pass_once_and_in_a_legal_order(num_stages: int, count: int) -> None:
    for schedule in SCHEDULES:
        kinds = ["forward", "backward", *(["weights"] if schedule == "zero_bubble" else [])]
        for passes in _by_stage(schedule, num_stages, count):
            order = [(one.kind, one.micro_batch) for one in passes]
            assert Counter(order) == Counter((kind, number) for kind in kinds for number in range(count))
            for number in range(count):
                places = [order.index((kind, number)) for kind in kinds]
                assert places == sorted(places)
            for kind in kinds:  # neighbours' messages arrive in the order in which they are sent
                assert [number for other, number in order if other == kind] == list(range(count))


@stages_and_counts
def test_no_stage_holds_more_than_the_first_stage_of_1f1b(num_stages: int, count: int) -> None:
    for schedule in SCHEDULES:
        for stage, passes in enumerate(_by_stage(schedule, num_stages, count)):
            held = most = waiting = 0
            for one in passes:
                held += {"forward": 1, "backward": -1, "weights": 0}[one.kind]
                waiting += {"forward": 0, "backward": schedule == "zero_bubble", "weights": -1}[one.kind]
                most = max(most, held + waiting)
            ahead = num_stages - (stage if schedule == "1f1b" else 0)
            assert most <= min(ahead, count) + (schedule == "zero_bubble")
            assert held == waiting == 0


def test_1f1b_of_three_stages_by_hand() -> None:
    def texts(stage: int) -> str:
        passes = stage_passes("1f1b", stage, 3, 4)
        return " ".join(f"{one.kind[0]}{one.micro_batch}{'' if one.expected is None else '+'}" for one in passes)

    assert texts(0) == "f0 f1 f2+ b0+ f3+ b1 b2 b3"
    assert texts(1) == "f0 f1+ b0+ f2+ b1+ f3+ b2 b3"
    assert texts(2) == "f0+ b0+ f1+ b1+ f2+ b2+ f3+ b3"


@dataclass
class _Simulation:
    """Stages that run their passes in simulated time, and whose sends end when the receive has started, too."""

    passes: list[tuple[StagePass, ...]]
    seconds: dict[str, float]
    clock: list[float] = field(init=False)
    sent: dict[tuple[str, int, int], float] = field(default_factory=dict)
    """(kind, receiving stage, micro-batch) -> when it was sent."""

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
        while passes and (begin := self._arrival(stage, passes[0])) is not None:
            one = passes.pop(0)
            self.clock[stage] = max(self.clock[stage], begin) + self.seconds[one.kind]
            receiver = {"forward": stage + 1, "backward": stage - 1, "weights": -1}[one.kind]
            self.sent[one.kind, receiver, one.micro_batch] = self.clock[stage]
        return len(passes) < before

    def _arrival(self, stage: int, one: StagePass) -> float | None:
        is_end = stage == {"forward": 0, "backward": len(self.passes) - 1, "weights": stage}[one.kind]
        return 0.0 if is_end else self.sent.get((one.kind, stage, one.micro_batch))


@stages_and_counts
@example(num_stages=4, count=8)
@example(num_stages=8, count=2)
def test_idle_time_is_that_of_the_formula(num_stages: int, count: int) -> None:
    for forward, backward, weights in ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.0)):
        for schedule in SCHEDULES:
            whole = backward if schedule == "zero_bubble" else backward + weights
            seconds = {"forward": forward, "backward": whole, "weights": weights}
            idle = _Simulation(_by_stage(schedule, num_stages, count), seconds).run() - count * (
                forward + backward + weights
            )
            turns, weight_turns = idle_turns(schedule, num_stages, count)
            expected = turns * (forward + backward) + weight_turns * weights
            assert abs(idle - expected) < 1e-6, (schedule, num_stages, count)


@stages_and_counts
def test_neighbours_make_the_same_exchanges_even_if_each_of_them_blocks(num_stages: int, count: int) -> None:
    """NCCL needs this order; gloo's sends may wait for the receiver."""
    for schedule in SCHEDULES:
        left = [
            _exchanges(passes, stage, num_stages) for stage, passes in enumerate(_by_stage(schedule, num_stages, count))
        ]
        while any(left):
            meeting = [
                stage
                for stage, exchanges in enumerate(left[:-1])
                if exchanges and exchanges[0][0] == stage + 1 and left[stage + 1] and left[stage + 1][0][0] == stage
            ]
            assert meeting, f"all stages wait: {left}"
            for stage in meeting:
                _, sent, received = left[stage].pop(0)
                assert left[stage + 1].pop(0) == (stage, received, sent)


def _exchanges(passes: tuple[StagePass, ...], stage: int, num_stages: int) -> list[tuple[int, int | None, int | None]]:
    """Return (other stage, micro-batch sent, micro-batch received) of the exchanges of a stage."""
    made: list[tuple[int, int | None, int | None]] = []
    for one in passes:
        if one.kind == "weights":
            continue
        source, target = (stage - 1, stage + 1) if one.kind == "forward" else (stage + 1, stage - 1)
        if (source, one.micro_batch) not in [(other, received) for other, _, received in made]:
            made.append((source, None, one.micro_batch))
        made.append((target, one.micro_batch, one.expected))
    return [exchange for exchange in made if 0 <= exchange[0] < num_stages]
