"""Which drafter does a user's choice name?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.forward.attention import check_loaded
from lightning_realloc.generation.speculative.config import Speculation
from lightning_realloc.generation.speculative.draft_distillation import Distillation
from lightning_realloc.generation.speculative.draft_model import BlocksDrafter, ModelDrafter
from lightning_realloc.generation.speculative.drafting import Drafter, HistoryDrafter, NgramDrafter, NoDrafts


def build_drafter(
    speculation: Speculation, target: nn.Module, *, spread: Callable[[Sequence[Tensor]], None] | None = None
) -> Drafter:
    """Return the drafter that ``speculation`` names, for this target.

    ``spread`` gives all ranks that share the target one rank's values of some tensors, in place.

    Raises:
        GenerationError: for a draft model that cannot be loaded or does not fit the target.
    """
    if speculation.drafter == "model":
        rate = speculation.draft_learning_rate
        # Steps of learning are too small for the precision that a target may generate in.
        dtype = next(target.parameters()).dtype if rate is None else torch.float32
        source = speculation.draft_model
        assert source is not None, "drafter='model' needs one, which Speculation checks"
        with torch.inference_mode(False):  # a model of inference tensors could never learn
            model = deepcopy(source) if isinstance(source, nn.Module) else _load(source)
            check_loaded(model)
            model.to(next(target.parameters()).device, dtype).eval().requires_grad_(False)
        distillation = None if rate is None else Distillation(model, learning_rate=rate, spread=spread)
        return ModelDrafter(model, target, distillation=distillation)
    if speculation.drafter == "blocks":
        return BlocksDrafter(target, int(speculation.draft_blocks or 0))
    lookups: dict[str, type[Drafter]] = {"none": NoDrafts, "ngram": NgramDrafter, "history": HistoryDrafter}
    return lookups[speculation.drafter]()


def describe_draft_model(source: str | Path | nn.Module) -> nn.Module:
    """Return a draft model as far as its shapes go: on the meta device, from its configuration alone.

    One that is loaded already is returned as it is.

    Raises:
        GenerationError: for a configuration that cannot be read.
    """
    if isinstance(source, nn.Module):
        return source
    name = _name_or_folder(source)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _not_loaded(name, error) from error
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def _load(source: str | Path) -> nn.Module:
    name = _name_or_folder(source)
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise _not_loaded(name, error) from error
    return model


def _name_or_folder(source: str | Path) -> str:
    """Return what Transformers are to load; refuse what is written as a folder and is none: they would ask the hub."""
    name = str(Path(source).expanduser()) if str(source).startswith("~") else str(source)
    # A name of the hub has one slash at most.
    if (name.startswith((".", "/")) or name.count("/") > 1) and not Path(name).is_dir():
        raise GenerationError(
            f"draft_model={name!r}: there is no such folder; give a Hugging Face name, a folder with config.json and "
            f"weights, or the model itself"
        )
    return name


def _not_loaded(name: str, error: Exception) -> GenerationError:
    return GenerationError(
        f"draft_model={name!r} could not be loaded ({error}); give a Hugging Face name, a folder with config.json and "
        f"weights, or the model itself"
    )
