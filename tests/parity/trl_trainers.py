"""Run the loss methods of TRL's trainers without their training, so that the losses are TRL's own code.

Trainers are made without their constructors, which need data sets and an output folder.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns about ORPO

from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import add_fused_lm_head, shutdown_event_loop_in_daemon, start_event_loop_in_daemon

_STATISTICS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _bare(trainer_class: type, model: nn.Module, **attributes: Any) -> Any:
    """Return a trainer of one process without calling its constructor."""
    trainer = object.__new__(trainer_class)
    same = lambda value: value  # noqa: E731
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, gather=same, gather_for_metrics=same, unwrap_model=same,
        parallelism_config=None, is_main_process=True, autocast=nullcontext, reduce=lambda value, **_: value,
    )  # fmt: skip
    settings = {
        "model": model, "accelerator": accelerator, "aux_loss_enabled": False, "_metrics": defaultdict(_lists),
        "_total_train_tokens": 0, "_tp_size": 1, "compute_loss_func": None, "label_smoother": None,
        "current_gradient_accumulation_steps": 1,
    }  # fmt: skip
    for name, value in {**settings, **attributes}.items():
        object.__setattr__(trainer, name, value)
    return trainer


def _lists() -> defaultdict[str, list[float]]:
    return defaultdict(list)


def fused(model: nn.Module) -> nn.Module:
    """Return the model with the fused head that TRL's trainers use for log-probabilities."""
    add_fused_lm_head(model, outputs=_STATISTICS)  # type: ignore[arg-type]
    return model.train()


class Spoken(nn.Module):
    """A stand-in for a model with a fused head, which returns given (B, S - 1) log-probabilities."""

    is_gradient_checkpointing = is_activation_checkpointing = False

    def __init__(self, logprobs: Tensor) -> None:
        super().__init__()
        self.logprobs = logprobs

    def forward(self, **_: Any) -> SimpleNamespace:
        """Return the log-probabilities, and zeros for values that are only logged."""
        zeros = torch.zeros_like(self.logprobs)
        found = dict.fromkeys(_STATISTICS, zeros) | {"is_top1": zeros.bool(), "log_probs": self.logprobs}
        return SimpleNamespace(**found)


def sft_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return TRL's loss of supervised fine-tuning."""
    args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    trainer = _bare(SFTTrainer, model, args=args)
    return trainer.compute_loss(model, inputs)  # type: ignore[no-any-return]


def reward_loss(model: nn.Module, inputs: dict[str, Tensor], *, centre_coef: float | None) -> Tensor:
    """Return TRL's loss of a reward model."""
    args = SimpleNamespace(center_rewards_coefficient=centre_coef)
    return _bare(RewardTrainer, model, args=args).compute_loss(model, inputs)  # type: ignore[no-any-return]


def dpo_loss(model: nn.Module, reference: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    """Return TRL's loss of DPO."""
    settings = {
        "loss_types": ["sigmoid"], "loss_weights": None, "beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "use_weighting": False,
        "precompute_ref_logps": False, "ref_model": reference, **settings,
    }  # fmt: skip
    settings["loss_weights"] = settings["loss_weights"] or [1.0] * len(settings["loss_types"])
    args = SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None)
    return _bare(DPOTrainer, model, args=args, **settings)._compute_loss(model, inputs, False)  # type: ignore[no-any-return]


def kto_loss(model: nn.Module, reference: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    """Return TRL's loss of KTO."""
    args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    settings = {"ref_model": reference, "precompute_ref_logps": False, "loss_type": "kto", **settings}
    trainer = _bare(KTOTrainer, model, args=args, calculate_KL=settings["loss_type"] == "kto", **settings)
    return trainer._compute_loss(model, inputs, False)  # type: ignore[no-any-return]


def orpo_loss(model: nn.Module, inputs: Mapping[str, Tensor], *, beta: float) -> Tensor:
    """Return TRL's loss of ORPO."""
    trainer = _bare(ORPOTrainer, model, is_encoder_decoder=False, padding_value=0, beta=beta)
    return trainer.get_batch_loss_metrics(model, inputs)[0]  # type: ignore[no-any-return]


def policy_loss(logprobs: Tensor, inputs: Mapping[str, Tensor], **settings: Any) -> Tensor:
    """Return TRL's GRPO loss of given (B, T) log-probabilities; ``settings`` are those of its configuration."""
    scored = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)  # noqa: E731
    return model_policy_loss(nn.Linear(1, 1), inputs, _get_per_token_logps_and_entropies=scored, **settings)


def model_policy_loss(model: nn.Module, inputs: Mapping[str, Tensor], **settings: Any) -> Tensor:
    """Return TRL's GRPO loss of a model with a fused head; ``settings`` are those of its configuration."""
    known = {
        "loss_type": "grpo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False, "max_completion_length": 8,
        "_entropy_bonus_enabled": False, "vllm_importance_sampling_correction": False,
    }  # fmt: skip
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    given = {name: value for name, value in settings.items() if name in known or name.startswith("_")}
    rest = {name: value for name, value in settings.items() if name not in given}
    trainer = _bare(GRPOTrainer, model.train(), args=SimpleNamespace(**{**args, **rest}), **{**known, **given})
    return trainer._compute_loss(model, dict(inputs))  # type: ignore[no-any-return]


def response_loss(logprobs: Tensor, inputs: Mapping[str, Tensor], **settings: Any) -> Tensor:
    """Return TRL's RLOO loss of given (B, T) log-probabilities; ``settings`` are those of its configuration."""
    scored = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)  # noqa: E731
    trainer = _bare(RLOOTrainer, nn.Linear(1, 1).train(), _get_per_token_logps_and_entropies=scored, **settings)
    return trainer._compute_loss(trainer.model, dict(inputs))  # type: ignore[no-any-return]


def divergence_loss(student: Tensor, teacher: Tensor, mask: Tensor, *, beta: float, temperature: float) -> Tensor:
    """Return TRL's GKD loss: a divergence of (B, T, V) logits, averaged over the (B, T) tokens of ``mask``."""
    labels = torch.where(mask, 1, -100)
    return GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=temperature)  # type: ignore[no-any-return]


def tool_loop(
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[dict[str, Any]],
    script: Sequence[str],
    tools: Sequence[Callable[..., Any]],
    *,
    max_tool_calling_iterations: int = sys.maxsize,
    max_completion_length: int = 4096,
) -> tuple[list[int], list[int], list[int], list[dict[str, Any]]]:
    """Return tokens of the prompt and of the response, its tool mask and its messages, as TRL's tool loop makes them.

    Args:
        script: The model's turns, without the token that ends them.
        tools: Functions, or methods of an environment after its reset.
    """
    tokenizer = add_response_schema(copy.deepcopy(tokenizer))
    ours = None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
    turns = ([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in script)
    rendered: Any = {"tools": list(tools), "chat_template": ours, "return_dict": False}
    prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **rendered)
    first = next(turns)[:max_completion_length]
    thread, loop, ready = start_event_loop_in_daemon(name="tools")
    ready.wait()
    by_kind = [{tool.__name__: tool for tool in tools if inspect.iscoroutinefunction(tool) is kind}
               for kind in (False, True)]  # fmt: skip
    trainer = _bare(
        GRPOTrainer, SimpleNamespace(config=SimpleNamespace(max_position_embeddings=sys.maxsize)),  # type: ignore[arg-type]
        max_tool_calling_iterations=max_tool_calling_iterations, max_completion_length=max_completion_length,
        _sync_tool_dicts=[by_kind[0]], _async_tool_dicts=[by_kind[1]], async_loop=loop, tools=list(tools),
        processing_class=tokenizer, _tokenizer=tokenizer, chat_template=ours, chat_template_kwargs={}, _is_vlm=False,
        use_vllm=False, environment_factories=None,
        _generate_single_turn=lambda *_, **__: ([next(turns)], None),
    )  # fmt: skip
    said = [[parse_response(tokenizer, first, prefix=prompt_ids, tools=list(tools))]]
    try:
        mask, messages, ids, *_ = trainer._tool_call_loop([list(prompt)], [prompt_ids], [first], said, None, None, {})
    finally:
        shutdown_event_loop_in_daemon(thread, loop)
    return prompt_ids, ids[0], mask[0], messages[0]
