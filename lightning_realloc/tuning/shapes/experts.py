"""What stands in an MLP's place in a mixture of experts, and how many experts do a few tokens reach? Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec, ParamSpec

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configurations call the number of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A router sends every token to a few of many MLPs, which are alike."""

    count: int
    """E, those that tokens are divided between."""
    per_token: int
    """K, to how many of them one token goes."""
    features: int
    """Inside one of them."""
    shared_features: int = 0
    """Inside those that every token goes through."""
    num_dense_blocks: int = 0
    """Blocks that have an MLP instead."""
    are_cut: bool = False
    """Whether tensor parallelism divides their features; else every one of its ranks computes all of them."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise PlanError(
                f"experts_per_token={self.per_token} must lie between 1 and experts={self.count}; see the config"
            )
        for name, least in (("features", 1), ("shared_features", 0), ("num_dense_blocks", 0)):
            if getattr(self, name) < least:
                raise PlanError(f"{name}={getattr(self, name)} of experts must be at least {least}; see the config")

    @classmethod
    def read(cls, config: Any, model: ModelSpec) -> Experts | None:
        """Read a Hugging Face config; which blocks have experts is seen in their parameters.

        None for a model without experts, and for one whose config does not say how many a token goes to.
        """
        count, per_token = declared_experts(config), _first(config, "num_experts_per_tok")
        features = _first(config, "moe_intermediate_size", "intermediate_size")
        params = [param for param in model.params if _is_of_expert(param, count)]
        if not params or per_token is None or features is None or not 1 <= per_token <= count:
            return None
        shared = _first(config, "shared_expert_intermediate_size")
        return cls(
            count=count,
            per_token=per_token,
            features=features,
            shared_features=features * (_first(config, "n_shared_experts") or 0) if shared is None else shared,
            num_dense_blocks=model.num_blocks - len({param.block for param in params}),
            are_cut=any(param.tp is not None for param in params),
        )

    def of_one(self, tp: int) -> float:
        """Return the features of one expert on one of ``tp`` ranks."""
        return self.features / (tp if self.are_cut else 1)

    def of_shared(self, tp: int) -> float:
        """Return the features of shared experts on one of ``tp`` ranks."""
        return self.shared_features / (tp if self.are_cut else 1)

    def per_block(self, num_blocks: int, mixture: float, dense: float) -> float:
        """Return the mean over a model's blocks of something that those with experts and those with an MLP take."""
        return (self.num_dense_blocks * dense + (num_blocks - self.num_dense_blocks) * mixture) / num_blocks

    def reached(self, tokens: float) -> float:
        """Return how many experts get one of ``tokens`` tokens at least, as a mean over routers without favourites."""
        missed: float = (1 - self.per_token / self.count) ** tokens
        return self.count * (1 - missed)


def declared_experts(config: Any) -> int:
    """Return the number of experts of a Hugging Face config, 0 where it has none."""
    return _first(config, *COUNTS) or 0


def _is_of_expert(param: ParamSpec, count: int) -> bool:
    """Experts are listed, or lie behind each other in one parameter."""
    stacked = len(param.shape) == 3 and param.shape[0] == count
    return param.section == "block" and (stacked or ".experts." in param.name)


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
