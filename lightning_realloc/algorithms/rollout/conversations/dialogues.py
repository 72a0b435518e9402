"""Make the dialogue of each generating call from the settings ``environment``, ``tools`` and ``conversation``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.rollout_columns import Dialogue, RowEnvironment
from lightning_realloc.algorithms.rollout.conversations.partner_roles import Speaker
from lightning_realloc.algorithms.rollout.conversations.token_environment import (
    EnvironmentSource,
    import_environment,
    make_environment,
)
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.data.images.processor_of_tokenizer import ProcessorOfTokenizer
from lightning_realloc.data.images.sample_images import ImageProcessor
from lightning_realloc.data.row_tables import RowTables
from lightning_realloc.environments.environment_factory import EnvironmentFactory, is_message_source
from lightning_realloc.environments.episode_options import EpisodeOptions
from lightning_realloc.environments.episodes import Episodes
from lightning_realloc.environments.partner import PartnerSettings, Voice
from lightning_realloc.environments.turns.chat_turns import ChatTurns
from lightning_realloc.environments.turns.turn_parser import Parser, TurnParser
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.generation import Completion, Conversation, Engine, Environment, SamplingParams
from lightning_realloc.generation.partners import PartnerQueue
from lightning_realloc.rewards.functions import RewardFunctions
from lightning_realloc.runtime.model.image_inputs import placeholder_ids

FindProcessor: TypeAlias = Callable[[], ImageProcessor | None]
T = TypeVar("T")
ToolSource: TypeAlias = str | Callable[..., Any]
"""A function with annotations and a docstring that the model may call, or its import path."""


@dataclass(frozen=True)
class EpisodeDialogue(Dialogue):
    """Environments of the samples of one call, and their limits."""

    environment: Episodes
    engine: Engine
    """Engine of the call; the first rank of a tensor-parallel group alone has environments."""
    functions: RewardFunctions | None = None
    """The algorithm's reward functions, of which some may read environments."""
    keeps_unfinished: bool = False
    """Whether episodes of unfinished responses stay for the next call."""

    def _on_first_rank(self, make: Callable[[], T]) -> T:
        """Return the result of what waits for environments, from the first rank of a tensor-parallel group."""
        queue = self.environment.partner_queue
        with self.engine.idle():
            return self.engine.on_first_rank(make) if queue is None else queue.run(make)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments for an engine. The environment also sees the last turn, which it may reward, and ends there."""
        bounds = replace(self.conversation, max_turns=self.conversation.max_turns + 1)
        return {"environment": self.environment, "conversation": bounds}

    def begin(
        self, prompts: Samples, samples: Samples, sampling: SamplingParams
    ) -> tuple[Sequence[ModelInput], SamplingParams]:
        """Return the prompts that the environments give: one per sample, unless those of a row are alike."""
        most, n = self.engine.max_prompt_tokens, sampling.n
        inputs = self._on_first_rank(lambda: self.environment.begin(samples, max_prompt_tokens=most))
        keys = [each.prompt_key for each in inputs]
        if all(keys[place] == keys[place - place % n] for place in range(len(keys))):
            return inputs[::n], sampling
        return inputs, replace(sampling, n=1)

    def resume(self, samples: Samples, completions: Sequence[Completion]) -> None:
        """Bring environments to the state of unfinished responses."""
        self._on_first_rank(lambda: self.environment.resume(samples, completions))

    def finish(self, completions: Sequence[Completion]) -> tuple[Sequence[Completion], Mapping[str, Column]]:
        """Return the final completions, with their prompts, rewards and conversations."""
        settled, columns = self._on_first_rank(lambda: self.environment.finish(completions, self.functions))
        prompts = Ragged.from_list([completion.prompt for completion in settled], dtype=torch.int64)
        return settled, {**super().finish(settled)[1], "prompt_ids": prompts, **columns}

    def close(self) -> None:
        """Close the environments of responses that no later call continues."""
        if self.environment.partner_queue is not None:
            self.environment.partner_queue.close()
        if not self.keeps_unfinished:
            self.environment.close()


class Dialogues(ABC):
    """Makes the dialogues of a run.

    Args:
        bounds: Limits on turns, and on the environment's time.
    """

    gives_rewards: bool
    """Whether environments may reward responses."""
    writes_prompts: bool
    """Whether environments may write prompts."""

    def __init__(self, bounds: Conversation) -> None:
        self.bounds = bounds

    @property
    def described(self) -> str:
        """Turns of a response, and the tools that are known without a row."""
        return f"at most {self.bounds.max_turns} turns"

    @abstractmethod
    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Collection[int],
        data: object,
        speakers: Mapping[str, Speaker],
        find_processor: FindProcessor,
    ) -> None:
        """Check, once the actor is there, that the environment can be used.

        Args:
            tokenizer: The actor's.
            stop_token_ids: Tokens that end a turn of the actor.
            data: Data module, whose rows are checked and whose settings chat templates get; None: none.
            speakers: Role -> tokenizer and ends of turns, of models that environments talk to and that have their own.
            find_processor: Returns the actor's processor of images; None for a model of text.

        Raises:
            ConfigError: if it cannot be used.
        """

    @abstractmethod
    def make(self, engine: Engine, prompts: Samples, sampling: SamplingParams, *, continues: bool) -> Dialogue:
        """Return the dialogue of one call.

        Args:
            engine: Engine of the call.
            prompts: Prompts of the call.
            sampling: Sampling of ``n`` responses per prompt.
            continues: Whether unfinished responses continue in a later call.
        """

    def close(self) -> None:  # noqa: B027
        """Release what unfinished responses hold, at the end of a run."""


class TokenDialogues(Dialogues):
    """One environment of tokens for all samples of a rank."""

    gives_rewards = writes_prompts = False

    def __init__(self, environment: EnvironmentSource, bounds: Conversation) -> None:
        super().__init__(bounds)
        self._found = import_environment(environment)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._environment: Environment | None = None

    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Collection[int],
        data: object,
        speakers: Mapping[str, Speaker],
        find_processor: FindProcessor,
    ) -> None:
        self._tokenizer = tokenizer

    def make(self, engine: Engine, prompts: Samples, sampling: SamplingParams, *, continues: bool) -> Dialogue:
        if self._environment is None:  # on ranks that generate alone
            assert self._tokenizer is not None, "the models are there before they generate"
            self._environment = make_environment(self._found, self._tokenizer)
        return Dialogue(RowEnvironment(self._environment, prompts, sampling.n), self.bounds)


class EpisodeDialogues(Dialogues):
    """An environment of messages for each sample."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        parser: Parser | None,
        bounds: Conversation,
        partners: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(bounds)
        self.factory = factory
        self._partners = partners
        self.gives_rewards, self.writes_prompts = factory.gives_rewards, factory.writes_prompts
        self._parser = parser
        self._options: EpisodeOptions | None = None
        self.functions: RewardFunctions | None = None
        """The algorithm's reward functions, of which some may read environments."""
        self._queue: PartnerQueue | None = None
        """Questions to models that environments talk to."""
        self._continued: Episodes | None = None
        """Episodes of unfinished responses, and those that continue them."""

    @property
    def described(self) -> str:
        names = ", ".join(tool.name for tool in self.factory.tools)
        return f"{super().described}{names and f'; tools: {names}'}"

    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Collection[int],
        data: object,
        speakers: Mapping[str, Speaker],
        find_processor: FindProcessor,
    ) -> None:
        parser = TurnParser(tokenizer, self._parser)
        stops = frozenset(stop_token_ids)
        own = {role: _voice(role, one) for role, one in speakers.items()}
        voices = {name: own.get(role) or Voice(role, parser, stops) for name, role in self._partners.items()}
        self._queue = self._queue or PartnerQueue()  # one for episodes that go on, too
        partners = PartnerSettings(voices, self._queue) if voices else None
        template = getattr(data, "chat_template_kwargs", {})
        options = EpisodeOptions(
            self.factory, tokenizer, stops, template, parser, self.bounds, partners, find_processor
        )
        schemas = [tool.schema for tool in self.factory.tools]
        chat, _ = options.chat({})
        chat.check(schemas)
        parser.check(schemas, chat.shown_call(schemas) if schemas else ())
        for table in getattr(data, "tables", {}).values():
            self.factory.check_rows(table.data)
        self._options = options

    @property
    def parser(self) -> TurnParser:
        """Parser of turns, once the environment is prepared."""
        assert self._options is not None, "the environment is prepared with the models"
        return self._options.parser

    def make(self, engine: Engine, prompts: Samples, sampling: SamplingParams, *, continues: bool) -> Dialogue:
        assert self._options is not None, "the environment is prepared with the models"
        if self._options.partners is not None:
            self._options.partners.queue.open(engine, sampling)
        if not continues:
            return EpisodeDialogue(Episodes(self._options), self.bounds, engine, self.functions)
        self._continued = self._continued or Episodes(self._options)
        return EpisodeDialogue(self._continued, self.bounds, engine, self.functions, keeps_unfinished=True)

    def close(self) -> None:
        if self._options is not None and self._options.partners is not None:
            self._options.partners.queue.close()
        if self._continued is not None:
            self._continued.close()


def processor_finder(actor: nn.Module, tokenizer: PreTrainedTokenizerBase, data: object) -> FindProcessor:
    """Return a function that returns the actor's processor of images, or None for a model of text.

    The processor is the data module's, else that of the tokenizer. It is loaded here: ranks that only train read images
    of answers, too. An error is left to the function: environments of a run may show no images.
    """
    if not placeholder_ids(actor):
        return lambda: None
    of_tokenizer = ProcessorOfTokenizer({})

    def find() -> ImageProcessor | None:
        if isinstance(data, RowTables):
            return data.image_processor
        return of_tokenizer.find(tokenizer, None)

    with suppress(DataError):
        find()
    return find


def _voice(role: str, speaker: Speaker) -> Voice:
    """Return how a model of its own is talked to.

    Raises:
        ConfigError: for a tokenizer without a chat template.
    """
    chat = ChatTurns(speaker.tokenizer, stop_token_ids=speaker.stop_token_ids)
    try:
        chat.check()
    except ConfigError as error:
        raise ConfigError(f"{role}: {error}") from error
    return Voice(role, TurnParser(speaker.tokenizer), speaker.stop_token_ids, chat)


def dialogues_of(
    environment: EnvironmentSource | None,
    tools: Sequence[ToolSource],
    parser: Parser | None,
    conversation: Conversation | None,
    partners: Mapping[str, str] = MappingProxyType({}),
) -> Dialogues | None:
    """Return the dialogues for an algorithm's settings; None without an environment.

    Raises:
        ConfigError: for settings that cannot be used together, or of which no environment can be made.
    """
    if environment is None and partners:
        raise ConfigError(
            f"partners={list(partners)} are talked to by environments, and there is none; give environment= a class of "
            f"MessageEnvironment"
        )
    if environment is None and not tools:
        if conversation is not None:
            raise ConfigError(f"{conversation} bounds a conversation without environment; give environment= too")
        if parser is not None:
            raise ConfigError(f"parser={parser!r} reads the calls of tools, and there are none; give tools= too")
        return None
    bounds = conversation or Conversation()
    if environment is None or is_message_source(environment):
        factory = EnvironmentFactory(environment, tools, tool_deadline_s=bounds.deadline_s / 2)
        return EpisodeDialogues(factory, parser, bounds, partners)
    for name, setting in (("tools", tools), ("parser", parser), ("partners", partners)):
        if setting:
            raise ConfigError(
                f"{name}={setting!r} needs messages, and environment={environment!r} answers in tokens; give a class "
                f"of MessageEnvironment, or leave {name} out"
            )
    return TokenDialogues(environment, bounds)
