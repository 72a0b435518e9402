"""Which setting is meant by a name that there is not? Another library's name for it, or one that is misspelt.

Whoever comes from TRL or OpenRLHF types its names; Python alone would answer that such an argument does not exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

from lightning_realloc.errors import ConfigError

_Class = TypeVar("_Class", bound=type)
_SAMPLING = "sampling=SamplingParams({}=...)"
_OPTIONS = "train_options=TrainOptions({}=...)"
_PACKAGE = f"{__package__}."
_TRAINER = "Lightning's Trainer({}=...)"
_DATA = "the data module's {}"

ALGORITHM_HINTS: Mapping[str, str] = {
    "model": "the first argument, a name, folder, config or module",
    "policy": "the first argument, a name, folder, config or module",
    "ref_model": "reference=; without it a frozen copy of the actor",
    "value_model": "critic=",
    "reward_model": "reward=",
    "reward_funcs": "reward=, a function, a model or a list",
    "reward_processing_classes": "reward_tokenizer=",
    "teacher_model": "teacher=",
    "processing_class": "tokenizer=",
    "args": "keyword arguments of the algorithm and of Lightning's Trainer",
    "train_dataset": _DATA.format("data, in trainer.fit(model, PromptDataModule(data, batch_size=...))"),
    "eval_dataset": _DATA.format("val_data"),
    "per_device_train_batch_size": _DATA.format("batch_size, rows or prompts of an iteration over all ranks"),
    "generation_batch_size": _DATA.format("batch_size, prompts of an iteration over all ranks"),
    "max_prompt_length": _DATA.format("max_prompt_tokens"),
    "max_length": _DATA.format("max_tokens"),
    "max_seq_length": _DATA.format("max_tokens"),
    "truncation_mode": _DATA.format("long_rows"),
    "chat_template_kwargs": _DATA.format("chat_template_kwargs"),
    "packing": "nothing to set: samples are always packed, without padding, and never see each other",
    "padding_free": "nothing to set: samples are always packed, without padding, and never see each other",
    "num_generations": _SAMPLING.format("n"),
    "rloo_k": _SAMPLING.format("n"),
    "n_samples_per_prompt": _SAMPLING.format("n"),
    "max_completion_length": _SAMPLING.format("max_new_tokens"),
    "max_new_tokens": _SAMPLING.format("max_new_tokens"),
    "response_length": _SAMPLING.format("max_new_tokens"),
    "temperature": _SAMPLING.format("temperature"),
    "top_p": _SAMPLING.format("top_p"),
    "top_k": _SAMPLING.format("top_k"),
    "min_p": _SAMPLING.format("min_p"),
    "repetition_penalty": _SAMPLING.format("repetition_penalty"),
    "stop_token": _SAMPLING.format("stop_token_ids"),
    "num_iterations": _OPTIONS.format("num_epochs"),
    "num_ppo_epochs": _OPTIONS.format("num_epochs"),
    "num_mini_batches": _OPTIONS.format("num_minibatches"),
    "steps_per_generation": _OPTIONS.format("num_minibatches"),
    "gradient_accumulation_steps": f"{_OPTIONS.format('micro_batch_tokens')}, which bounds a forward pass and changes "
    "no result",
    "max_grad_norm": _OPTIONS.format("max_grad_norm"),
    "gradient_checkpointing": "gradient_checkpointing of the training call in the plan, docs/layouts.md",
    "beta": "kl_coef=",
    "init_kl_coef": "kl_coef=",
    "epsilon": "clip_low= and clip_high=",
    "epsilon_high": "clip_high=",
    "eps_clip": "clip_low= and clip_high=",
    "cliprange": "clip_low= and clip_high=",
    "delta": "clip_most=",
    "dual_clip": "clip_most=",
    "cliprange_value": "value_clip=",
    "gamma": "discount=",
    "lam": "gae_lambda=",
    "vf_coef": "critic_learning_rate=: actor and critic have a loss and an optimizer each",
    "whiten_rewards": "normalize_advantages=",
    "whiten_advantages": "normalize_advantages=",
    "loss_type": "loss= (of policies also loss_average= and ratio_level=, docs/policies.md)",
    "use_weighting": "weighting='wpo'",
    "f_alpha_divergence_coef": "alpha=",
    "precompute_ref_log_probs": "precompute_reference=",
    "sapo_temperature_pos": "sapo_temperatures=",
    "sapo_temperature_neg": "sapo_temperatures=",
    "reward_clip_range": "Shaped(function, low=..., high=...) as a reward",
    "scale_rewards": "normalize_by_std=",
    "importance_sampling_level": "ratio_level=",
    "mask_truncated_completions": "learn_truncated=False",
    "vllm_importance_sampling_correction": "engine_correction=EngineCorrection(...)",
    "f_divergence_type": "divergence=",
    "ld_alpha": "tail_weight=",
    "rpo_alpha": "loss=['sigmoid', 'sft'] with loss_weights=[1.0, rpo_alpha]",
    "center_rewards_coefficient": "centre_coef=",
    "lr_scheduler_type": "lr_scheduler=, which makes a schedule from an optimizer",
    "warmup_ratio": "lr_scheduler=, which makes a schedule from an optimizer",
    "warmup_steps": "lr_scheduler=, which makes a schedule from an optimizer",
    "optim": "optimizer=, which makes one from parameters",
    "use_liger_kernel": "liger_kernels=",
    "torch_compile": _OPTIONS.format("compile"),
    "disable_dropout": "nothing to set: dropout is off but in SFT",
    "assistant_only_loss": _DATA.format("learn; of messages only what the assistant says is learnt"),
    "completion_only_loss": "nothing to set: beside a prompt the completion alone is learnt",
    "group_by_length": _DATA.format("bucket_batches"),
    "use_vllm": "nothing to set: the package generates by itself, on the actor's own weights",
    "log_completions": "the callback RolloutTable(every_n_steps=..., num_samples=...)",
    "num_completions_to_print": "the callback RolloutTable(every_n_steps=..., num_samples=...)",
    "num_generations_eval": "evaluation_sampling=SamplingParams(n=...)",
    "save_steps": "every_n_train_steps of ModelCheckpoint, among the Trainer's callbacks",
    "save_total_limit": "save_top_k of ModelCheckpoint, among the Trainer's callbacks",
    "resume_from_checkpoint": "trainer.fit(..., ckpt_path=...)",
    "deepspeed": "layouts in the plan, docs/layouts.md",
    "fsdp": "layouts in the plan, docs/layouts.md",
    "model_init_kwargs": "a model that from_pretrained(...) gave, with tokenizer=",
    "num_train_epochs": _TRAINER.format("max_epochs"),
    "max_steps": _TRAINER.format("max_steps"),
    "logging_steps": _TRAINER.format("log_every_n_steps"),
    "eval_steps": _TRAINER.format("val_check_interval"),
    "eval_strategy": _TRAINER.format("val_check_interval"),
    "report_to": _TRAINER.format("logger"),
    "bf16": f"{_TRAINER.format('precision')}, 'bf16-mixed' or 'bf16-true'",
    "output_dir": "dirpath of SaveHuggingFace (weights) and ModelCheckpoint (to resume), among the Trainer's callbacks",
    "push_to_hub": "the callback SaveHuggingFace(dirpath, push_to_hub=...)",
}
"""Setting of TRL's or OpenRLHF's trainers -> what it is here, where the algorithm has no setting of that name."""

DATA_HINTS: Mapping[str, str] = {
    "train_dataset": "the first argument",
    "dataset": "the first argument",
    "eval_dataset": "val_data=",
    "processing_class": "tokenizer=",
    "per_device_train_batch_size": "batch_size=, rows or prompts of an iteration over all ranks",
    "max_prompt_length": "max_prompt_tokens= (max_tokens= of prompt and response, where responses are given)",
    "max_length": "max_tokens= (max_prompt_tokens= of prompts)",
    "max_seq_length": "max_tokens=",
    "truncation_mode": "long_rows=",
    "packing": "nothing to set: samples are always packed, without padding, and never see each other",
    "assistant_only_loss": "learn=; of messages only what the assistant says is learnt",
    "group_by_length": "bucket_batches=",
    "dataset_kwargs": "DatasetSource(...) as the first argument",
}
"""The same of what TRL's trainers take beside the data."""

SAMPLING_HINTS: Mapping[str, str] = {
    "max_tokens": "max_new_tokens=",
    "max_length": "max_new_tokens=",
    "max_completion_length": "max_new_tokens=",
    "min_tokens": "min_new_tokens=",
    "num_generations": "n=",
    "num_return_sequences": "n=",
    "do_sample": "temperature=0 for the most likely token",
    "stop": "stop_strings=",
}
"""Setting of vLLM's, transformers' or TRL's sampling -> ours."""

TRAIN_OPTIONS_HINTS: Mapping[str, str] = {
    "num_iterations": "num_epochs=",
    "num_ppo_epochs": "num_epochs=",
    "num_mini_batches": "num_minibatches=",
    "gradient_accumulation_steps": "micro_batch_tokens=, which bounds a forward pass and changes no result",
    "micro_batch_size": "micro_batch_tokens=",
    "gradient_clip_val": "max_grad_norm=",
}
"""Setting of TRL's trainers or of Lightning's -> ours."""

SPECULATION_HINTS: Mapping[str, str] = {
    "num_speculative_tokens": "num_draft_tokens=, or max_draft_tokens= for a depth that adapts",
    "num_assistant_tokens": "num_draft_tokens=, or max_draft_tokens= for a depth that adapts",
    "assistant_model": "draft_model=",
    "model": "draft_model=",
    "method": "drafter=",
}
"""The same of vLLM's or transformers' speculative decoding."""

ENGINE_HINTS: Mapping[str, str] = {
    "max_num_seqs": "max_slots=",
    "max_model_len": "max_length=",
    "max_num_batched_tokens": "max_prefill_tokens=",
    "gpu_memory_utilization": "max_cache_bytes=",
    "speculative_config": "speculation=Speculation(...)",
    "assistant_model": "speculation=Speculation(drafter='model', draft_model=...)",
    "sampling_params": "the second argument of generate(...)",
    "enable_prefix_caching": "nothing to set: samples of a prompt share it; max_cache_bytes= lets all that begin alike",
}
"""The same of vLLM's engine, or of transformers' ``generate``."""

STRATEGY_HINTS: Mapping[str, str] = {
    "accelerator": _TRAINER.format("accelerator"),
    "devices": _TRAINER.format("devices"),
    "num_nodes": _TRAINER.format("num_nodes"),
    "precision": _TRAINER.format("precision"),
    "stage": "layouts in the plan, docs/layouts.md",
    "tensor_parallel_size": "layouts in the plan, docs/layouts.md",
    "data_parallel_size": "layouts in the plan, docs/layouts.md",
}
"""The same of Lightning's Trainer and its other strategies."""


def hint_for(name: str) -> str | None:
    """Return what another library's name for a setting is here, None for a name that nobody has."""
    return next(
        (h[name] for h in (ALGORITHM_HINTS, DATA_HINTS, SAMPLING_HINTS, TRAIN_OPTIONS_HINTS) if name in h), None
    )


class SuggestsSettings:
    """A class that answers to another library's name for a setting, or a misspelt one, with its own.

    Subclasses outside of this package that define ``__init__`` may take such a name themselves, and are let alone.
    """

    __slots__ = ()
    names_elsewhere: ClassVar[Mapping[str, str]] = {}
    """Names that are known elsewhere -> what they are here."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuse names that there are not, before Python does without a hint."""
        if settings and _takes_settings(cls)[0].__module__.startswith(_PACKAGE):
            _refuse_unknown(cls, settings)
        return super().__new__(cls)


def suggest_settings(hints: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Let a class answer as :class:`SuggestsSettings` does, such as a dataclass.

    That has no base for it: with one that is no dataclass itself, the command line would ask for a ``class_path``.
    """

    def decorate(cls: _Class) -> _Class:
        initialize = vars(cls)["__init__"]

        @wraps(initialize)
        def __init__(self: object, *args: Any, **settings: Any) -> None:
            if settings:
                _refuse_unknown(cls, settings)
            initialize(self, *args, **settings)

        cls.__init__ = __init__  # type: ignore[misc]
        cls.names_elsewhere = hints  # type: ignore[attr-defined]
        return cls

    return decorate


def _refuse_unknown(cls: type, settings: Iterable[str]) -> None:
    known = settings_of(cls)
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(describe_unknown_settings(cls, unknown))


def describe_unknown_settings(cls: type, names: Sequence[str]) -> str:
    """Return what is to be said to names that are no settings of a class."""
    meant = [_meant_by(name, cls) for name in names]
    if len(names) > 1:
        meant = [f"{name}: {own}" for name, own in zip(names, meant, strict=True)]
    return f"{cls.__name__} has no setting {', '.join(names)}; {'; '.join(meant)}"


def _meant_by(name: str, cls: type) -> str:
    hints: Mapping[str, str] = getattr(cls, "names_elsewhere", {})
    if name in hints:
        return f"here it is {hints[name]}"
    known = sorted(settings_of(cls))
    alike = get_close_matches(name, known, n=1)
    return f"did you mean {alike[0]}=?" if alike else f"it has {', '.join(known)}"


_SETTINGS_OF: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
"""Answers of :func:`settings_of`. A class made in a function holds that function's models, so the keys are weak."""


def settings_of(cls: type) -> frozenset[str]:
    """Return the names that a class and those that it hands the rest to can be given."""
    if cls not in _SETTINGS_OF:
        _SETTINGS_OF[cls] = _read_settings(cls)
    return _SETTINGS_OF[cls]


def _read_settings(cls: type) -> frozenset[str]:
    names: set[str] = set()
    for base in _takes_settings(cls):
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return frozenset(names)


def _takes_settings(cls: type) -> list[type]:
    """Return the classes whose ``__init__`` is asked, in this order."""
    return [base for base in cls.__mro__ if "__init__" in vars(base)]
