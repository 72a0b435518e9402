"""What do algorithms have in common whose actor answers prompts? The rollout: how it is sampled, and with whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_realloc.algorithms.calls import generate, infer
from lightning_realloc.algorithms.environments import EnvironmentSource, import_environment, make_environment
from lightning_realloc.algorithms.module import MultiModelModule
from lightning_realloc.algorithms.rollout import Dialogue, sample_responses
from lightning_realloc.algorithms.settings import check_sampling
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import Conversation, Environment, GenerationEngine, SamplingParams
from lightning_realloc.runtime.packed_forward import token_logprobs
from lightning_realloc.runtime.packing import PackedBatch
from lightning_realloc.runtime.samples import Samples


class PolicyModule(MultiModelModule):
    """A MultiModelModule with the roles ``actor``, which answers prompts, and perhaps ``reference``.

    Args:
        sampling: Of the rollout.
        evaluation_sampling: Of ``validate`` and ``test``; by default one greedy response per prompt.
        environment: Who speaks after each of the actor's turns: a function ``f(turn) -> token ids``, None where the
            response is over; a class of such, made from the tokenizer; or the import path of either. Its tokens are
            read, and never learnt. None: a response is one turn.
        conversation: How many turns a response may have, and how long the environment may take.
        settings: Of :class:`MultiModelModule`: learning rate, optimizer, schedule, training options, seed.
    """

    optional_roles: tuple[str, ...] = ("reference",)

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        evaluation_sampling: SamplingParams | None = None,
        environment: EnvironmentSource | None = None,
        conversation: Conversation | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_sampling(sampling, evaluation_sampling)
        self.sampling = sampling
        self.evaluation_sampling = evaluation_sampling or replace(sampling, n=1, temperature=0.0)
        self._environment: Callable[..., Any] | None = None
        self._asked: Environment | None = None
        """The environment, once it was made."""
        self._conversation = conversation or Conversation()
        self._set_environment(environment, conversation)

    def _set_environment(self, environment: EnvironmentSource | None, conversation: Conversation | None) -> None:
        if environment is None:
            if conversation is not None:
                raise ConfigError(f"{conversation} bounds a conversation without environment; give environment= too")
            return
        if self.engine == "hf":
            raise ConfigError(
                "engine='hf' generates whole responses and cannot ask an environment between turns; leave environment "
                "out, or use engine='native'"
            )
        self._environment = import_environment(environment)

    @property
    def training_now(self) -> bool:
        """Whether a rollout is made to learn from."""
        return bool(self.trainer.training)

    @generate("actor", produces="rollout")
    def roll_out(self, actor: GenerationEngine, prompts: Samples) -> Samples:
        """Sample responses to every prompt; of held-out prompts, as ``evaluation_sampling`` says."""
        sampling = self.sampling if self.training_now else self.evaluation_sampling
        sampling = replace(sampling, seed=sampling.seed + self.seed)
        return sample_responses(actor, prompts, sampling, dialogue=self._dialogue())

    @infer("reference", needs="rollout", produces="ref_logprobs")
    def score_reference(self, reference: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the reference's log-probability of every token that the actor chose."""
        return token_logprobs(reference, batch, temperature=self.sampling.temperature, only_responses=True).logprobs

    def _dialogue(self) -> Dialogue | None:
        if self._environment is None:
            return None
        if self._asked is None:
            self._asked = make_environment(self._environment, self.tokenizer)
        return Dialogue(self._asked, self._conversation)
