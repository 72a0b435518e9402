"""Build the drafter that `Speculation` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from lightning_realloc.generation.core.model_config import check_loaded
from lightning_realloc.generation.speculative.config import DrafterName, Speculation
from lightning_realloc.generation.speculative.draft_distillation import Distillation
from lightning_realloc.generation.speculative.draft_model import BlocksDrafter, ModelDrafter, load_draft_model
from lightning_realloc.generation.speculative.drafter import Drafter
from lightning_realloc.generation.speculative.lookup import HistoryDrafter, NgramDrafter

_MODEL_FREE: dict[DrafterName, type[Drafter]] = {"none": Drafter, "ngram": NgramDrafter, "history": HistoryDrafter}
"""Drafters that take no arguments, by the name that `Speculation` gives them."""


def build_drafter(
    speculation: Speculation, target: nn.Module, *, spread: Callable[[Sequence[Tensor]], None] | None = None
) -> Drafter:
    """Return the drafter that ``speculation`` names, for this target.

    ``spread`` copies one rank's values of some tensors, in place, to all ranks that share the target.

    Raises:
        GenerationError: for a draft model that cannot be loaded or does not fit the target.
    """
    if speculation.drafter == "model":
        rate = speculation.draft_learning_rate
        # Steps of learning are too small for the precision that a target may generate in.
        dtype = next(target.parameters()).dtype if rate is None else torch.float32
        source = speculation.draft_model
        assert source is not None, "Speculation checks that drafter='model' has a draft_model"
        with torch.inference_mode(False):  # a model of inference tensors could never learn
            model = deepcopy(source) if isinstance(source, nn.Module) else load_draft_model(source)
            check_loaded(model)
            model.to(next(target.parameters()).device, dtype).eval().requires_grad_(False)
        distillation = None if rate is None else Distillation(model, learning_rate=rate, spread=spread)
        return ModelDrafter(model, target, distillation=distillation)
    if speculation.drafter == "blocks":
        return BlocksDrafter(target, int(speculation.draft_blocks or 0))
    return _MODEL_FREE[speculation.drafter]()
