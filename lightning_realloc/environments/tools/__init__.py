"""Tools: functions that a model may call, and how its calls are carried out.

Begin with `Tool`. `tool_calls.ToolRunner` answers the calls of a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_realloc.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_realloc.environments.tools.tool import Tool as Tool

__getattr__, __dir__ = lazy_names(__name__)
