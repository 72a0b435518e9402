"""Faults of the trial cover all moments, signals and launchers, and name functions that exist."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.chaos.faults import LAUNCHERS, MOMENTS, ON_RANK_0, SIGNALS, draw_faults


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_moment_is_a_function_of_the_package(moment: str) -> None:
    module, _, path = MOMENTS[moment].partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)


def test_sixty_faults_cover_everything_and_are_the_same_for_a_seed() -> None:
    faults = draw_faults(60, seed=0)

    assert faults == draw_faults(60, seed=0) != draw_faults(60, seed=1)
    assert {fault.moment for fault in faults} == set(MOMENTS)
    assert {fault.signal for fault in faults} == set(SIGNALS)
    assert {fault.launcher for fault in faults} == set(LAUNCHERS)
    assert all(fault.rank == 0 for fault in faults if fault.moment in ON_RANK_0)
    assert all(fault.target == "one" for fault in faults if fault.signal == "SIGSTOP")
    assert {fault.target for fault in faults} == {"one", "all", "launcher"}
