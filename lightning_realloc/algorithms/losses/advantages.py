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

from lightning_realloc.algorithms.losses.functional import kept_tokens, spread_tokens, turn_ends
from lightning_realloc.batch.samples import Ragged, Samples
from lightning_realloc.environments.columns import TURN_REWARDS
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


def turn_advantages(samples: Samples, *, std_eps: float = 1e-4) -> Ragged:
    """Return the advantage of every response token: the sum of the standardized rewards of its turn and later ones.

    A turn's reward is its environment's; the last one's also has the rest of the response's reward. Each is compared
    with those of all turns of the group: ``(r - mean) / (std + std_eps)``. Tokens of the environment get zero.

    Source: Shao et al., arXiv:2402.03300, §4.1.3, with turns as steps.
    """
    rewards, responses = samples.tensor("rewards").cpu(), samples.ragged("response_ids")
    whole = Ragged(torch.ones(responses.num_tokens, dtype=torch.bool), responses.lengths)
    mask = samples.ragged("model_mask").to("cpu") if "model_mask" in samples else whole
    ends = turn_ends(mask)
    empty: list[Tensor] = [rewards.new_zeros(0)] * len(samples)
    given = samples.ragged(TURN_REWARDS).split() if TURN_REWARDS in samples else empty
    rows = zip(rewards, given, ends.lengths.tolist(), strict=True)
    of_turns = [_by_turn(total, own.to(rewards), count) for total, own, count in rows]
    groups = torch.repeat_interleave(samples.tensor("prompt_id").cpu(), ends.lengths)
    compared = Ragged(group_advantages(torch.cat(of_turns), groups, std_eps=std_eps), ends.lengths)
    sums = [row.flip(0).cumsum(0).flip(0) for row in compared.split()]
    lengths = torch.diff(ends.values, prepend=torch.tensor([-1]))  # tokens of each turn
    kept = kept_tokens(Ragged(torch.zeros(mask.num_tokens), mask.lengths), mask)
    return spread_tokens(Ragged(torch.repeat_interleave(torch.cat(sums), lengths), kept.lengths), mask)


def _by_turn(total: Tensor, own: Tensor, count: int) -> Tensor:
    """Return the (count,) rewards of a response's turns, which add up to its total; NaN if that is missing."""
    rewards = total.new_zeros(count)
    rewards[: len(own)] = own[:count]
    if count:
        rewards[-1] += total - rewards.sum()
    return rewards.masked_fill(total.isnan(), torch.nan)


def each_reward_advantages(samples: Samples, *, weights: Mapping[str, float], std_eps: float = 1e-4) -> Tensor:
    """Return the (B,) advantages of which each reward is standardized by itself, so that none drowns in the others.

    The standardized rewards of functions and models are added with their ``weights``; the sums are standardized over
    the batch. What ``rewards`` hold besides, such as a penalty for truncated responses, is one more reward.

    Source: Liu et al., arXiv:2601.05242 (GDPO), eq. 4 to 6.
    """
    total, groups = samples.tensor("rewards"), samples.tensor("prompt_id")
    names = [name for name in samples.columns if name.startswith("reward/")]
    each = {name: samples.tensor(name).to(total).masked_fill(total.isnan(), torch.nan) for name in names}
    factors = {name: weights.get(name.removeprefix("reward/"), 1.0) for name in names}
    rest = total - sum((factors[name] * values.nan_to_num() for name, values in each.items()), torch.zeros_like(total))
    if not names or bool((rest.nan_to_num().abs() > 1e-6 * total.nan_to_num().abs().clamp(min=1.0)).any()):
        each["rest"], factors["rest"] = rest, 1.0
    parts = (factors[name] * group_advantages(values, groups, std_eps=std_eps) for name, values in each.items())
    sums = sum((part.nan_to_num() for part in parts), torch.zeros_like(total)).masked_fill(total.isnan(), torch.nan)
    return group_advantages(sums, torch.zeros_like(groups), std_eps=std_eps)


def _of_groups(rule: Callable[[Tensor, Tensor], Tensor], samples: Samples) -> Tensor:
    return rule(samples.tensor("rewards"), samples.tensor("prompt_id"))


ADVANTAGES: Mapping[str, AdvantageRule] = {
    "group": partial(_of_groups, group_advantages),
    "group_each": partial(each_reward_advantages, weights={}),
    "group_mean": partial(_of_groups, partial(group_advantages, std_eps=None)),
    "group_turns": turn_advantages,
    "leave_one_out": partial(_of_groups, leave_one_out_advantages),
}
"""Rules by their names for ``advantages=``."""


def resolve_advantages(given: str | AdvantageRule) -> AdvantageRule:
    """Return the rule of a name, a function or an import path.

    Raises:
        ConfigError: for another name, and for a function that cannot be imported or takes other arguments.
    """
    if isinstance(given, str) and given in ADVANTAGES:
        return ADVANTAGES[given]
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
