"""Base of algorithms whose responses are rewarded, and of those that choose the responses to train on.

Most algorithms train on all responses. Some choose among the scored ones: the best of a group, pairs, groups with
different rewards. They run their calls in two passes. The first pass generates and scores, and all ranks get its
results. The second pass runs the other calls on the chosen samples, as if the loader had supplied them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, infer
from lightning_realloc.algorithms.base.loaded_weights import ModelSource, check_source
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import (
    response_summary,
    reward_columns,
    reward_summary,
    without_failed,
)
from lightning_realloc.algorithms.base.vocabulary import require_same_vocabulary
from lightning_realloc.algorithms.losses.functional import kl_estimate
from lightning_realloc.algorithms.rollout.conversations.dialogues import EpisodeDialogues
from lightning_realloc.algorithms.rollout.policy import PolicyModule, PolicySettings
from lightning_realloc.algorithms.rollout.reward_sources import (
    RewardSource,
    RewardSources,
    RewardTokenizer,
    StopProperly,
    calls_of_further,
    checked_penalty,
    penalize_truncated,
    with_further,
)
from lightning_realloc.algorithms.rollout.start_divergence import (
    START_KL,
    mean_divergence,
    rounding_limit,
    starts_as,
    warn_of_divergence,
)
from lightning_realloc.algorithms.settings import Unpack, check_type
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.generation.core.model_config import eos_ids_of
from lightning_realloc.trainers import forget_metrics


class RewardedSettings(PolicySettings, total=False):
    """Types of the settings that subclasses pass on to :class:`RewardedModule`, where they are documented."""

    reward_weights: Sequence[float] | None
    reward_tokenizer: RewardTokenizer
    missing_eos_penalty: float | StopProperly | None
    keep_special_tokens: bool
    reference: ModelSource | None


class RewardedModule(PolicyModule):
    """A PolicyModule whose responses are rewarded by reward models, reward functions, or both.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Functions ``f(prompts, completions, **columns) -> list[float]``, or their import paths; models that
            score sequences, as names, folders, configs or modules, which are roles ``reward``, ``reward_2``, ...; or
            a list of either. None: environments alone give rewards, which are added to all others.
        sampling: Sampling of the rollout.
        reward_weights: Weight of each reward; None: all count 1.
        reward_tokenizer: ``"actor"``: reward models read the actor's tokens; ``"retokenize"``: texts by their own
            tokenizers, messages by their own chat templates; a tokenizer: both by that one.
        missing_eos_penalty: Subtracted in training from the reward of a response that is cut off; or
            ``StopProperly(...)``, which scales or replaces it; None: nothing.
        keep_special_tokens: Whether reward functions get completions with the tokenizer's special tokens, apart from
            one that ends the response.
        reference: Model that the policy is kept close to; None: the actor as it was loaded, or without its adapters.
        settings: Settings of :class:`PolicyModule` (evaluation, environment, conversation) and
            :class:`MultiModelModule` (learning rate, optimizer, schedule, training options, seed).
    """

    optional_roles = ("reference", "reward")
    evaluation_calls: tuple[str, ...] = ("actor.generate", "judge")
    """Calls up to the rewards, which also run before samples are chosen; with reward models also theirs."""
    share_prompts = True
    reward_column = "rewards"
    reports_rewards = True
    """Whether the data module gets the rewards of training, as a curriculum needs."""

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource | None = None,
        *,
        sampling: SamplingParams,
        reward_weights: Sequence[float] | None = None,
        reward_tokenizer: RewardTokenizer = "actor",
        missing_eos_penalty: float | StopProperly | None = None,
        keep_special_tokens: bool = False,
        reference: ModelSource | None = None,
        **settings: Unpack[PolicySettings],
    ) -> None:
        check_source("actor", actor, way_out=f", as in {type(self).__name__}(model, reward)")
        super().__init__(sampling=sampling, **settings)
        if self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature=0 gives every response of a group the same tokens, and explores nothing; set it "
                "above 0"
            )
        self.missing_eos_penalty = checked_penalty(missing_eos_penalty)
        check_type(bool, keep_special_tokens=keep_special_tokens)
        self.keep_special_tokens = keep_special_tokens
        self._judges = RewardSources(
            reward,
            self.sources,
            weights=reward_weights,
            tokenizer=reward_tokenizer,
            has_environment=self._dialogues is not None and self._dialogues.gives_rewards,
        )
        self._reward_functions = self._judges.functions
        if self._reward_functions is not None and self._dialogues is None:
            self._reward_functions.check_lengths(self.sampling.max_new_tokens)
        self._show_environments()
        self.evaluation_calls = ("actor.generate", *self._judges.evaluation_calls)
        for model in self._judges.models[1:]:
            setattr(self, model.method, partial(self._score, model.role))
        self._awaits_start = False
        """Whether the first rollout is to be compared with a reference that starts as the actor does."""
        self.sources["actor"] = actor
        if reference is not None:
            self.sources["reference"] = reference

    def _show_environments(self) -> None:
        """Let reward functions read the environments that they ask for."""
        functions, dialogues = self._reward_functions, self._dialogues
        if isinstance(dialogues, EpisodeDialogues):
            dialogues.functions = functions
        elif functions is not None:
            functions.do_without_environments()

    @property
    def has_reference(self) -> bool:
        """Whether the algorithm uses a reference."""
        return True

    @property
    def chooses(self) -> bool:
        """Whether :meth:`choose` selects the samples to train on."""
        return False

    def roles(self) -> tuple[Role, ...]:
        """Return the actor, the reference and reward models that are in use, and models that environments talk to."""
        actor = self.make_role("actor", trained=True)
        reference = (self.reference_of(actor, self.sources.get("reference")),) if self.has_reference else ()
        scorers = (
            self.make_role(model.role, trained=False, task="sequence_classification") for model in self._judges.models
        )
        return (actor, *reference, *scorers, *self.partner_roles())

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, with those of further reward models."""
        return with_further(super().calls(), self._judges.further_calls())

    @classmethod
    def calls_for(cls, roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, with those of further reward models."""
        return with_further(super().calls_for(roles), calls_of_further(roles))

    def configure_model(self) -> None:
        """Build the models, after a check that they read the actor's tokens; warn about an unused reference."""
        if not self.models():
            self._check_vocabularies()
            if self._reward_functions is not None and not self.keep_special_tokens:
                self._reward_functions.check_tokens(lambda: self.tokenizer.all_special_tokens)
            self._warn_of_unused_reference()
            actor, *others = self.roles()
            alike = any(role.name == "reference" and starts_as(role, actor) for role in others)
            self._awaits_start = alike and self._trainer is not None
        super().configure_model()

    def _check_vocabularies(self) -> None:
        # Rewards first: a critic may be a copy of one, and the error should name the setting that was given.
        actor, *others = self.roles()
        if self._judges.models:
            self._judges.check_vocabularies((actor, *others), self.tokenizer)
        for role in others:
            if role.name in ("critic", "reference") and role.name in self.sources:
                way_out = f"give {role.name}= a model with the actor's tokenizer"
                require_same_vocabulary(role, actor, self.tokenizer, way_out=way_out)

    def _warn_of_unused_reference(self) -> None:
        if "reference" in self.sources and not self.has_reference:
            can_have_one = hasattr(self, "kl")  # other algorithms never do
            cause, way_out = (" with kl_coef=0", ", or raise kl_coef") if can_have_one else ("", "")
            rank_zero_warn(
                f"{type(self).__name__} uses no reference{cause}, so the given one is not loaded; leave reference "
                f"out{way_out}"
            )

    @infer("reward", needs="rollout", produces="reward_scores")
    def score_sequences(self, reward: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the first reward model's score of every sequence."""
        return self._score("reward", reward, batch)

    def _score(self, role: str, reward: nn.Module, batch: PackedBatch) -> Tensor:
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        makes_messages = isinstance(data, PromptDataModule) and data.makes_messages(data.tokenizer)
        return self._judges.score(role, reward, batch, self.tokenizer, makes_messages=makes_messages)

    @compute(needs=("rollout", "reward_scores"), produces="rewards")
    def judge(self, samples: Samples) -> Mapping[str, Column]:
        """Reward every response."""
        rewards = self._judges.judge(samples, self.tokenizer, ends=self.response_ends())
        penalty = self.missing_eos_penalty
        if penalty is not None and not self.training_now:
            penalty = None
        return {"rewards": penalize_truncated(rewards.total, samples, penalty), **reward_columns(rewards)}

    def response_ends(self) -> frozenset[int] | None:
        """Return the tokens that may end a response, if reward functions read all other special tokens; else None."""
        if not self.keep_special_tokens:
            return None
        eos = self.tokenizer.eos_token_id
        return eos_ids_of(self.models()["actor"]) | ({eos} if isinstance(eos, int) else set())

    # ---- choosing
    def choose(self, samples: Samples) -> Samples | None:
        """Return the samples to train on, from scored samples that are equal on every rank and sorted by id.

        None takes no step, and continues with the next batch.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it chooses")

    def runs(self, call: str, iteration: int) -> bool:
        """Leave out the calls that ran before samples were chosen."""
        return not (self.chooses and call in self.evaluation_calls)

    def training_step(self, batch: Samples, batch_idx: int) -> None:
        """Run one iteration of the dataflow, in two passes if samples are chosen."""
        if not self.chooses:
            super().training_step(batch, batch_idx)
            return
        self.require_batch(batch)
        self.check_batch(batch)
        scored = self.first_walk(batch)
        self._record_rewards(scored)
        chosen = self.choose(scored)
        if chosen is None:
            return
        for samples in self._strategy.run_iteration(chosen):
            self.log_dict(self.summarize(samples), prog_bar=True, batch_size=len(samples))
            self.on_iteration_end(samples)

    def first_walk(self, batch: Samples) -> Samples:
        """Return scored responses to a batch, the same on every rank, sorted by id."""
        prepared = self.prepare_batch(batch)
        samples: Samples = self._strategy.run_calls(prepared, self.evaluation_calls, are_of_next=True)
        return samples.to("cpu").sorted_by_id()

    def setup(self, stage: str) -> None:
        """Raise for settings that cannot be combined with choosing."""
        super().setup(stage)
        if stage != "fit" or not self.chooses:
            return
        name = type(self).__name__
        if self.generation_options.rollout_budget is not None:
            raise ConfigError(
                f"rollout_budget carries responses on, and {name} chooses among those of whole prompts before it "
                f"learns; leave rollout_budget out"
            )
        for setting, plain in (("max_staleness", 0), ("generation_chunks", 1)):
            if getattr(self.trainer.strategy, setting, plain) != plain:
                raise ConfigError(
                    f"{setting}={getattr(self.trainer.strategy, setting)} works ahead of what is chosen, and {name} "
                    f"chooses among all responses before it learns; use ReallocStrategy({setting}={plain})"
                )

    def _record_rewards(self, samples: Samples) -> None:
        """Report rewards to the data module, whose curriculum draws the next batches by them; log its metrics."""
        data = getattr(self._trainer, "datamodule", None)
        if isinstance(data, PromptDataModule) and len(samples):
            rewards = without_failed(samples, self.reward_column).tensor(self.reward_column)
            metrics = data.record_rewards(samples.tensor("prompt_id"), rewards)
            # A set without a prompt in this batch has no reward.
            forget_metrics(self.trainer, metrics, ("set_reward", "curriculum"))
            self.log_dict(metrics, batch_size=len(samples))

    # ---- metrics and checks
    def start_metrics(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the (N,) divergences of the rollout from the reference, until those of the first rollout are known."""
        if not self._awaits_start:
            return {}
        return {START_KL: kl_estimate(batch["behaviour_logprobs"], batch["ref_logprobs"])}

    def on_iteration_end(self, samples: Samples) -> None:
        """Warn if the first rollout diverges from a reference that starts as the actor does."""
        super().on_iteration_end(samples)
        if not self.chooses:
            self._record_rewards(samples)
        if not self._awaits_start:
            return
        kl = mean_divergence(samples, self.trainer.callback_metrics.get(f"actor/{START_KL}"))
        if kl is not None:
            self._awaits_start = False
            precision, actor = str(self.trainer.precision), self.models()["actor"]
            warn_of_divergence(kl, rounding_limit(actor, precision=precision, engine=self.engine))

    def on_load_checkpoint(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Go on from an actor that has left its reference."""
        super().on_load_checkpoint(checkpoint)
        self._awaits_start = False

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return mean rewards, the mean response length, and the share that ended by themselves."""
        return {"reward": samples.tensor("rewards").nanmean(), **reward_summary(samples), **response_summary(samples)}

    def check_batch(self, batch: Samples) -> None:
        """Raise for data without a column of a function, for prompts that open a tag, and for too few samples."""
        super().check_batch(batch)
        if self._reward_functions is not None:
            self._reward_functions.check_columns(batch.data)
            first = batch.select([0])
            self._reward_functions.check_prompt(
                first.objects("prompt")[0], lambda: str(self.tokenizer.decode(first.ragged("prompt_ids").values[-32:]))
            )


def check_group(n: int) -> None:
    """Raise ConfigError for a group of fewer than two responses."""
    if n < 2:
        raise ConfigError(f"sampling.n={n}: a group needs 2 or more responses to compare; set n >= 2")
