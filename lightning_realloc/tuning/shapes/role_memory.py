"""Describe one role for the estimates: its parameters, its shape, which of them are frozen, whose weights it shares."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.tuning.shapes.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """What the memory of one role depends on, besides the plan."""

    model: ModelSpec
    shape: ModelShape | None = None
    """None: unknown, as of a module without a config; activations and caches are then left out."""
    frozen_params: frozenset[str] = frozenset()
    """Parameters without gradients in a role that is trained, as under adapters."""
    follows: str | None = None
    """The trained role whose weights this one's move towards; it keeps them as exactly as a trained one."""
    shares: str | None = None
    """The role whose replicas this one's calls work on: it keeps none."""

    @property
    def num_frozen(self) -> int:
        """Elements of ``frozen_params``."""
        return sum(param.numel for param in self.model.params if param.name in self.frozen_params)

    @property
    def divides_logits(self) -> bool:
        """Whether tensor parallelism cuts the head by tokens, so that each rank makes a share of the logits."""
        if self.shape is None or self.shape.num_outputs == 1:
            return False
        by_token = [param for param in self.model.params if param.shape[:-1] == (self.shape.num_outputs,)]
        owners = {owner for _, owner in self.model.aliases}
        heads = [param for param in by_token if param.section == "output" or param.name in owners]
        return any(head.tp is not None and head.tp.dim == 0 for head in heads)


def is_adapted(param: ParamSpec) -> bool:
    """Return whether adapters are trained beside a weight, of which generation makes a merged copy then."""
    return param.name.endswith(".base_layer.weight")
