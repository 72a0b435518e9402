"""Sources of a role's weights, and checks of what was loaded from them."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from lightning_realloc.callbacks.run_log import can_draw_bars
from lightning_realloc.errors import ConfigError, ReallocError, describe_error
from lightning_realloc.remote_path import expand_home
from lightning_realloc.rewards.named import NAMED_REWARDS
from lightning_realloc.runtime.model.adapter_layers import record_adapters
from lightning_realloc.runtime.model.batching_limits import attends_to_later_tokens
from lightning_realloc.runtime.model.mapped_weights import is_mapped
from lightning_realloc.runtime.model.structure import copy_without_weights

ModelSource = str | Path | PreTrainedConfig | nn.Module
"""A Hugging Face name or folder, a config (random weights), or a module."""
_LOADER = logging.getLogger("transformers.modeling_utils")
_MOST_NAMED = 4
"""Number of weights that an error names; it counts the others."""


def is_model_source(source: object) -> TypeGuard[ModelSource]:
    """Return whether ``source`` names or is a model; the alternative is a reward function.

    Text with a colon, or with dots and no slash, is a function's import path, unless such a folder exists. The short
    names of `lightning_realloc.rewards.named` are functions.
    """
    if isinstance(source, str):
        if source in NAMED_REWARDS:
            return False
        is_path = os.path.exists(expand_home(source)) or "/" in source  # False for a name that is too long
        return is_path or not (":" in source or "." in source)
    return isinstance(source, nn.Module | PreTrainedConfig | Path)


def check_source(role: str, source: object, *, way_out: str = "") -> None:
    """Raise ConfigError, with a further ``way_out``, for anything but a name, folder, config or module."""
    if not isinstance(source, str | Path | PreTrainedConfig | nn.Module):
        kind = "function" if inspect.isroutine(source) else type(source).__name__
        raise ConfigError(
            f"{role} is a {kind}; give a model: a Hugging Face name or folder, a config, or a module{way_out}"
        )


def known_sources(role: str, *, trained: bool) -> str:
    """Return the sources that a role may have, for the ends of messages."""
    is_reward = role.startswith("reward") and not trained
    return "give a Hugging Face name, or a folder with config.json and weights" + (
        ", or a reward function as module:function, without a slash" if is_reward else ""
    )


def without_weights(source: ModelSource) -> ModelSource:
    """Return a source of the same model; a module becomes a copy whose parameters have no storage."""
    if not isinstance(source, nn.Module) or is_empty(source):
        return source
    empty = copy_without_weights(source)
    record_adapters(empty, source)
    return empty


def is_empty(module: nn.Module) -> bool:
    """Return whether a module lies on the meta device, without weights."""
    return any(parameter.is_meta for parameter in module.parameters())


def require_shapes(where: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raise ConfigError for the first weight of another shape than in the config.

    Args:
        where: Role and source, for the message.
        mismatched: Name, shape in the file, and shape in the model.
    """
    for name, in_file, in_model in sorted(mismatched):
        raise ConfigError(
            f"{where} holds {name} with the shape {list(in_file)}, and its config.json (for a classifier: one label) "
            f"asks for {list(in_model)}; give the config that it was saved with"
        )


def require_complete(where: str, missing: list[str]) -> None:
    """Raise ConfigError for weights that the file lacks."""
    if missing:
        raise ConfigError(
            f"{where} has no weights for {_listed(missing)}, which would be random; give the complete model, or set "
            f"allow_missing=True"
        )


def require_known(where: str, unused: list[str]) -> None:
    """Raise ConfigError for weights that the model has no place for."""
    if unused:
        raise ConfigError(
            f"{where} has weights that its config.json has no place for: {_listed(unused)}; give the config that they "
            f"were saved with, or set allow_missing=True to leave them out"
        )


def require_output(where: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Raise ConfigError for a language model whose file lacks weights of the head."""
    head = model.get_output_embeddings()
    outputs = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    if random := sorted(name for name in missing if name.startswith(outputs)):
        raise ConfigError(
            f"{where} brings no weights for {', '.join(random)}, and random ones say nothing; give a model that was "
            f"saved as {type(model).__name__}, no classifier and no bare backbone"
        )


def require_decoder(role: str, model: nn.Module) -> None:
    """Raise ConfigError for a language model with an encoder's attention."""
    if attends_to_later_tokens(model):
        raise ConfigError(
            f"{role} is a {type(model).__name__} whose tokens attend to later ones, as in an encoder, so it would read "
            f"the tokens that it predicts; give a decoder such as Llama, or set is_decoder=True in its config"
        )


@contextmanager
def naming_errors(role: str, config: PreTrainedConfig) -> Iterator[None]:
    """Raise ConfigError in place of errors with which transformers fails to make a model from a configuration."""
    try:
        yield
    except ReallocError:
        raise
    except Exception as error:  # sizes that are missing or contradict each other raise errors of any class
        raise ConfigError(
            f"{role}: transformers makes no model of the family {config.model_type!r} from its configuration "
            f"({describe_error(error)}); compare config.json with that of a published model of this family"
        ) from error


def require_head(role: str, kind: str, missing: list[str]) -> None:
    """Raise ConfigError for a classifier that is not trained, of the class ``kind``, whose file lacks its head."""
    if missing:
        raise ConfigError(
            f"{role} is not trained here and brings no weights for {', '.join(missing)}: random ones say nothing; give "
            f"a model that was saved as {kind} with num_labels=1"
        )


@contextmanager
def loading_progress(where: str, *, reports: bool) -> Iterator[None]:
    """Let rank 0 alone draw transformers' bars for downloads and weights, since all ranks load at the same time.

    Where no bar can be drawn, such as in a job's log, rank 0 logs a line.

    Args:
        where: The model, in that line.
        reports: Let rank 0 log transformers' table of missing and unexpected weights. Without it, the caller refuses
            those that matter, by name; a critic's table would list its new head alone.
    """
    is_drawn = can_draw_bars(sys.stderr)  # where transformers draws
    is_first = getattr(rank_zero_only, "rank", 0) == 0
    silences = is_progress_bar_enabled() and not (is_first and is_drawn)
    if not is_drawn:
        rank_zero_info(f"{where}: loading weights")
    if silences:
        disable_progress_bar()
    if not (reports and is_first):
        _LOADER.addFilter(_is_no_report)
    try:
        yield
    finally:
        _LOADER.removeFilter(_is_no_report)
        if silences:
            enable_progress_bar()


def _is_no_report(record: logging.LogRecord) -> bool:
    """Keep the table of an error of conversion, which the error refers to."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or "CONVERSION" in text


def log_whole(where: str, model: nn.Module, missing: Collection[str]) -> None:
    """Log the bytes of weights from files that are in memory, whole on every rank until they are divided."""
    whole = [p for name, p in model.named_parameters() if name not in missing and not (p.is_meta or is_mapped(p))]
    if whole:
        rank_zero_info(
            f"{where}: every rank holds {len(whole)} of its weights ({sum(p.nbytes for p in whole) / 2**30:.2f} GiB) "
            f"whole before it divides them, since loading computes them or cannot map their files; files that "
            f"save_pretrained writes can be mapped"
        )


def _listed(names: list[str]) -> str:
    further = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {further} more" if further > 0 else "")
