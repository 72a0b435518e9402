"""The strategy has every member that callbacks read."""

from __future__ import annotations

from lightning_realloc.callbacks.run_view import RunView
from lightning_realloc.strategies import ReallocStrategy


def test_the_strategy_has_every_member_of_the_view() -> None:
    members = {name for name in (*vars(RunView), *RunView.__annotations__) if not name.startswith("_")}
    assert {"num_shown", "pool", "set_plan"} <= members
    strategy = ReallocStrategy()
    assert members <= {*dir(ReallocStrategy), *vars(strategy)}
