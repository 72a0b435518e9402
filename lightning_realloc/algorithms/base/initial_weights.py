"""Compare the weights with which roles start: random ones, and those of a base under adapters."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import AutoConfig

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.runtime.model.adapter_layers import adapters_change_outputs
from lightning_realloc.runtime.model.quantized import quantized_layers


def random_stream(role: Role, roles: Iterable[Role]) -> int:
    """Return a number to add to the seed of a role's random weights, so that trained roles of one task differ.

    Other roles follow the one that they average, or that has the same source: a reference equals its actor.
    """
    trained = {other.name: other.source for other in roles if other.trained and other.task == role.task}
    same = (name for name, source in trained.items() if source is role.source)
    followed = role.name if role.trained else role.average_of or next(same, None)
    return list(trained).index(followed) if followed in trained else 0


def changes_base(role: Role) -> bool:
    """Return whether a role starts with adapters that change what its base computes."""
    if isinstance(role.source, nn.Module):
        return adapters_change_outputs(role.source)
    return isinstance(role.peft, str | Path)


def starts_at_base(role: Role) -> bool:
    """Return whether a role's base is a model to compare it with: whether its adapters change nothing at first.

    Adapters over 4-bit weights cannot be merged into a model of their own, so their base is, with a warning.
    """
    source, changes = role.source, changes_base(role)
    if isinstance(source, nn.Module):
        is_packed = bool(quantized_layers(source))
    else:
        is_folder = isinstance(source, str | Path)
        is_packed = changes and (role.quantization is not None or (is_folder and _is_packed(str(source))))
    if changes and is_packed:
        rank_zero_warn(
            f"the reference is the base of {role.name} without the adapters that it starts with, since 4-bit weights "
            f"take no merge; so KL is not 0 at first. For the start of this stage, merge the adapters into the "
            f"unquantized base and give that as reference"
        )
    return not changes or is_packed


@functools.lru_cache  # asked whenever roles are, and a name on the hub needs a request
def _is_packed(source: str) -> bool:
    try:
        return getattr(AutoConfig.from_pretrained(source), "quantization_config", None) is not None
    except Exception:  # damaged files raise errors of any class, which loading will word
        return False
