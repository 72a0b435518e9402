"""Settings of a wrong type or with unknown roles, which every algorithm refuses at construction by name."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from lightning_realloc import PPO
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.setting_hints import setting_defaults
from tests.every_algorithm import ALGORITHMS
from tests.strategies.runs import low_tokens


def made(algorithm: type, **settings: Any) -> Any:
    """Construct an algorithm from names of models, with any other required argument."""
    required: dict[str, Any] = {"actor": "x", "model": "x", "teacher": "x", "reward": low_tokens}
    known = inspect.signature(algorithm).parameters
    given = {name: value for name, value in required.items() if name in known}
    return algorithm(**given | settings)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_numbers_and_switches_of_a_wrong_type_are_refused_by_name(algorithm: type) -> None:
    defaults = setting_defaults(algorithm)
    plain = [name for name, default in defaults.items() if isinstance(default, bool | int | float)]
    for name in (*plain, "learning_rate", "weight_decay", "seed"):
        wrong = ["high"] if isinstance(defaults.get(name), bool) else ["high", True]
        for value in wrong:
            with pytest.raises((ConfigError, GenerationError), match=f"{name}={value!r} "):
                made(algorithm, **{name: value})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": "1e-3"}, "learning_rate='1e-3' is a str; write a number without quotes.* 1.0e-3, not 1e-3"),
        ({"learning_rate": "high"}, "learning_rate='high' is a str; write a number$"),
        ({"learning_rate": math.nan}, "learning_rate=nan is not a number"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 may not be negative"),
        ({"seed": 0.5}, "seed=0.5 is a float; write a whole number"),
        ({"peft_config": {"actr": {"peft_type": "LORA"}}}, "peft_config names actr, and the roles are .*; write role"),
    ],
)
def test_a_wrong_value_is_refused_with_the_way_out(algorithm: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(algorithm, **settings)


@pytest.mark.parametrize("name", ["kl_coef", "value_clip", "entropy_coef", "missing_eos_penalty"])
def test_nan_is_refused_as_no_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=nan is not a number"):
        made(PPO, **{name: math.nan})


def test_a_part_of_an_iteration_without_the_actor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic_warmup=0\.5 is a float; write a whole number"):
        made(PPO, critic_warmup=0.5)


def test_numbers_that_are_no_python_floats_are_accepted() -> None:
    assert made(PPO, learning_rate=0, seed=-1, peft_config={"reward_2": "folder"}).seed == -1
