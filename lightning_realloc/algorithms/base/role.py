"""One model of an algorithm: source of its weights, head, trained parts."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from lightning_realloc.algorithms.base.adapters import (
    Adapters,
    AdapterSource,
    check_trainable,
    refuse_adapters,
    train_adapters_alone,
)
from lightning_realloc.algorithms.base.loaded_weights import (
    ModelSource,
    check_source,
    is_empty,
    known_sources,
    loading_progress,
    log_whole,
    naming_errors,
    require_complete,
    require_decoder,
    require_head,
    require_known,
    require_output,
    require_shapes,
)
from lightning_realloc.algorithms.base.quantization import (
    QuantizationSource,
    check_quantized,
    quantize_description,
    read_quantization,
    without_heads,
)
from lightning_realloc.data.tokenizers import describe_load_error
from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_path import expand_home, require_files
from lightning_realloc.runtime.model.adapter_layers import adapted_layers, adapter_config, head_names, merge_permanently
from lightning_realloc.runtime.model.hub_kernels import refuse_kernels
from lightning_realloc.runtime.model.mapped_weights import shown_as_float32, weights_left_in_files, widen
from lightning_realloc.runtime.model.model_classes import AUTO_CLASSES, Task, is_of_another_task, model_class
from lightning_realloc.runtime.model.quantized import pin_quantized_weights, quantized_layers
from lightning_realloc.runtime.model.recorded_init import defer_init
from lightning_realloc.runtime.model.structure import (
    TrainVision,
    copy_model,
    copy_without_weights,
    frozen_vision,
    record_untied_weights,
    unused_weights,
    vision_parts,
)
from lightning_realloc.setting_hints import ROLE_HINTS, suggest_settings


@suggest_settings(ROLE_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One model of an algorithm."""

    name: str
    """``actor``, ``critic``, ``reference``, ``reward``, or another name."""
    source: ModelSource
    """Source of the weights."""
    trained: bool
    """Whether an optimizer updates the weights."""
    task: Task = "causal_lm"
    """Head: next-token logits, or one score per sequence or token."""
    average_of: str | None = None
    """Trained role whose exponential moving average these weights are; None: they stay as loaded."""
    average_rate: float = 0.01
    """Weight of the trained role in each update, which follows each of its training calls: 1 less the decay."""
    peft: AdapterSource | None = None
    """Adapters to train in place of the weights; for a role that is not trained, saved ones to merge."""
    quantization: QuantizationSource | None = None
    """How weights of a name or folder are quantized while they are loaded; None: as the folder says."""
    shares: str | None = None
    """Role with adapters whose base is also this model, without a second copy; None: a model of its own."""
    train_vision: TrainVision = "none"
    """Trained parts that only images use, or those with adapters. Without adapters, not for a given module, whose
    ``requires_grad`` decides."""

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        if self.trained and self.peft is None:
            return isinstance(self.source, nn.Module) and bool(adapted_layers(self.source))
        return self.trained

    def config(self) -> PreTrainedConfig | None:
        """Return the model's configuration; None for a module without one."""
        if isinstance(self.source, PreTrainedConfig):
            return self.source
        if isinstance(self.source, nn.Module):
            config = getattr(self.source, "config", None)
            return config if isinstance(config, PreTrainedConfig) else None
        try:
            config = AutoConfig.from_pretrained(self.source)
        except Exception as error:  # damaged files raise errors of any class
            raise self._not_loaded(error) from error
        assert isinstance(config, PreTrainedConfig)
        return config

    def __post_init__(self) -> None:
        check_source(self.name, self.source)
        if self.average_of is not None and (self.trained or not 0 < self.average_rate <= 1):
            raise ConfigError(
                f"{self.name} has average_of={self.average_of!r}, average_rate={self.average_rate} and "
                f"trained={self.trained}; a moving average is not trained, and its rate lies above 0 and up to 1"
            )
        if self.shares is not None and (self.trained or self.average_of is not None or self.peft is not None):
            raise ConfigError(
                f"{self.name} shares the base of {self.shares!r} and is trained, averages a role or has adapters of "
                f"its own; leave shares out, and it gets a model of its own"
            )
        if not isinstance(self.source, str | Path):
            return
        object.__setattr__(self, "source", expand_home(self.source))  # transformers would look for a folder called ~
        text = str(self.source)
        if os.path.isdir(text) and not os.path.exists(os.path.join(text, CONFIG_NAME)):
            refuse_adapters(text, self.name, trained=self.trained)
        try:
            require_files(self.source, CONFIG_NAME)
        except FileNotFoundError as error:
            known = known_sources(self.name, trained=self.trained)
            raise ConfigError(f"{self.name}={text!r}: {describe_load_error(text, error)}; {known}") from None

    @property
    def can_defer_weights(self) -> bool:
        """Whether `build` can leave weights out of memory.

        Not a module's, nor ones that are quantized or that adapters are computed with.
        """
        if isinstance(self.source, nn.Module) or (self.peft is not None and not self.trained):
            return False
        is_quantized = read_quantization(self.quantization, self.config(), self.name) is not None
        return not is_quantized and not getattr(self._adapter_config(), "use_dora", False)

    def build(self, *, seed: int, allow_missing: bool = False, deferred: bool = False) -> nn.Module:
        """Return the model with full weights, the same on every rank: a module's in their dtype, others in float32.

        A module is copied, so two roles may use the same one. A classifier takes the backbone of a module with another
        head. New heads and random weights depend on ``seed`` alone. Classifiers have one label. Frozen weights of a
        module stay frozen, unless all are. With adapters, only they and a classifier's head are trained.

        Args:
            seed: Seed of random weights.
            allow_missing: Whether weights in a folder may differ from its config; missing ones are random.
            deferred: Leave weights out of memory where possible: in memory-mapped files, in their dtype, or on the meta
                device, to be made from the config (see `weight_values`).

        Raises:
            ConfigError: for a source that cannot be loaded, weights that are missing or have no place in the model, a
                language model without its head or with an encoder's attention, a frozen classifier whose head was never
                trained, a quantized base that is not frozen, and adapters that do not fit.
        """
        self._check_config()
        adapters, deferred = self._adapters(), deferred and self.can_defer_weights
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # models are built on the CPU
            if isinstance(self.source, PreTrainedConfig):
                model = defer_init(self._from_config, self.source) if deferred else self._from_config(self.source)
            elif isinstance(self.source, nn.Module):
                if is_empty(self.source):
                    raise ConfigError(
                        f"{self.name} is a module on the meta device, which holds no weights; give one that does. A "
                        f"LightningModule that built its models has let go of those that it was given: make a new one"
                    )
                model = self._copied(self.source)
            else:
                model = self._load(self.source, adapters, allow_missing=allow_missing, deferred=deferred)
            with shown_as_float32(model) if deferred else nullcontext():
                self._adapt(model, adapters)
        if self.task == "causal_lm":
            require_decoder(self.name, model)
        record_untied_weights(model)
        # Lightning warns about modules in eval mode; every call sets its own mode.
        return model.train()

    def describe(self) -> nn.Module:
        """Return the model without weights, on the meta device.

        A given module with the required head is returned unchanged.

        Raises:
            ConfigError: as `build`, and for a configuration that no model can be made from.
        """
        self._check_config()
        source, adapters = self.source, self._adapters()
        if isinstance(source, nn.Module) and not self._has_another_head(source):
            if adapters is None and not adapted_layers(source) and not quantized_layers(source):
                return source
            with torch.device("meta"):
                return self._adapt(self._copied(source, copy_without_weights), adapters)
        config = self.config()
        assert config is not None, "models of transformers, names and folders have one"
        quantization = read_quantization(self.quantization, config, self.name)
        with torch.device("meta"):
            with naming_errors(self.name, config):
                model = self._from_config(config)
            if self.task == "causal_lm":
                require_decoder(self.name, model)
            if quantization is not None:
                quantize_description(model, without_heads(quantization, head_names(model)))
            return self._adapt(model, adapters)

    def resembling(self, config: PreTrainedConfig) -> Role:
        """Return a role of another size with random weights, and adapters of the same kind."""
        return replace(self, source=config, peft=self._adapter_config(), quantization=None, shares=None)

    def describe_adapters(self) -> tuple[Any, ...]:
        """Return the adapter options that affect the time of passes; () without adapters."""
        config = self._adapter_config()
        options = {} if config is None else config.to_dict()  # the order of sets differs between ranks
        return tuple((name, sorted(v) if isinstance(v, set) else v) for name, v in options.items())

    def _adapter_config(self) -> Any | None:
        """Return the configuration of trained adapters; None for none."""
        if not self.has_adapters:
            return None
        adapters = self._adapters()
        if adapters is not None:
            return adapters.config
        assert isinstance(self.source, nn.Module), "has_adapters has looked"
        return adapter_config(self.source)

    def frozen_parameters(self, model: nn.Module) -> frozenset[str]:
        """Return the names of frozen parameters of a described model, if it is partly trained."""
        frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
        some = self.trained and len(frozen) < sum(1 for _ in model.named_parameters())
        return frozen if some else frozenset()

    def _adapters(self) -> Adapters | None:
        return None if self.peft is None else Adapters.read(self.peft, self.name, self.task)

    def _adapt(self, model: nn.Module, adapters: Adapters | None) -> nn.Module:
        """Add or merge adapters, pin 4-bit weights, and set which parameters are trained, in place."""
        pin_quantized_weights(model, self.name)
        if adapters is not None and adapted_layers(model):
            raise ConfigError(f"{self.name} has adapters in it already; leave its peft_config out, or give its base")
        if adapters is not None:
            if not self.trained and adapters.origin is None:
                raise ConfigError(
                    f"{self.name} is not trained here, and fresh adapters change nothing; give a folder of saved ones"
                )
            adapters.inject(model, self._base_name(model), frozen_vision(model, self.train_vision))
        elif adapted_layers(model):
            check_trainable(model, self.name)
        if not self.trained:
            return merge_permanently(model).requires_grad_(False)
        if isinstance(self.source, nn.Module) and adapted_layers(model):
            train_adapters_alone(model, self._base_name(model), self.name)
        elif adapters is None and adapted_layers(model):
            raise ConfigError(f"{self.name}='{self.source}' holds adapters, too; move them to a folder for peft_config")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            model.requires_grad_(True)
        if adapters is None and self._is_made_here:
            frozen = frozen_vision(model, self.train_vision)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name not in frozen)
        return model

    @property
    def _is_made_here(self) -> bool:
        """Whether the model is no copy of a given module."""
        return not isinstance(self.source, nn.Module) or self._has_another_head(self.source)

    def trainable_vision(self) -> frozenset[str]:
        """Return the parts of the model that ``train_vision`` chooses from: "projector" and "tower"."""
        is_chosen = self.trained and (self.peft is not None or self._is_made_here)
        return frozenset(vision_parts(self.describe()).values()) if is_chosen else frozenset()

    def _base_name(self, model: nn.Module) -> str | None:
        """Return the name of the base; None for random weights and unknown sources."""
        if isinstance(self.source, str | Path):
            return str(self.source)
        return getattr(getattr(model, "config", None), "_name_or_path", None) or None

    def _check_config(self) -> None:
        config = self.config()
        given = self.source if isinstance(self.source, nn.Module) else nn.Module()
        if config is not None and not isinstance(self.source, nn.Module):
            refuse_kernels(config, self.name)
        if quantized_layers(given) or read_quantization(self.quantization, config, self.name) is not None:
            check_quantized(
                self.name,
                trained=self.trained,
                adapters=self._adapter_config(),
                merges=not self.trained and (self.peft is not None or bool(adapted_layers(given))),
                averages=self.average_of is not None,
                is_loadable=isinstance(self.source, str | Path)
                or bool(self.quantization is None and quantized_layers(given) and not self._has_another_head(given)),
            )

    def _from_config(self, config: PreTrainedConfig) -> nn.Module:
        made = model_class(self.task, config)
        if made is None:
            raise ConfigError(
                f"{self.name}: transformers has no {AUTO_CLASSES[self.task].__name__} of {config.model_type!r}; "
                f"give {self.name} a model of another family, or a module that is built already"
            )
        if self.task != "causal_lm":
            config = copy.deepcopy(config)
            config.num_labels = 1
        model: nn.Module = made.from_config(config, dtype=torch.float32)
        return model

    def _copied(self, module: nn.Module, copier: Callable[[nn.Module], nn.Module] = copy_model) -> nn.Module:
        unwrap: Callable[[], nn.Module] = getattr(module, "get_base_model", lambda: module)
        source = unwrap()  # without PEFT's wrapper; adapters stay inside
        if isinstance(source, PreTrainedModel) and self._has_another_head(source):
            if self.task == "causal_lm":
                raise ConfigError(
                    f"{self.name} is a {type(source).__name__}, which has no head that says tokens; give a language "
                    f"model"
                )
            self._require_head(["score"])
            model: Any = self._from_config(source.config)
            if adapted_layers(source):
                source = merge_permanently(copy_model(source))
            backbone: nn.Module = source.base_model  # type: ignore[assignment]
            model.base_model.load_state_dict(backbone.state_dict())
            ours, theirs = (getattr(getattr(m, "score", None), "weight", None) for m in (model, source))
            if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == theirs.shape:
                ours.data.copy_(theirs)
            return model.float()  # type: ignore[no-any-return]
        labels = getattr(getattr(source, "config", None), "num_labels", 1)
        if self.task != "causal_lm" and labels != 1:
            raise ConfigError(f"{self.name} is a classifier of {labels} labels; give one with num_labels=1")
        return copier(source)

    def _has_another_head(self, model: nn.Module) -> bool:
        return isinstance(model, PreTrainedModel) and is_of_another_task(model, self.task)

    def _load(self, source: str | Path, adapters: Adapters | None, *, allow_missing: bool, deferred: bool) -> nn.Module:
        options: dict[str, Any] = {} if self.task == "causal_lm" else {"num_labels": 1}
        quantization = read_quantization(self.quantization, None, self.name)
        if quantization is not None:
            with torch.device("meta"):
                heads = head_names(self._from_config(AutoConfig.from_pretrained(source)))
            options["quantization_config"] = without_heads(quantization, heads)
        config = self.config()
        assert config is not None, "names and folders have one"
        auto: Any = model_class(self.task, config) or AUTO_CLASSES[self.task]
        where = f"{self.name}={str(source)!r}"
        try:
            with (
                loading_progress(where, reports=allow_missing),
                weights_left_in_files() if deferred else nullcontext(),
            ):
                model, found = auto.from_pretrained(
                    source, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **options
                )
        except Exception as error:  # damaged files raise errors of any class
            raise self._not_loaded(error) from error
        require_shapes(where, found["mismatched_keys"])
        missing, heads = sorted(found["missing_keys"]), head_names(model)
        if self.task == "causal_lm":
            require_output(where, model, missing)
        elif adapters is None or not adapters.weights:  # they include a head
            self._require_head([name for name in missing if name.startswith(heads)])
        if not allow_missing:
            require_complete(where, [name for name in missing if not name.startswith(heads)])
            require_known(where, unused_weights(model, found["unexpected_keys"]))
        if deferred:
            if adapted_layers(model):  # a folder of adapters, which are merged or checked in float32
                return self._load(source, adapters, allow_missing=allow_missing, deferred=False)
            widen(model, heads)
            log_whole(where, model, missing)
        return model  # type: ignore[no-any-return]

    def _require_head(self, missing: list[str]) -> None:
        if not self.trained:
            require_head(self.name, AUTO_CLASSES[self.task].__name__, missing)

    def _not_loaded(self, error: Exception) -> ConfigError:
        assert isinstance(self.source, str | Path), "modules and configs are not loaded"
        if isinstance(error, ValueError):  # no model, as a name of adapters on the hub
            refuse_adapters(self.source, self.name, trained=self.trained)
        return ConfigError(
            f"{self.name}={str(self.source)!r} could not be loaded ({describe_load_error(self.source, error)}); "
            f"{known_sources(self.name, trained=self.trained)}"
        )
