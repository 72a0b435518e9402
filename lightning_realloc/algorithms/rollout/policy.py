"""Base of algorithms whose actor responds to prompts: sampling, environment and budget of the rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.calls import generate, infer
from lightning_realloc.algorithms.base.module import ModuleSettings, MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import (
    Dialogue,
    environment_failed,
    sample_responses,
    without_failed,
)
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage, averaged_loss
from lightning_realloc.algorithms.rollout.accuracy import Accuracy
from lightning_realloc.algorithms.rollout.conversations.dialogues import (
    EpisodeDialogues,
    ToolSource,
    dialogues_of,
    processor_finder,
)
from lightning_realloc.algorithms.rollout.conversations.partner_roles import (
    PartnerRoles,
    PartnerSource,
    eos_tokens,
    has_own_model,
    with_partners,
)
from lightning_realloc.algorithms.rollout.conversations.token_environment import EnvironmentSource
from lightning_realloc.algorithms.rollout.final_answers import adding_answers
from lightning_realloc.algorithms.rollout.partial_rollouts import BudgetedRollout, PartialRollouts
from lightning_realloc.algorithms.rollout.response_parts import PartColumns, part_columns_of
from lightning_realloc.algorithms.settings import Unpack, check_minibatches, check_type
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Divided, Samples
from lightning_realloc.batch.training import Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.environments.turns.turn_parser import PARTS, Parser, Part, TurnParser
from lightning_realloc.errors import ConfigError, DataError, GenerationError
from lightning_realloc.generation import Conversation, Engine, SamplingParams
from lightning_realloc.generation.core.model_config import penalties_of
from lightning_realloc.rewards.failure_rule import GIVE_UP_AFTER
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs
from lightning_realloc.scores.question_scores import QuestionScores

_CHECKPOINT_KEY = "carried_rollout"


class PolicySettings(ModuleSettings, total=False):
    """Types of the settings that subclasses pass on to :class:`PolicyModule`, where they are documented."""

    evaluation_sampling: SamplingParams | None
    accuracy: Accuracy | None
    environment: EnvironmentSource | None
    tools: Sequence[ToolSource]
    parser: Parser | None
    conversation: Conversation | None
    partners: Mapping[str, PartnerSource] | None


class PolicyModule(MultiModelModule):
    """A MultiModelModule with a role ``actor`` that responds to prompts, and an optional role ``reference``.

    Args:
        sampling: Sampling of the rollout.
        evaluation_sampling: Sampling of ``validate`` and ``test``; None: one greedy response per prompt.
        accuracy: Rule for correct responses, for ``val/accuracy``, ``val/pass@k`` and ``val/maj@k``; None: not logged.
        environment: Answers the actor's turns; its tokens are not learned. A class of `MessageEnvironment`, one with
            TRL's methods ``reset`` and ``get_reward``, or an object that is copied, for each response; several by
            name, for the data's column ``environment``; a function ``f(turn) -> token ids | None``, or a class of
            such functions, made from the tokenizer; or an import path. None: a response is one turn, unless it has
            ``tools``.
        tools: Functions with annotations and a docstring that the actor may call, or their import paths.
        parser: How the actor writes calls: a format's name, a response template of transformers, or a function from
            the text of a turn to a message. None: as its chat template.
        conversation: Limits on the turns of a response and on the environment's time.
        partners: Models that environments may talk to, by name: ``"actor"`` for the policy itself, ``"reference"`` or
            ``"teacher"``, `ActorAverage` for a past self, or a frozen model as a Hugging Face name or folder, a config,
            or a module. The last two become the role ``partner_<name>``.
        settings: Settings of :class:`MultiModelModule`: learning rate, optimizer, schedule, training options, seed.
    """

    optional_roles: tuple[str, ...] = ("reference",)
    batch_columns: tuple[str, ...] = ("prompt_ids",)
    data_module = "PromptDataModule"
    supports_rollout_budget = True
    loss_average: LossAverage
    """Average of token losses, which a subclass sets."""
    learned_parts: tuple[Part, ...] = PARTS
    """Parts of responses that are learned, which a subclass sets."""
    reward_column: str | None = None
    """Column with the rewards of responses; None if there are none."""

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        evaluation_sampling: SamplingParams | None = None,
        accuracy: Accuracy | None = None,
        environment: EnvironmentSource | None = None,
        tools: Sequence[ToolSource] = (),
        parser: Parser | None = None,
        conversation: Conversation | None = None,
        partners: Mapping[str, PartnerSource] | None = None,
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__(**settings)
        check_type(SamplingParams, sampling=sampling, evaluation_sampling=evaluation_sampling)
        check_type(Conversation, conversation=conversation)
        self.sampling = sampling
        self.evaluation_sampling = evaluation_sampling or replace(sampling, n=1, temperature=0.0)
        self.accuracy = accuracy
        if accuracy is not None:
            accuracy.check(type(self).__name__, self.evaluation_sampling.n, has_rewards=self.reward_column is not None)
        self._partners = PartnerRoles(partners, self.sources)
        self._partners.check(self.engine)
        self._dialogues = dialogues_of(environment, tools, parser, conversation, self._partners.by_name)
        self._parts: PartColumns | None = None
        """Adds the parts of responses, once the models are there; None if they are not asked for."""
        self._num_failed_rollouts = 0
        """Training rollouts in a row of which the environment finished no response on this rank."""
        self._carried: PartialRollouts | None = None
        self._worked_on: Samples | None = None
        """Prompts of the current iteration: those with unfinished responses, then the loader's batch."""
        self._num_expected = 0
        """Number of samples of the current iteration without a budget."""

    def configure_model(self) -> None:
        """Build the models; warn about options of the actor's ``generation_config`` that rollouts ignore."""
        new = not self.models()
        if new:
            self._partners.read_tokenizers(self.roles(), lambda: self.tokenizer)
        super().configure_model()
        if self._dialogues is not None:
            data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
            speakers = self._partners.speakers(self.models(), lambda: self.tokenizer)
            find_processor = processor_finder(self.models()["actor"], self.tokenizer, data)
            self._dialogues.prepare(self.tokenizer, self._stop_token_ids(), data, speakers, find_processor)
        self._parts = self._part_columns()
        unfollowed = penalties_of(self.models()["actor"], self.sampling) if new else {}
        if unfollowed:
            rank_zero_warn(
                f"the actor's generation_config has {', '.join(f'{k}={v}' for k, v in unfollowed.items())}, and "
                f"rollouts follow sampling alone (repetition_penalty={self.sampling.repetition_penalty}); set "
                f"SamplingParams(repetition_penalty=...) for a penalty, or leave it: policies are trained on the "
                f"distribution without it"
            )

    def _part_columns(self) -> PartColumns | None:
        talks = self._dialogues if isinstance(self._dialogues, EpisodeDialogues) else None
        try:
            tokenizer = self.tokenizer
            parser = TurnParser(tokenizer) if talks is None else talks.parser
        except ConfigError:
            if set(self.learned_parts) < set(PARTS):
                raise
            return None  # without a tokenizer, or with a response template that nothing reads
        has_tools = talks is not None and bool(talks.factory.tools)
        stops = self._stop_token_ids()
        return part_columns_of(tokenizer, parser, stop_token_ids=stops, learned=self.learned_parts, has_tools=has_tools)

    def _stop_token_ids(self) -> frozenset[int]:
        """Return the tokens that end a turn of the actor."""
        return eos_tokens(self.tokenizer, self.models()["actor"]) | set(self.sampling.stop_token_ids)

    # ---- models that environments talk to
    def partner_roles(self) -> tuple[Role, ...]:
        """Return the roles of partners with models of their own, for :meth:`roles` of subclasses."""
        return self._partners.own_roles(self.make_role)

    def tokenizer_of(self, role: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a role that generates."""
        return self._partners.tokenizers.get(role) or self.tokenizer

    @property
    def learns_whole_groups(self) -> bool:
        """Whether responses to one prompt are trained on together."""
        return False

    @property
    def has_environment(self) -> bool:
        return self._dialogues is not None

    @property
    def described_turns(self) -> str | None:
        """Limit of turns and names of tools; None without environment."""
        return None if self._dialogues is None else self._dialogues.described

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, with the models that environments talk to."""
        if self._partners.by_name:
            self._partners.check_roles(self.roles())
        return with_partners(super().calls(), tuple(self._partners.by_name.values()))

    @classmethod
    def calls_for(cls, roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, with the partners among the roles."""
        return with_partners(super().calls_for(roles), [role for role in roles if has_own_model(role)])

    @property
    def has_written_prompts(self) -> bool:
        """Whether an environment may write the prompts, so that the data needs none."""
        return self._dialogues is not None and self._dialogues.writes_prompts

    def rollout_sampling(self) -> SamplingParams:
        """Return the sampling of training rollouts."""
        return self.sampling

    @generate("actor", produces="rollout")
    def roll_out(self, actor: Engine, prompts: Samples) -> Samples | Divided:
        """Sample responses to every prompt, with ``evaluation_sampling`` for held-out ones."""
        made = self._responses(actor, prompts)
        if self._dialogues is not None and self.training_now:
            self._require_answers(made.finished if isinstance(made, Divided) else made)
        return made

    def _responses(self, actor: Engine, prompts: Samples) -> Samples | Divided:
        sampling = self.rollout_sampling() if self.training_now else self.evaluation_sampling
        sampling = replace(sampling, seed=(sampling.seed + self.seed) % (1 << 64))
        budget = self.generation_options.rollout_budget
        if budget is None or not self.training_now:
            may_mix = self.training_now and self._strategy.max_staleness > 1
            iteration = self._strategy.iteration if may_mix else None
            dialogue = self._dialogue(actor, prompts, sampling)
            add = self._further_columns(prompts)
            return sample_responses(actor, prompts, sampling, dialogue=dialogue, iteration=iteration, add_columns=add)
        part = BudgetedRollout(
            budget=budget, iteration=self._strategy.iteration, whole_groups=self.learns_whole_groups,
            num_minibatches=max(self.train_options_of(r).num_minibatches for r in self.dataflow.trained_roles),
            dialogue=self._dialogue(actor, prompts, sampling), add_parts=self._parts,
        )  # fmt: skip
        return part.run(actor, prompts, sampling, None if self._carried is None else self._carried.responses)

    def _further_columns(self, prompts: Samples) -> Callable[[Samples], Samples] | None:
        """Return the function that adds columns to responses: their parts, and held-out ones' final answers."""
        is_scored = self.trainer.validating or self.trainer.sanity_checking or self.trainer.testing
        reader = self.accuracy.reader(self.kept_reward_functions()) if self.accuracy and is_scored else None
        return self._parts if reader is None else adding_answers(self._parts, prompts, self.tokenizer, reader)

    def _require_answers(self, made: Samples) -> None:
        """Raise GenerationError if the environment failed in all responses of several rollouts in a row.

        Such responses are not learned, so the run would go on without learning.
        """
        if not len(made):
            return
        failed = bool(environment_failed(made).all())
        self._num_failed_rollouts = self._num_failed_rollouts + 1 if failed else 0
        if self._num_failed_rollouts >= GIVE_UP_AFTER:
            raise GenerationError(
                f"the environment failed in every response of {GIVE_UP_AFTER} rollouts in a row, and such responses "
                f"are not learned; the log names the first cause of each rollout: correct it and resume"
            )

    @infer("reference", needs="rollout", produces="ref_logprobs")
    def score_reference(self, reference: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the reference's log-probability of every token that the actor sampled."""
        return self._logprobs(reference, batch)

    def _logprobs(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        """Return (N,) the log-probability of every response token, zero for the others."""
        return token_logprobs(model, batch, temperature=self.sampling.temperature, only_responses=True).logprobs

    def held_out_dialogue(self, engine: Engine, prompts: Samples, sampling: SamplingParams) -> Dialogue | None:
        """Return the environment that answers responses to held-out prompts; None without one."""
        return self._dialogue(engine, prompts, sampling)

    def _dialogue(self, actor: Engine, prompts: Samples, sampling: SamplingParams) -> Dialogue | None:
        if self._dialogues is None:
            return None
        continues = self.training_now and self.generation_options.rollout_budget is not None
        return self._dialogues.make(actor, prompts, sampling, continues=continues)

    def summarize_questions(self, samples: Samples) -> QuestionScores | None:
        """Return the scores of held-out prompts, if it is known which responses are right."""
        if self.accuracy is None or self.reward_column is None:
            return None
        return self.accuracy.scores(without_failed(samples, self.reward_column), self.reward_column)

    def require_batch(self, batch: object) -> None:
        """Raise DataError also for a batch that holds responses, since this algorithm makes its own."""
        super().require_batch(batch)
        if isinstance(batch, Samples) and "response_ids" in batch:
            raise DataError(
                f"{type(self).__name__} generates its responses, and the batch holds some already, as those of "
                f"SFTDataModule do; give trainer.fit(model, {self.data_module}(data, batch_size=...)), which hands "
                f"columns such as 'completion' to reward functions"
            )

    def check_batch(self, batch: Samples) -> None:
        """Raise for fewer samples than mini-batches of a trained role."""
        if self.training_now:
            for role in self.dataflow.trained_roles:
                check_minibatches(len(batch) * self.sampling.n, self.train_options_of(role))

    def average_loss(self, values: Tensor, batch: PackedBatch, totals: Totals) -> Tensor:
        """Return this micro-batch's part of the mean of (N,) token losses, as ``loss_average`` says."""
        max_tokens = self.sampling.max_new_tokens
        return averaged_loss(values, batch, totals, average=self.loss_average, max_tokens=max_tokens)

    def prediction_calls(self, batch: Samples) -> tuple[str, ...]:
        """Return the calls that ``predict`` runs, without rewards if the data lacks their columns."""
        missing: dict[str, list[str]] = {}
        for functions in self.kept_reward_functions():
            missing |= functions.missing_columns(batch.data)
        if not missing:
            return super().prediction_calls(batch)
        asked = "; ".join(f"{name!r} asks for {', '.join(map(repr, columns))}" for name, columns in missing.items())
        rank_zero_warn(
            f"responses are predicted without rewards: the data has the columns {sorted(batch.data)}, and reward "
            f"function {asked}; add them for rewards"
        )
        return ("actor.generate",)

    # ---- responses that continue in the next iteration
    def setup(self, stage: str) -> None:
        """Raise for a strategy that cannot carry responses over; discard those of an earlier fit."""
        super().setup(stage)
        if stage != "fit" or self.generation_options.rollout_budget is None:
            return
        self._carried = None
        strategy = self.trainer.strategy
        if getattr(strategy, "max_staleness", 0):
            raise ConfigError(
                "rollout_budget carries responses on into the next iteration, which max_staleness generates before "
                "it is known what they are; use ReallocStrategy(max_staleness=0), or leave rollout_budget out"
            )
        if getattr(strategy, "generation_chunks", 1) > 1:
            raise ConfigError(
                f"generation_chunks={strategy.generation_chunks} sends responses before it is known which of them "  # type: ignore[attr-defined]
                f"wait for the next iteration; use ReallocStrategy(generation_chunks=1), or leave rollout_budget out"
            )

    def teardown(self, stage: str) -> None:
        """Close the environments of responses that were to continue."""
        super().teardown(stage)
        if self._dialogues is not None:
            self._dialogues.close()

    def with_carried(self, batch: Samples) -> Samples:
        """Return the prompts with unfinished responses, then the loader's."""
        if self.generation_options.rollout_budget is None:
            return batch
        begun = 0 if self._carried is None else len(self._carried.responses)
        self._num_expected = begun + len(batch) * self.sampling.n
        self._worked_on = batch if self._carried is None else self._carried.prepend_to(batch)
        return self._worked_on

    def on_samples_carried(self, samples: Samples | None, *, num_learnt: int) -> None:
        """Store unfinished responses for the next iteration."""
        budget = self.generation_options.rollout_budget
        if budget is None:
            return
        assert self._worked_on is not None, "samples are carried on without an iteration"
        self._carried = None if samples is None else PartialRollouts.from_responses(samples, self._worked_on)
        self._worked_on = None
        num_carried = 0 if samples is None else len(samples)
        self.log("carried_samples", float(num_carried), batch_size=1)
        if budget.late == "drop":
            self.log("dropped_samples", float(self._num_expected - num_learnt - num_carried), batch_size=1)

    def on_save_checkpoint(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Save unfinished responses."""
        if self._carried is not None:
            checkpoint[_CHECKPOINT_KEY] = self._carried.state() | {"num_responses": self.sampling.n}

    def on_load_checkpoint(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Continue unfinished responses.

        Raises:
            CheckpointError: for responses with an environment in a run without one, or the reverse; and for groups of
                another size.
        """
        state = checkpoint.get(_CHECKPOINT_KEY)
        if state is None:
            return
        carried = PartialRollouts.from_state(state)
        if self.generation_options.rollout_budget is None:
            rank_zero_warn(
                f"the checkpoint holds {len(carried.responses)} responses that were to go on, and they are left out: "
                f"give the rollout_budget of the run that saved it to go on with them"
            )
            return
        num_responses = state.get("num_responses", self.sampling.n)
        carried.check(num_responses, self.sampling.n, has_environment=self._dialogues is not None)
        self._carried = carried
