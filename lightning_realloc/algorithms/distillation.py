"""On-policy distillation: learn from a teacher's probabilities on the student's own responses.

The student responds to prompts. The teacher returns the log-probability of each token of the student, or the whole
distribution at each position. So the student learns on the states that it visits itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, infer, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import model_mask, response_summary
from lightning_realloc.algorithms.base.vocabulary import require_same_vocabulary
from lightning_realloc.algorithms.losses.functional import kept_tokens, sequence_sums
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage, token_metrics
from lightning_realloc.algorithms.losses.policy_losses import PolicyLoss, PolicyLossName, resolve_policy_loss
from lightning_realloc.algorithms.rollout.policy import PolicyModule, PolicySettings
from lightning_realloc.algorithms.settings import Unpack, check_type
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Loss, Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.generation import SamplingParams
from lightning_realloc.runtime.forward.divergence import (
    TeacherHead,
    TeacherTokens,
    steps_after_head,
    vocabulary_divergence,
)
from lightning_realloc.runtime.model.recorded_init import weight_values
from lightning_realloc.runtime.model.structure import transformers_model
from lightning_realloc.runtime.parallel.packed_forward import (
    own_targets,
    predicting_logits,
    predicting_states,
    scatter_values,
)

DistillationDivergence = Literal["sampled", "reverse_kl", "forward_kl", "js"]


class OnPolicyDistillation(PolicyModule):
    """Train an actor to match a teacher on the actor's own responses.

    Source: Agarwal et al., arXiv:2306.13649 (GKD); ``"sampled"``: Gu et al., arXiv:2306.08543, without its returns; Lu
    et al., "On-policy distillation", 2025, https://thinkingmachines.ai/blog/on-policy-distillation.

    Args:
        actor: The student: a Hugging Face name or folder, a config, or a module.
        teacher: The model to match. It reads the student's tokens, so both need the same vocabulary.
        sampling: Sampling of the rollout.
        divergence: ``"sampled"``: the reverse KL as a policy gradient of the sampled tokens; the teacher sends one
            number per token. ``"reverse_kl"``, ``"forward_kl"`` or ``"js"``: over the whole vocabulary; the teacher
            sends its last hidden states, and every training rank keeps a copy of its head, under tensor parallelism a
            share of it.
        mix: For ``"js"``: weight of the teacher in the mixture; near 0 like the forward KL, near 1 like the reverse KL.
        policy_loss: For ``"sampled"``: loss of tokens, such as ``Clip(low=0.2, high=0.28)``, or a name.
        loss_average: Mean over every ``"token"``, or over each ``"sequence"`` and then over these; see
            :class:`PolicyGradient`.
        settings: Settings of :class:`PolicyModule` (evaluation, environment) and
            :class:`MultiModelModule` (learning rate, optimizer, schedule, tokenizer, training options, seed).
    """

    optional_roles = ()
    share_prompts = True

    def __init__(
        self,
        actor: ModelSource,
        teacher: ModelSource,
        *,
        sampling: SamplingParams | None = None,
        divergence: DistillationDivergence = "sampled",
        mix: float = 0.5,
        policy_loss: PolicyLoss | PolicyLossName = "clip",
        loss_average: LossAverage = "token",
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(sampling=sampling or SamplingParams(), **settings)
        require_choice("divergence", divergence, get_args(DistillationDivergence))
        require_choice("loss_average", loss_average, get_args(LossAverage))
        check_type(Real, mix=mix)
        if not 0 < mix < 1:
            raise ConfigError(f"mix={mix} must lie between 0 and 1, not included; there it is one of the other two")
        if self.sampling.temperature == 0:
            raise ConfigError("sampling.temperature=0 leaves one token of each distribution; set it above 0")
        self.divergence = divergence
        self.mix = mix
        self.policy_loss = resolve_policy_loss(policy_loss)
        self.loss_average = loss_average
        self.evaluation_calls = ("actor.generate", *(("teacher.infer", "measure") if self._is_sampled else ()))
        self.sources |= {"actor": actor, "teacher": teacher}
        self._head: TeacherHead | None = None

    @property
    def _is_sampled(self) -> bool:
        return self.divergence == "sampled"

    # ---- models and calls
    def roles(self) -> tuple[Role, ...]:
        """Return the student, the teacher, and models that environments talk to."""
        models = self.make_role("actor", trained=True), self.make_role("teacher", trained=False)
        return (*models, *self.partner_roles())

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls without the reference, with the teacher's call for the divergence."""
        calls = _without_reference(super().calls())
        if self._is_sampled:
            return calls
        changes: dict[str, dict[str, Any]] = {
            "teacher.infer": {"method": "read_teacher", "produces": ("teacher_states",)},
            "actor.train": {"needs": ("rollout", "teacher_states")},
        }
        return tuple(replace(call, **changes.get(call.name, {})) for call in calls if call.name != "measure")

    @classmethod
    def calls_for(cls, roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
        """Return the calls without the reference, which distillation has none of."""
        return _without_reference(super().calls_for(roles))

    def configure_model(self) -> None:
        """Build the models after a check of their vocabularies; store the teacher's head if needed."""
        if not self.models():
            actor, teacher = self.roles()[:2]
            named = isinstance(actor.source, str | Path)  # modules without a tokenizer are compared by size
            tokenizer = self.tokenizer if named else self._tokenizer
            require_same_vocabulary(teacher, actor, tokenizer, way_out="give a teacher of the actor's family")
        super().configure_model()
        if self._head is None and not self._is_sampled:
            self._head = _head_of(self.teacher)

    # ---- the calls
    @infer("teacher", needs="rollout", produces="teacher_logprobs")
    def score_teacher(self, teacher: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the teacher's log-probability of every token that the student sampled."""
        return self._logprobs(teacher, batch)

    def read_teacher(self, teacher: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the (N, D) hidden states that the teacher predicts every response token from."""
        return predicting_states(teacher, batch)

    @compute(needs=("rollout", "teacher_logprobs"), produces="reverse_kl")
    def measure(self, samples: Samples) -> Mapping[str, Column]:
        """Return an estimate of the reverse KL of every response, in nats."""
        mask = model_mask(samples)
        student = kept_tokens(samples.ragged("behaviour_logprobs"), mask)
        teacher = kept_tokens(samples.ragged("teacher_logprobs"), mask).values.to(student.values)
        return {"reverse_kl": sequence_sums(Ragged(student.values - teacher, student.lengths))}

    @train("actor", needs=("rollout", "teacher_logprobs"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's part of the mean divergence over tokens, or of its policy gradient."""
        values, measured = self._sampled(actor, batch) if self._is_sampled else self._whole(actor, batch)
        return Loss(self.average_loss(values, batch, totals), token_metrics(measured, batch.response_mask))

    def _sampled(self, actor: nn.Module, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the (N,) policy losses whose advantage is minus each token's part of the divergence."""
        logprobs, behaviour = self._logprobs(actor, batch), batch["behaviour_logprobs"]
        apart = behaviour - batch["teacher_logprobs"]
        loss = self.policy_loss(logprobs, logprobs - behaviour, -apart, batch)
        return loss.values, {"reverse_kl": apart, "clip_fraction": loss.clipped.float()}

    def _whole(self, actor: nn.Module, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the (N,) divergences over the whole vocabulary, zero outside responses."""
        assert self.divergence != "sampled" and self._head is not None, "the head was kept by configure_model"
        targets = own_targets(actor, batch, batch.counted_places)
        logits = predicting_logits(actor, batch, targets)
        teacher = TeacherTokens(batch["teacher_states"][targets].to(logits.device, logits.dtype), self._head)
        found = vocabulary_divergence(
            logits, teacher, divergence=self.divergence, mix=self.mix, temperature=self.sampling.temperature
        )
        values = scatter_values(actor, batch, targets, found)
        return values, {self.divergence: values}

    # ---- metrics and checks
    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return the mean divergence in nats per response, if it was estimated, and response lengths."""
        found = {"reverse_kl": samples.tensor("reverse_kl").mean()} if "reverse_kl" in samples else {}
        return found | response_summary(samples)


def _without_reference(calls: Sequence[ModelFunctionCall]) -> tuple[ModelFunctionCall, ...]:
    return tuple(call for call in calls if call.role != "reference")


def _head_of(teacher: Any) -> TeacherHead:
    """Return a copy of the head of a model that is not sharded yet, with the steps that follow it.

    Raises:
        ConfigError: for a model whose logits follow from its head in another way.
    """
    steps = steps_after_head(teacher)
    head = transformers_model(teacher).get_output_embeddings()
    with torch.no_grad():
        return TeacherHead(weight_values(head.weight).clone(), None if head.bias is None else head.bias.clone(), steps)
