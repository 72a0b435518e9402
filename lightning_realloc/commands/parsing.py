"""Reader of saved configurations, and checks that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace, get_loader, set_loader

from lightning_realloc.dataflow.repeated_keys import refuse_repeated_keys
from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_path import expand_home
from lightning_realloc_autoload import STRATEGIES

_MOVED_DEFAULTS: Mapping[str, object] = {"max_cache_bytes": None, "sample_reallocation": False, "rollout_budget": None}
"""Settings that were an algorithm's own, and are those of ``generation`` now, with their defaults."""
_MOVED_DEFAULTS_OF_GENERATION: Mapping[str, object] = {"engine": "native", "speculation": None}
"""Settings that were fields of ``generation``, and are an algorithm's own now, with their defaults."""
_LOAD_ANY_YAML = get_loader("yaml")


def has_bf16() -> bool:
    """Return whether the current GPU computes in bf16 without emulation; False without a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def refuse_gguf(model: str) -> None:
    """Raise ConfigError for a GGUF file, a folder of such files, or a repository that is named after them."""
    path = expand_home(Path(model))
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        if not files:
            return
        folder, name = str(path), files[0].name
    elif model.lower().endswith("gguf"):
        is_file = model.lower().endswith(".gguf")
        folder, name = (str(path.parent), path.name) if is_file else (model, "NAME.gguf")
    else:
        return
    raise ConfigError(
        f"{model!r} holds weights in GGUF, which cannot be trained; load them with transformers' "
        f"AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={name!r}) and AutoTokenizer likewise, write both "
        f"with save_pretrained(folder), and give that folder"
    )


def describe_full_device(error: torch.OutOfMemoryError) -> str:
    """Return the message for a device without free memory, with the ways out."""
    reason = next(iter(str(error).splitlines()), "")
    return (
        f"the device is full ({reason}); lower batch_size, sampling.n or max_new_tokens, train adapters (--lora), set "
        f"model.generation.max_cache_bytes, or look for a plan that fits: lightning-realloc plan --help"
    )


def strategy_with(strategy: Any, options: Mapping[str, object]) -> Namespace:
    """Return a strategy's configuration with further settings.

    Args:
        strategy: Configuration of ``Trainer(strategy=...)``: a registered name, or class path and arguments.
        options: Settings of ``ReallocStrategy``.

    Raises:
        ConfigError: for another strategy.
    """
    if isinstance(strategy, str) and strategy in STRATEGIES:
        path = "lightning_realloc.strategies.ReallocStrategy"
        return Namespace(class_path=path, init_args=Namespace(**{**STRATEGIES[strategy], **options}))
    path = str(getattr(strategy, "class_path", strategy))
    if not path.endswith("ReallocStrategy"):
        flags = " and ".join(f"--{name}" for name in options)
        raise ConfigError(f"{flags} needs strategy='realloc' or ReallocStrategy; this run's strategy is {path}")
    return Namespace(class_path=path, init_args=Namespace(**{**vars(strategy.init_args), **options}))


def accept_moved_settings() -> None:
    """Make jsonargparse leave out the moved settings that a YAML file has at their defaults."""
    set_loader("yaml", load_yaml, (yaml.YAMLError,))


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text. Settings that moved, and that a saved configuration has at their defaults,
    are left out.

    Raises:
        yaml.YAMLError: for text that is no YAML, and for a mapping that has a key more than once.
    """
    refuse_repeated_keys(text)
    content = _LOAD_ANY_YAML(text)
    model = content.get("model") if isinstance(content, dict) else None
    settings = model.get("init_args") if isinstance(model, dict) else None
    if isinstance(settings, dict):
        _leave_out(settings, _MOVED_DEFAULTS)
        _leave_out(settings.get("generation"), _MOVED_DEFAULTS_OF_GENERATION)
    return content


def _leave_out(settings: Any, defaults: Mapping[str, object]) -> None:
    for name, default in defaults.items():
        if isinstance(settings, dict) and name in settings and settings[name] == default:
            del settings[name]
