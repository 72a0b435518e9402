"""Refuse kernels of the hub that a configuration names: loading such a model would download and run their code."""

from __future__ import annotations

from transformers import PreTrainedConfig

from lightning_realloc.errors import ConfigError

_SETTINGS = ("_attn_implementation", "_experts_implementation")


def refuse_kernels(config: PreTrainedConfig, where: str) -> None:
    """Raise ConfigError for a configuration, or a part of it, with an implementation like ``organization/kernel``.

    Args:
        config: Configuration that was read from a folder or the hub.
        where: Role or folder, for the message.
    """
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        for setting in _SETTINGS:
            name = getattr(part, setting, None)
            if isinstance(name, str) and "/" in name:
                raise ConfigError(
                    f"{where} has {setting.removeprefix('_')}={name!r} in its config, a kernel whose code would be "
                    f"downloaded and run; remove the entry, or load the model yourself and give the module"
                )
