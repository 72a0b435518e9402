"""Advantages of responses over the other responses to their prompt, by name. CONTRIBUTING.md says how to add one.

Shapes: B responses. ``rewards`` must hold whole groups. A reward of NaN is missing: it is excluded from its group, and
its advantage is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Samples
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.rewards.signatures import check_takes, resolved

AdvantageRule = Callable[[Samples], Any]
"""Function of samples with their ``rewards``, in whole groups, that returns (B,) advantages, or one per response token
as ``Ragged``. NaN excludes a response. (Any: a YAML file could give no object, if the type named a class.)"""


def group_advantages(rewards: Tensor, groups: Tensor, *, std_eps: float | None = 1e-4) -> Tensor:
    """Return the (B,) advantages over the group: ``(r - mean) / (std + std_eps)``.

    The standard deviation is unbiased, zero in a group of one.

    Args:
        rewards: (B,) rewards.
        groups: (B,) integers, equal for responses to the same prompt.
        std_eps: Added to the standard deviation; None returns ``r - mean``.

    Source: Shao et al., arXiv:2402.03300, §4.1.2; without the deviation: Liu et al., arXiv:2503.20783, eq. 3.
    """
    centred, counts, index = _centred(rewards, groups)
    if std_eps is None:
        return centred
    exact = centred.nan_to_num().double()  # squares of rewards beyond 1e19 overflow float32
    squares = exact.new_zeros(len(counts)).index_add_(0, index, exact.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    return (centred / (std[index] + std_eps)).to(rewards)


def leave_one_out_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return each of the (B,) rewards less the mean of the others in its group: ``n / (n - 1) * (r - mean)``.

    It is zero in a group of one.

    Source: Ahmadian et al., arXiv:2402.14740; Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019.
    """
    centred, counts, index = _centred(rewards, groups)
    return centred * (counts / (counts - 1).clamp(min=1))[index]


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards less their group's mean, the number of rewards per group, and each sample's group index."""
    members, index = torch.unique(groups.to(rewards.device), return_inverse=True)
    there = ~rewards.isnan()
    counts = rewards.new_zeros(members.shape[0]).index_add_(0, index, there.to(rewards))
    sums = counts.new_zeros(members.shape[0], dtype=torch.float64).index_add_(0, index, rewards.nan_to_num().double())
    return rewards - (sums / counts).to(rewards)[index], counts, index


ADVANTAGES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": group_advantages,
    "group_mean": partial(group_advantages, std_eps=None),
    "leave_one_out": leave_one_out_advantages,
}
"""Name for ``advantages=`` -> function of (B,) rewards and (B,) groups."""


def resolve_advantages(given: str | AdvantageRule) -> AdvantageRule:
    """Return the rule of a name, a function or an import path.

    Raises:
        ConfigError: for another name, and for a function that cannot be imported or takes other arguments.
    """
    if isinstance(given, str) and given in ADVANTAGES:
        return partial(_of_groups, ADVANTAGES[given])
    if given == "gae":
        raise ConfigError("advantages='gae' compares with the values of a critic; use PPO, which has one")
    if callable(given) or (isinstance(given, str) and not given.isidentifier()):
        rule = resolved(given, what="advantages", error=ConfigError)
        way_out = "write one that reads samples.tensor('rewards') and samples.tensor('prompt_id')"
        check_takes(rule, "samples", what="advantages:", way_out=way_out, error=ConfigError)
        return rule
    raise ConfigError(
        f"advantages={given!r} must be one of {', '.join(ADVANTAGES)}, a function of samples, or its import path"
    )


def _of_groups(rule: Callable[[Tensor, Tensor], Tensor], samples: Samples) -> Tensor:
    return rule(samples.tensor("rewards"), samples.tensor("prompt_id"))


def require_shape(method: str, made: object, like: Tensor, unit: str, otherwise: str = "") -> Tensor:
    """Return the values that a subclass's method or a rule made, whole numbers as those of ``like``.

    Raises:
        PlanError: unless there is one for each of ``like``. ``otherwise`` is what else the message allows.
    """
    if not isinstance(made, Tensor) or made.shape != like.shape:
        found = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        allowed = f"a tensor of one value per {unit}, of shape {tuple(like.shape)}{otherwise}"
        raise PlanError(f"{method} must return {allowed}; it returned {found}")
    return made if made.is_floating_point() else made.to(like.dtype)
