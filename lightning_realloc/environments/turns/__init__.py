"""Turns as messages and as tokens: `ChatTurns` makes tokens of messages, `TurnParser` a message of the text."""
