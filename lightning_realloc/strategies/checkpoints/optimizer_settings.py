"""Resume an optimizer's settings: those that were given again as before go on from the checkpoint, new ones apply.

Schedules and callbacks change a parameter group's settings during training. So each group also keeps the values it was
made with. A run that resumes compares them with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

_GIVEN = "given"
"""Entry of a parameter group with the values that it was made with."""
_NOT_SETTINGS = {"params", "name", "initial_lr", _GIVEN}


def record_given(optimizers: Iterable[Optimizer]) -> None:
    """Keep the settings that every parameter group was made with. Call it before the first step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            given = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
            group[_GIVEN] = given | {"lr": group.get("initial_lr", group["lr"])}  # schedules may have scaled it


def given_settings(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that a parameter group was made with; those of now before `record_given`."""
    given: Mapping[str, Any] = group.get(_GIVEN, group)
    return given


def stored_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's entry in ``meta.pt``: its class and its groups' settings, without per-parameter state."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "param_groups": groups}


def settings_by_role(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return role -> the entry of its optimizer in ``meta.pt``, which `stored_settings` wrote."""
    return {state["param_groups"][0]["name"]: state for state in meta.get("optimizer_states", ())}


def restore_settings(optimizer: Optimizer, stored: Sequence[Mapping[str, Any]], role: str) -> None:
    """Set the groups' settings to the stored ones, except those that are given another value than before.

    A new learning rate scales the scheduled one. Checkpoints of earlier versions do not hold the values that were
    given; all their settings apply.

    Args:
        optimizer: The new optimizer, after `record_given`.
        stored: Settings of each parameter group in the checkpoint.
        role: Role that it trains, for messages.
    """
    for group, saved in zip(optimizer.param_groups, stored, strict=True):
        given, before = group[_GIVEN], saved.get(_GIVEN, {})
        group.update(saved)
        group[_GIVEN] = given
        for key, value in given.items():
            if key not in before or before[key] == value:
                continue
            rank_zero_info(f"{role} resumes with {key}={value}, as given now, and not with {before[key]} as before")
            if key == "lr":
                group["lr"] = value if not before["lr"] else saved["lr"] * value / before["lr"]
                group |= {"initial_lr": value} if "initial_lr" in group else {}
            else:
                group[key] = value


def follow_given_rates(meta: Mapping[str, Any], optimizers: Iterable[Optimizer]) -> None:
    """Make stored schedules, which Lightning restores later, start from the learning rates that are given now.

    Args:
        meta: Lightning's part of the checkpoint. The states of its schedules are changed in place.
        optimizers: Optimizer of each schedule.
    """
    stored = settings_by_role(meta)
    for schedule, optimizer in zip(meta.get("lr_schedulers", ()), optimizers, strict=False):
        groups = optimizer.param_groups
        rates = [
            (saved.get(_GIVEN, group[_GIVEN])["lr"], group[_GIVEN]["lr"])
            for group, saved in zip(groups, stored[groups[0]["name"]]["param_groups"], strict=True)
        ]
        _replace_rates(schedule, rates)


def _replace_rates(schedule: dict[str, Any], rates: Sequence[tuple[float, float]]) -> None:
    base = schedule.get("base_lrs")
    if base is not None:  # schedules may have base rates of their own
        schedule["base_lrs"] = [new if one == old else one for one, (old, new) in zip(base, rates, strict=True)]
    for part in schedule.get("_schedulers", ()):
        _replace_rates(part, rates)
