"""Adapters of a role: read PEFT's files and configurations, and check that they fit the model."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from lightning_realloc.algorithms.settings import check_share, check_type
from lightning_realloc.data.tokenizers import describe_load_error
from lightning_realloc.errors import ConfigError
from lightning_realloc.remote_path import expand_home, require_files
from lightning_realloc.runtime.model.adapter_layers import (
    ADAPTER,
    FILE_PREFIX,
    adapted_layers,
    head_names,
    inject_adapters,
    saved_names,
    trained_copies,
    use_trained_copies,
)
from lightning_realloc.runtime.model.stacked_experts import (
    is_router,
    parameter_adapters,
    stacked_experts,
    undivided_experts,
)
from lightning_realloc.runtime.model.structure import tied_names

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig

    AdapterSource = PeftConfig | Mapping[str, Any] | str | Path
    """A configuration of PEFT's, the same as a mapping, or a folder (or name on the hub) of saved adapters."""
else:
    AdapterSource = Any

_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM", "token_classification": "TOKEN_CLS", "sequence_classification": "SEQ_CLS"
}  # fmt: skip
_UNDERSTOOD = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "use_dora", "lora_bias", "target_parameters",
})  # fmt: skip
_NUM_EXPERT_DIMS = 3
"""Dims of the stacked weights of experts: expert, and those of a matrix."""
_BEGINNINGS = (True, False, "gaussian")
"""Values of ``init_lora_weights`` that leave the base unchanged."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of one role: configuration, and weights of saved ones."""

    role: str
    config: LoraConfig
    weights: Mapping[str, Tensor]
    """Tensors by their names in PEFT's file without its prefix; {} for new adapters."""
    origin: str | None = None
    """Folder or name that they were loaded from; None for new adapters."""

    @classmethod
    def read(cls, source: AdapterSource, role: str, task: str) -> Adapters:
        """Read a configuration, or load saved adapters.

        Raises:
            ConfigError: for a source that is neither, and for options that are not supported.
        """
        peft = _import_peft(role)
        weights, origin = {}, None
        if isinstance(source, str | Path):
            origin = str(expand_home(source))
            try:
                require_files(expand_home(source), "adapter_config.json", "adapter_model.*")
                config = peft.PeftConfig.from_pretrained(origin)
                loaded = peft.utils.load_peft_weights(origin, device="cpu")
            except Exception as error:  # damaged files raise errors of any class
                raise ConfigError(
                    f"{role}: peft_config={origin!r} could not be loaded ({describe_load_error(origin, error)}); give "
                    f"a folder with adapter_config.json and adapter_model.safetensors, or a LoraConfig"
                ) from error
            weights = {name.removeprefix(FILE_PREFIX): tensor.float() for name, tensor in loaded.items()}
        else:
            config = _configured(peft, source, role) if isinstance(source, Mapping) else copy.deepcopy(source)
        _check(peft, config, role)
        config.task_type = _TASK_TYPES[task]
        config.inference_mode = False
        return cls(role, config, weights, origin)

    def inject(self, model: nn.Module, base_name: str | None, frozen: Collection[str] = ()) -> nn.Module:
        """Add the adapters to a model, in place. Afterwards only they and a classifier's head have gradients.

        Args:
            base_name: Name of the base model; None if unknown.
            frozen: Names of modules and parameters that get no new adapters, and whose saved ones are not trained.

        Raises:
            ConfigError: for adapters of another base, and for layers whose adapters are not supported.
        """
        peft = _import_peft(self.role)
        self._check_base(base_name)
        config = copy.deepcopy(self.config)
        heads = head_names(model)
        self._check_saved_modules(model, heads)
        config.base_model_name_or_path = base_name or config.base_model_name_or_path
        left_out = {head[:-1] for head in heads}  # "all-linear" includes heads
        if not self.weights:
            left_out |= {name for name, module in model.named_modules() if name in frozen and _is_layer(module)}
        _exclude(config, left_out)
        config.modules_to_save = None  # heads are trained in place, without a copy
        _refuse_unmatched(config.target_parameters or (), model, self.role)
        try:
            inject_adapters(config, model)
        except (TypeError, ValueError) as error:
            is_of_names = "modules" in str(error)
            way_out = f"name layers of {type(model).__name__}" if is_of_names else "correct that value of peft_config"
            raise ConfigError(f"{self.role}: peft_config is refused by PEFT: {error}; {way_out}") from error
        config.modules_to_save = [head[:-1] for head in heads] or None  # for readers of the file
        _prepare_layers(model, self.role)
        for name, parameter in model.named_parameters():
            if name.startswith(heads):
                parameter.requires_grad_(True)
            elif name.partition(".lora_")[0] in frozen:
                parameter.requires_grad_(False)
        if self.weights and not next(model.parameters()).is_meta:
            self._fill(peft, model)
        return model

    def _check_base(self, base_name: str | None) -> None:
        """Compare the last parts of names, because the same base may be on the hub and in a folder."""
        theirs = self.config.base_model_name_or_path
        if self.origin is None or not base_name or not theirs:
            return
        if Path(base_name).name != Path(theirs).name:
            raise ConfigError(
                f"the adapters in {self.origin} are of the base {theirs!r}, and {self.role} is {base_name!r}; give "
                f"{self.role} that base, or, where it is the same under another name, write that name into "
                f"base_model_name_or_path of adapter_config.json"
            )

    def _check_saved_modules(self, model: nn.Module, heads: tuple[str, ...]) -> None:
        saved = set(self.config.modules_to_save or ())  # PEFT writes every name that a head may have
        body = (name for name, _ in model.named_modules() if not f"{name}.".startswith(heads))
        _refuse_whole(sorted(saved.intersection(name.rpartition(".")[2] for name in body)), self.role)

    def _fill(self, peft: Any, model: nn.Module) -> None:
        ours = saved_names(model)
        shapes = {name: tuple(model.get_parameter(local).shape) for name, local in ours.items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        of = f"the adapters in {self.origin}, of the base {self.config.base_model_name_or_path!r},"
        to = f"{self.role}, a {type(model).__name__}"
        for name in sorted(shapes.keys() ^ theirs.keys()):
            where = "have no" if name in shapes else f"have a weight that {self.role} has not,"
            raise ConfigError(f"{of} do not fit {to}: they {where} {name}; give the base that they were trained on")
        for name, shape in theirs.items():
            if shape != shapes[name]:
                raise ConfigError(
                    f"{of} do not fit {to}: {name} has shape {shape} there and {shapes[name]} here; give the base "
                    f"that they were trained on"
                )
        with torch.no_grad():
            for name, local in ours.items():
                model.get_parameter(local).copy_(self.weights[name])


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module has weights of its own."""
    return any(True for _ in module.parameters(recurse=False))


def _exclude(config: Any, names: Collection[str]) -> None:
    """Add names of modules to those that get no adapters; PEFT reads one text as a pattern of whole names."""
    given = config.exclude_modules
    if names and isinstance(given, str):
        config.exclude_modules = "|".join([f"(?:{given})", *(rf"(?:.*\.)?{re.escape(name)}" for name in sorted(names))])
    elif names:
        config.exclude_modules = sorted({*(given or ()), *names})


def refuse_adapters(source: str | Path, role: str, *, trained: bool) -> None:
    """Raise ConfigError for saved adapters, in a folder or on the hub, in the place of a role's model.

    Their folder has no configuration of the model, and need not have a tokenizer.
    """
    try:
        file = find_adapter_config_file(str(source))
        base = None if file is None else json.loads(Path(file).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):  # damaged files, or no connection
        return
    if base:
        peft = f"'{source}'" if trained else f"{{{role!r}: '{source}'}}"
        raise ConfigError(f"{role}='{source}' holds adapters of a base; give {role}={base!r}, peft_config={peft}")


def check_trainable(model: nn.Module, role: str) -> None:
    """Check that the adapters of a given model can be trained.

    Raises:
        ConfigError: as `Adapters.read` and `Adapters.inject`; and for more than one set of adapters.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    if list(configs) != [ADAPTER]:
        raise ConfigError(
            f"{role} has adapters called {', '.join(configs) or 'nothing'}, and can have one set, called {ADAPTER!r}; "
            f"load one without adapter_name, or give the model of merge_and_unload()"
        )
    _check(_import_peft(role), configs[ADAPTER], role)
    _prepare_layers(model, role)


def train_adapters_alone(model: nn.Module, base_name: str | None, role: str) -> None:
    """Train nothing but the adapters and a classifier's head of a given model; exported files hold nothing else.

    PEFT and transformers load saved adapters frozen.

    Args:
        base_name: Name of the base model; None if unknown.

    Raises:
        ConfigError: if other weights are trained, and for resized embeddings.
    """
    _refuse_whole([name for name in trained_copies(model) if f"{name}." not in head_names(model)], role)
    _check_embeddings(model, base_name, role)
    use_trained_copies(model)
    adapters = set(saved_names(model).values())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if others := sorted(trained - adapters):
        raise ConfigError(
            f"{role} has adapters, and {len(others)} other weights are to be trained, such as {others[0]}; only "
            f"adapters are saved: freeze the others with requires_grad_(False), or train all weights of "
            f"merge_and_unload()"
        )
    for name in adapters if not trained else ():
        model.get_parameter(name).requires_grad_(True)


def _check_embeddings(model: nn.Module, base_name: str | None, role: str) -> None:
    if base_name is None or not isinstance(model, PreTrainedModel):
        return
    try:
        base: Any = AutoConfig.from_pretrained(base_name, local_files_only=True)
    except (OSError, ValueError):  # unknown here, or no model
        return
    rows, base_rows = (getattr(c.get_text_config(), "vocab_size", None) for c in (model.config, base))
    if rows != base_rows:
        raise ConfigError(
            f"{role}: its embeddings have {rows} rows and those of its base {base_name!r} {base_rows}, and adapters "
            f"are saved without embeddings; save the resized model with save_pretrained(folder) and give that folder "
            f"as {role}"
        )


def _refuse_whole(names: list[str], role: str) -> None:
    if names:
        raise ConfigError(
            f"{role}: modules_to_save asks to train {', '.join(names)} whole, and only a classifier's head is, which "
            f"needs no naming; leave them out, or name them in target_modules"
        )


def _refuse_unmatched(targets: Iterable[str], model: nn.Module, role: str) -> None:
    """Raise ConfigError for targets that match no parameter: PEFT ignores them where others match."""
    names = {name: parameter.ndim for name, parameter in model.named_parameters()}
    for target in targets:
        if any(name == target or name.endswith(f".{target}") for name in names):
            continue
        experts = {
            f"{path}.{name}" for path, module in stacked_experts(model).items() for name, _ in module.named_parameters()
        }
        routers = {f"{path}.weight" for path, module in model.named_modules() if is_router(module)}
        adaptable = {name for name in experts if names[name] == _NUM_EXPERT_DIMS} | routers
        endings = sorted({".".join(name.split(".")[-2:]) for name in adaptable})
        raise ConfigError(
            f"{role}: target_parameters names {target!r}, and {type(model).__name__} has no such parameter; "
            + (f"it has {', '.join(endings)}" if endings else "it has no stacked experts, leave target_parameters out")
        )


def _prepare_layers(model: nn.Module, role: str) -> None:
    """Refuse adapters of layers that cannot have them, and let those of experts run in every layout."""
    tied = {name for names in tied_names(model).values() if len(names) > 1 for name in names}
    of_parameters = parameter_adapters(model)
    if of_parameters:
        from lightning_realloc.runtime.model.adapted_experts import add_factors

        _check_parameters(model, of_parameters, role)
        add_factors(model)
    for name, layer in adapted_layers(model).items():
        if name in of_parameters:
            continue
        if not isinstance(layer.base_layer, nn.Linear) and type(layer.base_layer).__name__ != "Conv1D":
            raise ConfigError(
                f"{role}: target_modules names {name}, a {type(layer.base_layer).__name__}; adapters are trained in "
                f"linear layers alone, leave it out"
            )
        if f"{name}.base_layer.weight" in tied:
            raise ConfigError(
                f"{role}: target_modules names {name}, whose weight is also another layer's, so that adapters cannot "
                f"be merged into it; leave it out"
            )


def _check_parameters(model: nn.Module, adapters: Mapping[str, Any], role: str) -> None:
    experts = set() if undivided_experts(model) else set(stacked_experts(model).values())
    for name, layer in adapters.items():
        base, shape = layer.get_base_layer(), tuple(layer.get_param().shape)
        of_experts = base in experts and len(shape) == _NUM_EXPERT_DIMS
        if not (of_experts or is_router(base)):
            raise ConfigError(
                f"{role}: target_parameters names {name.removesuffix('.base_layer')}.{layer.parameter_name}, of shape "
                f"{shape}; it is for stacked weights of experts, and for routers: name linear layers in target_modules"
            )


def roles_with_adapters(peft_config: object) -> Collection[object]:
    """Return the roles that ``peft_config`` names; none if it is one configuration for every trained role."""
    return peft_config.keys() if isinstance(peft_config, Mapping) and "peft_type" not in peft_config else ()


def refuse_unknown_roles(peft_config: object, roles: Sequence[str]) -> None:
    """Raise ConfigError if ``peft_config`` names a role that is not one of ``roles``."""
    if unknown := sorted(str(name) for name in roles_with_adapters(peft_config) if name not in roles):
        raise ConfigError(
            f"peft_config names {', '.join(unknown)}, and the roles are {', '.join(roles)}; write "
            f"role: configuration, or a single configuration with peft_type: LORA"
        )


def _import_peft(role: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"{role}: peft_config needs the package peft; pip install 'lightning-realloc[peft]'"
        ) from error
    return peft


def _configured(peft: Any, source: Mapping[str, Any], role: str) -> Any:
    options = dict(source)
    kind = str(options.pop("peft_type", "LORA")).rpartition(".")[2]
    known = {item.name for item in fields(peft.LoraConfig)}
    if kind == "LORA" and (unknown := sorted(options.keys() - known)):
        raise ConfigError(f"{role}: peft_config has no option {', '.join(unknown)}; write those of peft.LoraConfig")
    if kind != "LORA":
        raise ConfigError(_other_kind(role, kind))
    try:
        return peft.LoraConfig(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{role}: peft_config is refused by PEFT: {error}") from error


def _other_kind(role: str, kind: str) -> str:
    return (
        f"{role}: peft_type={kind} cannot be trained here; use LORA, if you like with use_dora or use_rslora, or "
        f"merge the adapters and give the merged model"
    )


def _check(peft: Any, config: Any, role: str) -> None:
    """Refuse options that the reference, merging or layouts do not support."""
    if not isinstance(config, peft.LoraConfig):
        kind = getattr(config, "peft_type", None)
        raise ConfigError(_other_kind(role, str(kind or type(config).__name__).rpartition(".")[2]))
    setting = f"{role}: peft_config."
    check_type(Integral, **{f"{setting}r": config.r})
    check_type(Real, **{f"{setting}lora_alpha": config.lora_alpha})
    check_share(**{f"{setting}lora_dropout": config.lora_dropout})
    plain = peft.LoraConfig()
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name not in _UNDERSTOOD and value != getattr(plain, item.name) and value:
            raise ConfigError(f"{role}: peft_config.{item.name}={value!r} cannot be used here; leave it out")
    if config.init_lora_weights not in _BEGINNINGS:
        raise ConfigError(
            f"{role}: init_lora_weights={config.init_lora_weights!r} changes the base, which the reference is without "
            f"adapters; use one of {', '.join(map(repr, _BEGINNINGS))}"
        )
