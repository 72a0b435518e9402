"""Reallocations around calls by the callback's policy, their totals, and dispatch of phase hooks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_realloc.callbacks import ParameterReallocation, PhaseCallback
from lightning_realloc.callbacks.reallocation import SwitchTotals
from lightning_realloc.runtime.transfer.executor import ReallocationReport
from lightning_realloc.strategies.pool.phase_hooks import announced, dispatch
from lightning_realloc.strategies.pool.run_policies import RunPolicies


def report(moved: int, seconds: float = 0.5) -> ReallocationReport:
    """Return a report of ``moved`` bytes, twice the least possible number."""
    return ReallocationReport(moved, moved // 2, moved, seconds, "direct")


class Pool:
    """A model pool that moves weights for one call, in every second phase."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def realize(self, call: str) -> ReallocationReport | None:
        """Move, unless the weights are in place already."""
        self.asked.append(f"realize {call}")
        return report(100) if len(self.asked) % 4 == 1 else None

    def relinquish(self, call: str, *, free: bool) -> None:
        """Record whether the caller asked to free memory."""
        self.asked.append(f"relinquish {call}, free={free}")


class Profiler:
    """A profiler that records the names of its measurements."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def profile(self, name: str) -> Any:
        """Record the name."""
        self.names.append(name)
        return nullcontext()


class Module:
    """Stand-in for a LightningModule with hooks."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_phase_start(self, phase: str) -> None:
        """Record the phase."""
        self.told.append(phase)


class Trainer:
    """Stand-in for a Trainer with hooks."""

    def __init__(self, *callbacks: Callback) -> None:
        self.callbacks = list(callbacks)
        self.lightning_module = Module()
        self.profiler = Profiler()
        self.pool = Pool()


def run_call(trainer: Any) -> None:
    """Run a call under the policy of the trainer's callbacks."""
    with announced("actor.generate", trainer, trainer.pool, RunPolicies.from_callbacks(trainer.callbacks).reallocation):
        pass


class Listener(PhaseCallback):
    """Records its hook calls."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_phase_start(self, trainer: Any, pl_module: Any, phase: str) -> None:
        """Record the start."""
        self.heard.append(("start", phase))

    def on_reallocate(self, trainer: Any, pl_module: Any, phase: str, report: ReallocationReport) -> None:
        """Record the bytes."""
        self.heard.append(("moved", phase, report.bytes_moved))


def test_hooks_run_in_callbacks_that_define_them_and_then_in_the_module() -> None:
    listener = Listener()
    trainer: Any = Trainer(Callback(), listener)
    dispatch(trainer, "on_phase_start", "actor.train")
    dispatch(trainer, "on_reallocate", "actor.train", report(7))
    dispatch(trainer, "on_nothing_that_exists", 1, 2)
    assert listener.heard == [("start", "actor.train"), ("moved", "actor.train", 7)]
    assert trainer.lightning_module.told == ["actor.train"]
    assert [name.split(".")[-1] for name in trainer.profiler.names] == [
        "on_phase_start", "on_phase_start", "on_reallocate",
    ]  # fmt: skip
    assert trainer.profiler.names[1] == "[LightningModule]Module.on_phase_start"


def test_every_call_is_realized_and_relinquished_and_moved_bytes_are_summed() -> None:
    reallocation, listener = ParameterReallocation(), Listener()
    trainer: Any = Trainer(reallocation, listener)
    for _ in range(4):
        run_call(trainer)
    assert trainer.pool.asked == ["realize actor.generate", "relinquish actor.generate, free=False"] * 4
    totals = reallocation.summary()["actor.generate"]
    assert totals == SwitchTotals(count=2, bytes_moved=200, bytes_minimum=100, seconds=1.0)
    assert totals.bytes_per_s == 200.0
    # The report comes before the phase starts: the layout is in place by then.
    assert listener.heard[:2] == [("moved", "actor.generate", 100), ("start", "actor.generate")]


def test_free_after_frees_the_storage_of_a_call() -> None:
    trainer: Any = Trainer(ParameterReallocation(free_after=True))
    run_call(trainer)
    assert trainer.pool.asked == ["realize actor.generate", "relinquish actor.generate, free=True"]


def test_a_disabled_callback_moves_no_role() -> None:
    reallocation = ParameterReallocation(enabled=False)
    trainer: Any = Trainer(reallocation)
    run_call(trainer)
    assert trainer.pool.asked == []
    assert reallocation.summary() == {}


def test_the_throughput_of_no_moves_is_zero() -> None:
    assert SwitchTotals().bytes_per_s == 0.0
    totals = SwitchTotals()
    totals.add(report(10, seconds=0.25))
    assert totals.bytes_per_s == pytest.approx(40.0)
