"""Which drafter does a user's choice name?"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.draft_model import ModelDrafter, first_blocks
from lightning_realloc.generation.drafting import Drafter, HistoryDrafter, NgramDrafter
from lightning_realloc.generation.speculation import Speculation


def build_drafter(speculation: Speculation, target: nn.Module) -> Drafter:
    """Return the drafter that ``speculation`` names, for this target.

    Raises:
        GenerationError: for a draft model that cannot be loaded or does not fit the target.
    """
    if speculation.drafter == "model":
        return ModelDrafter(_load(str(speculation.draft_model), target), target)
    if speculation.drafter == "blocks":
        return ModelDrafter(first_blocks(target, int(speculation.draft_blocks or 0)), target)
    lookups: dict[str, type[Drafter]] = {"none": Drafter, "ngram": NgramDrafter, "history": HistoryDrafter}
    return lookups[speculation.drafter]()


def _load(name: str, target: nn.Module) -> nn.Module:
    like = next(target.parameters())
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=like.dtype)
    except (OSError, ValueError) as error:
        raise GenerationError(
            f"draft_model={name!r} could not be loaded ({error}); give a Hugging Face name, or a folder with "
            f"config.json and weights"
        ) from error
    moved: nn.Module = model.to(like.device).eval().requires_grad_(False)
    return moved
