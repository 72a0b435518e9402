"""Groups of settings: KL, next to the single setting; GenerationOptions, and the engine that can follow them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_realloc import (
    GRPO,
    KL,
    PPO,
    RLOO,
    SFT,
    ConfigError,
    GenerationOptions,
    ReinforcePlusPlus,
    RolloutBudget,
    Speculation,
)
from tests.algorithms import test_grpo
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs


def made(kind: type = GRPO, **settings: Any) -> Any:
    """Return an algorithm on a tiny model."""
    settings = {"sampling": runs.SAMPLING, "tokenizer": byte_tokenizer(), **settings}
    return kind(tiny_model("llama"), test_grpo.fixed, **settings)


@pytest.mark.parametrize(
    ("kind", "group", "single"),
    [
        (GRPO, {"kl": KL(0.0)}, {"kl_coef": 0.0}),
        (RLOO, {"kl": KL(0.1, place="loss", estimator="k2")}, {"kl": KL(place="loss", estimator="k2"), "kl_coef": 0.1}),
        (RLOO, {"kl": KL(0.1)}, {"kl": KL(0.1, place="reward", estimator="k3")}),
        (RLOO, {"kl": KL(0.1)}, {"kl_coef": 0.1}),
        (ReinforcePlusPlus, {"kl": KL(place="loss")}, {"kl": KL(0.01, place="loss", estimator="k2")}),
    ],
)
def test_a_group_sets_the_same_as_single_settings_and_keeps_other_defaults(
    kind: type, group: dict[str, Any], single: dict[str, Any]
) -> None:
    by_group, by_settings = made(kind, **group), made(kind, **single)
    assert (by_group.kl, by_group.kl_coef) == (by_settings.kl, by_settings.kl_coef)


def test_ppo_controls_the_divergence_by_a_group() -> None:
    module = made(PPO, kl=KL(0.2, target=6.0, gain=0.5, place="loss", estimator="k1"))
    controller = module.kl_controller
    assert (float(controller.coefficient), controller.target, controller.gain) == (0.2, 6.0, 0.5)
    assert (module.kl.place, module.kl.estimator, made(PPO).kl.place) == ("loss", "k1", "reward")


def test_a_group_and_single_settings_combine() -> None:
    module = made(kl_coef=0.5, kl=KL(estimator="k1"))
    assert (module.kl_coef, module.kl.estimator) == (0.5, "k1")


def test_a_setting_given_twice_must_be_the_same() -> None:
    assert made(RLOO, kl=KL(0.2), kl_coef=0.2).kl_coef == 0.2
    with pytest.raises(ConfigError, match=r"kl_coef=0.04 and kl=KL\(0.2\) contradict each other; leave one"):
        made(RLOO, kl=KL(0.2), kl_coef=0.04)


def test_a_group_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"generation='hf' is a str; write GenerationOptions\(...\)"):
        made(generation="hf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_cache_bytes": 0}, "max_cache_bytes=0 must be at least 1 and finite"),
        ({"max_cache_bytes": float("inf")}, "max_cache_bytes=inf must be at least 1 and finite"),
        ({"max_cache_bytes": True}, "max_cache_bytes=True is a bool; write a number"),
        ({"max_cache_bytes": "high"}, "max_cache_bytes='high' is a str; write a number"),
        ({"sample_reallocation": 3}, "sample_reallocation=3 is a int; write True or False"),
        (
            {"sample_reallocation": "running"},
            "sample_reallocation='running' is a str; write True or False, 'queued' or",
        ),
        ({"rollout_budget": RolloutBudget(tokens=9), "sample_reallocation": True}, "with sample_reallocation=True"),
    ],
)
def test_invalid_generation_options_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationOptions(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "sglang"}, "engine='sglang' must be one of native, hf, vllm"),
        ({"speculation": "ngram"}, "speculation='ngram' is a str; write Speculation"),
        (
            {"engine": "hf", "speculation": Speculation()},
            r"speculation=Spec.* needs an engine that drafts tokens, and engine='hf' does not; leave it out, or use ",
        ),
        (
            {"engine": "hf", "generation": GenerationOptions(sample_reallocation=True)},
            "sample_reallocation=True needs an engine that hands samples over .*, or use engine='native'",
        ),
        (
            {"engine": "hf", "generation": GenerationOptions(max_cache_bytes=9)},
            "max_cache_bytes=9 needs .* bounds the bytes of its cache.* engine='native' or engine='vllm'",
        ),
        (
            {"engine": "hf", "generation": GenerationOptions(rollout_budget=RolloutBudget(tokens=9))},
            "needs an engine that stops at a budget and",
        ),
        *(
            (
                {"engine": engine, "generation": GenerationOptions(router_replay=True)},
                "router_replay=True needs an engine that records the experts of its tokens",
            )
            for engine in ("hf", "vllm")
        ),
    ],
)
def test_settings_that_the_engine_cannot_follow_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**settings)


def test_a_rollout_budget_needs_an_algorithm_that_generates() -> None:
    options = GenerationOptions(rollout_budget=RolloutBudget(tokens=9))
    with pytest.raises(ConfigError, match="SFT has none that could; leave rollout_budget out of generation"):
        SFT("x", generation=options)


def test_router_replay_needs_an_algorithm_that_trains_on_what_it_generates() -> None:
    replays = GenerationOptions(router_replay=True)
    with pytest.raises(ConfigError, match="no training call here reads what its model generated"):
        _ = SFT("x", generation=replays).dataflow


def test_a_backend_of_torch_compile_is_checked() -> None:
    assert GenerationOptions(compile="inductor").compile == "inductor"
    with pytest.raises(ConfigError, match=r"compile='indctor' must be a backend of torch\.compile: .*inductor"):
        GenerationOptions(compile="indctor")


def test_options_of_the_native_engine_are_refused_where_they_would_not_hold() -> None:
    assert GenerationOptions(batch_invariant=True).batch_invariant
    with pytest.raises(ConfigError, match="batch_invariant=True captures no steps that compile='inductor' could"):
        GenerationOptions(batch_invariant=True, compile="inductor")
    with pytest.raises(ConfigError, match="batch_invariant='yes' is a str; write True or False"):
        GenerationOptions(batch_invariant="yes")
