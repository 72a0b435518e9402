"""Environments of messages: tools, games and simulated users that answer the model's turns, one object per sample.

Begin with `message_environment.MessageEnvironment`. `environment_factory.EnvironmentFactory` makes them of the settings
``environment=`` and ``tools=``. Engines know tokens alone: they ask a
`generation.Environment`. `turns.turn_parser.TurnParser` makes a message of the model's text, and
`turns.chat_turns.ChatTurns` the tokens of prompts and answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_realloc.environments.message_environment import Message as Message
    from lightning_realloc.environments.message_environment import MessageEnvironment as MessageEnvironment
    from lightning_realloc.environments.message_environment import StepResult as StepResult
    from lightning_realloc.environments.partner import Partner as Partner
    from lightning_realloc.environments.tool_environment import ToolEnvironment as ToolEnvironment
    from lightning_realloc.environments.tools.tool import Tool as Tool

__getattr__, __dir__ = lazy_names(__name__)
