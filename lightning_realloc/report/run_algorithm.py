"""Construct the algorithm of a configuration of ``fit`` without its models and reward functions. Pure.

Settings that calls, roles and lengths follow from are those of the configuration. A configuration without sizes that
has a model's name stands for the model, and a placeholder for a reward function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.algorithms.base.loaded_weights import is_model_source
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.losses.kl import KL
from lightning_realloc.algorithms.rollout.rewarded import RewardedModule
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.errors import PlanError, ReallocError
from lightning_realloc.generation import RolloutBudget, SamplingParams, Speculation, VLLMOptions
from lightning_realloc.report.plan_flags import ALGORITHMS, ROLES
from lightning_realloc.setting_hints import describe_unknown_settings, settings_of

Content = Mapping[str, Any]
"""A mapping of a configuration."""

ALGORITHM_NAMES: Mapping[str, str] = {cls.__name__: name for name, cls in ALGORITHMS.items()}
"""Class of an algorithm -> its name for ``--algorithm``."""
_GROUPS: Mapping[str, type] = {
    "sampling": SamplingParams,
    "kl": KL,
    "train_options": TrainOptions,
    "critic_train_options": TrainOptions,
    "generation": GenerationOptions,
    "rollout_budget": RolloutBudget,
    "vllm": VLLMOptions,
    "speculation": Speculation,
}
"""Settings of an algorithm, or of another group, that are groups of settings."""
_VALUES = (
    *("kl_coef", "ratio_to", "engine", "divergence", "reward_tokenizer", "reward_weights", "peft_config"),
    "train_vision",
)
"""Further settings that calls, roles and lengths follow from."""


def own_name(path: str) -> str:
    """Return the name of a class of this package; empty for another class."""
    package, _, name = path.rpartition(".")
    return name if package.partition(".")[0] in ("", "lightning_realloc") else ""


def algorithm_class(path: str, files: str) -> type[MultiModelModule]:
    name = ALGORITHM_NAMES.get(own_name(path))
    if name is None:
        raise PlanError(
            f"{files}: model.class_path={path} is none of the algorithms that plan reads, which are "
            f"{', '.join(ALGORITHM_NAMES)}; for one of your own, leave --config out and give the models of an "
            f"algorithm with the same calls, as in --algorithm grpo --actor MODEL"
        )
    return ALGORITHMS[name]


def placeholder_algorithm(cls: type[MultiModelModule], settings: Content, files: str) -> MultiModelModule:
    """Construct an algorithm from the settings that calls, roles and lengths follow from."""
    if settings.get("partners"):
        raise PlanError(
            f"{files}: model.init_args.partners is not read by plan; give the models as flags, as in --algorithm "
            f"{ALGORITHM_NAMES[cls.__name__]} --model partner_NAME=MODEL"
        )
    kept: dict[str, Any] = {name: settings[name] for name in _VALUES if settings.get(name) is not None}
    kept["peft_config"] = _plain_adapters(kept.get("peft_config"), files)
    is_rewarded = issubclass(cls, RewardedModule)
    kept |= {
        role: _placeholder(role, settings[role], files)
        for role in ROLES
        if settings.get(role) is not None and not (is_rewarded and role == "reward")
    }
    if is_rewarded:
        kept["reward"] = _rewards(settings.get("reward"), files)
    try:
        cls.check_settings({**settings, "peft_config": kept["peft_config"]})
        return cls(**kept, **{name: _group(name, settings[name]) for name in _GROUPS if settings.get(name)})
    except (ReallocError, TypeError) as error:
        raise PlanError(f"{files}: model: {error}") from None


def refuse_unknown_settings(cls: type, settings: Content, place: str) -> None:
    """Raise PlanError for settings that a class does not have, with those that are probably meant."""
    if unknown := [name for name in settings if name not in settings_of(cls)]:
        raise PlanError(f"{place}: {describe_unknown_settings(cls, unknown)}")


def _group(name: str, given: object) -> Any:
    """Construct a group of settings, and groups in it. A class may be named with them."""
    settings = given.get("init_args", given) if isinstance(given, Mapping) else given
    if not isinstance(settings, Mapping):
        raise PlanError(f"{name} is {given!r:.60}; write its settings as a mapping")
    return _GROUPS[name](
        **{key: _group(key, value) if key in _GROUPS and value else value for key, value in settings.items()}
    )


def _placeholder(role: str, given: object, files: str) -> PreTrainedConfig:
    """Return a configuration without sizes that has a model's name."""
    if not isinstance(given, str):
        raise PlanError(
            f"{files}: the model of {role} is {given!r:.60}, and plan reads names, folders and shapes; add --{role}, "
            f"as in --{role} Qwen/Qwen3-0.6B"
        )
    config = PreTrainedConfig()
    config.name_or_path = given
    return config


def model_name(role: Role) -> str:
    return str(getattr(role.source, "name_or_path", role.source))


def _rewards(given: Any, files: str) -> list[Any]:
    """Return placeholders for reward models and functions. Environments that give rewards count as a function."""
    several = given if isinstance(given, list | tuple) else [given]
    for item in several:
        if isinstance(item, Mapping) and str(item.get("class_path")).startswith("transformers."):
            _placeholder("reward", item, files)
    return [
        _placeholder("reward", item, files) if isinstance(item, str) and is_model_source(item) else _any_reward
        for item in several
    ]


def _any_reward(prompts: Sequence[object], completions: Sequence[object]) -> list[float]:
    raise AssertionError("a plan calls no reward function")


def _plain_adapters(given: Any, files: str) -> Any:
    """Return the setting ``peft_config`` with mappings in place of class paths."""
    if not isinstance(given, Mapping):
        return given
    if "class_path" not in given:
        return {key: _plain_adapters(value, files) for key, value in given.items()}
    if str(given["class_path"]).rpartition(".")[2] != "LoraConfig":
        raise PlanError(f"{files}: peft_config names {given['class_path']}; plan reads LoraConfig and saved adapters")
    chosen = {key: value for key, value in (given.get("init_args") or {}).items() if value is not None}
    return {"peft_type": "LORA", **chosen}
