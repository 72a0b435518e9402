"""How a run's environments are made, read and bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_realloc.data.chat import template_input
from lightning_realloc.data.images.sample_images import ImageProcessor
from lightning_realloc.environments.environment_factory import EnvironmentFactory
from lightning_realloc.environments.partner import PartnerSettings
from lightning_realloc.environments.turns.chat_turns import ChatTurns
from lightning_realloc.environments.turns.turn_parser import TurnParser
from lightning_realloc.generation import Conversation


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """Settings of all episodes of a run."""

    factory: EnvironmentFactory
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    """Tokens that end a turn of the model."""
    template: Mapping[str, Any]
    """Settings of the chat template, which a row's column ``chat_template_kwargs`` overrides."""
    parser: TurnParser
    bounds: Conversation
    partners: PartnerSettings | None = None
    """Models that environments may talk to; None: none."""
    find_processor: Callable[[], ImageProcessor | None] = lambda: None
    """Returns the model's processor of images; None for a model of text."""

    def chat(self, row: Mapping[str, Any]) -> tuple[ChatTurns, Sequence[Mapping[str, Any]]]:
        """Return the chat of a row, and the schemas in its column ``tools``."""
        settings = template_input(row, "a row with an environment", self.template)
        tools = settings.pop("tools") or ()
        return ChatTurns(self.tokenizer, stop_token_ids=self.stop_token_ids, template=settings), tools
