"""Model card of an exported model: base model, algorithm and settings, without any claim of quality."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from huggingface_hub import ModelCardData
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_realloc.output_files import write_text
from lightning_realloc.remote_path import AnyPath, RemotePath, is_path
from lightning_realloc.setting_hints import setting_defaults
from lightning_realloc.version import __version__

CARD_FILE = "README.md"
MARK = "<!-- Written by SaveHuggingFace. Without this line it is yours, and is not written again. -->"
"""Line that marks generated cards; a file without it is never overwritten."""
_VERSIONS = {"lightning_realloc": __version__} | {
    package.__name__: package.__version__ for package in (torch, lightning, transformers)
}
_OPTIMIZER_SETTINGS = ("lr", "betas", "momentum", "eps", "weight_decay")
_PLAIN_TYPES = (bool, int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Content of a trained role's model card."""

    title: str
    """Heading of the card."""
    role: str
    """Exported role."""
    algorithm: str
    """Class name of the algorithm."""
    steps: int
    """Number of training iterations so far."""
    base: str | None
    """Name of the initial model; None if unknown."""
    base_is_on_hub: bool = False
    """Whether ``base`` is a name on the Hugging Face hub."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Setting -> its text in the card."""
    is_adapter: bool = False
    """Whether the export holds adapters only."""

    def text(self) -> str:
        """Return the card as Markdown, with the metadata header of the Hugging Face hub."""
        head = ModelCardData(
            library_name="peft" if self.is_adapter else "transformers",
            base_model=self.base if self.base_is_on_hub else None,
            tags=["lightning-realloc", self.algorithm.lower()],
        )
        began = f" It began as `{self.base}`." if self.base is not None else ""
        rows = [f"| {name} | `{shown.replace('|', chr(92) + '|')}` |" for name, shown in self.settings.items()]
        lines = [
            "---",
            head.to_yaml(),
            "---",
            MARK,
            f"# {self.title}",
            "",
            f"The {self.role} of a run of {self.algorithm}, after {self.steps} iterations.{began}",
            "",
            "| setting | value |",
            "|---|---|",
            *rows,
            "",
            "It was not evaluated here. Training data, intended use and limitations are for its authors to add.",
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: AnyPath) -> None:
        """Write the card to a folder or an address, unless it holds a card from elsewhere."""
        file = folder / CARD_FILE
        if not file.exists() or MARK in file.read_text(encoding="utf-8"):
            if isinstance(file, RemotePath):
                file.write_bytes(self.text().encode())
            else:
                write_text(file, self.text())


def make_model_card(trainer: Trainer, module: LightningModule, role: str, *, title: str, is_adapter: bool) -> ModelCard:
    """Return the card of a role in its current state."""
    base, on_hub = _base_model(module, role)
    settings = _algorithm_settings(module) | _run_settings(trainer, role)
    return ModelCard(
        title=title,
        role=role,
        algorithm=type(module).__name__,
        steps=trainer.global_step,
        base=base,
        base_is_on_hub=on_hub,
        settings=settings,
        is_adapter=is_adapter,
    )


def _base_model(module: LightningModule, role: str) -> tuple[str | None, bool]:
    """Return the source of a role's weights, and whether it is a name on the hub; for a folder only its name."""
    found = next((known for known in getattr(module, "roles", tuple)() if known.name == role), None)
    source = getattr(found, "source", None)
    if not isinstance(source, str | Path):
        source = getattr(getattr(source, "config", None), "_name_or_path", None)
    if not source:
        return None, False
    return (Path(source).name, False) if is_path(source) else (str(source), True)


def _algorithm_settings(module: LightningModule) -> dict[str, str]:
    """Return the constructor settings that a module, or a dataclass it holds, keeps as attributes of the same names."""
    holders = [module, *(value for value in vars(module).values() if _is_value(value))]
    found: dict[str, str] = {}
    for name in setting_defaults(type(module)):
        if name in ("learning_rate", "tokenizer"):
            continue  # the optimizer's settings include the one, and reading the other may load it, or fail
        texts = (_setting_text(getattr(holder, name, None)) for holder in holders)
        if (text := next(filter(None, texts), None)) is not None:
            found[name] = text
    return found


def _run_settings(trainer: Trainer, role: str) -> dict[str, str]:
    """Return optimizer and schedule of a role, batch size, precision, ranks and package versions."""
    found: dict[str, str] = {}
    optimizers = {_name_of(optimizer): optimizer for optimizer in trainer.strategy.optimizers}
    if role in optimizers:
        kept = {name: optimizers[role].defaults.get(name) for name in _OPTIMIZER_SETTINGS}
        options = ", ".join(f"{name}={value}" for name, value in kept.items() if value is not None)
        found["optimizer"] = f"{type(optimizers[role]).__name__}({options})"
    for config in trainer.lr_scheduler_configs:
        if _name_of(config.scheduler.optimizer) == role:
            found["schedule"] = type(config.scheduler).__name__
    batch_size = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    if batch_size is not None:
        found["batch_size"] = str(batch_size)
    found |= {"precision": str(trainer.precision), "ranks": str(trainer.world_size)}
    return found | _VERSIONS


def _name_of(optimizer: Optimizer) -> str | None:
    name: str | None = optimizer.param_groups[0].get("name")
    return name


def _is_value(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _setting_text(value: object) -> str | None:
    """Return a setting's text; None for paths and for values that are not plain: models, tokenizers, functions."""
    if isinstance(value, str) and "/" in value:
        return None  # probably a local path
    if isinstance(value, _PLAIN_TYPES):
        return repr(value) if isinstance(value, str) else str(value)
    if _is_value(value):
        return f"{type(value).__name__}({', '.join(_changed_fields(value))})"
    if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN_TYPES) for item in value):
        return str(value)
    return None


def _changed_fields(value: object) -> Iterator[str]:
    """Yield the fields of a dataclass that differ from their defaults, as ``name=value``."""
    instance: Any = value
    for known in dataclasses.fields(instance):
        now = getattr(value, known.name)
        factory = known.default_factory
        default = known.default if factory is dataclasses.MISSING else factory()
        if now != default:
            yield f"{known.name}={now!r}"
