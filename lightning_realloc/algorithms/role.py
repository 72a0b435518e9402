"""A role is one model of an algorithm: where its weights come from, what head it has, whether it is trained."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)

from lightning_realloc.errors import ConfigError

ModelSource = str | Path | PreTrainedConfig | nn.Module
"""A Hugging Face name or folder, a config (random weights), or a module that is already built."""

Task = Literal["causal_lm", "sequence_classification", "token_classification"]

_AUTO_CLASSES = {
    "causal_lm": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One model of an algorithm."""

    name: str
    """``actor``, ``critic``, ``reference``, ``reward``, or any name."""
    source: ModelSource
    """Where the weights come from."""
    trained: bool
    """Whether an optimizer changes them."""
    task: Task = "causal_lm"
    """The head: next-token logits, or one score per sequence or token."""

    def config(self) -> PreTrainedConfig | None:
        """Return the model's configuration, None for a module without one."""
        if isinstance(self.source, PreTrainedConfig):
            return self.source
        if isinstance(self.source, nn.Module):
            config = getattr(self.source, "config", None)
            return config if isinstance(config, PreTrainedConfig) else None
        try:
            config = AutoConfig.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            raise self._not_loaded(error) from error
        assert isinstance(config, PreTrainedConfig)
        return config

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | Path):
            return
        # A name on the hub has at most one slash; anything else is meant as a folder, and is missed here, not later.
        text = str(self.source)
        is_path = isinstance(self.source, Path) or text.count("/") > 1 or text.startswith((".", "/", "~"))
        if is_path and not Path(text).expanduser().exists():
            raise ConfigError(
                f"{self.name}={text!r}: there is no such folder in {Path.cwd()}; "
                f"give a Hugging Face name, or a folder with config.json and weights"
            )

    def build(self, *, seed: int) -> nn.Module:
        """Return the model with its full weights, in float32, the same on every rank.

        A module is copied, so that two roles may name the same one. Random weights depend on ``seed`` alone.
        """
        if isinstance(self.source, nn.Module):
            return copy.deepcopy(self.source).train().requires_grad_(self.trained)
        auto = _AUTO_CLASSES[self.task]
        options = {} if self.task == "causal_lm" else {"num_labels": 1}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if isinstance(self.source, PreTrainedConfig):
                model = auto.from_config(self.source, dtype=torch.float32, **options)  # type: ignore[no-untyped-call]
            else:
                model = self._load(auto, options)
        # Lightning warns of modules in eval mode; every call chooses its own mode.
        return model.train().requires_grad_(self.trained)  # type: ignore[no-any-return]

    def describe(self) -> nn.Module:
        """Return the model as far as its shapes go: on the meta device, without loading or making weights.

        A module that is built already is returned as it is.
        """
        if isinstance(self.source, nn.Module):
            return self.source
        config = self.config()
        options = {} if self.task == "causal_lm" else {"num_labels": 1}
        with torch.device("meta"):
            return _AUTO_CLASSES[self.task].from_config(config, **options)  # type: ignore[no-any-return, no-untyped-call]

    def _load(self, auto: type, options: dict[str, int]) -> nn.Module:
        try:
            return auto.from_pretrained(self.source, dtype=torch.float32, **options)  # type: ignore[attr-defined, no-any-return]
        except (OSError, ValueError) as error:
            raise self._not_loaded(error) from error

    def _not_loaded(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.name}={str(self.source)!r} could not be loaded ({error}); "
            f"give a Hugging Face name, or a folder with config.json and weights"
        )
