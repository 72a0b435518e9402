"""Sizes of a mixture of experts, and the expected number of experts that some tokens reach. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.limits import EXPERT_COUNT_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Equal MLPs, of which a router sends every token to a few."""

    count: int
    """Number of routed experts."""
    per_token: int
    """Number of experts that each token is routed to."""
    features: int
    """Intermediate features of one expert."""
    shared_features: int = 0
    """Intermediate features of the shared experts, which process every token; 0 without shared experts."""
    num_dense_blocks: int = 0
    """Number of blocks with an MLP in place of experts."""
    are_cut: bool = False
    """Whether tensor parallelism divides the experts' features; if not, each of its ranks computes all of them."""
    is_balanced: bool = False
    """Whether training adds a loss that balances them, for which a step's tokens are counted before its gradients."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise PlanError(
                f"experts_per_token={self.per_token} must lie between 1 and experts={self.count}; see the config"
            )
        for name, least in (("features", 1), ("shared_features", 0), ("num_dense_blocks", 0)):
            if getattr(self, name) < least:
                raise PlanError(f"{name}={getattr(self, name)} of experts must be at least {least}; see the config")

    @classmethod
    def from_config(cls, config: Any, model: ModelSpec) -> Experts | None:
        """Read a Hugging Face config, and find the blocks with experts by their parameters.

        Returns:
            None for a model without experts, and for a config without the number of experts per token.
        """
        count, per_token = declared_experts(config), read_size(config, "num_experts_per_tok")
        features = read_size(config, "moe_intermediate_size", "intermediate_size")
        params = [param for param in model.params if _is_expert_param(param, count)]
        if not params or per_token is None or features is None or not 1 <= per_token <= count:
            return None
        shared = read_size(config, "shared_expert_intermediate_size")
        return cls(
            count=count,
            per_token=per_token,
            features=features,
            shared_features=features * (read_size(config, "n_shared_experts") or 0) if shared is None else shared,
            num_dense_blocks=model.num_blocks - len({param.block for param in params}),
            are_cut=any(param.tensor_cut is not None for param in params),
            is_balanced=bool(
                getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0)
            ),
        )

    def features_on(self, tp: int) -> float:
        """Return the features of one expert on each of ``tp`` ranks."""
        return self.features / (tp if self.are_cut else 1)

    def shared_features_on(self, tp: int) -> float:
        """Return the features of the shared experts on each of ``tp`` ranks."""
        return self.shared_features / (tp if self.are_cut else 1)

    def mean_over_blocks(self, num_blocks: int, mixture: float, dense: float) -> float:
        """Return a cost's mean over blocks, given its value in blocks with experts and in blocks with an MLP."""
        return (self.num_dense_blocks * dense + (num_blocks - self.num_dense_blocks) * mixture) / num_blocks

    def num_reached(self, tokens: float) -> float:
        """Return the expected number of experts that get at least one of ``tokens`` tokens, under uniform routing."""
        missed: float = (1 - self.per_token / self.count) ** tokens
        return self.count * (1 - missed)


def declared_experts(config: Any) -> int:
    """Return the number of experts of a Hugging Face config; 0 without experts."""
    return read_size(config, *EXPERT_COUNT_KEYS) or 0


def _is_expert_param(param: ParamSpec, count: int) -> bool:
    """Whether a parameter belongs to experts, which are listed or stacked in one parameter."""
    stacked = len(param.shape) == 3 and param.shape[0] == count
    return param.section == "block" and (stacked or ".experts." in param.name)


def read_size(config: Any, *names: str) -> int | None:
    """Return the first of these attributes of a Hugging Face config that is an int; None without one."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
