"""Describe a role for the estimates: parameters, shape, frozen parameters, and the role whose weights it shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_realloc.layout.model import ModelSpec, ParamSpec
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt, is_of_tower, vision_params
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.tower import Tower, VisionPart


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Properties of a role that its memory depends on, apart from the plan."""

    model: ModelSpec
    shape: ModelShape | None = None
    """Sizes of the decoder; None for a module without a config, whose activations and caches are then left out."""
    tower: Tower | None = None
    """Tower that reads images; None for a model of text."""
    frozen_params: frozenset[str] = frozenset()
    """Names of the parameters of a trained role that have no gradient, as under adapters."""
    quantized_bytes: int = 0
    """Bytes of 4-bit weights, which are no parameters of ``model``; every rank holds them once, in any layout."""
    average_of: str | None = None
    """The trained role whose weights this role averages, with the precision of trained weights; None: no averaging."""
    deferred: bool = True
    """Whether weights are out of memory until they are divided: in files, or random. Those of modules are not."""
    can_recompute: bool = True
    """Whether the model can recompute activations in the backward pass."""
    shares: str | None = None
    """The role whose replicas this role's calls use, since it has none of its own; None: it has its own."""
    divides_logits: bool = field(init=False, repr=False, compare=False)
    """Whether tensor parallelism cuts the head by vocabulary, so that each rank computes a part of the logits."""
    trained_vision: VisionPart = field(init=False, repr=False, compare=False)
    """First part that only images use and that has gradients if the role is trained."""
    num_trained_vision: int = field(init=False, repr=False, compare=False)
    """Elements of tower and projector that have gradients if the role is trained."""
    trained_vision_share: float = field(init=False, repr=False, compare=False)
    """Fraction of the elements of tower and projector that these are."""

    def __post_init__(self) -> None:  # forecasts read these for every rank
        vision = () if self.tower is None else vision_params(self.model)
        trained = [param for param in vision if param.name not in self.frozen_params]
        part = None if not trained else "tower" if any(map(is_of_tower, trained)) else "projector"
        num_trained, num_vision = (sum(param.numel for param in params) for params in (trained, vision))
        object.__setattr__(self, "trained_vision", part)
        object.__setattr__(self, "num_trained_vision", num_trained)
        object.__setattr__(self, "trained_vision_share", num_trained / max(1, num_vision))
        object.__setattr__(self, "divides_logits", self._cuts_vocabulary())

    def with_images(self, images: ImagesPerPrompt | None, sequence_tokens: float, *, is_trained: bool) -> RoleMemory:
        """Return the role with pipeline stages that count the passes of its tower as work of the first one.

        Args:
            images: Images of each sequence's prompt; None: the tower does not run.
            sequence_tokens: Tokens of a sequence.
            is_trained: Whether stages are balanced for training, where frozen parts have no backward pass.
        """
        if self.tower is None or images is None:
            return self
        text, vision = 1.0, 1.0
        if is_trained:
            text += 1 + self.trained_share
            vision += 1 + self.trained_vision_share if self.trained_vision == "tower" else 0
        cost = round(self.tower.pass_products(images) / sequence_tokens * vision / text)
        return replace(self, model=replace(self.model, costs=(cost, *self.model.costs[1:])))

    @property
    def num_frozen(self) -> int:
        """Number of elements of ``frozen_params``."""
        return sum(param.numel for param in self.model.params if param.name in self.frozen_params)

    @property
    def trained_share(self) -> float:
        """Fraction of the elements outside of a tower that have gradients."""
        vision = () if self.tower is None else vision_params(self.model)
        of_text = self.model.num_elements - sum(param.numel for param in vision)
        frozen = self.num_frozen - sum(param.numel for param in vision if param.name in self.frozen_params)
        return 1 - frozen / of_text

    def _cuts_vocabulary(self) -> bool:
        if self.shape is None or self.shape.num_outputs == 1:
            return False
        by_token = [param for param in self.model.params if param.shape[:-1] == (self.shape.num_outputs,)]
        heads = [param for param in by_token if param.section in ("output", "ends")]
        return any(head.tensor_cut is not None and head.tensor_cut.dim == 0 for head in heads)


def sharers_of(roles: Mapping[str, RoleMemory]) -> dict[str, str]:
    """Return role without weights of its own -> the role whose replicas its calls use."""
    return {name: role.shares for name, role in roles.items() if role.shares is not None}


def is_adapted(param: ParamSpec) -> bool:
    """Return whether a weight has adapters, so that generation makes a merged copy of it."""
    module, _, own = param.name.rpartition(".")
    return module.endswith(".base_layer") and (own == "weight" or len(param.shape) > 2)  # of experts
