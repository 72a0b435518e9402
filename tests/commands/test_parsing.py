"""Flags that set the strategy's settings."""

from __future__ import annotations

import pytest
from jsonargparse import Namespace

from lightning_realloc.commands.parsing import strategy_with
from lightning_realloc.errors import ConfigError


def test_a_launcher_on_the_command_line_is_a_setting_of_the_strategy() -> None:
    path = "lightning_realloc.strategies.ReallocStrategy"
    ray = {"launcher": "ray", "max_failures": 2}
    assert strategy_with("realloc", ray) == Namespace(class_path=path, init_args=Namespace(**ray))
    assert strategy_with("realloc-static", ray).init_args == Namespace(plan="static", **ray)
    assert strategy_with("realloc_fork", {"launcher": "ray"}).init_args == Namespace(launcher="ray")
    given = Namespace(class_path="ReallocStrategy", init_args=Namespace(plan="plan.yaml", launcher="popen"))
    assert strategy_with(given, {"launcher": "ray"}).init_args == Namespace(plan="plan.yaml", launcher="ray")


@pytest.mark.parametrize("strategy", ["ddp", Namespace(class_path="lightning.pytorch.strategies.DDPStrategy")])
def test_a_launcher_for_another_strategy_is_refused(strategy: object) -> None:
    with pytest.raises(ConfigError, match=r"^--launcher needs strategy='realloc' or ReallocStrategy; this run's"):
        strategy_with(strategy, {"launcher": "ray"})
