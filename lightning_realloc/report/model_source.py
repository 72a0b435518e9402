"""Read models for planning: built-in shapes, shapes written out, and configurations.

No weights are read. The hub is contacted only for a configuration, and only if times are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from lightning_realloc.algorithms.base.adapters import AdapterSource
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.rollout.reward_sources import is_further
from lightning_realloc.data.tokenizers import describe_load_error
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.remote_path import expand_home, is_path, require_files
from lightning_realloc.report.known_models import find_known_model, is_shape, parse_shape
from lightning_realloc.runtime.model.model_classes import Task
from lightning_realloc.runtime.model.structure import TrainVision
from lightning_realloc.strategies.pool.memory_check import describe_roles, replayed_roles
from lightning_realloc.tuning.shapes.experts import declared_experts
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

_TASKS: dict[str, Task] = {"critic": "token_classification", "reward": "sequence_classification"}
"""Roles with scoring models; all others are causal language models."""


def model_task(role: str) -> Task:
    """Return the task of a role's model."""
    return _TASKS.get("reward" if is_further(role) else role, "causal_lm")


def read_roles(
    sources: Mapping[str, str],
    dataflow: Dataflow,
    *,
    is_priced: bool,
    adapters: Mapping[str, AdapterSource] | None = None,
    shares: Mapping[str, str] | None = None,
    train_vision: TrainVision = "none",
) -> dict[str, RoleMemory]:
    """Return the parameters and shape of every role's model.

    Args:
        sources: Role -> a Hugging Face name, a folder, a ``config.json``, or a shape that is written out.
        is_priced: Whether times are estimated. Models without a time estimate are then rejected, and configurations
            must be built in or on this machine.
        adapters: Trained role -> adapters that are trained instead of its model.
        shares: Role -> role whose model it shares, without that role's adapters.
        train_vision: Trained parts that only images use.

    Raises:
        PlanError: for an unknown name; the message lists the nearest known ones. For parts to train that no trained
            role has.
        ConfigError: for a configuration of a model or of adapters that cannot be used.
    """
    adapters, shares = adapters or {}, shares or {}
    read: dict[tuple[str, Task, str | None], RoleMemory] = {}  # roles with the same model share one entry
    found: dict[str, RoleMemory] = {}
    trained = dataflow.trained_roles
    # A frozen role's description may be that of a trained one, but not the other way round.
    for role, source in sorted(sources.items(), key=lambda item: (item[0] in shares, item[0] not in trained)):
        key = (source, model_task(role), role if role in adapters else None)
        if role in shares:
            found[role] = replace(found[shares[role]], frozen_params=frozenset(), shares=shares[role])
            continue
        if key not in read:
            read[key] = _read_role(role, source, dataflow, is_priced, adapters.get(role), train_vision)
        found[role] = read[key]
    if train_vision != "none" and all(found[role].tower is None for role in trained):
        named = ", ".join(f"{role}={sources[role]}" for role in trained)
        raise PlanError(
            f"train_vision={train_vision!r} trains a part for images, and {named} reads none; leave it out, or name a "
            f"model that does"
        )
    return {role: found[role] for role in sources}


def _read_role(
    role: str, source: str, dataflow: Dataflow, is_priced: bool, peft: AdapterSource | None, train_vision: TrainVision
) -> RoleMemory:
    config, is_trained = _read_config(role, source, is_priced), role in dataflow.trained_roles
    described = Role(
        name=role, source=config, trained=is_trained, task=model_task(role), peft=peft, train_vision=train_vision
    )
    is_packed = any(call.kind != "generate" for call in dataflow.calls_of(role))
    replayed = replayed_roles(dataflow)
    memory = describe_roles([described], {}, packed=[role] if is_packed else [], replayed=replayed)[role]
    obstacle = _pricing_obstacle(config.get_text_config(), memory) if is_priced else None
    if obstacle is not None:
        raise PlanError(
            f"{role}={source!r} {obstacle}, so times cannot be estimated; plan with another model, or show memory "
            f"only with --check"
        )
    return memory


def _read_config(role: str, source: str, is_priced: bool) -> PreTrainedConfig:
    path = expand_home(Path(source))
    if path.exists():
        return _load_config(role, str(path), is_priced)
    if is_shape(source):
        return parse_shape(source)
    try:
        return find_known_model(source)
    except PlanError as error:
        if is_path(source) or source.endswith(".json"):
            raise PlanError(
                f"{role}={source!r}: there is no such folder or file in {Path.cwd()}; give one with a "
                f"config.json, a name as in Qwen/Qwen3-0.6B, or a shape as in layers=32,hidden=4096,..."
            ) from None
        try:
            return _load_config(role, source, is_priced)
        except ConfigError:
            raise PlanError(f"{role}: {error}, or its shape, as in layers=32,hidden=4096,...") from None


def _load_config(role: str, source: str, is_priced: bool) -> PreTrainedConfig:
    try:
        if is_path(source) or not is_priced:
            require_files(source, "config.json")
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, local_files_only=is_priced)
    except Exception as error:  # damaged files raise errors of any class
        raise ConfigError(
            f"{role}={source!r} has no configuration that transformers can read "
            f"({describe_load_error(source, error)}); give a folder with a config.json, a name as in Qwen/Qwen3-0.6B, "
            f"or a shape as in layers=32,hidden=4096,..."
        ) from None
    return config


def _pricing_obstacle(text: Any, role: RoleMemory) -> str | None:
    """Return the reason why a mixture of experts has no time estimate; None if there is none."""
    experts = declared_experts(text)
    if experts < 2 and role.model.ep_refusal is not None:  # some declare experts by names of their own
        return None
    if role.shape is None or role.shape.experts is None:
        return f"is a mixture of{f' {experts}' if experts else ''} experts and does not say how it uses them"
    attention: dict[int, set[str]] = {block: set() for block in range(role.model.num_blocks)}
    for param in role.model.params:
        if param.block is not None and "attn" in param.name:
            attention[param.block].add(param.name.partition(f".{param.block}.")[2])
    if len(set(map(frozenset, attention.values()))) > 1:
        return f"is a mixture of {experts} experts whose attention is not that of the Llama family in every block"
    return None
