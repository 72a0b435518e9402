"""Load a role's base in 4 bits: read the setting, check that the role can have such a base, and describe it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.runtime.model.structure import TrainVision

if TYPE_CHECKING:
    QuantizationSource = BitsAndBytesConfig | Mapping[str, Any]
    """A configuration of bitsandbytes with ``load_in_4bit``, or the same as a mapping."""
else:
    QuantizationSource = Any

_MARKS = ("load_in_4bit", "load_in_8bit", "quant_method")
"""Keys that only a mapping has that is a configuration itself, and not role -> configuration."""
_UNPACKING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""Quantization of published weights (DeepSeek-V3, gpt-oss) -> transformers' class that unpacks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingOptions:
    """Settings of an algorithm for loading the weights of its roles."""

    quantization_config: Any = None
    """4-bit weights of every trained role, or role -> 4-bit weights; None: weights as their folders hold them."""
    allow_missing: bool = False
    """Whether a folder may lack weights of its config, or hold others."""
    train_vision: TrainVision = "none"
    """Trained parts of the trained roles that only images use."""

    def __post_init__(self) -> None:
        require_choice("train_vision", self.train_vision, get_args(TrainVision))

    def quantization_of(self, role: str, *, trained: bool) -> QuantizationSource | None:
        """Return the quantization that the settings give a role; a role that is not trained has to be named."""
        by_role = self._by_role
        return by_role.get(role) if by_role is not None else self.quantization_config if trained else None

    @property
    def _by_role(self) -> Mapping[str, Any] | None:
        """The setting if it names roles; None for a single configuration."""
        setting = self.quantization_config
        return setting if isinstance(setting, Mapping) and not any(mark in setting for mark in _MARKS) else None

    def check_roles(self, roles: Collection[Any], algorithm: str) -> None:
        """Check that the settings name roles of the algorithm, and that these take their quantization.

        Raises:
            ConfigError: for an unknown role, for a role without the quantization that the settings give it, and for
                parts for images to train that no trained role has.
        """
        names = [role.name for role in roles]
        self._check_vision(roles)
        if unknown := sorted(str(name) for name in self._by_role or () if name not in names):
            raise ConfigError(
                f"quantization_config names {', '.join(unknown)}, and the roles are {', '.join(names)}; write role: "
                f"configuration, or a single configuration with load_in_4bit: true"
            )
        for role in roles:
            if role.quantization is None and self.quantization_of(role.name, trained=role.trained) is not None:
                raise ConfigError(
                    f"quantization_config gives {role.name} 4-bit weights, and its Role has quantization=None; write "
                    f"Role(name={role.name!r}, ..., quantization=self.loading.quantization_of({role.name!r}, "
                    f"trained={role.trained})) in roles() of {algorithm}, or name only other roles"
                )

    def _check_vision(self, roles: Collection[Any]) -> None:
        needed = {"none": None, "projector": "projector", "all": "tower"}[self.train_vision]
        chosen = [role for role in roles if role.train_vision == self.train_vision]
        if needed is not None and not any(needed in role.trainable_vision() for role in chosen):
            trained = ", ".join(role.name for role in roles if role.trained)
            raise ConfigError(
                f"train_vision={self.train_vision!r} trains the {needed} for images, and no trained role ({trained}) "
                f"is loaded or built with one; leave it out, and set requires_grad of the parameters of a given module"
            )


def read_quantization(
    given: QuantizationSource | None, config: PreTrainedConfig | None, role: str
) -> BitsAndBytesConfig | None:
    """Return the quantization that is given, or else that of the model's own config; None for a model without one.

    Raises:
        ConfigError: for anything but 4-bit weights of bitsandbytes, and if that package is missing.
    """
    settings: Any = given if given is not None else getattr(config, "quantization_config", None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping) and not hasattr(settings, "to_dict"):
        raise ConfigError(
            f"{role}: quantization_config={settings!r} is a {type(settings).__name__}; give a "
            f"BitsAndBytesConfig(load_in_4bit=True), or the same as a mapping"
        )
    if isinstance(given, Mapping):
        options = {name: value for name, value in given.items() if name != "quant_method"}
        if unknown := sorted(options.keys() - inspect.signature(BitsAndBytesConfig).parameters.keys()):
            raise ConfigError(
                f"{role}: quantization_config has no option {', '.join(unknown)}; write those of "
                f"transformers.BitsAndBytesConfig"
            )
    values: Mapping[str, Any] = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = values.get("quant_method", "bitsandbytes")
    method = getattr(method, "value", method)
    if method != "bitsandbytes" or not values.get("load_in_4bit"):
        raise ConfigError(
            f"{role} is quantized ({method}): weights that are packed into integers can neither be cut over ranks nor "
            f"cast, and only 4-bit ones of bitsandbytes can stay as they are under adapters; give a base in bfloat16 "
            f"or float32, with quantization_config=BitsAndBytesConfig(load_in_4bit=True) if it shall take less memory"
            f"{_how_to_unpack(str(method))}"
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{role}: 4-bit weights need the package bitsandbytes; pip install 'lightning-realloc[qlora]'"
        )
    try:
        quantization: BitsAndBytesConfig = BitsAndBytesConfig.from_dict(dict(values))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{role}: quantization_config is refused by transformers: {error}; correct it") from error
    return quantization


def _how_to_unpack(method: str) -> str:
    """Return the end of the message for weights that transformers can write unpacked; empty for others."""
    if method not in _UNPACKING:
        return ""
    return (
        f". Unpack it once: AutoModelForCausalLM.from_pretrained(name, dtype='bfloat16', quantization_config="
        f"{_UNPACKING[method]}(dequantize=True)).save_pretrained(folder, save_original_format=False)"
    )


def check_quantized(
    role: str, *, trained: bool, adapters: Any | None, merges: bool, averages: bool, is_loadable: bool
) -> None:
    """Check that training leaves a role's 4-bit weights unchanged, and that they can be loaded.

    Args:
        role: The role's name.
        trained: Whether the role is trained.
        adapters: PEFT's configuration of trained adapters; None without any.
        merges: Whether adapters would be merged into the weights.
        averages: Whether the weights are a moving average.
        is_loadable: Whether the weights come from a name or folder, or from a module that holds 4-bit weights already.

    Raises:
        ConfigError: for weights that would change, for DoRA, and for random weights and other modules.
    """
    if averages or (trained and adapters is None):
        verb = "averaged" if averages else "trained"
        raise ConfigError(
            f"{role} has 4-bit weights and is {verb}, and such weights cannot change; train adapters over them, with "
            f"peft_config=, or give {role} a base in bfloat16 or float32"
        )
    if merges:
        raise ConfigError(
            f"{role} is not trained, so its adapters would be merged, and merging into 4-bit weights rounds them "
            f"again; merge them into the unquantized base and give that model"
        )
    if adapters is not None and adapters.use_dora:
        raise ConfigError(
            f"{role}: use_dora needs the norms of whole weights, for which every pass would unpack 4-bit ones; leave "
            f"use_dora out, or give a base in bfloat16 or float32"
        )
    if not is_loadable:
        raise ConfigError(
            f"{role}: weights are quantized while they are loaded, and {role} is a config, a module, or a module with "
            f"another head; give the name or folder of a model, or a module that "
            f"from_pretrained(..., quantization_config=...) returned without naming {role} in quantization_config"
        )


def without_heads(settings: BitsAndBytesConfig, heads: Sequence[str]) -> BitsAndBytesConfig:
    """Return settings that leave a classifier's heads as they are, since a head is trained whole."""
    if heads:
        settings = copy.deepcopy(settings)
        names = [head.removesuffix(".") for head in heads]
        settings.llm_int8_skip_modules = [*(settings.llm_int8_skip_modules or ()), *names]
    return settings


def quantize_description(model: nn.Module, settings: BitsAndBytesConfig) -> None:
    """Replace the linear layers of a model on the meta device, in place, as loading it with ``settings`` does."""
    quantizer: Any = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
