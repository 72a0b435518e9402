"""What does a written model say about itself? How it was trained and with which settings; not what it is worth."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

CARD_FILE = "README.md"
MARK = "<!-- Written by SaveHuggingFace. Without this line it is yours, and is not written again. -->"
_PACKAGES = ("lightning-realloc", "torch", "lightning", "transformers")
_OF_OPTIMIZERS = ("lr", "betas", "momentum", "eps", "weight_decay")
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of a trained role."""

    title: str
    role: str
    algorithm: str
    steps: int
    """Iterations of training until now."""
    base: str | None
    """What training began from, None where nobody says."""
    base_is_on_hub: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    """As they are shown."""
    is_adapter: bool = False
    """Whether adapters were written, and not a whole model."""

    def text(self) -> str:
        """Return it as Markdown, with the head that the Hugging Face hub reads."""
        head = [f"library_name: {'peft' if self.is_adapter else 'transformers'}"]
        if self.base is not None and self.base_is_on_hub:
            head.append(f"base_model: {self.base}")
        head += ["tags:", "- lightning-realloc", f"- {self.algorithm.lower()}"]
        began = f" It began as `{self.base}`." if self.base is not None else ""
        rows = [f"| {name} | `{shown.replace('|', chr(92) + '|')}` |" for name, shown in self.settings.items()]
        lines = [
            "---", *head, "---", MARK, f"# {self.title}", "",
            f"The {self.role} of a run of {self.algorithm}, after {self.steps} iterations.{began}", "",
            "| setting | value |", "|---|---|", *rows, "",
            "It was not evaluated here. What it learnt from, what it is meant for and what it gets wrong is for those "
            "who trained it to add.",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write it into a folder, unless somebody's own card is there."""
        file = folder / CARD_FILE
        if not file.exists() or MARK in file.read_text(encoding="utf-8"):
            file.write_text(self.text(), encoding="utf-8")


def card_of(trainer: Trainer, module: LightningModule, role: str, *, title: str, is_adapter: bool) -> ModelCard:
    """Return the card of a role as it is now."""
    base, on_hub = _base_of(module, role)
    settings = _settings_of(module) | _settings_of_run(trainer, role)
    return ModelCard(
        title=title, role=role, algorithm=type(module).__name__, steps=trainer.global_step, base=base,
        base_is_on_hub=on_hub, settings=settings, is_adapter=is_adapter,
    )  # fmt: skip


def _base_of(module: LightningModule, role: str) -> tuple[str | None, bool]:
    """Return what a role's weights came from, and whether that is a name on the hub; of a folder only its name."""
    found = next((known for known in getattr(module, "roles", tuple)() if known.name == role), None)
    source = getattr(found, "source", None)
    if not isinstance(source, str | Path):
        source = getattr(getattr(source, "config", None), "_name_or_path", None)
    if not source:
        return None, False
    is_name = isinstance(source, str) and source.count("/") <= 1 and not source.startswith((".", "/", "~"))
    if is_name and not Path(source).exists():
        return str(source), True
    return Path(source).name, False


def _settings_of(module: LightningModule) -> dict[str, str]:
    """Return the settings that a module was made with, as far as it or a dataclass in it keeps them by their names."""
    holders = [module, *(value for value in vars(module).values() if _is_value(value))]
    found: dict[str, str] = {}
    for name in _parameter_names(type(module)):
        for holder in holders:
            shown = _shown(getattr(holder, name, None)) if name != "learning_rate" else None  # the optimizer tells
            if shown is not None:
                found.setdefault(name, shown)
    return found


def _settings_of_run(trainer: Trainer, role: str) -> dict[str, str]:
    """Return the optimizer and schedule of a role, and what the Trainer was told."""
    found: dict[str, str] = {}
    optimizers = {_name_of(optimizer): optimizer for optimizer in trainer.strategy.optimizers}
    if role in optimizers:
        kept = {name: optimizers[role].defaults.get(name) for name in _OF_OPTIMIZERS}
        told = ", ".join(f"{name}={value}" for name, value in kept.items() if value is not None)
        found["optimizer"] = f"{type(optimizers[role]).__name__}({told})"
    for config in trainer.lr_scheduler_configs:
        if _name_of(config.scheduler.optimizer) == role:
            found["schedule"] = type(config.scheduler).__name__
    batch_size = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    if batch_size is not None:
        found["batch_size"] = str(batch_size)
    found |= {"precision": str(trainer.precision), "ranks": str(trainer.world_size)}
    return found | {package: known for package in _PACKAGES if (known := _version_of(package)) is not None}


def _name_of(optimizer: Optimizer) -> str | None:
    name: str | None = optimizer.param_groups[0].get("name")
    return name


def _parameter_names(algorithm: type[LightningModule]) -> Iterator[str]:
    """Yield the names of constructors' parameters, those of the class itself first."""
    for base in algorithm.__mro__:
        if base is LightningModule:
            return
        if "__init__" in vars(base):
            yield from list(inspect.signature(base.__init__).parameters)[1:]  # type: ignore[misc]


def _is_value(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _shown(value: object) -> str | None:
    """Return how a setting is written, None for paths and what is no plain value: models, tokenizers, functions."""
    if isinstance(value, str) and "/" in value:
        return None  # the path of a file on this machine
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, str) else str(value)
    if _is_value(value):
        return f"{type(value).__name__}({', '.join(_changed(value))})"
    if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
        return str(value)
    return None


def _changed(value: Any) -> Iterator[str]:
    """Yield the fields of a dataclass that do not have their default."""
    for known in dataclasses.fields(value):
        now = getattr(value, known.name)
        factory = known.default_factory
        default = known.default if factory is dataclasses.MISSING else factory()
        if now != default:
            yield f"{known.name}={now!r}"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
