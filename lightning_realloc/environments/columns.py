"""Columns of responses that environments of messages answered, one value per response."""

from __future__ import annotations

REWARDS = "environment_rewards"
"""(B,) float32: the environments' rewards; NaN where there is none."""
FUNCTIONS = "reward_of_environment/"
"""Beginning of the columns (B,) float32 of reward functions that read environments; NaN where one does not apply."""
TURN_REWARDS = "record/turn_rewards"
"""Ragged float32: the rewards of each response's turns; 0 where a turn has none."""
CONVERSATION = "record/conversation"
"""Ragged uint8, as of `json_column`: ``prompt`` and ``messages`` of a response; ``seconds`` of the environment and
``rewards`` by turn; ``metrics`` by name; ``failure`` of the environment, or None."""
SECONDS = "environment_s"
"""(B,) float32: seconds that the environment took in all turns."""
NUM_CALLS = "num_tool_calls"
"""(B,) int64: calls of tools by the model."""
OWN_METRICS = "environment/"
"""Beginning of columns (B,) float32 of environments' own metrics, such as ``environment/solved``; NaN for none."""
TOOL_METRICS = ("tool_calls", "tool_failures", "tool_s")
"""(B,) float32, one column for each tool, such as ``tool_calls/search``: calls, those that failed, and seconds."""
